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


class _Loader(importlib.abc.Loader):
    """A module's own loader, and then its hook, once."""

    def __init__(self, loader: Any, hooks: dict[str, Hook]) -> None:
        self._loader, self._hooks = loader, hooks

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # as if it had never been here, for code that looks for data beside the module
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        if hook := self._hooks.pop(module.__name__, None):
            hook(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, hooks: dict[str, Hook]) -> None:
        self._hooks = hooks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hook = self._hooks.pop(fullname, None)  # what finders ask below for the same name is not ours
        if hook is None:
            return None
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                spec = find(fullname, path, target) if find is not None and finder is not self else None
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _Loader(spec.loader, self._hooks)
                    return spec
            return None
        finally:
            self._hooks[fullname] = hook  # who only looks for a module does not import it


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
    """Replaces a function by `around(original, *args, **kwargs)`; does nothing if the owner does not have it."""
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)
