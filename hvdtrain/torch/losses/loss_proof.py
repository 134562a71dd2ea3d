"""The proof, in every backward pass, that the user's loss can be put together of pieces, weighed as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvdtrain.core.errors import HvdtrainError
from hvdtrain.torch.losses.loss_graph import UNNAMED, Reader, Reading, Term
from hvdtrain.torch.losses.replay import (
    CannotTry,
    Output,
    Recording,
    Replay,
    meet,
    of_one_each,
    reweighed,
    tolerance,
    weights_like,
)
from hvdtrain.torch.losses.tally import Number, Tally, double, refusal
from hvdtrain.values.nested import tensors_of
from hvdtrain.world.world import World

_COUPLED = (
    "samples are compared with each other: the loss is no sum over samples (contrastive, the hardest of the batch, a"
    " ratio or root of sums)"
)
_REWEIGHED = (
    "what a sample counts depends on other samples' targets (weights made of the batch's classes, or divided by their"
    " mean)"
)
_OUTPUTS = 256, 16  # that are held, of a loader's batch (a call for each sample), of calls that nobody counts
_RECORDED = 32  # first losses, each of which may be of a new form; then those that are tried anyway
_EACH = ["", ""]  # to type: more than one
_FORMS = 8  # of losses that are tried as they come


class Looked(NamedTuple):
    """A loss of a batch."""

    loss: Tensor  # a scalar
    weight: Number  # what counts it
    samples: int  # in the batch; 0: not known
    given: object = None  # the weight as the caller gave it; None: it counts by samples
    more: bool = False  # another loss of this batch was looked at just before, with the same weight


class LossProof:
    """Reads and tries the losses of one prepared model, whose update has `pieces` micro-batches of a rank. Not to
    `verify`: losses are read only; `counted`: batches come from a loader."""

    def __init__(self, world: World, pieces: int, *, verify: bool, counted: bool = True) -> None:
        self._world = world
        self._batch: Any = None  # that `outputs` are of
        self._unseen = not verify  # losses are read, and not tried
        self._held = _OUTPUTS[not counted]
        self._reader = Reader()
        self.needed = world.size * pieces > 1
        # of the model in the batch at hand; None while they are not wanted
        self.outputs: list[Output] | None = [] if self.needed else None
        self._recording: Recording | None = None
        self._given: list[tuple[Tensor, int]] = []  # of the batch at hand, each with its version
        self._losses = 0  # seen
        self._epoch: object = None
        self.is_due = False  # the loss at hand is tried whatever its form is (`tries`)
        self.refused = False  # an update was: losses are tried until one passes
        self.problem = ""  # why no weight makes this rank's loss right
        self.suspicion = ""  # what the whole batch against its pieces has shown
        self._types: list[str] = []
        self._noted: set[str] = set()
        self._pieces = pieces
        self._forms: set[frozenset[str]] = set()  # of losses that were tried
        self._record_until = _RECORDED  # losses; a new form that was not recorded may come again an epoch later
        self._in_a_loop = False  # over samples, each alone
        self._suspects = False  # a weight that is clamped where nothing counts
        self._divided: dict[float, int] = {}  # numbers that divided sums, and over how many samples

    def pause(self) -> None:
        """Stops recording, as the model computes: what is recorded is the loss."""
        if self._recording is not None:
            self._recording.pause()
        Recording.leave()

    def forget(self) -> None:
        """Drops what was recorded, and the outputs: no loss came of them."""
        self.pause()
        self._recording, self._given = None, []
        if self.outputs is not None:
            self.outputs = []

    def refuse(self) -> None:
        """Notes that an update was refused: the same batch may come again."""
        self._batch, self.refused = None, True
        self.problem = ""

    def tries(self, batch: Any) -> bool:
        """Returns True if the next loss is tried whatever its form is: losses 1, 2, 4, 8 ..., an epoch's first, and
        those after a refusal."""
        next_one = self._losses + 1
        is_due = self.refused or next_one & self._losses == 0 or self._epoch != getattr(batch, "place", (0,))[0]
        return self.outputs is not None and not self._unseen and is_due

    def tracked(self) -> list[Tensor]:
        return [one.tensor for one in self.outputs or () if one.tensor.requires_grad]

    def begin(self, values: Any, batch: Any) -> None:
        """Takes note of a batch as the loader hands it out: a weight that is made of its targets before the model is
        called is part of its loss."""
        if self.outputs is None or self._unseen or batch is self._batch:
            return
        self.forget()
        self.is_due, self._batch = self.tries(batch), batch
        self._given = [(tensor, tensor._version) for tensor in tensors_of(values)]
        if self.is_due:
            self._recording = Recording()
            self._recording.start()

    def saw(self, out: Any, batch: Any = None) -> None:
        """Takes note of what the model gave for a batch whose backward pass is due; of the last call alone where none
        is (a validation pass with gradients), so that no graph is held for nothing."""
        if self.outputs is None:
            return
        same = batch is not None and batch is self._batch
        if not same:
            self.forget()
            self.is_due = self.tries(batch)
        noted = (Output(tensor, tensor._version, head) for head, tensor in enumerate(tensors_of(out)))
        self.outputs = [*self.outputs[-self._held :], *noted]
        self._batch = batch
        wanted = self._losses < self._record_until or self.is_due or self._suspects
        if batch is not None and wanted and not self._unseen:
            self._recording = self._recording or Recording()
            self._recording.called()
            self._recording.start()

    def look_idle(self, loss: Tensor, weight: Number, tally: Tally) -> None:
        """Has a batch of weight 0 refused if its outputs have a gradient; on a GPU, unless weights have a penalty."""
        self.pause()
        if isinstance(weight, Tensor):
            idle = (weight == 0) & (loss.detach().abs().to(weight.device) > 0)  # NaN is not greater
            if not self._reader.read(loss, 0).penalised:
                tally.problems = tally.problems + idle.double()
        elif not weight and abs(loss.item()) > 0:
            outputs = self.tracked()
            found = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True) if outputs else (None,)
            if not outputs or any(one is not None and bool(one.any()) for one in found):
                self.found(f"a loss of {loss.item():g} with weight=0, which would not count", tally)

    def look(self, looked: Looked, tally: Tally, by_model: Callable[[], str] | None = None) -> None:
        """Compares what the loss divides by with its weight, without asking a GPU for numbers; and tries whether it
        compares samples, which waits for a GPU. `by_model` tries a loss that the model gives, and nothing else."""
        self.pause()
        if not self.needed or (self._unseen and tally.given):
            return
        given = looked.given is not None and isinstance(looked.weight, float)
        reading = self._reader.read(looked.loss, looked.samples, float(looked.weight) if given else None)
        if not self._unseen:
            is_new = reading.form not in self._forms and len(self._forms) < _FORMS
            is_new |= reading.chooses and self._losses < _RECORDED
            if (self.is_due or is_new) and looked.samples > 1 and float(looked.weight):
                if self._recording is not None:
                    self._try(looked, reading, tally, by_model)
                    self._forms.add(reading.form)
                else:
                    self._record_until = 2 * self._losses + 2
        self._read(reading, looked, tally)
        if looked.given is not None and looked.samples > 1 and not self._unseen:
            self._look_clamped(looked, tally)

    def look_whole(self, loss: Tensor, samples: int, every: int) -> None:
        """Reports a loss of the whole batch of `every` samples that is divided by this rank's `samples`."""
        if samples in (0, 1, every):
            return
        for term in self._reader.read(loss, every).terms:
            if term.reduced and not term.mean and samples in term.numbers:
                self._note(
                    f"a sum over the whole batch of {every} samples is divided by {samples}, the samples of this rank;"
                    " divide by the number that hvt.whole gave: len(outputs)"
                )

    def _look_clamped(self, looked: Looked, tally: Tally) -> None:
        """Has a batch refused in which nothing counts, and whose weight is not 0: `max(n, 1)`. Asks no GPU, unless the
        loss is tried anyway; where it was not recorded, the next ones are."""
        waits = isinstance(looked.weight, Tensor) or looked.loss.is_cuda
        if (waits and not self.is_due) or not 0 < float(looked.weight) <= 1 or looked.loss.item() != 0:
            return
        self._suspects = True
        recorded = [one for one in self.outputs or () if one.tensor.requires_grad]
        if self._recording is None or not recorded:
            return
        try:
            empty = Replay(self._recording, looked.loss, recorded).counts_nothing([one.tensor for one in recorded])
        except CannotTry:  # which one line has reported
            return
        if empty:
            problem = f"nothing counts, and the weight is {float(looked.weight):g}: clamp what divides, not weight="
            self.found(problem, tally)

    def close_batch(self) -> None:
        """Notes that all losses of a batch were examined."""
        self._losses += 1
        self._epoch = getattr(self._batch, "place", (0,))[0]
        self.forget()

    def _read(self, reading: Reading, looked: Looked, tally: Tally) -> None:
        weight, samples = looked.weight, looked.samples
        across = list(dict.fromkeys(name for name, _ in reading.across))
        across = across or (reading.one_by_one if samples == 1 and not self._in_a_loop else [])
        if across:
            self.found(f"{_COUPLED} ({', '.join(across)})", tally, weight)
        if reading.unknown:
            tally.divisors = math.nan
            if not tally.given:
                self._note(
                    f"what the loss divides by cannot be read off its graph ({', '.join(reading.unknown)}): batches"
                    " count by their samples"
                )
            return
        terms = reading.terms
        self._in_a_loop |= self._unseen and reading.parts and samples > 1
        if self._in_a_loop and reading.parts:  # what divides a sample's own part is that sample's
            terms = [Term(float(samples), "its samples", mean=True, reduced=True, means=(float(samples),))]
        tally.compare(terms, weight, samples, more=looked.more)
        # each with its number, where nothing waits for it: two of one name are two counts
        divisors = ((term.weight, double(term.divisor)) for term in terms if term.weight)
        counts = {(weight, None if isinstance(number, Tensor) else number) for weight, number in divisors}
        types = sorted(weight for weight, _ in counts)
        # label smoothing divides one part by labels, which can be named, and the other by their number
        self._types = [text for text in types if text != UNNAMED] or types
        if looked.more:
            self._types = _EACH
        if any(term.reduced and not term.mean and not term.numbers for term in terms):
            self.found("the loss is a sum that nothing divides", tally, weight)
        elif samples and not tally.given:
            self._count(terms, weight, samples, tally)

    def _count(self, terms: Sequence[Term], weight: Number, samples: int, tally: Tally) -> None:
        """Checks that a sum is divided by this piece's samples, or by a number made from them."""
        alone = [term for term in terms if term.mean and not term.counts(samples)]
        if samples > 1 and alone and len(alone) % samples == 0:
            self.found(f"it adds up {samples} losses of one sample each, and nothing divides them", tally, weight)
        size = self._world.size
        totals = {part * samples for part in (size, self._pieces, size * self._pieces)}
        for term in terms:
            if term.mean or not term.reduced:
                continue
            if samples in term.numbers:
                self._divided.setdefault(float(samples), samples)
                continue
            counts = [number for number in term.counts(samples) if number in term.numbers]
            for number in counts:
                before = self._divided.setdefault(number, samples)
                if number == term.values:
                    continue
                if number in totals or before != samples:
                    meaning = f"as one over the whole update is (write / {number / samples:g} / len(x) if you mean it)"
                    meaning = meaning if number in totals else f"and so was one over {before}"
                    self.found(f"a sum over {samples} samples is divided by {number:g}, {meaning}", tally, weight)
            if not counts:  # the error's fix covers a number of unknown meaning
                self.found("", tally, weight)

    def _try(self, looked: Looked, reading: Reading, tally: Tally, by_model: Callable[[], str] | None) -> None:
        given, samples = self.outputs or [], looked.samples
        recorded = [one for one in given if one.tensor.requires_grad and one.tensor.dim()]
        outputs = [one.tensor for one in recorded]
        assert self._recording is not None
        if self.suspicion:
            self.found(self.suspicion, tally)
            self.suspicion = ""
            return
        problem = _COUPLED
        try:
            if not outputs and by_model is not None:  # it gives its loss and nothing else
                problem = by_model()
                if problem:
                    self.found(problem, tally)
                return
            features = Replay(self._recording, looked.loss, recorded).features(samples)
            recorded, outputs = [*recorded, *(Output(one, one._version, -1) for one in features)], [*outputs, *features]
            for weight in weights_like(self._recording, looked.given):
                replay = Replay(self._recording, looked.loss, recorded, self._given, weight)
                if meet(replay, outputs, samples) <= tolerance(outputs):
                    problem = _REWEIGHED if self._reweighs(replay, outputs, reading, looked) else ""
                problem = problem and (replay.table(samples) or problem)
                if not problem:
                    break
        except CannotTry as why:
            self._note(f"whether the loss compares samples with each other cannot be tried: {why}")
            return
        alone = bool(reading.one_by_one or reading.parts) and of_one_each(reading.nodes, recorded, samples, replay.way)
        self._in_a_loop |= alone
        if not problem and reading.one_by_one and not alone:
            problem = f"{_COUPLED} ({', '.join(reading.one_by_one)})"
        if problem:
            self.found(problem, tally)

    def _reweighs(self, replay: Replay, outputs: list[Tensor], reading: Reading, looked: Looked) -> bool:
        """Tries targets of other samples; a number of targets that divides the loss is compared elsewhere."""
        samples, given = looked.samples, looked.given is not None
        counting = [term for term in reading.terms if term.weight and not term.weight.endswith(".numel()")]
        of_samples = all(term.counts(samples) for term in reading.terms)
        of_samples = of_samples and all(float(term.divisor) % samples == 0 for term in counting)
        if counting and not (of_samples or given):
            return False
        return reweighed(replay, outputs, samples, bool(given or counting or not of_samples))

    def found(self, problem: str, tally: Tally, weight: Number = 1.0) -> None:
        """Has the update refused, on every rank, if the batch counts."""
        if isinstance(weight, Tensor):
            tally.problems = tally.problems + (weight != 0).double()
        elif not weight:
            return
        else:
            tally.problems = tally.problems + 1.0
        self.problem = self.problem or problem

    def refuse_list(self, tally: Tally) -> None:
        """Has an update refused whose means have other divisors than they were given with."""
        self.found("", tally)
        self._types = _EACH

    def _note(self, what: str) -> None:
        kind = what.partition(": [")[0]  # ragged outputs have other shapes in each step
        if kind not in self._noted and self._world.is_main:
            self._noted.add(kind)
            print(f"hvdtrain: {what}; hvdtrain.torch.check(step, batch) checks whether that is right", flush=True)

    def explain(self, tally: Tally, sums: Tensor, rates: Callable[[], list[float]]) -> Callable[[], HvdtrainError]:
        """Returns what makes the error of an update that is refused, collective when it is called."""
        problem, types = self.problem, self._types

        def error() -> HvdtrainError:
            reports = self._world.gather((tally.text(), problem, types, rates()[0]))
            texts, problems, all_types, first = map(list, zip(*reports, strict=True))
            known = next(filter(None, all_types), [""])
            return refusal(texts, sums.tolist(), self._world.size, problems, known, first)

        return error
