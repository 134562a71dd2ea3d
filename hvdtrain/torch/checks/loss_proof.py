"""Whether the user's loss can be put together of pieces, weighed as they are: looked at in every backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrize import ParametrizationList

from hvdtrain.core.errors import HvdtrainError
from hvdtrain.core.world import World
from hvdtrain.torch.checks.coupling import couples, of_one_each
from hvdtrain.torch.checks.loss_graph import UNNAMED, Reader, Reading, Term
from hvdtrain.torch.checks.sample_flow import meetings
from hvdtrain.torch.checks.tally import Number, Tally, refusal
from hvdtrain.torch.data.nested import tensors_of

_COUPLED = (
    "samples are compared with each other: the loss is no sum over samples (contrastive, the hardest of the batch, a"
    " ratio or root of sums)"
)
_OUTPUTS = 256, 16  # that are held, of a loader's batch (a call for each sample), of calls that nobody counts
_FORMS = 8  # of losses that are looked at: a second derivative each


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
        outputs: of the model in the batch at hand, while they are wanted.
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
        self.outputs: list[Tensor] | None = [] if self.needed and verify else None
        self._inner: list[tuple[nn.Module, Tensor]] = []  # what the model's parts gave, since batches were normalised
        self.problem = self.suspicion = ""
        self._types: list[str] = []
        self._noted: set[str] = set()
        self._pieces = pieces
        self._forms: set[frozenset[str]] = set()  # of losses that were looked at
        self._in_a_loop = False  # over samples, each by itself
        self._divided: dict[float, int] = {}  # numbers that divided sums, and over how many samples

    @property
    def is_first(self) -> bool:
        """No loss has been looked at."""
        return self.outputs is not None and not self._forms

    def saw(self, out: Any, batch: Any = None) -> None:
        """Takes note of what the model gave for a batch whose backward pass is due; of the last call alone where none
        is (a validation pass with gradients), so that no graph is held for nothing."""
        if self.outputs is not None:
            before = self.outputs[-self._held :] if batch is not None and batch is self._batch else []
            self.outputs, self._batch = [*before, *tensors_of(out)], batch

    @contextmanager
    def seeing_parts(self) -> Iterator[None]:
        """While it lasts, notes what the parts of the model give, for a model that gives nothing but its loss."""
        hook = register_module_forward_hook(self._saw_part) if self.is_first else None
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()

    def _saw_part(self, part: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if isinstance(part, _BatchNorm) and part.training:
            self._inner = []  # samples meet in it, as they may
        elif isinstance(part, ParametrizationList):
            makers = set(part.modules())
            self._inner = [(maker, tensor) for maker, tensor in self._inner if maker not in makers]
        elif (
            isinstance(out, Tensor)
            and out.requires_grad
            and any(isinstance(arg, Tensor) and arg.is_floating_point() for arg in args)
        ):
            self._inner = [*self._inner[-self._held :], (part, out)]

    def look(self, loss: Tensor, weight: Number, samples: int, tally: Tally) -> None:
        """Compares what the loss divides by with its weight, without asking a GPU for numbers; and on the first batch
        with two samples that counts, and of a loss of another form, whether it compares them, which waits for a GPU."""
        if not self.needed or (self._unseen and tally.given):
            return
        reading = self._reader.read(loss, samples)
        if self.outputs is not None:
            if reading.form not in self._forms and samples > 1 and float(weight):
                self._look_for_meetings(loss, samples, reading, tally)
                self._forms.add(reading.form)
            self._inner = []
            self.outputs = [] if len(self._forms) < _FORMS else None
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

    def _look_for_meetings(self, loss: Tensor, samples: int, reading: Reading, tally: Tally) -> None:
        outputs = self.outputs or []
        told: bool | None = None
        try:
            told = couples(loss, outputs, samples)
            if told is None:
                inner = [t for _, t in self._inner if t.dim() and t.shape[0] == samples and samples not in t.shape[1:]]
                told = couples(loss, inner, samples)
        except (RuntimeError, NotImplementedError) as error:  # a loss that is differentiated once only
            said = str(error).splitlines()[0]
            self._note(f"whether the loss compares samples with each other cannot be told ({said})")
        alone = bool(reading.one_by_one or reading.parts) and of_one_each(reading.nodes, outputs, samples)
        self._in_a_loop |= alone
        met = meetings(loss, outputs, samples) or (() if alone else reading.one_by_one)
        if met:
            self.found(f"{_COUPLED} ({', '.join(met)})", tally)
        elif told or self.suspicion:
            self.found(_COUPLED if told else self.suspicion, tally)

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
