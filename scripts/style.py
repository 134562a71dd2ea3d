"""The words that pages and messages do not use, and where they are looked for.

    scripts/style.py --pages   prints the paths of the pages that are checked
    scripts/style.py --texts   prints every text of hvdtrain/ that a user can see, each with its place

scripts/check.sh gives both to codespell, with its own dictionary and with style.txt (single words).
tests/unit/test_style.py also looks for `PHRASES`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from sources import ROOT as REPOSITORY
from sources import modules, nodes, tree_of

DICTIONARY = REPOSITORY / "scripts" / "style.txt"
RESULTS = ("limits.md", "failures.md", "documents.md", "benchmarks.md")  # tables that tests and programs write
PHRASES = {  # regular expressions, each with what to write
    "as ever": "nothing",
    "by itself|by themselves": "separately, alone, automatically",
    "(go|goes|going|went|gone) on": "continue, resume",
    "(leave|leaves|leaving|left) out": "skip, discard",
    "(come|comes|came) again": "return, be repeated",
    "(come|comes|came) to terms": "agree, synchronize",
    "once more": "again",
    "(what|that) (is|are) left": "remaining",
    "(without a|last|in (its|their)) words?": "message, output",
}
TOO = r"\btoo(?=[.,;:)]|\Z)"  # "also", or nothing


def avoided() -> dict[str, str]:
    """Returns the words and phrases to avoid, as regular expressions, each with what to write."""
    lines = DICTIONARY.read_text(encoding="utf-8").splitlines()
    return {**dict(line.split("->") for line in lines), **PHRASES}


def findings(text: str) -> list[str]:
    """Returns the words and phrases to avoid that a text has."""
    pattern = rf"(?<![\w-])(?:{'|'.join(avoided())})(?![\w-])|{TOO}".replace(" ", r"\s+")
    return [" ".join(match.group().split()) for match in re.finditer(pattern, text, re.I)]


def pages() -> list[Path]:
    """Returns the pages that are checked."""
    docs = sorted((REPOSITORY / "docs").glob("*.md"))
    return [REPOSITORY / "README.md", *(page for page in docs if page.name not in RESULTS)]


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields each text of two words or more with its line; docstrings only if the module prints its own."""
    docstrings = {id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in nodes(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    if any(isinstance(node, ast.Name) and node.id == "__doc__" for node in nodes(tree)):
        docstrings -= {id(node.value) for node in tree.body if isinstance(node, ast.Expr)}
    for node in nodes(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docstrings | parts:
                pass
            case ast.JoinedStr(values=values):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in values)
            case _:
                continue
        if " " in text.strip():
            yield node.lineno, text


def of_package() -> Iterator[tuple[str, str]]:
    """Yields the place and the text of everything that a user of hvdtrain can see."""
    for path in modules().values():
        for line, text in texts(tree_of(path)):
            yield f"{path.relative_to(REPOSITORY)}:{line}", text


if __name__ == "__main__":
    if sys.argv[1:] == ["--pages"]:
        print(*(page.relative_to(REPOSITORY) for page in pages()), sep="\n")
    elif sys.argv[1:] == ["--texts"]:
        print(*(f"{place}: {' '.join(text.split())}" for place, text in of_package()), sep="\n")
    else:
        sys.exit(__doc__)
