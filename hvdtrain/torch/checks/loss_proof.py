"""Whether the user's loss can be put together of pieces, weighed as they are: looked at in every backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hvdtrain.core.errors import HvdtrainError
from hvdtrain.core.world import World
from hvdtrain.torch.checks.loss_graph import UNNAMED, Reader, Reading, Term
from hvdtrain.torch.checks.replay import CannotTry, Recording, Replay, meet, of_one_each, tolerance
from hvdtrain.torch.checks.tally import Number, Tally, refusal
from hvdtrain.torch.data.nested import tensors_of

_COUPLED = (
    "samples are compared with each other: the loss is no sum over samples (contrastive, the hardest of the batch, a"
    " ratio or root of sums)"
)
_OUTPUTS = 256, 16  # that are held, of a loader's batch (a call for each sample), of calls that nobody counts
_RECORDED = 32  # first losses, each of which may be of a new form; then those that are tried anyway
_FORMS = 8  # of losses that are tried as they come


def _known(number: Number) -> float | None:
    return None if isinstance(number, Tensor) and number.device.type != "cpu" else float(number)


class LossProof:
    """Of one prepared model.

    Args:
        world: the ranks.
        pieces: micro-batches of a rank's update; with 1 of one rank there is nothing to prove.
        verify: look for losses that compare samples.
        counted: batches come from a loader.

    Attributes:
        outputs: of the model in the batch at hand, each with its version, while they are wanted.
        is_due: the loss at hand is tried whatever its form is: losses 1, 2, 4, 8 ..., and an epoch's first.
        problem: why no weight makes this rank's loss right; "" for no reason.
        suspicion: what the whole batch against its pieces has shown.
    """

    def __init__(self, world: World, pieces: int, *, verify: bool, counted: bool = True) -> None:
        self._world = world
        self._batch: Any = None  # that `outputs` are of
        self._unseen = not verify
        self._held = _OUTPUTS[not counted]
        self._reader = Reader()
        self.needed = world.size * pieces > 1
        self.outputs: list[tuple[Tensor, int]] | None = [] if self.needed and verify else None
        self._recording: Recording | None = None
        self._losses = 0  # seen
        self._epoch: object = None
        self.is_due = False
        self.problem = self.suspicion = ""
        self._types: list[str] = []
        self._noted: set[str] = set()
        self._pieces = pieces
        self._forms: set[frozenset[str]] = set()  # of losses that were tried
        self._new_form = False  # of the last loss, which was not recorded
        self._in_a_loop = False  # over samples, each by itself
        self._divided: dict[float, int] = {}  # numbers that divided sums, and over how many samples

    def pause(self) -> None:
        """Stops recording, as the model computes: what is recorded is the loss."""
        if self._recording is not None:
            self._recording.pause()

    def forget(self) -> None:
        """Drops what was recorded, and the outputs: no loss came of them."""
        self.pause()
        self._recording = None
        if self.outputs is not None:
            self.outputs = []

    def tries(self, batch: Any) -> bool:
        """Returns True if the next loss is tried whatever its form is: losses 1, 2, 4, 8 ..., and an epoch's first."""
        next_one = self._losses + 1
        is_due = next_one & self._losses == 0 or self._epoch != getattr(batch, "place", (0,))[0]
        return self.outputs is not None and is_due

    def saw(self, out: Any, batch: Any = None) -> None:
        """Takes note of what the model gave for a batch whose backward pass is due; of the last call alone where none
        is (a validation pass with gradients), so that no graph is held for nothing."""
        if self.outputs is None:
            return
        same = batch is not None and batch is self._batch
        if not same:
            self.forget()
            self.is_due = self.tries(batch)
        self.outputs = [*self.outputs[-self._held :], *((tensor, tensor._version) for tensor in tensors_of(out))]
        self._batch = batch
        if batch is not None and (self._losses < _RECORDED or self.is_due or self._new_form):
            self._recording = self._recording or Recording()
            self._recording.start()

    def look_idle(self, loss: Tensor, weight: Number, tally: Tally) -> None:
        """Has a batch of weight 0 refused if its outputs have a gradient; on a GPU, unless weights have a penalty."""
        self.pause()
        if isinstance(weight, Tensor):
            idle = (weight == 0) & (loss.detach().abs().to(weight.device) > 0)  # NaN is not greater
            if not self._reader.read(loss, 0).penalised:
                tally.problems = tally.problems + idle.double()
        elif not weight and abs(loss.item()) > 0:
            outputs = [tensor for tensor, _ in self.outputs or () if tensor.requires_grad]
            found = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True) if outputs else (None,)
            if not outputs or any(one is not None and bool(one.any()) for one in found):
                self.found(f"a loss of {loss.item():g} with weight=0, which would not count", tally)

    def look(
        self, loss: Tensor, weight: Number, samples: int, tally: Tally, by_model: Callable[[], str] | None = None
    ) -> None:
        """Compares what the loss divides by with its weight, without asking a GPU for numbers; and tries whether it
        compares samples, which waits for a GPU."""
        self.pause()
        if not self.needed or (self._unseen and tally.given):
            return
        reading = self._reader.read(loss, samples)
        if self.outputs is not None:
            self._losses += 1
            self._epoch = getattr(self._batch, "place", (0,))[0]
            is_new = reading.form not in self._forms and len(self._forms) < _FORMS
            if (self.is_due or is_new) and samples > 1 and float(weight):
                self._new_form = self._recording is None
                if self._recording is not None:
                    self._try(loss, samples, reading, tally, by_model)
                    self._forms.add(reading.form)
            self.forget()
        self._read(reading, weight, samples, tally)

    def _read(self, reading: Reading, weight: Number, samples: int, tally: Tally) -> None:
        across = reading.across or (reading.one_by_one if samples == 1 and not self._in_a_loop else ())
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
            terms = (Term(float(samples), "its samples", mean=True, reduced=True, means=(float(samples),)),)
        tally.compare(terms, weight, samples)
        # each with its number, where nothing waits for it: two of one name are two counts
        counts = {(term.weight, _known(term.divisor)) for term in terms if term.weight}
        types = sorted(weight for weight, _ in counts)
        # label smoothing divides one part by labels, which can be named, and the other by their number
        self._types = [text for text in types if text != UNNAMED] or types
        if any(term.reduced and not term.mean and not term.numbers for term in terms):
            self.found("the loss is a sum that nothing divides", tally, weight)
        elif samples and not tally.given:
            self._count(terms, weight, samples, tally)

    def _count(self, terms: tuple[Term, ...], weight: Number, samples: int, tally: Tally) -> None:
        """What divides a sum must be this piece's samples, or be made of their number."""
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
                    said = "as if it were over those" if number in totals else f"and so was one over {before}"
                    self.found(f"a sum over {samples} samples is divided by {number:g}, {said}", tally, weight)
            if not counts:  # the error says what to do with a number of unknown meaning
                self.found("", tally, weight)

    def _try(
        self, loss: Tensor, samples: int, reading: Reading, tally: Tally, by_model: Callable[[], str] | None
    ) -> None:
        given = self.outputs or []
        recorded = [(tensor, version) for tensor, version in given if tensor.requires_grad and tensor.dim()]
        outputs = [tensor for tensor, _ in recorded]
        assert self._recording is not None
        if self.suspicion:
            self.found(self.suspicion, tally)
            self.suspicion = ""
            return
        try:
            if outputs or by_model is None:
                gap = meet(Replay(self._recording, loss, recorded), outputs, samples)
            else:  # it gives its loss and nothing else
                problem = by_model()
                if problem:
                    self.found(problem, tally)
                return
        except CannotTry as why:
            self._note(f"whether the loss compares samples with each other cannot be tried: {why}")
            return
        alone = bool(reading.one_by_one or reading.parts) and of_one_each(reading.nodes, outputs, samples)
        self._in_a_loop |= alone
        if gap > tolerance(outputs):
            self.found(_COUPLED, tally)
        elif reading.one_by_one and not alone:
            self.found(f"{_COUPLED} ({', '.join(reading.one_by_one)})", tally)

    def found(self, problem: str, tally: Tally, weight: Number = 1.0) -> None:
        """Has the update refused, on every rank, if the batch counts."""
        if isinstance(weight, Tensor):
            tally.problems = tally.problems + (weight != 0).double()
        elif not weight:
            return
        else:
            tally.problems = tally.problems + 1.0
        self.note_problem(problem)

    def note_problem(self, problem: str) -> None:
        """Says why this rank's loss is refused, if it is."""
        self.problem = self.problem or problem

    def _note(self, what: str) -> None:
        if what not in self._noted and self._world.is_main:
            self._noted.add(what)
            tells = "hvdtrain.torch.check(step, batch) tells whether that is right"
            print(f"hvdtrain: {what}; {tells}", flush=True)

    def explain(self, tally: Tally, sums: Tensor, rate: Callable[[], float]) -> Callable[[], HvdtrainError]:
        """Returns what makes the error of an update that is refused, collective when it is called."""
        problem, types = self.problem, self._types

        def error() -> HvdtrainError:
            reports = self._world.gather((tally.text(), problem, types, rate()))
            texts, problems, all_types, rates = map(list, zip(*reports, strict=True))
            said = next(filter(None, all_types), [""])
            return refusal(texts, sums.tolist(), self._world.size, problems, said, rates)

        return error
