#!/usr/bin/env python
"""Counts what holds the package together: files and lines a folder, floors of imports between folders, circles.

A folder stands on those that it imports, at any depth; no two may reach each other.

    scripts/structure.py            a table; exit code 1 where there is a circle
    scripts/structure.py --tree     the tree as docs/architecture.md shows it

Imports inside functions and under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from sources import PACKAGE, ROOT, modules, nodes, tree_of

Graph = dict[str, set[str]]


def imports(found: Mapping[str, Path]) -> Graph:
    """Returns which modules each module imports; the package itself, the front door, is left out."""
    graph: Graph = {}
    for name, path in found.items():
        graph[name] = set()
        for node in nodes(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                wanted = [f"{node.module}.{alias.name}" for alias in node.names]
                wanted = [full if full in found else node.module for full in wanted]
            elif isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            else:
                continue
            graph[name] |= {other for other in wanted if other in found} - {name, PACKAGE}
    del graph[PACKAGE]
    return graph


def between_folders(graph: Graph, found: Mapping[str, Path], root: Path = ROOT) -> Graph:
    """Returns which folders each folder imports, by their names in full; a program is a folder of its own."""
    homes = {name: name for name in found}
    for name, path in found.items():
        if path.parent != root / PACKAGE:
            homes[name] = ".".join(path.parent.relative_to(root).parts)
    folders: Graph = {}
    for name, others in graph.items():
        folders.setdefault(homes[name], set()).update(homes[other] for other in others)
    return {name: others - {name} for name, others in folders.items()}


def circles(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Returns the modules or folders of a circle, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def floors(folders: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """Returns the floor of every folder: one above the highest that it imports, 0 for one that imports none."""
    floor: dict[str, int] = {}
    for name in TopologicalSorter(folders).static_order():
        floor[name] = 1 + max((floor[other] for other in folders[name]), default=-1)
    return floor


def tree(found: Mapping[str, Path], root: Path = ROOT) -> str:
    """Returns the folders, with the first line of what each says of itself, and the modules in it."""
    lines = []
    for folder in sorted({path.parent for path in found.values()}):
        depth = len(folder.relative_to(root).parts) - 1
        doc = ast.get_docstring(tree_of(folder / "__init__.py")) or ""
        inside = " ".join(sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__"))
        lines.append(f"{'  ' * depth}{folder.name}/  {doc.splitlines()[0]}\n{'  ' * (depth + 1)}  {inside}")
    return "\n".join(lines)


def twice(found: Mapping[str, Path]) -> list[str]:
    """Returns public classes, not those within a function or class, of which another module has one of that name."""
    named: dict[str, list[str]] = {}
    for module, path in found.items():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                named.setdefault(node.name, []).append(module)
    return [f"{name}: {', '.join(modules)}" for name, modules in named.items() if len(modules) > 1]


def main(argv: list[str] | None = None) -> int:
    """Prints the table; returns 1 where a circle is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", action="store_true", help="print the tree only")
    args = parser.parse_args(argv)
    found = modules()
    if args.tree:
        print(tree(found))
        return 0
    graph = imports(found)
    folders = between_folders(graph, found)
    circle = circles(graph) or circles(folders)
    floor = {} if circle else floors(folders)
    importers = {name: sum(name in others for others in graph.values()) for name in graph}
    print(f"{'folder':28} {'files':>5} {'lines':>6} {'floor':>5}")
    for folder in sorted({path.parent for path in found.values()}):
        files = sorted(folder.glob("*.py"))
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        name = ".".join(folder.relative_to(ROOT).parts)
        print(f"{name:28} {len(files):5} {lines:6} {floor.get(name, ''):>5}")
    rooms = {folder for folder in (path.parent for path in found.values())}
    print(f"\n{len(found)} modules in {len(rooms)} folders; {len(set(floor.values()))} floors;"
          f" {sum(count == 1 for count in importers.values())} modules with one importer")  # fmt: skip
    print("circle: " + " -> ".join(circle) if circle else "no circle")
    return 1 if circle else 0


if __name__ == "__main__":
    sys.exit(main())
