#!/usr/bin/env python
"""Changes the code on purpose, one place at a time, and looks whether the tests nearest to it notice.

    scripts/mutants.py                      all of tests/mutants.toml (about an hour on 2 cores)
    scripts/mutants.py --only shard,lr      those whose name holds one of these words
    scripts/mutants.py --jobs 2 --out mutants.json

Each change is made in a copy of the working tree. A change that its tests notice is killed; one that they do not is a
survivor, and a promise that nobody keeps. The tests are first run without any change: they must pass.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import tomllib
from sources import bodies, parsed

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutants.toml"
COPIED = (
    "hvdtrain",
    "tests",
    "examples",
    "scripts",
    "docker",
    "docs",
    "setup.cfg",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
KILLED_SHARE = 0.95  # at least


class NotThere(Exception):
    """A change cannot be made; the text says why."""


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        name: area and what breaks, in words joined by "-".
        at: a file, relative to the checkout; of Python with the class or function that it is in: "file.py::Class.name".
        old, new: of Python an expression, or statements, and what takes its place: compared by syntax, so that layout,
            quotes and comments do not matter. Of other files a text. It stands there exactly once.
        tests: what pytest is given to find out.
    """

    name: str
    at: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def file(self) -> str:
        """Relative to the checkout."""
        return self.at.partition("::")[0]

    def made(self, text: str) -> str:
        """Returns the file's text with the change.

        Raises:
            NotThere: the old syntax stands there not once, or is the new one.
        """
        places = list(_places(text, self)) if self.file.endswith(".py") else _texts(text, self)
        if len(places) != 1:
            raise NotThere(f"its syntax stands {len(places)} times in {self.at}, instead of once")
        ((start, end, new),) = places
        data = text.encode()
        changed = (data[:start] + new.encode() + data[end:]).decode()
        if changed == text:
            raise NotThere("it changes nothing")
        return changed


def _texts(text: str, change: Mutant) -> list[tuple[int, int, str]]:
    data, old = text.encode(), change.old.encode()
    starts = [at for at in range(len(data)) if data.startswith(old, at)]
    return [(at, at + len(old), change.new) for at in starts]


def _places(text: str, change: Mutant) -> Iterator[tuple[int, int, str]]:
    """Yields from which byte to which a change is, and what comes there."""
    scope = _scope(parsed(text), change.at.partition("::")[2])
    begins = [0]
    for line in text.encode().splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    old, new = _expression(change.old), _expression(change.new)
    if old is not None and new is not None:
        wanted = shape(old)
        for node in _walk(scope):
            if type(node) is type(old) and shape(node) == wanted:
                assert isinstance(node, ast.expr)
                assert node.end_lineno is not None and node.end_col_offset is not None
                end = begins[node.end_lineno - 1] + node.end_col_offset
                plain = isinstance(new, (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript, ast.List))
                yield begins[node.lineno - 1] + node.col_offset, end, change.new if plain else f"({change.new})"
        return
    statements = ast.parse(change.old).body
    for body in bodies(scope):
        for at in range(len(body) - len(statements) + 1):
            window = body[at : at + len(statements)]
            if all(type(a) is type(b) and shape(a) == shape(b) for a, b in zip(window, statements, strict=True)):
                first, last = window[0], window[-1]
                line = min([first.lineno, *(its.lineno for its in getattr(first, "decorator_list", []))])
                assert last.end_lineno is not None and last.end_col_offset is not None
                end = begins[last.end_lineno - 1] + last.end_col_offset
                lines = textwrap.indent(change.new.strip("\n"), " " * first.col_offset).lstrip(" ")
                yield begins[line - 1] + first.col_offset, end, lines or "pass"


def _scope(tree: ast.AST, names: str) -> ast.AST:
    """Returns a class or a function by its name in a module; of several by one name, as overloads are, the last."""
    for name in names.split(".") if names else ():
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        inner = [node for body in bodies(tree) for node in body if isinstance(node, kinds) and node.name == name]
        if not inner:
            raise NotThere(f"no {name} in {names}")
        tree = inner[-1]
    return tree


