"""What a proof knows of a script on `DistributedDataParallel`, under torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hvdtrain.migrate.rank import wrap
from hvdtrain.migrate.torch_watch import TorchWatch


class Watch(TorchWatch):
    """Counts steps of the optimizers that have parameters of a wrapped model."""

    def __init__(self, limit: int, *, wraps: bool) -> None:
        self._parameters: list[Any] = []  # held, so that none is taken for another
        super().__init__(limit, wraps=wraps)
        wrap(DistributedDataParallel, "__init__", self._wrapped)

    def _wrapped(self, original: Callable[..., None], made: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        self._parameters += module.parameters()
        original(made, module, *args, **kwargs)

    def is_distributed(self, optimizer: Optimizer) -> bool:
        known = {id(parameter) for parameter in self._parameters}
        return any(id(one) in known for group in optimizer.param_groups for one in group["params"])

    def rank(self) -> int:
        return int(os.environ["RANK"])

    def end(self) -> None:
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
