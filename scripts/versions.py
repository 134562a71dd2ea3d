"""Builds, proves and smoke-tests a covering set of versions, one after the other; see versions.sh.

Each combination gets an environment of its own, which is removed afterwards: 8 GB of disk at a time. Its row in
docs/versions.md is written at once, so a stopped run resumes where it was. Only the standard library is used.
"""

from __future__ import annotations

import argparse
import configparser
import dataclasses
import datetime
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
PAGE = TOP / "docs" / "versions.md"
WORK = TOP / "build" / "versions"
HEAD = (
    "| Python | PyTorch | TensorFlow | Keras | built with | controllers | GPU | build, proof | smoke tests | on |\n"
    "|---|---|---|---|---|---|---|---|---|---|\n"
)
SMOKE_TESTS = "tests/ranks/test_smoke.py"


@dataclasses.dataclass(frozen=True)
class Combination:
    """Versions that are tested together.

    Attributes:
        python: "3.13".
        tensorflow: with Keras beside it; None: neither.
        gpu: what `hvdtrain build-horovod --gpu` is given: "none" or "nccl".
    """

    python: str
    torch: str
    tensorflow: str | None
    keras: str | None
    gpu: str = "none"

    @property
    def key(self) -> tuple[str, ...]:
        return (self.python, self.torch, self.tensorflow or "", self.keras or "", self.gpu)

    def __str__(self) -> str:
        keras = f"TensorFlow {self.tensorflow}, Keras {self.keras}" if self.tensorflow else "no TensorFlow"
        return f"Python {self.python}, PyTorch {self.torch}, {keras}, GPU {self.gpu}"


# Every supported release of each at least once, the oldest together and the newest together.
COVERING_SET = (
    Combination("3.10", "2.11.0", "2.20.0", "3.12.4"),
    Combination("3.11", "2.12.1", "2.21.0", "3.13.2"),
    Combination("3.12", "2.13.0", "2.21.0", "3.14.1"),
    Combination("3.11", "2.14.1", "2.21.0", "3.15.1", "nccl"),
    Combination("3.13", "2.15.0", "2.21.0", "3.15.1"),
    Combination("3.13", "2.15.0", "2.21.0", "3.15.1", "nccl"),
    Combination("3.14", "2.15.0", None, None),
)


class StepFailed(Exception):
    """A step of a combination failed; the message names the step."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/versions.sh", description=__doc__.split("\n")[0])
    parser.add_argument("--python", metavar="X.Y", help="one combination: this Python (default: the pinned versions)")
    parser.add_argument("--torch", metavar="VERSION")
    parser.add_argument("--tensorflow", metavar="VERSION|none")
    parser.add_argument("--keras", metavar="VERSION")
    parser.add_argument("--gpu", choices=["none", "nccl"], default="none")
    parser.add_argument(
        "--newest", action="store_true", help="try the index's newest releases, if newer than the table's"
    )
    parser.add_argument(
        "--since", default=str(datetime.date.today()), metavar="DATE", help="keep rows of this date or later"
    )
    args = parser.parse_args()
    rows = read_rows(PAGE.read_text(encoding="utf-8"))
    if args.newest:
        wanted = newest(rows)
    elif args.python or args.torch or args.tensorflow or args.keras:
        wanted = [chosen(args)]
    else:
        wanted = [one for one in COVERING_SET if not done(rows.get(one.key), args.since)]
    failed = 0
    for number, one in enumerate(wanted, 1):
        say(f"{number} of {len(wanted)}: {one}")
        row = tried(one)
        failed += "failed" in row
        rows[one.key] = row
        write_rows(rows)
    say(f"{len(wanted) - failed} of {len(wanted)} passed; {PAGE.relative_to(TOP)} has {len(rows)} rows")
    return 1 if failed else 0


def chosen(args: argparse.Namespace) -> Combination:
    """Returns the combination that the flags name; what they do not name is as pinned in setup.cfg."""
    pins = pinned()
    without = args.tensorflow == "none"
    return Combination(
        args.python or f"{sys.version_info.major}.{sys.version_info.minor}",
        args.torch or pins["torch"],
        None if without else args.tensorflow or pins["tensorflow-cpu"],
        None if without else args.keras or pins["keras"],
        args.gpu,
    )


def newest(rows: dict[tuple[str, ...], str]) -> list[Combination]:
    """Returns the combination of the index's newest releases, or nothing if the table has each of them."""
    found = {name: index_version(name) for name in ("torch", "tensorflow-cpu", "keras")}
    known = {name: {key[place] for key in rows} for name, place in (("torch", 1), ("tensorflow-cpu", 2), ("keras", 3))}
    fresh = {name: version for name, version in found.items() if version not in known[name]}
    if not fresh:
        say(f"nothing new: the index's newest are {', '.join(f'{name} {one}' for name, one in found.items())}")
        return []
    say(f"new on the index: {', '.join(f'{name} {one}' for name, one in fresh.items())}")
    python = max((key[0] for key in rows if key[2]), key=numbers)
    return [Combination(python, found["torch"], found["tensorflow-cpu"], found["keras"])]


