"""Runs the old and the new script for some updates on two ranks each, and compares their weights."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain.core.errors import ConfigError, HvdtrainError, build_horovod_command
from hvdtrain.migrate.rank import gap

RANKS = 2
# of a type's own precision, for each update: sums over ranks may be taken in another order
_EPS_PER_UPDATE = 8
_SEEN = 20  # times what rounding explains: of weights that move less, a wrong average could hide in it
_TAIL_LINES = 30
_GRACE_S = 20
# of a folder, or one file, that is copied for a run
_MOST_FILES = 1000
_MOST_BYTES = 64 * 2**20
_NOTHING = "nothing was proven: the old script {}"
_NEEDS = (
    "give the script its own arguments (hvdtrain migrate train.py --epochs 1), run it where its data and GPUs are, or"
    " convert only: --no-prove"
)
# what often makes two scripts part
_CAUSES = {
    "torch": "often gradients are clipped before optimizer.synchronize(), or step(closure) is called: Horovod had not"
    " averaged them yet; docs/migrate.md lists what hvdtrain does differently on purpose",
    "keras": "often ranks' batches or weights of samples differ in size, or batch-norm's statistics are compared:"
    " docs/migrate.md lists what hvdtrain does differently on purpose",
}
_RANK = (sys.executable, "-m", "hvdtrain.migrate.rank")
_UNITS = {"torch": "updates", "keras": "batches of fit"}


class NotProvenError(HvdtrainError):
    """The new script fails where the old one trains, or trains other models."""


@dataclass(frozen=True)
class ScriptProof:
    """The largest difference between the weights of two scripts."""

    updates: int  # number of updates of each script
    tensors: int  # number of tensors compared on each rank: parameters and buffers
    name: str  # the tensor that differs most, relative to its size
    rank: int  # the rank where it does
    difference: float  # the largest difference of its elements, divided by the largest of its values
    tolerance: float  # the difference that rounding explains, of its type, after so many updates
    framework: str = "torch"  # the scripts' framework: torch, keras
    whole: bool = True  # True if both scripts ran to their end

    @property
    def holds(self) -> bool:
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        where = f"{self.difference:.3g} of its largest value in {self.name!r} on rank {self.rank}"
        apart = "" if self.holds else "NOT PROVEN: "
        lines = [
            f"{apart}after {self.updates} {_UNITS[self.framework]} on {RANKS} ranks the {self.tensors} tensors of the"
            f" old and the new script differ by at most {where} (tolerance {self.tolerance:.2g})"
        ]
        if not self.holds:
            lines.append(_CAUSES[self.framework])
        lines.append("made alike: both begin with seed 0 on rank 0 and 1 on rank 1; hvdtrain's own seeding is undone")
        later = "" if self.whole else ", nor what the script does after these updates (--updates N for more of it)"
        lines.append(f"not compared: what does not run with these arguments, here, on {RANKS} ranks{later}")
        return "\n".join(lines)


@dataclass(frozen=True)
class ScriptRun:
    """The weights at the end of a script's run."""

    updates: list[int]  # number of updates of each rank
    eps: list[dict[str, float]]  # the precision of each tensor's type, by the tensor's name, of each rank
    tensors: list[dict[str, np.ndarray]]  # the tensors of each rank, by name
    framework: str = "torch"  # as of `ScriptProof`
    whole: bool = True
    # how far rank 0's weights came, as `ScriptProof.difference` counts; a broadcast moves those of others
    moved: float = math.inf


def prove(
    script: Path, new: str, argv: Sequence[str], *, updates: int = 20, timeout_s: float = 600, framework: str = "torch"
) -> ScriptProof:
    """Runs a script as it is and as `new`, and compares.

    Raises:
        HvdtrainError: the old script fails here, or makes no update: nothing is proven.
        NotProvenError: the new script fails, or makes other updates or models.
    """
    old = run(script, None, argv, updates=updates, timeout_s=timeout_s, framework=framework)
    return compare(old, run(script, new, argv, updates=updates, timeout_s=timeout_s, framework=framework))


def run(
    script: Path, text: str | None, argv: Sequence[str], *,
    updates: int, timeout_s: float, framework: str = "torch",
) -> ScriptRun:  # fmt: skip
    """Runs a script on two ranks up to a number of updates: `text` as if it were `script`, or None for `script` itself.

    Raises:
        HvdtrainError: the old script failed, took too long, or made no update.
        NotProvenError: the new script failed, or took too long.
    """
    starts = (_horovodrun(), "--gloo", "-np", str(RANKS), *_RANK)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-migrate-") as name:
        folder = Path(name)
        (folder / "text.py").write_bytes(script.read_bytes() if text is None else text.encode())
        ranks = [framework, str(folder / "text.py"), str(_in_copy(script, folder)), str(folder), str(updates), *argv]
        try:
            _start([*starts, *ranks], folder, updates, timeout_s)
        except _FailedError as error:
            if text is not None:
                raise NotProvenError(f"the new script {error.rule}", error.received) from error
            raise HvdtrainError(_NOTHING.format(error.rule), error.received, _NEEDS) from error
        found = _read(folder, framework)
    if text is None and not max(found.updates):
        raise HvdtrainError(_NOTHING.format("made no update with Horovod's optimizer"), "", _NEEDS)
    return found


