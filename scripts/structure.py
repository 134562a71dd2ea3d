#!/usr/bin/env python
"""Counts what holds the package together: files and lines a folder, floors of imports between folders, circles.

A folder stands on those that it imports, at any depth; no two may reach each other.

    scripts/structure.py            a table; exit code 1 where there is a circle
    scripts/structure.py --tree     the tree as docs/architecture.md shows it
    scripts/structure.py --names    public classes of one name (exit code 1), and protocols that no two classes follow

Imports inside functions and under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "hvdtrain"
Graph = dict[str, set[str]]


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Returns the file of every module, by its full name."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports(found: Mapping[str, Path]) -> Graph:
    """Returns which modules each module imports; the package itself, the front door, is left out."""
    graph: Graph = {}
    for name, path in found.items():
        graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
        doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
        inside = " ".join(sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__"))
        lines.append(f"{'  ' * depth}{folder.name}/  {doc.splitlines()[0]}\n{'  ' * (depth + 1)}  {inside}")
    return "\n".join(lines)


def classes(found: Mapping[str, Path]) -> dict[str, list[tuple[str, ast.ClassDef]]]:
    """Returns the classes of all modules, not those within a function or class, by name: module and definition."""
    named: dict[str, list[tuple[str, ast.ClassDef]]] = {}
    for module, path in found.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                named.setdefault(node.name, []).append((module, node))
    return named


def twice(found: Mapping[str, Path]) -> list[str]:
    """Returns public classes of which another module defines one of the same name."""
    public = {name: places for name, places in classes(found).items() if not name.startswith("_")}
    return [f"{name}: {', '.join(at for at, _ in places)}" for name, places in public.items() if len(places) > 1]


def lonely_protocols(found: Mapping[str, Path]) -> list[str]:
    """Returns protocols that at most one class of the package has all members of."""
    named = classes(found)
    every = [node for places in named.values() for _, node in places]

    def bases(node: ast.ClassDef) -> list[str]:
        names = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
        return [ast.unparse(name).split(".")[-1] for name in names]

    def members(node: ast.ClassDef, below: tuple[ast.ClassDef, ...] = ()) -> set[str]:
        own = {part.name for part in node.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))}
        for part in ast.walk(node):
            targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
            for target in (one for listed in targets for one in getattr(listed, "elts", [listed])):
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    own.add(target.attr)
                elif isinstance(target, ast.Name) and part in node.body:
                    own.add(target.id)
        above = [base for name in bases(node) for _, base in named.get(name, []) if base not in (node, *below)]
        return own.union(*(members(base, (node, *below)) for base in above))

    protocols = [node for node in every if "Protocol" in bases(node)]
    real = {node.name: members(node) for node in every if node not in protocols}
    owners = {node.name: [name for name, has in real.items() if members(node) <= has] for node in protocols}
    return [f"{name}: {', '.join(having)}" for name, having in owners.items() if len(having) < 2]


def main(argv: list[str] | None = None) -> int:
    """Prints the table; returns 1 where a circle is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", action="store_true", help="print the tree only")
    parser.add_argument("--names", action="store_true", help="print doubled names of classes, and protocols")
    args = parser.parse_args(argv)
    found = modules()
    if args.names:
        print("\n".join(twice(found) + lonely_protocols(found)))
        return 1 if twice(found) else 0
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
