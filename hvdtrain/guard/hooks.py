"""What a script imports is changed right after its import, and nothing is imported that it does not import."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

Hook = Callable[[ModuleType], None]


def _hook_after(loader: Any, hook: Hook) -> None:
    """Has a module's own loader call the hook after it has run the module, once."""

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        loader.exec_module(module)
        hook(module)

    loader.exec_module = exec_module


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, hooks: dict[str, Hook]) -> None:
        self._hooks = hooks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hook = self._hooks.pop(fullname, None)  # what is asked below for the same name is no longer ours
        if hook is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None and finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    _hook_after(spec.loader, hook)
                return spec
        self._hooks[fullname] = hook
        return None


def install(hooks: Mapping[str, Hook]) -> None:
    """Has each module's hook called once the module is imported; at once where it is already."""
    waiting = {}
    for name, hook in hooks.items():
        if name in sys.modules:
            hook(sys.modules[name])
        else:
            waiting[name] = hook
    sys.meta_path.insert(0, _Finder(waiting))


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Puts `around(original, *args, **kwargs)` in a function's place; what the owner does not have is left alone."""
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)
