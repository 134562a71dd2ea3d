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
from hvdtrain.torch.checks.loss_graph import UNNAMED, Reader, Term, couples
from hvdtrain.torch.checks.tally import Number, Tally, refusal
from hvdtrain.torch.data.nested import tensors_of

_COUPLED = (
    "samples are compared with each other: the loss is no sum over samples (contrastive, the hardest of the batch, a"
    " ratio or root of sums)"
)


class LossProof:
    """Of one prepared model.

    Args:
        world: the ranks.
        pieces: ranks x micro-batches of an update; with 1 there is nothing to prove.
        verify: look for losses that compare samples.

    Attributes:
        outputs: of the model in the batch at hand, while they are wanted.
        problem: why no weight makes this rank's loss right; "" for no reason.
        suspicion: what the whole batch against its pieces has shown.
    """

    def __init__(self, world: World, pieces: int, *, verify: bool) -> None:
        self._world = world
        self._reader = Reader()
        self.needed = pieces > 1
        self.outputs: list[Tensor] | None = [] if self.needed and verify else None
        self._inner: list[tuple[nn.Module, Tensor]] = []  # what the model's parts gave, since batches were normalised
        self.problem = self.suspicion = ""
        self._types: list[str] = []
        self._noted = False
        self._pieces, self._first = pieces, self.needed and verify

    def saw(self, out: Any) -> None:
        """Takes note of what the model gave, until the first loss has been looked at."""
        if self.outputs is not None:
            self.outputs += tensors_of(out)

    @contextmanager
    def seeing_parts(self) -> Iterator[None]:
        """While it lasts, notes what the parts of the model give, for a model that gives nothing but its loss."""
        hook = register_module_forward_hook(self._saw_part) if self.outputs is not None else None
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
            self._inner.append((part, out))

    def _compares(self, loss: Tensor, samples: int) -> bool | None:
        verdict = couples(loss, self.outputs or [], samples)
        if verdict is None:
            inner = [t for _, t in self._inner if t.dim() and t.shape[0] == samples and samples not in t.shape[1:]]
            verdict = couples(loss, inner, samples)
        return verdict

    def read(self, loss: Tensor, weight: Number, samples: int, tally: Tally) -> None:
        """Compares what the loss divides by with its weight, without asking a GPU for numbers."""
        if not self.needed:
            return
        reading = self._reader.read(loss)
        if reading.across:
            self.found(f"{_COUPLED} ({', '.join(reading.across)})", tally, weight)
        if reading.unknown:
            tally.divisors = math.nan
            self._note(reading.unknown, tally)
            return
        tally.compare(reading.terms, weight, samples, loss)
        types = list(dict.fromkeys(term.weight for term in reading.terms if term.weight))
        # label smoothing divides one part by labels, which can be named, and the other by their number
        self._types = [text for text in types if text != UNNAMED] or types
        if any(term.reduced and not term.divided for term in reading.terms):
            self.found("the loss is a sum that nothing divides", tally, weight)
        if self._first and samples and float(weight):
            self._first = False
            self._look_for_totals(reading.terms, float(weight), samples, tally)

    def _look_for_totals(self, terms: tuple[Term, ...], weight: float, samples: int, tally: Tally) -> None:
        """A sum over a piece that is divided by the samples of all pieces: a mean of such is too small."""
        parts = {self._world.size, self._pieces // self._world.size, self._pieces} - {1}
        for total in (part * samples for part in parts):
            if total != weight and any(total == float(by) != values for term in terms for by, values in term.sums):
                self.found(f"a sum over {samples} samples is divided by {total}, as if it were over those", tally)

    def look_once(self, loss: Tensor, weight: Number, samples: int, tally: Tally) -> None:
        """On the first batch with two samples that counts: whether the loss compares them; waits for a GPU."""
        if self.outputs is None:
            return
        if not float(weight):
            self.outputs, self._inner = [], []
            return
        verdict = self._compares(loss, samples) if samples > 1 else None
        self.outputs, self._inner = None if samples > 1 else [], []
        if verdict or self.suspicion:
            self.found(_COUPLED if verdict else self.suspicion, tally)

    def found(self, problem: str, tally: Tally, weight: Number = 1.0) -> None:
        """Has the update refused, on every rank, if the batch counts."""
        if isinstance(weight, Tensor):
            tally.problems = tally.problems + (weight != 0).double()
        elif not weight:
            return
        else:
            tally.problems = tally.problems + 1.0
        self.problem = self.problem or problem

    def _note(self, unknown: tuple[str, ...], tally: Tally) -> None:
        if self._noted or tally.given or not self._world.is_main:
            return
        self._noted = True
        print(
            f"hvdtrain: what the loss divides by cannot be read off its graph ({', '.join(unknown)}): batches count by"
            " their samples; hvdtrain.torch.check(step, batch) tells whether that is right",
            flush=True,
        )

    def explain(self, tally: Tally, sums: Tensor, rate: Callable[[], float]) -> Callable[[], HvdtrainError]:
        """Returns what makes the error of an update that is refused, collective when it is called."""
        problem, types = self.problem, self._types

        def error() -> HvdtrainError:
            reports = self._world.gather((tally.text(), problem, types, rate()))
            texts, problems, all_types, rates = map(list, zip(*reports, strict=True))
            said = next(filter(None, all_types), [""])
            return refusal(texts, sums.tolist(), self._world.size, problems, said, rates)

        return error
