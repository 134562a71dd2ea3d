"""The tree in docs/architecture.md is the one that is there; no two folders reach each other."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from harness import REPOSITORY

from hvdtrain.core import variables

sys.path.insert(0, str(REPOSITORY / "scripts"))
import structure
from sources import modules, nodes, tree_of

FOUND = modules()


def test_the_documented_tree_is_the_one_that_is_there() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert structure.tree(FOUND) in page, "write the output of scripts/structure.py --tree into docs/architecture.md"


def test_no_two_modules_or_folders_reach_each_other() -> None:
    graph = structure.imports(FOUND)
    assert structure.circles(graph) == []
    assert structure.circles(structure.between_folders(graph, FOUND)) == []


def test_no_two_public_classes_have_one_name() -> None:
    assert structure.twice(FOUND) == [], "give each the name of what it is"


# not of PyTorch or Keras: of Python, numpy, Horovod, TensorFlow, DeepSpeed, Lightning, torchmetrics, and marks of the
# guard's own
OTHERS = {
    "_allreduce_grads", "_async", "_async_", "_broadcast_model", "_codecs", "_computed", "_constant_",
    "_current_frames", "_exit", "_getframe", "_global", "_guard", "_guard_line", "_guard_loader", "_guard_pass",
    "_guard_trained", "_hvdtrain", "_layer_sync", "_local", "_operator",
    "_part_", "_process_set", "_pydevd_bundle", "_reconstruct", "_reductions", "_rng", "_saved_",
    "_to_sync", "_update_count", "_utils", "_worker_handler",
}  # fmt: skip


def named_in(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Returns the names with an underscore that code defines, and those that it reads of something, or spells."""
    own: set[str] = set()
    read: set[str] = set()
    for node in nodes(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                own.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                own.add(name)
            case ast.alias():
                own.add(node.asname or node.name)
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                read.update(re.findall(r"^_[a-z]\w*[a-z_]$", name) if not name.endswith("__") else ())
    return own, read


def test_what_frameworks_do_not_document_is_named_in_one_file_each() -> None:
    trees = {name: tree_of(path) for name, path in FOUND.items()}
    files = [trees.pop(f"hvdtrain.private.{framework}") for framework in ("keras", "torch")]
    listed = {
        name
        for tree in files
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ATTRIBUTES"
        for names in ast.literal_eval(node.value).values()
        for name in names.split()
    }
    found = [named_in(tree) for tree in trees.values()]
    own, read = (set().union(*sets) for sets in zip(*found, strict=True))
    assert read - own - OTHERS == listed - own, "ATTRIBUTES of hvdtrain/private/keras.py and torch.py"
    assert listed <= read | own
    imported = (
        r"^\s*(?:import|from) (?:keras\.src|torch(?:\.\w+)*\._)|^\s*from torch[\w.]* import .*\b_[a-z]|= torch\._C"
    )
    assert not [name for name in trees if re.search(imported, FOUND[name].read_text(encoding="utf-8"), re.MULTILINE)]


def spelled_variables(found: dict[str, Path]) -> list[str]:
    """Returns where a name of an environment variable of hvdtrain's stands in code, outside of core/variables."""
    places = []
    for name, path in found.items():
        tree = tree_of(path)
        texts = {id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr)}  # docstrings
        places += [
            f"{name}:{node.lineno}: {node.value}"
            for node in nodes(tree)
            if isinstance(node, ast.Constant) and id(node) not in texts
            if isinstance(node.value, str) and "HVDTRAIN_" in node.value and name != "hvdtrain.core.variables"
        ]
    return places


def test_a_page_has_every_environment_variable() -> None:
    page = (REPOSITORY / "docs" / "variables.md").read_text(encoding="utf-8")
    ours = {value for value in vars(variables).values() if isinstance(value, str) and value.startswith("HVDTRAIN_")}
    of_scripts = {"HVDTRAIN_VENV"}
    assert set(re.findall(r"HVDTRAIN_[A-Z0-9_]+", page)) == ours | of_scripts and len(ours) > 25


def test_environment_variables_are_named_in_one_place(tmp_path: Path) -> None:
    assert spelled_variables(FOUND) == []
    (tmp_path / "twin.py").write_text('"""HVDTRAIN_X"""\nprint(f"HVDTRAIN_Y={1}")')
    assert spelled_variables({"twin": tmp_path / "twin.py"}) == ["twin:2: HVDTRAIN_Y="]


def test_negative_twin(tmp_path: Path) -> None:
    package = tmp_path / "hvdtrain"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from hvdtrain import b")
    (package / "b.py").write_text("def f():\n    from hvdtrain.a import g")
    found = modules(tmp_path)
    assert set(structure.circles(structure.imports(found))) == {"hvdtrain.a", "hvdtrain.b"}


def test_negative_twin_of_folders(tmp_path: Path) -> None:
    """A folder and its own subfolder, of which no two modules import each other."""
    for folder in ("hvdtrain", "hvdtrain/a", "hvdtrain/a/inner"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "hvdtrain/a/up.py").write_text("from hvdtrain.a.inner import down")
    (tmp_path / "hvdtrain/a/base.py").write_text("")
    (tmp_path / "hvdtrain/a/inner/down.py").write_text("def f():\n    from hvdtrain.a import base")
    found = modules(tmp_path)
    graph = structure.imports(found)
    assert structure.circles(graph) == []
    assert set(structure.circles(structure.between_folders(graph, found, tmp_path))) == {
        "hvdtrain.a",
        "hvdtrain.a.inner",
    }
