"""Who may import whom, read from the sources (imports inside functions and under TYPE_CHECKING count as
well).

L0 the core: the standard library, and inside functions numpy, tqdm and tensorboard; nothing above it.
L1 adapters: the core and their own framework; adapters never import each other.
L2 tools and programs: anything below but private names of another part. Nothing imports the command line.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import REPOSITORY

import hvdtrain

PACKAGE = "hvdtrain"
CORE = {
    "errors", "launchers", "engines", "world", "lr", "shard", "checkpoint", "manifest", "parts", "replicas", "transfer",
    "telemetry", "slurm", "records", "restart", "run_writer", "tensorboard", "verdict", "cores", "stats", "allocator",
    "arrival", "in_step", "in_step_watch", "same_data",
    "pipeline.plan", "pipeline.plan_simulate", "pipeline.plan_partition", "pipeline.plan_search",
}  # fmt: skip
ADAPTERS = {
    "torch": {"torch", "torchvision", "deepspeed"},
    "keras": {"keras", "tensorflow", "torch"},
    "pipeline": {"torch"},
}
# what the core may use, but only inside functions
CORE_LATE = {"numpy", "tqdm", "tensorboard"}
FRAMEWORKS = {"torch", "torchvision", "tensorflow", "keras", "horovod", "deepspeed", "jax"}


@dataclass(frozen=True)
class Import:
    """One name brought in: `module` as written in full, `late` when inside a function."""

    module: str
    name: str
    late: bool
    line: int


def imports_of(source: str, module: str) -> Iterator[Import]:
    """Yield what `source`, the text of `module`, imports."""
    tree = ast.parse(source)
    late = {
        child
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for child in ast.walk(function)
    } | {child for node in ast.walk(tree) if _is_type_checking(node) for child in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, "", node in late, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            for alias in node.names:
                yield Import(".".join([*base, *filter(None, [node.module])]), alias.name, node in late, node.lineno)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def violations(module: str, source: str) -> list[str]:
    """Return what `source`, the text of module "hvdtrain.x.y", must not import."""
    own = module.removeprefix(f"{PACKAGE}.")
    found = []
    for item in imports_of(source, module):
        rule = _broken_rule(own, item)
        if rule:
            found.append(f"{module}:{item.line} imports {item.module} {item.name}".rstrip() + f": {rule}")
    return found


def _broken_rule(own: str, item: Import) -> str:
    top = item.module.split(".")[0]
    inner = f"{item.module}.{item.name}".removeprefix(f"{PACKAGE}.").strip(".") if top == PACKAGE else ""
    part, other = own.split(".")[0], inner.split(".")[0]
    if other == "cli" and own != "cli":
        return "nothing imports the command line"
    if own in CORE:
        return _broken_core_rule(item, top, inner)
    if part in ADAPTERS:
        if other in ADAPTERS and other != part and inner not in CORE:
            return "adapters do not import each other"
        if other and other != part and not _is_core(inner) and inner not in (*hvdtrain.__all__, PACKAGE):
            return "adapters import the core only"
        if top in FRAMEWORKS - {"horovod"} - ADAPTERS[part]:
            return f"the {part} adapter knows its own framework only"
        return ""
    if inner and other != part and any(name.startswith("_") and name != "__version__" for name in inner.split(".")):
        return "other parts' private names stay private"
    return ""


def _broken_core_rule(item: Import, top: str, inner: str) -> str:
    if top == PACKAGE:
        return "" if _is_core(inner) or inner in ("__version__", PACKAGE) else "the core imports nothing above it"
    if top in sys.stdlib_module_names:
        return ""
    if top in CORE_LATE:
        return "" if item.late else "the core imports the standard library only; others inside functions"
    return "the core imports the standard library only"


def _is_core(inner: str) -> bool:
    return any(inner == name or inner.startswith(f"{name}.") for name in CORE)


def sources() -> dict[str, str]:
    folder = REPOSITORY / PACKAGE
    return {_module(path): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}


def _module(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    # a package's own file is named, so that relative imports in it resolve against the package
    return ".".join(parts)


def test_layers() -> None:
    found = [text for module, source in sources().items() for text in violations(module, source)]
    assert not found, "\n".join(found)


def test_the_core_is_all_there() -> None:
    modules = {module.removeprefix(f"{PACKAGE}.") for module in sources()}
    assert modules >= CORE


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("world", "import numpy"),
        ("world", "def f():\n    import torch"),
        ("world", "from hvdtrain.keras import prepare"),
        ("shard", "from . import cli"),
        ("lr", "import hvdtrain.datasets"),
        ("keras._engine", "import hvdtrain.torch"),
        ("keras._engine", "from ..torch import prepare"),
        ("keras.callbacks", "from hvdtrain.datasets import load_mnist"),
        ("torch.loader", "import tensorflow as tf"),
        ("torch.loader", "def f():\n    import keras"),
        ("bench.train", "from hvdtrain import cli"),
        ("keras_mnist", "from hvdtrain.keras._hook import hook"),
        ("keras_mnist", "from hvdtrain.world import _meet"),
    ],
)
def test_negative_twin(module: str, source: str) -> None:
    assert violations(f"{PACKAGE}.{module}", source), "this must be seen as a violation"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("world", "import os\nfrom hvdtrain.errors import ConfigError\nfrom hvdtrain import __version__"),
        ("shard", "def f():\n    import numpy as np"),
        ("shard", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy"),
        (
            "keras._engine",
            "import keras, tensorflow, numpy\nimport horovod.tensorflow\nfrom . import _backend",
        ),
        ("keras._engine", "import hvdtrain\nfrom hvdtrain import World\nfrom hvdtrain.world import Detected"),
        (
            "keras_mnist",
            "import hvdtrain\nfrom hvdtrain.keras import prepare\nfrom hvdtrain.datasets import load_mnist",
        ),
        ("cli", "from hvdtrain.bench import train"),
    ],
)
def test_what_is_allowed(module: str, source: str) -> None:
    assert not violations(f"{PACKAGE}.{module}", source)
