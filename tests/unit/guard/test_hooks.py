"""What is imported is changed, whatever loads it."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from hvdtrain.guard import hooks


def test_a_loader_of_another_import_hook_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As import hooks chain: a loader whose `exec_module` is an attribute of its own, for two modules."""
    ran: list[str] = []
    loader = SimpleNamespace(create_module=lambda spec: None, exec_module=lambda module: ran.append(module.__name__))

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
            return importlib.util.spec_from_loader(name, loader) if name in ("hooked", "plain") else None

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    seen: list[ModuleType] = []
    hooks.install({"hooked": seen.append})
    assert importlib.util.find_spec("hooked") is not None  # as `transformers` looks whether there is a PyTorch
    for name in ("plain", "hooked"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.import_module(name)
    assert ran == ["plain", "hooked"] and [module.__name__ for module in seen] == ["hooked"]
    assert sys.modules["hooked"].__loader__ is loader
