"""What stands for a value while a model is traced."""

from __future__ import annotations

import dis
import inspect
import operator
import types
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch import fx

from hvdtrain.pipeline.trace.shadow import length, number

_IN_PLACE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul")


class _Counted:
    """What is looped over, unpacked or counted has a length, which each pass asks for again."""

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

    def __bool__(self) -> bool:
        """An `assert` is recorded, and holds in the trace; all else that Python decides by a value cannot be."""
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        if caller is not None and _asserts(caller):
            where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
            self.tracer.create_proxy("call_function", _assert, (self, where), {})
            return True
        return self.tracer.to_bool(self)

    def __getattr__(self, name: str) -> fx.proxy.Attribute:
        return _Attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node"):
            raise AttributeError(f"a forward that sets `.{name}` of a tensor: change its numbers in place instead")
        super().__setattr__(name, value)


class _Attribute(_Counted, fx.proxy.Attribute):
    """`x.shape`, of a stand-in; or `x.size`, to be called."""


def _steps(frame: types.FrameType) -> Iterator[dis.Instruction]:
    """Where a frame is, and what follows."""
    return (step for step in dis.get_instructions(frame.f_code) if step.offset >= frame.f_lasti)


def _asserts(frame: types.FrameType) -> bool:
    """Whether the frame is at the branch of an `assert` with one condition."""
    rest = [step.opname for step in islice(_steps(frame), 3) if step.opname != "NOT_TAKEN"]
    return rest[:1] != [] and "IF_TRUE" in rest[0] and rest[1:2] == ["LOAD_ASSERTION_ERROR"]


def _assert(condition: Any, where: str) -> None:
    if not condition:
        raise AssertionError(where)


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    function = getattr(operator, f"i{name}")
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name in _IN_PLACE:
    setattr(Proxy, f"__i{_name}__", _in_place(_name))
