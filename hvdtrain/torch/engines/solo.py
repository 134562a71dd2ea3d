"""One process: every collective is the identity, and the backward pass is PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.comm.engines import SoloEngine
from hvdtrain.core.launchers import Detected
from hvdtrain.torch.engines.base import Pass, Transport, device_of, pick_devices, step_of


def attach(detected: Detected, *, device: str, gpus_per_rank: int) -> Solo:
    return Solo(devices=pick_devices(detected, device, gpus_per_rank))


@dataclass(frozen=True)
class Solo(SoloEngine):
    """`TorchEngine` of one process."""

    runs_stages = True

    @property
    def device(self) -> torch.device:
        return device_of(self.devices)

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        return tensor

    def bind(self, module: nn.Module, optimizer: torch.optim.Optimizer, settings: Transport) -> SoloModel:
        return SoloModel(module, optimizer)


class SoloModel:
    """A model and its optimizer as they are."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.call: Callable[..., Any] = module
        self._optimizer = optimizer

    def backward(self, loss: Tensor, sent: Pass) -> None:
        loss.backward(retain_graph=sent.retain_graph)

    def run(self, passes: Callable[[], None], sent: Pass) -> None:
        passes()

    def finish(self) -> None:
        """Does nothing: there are no other ranks."""

    def step(self, closure: Callable[[], object] | None = None) -> None:
        step_of(self._optimizer, closure)

    def close(self) -> None:
        """Does nothing: there are no hooks."""
