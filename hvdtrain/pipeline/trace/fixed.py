"""Refuses changes of a split model that its stages would not see.

A trace keeps what the traced forward methods read from the model's modules, as it was then. Before every call that is
compared. Parts that are called as a whole read their attributes themselves, in each pass.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.trace.tracer import HOOKS, Program, is_ours, refuse_everywhere

_PLAIN = (int, float, bool, complex, str, bytes, type(None))
# compared by identity, whatever they hold
_OBJECTS = (Tensor, nn.Module, types.FunctionType, types.BuiltinFunctionType)
_OF_A_CLASS = (types.FunctionType, property, *_PLAIN, list, tuple, set, frozenset, dict)
_TORCHS = frozenset((*dir(nn.Module), *vars(nn.Module()))) - {"forward"}
_ABSENT, _PART, _OTHER = object(), object(), object()
_DEPTH = 2  # objects within one another that are compared
_LEVELS = 200  # of anything within one another that are compared
_MOST = 10_000  # values of one attribute; the others by identity


class FrozenModelCheck:
    """Parts, hooks and attributes of a traced model, as they were when it was split."""

    def __init__(self, program: Program) -> None:
        paths = {module: path for path, module in program.model.named_modules()}
        self._parts = [
            (path, held, dict(held))
            for module, path in paths.items()
            if not isinstance(module, torch.jit.ScriptModule)  # compiled: another part would be refused there
            for held in (module._modules, module._parameters)
        ]
        traced = [module for module, path in paths.items() if path in program.followed]
        self._hooks = [(paths[module], [getattr(module, name) for name in HOOKS]) for module in traced]
        read = {(module, "forward") for module in traced} | {one for one in program.read if one[0] in paths}
        self._values = [
            (_joined(paths[module], name), module, name, value, picture if picture == _Picture(value) else None)
            for module, name in sorted(read, key=lambda one: (paths[one[0]], one[1]))
            if name not in _TORCHS
            for value in [_held(module, name)]
            for picture in [_Picture(value)]  # None: no two are equal (a random state's tensor)
        ]

    def check(self, *, training: bool) -> None:
        """Raises `ConfigError` for what has changed; in evaluation hvdtrain's own hooks are allowed."""
        for path, now, was in self._parts:
            if len(now) != len(was) or any(now.get(name) is not part for name, part in was.items()):
                name = next(name for name in {**was, **now} if now.get(name) is not was.get(name))
                _refuse(_joined(path, name), "was replaced, added or removed", "load_state_dict(..., assign=False)")
        refuse_everywhere()
        for path, hooks in self._hooks:
            if any(training or not is_ours(hook) for held in hooks for hook in held.values()):
                _refuse(path or "the model itself", "has a new hook, which would not be called", "hooks on its parts")
        for path, module, name, was, picture in self._values:
            now = _held(module, name)
            if was is _ABSENT and now is not was:
                _refuse(path, "did not exist at split()", "set it before split(): None or a buffer")
            if type(now) is not type(was) or (now is not was if picture is None else _Picture(now) != picture):
                text = "deleted" if now is _ABSENT else " ".join(repr(now).split())
                text = text if len(text) < 80 else f"{text[:77]}..."
                _refuse(path, f"is {text}; the trace has its value at split()", "a buffer")


def _held(module: nn.Module, name: str) -> Any:
    """A module's own attribute, else the method, property or value of its class; a mark for anything else."""
    if name in module.__dict__:
        return module.__dict__[name]
    if any(name in held for held in (module._parameters, module._buffers, module._modules)):
        return _PART
    found = inspect.getattr_static(type(module), name, _ABSENT)
    found = getattr(found, "__func__", found)
    return found if found is _ABSENT or isinstance(found, _OF_A_CLASS) else _OTHER


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _refuse(what: str, how: str, instead: str) -> NoReturn:
    raise ConfigError(
        "what a model's forward reads cannot change after split()",
        f"{what} {how}",
        f"hvdtrain.pipeline.split(...) again after the change; or {instead}",
    )


class _Picture:
    """A record of a value, as `pickle` would write it: equal while the value's own values are. It keeps the objects.

    Tensors, modules and functions are compared by identity, and so is what lies deeper than `_DEPTH` objects: an object
    may hold the whole program. Of classes and of Python's modules the plain values are compared.
    """

    def __init__(self, value: Any) -> None:
        self._kept: dict[int, tuple[int, Any]] = {}
        self._room = _MOST
        self._written = self._of(value, _DEPTH)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Picture) and self._written == other._written

    __hash__ = None  # type: ignore[assignment]  # what is equal now may change

    def _of(self, value: Any, depth: int, level: int = 0) -> Any:
        if isinstance(value, _PLAIN):
            return (value,)
        if id(value) in self._kept:
            return "again", self._kept[id(value)][0]
        self._kept[id(value)] = len(self._kept), value
        if isinstance(value, _OBJECTS) or self._room <= 0 or level > _LEVELS:
            return id(value)
        if isinstance(value, (set, frozenset)):
            return {item if isinstance(item, _PLAIN) else id(item) for item in value}
        if isinstance(value, (list, tuple)):
            parts = tuple(value)
        elif type(value) is dict:
            parts = tuple(value.items())
        elif isinstance(value, (type, types.ModuleType)):
            kinds = [kind for kind in getattr(value, "__mro__", [value]) if not _is_a_librarys(kind)]
            parts = (
                id(value),
                *((name, v) for kind in kinds for name, v in vars(kind).items() if isinstance(v, _PLAIN)),
            )
        elif isinstance(value, (types.MethodType, weakref.ref)):
            parts = (value.__func__, value.__self__) if isinstance(value, types.MethodType) else (value(),)
        else:
            parts = (*_reduced(value), type(value)) if depth else ()
            depth -= 1
            if not parts:
                return id(value)
        self._room -= len(parts)
        return type(value), tuple(self._of(part, depth, level + 1) for part in parts)


def _is_a_librarys(kind: Any) -> bool:
    """Returns True for classes and modules of Python and PyTorch: their values are no user's."""
    name = getattr(kind, "__module__", None) or kind.__name__
    return name.partition(".")[0] in ("builtins", "torch", "numpy", "functools", "collections", "types", "enum")


def _reduced(value: Any) -> tuple[Any, ...]:
    """Returns how `pickle` would make an object again: a function, its arguments, the state; () if it cannot."""
    try:
        parts = value.__reduce_ex__(4)
    except Exception:  # a lock, a generator, a file: objects may refuse with any error
        return ()
    if isinstance(parts, str):  # the name of a global
        return ()
    return tuple(tuple(part) if isinstance(part, Iterator) else part for part in parts)  # items of a list or dict
