"""What stands for a value while a model is traced."""

from __future__ import annotations

import dis
import inspect
import operator
import types
from collections.abc import Callable
from typing import Any

from torch import fx

_IN_PLACE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul")


class Proxy(fx.Proxy):
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

    def __len__(self) -> int:
        return _length(self)


class _Attribute(fx.proxy.Attribute):
    """`x.shape`, of a stand-in; or `x.size`, to be called."""

    def __len__(self) -> int:
        return _length(self)


def _length(stand_in: Any) -> int:
    found = stand_in.tracer.length(stand_in)
    return fx.Proxy.__len__(stand_in) if found is None else found


def _asserts(frame: types.FrameType) -> bool:
    """Whether the frame is at the branch of an `assert` with one condition."""
    steps = list(dis.get_instructions(frame.f_code))
    at = next((place for place, step in enumerate(steps) if step.offset == frame.f_lasti), len(steps))
    rest = [step.opname for step in steps[at : at + 3] if step.opname != "NOT_TAKEN"]
    return rest[:1] != [] and "IF_TRUE" in rest[0] and rest[1:2] == ["LOAD_ASSERTION_ERROR"]


def _assert(condition: Any, where: str) -> None:
    if not condition:
        raise AssertionError(where)


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    function = getattr(operator, f"i{name}")
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name in _IN_PLACE:
    setattr(Proxy, f"__i{_name}__", _in_place(_name))