class _FailedError(HvdtrainError):
    """A script failed before it made its updates."""


def linked() -> list[str]:
    """Returns what a proof links, and does not copy, of the current folder: what a script writes there stays."""
    return sorted(path.name for path in Path.cwd().iterdir() if _is_large(path))


def _is_large(path: Path) -> bool:
    """Returns True for a file or folder that takes long to copy, or cannot be."""
    inside = [path, *itertools.islice(path.rglob("*"), _MOST_FILES)] if path.is_dir() else [path]
    plain = all(not one.is_symlink() and (one.is_file() or one.is_dir()) and os.access(one, os.R_OK) for one in inside)
    return len(inside) > _MOST_FILES or not plain or sum(one.stat().st_size for one in inside) > _MOST_BYTES


def _horovodrun() -> str:
    beside = Path(sys.executable).with_name("horovodrun")
    horovodrun = str(beside) if beside.is_file() else shutil.which("horovodrun")
    if horovodrun is None:
        raise ConfigError(
            "nothing was proven: a proof needs Horovod to run the old script",
            "no horovodrun",
            f"{build_horovod_command()}\nor convert only: --no-prove",
        )
    return horovodrun


def _in_copy(script: Path, folder: Path) -> Path:
    """Returns the path of a script in the current folder's copy: files beside `__file__` are also the copy's."""
    path, here = script.resolve(), Path.cwd().resolve()
    return folder / "work" / path.relative_to(here) if path.is_relative_to(here) else path


def _start(command: Sequence[str], folder: Path, updates: int, timeout_s: float) -> None:
    """Runs the ranks in a copy of the current folder."""
    work = folder / "work"
    work.mkdir()
    for path in Path.cwd().iterdir():
        if _is_large(path):
            (work / path.name).symlink_to(path)
        elif path.is_dir():
            shutil.copytree(path, work / path.name)
        else:
            shutil.copy2(path, work / path.name)
    package = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))}
    process = subprocess.Popen(
        command, cwd=work, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:
        output = _end(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise _FailedError(f"did not make {updates} updates in {timeout_s:g} s", _last(output, work)) from error
    if process.returncode:
        raise _FailedError(f"failed with exit code {process.returncode}", _last(output, work))


def _end(process: subprocess.Popen[str]) -> str:
    """Asks horovodrun to end its ranks, which are in sessions of their own; returns what was printed."""
    process.terminate()
    try:
        return process.communicate(timeout=_GRACE_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def _last(output: str, work: Path) -> str:
    """Returns the last lines that were printed, with the user's own paths."""
    return "\n".join(output.replace(str(work), str(Path.cwd())).rstrip().splitlines()[-_TAIL_LINES:])


def _read(folder: Path, framework: str) -> ScriptRun:
    records = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    tensors = []
    for rank, record in enumerate(records):
        with np.load(folder / f"{rank}.npz") as arrays:
            tensors.append(dict(zip(record["eps"], (arrays[name] for name in arrays.files), strict=True)))
    eps = [record["eps"] for record in records]
    whole = all(record["whole"] for record in records)
    return ScriptRun([one["updates"] for one in records], eps, tensors, framework, whole, records[0]["moved"])


def compare(old: ScriptRun, new: ScriptRun) -> ScriptProof:
    """Compares each rank's tensors with the same rank's of the other run.

    Raises:
        HvdtrainError: the weights hardly move, and their difference is hidden by rounding.
        NotProvenError: another number of updates, or other models.
    """
    if old.updates != new.updates:
        raise NotProvenError(
            "both scripts must make as many updates with the optimizer of all ranks",
            f"by rank: the old one {old.updates}, the new one {new.updates}",
        )
    names = [list(tensors) for tensors in (*old.tensors, *new.tensors)]
    if any(one != names[0] for one in names) or not names[0]:
        unlike = sorted(set(names[0]) ^ set(names[RANKS]))[:3]
        raise NotProvenError(
            "both scripts must have the same models", f"only in one: {', '.join(unlike) or 'another order'}"
        )
    found = [
        (gap(before, new.tensors[rank][name]), _EPS_PER_UPDATE * max(old.updates) * old.eps[rank][name], name, rank)
        for rank in range(RANKS)
        for name, before in old.tensors[rank].items()
    ]
    most, tolerance, name, rank = max(found, key=lambda one: one[0] / one[1])
    if most <= tolerance and old.moved < _SEEN * tolerance:
        raise HvdtrainError(
            _NOTHING.format("hardly moves its weights"),
            f"by {old.moved:.2g} of their largest value in {max(old.updates)} {_UNITS[old.framework]};"
            f" rounding may come to {tolerance:.2g}",
            f"more updates: --updates {50 * max(old.updates)}",
        )
    whole = old.whole and new.whole
    return ScriptProof(max(old.updates), len(names[0]), name, rank, most, tolerance, old.framework, whole=whole)
