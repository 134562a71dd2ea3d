"""What is recorded of a model's forward although torch.fx would not: patches that last as long as a trace."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hvdtrain.pipeline.trace.proxy import Proxy
from hvdtrain.pipeline.trace.shadow import length

# make a tensor without being given one
_MAKERS = (
    "arange", "empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm",
    "tensor", "tril_indices", "triu_indices", "zeros",
)  # fmt: skip
# what the calling thread has set
_SETTINGS = ("is_autocast_enabled", "get_autocast_dtype", "is_inference_mode_enabled")
# where no user's code is
NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_FACTORIES = {getattr(torch, name) for name in _MAKERS}


class _RealTensors(TorchFunctionMode):
    """Records operations on tensors that are no stand-ins, as those on stand-ins are: each pass does them again.

    `torch.arange(...)`, or `next(self.parameters()).detach()`; done in the trace, their result would never change.
    """

    def __init__(self, tracer: Any) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._tracer.records or not (func in _FACTORIES or _reads(func, args, kwargs)):
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__set__":
            raise ValueError("sets a tensor's data, gradient or flag: change it in place, or outside of forward")
        return self._tracer.create_proxy("call_function", func, args, kwargs)


# what is asked about a tensor that is not in its numbers
_ABOUT = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "is_contiguous",
    "is_floating_point", "is_complex", "is_signed", "is_inference", "get_device", "has_names", "data_ptr",
    "untyped_storage", "register_hook", "is_tensor", "is_storage", "__len__", "__hash__", "__repr__", "__format__",
    "__reduce_ex__", "__deepcopy__", "result_type", "promote_types", "broadcast_shapes", "is_same_size", "is_pinned",
}  # fmt: skip
_VIEWS = {getattr(torch.Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")}


def _reads(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns True for an operation on a tensor's numbers."""
    name = getattr(func, "__name__", "")
    if name in _ABOUT or (name == "__get__" and func not in _VIEWS):
        return False
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs)))


def _asks() -> bool:
    """Returns True if the innermost call that is not this file's comes from a user's line."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals["__name__"] == __name__:
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(NOT_THE_USERS)


def users_line() -> str:
    """Returns the line of a model's code that is being run: "file:line"."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_USERS):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


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
            if not tracer.records:
                return function(*args, **kwargs)
            return tracer.create_proxy("call_function", function, args, kwargs)

        return record

    count = builtins.len

    def counted(value: Any) -> Any:
        """How many samples there are is asked in each pass: `x.view(len(x), -1)`."""
        if not isinstance(value, fx.Proxy) or not tracer.records:
            return count(value)
        known = tracer.asked(value, length)
        return tracer.create_proxy("call_function", count, (value,), {}) if known is None else known

    kind_of = builtins.isinstance

    def is_a(value: Any, kinds: Any) -> bool:
        """A user's `isinstance(x, Tensor)` is answered for what a stand-in stands for."""
        if type(value) is not Proxy or not tracer.records or not _asks():
            return kind_of(value, kinds)
        return kind_of(value, kinds) or tracer.is_a(value, kinds)

    found = nn.Module.__getattribute__

    def noted(module: nn.Module, name: str) -> Any:
        if tracer.records and not name.startswith("__"):
            tracer.read.add((module, name))  # one that is not there as well
        elif tracer.records and name == "__dict__" and _asks():  # any attribute may be read from it
            tracer.read.update((module, held) for held in found(module, name))
        return found(module, name)

    enter = torch.autograd.graph.saved_tensors_hooks.__enter__

    def hooked(hooks: Any) -> Any:
        """Non-reentrant checkpointing and `save_on_cpu` of every release of PyTorch: a stand-in keeps nothing."""
        if not tracer.records:
            return enter(hooks)
        raise ValueError(
            "torch.utils.checkpoint(use_reentrant=False), or save_on_cpu; remat='all' of split() does as much"
        )

    def asker(function: Any) -> Any:
        """A setting that a submodule asks for is its own to ask in each pass: it is called as a whole."""

        def ask(*args: Any) -> Any:
            if not tracer.records or not _asks():
                return function(*args)
            if tracer.calls[-1].path:
                raise ValueError(f"asks for a setting: {function.__name__}")
            return tracer.create_proxy("call_function", function, args, {})  # a setting that each pass asks for

        return ask

    with ExitStack() as patches:
        for name in _SETTINGS:
            patches.enter_context(mock.patch.object(torch, name, asker(getattr(torch, name))))
        patches.enter_context(mock.patch.object(torch.autograd.graph.saved_tensors_hooks, "__enter__", hooked))
        patches.enter_context(mock.patch.object(builtins, "len", counted))
        patches.enter_context(mock.patch.object(builtins, "isinstance", is_a))
        patches.enter_context(mock.patch.object(nn.Module, "__getattribute__", noted))
        patches.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(apply_or_record)))
        for name in _MAKERS:  # with stand-ins for sizes a call does not get as far as the mode below
            patches.enter_context(mock.patch.object(torch, name, recorder(getattr(torch, name))))
        patches.enter_context(_RealTensors(tracer))
        yield
