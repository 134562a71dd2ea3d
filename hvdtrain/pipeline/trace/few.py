"""An example's few samples: what an operation does it does to any number of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.pipeline.values.microbatch import samples_of, unmarked
from hvdtrain.values.nested import map_tensors

FEW = 2  # samples


def device_of(model: nn.Module) -> torch.device:
    """Where a model is, as its first parameter or buffer says."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def a_few(example: tuple[Any, ...]) -> tuple[Any, ...]:
    """The example, but of no more than `FEW` samples."""
    return resized(example, min(FEW, samples_of(example)))


def resized(example: tuple[Any, ...], samples: int) -> tuple[Any, ...]:
    """The example with another number of samples, those that it has in turn."""
    batch = samples_of(example)

    def resize(leaf: Tensor) -> Tensor:
        if not leaf.dim() or len(leaf) != batch or batch == samples:
            return leaf
        if samples < batch:
            return leaf[:samples].clone()  # what is changed in place is no one's
        return leaf[torch.arange(samples, device=leaf.device) % batch]

    return map_tensors(resize, example)


def to_device(values: Any, device: torch.device) -> Any:
    """Copies, always: a pass may change its input in place. `Whole` arguments as they are given to the model."""
    return map_tensors(lambda tensor: tensor.detach().to(device, copy=True), unmarked(values))
