"""What a trace has fixed, looked at before every call: a change that the stages would not see is refused."""

from __future__ import annotations

import copy
import dis
import inspect
import types
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.trace.tracer import HOOKS, Program

_PLAIN = (int, float, bool, complex, str, bytes, type(None))
# counted as they are, whatever they hold
_OBJECTS = (Tensor, nn.Module, type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_TORCHS = frozenset(nn.Module().__dict__)
_NONE = object()


class Fixed:
    """Modules, parameters, hooks, and the values that forward methods read, as they were when the model was split."""

    def __init__(self, program: Program) -> None:
        named = list(program.model.named_modules())
        self._parts = [
            (path, held, dict(held))
            for path, module in named
            if not isinstance(module, torch.jit.ScriptModule)  # compiled: another part would be refused there
            for held in (module._modules, module._parameters)
        ]
        followed = [(path, program.model.get_submodule(path)) for path in sorted(program.followed)]
        self._hooks = [(path, [getattr(module, name) for name in HOOKS]) for path, module in followed]
        self._values = [
            (_joined(path, name), partial(_held, module, name), value, _picture(value))
            for path, module in followed
            for name in _names_read(module)
            for value in [_held(module, name)]
        ]
        paths = {module: path for path, module in named}
        # of a module that is called as a whole, what the forward of another one looked at (`self.dropout.p`)
        beside = [
            (paths[module], name, module)
            for module, name in program.read
            if module in paths and paths[module] not in program.followed and name in module.__dict__
        ]
        self._values += [
            (_joined(path, name), partial(_held, module, name), module.__dict__[name], _picture(module.__dict__[name]))
            for path, name, module in beside
            if name not in _TORCHS
        ]
        self._model = program.model
        # the model's own forward differs in the two modes: there is a graph for each, of all modules in this mode
        self._modes = [] if program.is_one else [(path, module) for path, name, module in beside if name == "training"]
        self._absent = [
            (paths[module], name, module) for module, name in program.read if module in paths and not _has(module, name)
        ]
        self._outside = {place: seen for (_, place), seen in outside(program).items() if place not in program.written}

    def check(self, *, training: bool) -> None:
        """Raises `ConfigError` for what has changed; hvdtrain's own hooks, which look for NaN, only for a step."""
        for path, now, was in self._parts:
            if len(now) != len(was) or any(now.get(name) is not part for name, part in was.items()):
                name = next(name for name in {**was, **now} if now.get(name) is not was.get(name))
                _refuse(_joined(path, name), "was replaced, added or taken away", "load_state_dict(..., assign=False)")
        for path, hooks in self._hooks:
            if any(training or not _is_ours(hook) for held in hooks for hook in held.values()):
                _refuse(path or "the model itself", "got a hook, which would not be called", "hooks on its parts")
        for path, name, module in self._absent:
            if _has(module, name):
                _refuse(_joined(path, name), "was not there then", "have it there from the start, None or a buffer")
        for path, module in self._modes:
            if module.training is not self._model.training:
                modes = f"is {module.training}, and the model's own {self._model.training}"
                _refuse(_joined(path, "training"), modes, "one mode for both")
        for name, held, was, picture in self._values:
            now = held()
            if now is was and picture is None:
                continue
            if type(now) is not type(was) or _picture(now) != picture or (picture is None and now is not was):
                _refuse(name, f"is {_short(now)}; the trace has what it was then", "a buffer")
        for place, seen in self._outside.items():
            if _seen(*place) != seen:
                _refuse(f"{place[0]}, outside of the model,", f"has changed; the trace has {_short(seen)}", "a buffer")


def outside(program: Program) -> dict[tuple[str, Outside], Any]:
    """Returns what forward methods mention of their surroundings, by module and place: the plain values there."""
    followed = [(path, program.model.get_submodule(path)) for path in sorted(program.followed)]
    found = {
        (path, one): None for path, held in followed for function in _functions(held) for one in _outside(function)
    }
    return {key: seen for key in found if (seen := _seen(*key[1])) is not _NONE}


def _held(module: nn.Module, name: str) -> Any:
    """A module's own attribute, else the method, property or value of its class."""
    if name in module.__dict__:
        return module.__dict__[name]
    found = inspect.getattr_static(type(module), name, _NONE)
    found = getattr(found, "__func__", found)
    return found if isinstance(found, (types.FunctionType, property, *_PLAIN, *_CONTAINERS)) else _NONE


class _Place:
    """Where a function finds what is not the model's: its globals, or a variable of a function around it."""

    def __init__(self, of: dict[str, Any] | types.CellType) -> None:
        self._of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and self._of is other._of

    def __hash__(self) -> int:
        return id(self._of)

    def __call__(self, name: str) -> Any:
        if isinstance(self._of, dict):
            return self._of.get(name, _NONE)
        try:
            return self._of.cell_contents
        except ValueError:  # not yet set
            return _NONE


Outside = tuple[str, _Place, frozenset[str]]  # name, where, and all names that the function mentions


def _outside(function: types.FunctionType) -> Iterator[Outside]:
    """What a function mentions of its surroundings: name, place, and all names that it mentions."""
    names = frozenset(name for code in _codes(function) for name in code.co_names)
    loads = {step.argval for code in _codes(function) for step in dis.get_instructions(code) if "GLOBAL" in step.opname}
    yield from ((name, _Place(function.__globals__), names) for name in loads)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((name, _Place(cell), names) for name, cell in cells)


def _seen(name: str, place: _Place, names: frozenset[str]) -> Any:
    """A value there, or an object's values that are mentioned (`settings.rate`); `_NONE` where it has none."""
    value = place(name)
    if isinstance(value, _CONTAINERS):
        return _plain_part(value)
    if isinstance(value, _PLAIN):
        return (value,)
    kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
    held = {key: one for where in (*reversed(kinds), value) for key, one in getattr(where, "__dict__", {}).items()}
    return {one: held[one] for one in names if isinstance(held.get(one, _NONE), _PLAIN)} or _NONE


def _plain_part(value: Any, depth: int = 4) -> Any:
    """Numbers and words in containers, and where; not tensors and other objects, which a forward may collect there."""
    if isinstance(value, (set, frozenset)):
        return {item for item in value if isinstance(item, _PLAIN)}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    parts = [
        (str(key), (item,) if isinstance(item, _PLAIN) else _plain_part(item, depth - 1))
        for key, item in items
        if isinstance(item, _PLAIN) or (depth and isinstance(item, _CONTAINERS))
    ]
    return [part for part in parts if part[1]]


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("hvdtrain.")


def _has(module: nn.Module, name: str) -> bool:
    """Without asking properties."""
    held = (module.__dict__, module._parameters, module._buffers, module._modules)
    return any(name in one for one in held) or inspect.getattr_static(type(module), name, _NONE) is not _NONE


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _short(value: Any) -> str:
    text = "not its own any more" if value is _NONE else " ".join(repr(value).split())
    return text if len(text) < 80 else f"{text[:77]}..."


def _refuse(what: str, how: str, instead: str) -> NoReturn:
    raise ConfigError(
        "what a model's forward reads is fixed when it is split",
        f"{what} {how}",
        f"hvdtrain.pipeline.split(...) again after the change; or {instead}",
    )


def _picture(value: Any) -> Any:
    """Something equal as long as a value's own values are; None: only its identity counts."""
    if isinstance(value, _PLAIN):
        return (value,)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_inner(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _inner(item) for key, item in value.items()}
    if isinstance(value, _OBJECTS):
        return None
    held = getattr(value, "__dict__", None)  # a configuration object
    return None if held is None else {name: copy.copy(v) for name, v in held.items() if isinstance(v, _PLAIN)}


def _inner(value: Any, depth: int = 4) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if depth and type(value) in (list, tuple, dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [(str(key), _inner(item, depth - 1)) for key, item in items]
    return id(value)


def _names_read(module: nn.Module) -> set[str]:
    """Names that a module's forward mentions, and what it calls of its own; and "forward"."""
    own = _own(module)
    found = {name for function in _functions(module) for code in _codes(function) for name in code.co_names}
    # "training" may change: there is a graph for each
    return {name for name in found if name in module.__dict__ or name in own} - {"training"} | {"forward"}


def _own(module: nn.Module) -> set[str]:
    return set(dir(type(module))) - set(dir(nn.Module))


def _functions(module: nn.Module) -> Iterator[types.FunctionType]:
    """A module's forward, and what it calls of its own: methods, properties, functions that it holds."""
    own, waiting, found = _own(module), ["forward"], {"forward"}
    while waiting:
        name = waiting.pop()
        function: Any = module.__dict__.get(name) or inspect.getattr_static(type(module), name, None)
        function = getattr(function, "fget", None) or getattr(function, "__func__", None) or function
        function = inspect.unwrap(function) if callable(function) else function
        if isinstance(function, types.FunctionType):
            yield function
            new = {one for code in _codes(function) for one in code.co_names} - found
            found |= new
            waiting += [one for one in new if one in own or callable(module.__dict__.get(one))]


def _codes(function: types.FunctionType) -> Iterator[types.CodeType]:
    """Its code, and that of functions within it."""
    pending = [function.__code__]
    while pending:
        one = pending.pop()
        yield one
        pending += [constant for constant in one.co_consts if isinstance(constant, types.CodeType)]
