"""Refuses changes of a split model that its stages would not see.

A trace keeps what the traced forward methods read from the model's modules, as it was then. Before every call that is
compared. Parts that are called as a whole read their attributes themselves, in each pass.
"""

from __future__ import annotations

import inspect
import types
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.trace.tracer import HOOKS, Program

_PLAIN = (int, float, bool, complex, str, bytes, type(None))
# compared by identity, whatever they hold
_OBJECTS = (Tensor, nn.Module, type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
_OF_A_CLASS = (types.FunctionType, property, *_PLAIN, list, tuple, set, frozenset, dict)
_TORCHS = frozenset((*dir(nn.Module), *vars(nn.Module()))) - {"forward"}
_ABSENT, _PART, _OTHER = object(), object(), object()
_DEPTH = 5  # of nested values that are compared


class FrozenModelCheck:
    """Parts, hooks and attributes of a traced model, as they were when it was split."""

    def __init__(self, program: Program) -> None:
        self._model = program.model
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
            (_joined(paths[module], name), module, name, value, _picture(value))
            for module, name in sorted(read, key=lambda one: (paths[one[0]], one[1]))
            if name not in _TORCHS
            for value in [_held(module, name)]
        ]
        # a model that differs in the two modes has a graph for each, of all modules in that mode
        self._modes = [
            (paths[module], module)
            for module, name in read
            if name == "training" and not program.is_one and paths[module] not in program.followed
        ]

    def check(self, *, training: bool) -> None:
        """Raises `ConfigError` for what has changed.

        Args:
            training: False allows hvdtrain's own hooks, which look for NaN.
        """
        for path, now, was in self._parts:
            if len(now) != len(was) or any(now.get(name) is not part for name, part in was.items()):
                name = next(name for name in {**was, **now} if now.get(name) is not was.get(name))
                _refuse(_joined(path, name), "was replaced, added or taken away", "load_state_dict(..., assign=False)")
        for path, hooks in self._hooks:
            if any(training or not _is_ours(hook) for held in hooks for hook in held.values()):
                _refuse(path or "the model itself", "got a hook, which would not be called", "hooks on its parts")
        for path, module in self._modes:
            if module.training is not self._model.training:
                modes = f"is {module.training}, and the model's own {self._model.training}"
                _refuse(_joined(path, "training"), modes, "one mode for both")
        for path, module, name, was, picture in self._values:
            now = _held(module, name)
            if was is _ABSENT and now is not was:
                _refuse(path, "was not there then", "have it there from the start, None or a buffer")
            if type(now) is not type(was) or _picture(now) != picture:
                _refuse(path, f"is {_short(now)}; the trace has what it was then", "a buffer")


def _held(module: nn.Module, name: str) -> Any:
    """A module's own attribute, else the method, property or value of its class; a mark for anything else."""
    if name in module.__dict__:
        return module.__dict__[name]
    if any(name in held for held in (module._parameters, module._buffers, module._modules)):
        return _PART
    found = inspect.getattr_static(type(module), name, _ABSENT)
    found = getattr(found, "__func__", found)
    return found if found is _ABSENT or isinstance(found, _OF_A_CLASS) else _OTHER


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("hvdtrain.")


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _short(value: Any) -> str:
    text = "not its own any more" if value is _ABSENT else " ".join(repr(value).split())
    return text if len(text) < 80 else f"{text[:77]}..."


def _refuse(what: str, how: str, instead: str) -> NoReturn:
    raise ConfigError(
        "what a model's forward reads is fixed when it is split",
        f"{what} {how}",
        f"hvdtrain.pipeline.split(...) again after the change; or {instead}",
    )


def _picture(value: Any, depth: int = _DEPTH) -> Any:
    """Returns something that is equal as long as a value's own values are."""
    if isinstance(value, _PLAIN):
        return (value,)
    if depth and isinstance(value, (list, tuple, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [(str(key), _picture(item, depth - 1)) for key, item in items]
    if isinstance(value, (set, frozenset)):
        return {item if isinstance(item, _PLAIN) else id(item) for item in value}
    held = getattr(value, "__dict__", None)
    if depth < _DEPTH or held is None or isinstance(value, _OBJECTS):
        return id(value)
    return {name: v for name, v in held.items() if isinstance(v, _PLAIN)}  # a configuration object
