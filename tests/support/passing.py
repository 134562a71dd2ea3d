"""Runs a program's `case_...` functions and says which passed; `results_of` reads it in the test process."""

from __future__ import annotations

import ast
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any


def names_of(program: Path) -> list[str]:
    """The cases of a program, without importing it."""
    tree = ast.parse(program.read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")]


def run_all(module: dict[str, Any]) -> None:
    """Runs each case, with a folder of its own if it takes one; says "passed NAME", or what went wrong."""
    for name, case in list(module.items()):
        if not name.startswith("case_"):
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                case(*[Path(folder)] * case.__code__.co_argcount)
        except Exception:
            print(f"failed {name}\n{traceback.format_exc()}\nend of {name}", flush=True)
        else:
            print(f"passed {name}", flush=True)
    sys.stdout.flush()


def verdict_on(name: str, output: str) -> str:
    """An empty text when the case passed, else what it said."""
    lines = output.splitlines()
    if f"passed {name}" in lines:
        return ""
    if f"failed {name}" not in lines:
        return f"{name} did not run:\n{output[-3000:]}"
    start = lines.index(f"failed {name}")
    return "\n".join(lines[start : lines.index(f"end of {name}")])
