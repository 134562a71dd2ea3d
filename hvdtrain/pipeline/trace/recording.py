"""Stand-ins for values, and patches that record what torch.fx would not, for as long as a trace lasts."""

from __future__ import annotations

import builtins
import dis
import inspect
import operator
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from hvdtrain.pipeline.trace.shadow import length, number
from hvdtrain.private.torch import pytree

_IN_PLACE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul")


class _Counted:
    """A value that is looped over, unpacked or counted; each pass asks for its length again."""

    tracer: Any
    __getitem__: Callable[..., Any]

    def __iter__(self) -> Iterator[Any]:
        frame = inspect.currentframe()
        step = next(_steps(frame.f_back), None) if frame is not None and frame.f_back is not None else None
        if step is not None and step.opname == "UNPACK_SEQUENCE":
            count = self.tracer.fixed(self, step.argval)
        else:
            count = self.tracer.asked(self, length)
        return self.tracer.iter(self) if count is None else iter([self[index] for index in range(count)])

    def __index__(self) -> int:
        found = self.tracer.asked(self, number)
        if found is None:
            raise TypeError("Python needs a number that follows from data, or from how many samples there are")
        return int(found)

    def __len__(self) -> int:
        count = self.tracer.asked(self, length)
        return fx.Proxy.__len__(self) if count is None else count  # type: ignore[arg-type]


class Proxy(_Counted, fx.Proxy):
    """A stand-in for a value; unlike fx's own it keeps in-place operators in place."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __getattr__(self, name: str) -> fx.proxy.Attribute:
        return _Attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node"):
            raise AttributeError(f"a forward that sets `.{name}` of a tensor: change its numbers in place instead")
        super().__setattr__(name, value)


class _Attribute(_Counted, fx.proxy.Attribute):
    """`x.shape`, of a stand-in; or `x.size`, to be called."""


def _steps(frame: types.FrameType) -> Iterator[dis.Instruction]:
    """Yields a frame's current instruction, and those that follow."""
    return (step for step in dis.get_instructions(frame.f_code) if step.offset >= frame.f_lasti)


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    function = getattr(operator, f"i{name}")
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name in _IN_PLACE:
    setattr(Proxy, f"__i{_name}__", _in_place(_name))


# make a tensor without being given one
_Maker = Callable[[Any, Any], Any]  # of what stands in for a function
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
    makers: list[tuple[Any, str, _Maker]] = [
        *((torch, name, _asking) for name in _SETTINGS),
        (torch.autograd.graph.saved_tensors_hooks, "__enter__", _hooking),
        (builtins, "len", _counting),
        (builtins, "isinstance", _judging),
        (nn.Module, "__getattribute__", _noting),
        (torch.autograd.Function, "apply", _applying),
        *((torch, name, _recording) for name in _MAKERS),  # with stand-ins for sizes no call comes to the mode below
    ]
    with ExitStack() as patches:
        for owner, name, make in makers:
            # not getattr, which binds `apply`: from PyTorch 2.14 on a method of C's
            new = make(tracer, inspect.getattr_static(owner, name))
            patches.enter_context(mock.patch.object(owner, name, new))
        patches.enter_context(_RealTensors(tracer))
        yield


# ---- what stands in while a model is traced: each is given the tracer and the original


def _applying(tracer: Any, original: Any) -> Any:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves((args, kwargs))):
            return tracer.create_proxy("call_function", cls.apply, args, kwargs, name=cls.__name__.lower())
        return original.__get__(None, cls)(*args, **kwargs)

    return classmethod(apply)


def _recording(tracer: Any, original: Any) -> Any:
    def record(*args: Any, **kwargs: Any) -> Any:
        if not tracer.records:
            return original(*args, **kwargs)
        return tracer.create_proxy("call_function", original, args, kwargs)

    return record


def _counting(tracer: Any, original: Any) -> Any:
    def counted(value: Any) -> Any:
        """Records `len`, so that each pass asks for the number of samples: `x.view(len(x), -1)`."""
        if not isinstance(value, fx.Proxy) or not tracer.records:
            return original(value)
        known = tracer.asked(value, length)
        return tracer.create_proxy("call_function", original, (value,), {}) if known is None else known

    return counted


def _judging(tracer: Any, original: Any) -> Any:
    def is_a(value: Any, kinds: Any) -> bool:
        """A user's `isinstance(x, Tensor)` is answered for what a stand-in stands for."""
        if type(value) is not Proxy or not tracer.records or not _asks():
            return original(value, kinds)
        return original(value, kinds) or tracer.is_a(value, kinds)

    return is_a


def _noting(tracer: Any, original: Any) -> Any:
    def noted(module: nn.Module, name: str) -> Any:
        if tracer.records and not name.startswith("__"):
            tracer.read.add((module, name))  # one that is not there as well
        elif tracer.records and name == "__dict__" and _asks():  # any attribute may be read from it
            tracer.read.update((module, held) for held in original(module, name))
        return original(module, name)

    return noted


def _hooking(tracer: Any, original: Any) -> Any:
    def hooked(hooks: Any) -> Any:
        """Refuses non-reentrant checkpointing and `save_on_cpu` of every PyTorch release: a stand-in keeps nothing."""
        if not tracer.records:
            return original(hooks)
        raise ValueError(
            "torch.utils.checkpoint(use_reentrant=False), or save_on_cpu; remat='all' of split() does as much"
        )

    return hooked


def _asking(tracer: Any, original: Any) -> Any:
    """A setting that a submodule asks for is its own to ask in each pass: it is called as a whole."""

    def ask(*args: Any) -> Any:
        if not tracer.records or not _asks():
            return original(*args)
        if tracer.calls[-1].path:
            raise ValueError(f"asks for a setting: {original.__name__}")
        return tracer.create_proxy("call_function", original, args, {})  # a setting that each pass asks for

    return ask