def index_version(name: str) -> str:
    printed = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", name],
        capture_output=True, text=True, env=os.environ | no_constraint(),
    )  # fmt: skip
    found = re.match(rf"{name} \((\S+)\)", printed.stdout)
    if found is None:
        raise SystemExit(f"versions.sh: the index must answer for {name}\nreceived: {printed.stderr.strip()[-500:]}")
    return found.group(1)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def done(row: str | None, since: str) -> bool:
    return row is not None and "failed" not in row and row.strip(" |").rsplit("| ", 1)[1] >= since


def tried(one: Combination) -> str:
    """Runs a combination in an environment of its own; returns its row."""
    WORK.mkdir(parents=True, exist_ok=True)
    log = WORK / ("-".join(part for part in one.key if part) + ".log")
    log.write_text("")
    record: dict[str, object] = {}
    started = time.monotonic()
    try:
        for what, result in steps(one, log):
            say(f"  {what}: {result} ({time.monotonic() - started:.0f} s)")
            record[what] = result
    except StepFailed as error:
        say(f"  failed: {error} (log: {log.relative_to(TOP)})")
        record["failed"] = f"**failed**: {error}"
    finally:
        shutil.rmtree(WORK / "venv", ignore_errors=True)
        shutil.rmtree(WORK / "cache", ignore_errors=True)
    return row_of(one, record)


def steps(one: Combination, log: Path) -> Iterator[tuple[str, str]]:
    """Yields each step and its result.

    Raises:
        StepFailed: a step failed; what it printed is in the log.
    """
    interpreter = find_python(one.python)
    venv, python = WORK / "venv", str(WORK / "venv" / "bin" / "python")
    shutil.rmtree(venv, ignore_errors=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    variables |= no_constraint() | {
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "HVDTRAIN_CACHE": str(WORK / "cache"),
    }

    def run(what: str, *command: str) -> str:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"$ {' '.join(command)}\n")
            file.flush()
            begin = file.tell()
            code = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=variables, cwd=TOP
            ).returncode
        if code:
            raise StepFailed(f"{what} (exit code {code})")
        with log.open(encoding="utf-8", errors="replace") as file:
            file.seek(begin)
            return file.read()

    run("environment", interpreter, "-m", "venv", str(venv))
    run("install", python, "-m", "pip", "install", "-q", "--no-cache-dir", *requirements(one))
    run(
        "install",
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-cache-dir",
        "--no-build-isolation",
        "-e",
        ".",
    )
    yield "Python", run("Python", python, "-c", "import platform; print(platform.python_version())").strip()
    build = ["-m", "hvdtrain", "build-horovod", "--install", "--record", "--gpu", one.gpu, "--cuda", "wheels"]
    begun = time.monotonic()
    printed = run("build and proof", python, *build)
    built = json.loads(printed[printed.index("\n{") : printed.rindex("\n}") + 2])
    where = built["environment"]
    yield "built with", f"gcc {where['gcc']}, CMake {where['cmake']}"
    yield "controllers", "Gloo" + (f", {where['mpi'].replace('mpirun (Open MPI)', 'Open MPI')}" if where["mpi"] else "")
    yield "GPU", f"NCCL {where['nccl']}, CUDA {where['torch_cuda']}" if one.gpu == "nccl" else "none"
    yield "proof", f"{len(built['proof']) - 1} ranks proven, {time.monotonic() - begun:.0f} s"
    printed = run("smoke tests", python, "-m", "pytest", "-q", "-p", "no:cacheprovider", SMOKE_TESTS)
    summary = re.findall(r"^\d+ passed[^\n]*", printed, re.MULTILINE)
    if not summary:
        raise StepFailed("smoke tests (none ran)")
    yield "smoke", re.sub(r", \d+ (deselected|warnings?)| in .*", "", summary[-1])


