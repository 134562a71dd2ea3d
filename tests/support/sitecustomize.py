"""Python reads this when it starts in a test, so that frameworks load in two thirds of the time.

- The garbage collector looks less often (frameworks make half a million objects, none of them garbage). Tests of leaks
  collect by themselves.
- PyTorch's optimizers import its compiler, a thousand modules, only to say that they are not to be compiled
  (`torch/_compile.py`, `torch/optim/optimizer.py`), and DDP to ask how it would be compiled: here it is imported when
  something else of it is asked for.
- Keras imports pandas, to know a DataFrame, and matplotlib, to draw pictures: here it finds neither.

`HVDTRAIN_TEST_IMPORTS=whole` leaves all imports as they are.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

COMPILER = "torch._dynamo"

gc.set_threshold(50_000, 20, 20)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in ("pandas", "matplotlib") and "/keras/src/" in _importer():
            raise ModuleNotFoundError(f"{fullname} is hidden from Keras in tests ({__file__})")
        if fullname == COMPILER and _importer().endswith(("/torch/_compile.py", "/torch/optim/optimizer.py")):
            return importlib.machinery.ModuleSpec(fullname, _Loader(_LaterCompiler(fullname)), is_package=True)
        if fullname.startswith(f"{COMPILER}.") and isinstance(sys.modules[COMPILER], _LaterCompiler):
            _compiler()
            return importlib.machinery.ModuleSpec(fullname, _Loader(importlib.import_module(fullname)))
        return None


class _Loader(importlib.abc.Loader):
    """Of a module that is there."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self.module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self.spec or module.__spec__


class _LaterCompiler(types.ModuleType):
    """What optimizers ask of the compiler; for anything else the compiler itself takes this place."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "utils" and _importer().endswith("/torch/nn/parallel/distributed.py"):
            return types.SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")  # the compiler's default
        return getattr(_compiler(), name)

    def graph_break(self) -> None:
        """Nothing is being compiled."""

    def disable(self, function: Callable[..., Any] | None = None, recursive: bool = True, **others: Any) -> Any:
        if function is None or others.keys() - {"wrapping"}:  # not an optimizer: `torch.compiler.disable`
            return _compiler().disable(function, recursive, **others)
        disabled: Callable[..., Any] | None = None

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal disabled
            if isinstance(sys.modules[COMPILER], _LaterCompiler):
                return function(*args, **kwargs)
            disabled = disabled or _compiler().disable(function, recursive, **others)
            return disabled(*args, **kwargs)

        return call


def _compiler() -> Any:
    if isinstance(sys.modules.get(COMPILER), _LaterCompiler):
        del sys.modules[COMPILER]
    return importlib.import_module(COMPILER)


def _importer() -> str:
    """Return the file whose code asks for the import."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame.f_code.co_filename


if os.environ.get("HVDTRAIN_TEST_IMPORTS") != "whole":
    sys.meta_path.insert(0, _Finder())
