"""Old and new script, each for some updates on two ranks: do they come to the same weights?"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hvdtrain.core.errors import ConfigError, HvdtrainError, build_horovod_command

RANKS = 2
# of a type's own precision, for each update: sums over ranks may be taken in another order
_EPS_PER_UPDATE = 8
_TAIL_LINES = 30
_GRACE_S = 20
_UNDONE = {"hvdtrain": ": that hvdtrain gives each rank random numbers of its own was undone", "ddp": ""}
_RANK = (sys.executable, "-m", "hvdtrain.migrate.rank")
_UNITS = {"torch": "updates", "keras": "batches of fit"}
_NAMES = {"torch": "PyTorch", "keras": "Keras"}
_TORCHRUN = (
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
    "--nproc-per-node", str(RANKS), *_RANK[1:],
)  # fmt: skip


@dataclass(frozen=True)
class ScriptProof:
    """How far two scripts have come apart.

    Attributes:
        updates: that each made.
        tensors: how many were compared, of each rank: parameters and buffers.
        name: of the tensor that differs most, for its size.
        rank: where.
        difference: the largest of its elements' differences, divided by the largest of its values.
        tolerance: of its type, for so many updates.
        framework: of the scripts: torch, keras.
        target: what the new one was moved to.
        whole: they were run to their end.
    """

    updates: int
    tensors: int
    name: str
    rank: int
    difference: float
    tolerance: float
    framework: str = "torch"
    target: str = "hvdtrain"
    whole: bool = True

    @property
    def holds(self) -> bool:
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        where = f"{self.difference:.3g} of its largest value in {self.name!r} on rank {self.rank}"
        apart = "" if self.holds else "NOT PROVEN: "
        lines = [
            f"{apart}after {self.updates} {_UNITS[self.framework]} on {RANKS} ranks the {self.tensors} tensors of the"
            f" old and the new script differ by at most {where} (tolerance {self.tolerance:.2g})",
            "made alike: both begin with seed 0 on rank 0 and 1 on rank 1 for Python, numpy and"
            f" {_NAMES[self.framework]}, and draw on as the script has it{_UNDONE[self.target]}",
            *([] if self.whole else ["not compared: what the script does after these (--updates N for more of it)"]),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class ScriptRun:
    """What a script came to.

    Attributes:
        updates: of each rank.
        eps: the precision of each tensor's type, by its name.
        tensors: of each rank, by name.
        framework, whole: as of `ScriptProof`.
    """

    updates: list[int]
    eps: list[dict[str, float]]
    tensors: list[dict[str, np.ndarray]]
    framework: str = "torch"
    whole: bool = True


def prove(
    script: Path, new: str, argv: Sequence[str], *,
    updates: int = 20, timeout_s: float = 600, framework: str = "torch", target: str = "hvdtrain",
) -> ScriptProof:  # fmt: skip
    """Runs a script as it is and as `new`, and compares.

    Raises:
        HvdtrainError: one of them failed, made no update, or they made unlike numbers of them.
    """
    old = run(script, None, argv, updates=updates, timeout_s=timeout_s, which="old", framework=framework)
    kind = "ddp" if target == "ddp" else framework
    made = run(script, new, argv, updates=updates, timeout_s=timeout_s, which="new", framework=kind)
    return replace(compare(old, made), target=target)


def run(
    script: Path, text: str | None, argv: Sequence[str], *,
    updates: int, timeout_s: float, which: str, framework: str = "torch",
) -> ScriptRun:  # fmt: skip
    """Runs `text` on two ranks as if it were the script, which is what runs without it, up to so many updates.

    Args:
        framework: torch and keras are run by horovodrun, ddp by torchrun.

    Raises:
        HvdtrainError: it failed, or took too long.
    """
    starts = _TORCHRUN if framework == "ddp" else (_horovodrun(), "--gloo", "-np", str(RANKS), *_RANK)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-migrate-") as name:
        folder = Path(name)
        (folder / "text.py").write_bytes(script.read_bytes() if text is None else text.encode())
        ranks = [framework, str(folder / "text.py"), str(script.resolve()), str(folder), str(updates), *argv]
        _start([*starts, *ranks], which, folder, updates, timeout_s)
        return _read(folder, framework)


def _horovodrun() -> str:
    beside = Path(sys.executable).with_name("horovodrun")
    horovodrun = str(beside) if beside.is_file() else shutil.which("horovodrun")
    if horovodrun is None:
        raise ConfigError("a proof runs both scripts on Horovod", "no horovodrun", build_horovod_command())
    return horovodrun


def _start(command: Sequence[str], which: str, folder: Path, updates: int, timeout_s: float) -> None:
    """Starts the ranks, in a folder where what they write meets nobody; all of the current one is linked there."""
    work = folder / "work"
    work.mkdir()
    for path in Path.cwd().iterdir():
        (work / path.name).symlink_to(path)
    package = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))}
    process = subprocess.Popen(
        command, cwd=work, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:
        said = _end(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise HvdtrainError(f"the {which} script made no {updates} updates in {timeout_s:g} s", _last(said)) from error
    if process.returncode:
        raise HvdtrainError(f"the {which} script failed, with exit code {process.returncode}", _last(said))


def _end(process: subprocess.Popen[str]) -> str:
    """horovodrun ends its ranks, which are in sessions of their own, when it is asked to; returns what was printed."""
    process.terminate()
    try:
        return process.communicate(timeout=_GRACE_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def _last(said: str) -> str:
    return "\n".join(said.rstrip().splitlines()[-_TAIL_LINES:])


def _read(folder: Path, framework: str) -> ScriptRun:
    records = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    tensors = []
    for rank, record in enumerate(records):
        with np.load(folder / f"{rank}.npz") as arrays:
            tensors.append(dict(zip(record["eps"], (arrays[name] for name in arrays.files), strict=True)))
    eps = [record["eps"] for record in records]
    whole = all(record["whole"] for record in records)
    return ScriptRun([record["updates"] for record in records], eps, tensors, framework, whole)


def compare(old: ScriptRun, new: ScriptRun) -> ScriptProof:
    """Compares each rank's tensors with the same rank's of the other run.

    Raises:
        HvdtrainError: no update, unlike numbers of them, or other models.
    """
    if old.updates != new.updates or not min(old.updates):
        raise HvdtrainError(
            "both scripts make as many updates with the optimizer of all ranks, one or more",
            f"by rank: the old one {old.updates}, the new one {new.updates}",
        )
    names = [list(tensors) for tensors in (*old.tensors, *new.tensors)]
    if any(one != names[0] for one in names) or not names[0]:
        unlike = sorted(set(names[0]) ^ set(names[RANKS]))[:3]
        raise HvdtrainError("both scripts have the same models", f"only in one: {', '.join(unlike) or 'another order'}")
    found = [
        (_gap(before, new.tensors[rank][name]), _EPS_PER_UPDATE * max(old.updates) * old.eps[rank][name], name, rank)
        for rank in range(RANKS)
        for name, before in old.tensors[rank].items()
    ]
    gap, tolerance, name, rank = max(found, key=lambda one: one[0] / one[1])
    whole = old.whole and new.whole
    return ScriptProof(max(old.updates), len(names[0]), name, rank, gap, tolerance, old.framework, whole=whole)


def _gap(before: np.ndarray, after: np.ndarray) -> float:
    """The largest difference, for the size of the largest value; infinite where the shapes differ, or one is NaN."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return math.inf
    if np.array_equal(before, after):
        return 0.0
    wide = [array.astype(complex if np.iscomplexobj(array) else float) for array in (before, after)]
    gap = float(np.abs(wide[1] - wide[0]).max()) / (float(np.abs(wide[0]).max()) or 1.0)
    return gap if math.isfinite(gap) else math.inf
