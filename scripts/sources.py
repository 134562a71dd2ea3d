"""Python sources as syntax trees: a text that several checks or tests look at is parsed and walked once."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "hvdtrain"


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Returns the file of every module of the package, by its full name."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def tree_of(path: Path) -> ast.Module:
    """Returns the syntax tree of a file, which must not be changed."""
    return parsed(path.read_text(encoding="utf-8"))


@functools.cache
def parsed(text: str) -> ast.Module:
    """Returns the syntax tree of a text, which must not be changed."""
    return ast.parse(text)


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Returns a node and all nodes in it, in the order of `ast.walk`."""
    return tuple(ast.walk(tree))


def bodies(scope: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yields each list of statements in a node."""
    for name in ("body", "orelse", "finalbody"):
        body = getattr(scope, name, None)
        if isinstance(body, list) and body:
            yield body
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from bodies(child)
