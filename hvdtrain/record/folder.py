"""The directory of a run: chooses it, and whether to resume the run in it.

Only the standard library is used, so that a wrong directory is reported before a framework is imported.
"""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

from hvdtrain.core import variables
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.launchers import job_of, restarts
from hvdtrain.record.log_files import read_run


def place_of(path: str | os.PathLike[str]) -> Path:
    """Returns where a program writes: `path`; in `hvdtrain rehearse` a place in the rehearsal's own folder."""
    folder, wanted = os.environ.get(variables.REHEARSAL), Path(path)
    if not folder or wanted.absolute().is_relative_to(folder):
        return wanted
    number = hashlib.sha256(os.fsencode(wanted.absolute())).hexdigest()[:8]
    return Path(folder) / "written" / f"{wanted.name}-{number}"


def choose_run_dir(wanted: Path | None, stem: str, *, resume: bool, data_sha256: str) -> Path:
    """Returns the directory of this run: `wanted`, or the next (when resuming, the newest) `runs/<stem>-N`.

    Raises:
        ConfigError: nothing to resume, or a run on other data; `runs` cannot be written.
    """
    root = place_of("runs")
    if resume:
        run_dir = wanted or root / f"{stem}-{max(_numbered(root, stem), default=0)}"
        _check_resumable(run_dir, data_sha256)
        return run_dir
    if wanted is not None:
        return wanted
    try:
        return next_folder(root, stem)
    except OSError as error:
        received = f"{root.absolute()}: {error.strerror}"
        raise ConfigError("a run needs a directory to write to", received, "name one: --run-dir DIR") from error


def next_folder(root: Path, stem: str) -> Path:
    """Makes the next free folder `<stem>-N` below `root`, and returns it."""
    number = max(_numbered(root, stem), default=0)
    while True:
        number += 1
        try:
            (root / f"{stem}-{number}").mkdir(parents=True)  # ours now: another run takes the next number
            return root / f"{stem}-{number}"
        except FileExistsError:
            continue


def _numbered(root: Path, stem: str) -> dict[int, Path]:
    """The directories `<stem>-N` below `root`, by number, in its order."""
    named = {path.name.removeprefix(f"{stem}-"): path for path in root.glob(f"{stem}-*")}
    return dict(sorted((int(number), path) for number, path in named.items() if number.isdecimal()))


def choose_run(wanted: Path | None, stem: str, *, resume: bool, data_sha256: str) -> tuple[Path, bool]:
    """Returns this run's directory, and True if the run in it is to be resumed; call it on rank 0.

    Chooses as `choose_run_dir` does; a restarted job resumes its earlier run even without `resume`.

    Raises:
        ConfigError: as `choose_run_dir`; or the job has made several runs, and you must name one.
    """
    if not resume and restarts(os.environ):
        own = [
            run_dir
            for run_dir in ([wanted] if wanted else _numbered(place_of("runs"), stem).values())
            if goes_on(run_dir)
        ]
        if len(own) > 1 and job_of(os.environ):
            received = f"restart {restarts(os.environ)} of {job_of(os.environ)}, which made {', '.join(map(str, own))}"
            raise ConfigError("a restarted job must know which run to resume", received, "name it: --run-dir DIR")
        if own:
            wanted, resume = own[-1], True
    return choose_run_dir(wanted, stem, resume=resume, data_sha256=data_sha256), resume


def goes_on(run_dir: Path) -> bool:
    """Returns True if this job was started again and `run_dir` holds its earlier run (any, if the job has no name)."""
    if not restarts(os.environ):
        return False
    earlier, job = read_run(run_dir), job_of(os.environ)
    return earlier is not None and any(job in (None, attempt.get("job")) for attempt in earlier.get("attempts", [{}]))


def check_run_dir(run_dir: Path, *, resume: bool) -> None:
    """Raises ConfigError for a directory that cannot be written, or holds a run that has ended."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        earlier = read_run(run_dir)
        if not os.access(run_dir, os.W_OK):
            raise PermissionError(errno.EACCES, f"not writable by user {os.getuid()}")
    except OSError as error:
        rule, received = "a run directory must be one that this user can write", f"{run_dir}: {error.strerror}"
        raise ConfigError(rule, received, "name another: --run-dir DIR") from error
    status = (earlier or {}).get("status", "running")
    if status != "running" and not (resume or goes_on(run_dir)):  # one that says "running" may be alive: RunLog knows
        received = f"{run_dir} holds a run that is {status}"
        raise ConfigError(
            "a run directory cannot hold two runs", received, "name another: --run-dir DIR, or --resume", code=41
        )


def _check_resumable(run_dir: Path, data_sha256: str) -> None:
    try:
        earlier = read_run(run_dir)
    except OSError as error:
        received = f"{run_dir}: {error.strerror}"
        raise ConfigError("--resume needs a readable run directory", received, "correct --run-dir") from error
    if earlier is None:
        remedy = "leave --resume out to start a run, or name its directory: --run-dir DIR"
        raise ConfigError("--resume needs a run to resume", f"no run in {run_dir}", remedy)
    config = earlier.get("config", {})
    if config.get("data_sha256") != data_sha256:
        received = f"{run_dir} was trained on other data: {config.get('data')}"
        raise ConfigError("a run must resume with the data it was started with", received, "give the same --data")
