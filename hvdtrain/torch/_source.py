"""What a loader reads from: the batch that each step asks for, and one of the right shape for when there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hvdtrain.torch._steps import Step


class Fetched(NamedTuple):
    """What one step got.

    Attributes:
        batch: tensors, nested as the data set nests them; None when no sample is left.
        kept: which of the step's samples are in it, when some could not be read; None is all.
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

    @property
    def may_skip(self) -> bool:
        """Samples may turn out to be unreadable."""
        ...

    def read(self, steps: Sequence[Step]) -> Iterator[Fetched]:
        """Returns what the steps ask for, in order; reading ahead begins with the call."""
        ...

    def ghost(self) -> Any:
        """Returns a batch of two real samples (one, where there is only one): normalisation over one would fail."""
        ...

    def close(self) -> None: ...


def map_tensors(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Returns `batch` with every tensor in it changed; tuples (named ones too), lists and dictionaries are walked."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(change, part) for part in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(change, part) for part in batch)
    if isinstance(batch, dict):
        return type(batch)((key, map_tensors(change, part)) for key, part in batch.items())
    return batch


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns `batch` on `device`; the copy from pinned memory does not wait."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def tensors_of(batch: Any) -> list[Tensor]:
    """Returns the tensors in a batch, however it is nested."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, batch)
    return found
