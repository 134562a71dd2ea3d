"""What a loader reads from: the batch that each step asks for, and one of the right shape for when there is none."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hvdtrain.core.sharding import Step
from hvdtrain.world.same_data import Digest

# (batch [n, ...], uniforms float64 [n, augment.draws]) -> batch; for example `hvdtrain.torch.crop_flip`
Augment = Callable[[Tensor, Tensor], Tensor]


class Fetched(NamedTuple):
    """What one step got.

    Attributes:
        batch: tensors, nested as the data set nests them; where no sample is left, of two real ones that do not count
            (one, where there is only one): normalisation over one would fail.
        kept: which of the step's samples are in it, when some could not be read or there are none; None is all.
        bad: the names of those that could not be read, each with the reason.
    """

    batch: Any
    kept: list[int] | None
    bad: list[tuple[str, str]]


class Source(Protocol):
    """Where batches come from."""

    @property
    def samples(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def worth_a_thread(self) -> bool:
        """There is something to do ahead on a GPU: a copy to hide, or a process to wait for."""
        ...

    def read(self, steps: Sequence[Step]) -> Generator[Fetched, None, None]:
        """Yields what the steps ask for, in order; closing it ends what it holds."""
        ...

    def digest(self) -> Digest:
        """Returns what tells this rank's data from another's."""
        ...

    def close(self) -> None: ...