def _expression(text: str) -> ast.expr | None:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return None


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a node and those in it, but for parts of f-strings: before Python 3.12 nobody knows where these stand."""
    yield node
    for child in ast.iter_child_nodes(node) if not isinstance(node, ast.JoinedStr) else ():
        yield from _walk(child)


def shape(node: ast.AST) -> str:
    """Returns what a piece of syntax is, wherever it stands and whether it is read or written."""
    return re.sub(r", ctx=\w+\(\)|ctx=\w+\(\)", "", ast.dump(node))


@dataclass(frozen=True)
class Outcome:
    """What the tests said: "killed", "survived", "timeout" (counts as noticed), or "broken" (nothing was tested)."""

    name: str
    verdict: str
    seconds: float
    output: str = ""


def mutants() -> list[Mutant]:
    """Returns the committed list."""
    rows = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return [Mutant(**{"name": name, **row, "tests": tuple(row["tests"])}) for name, row in rows.items()]


def problems(found: Sequence[Mutant]) -> list[str]:
    """Returns what is wrong with a list: names given twice, changes that cannot be made, files that are not."""
    names = [mutant.name for mutant in found]
    wrong = [f"{name}: the name is there twice" for name in sorted({name for name in names if names.count(name) > 1})]
    for mutant in found:
        try:
            mutant.made((ROOT / mutant.file).read_text(encoding="utf-8"))
        except (NotThere, SyntaxError, OSError) as error:
            wrong.append(f"{mutant.name}: {error}")
        files = [word.split("::")[0] for word in mutant.tests if word.startswith("tests/")]
        wrong += [f"{mutant.name}: no file {file}" for file in files if not (ROOT / file).is_file()]
    return wrong


def judge(name: str, change: Mutant | None, tests: Sequence[str], limit_s: float) -> Outcome:
    """Runs tests in a copy of the tree, with one change or none."""
    with tempfile.TemporaryDirectory(prefix="hvdtrain-mutant-") as folder:
        copy = Path(folder)
        for part in COPIED:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / part)
        if change is not None:
            path = copy / change.file
            path.write_text(change.made(path.read_text(encoding="utf-8")), encoding="utf-8")
        return _run(name, copy, tests, limit_s)


def _run(name: str, copy: Path, tests: Sequence[str], limit_s: float) -> Outcome:
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "-m", "", "-p", "no:cacheprovider", *tests],
        cwd=copy, env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
        verdict = {0: "survived", 1: "killed"}.get(process.returncode, "broken")
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest ends its ranks, which have sessions of their own
        try:
            output, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        verdict = "timeout"
    return Outcome(name, verdict, round(time.monotonic() - started, 1), output)


def _unchanged(tests: Sequence[tuple[str, ...]], limit_s: float, jobs: int) -> list[str]:
    """Returns which tests fail without any change."""
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(lambda words: judge(" ".join(words), None, words, limit_s), tests))
    return [
        f"{outcome.name}: {outcome.verdict}\n{outcome.output[-3000:]}"
        for outcome in outcomes
        if outcome.verdict != "survived"
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when enough changes were noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words, with commas: changes whose name holds one of them")
    parser.add_argument("--jobs", type=int, default=1, help="changes that are tried at the same time")
    parser.add_argument("--limit-s", type=float, default=300, help="for the tests of one change")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a change first")
    parser.add_argument("--out", type=Path, help="a JSON file with all outcomes")
    args = parser.parse_args(argv)
    chosen = [m for m in mutants() if any(word in m.name for word in args.only.split(","))]
    wrong = problems(chosen)
    if not wrong and not args.trust:
        wrong = _unchanged(sorted({mutant.tests for mutant in chosen}), args.limit_s, args.jobs)
    if wrong or not chosen:
        print("\n".join(wrong) or f"no change is named like {args.only!r}")
        return 2

    def one(mutant: Mutant) -> Outcome:
        outcome = judge(mutant.name, mutant, mutant.tests, args.limit_s)
        print(f"{outcome.verdict:9} {outcome.seconds:6.1f} s  {mutant.name}", flush=True)
        return outcome

    with ThreadPoolExecutor(args.jobs) as pool:
        outcomes = list(pool.map(one, chosen))
    if args.out:
        rows = [{**asdict(outcome), "output": outcome.output[-2000:]} for outcome in outcomes]
        args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    noticed = [outcome for outcome in outcomes if outcome.verdict in ("killed", "timeout")]
    print(f"\n{len(noticed)} of {len(outcomes)} changes were noticed ({len(noticed) / len(outcomes):.1%})")
    for outcome in outcomes:
        if outcome not in noticed:
            print(f"  {outcome.verdict}: {outcome.name}")
    return 0 if len(noticed) >= KILLED_SHARE * len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
