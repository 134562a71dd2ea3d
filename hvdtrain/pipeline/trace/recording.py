"""What is recorded of a model's forward although torch.fx would not: patches that last as long as a trace."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

# make a tensor without being given one
_MAKERS = (
    "arange", "empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm",
    "tensor", "tril_indices", "triu_indices", "zeros",
)  # fmt: skip
_FACTORIES = {getattr(torch, name) for name in _MAKERS}


class _Factories(TorchFunctionMode):
    """Records `torch.arange(...)` and its like as operations."""

    def __init__(self, tracer: Any) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and not self._tracer.shadow.running:
            return self._tracer.create_proxy("call_function", func, args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def patched(tracer: Any) -> Iterator[None]:
    """Records what fx would not: functions that make tensors, and a user's `autograd.Function` as one operation
    (followed inside, its own backward would be lost); and looks at modules' attributes, in `tracer.read`."""
    apply = inspect.getattr_static(torch.autograd.Function, "apply")  # from PyTorch 2.14 on a method of C's

    def apply_or_record(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves((args, kwargs))):
            return tracer.create_proxy("call_function", cls.apply, args, kwargs, name=cls.__name__.lower())
        return apply.__get__(None, cls)(*args, **kwargs)

    def recorder(function: Any) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            if tracer.shadow.running:
                return function(*args, **kwargs)
            return tracer.create_proxy("call_function", function, args, kwargs)

        return record

    length = builtins.len

    def counted(value: Any) -> Any:
        """How many samples there are is asked in each pass: `x.view(len(x), -1)`."""
        if not isinstance(value, fx.Proxy) or tracer.shadow.running:
            return length(value)
        known = tracer.length(value)
        return tracer.create_proxy("call_function", length, (value,), {}) if known is None else known

    found = nn.Module.__getattribute__

    def noted(module: nn.Module, name: str) -> Any:
        if not tracer.shadow.running and not name.startswith("__"):
            tracer.read.add((module, name))
        return found(module, name)

    enter = torch.autograd.graph.saved_tensors_hooks.__enter__

    def hooked(hooks: Any) -> Any:
        """Non-reentrant checkpointing and `save_on_cpu` of every release of PyTorch: a stand-in keeps nothing."""
        if tracer.shadow.running:
            return enter(hooks)
        raise ValueError(
            "torch.utils.checkpoint(use_reentrant=False), or save_on_cpu; remat='all' of split() does as much"
        )

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch.autograd.graph.saved_tensors_hooks, "__enter__", hooked))
        patches.enter_context(mock.patch.object(builtins, "len", counted))
        patches.enter_context(mock.patch.object(nn.Module, "__getattribute__", noted))
        patches.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(apply_or_record)))
        for name in _MAKERS:  # with stand-ins for sizes a call does not get as far as the mode below
            patches.enter_context(mock.patch.object(torch, name, recorder(getattr(torch, name))))
        patches.enter_context(_Factories(tracer))
        yield
