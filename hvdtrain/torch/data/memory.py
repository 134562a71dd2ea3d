"""Data that fits in memory is served in whole batches: one indexing operation, not a Python call a sample."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.sharding import Step
from hvdtrain.torch.data.source import Fetched
from hvdtrain.world.same_data import Digest, of_arrays

FREE_PART = 0.25  # of a GPU's free memory that data may take; the rest is the training's


class MemoryRows(torch.utils.data.Dataset[Any]):
    """The samples of a `Memory` one by one, as a collate function of the user's takes them."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def __len__(self) -> int:
        return self._memory.samples

    def __getitem__(self, index: int) -> Any:
        row = tuple(tensor[index] for tensor in self._memory.tensors)
        return row[0] if self._memory.single else row


class Memory:
    """A `Source` of arrays; made by `memory_of`. Its tensors have samples along the first axis, and are on the
    device where they fit."""

    workers = 0

    def __init__(self, tensors: Sequence[Tensor], *, single: bool, device: torch.device) -> None:
        self.tensors = tuple(tensors)
        self.device = device
        self.single = single
        size = sum(tensor.nbytes for tensor in self.tensors)
        if device.type == "cuda" and size <= FREE_PART * torch.cuda.mem_get_info(device)[0]:
            self.tensors = tuple(tensor.to(device) for tensor in self.tensors)

    @property
    def samples(self) -> int:
        return len(self.tensors[0])

    @property
    def worth_a_thread(self) -> bool:
        return self.tensors[0].device.type != self.device.type

    def read(self, steps: Sequence[Step]) -> Generator[Fetched, None, None]:
        for step in steps:
            if step.dealt:
                yield Fetched(self.take(step.indices), None, [])
            else:
                yield Fetched(self.take(np.arange(min(2, self.samples))), [], [])

    def digest(self) -> Digest:
        return of_arrays(self.tensors)

    def take(self, indices: np.ndarray) -> Any:
        """Returns a batch of these samples; like PyTorch's, a sampler may count from the end."""
        outside = indices[(indices < -self.samples) | (indices >= self.samples)]
        if outside.size:
            raise IndexError(
                f"sample {outside[0]} was asked for, of {self.samples} that there are: look at the sampler"
            )
        indices = np.where(indices < 0, indices + self.samples, indices)
        # a copy that is waited for would wait for all the GPU has to do before it
        chosen = torch.from_numpy(indices).to(self.tensors[0].device, non_blocking=True)
        parts = tuple(tensor.index_select(0, chosen) for tensor in self.tensors)
        if self.worth_a_thread:
            parts = tuple(part.pin_memory() for part in parts)
        return parts[0] if self.single else parts

    def close(self) -> None:
        """Does nothing: only memory is held."""


def memory_of(data: Any, device: torch.device) -> Memory | None:
    """Returns the source of arrays and tensors, or a tuple of them; None for anything else (a data set). Labels
    (whole numbers, one a sample) become int64, which PyTorch's losses ask for. Raises `ConfigError` for arrays of
    different lengths, a tuple of something else, or a list where a tuple is meant."""
    if type(data) is torch.utils.data.TensorDataset:  # one of a class of its own may do more than hand out rows
        data = data.tensors
    single = isinstance(data, (np.ndarray, Tensor))
    parts = (data,) if single else data
    if isinstance(parts, list) and _looks_like_columns(parts):
        raise ConfigError(
            "arrays of all samples must be in a tuple",
            "a list of arrays of one length: " + ", ".join(str(tuple(part.shape)) for part in parts),
            "(x, y) instead of [x, y]",
        )
    if not isinstance(parts, tuple):
        return None
    if not parts or not all(isinstance(part, (np.ndarray, Tensor)) for part in parts):
        raise ConfigError(  # not taken for a data set of two samples
            "a tuple of data must contain numpy arrays or tensors",
            f"({', '.join(type(part).__name__ for part in parts)})",
            "convert each part: np.asarray(labels)",
        )
    shapes = [tuple(part.shape) for part in parts]
    if any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) != 1:
        raise ConfigError(
            "arrays must have the same length: one entry per sample",
            "shapes " + ", ".join(map(str, shapes)),
            "give (x, y) with x.shape[0] == y.shape[0]",
        )
    return Memory([_tensor(part) for part in parts], single=single, device=device)


def _looks_like_columns(parts: list[Any]) -> bool:
    """[x, y] is not meant as a data set of two samples: they have as many rows, but not as many dimensions."""
    if not parts or not all(isinstance(part, (np.ndarray, Tensor)) and part.ndim for part in parts):
        return False
    return len({part.ndim for part in parts}) > 1 and len({part.shape[0] for part in parts}) == 1


def _tensor(part: np.ndarray | Tensor) -> Tensor:
    if isinstance(part, np.ma.MaskedArray):
        raise ConfigError("arrays must have a value at every position", "a masked array", "x.filled(0.0), or similar")
    if isinstance(part, np.ndarray):
        try:
            with warnings.catch_warnings():
                # a read-only array (such as a memory map) is not copied: batches are, and nothing writes to the data
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                tensor = torch.from_numpy(np.ascontiguousarray(part))
        except (TypeError, ValueError) as error:  # a type, or a byte order
            raise ConfigError("arrays must have a dtype of PyTorch", str(error), "x.astype(np.float32)") from error
    else:
        tensor = part.detach()
    labels = tensor.ndim == 1 and not tensor.is_floating_point() and tensor.dtype != torch.bool
    return tensor.to(torch.int64) if labels else tensor
