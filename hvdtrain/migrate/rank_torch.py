"""Watches a script on PyTorch for a proof: its models and updates; makes random streams of both scripts equal."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hvdtrain.guard.hooks import wrap
from hvdtrain.migrate.rank import Enough, seed
from hvdtrain.values.generators import of_all_gpus


class TorchScriptWatch:
    """Counts updates, and knows the models.

    Attributes:
        updates: steps of optimizers whose gradients are averaged; of all, where the script averages by hand.
        start: the tensors of the models before the first of them.
    """

    def __init__(self, limit: int, *, wraps: bool) -> None:
        self._limit, self._wraps, self._depth = limit, wraps, Counter[int]()
        self._modules: list[nn.Module] = []  # held: at the script's end they are still to be read
        self._distributed: list[Any] = []  # optimizers that are wrapped, or prepared
        self.updates, self.start = 0, dict[str, np.ndarray]()
        random.seed(seed())
        np.random.seed(seed())
        torch.manual_seed(seed())
        register_optimizer_step_pre_hook(self._begins)
        register_optimizer_step_post_hook(self._ends)
        wrap(nn.Module, "__init__", self._made)
        wrap(hvd, "DistributedOptimizer", self._wrapped)
        wrap(hvd, "broadcast_optimizer_state", self._not_counted)
        self._alike_in_hvdtrain()

    def _made(self, original: Callable[..., None], module: nn.Module, *args: Any, **kwargs: Any) -> None:
        self._modules.append(module)
        original(module, *args, **kwargs)

    def _begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.start:
            self.start = self.tensors()[0]
        self._depth[id(optimizer)] += 1

    def _ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth[id(optimizer)] -= 1  # Horovod's step calls the one that it has inherited
        counts = not self._wraps or any(optimizer is one for one in self._distributed)
        if self._depth[id(optimizer)] or not counts:
            return
        self.updates += 1
        if self.updates == self._limit:
            raise Enough

    def tensors(self) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Returns parameters and buffers of the script's models, in the order in which these were made."""
        own = [m for m in self._modules if not type(m).__module__.startswith(("hvdtrain.", "horovod."))]
        parts = {id(part) for module in own for part in module.modules() if part is not module}
        roots = [m for m in own if id(m) not in parts and any(True for _ in m.state_dict())]
        arrays, eps = {}, {}
        for number, root in enumerate(roots, 1):
            name = f"{type(root).__name__} {number}"
            for key, tensor in (*root.named_parameters(), *root.named_buffers()):
                found = tensor.detach().cpu()
                small = found.is_floating_point() and found.element_size() < 4  # numpy has no bfloat16
                arrays[f"{name}: {key}"] = (found.float() if small else found).numpy().copy()
                kind = found.dtype if found.is_floating_point() or found.is_complex() else torch.float64
                eps[f"{name}: {key}"] = torch.finfo(kind).eps
        return arrays, eps

    def _wrapped(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._distributed.append(optimizer := original(*args, **kwargs))
        return optimizer

    def _not_counted(self, original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Horovod makes the state that it sends over to by a step without gradients."""
        self._depth[id(optimizer)] += 1
        original(optimizer, *args, **kwargs)
        self._depth[id(optimizer)] -= 1

    def _alike_in_hvdtrain(self) -> None:
        """Undoes hvdtrain's seeding: it gives each rank another stream of random numbers."""
        import hvdtrain
        import hvdtrain.torch

        def init(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with of_all_gpus().preserved():
                return original(*args, **kwargs)

        def prepare(original: Callable[..., Any], model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._distributed += optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
            return init(original, model, optimizer, *args, **kwargs)

        wrap(hvdtrain, "init", init)
        wrap(hvdtrain.torch, "prepare", prepare)

    def rank(self) -> int:
        return int(hvd.rank())

    def end(self) -> None:
        hvd.barrier()
        hvd.shutdown()
