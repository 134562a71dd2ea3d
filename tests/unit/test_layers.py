"""Which folder may import which, read from the sources (imports inside functions and under TYPE_CHECKING count too).

    core < comm < watch < world < record < checkpoint, datasets, horovod_build, values
    < torch | keras | pipeline | guard < vision | cluster | migrate | integrations < programs < bench < commands

A folder imports what stands further left; those side by side between bars never import each other. What stands below
the adapters knows the standard library, and inside functions numpy, tqdm, tensorboard, mpi4py and pynvml; an adapter
its own framework; `values` PyTorch.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))
from sources import bodies, nodes, parsed

PACKAGE = "hvdtrain"
FLOORS = (
    {"core", "private"},
    {"comm"},
    {"watch"},
    {"world"},
    {"record"},
    {"checkpoint", "datasets", "horovod_build", "values"},
    {"torch", "keras", "pipeline", "guard"},
    {"vision", "cluster", "migrate", "integrations"},
    {"keras_mnist", "torch_resnet", "pipeline_resnet"},
    {"bench"},
    {"commands"},
    {"__main__"},
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
# on one floor, these may import each other all the same
NEIGHBOURS = {("pipeline_resnet", "torch_resnet")}
# within their floor's reach of frameworks: which part knows which
FRAMEWORKS = {"torch", "torchvision", "tensorflow", "keras", "horovod", "deepspeed", "jax"}
OWN_FRAMEWORKS = {
    **dict.fromkeys(("core", "comm", "watch", "world", "record", "checkpoint"), set()),
    "torch": {"torch", "torchvision", "deepspeed", "horovod"},
    "keras": {"keras", "tensorflow", "torch", "horovod"},
    "pipeline": {"torch"},
    "values": {"torch"},
    "private": {"torch", "keras"},
    "guard": {"torch"},
}  # fmt: skip
# what the lowest floors may use besides the standard library, but only inside functions
LATE = {"numpy", "tqdm", "tensorboard", "mpi4py", "pynvml"}
# the front door: its names come from everywhere, so nothing that it names may ask for it
FACADE = {"core", "comm", "watch", "world", "record", "checkpoint"}


@dataclass(frozen=True)
class Import:
    """One name brought in: `module` as written in full, `late` when inside a function."""

    module: str
    name: str
    late: bool
    line: int


def imports_of(source: str, module: str) -> Iterator[Import]:
    """Yields what `source`, the text of `module`, imports."""
    tree = parsed(source)
    late = {
        child
        for body in bodies(tree)
        for node in body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_type_checking(node)
        for inner in bodies(node)
        for child in inner
    }
    for node in nodes(tree):
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
    """Returns what `source`, the text of module "hvdtrain.x.y", must not import."""
    part = module.removeprefix(f"{PACKAGE}.").split(".")[0]
    found = []
    for item in imports_of(source, module):
        rule = _broken_rule(part, item)
        if rule:
            found.append(f"{module}:{item.line} imports {item.module} {item.name}".rstrip() + f": {rule}")
    return found


def _broken_rule(part: str, item: Import) -> str:
    top, _, rest = item.module.partition(".")
    if top == PACKAGE:
        other = rest.split(".")[0] or (item.name if item.name in FLOOR_OF else "")
        if not other:
            return f"{part} is named by the front door, and cannot ask for it" if part in FACADE else ""
        if other == part or part == "__init__" or (part, other) in NEIGHBOURS:
            return ""
        return "" if FLOOR_OF[other] < FLOOR_OF[part] else f"{part} stands below or beside {other}"
    if top in FRAMEWORKS - OWN_FRAMEWORKS.get(part, FRAMEWORKS):
        return f"{part} knows its own framework only"
    if part in FACADE and top not in sys.stdlib_module_names:
        if top not in LATE:
            return f"{part} knows the standard library, and {', '.join(sorted(LATE))}"
        return "" if item.late else "inside functions only"
    return ""


def sources() -> dict[str, str]:
    """Returns the text of every module of the package, by its name."""
    folder = REPOSITORY / PACKAGE
    return {_module(path): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}


def _module(path: Path) -> str:
    # a package's own file is named, so that relative imports in it resolve against the package
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)


def test_layers() -> None:
    found = [text for module, source in sources().items() for text in violations(module, source)]
    assert not found, "\n".join(found)


def test_every_folder_has_its_floor() -> None:
    assert {module.split(".")[1] for module in sources()} == {*FLOOR_OF, "__init__"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("world.world", "import numpy"),
        ("world.world", "from hvdtrain.keras import prepare"),
        ("world.world", "from hvdtrain import __version__"),
        ("core.shard", "from .. import commands"),
        ("checkpoint.checkpoint", "from hvdtrain import World"),
        ("comm.engines", "def f():\n    from hvdtrain.watch import hang"),
        ("keras.engine", "import hvdtrain.torch"),
        ("torch.loader", "import tensorflow as tf"),
        ("vision.recipes", "from hvdtrain.cluster.hosts import hosts"),
        ("torch_resnet", "from hvdtrain import bench"),
    ],
)
def test_negative_twin(module: str, source: str) -> None:
    assert violations(f"{PACKAGE}.{module}", source), "this must be seen as a violation"
