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
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import tomllib

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


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        name: area and what breaks, in words joined by "-".
        file: relative to the checkout.
        old, new: a text that stands in the file exactly once, and what takes its place.
        tests: what pytest is given to find out.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What the tests said: "killed", "survived", "timeout" (counts as noticed), or "broken" (nothing was tested)."""

    name: str
    verdict: str
    seconds: float
    output: str = ""


def mutants() -> list[Mutant]:
    """Returns the committed list."""
    rows = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def problems(found: Sequence[Mutant]) -> list[str]:
    """Returns what is wrong with a list: names given twice, texts that do not stand there once, files that are not."""
    names = [mutant.name for mutant in found]
    wrong = [f"{name}: the name is there twice" for name in sorted({name for name in names if names.count(name) > 1})]
    for mutant in found:
        count = (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old)
        if count != 1 or mutant.old == mutant.new:
            wrong.append(f"{mutant.name}: its text stands {count} times in {mutant.file}, instead of once")
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
            path.write_text(path.read_text(encoding="utf-8").replace(change.old, change.new), encoding="utf-8")
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
