"""What a proof knows of a script on PyTorch, whatever averages there: its models, and its updates."""

from __future__ import annotations

import functools
import random
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hvdtrain.migrate.rank import Enough, seed


class TorchWatch:
    """Counts updates, and knows the models.

    Attributes:
        updates: steps of optimizers whose gradients are averaged; of all, where the script averages by hand.
    """

    def __init__(self, limit: int, *, wraps: bool) -> None:
        self._limit, self._wraps, self._depth = limit, wraps, Counter[int]()
        self._modules: list[nn.Module] = []  # held: at the script's end they are still to be read
        self.updates = 0
        random.seed(seed())
        np.random.seed(seed())
        torch.manual_seed(seed())
        register_optimizer_step_pre_hook(self._begins)
        register_optimizer_step_post_hook(self._ends)
        plain = nn.Module.__init__

        @functools.wraps(plain)
        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            self._modules.append(module)
            plain(module, *args, **kwargs)

        setattr(nn.Module, "__init__", init)  # noqa: B010 - mypy has it that methods stay

    def _begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth[id(optimizer)] += 1

    def _ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth[id(optimizer)] -= 1  # Horovod's step calls the one that it has inherited
        counts = not self._wraps or self.is_distributed(optimizer)
        if self._depth[id(optimizer)] or not counts:
            return
        self.updates += 1
        if self.updates == self._limit:
            raise Enough

    def is_distributed(self, optimizer: Any) -> bool:
        """Whether the gradients of what it steps are averaged over ranks."""
        raise NotImplementedError

    def tensors(self) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Parameters and buffers of the script's models, in the order in which these were made."""
        own = [
            m
            for m in self._modules
            if not type(m).__module__.startswith(("hvdtrain.", "horovod.", "torch.nn.parallel."))
        ]
        parts = {id(part) for module in own for part in module.modules() if part is not module}
        roots = [m for m in own if id(m) not in parts and any(True for _ in m.state_dict())]
        arrays, eps = {}, {}
        for number, root in enumerate(roots, 1):
            name = type(root).__name__ if len(roots) == 1 else f"{type(root).__name__} {number}"
            for key, tensor in (*root.named_parameters(), *root.named_buffers()):
                found = tensor.detach().cpu()
                small = found.is_floating_point() and found.element_size() < 4  # numpy has no bfloat16
                arrays[f"{name}: {key}"] = (found.float() if small else found).numpy().copy()
                kind = found.dtype if found.is_floating_point() or found.is_complex() else torch.float64
                eps[f"{name}: {key}"] = torch.finfo(kind).eps
        return arrays, eps