def requirements(one: Combination) -> list[str]:
    """Returns what setup.cfg asks for, with this combination's versions in the place of its pins."""
    setup = settings()
    extras = setup["options.extras_require"]
    lists = ["torch", *(["keras"] if one.tensorflow else []), "build", "tensorboard", "mpi", "test"]
    texts = [setup["options"]["install_requires"], *(extras[name] for name in lists)]
    lines = [line for text in texts for line in text.split("\n") if line and not line.startswith("#")]
    versions = {"torch": one.torch, "torchvision": None, "tensorflow-cpu": one.tensorflow, "keras": one.keras}
    kept = [line for line in lines if name_of(line) not in versions]
    return kept + [
        f"{name}=={version}" if version else name
        for name, version in versions.items()
        if version or name == "torchvision"
    ]


def settings() -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(TOP / "setup.cfg", encoding="utf-8")
    return setup


def pinned() -> dict[str, str]:
    """Returns the pinned version of each framework: the first that setup.cfg names."""
    extras = settings()["options.extras_require"]
    found = re.findall(r"^([\w-]+)==([\w.]+)", f"{extras['torch']}\n{extras['keras']}", re.MULTILINE)
    return dict(reversed(found))


def name_of(line: str) -> str:
    return re.split(r"[=<>;\[ ]", line, maxsplit=1)[0]


def find_python(version: str) -> str:
    """Returns an interpreter of that version: from the PATH, or one of pyenv's.

    Raises:
        StepFailed: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = map(str, sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True))
    for candidate in (shutil.which(f"python{version}") or "false", *installed):
        code = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
        if subprocess.run([candidate, "-c", code], capture_output=True).returncode == 0:
            return candidate
    raise StepFailed(f"no python{version} on the PATH")


def no_constraint() -> dict[str, str]:
    """Returns what lifts a constraints file of the system's pip; an empty variable does not."""
    empty = WORK / "no-constraint.txt"
    empty.parent.mkdir(parents=True, exist_ok=True)
    empty.write_text("")
    return {"PIP_CONSTRAINT": str(empty), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def row_of(one: Combination, record: dict[str, object]) -> str:
    result = record.get("failed", record.get("proof", ""))
    cells = [
        record.get("Python", one.python), one.torch, one.tensorflow or "-", one.keras or "-",
        record.get("built with", "-"), record.get("controllers", "-"), record.get("GPU", one.gpu), result,
        record.get("smoke", "-"), datetime.date.today(),
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def read_rows(page: str) -> dict[tuple[str, ...], str]:
    """Returns the rows of the page by their combination's key."""
    rows: dict[tuple[str, ...], str] = {}
    for line in parts(page)[1]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        none = ["" if cell == "-" else cell for cell in cells]
        gpu = "none" if cells[6] == "none" else "nccl"
        rows[".".join(cells[0].split(".")[:2]), cells[1], none[2], none[3], gpu] = line
    return rows


def parts(page: str) -> tuple[str, list[str], str]:
    """Returns what stands before the table, its rows, and what stands after it."""
    before, rest = page.split(HEAD)
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), rest.splitlines()))
    return before, rows, rest.removeprefix("".join(f"{row}\n" for row in rows))


def write_rows(rows: dict[tuple[str, ...], str]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, after = parts(page)
    lines = [rows[key] for key in sorted(rows, key=lambda key: (numbers(key[1]), numbers(key[0]), key[4]))]
    partial = PAGE.with_suffix(".partial")
    missing = "".join(f"- Not run yet: {one}.\n" for one in COVERING_SET if one.key not in rows)
    rest = re.sub(r"^\n((- Not run yet: [^\n]*\n)+\n)?", "", after)
    after = "\n" + (f"{missing}\n" if missing else "") + rest
    partial.write_text(before + HEAD + "".join(f"{line}\n" for line in lines) + after, encoding="utf-8")
    partial.replace(PAGE)


def say(line: str) -> None:
    print(f"versions: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
