"""What a program does around its training: flags, cores, imports, the run directory, and how it ends.

Only the standard library is used, so that a wrong flag or a missing package is told within a second, before a
framework is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from hvdtrain.engines import choose_engine
from hvdtrain.errors import (
    ConfigError,
    HvdtrainError,
    LauncherError,
    build_horovod_command,
    exit_with,
    install_command,
)
from hvdtrain.launchers import Detected, detect
from hvdtrain.records import read_run
from hvdtrain.restart import job_of, restarts

# ---- flags


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `ConfigError`: told once (by rank 0) on any number of ranks."""

    def __init__(self, module: str, *, description: str, epilog: str) -> None:
        super().__init__(
            f"python -m {module}",
            description=description,
            epilog=epilog,
            usage="%(prog)s [flags]",
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32),
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message[:1].upper() + message[1:], remedy=f"{self.prog} --help", shared=True)


def whole(least: int) -> Callable[[str], int]:
    """A type for flags: a whole number, at least `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, not {text!r}")
        return value

    return parse


def positive(text: str) -> float:
    """A type for flags: a finite number above 0."""
    value = _finite(text)
    if value is None or value <= 0:
        raise argparse.ArgumentTypeError(f"must be a number > 0, not {text!r}")
    return value


def at_least_0(text: str) -> float:
    """A type for flags: a finite number, 0 or more."""
    value = _finite(text)
    if value is None or value < 0:
        raise argparse.ArgumentTypeError(f"must be a number >= 0, not {text!r}")
    return value


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


# ---- the end

# Launchers kill all ranks when the first one ends. An error that every rank has is told whole by rank 0, so the others
# give it this time; they are usually killed within it.
RANK_0_SPEAKS_FIRST_S = 3.0


def run_program(name: str, work: Callable[[Detected], None]) -> int:
    """Runs ``work(detected)``; returns 0. An error is printed as one block, and the process ends with it.

    A rank that ends takes the others with it, through their launcher: none is left waiting.
    """
    rank = 0
    try:
        detected = detect(os.environ)
        rank = detected.rank
        work(detected)
    except KeyboardInterrupt:
        exit_with(name, HvdtrainError("interrupted", shared=True), rank)
    except Exception as error:
        if rank and isinstance(error, HvdtrainError) and error.shared:
            time.sleep(RANK_0_SPEAKS_FIRST_S)
        exit_with(name, error, rank)
    return 0


# ---- cores and imports


def share_cores(detected: Detected) -> None:
    """Divides this machine's cores among its ranks: else each starts a thread per core, and they fight.

    Variables that are set already stay as they are.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // max(1, detected.local_size))
    for variable in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        os.environ.setdefault(variable, str(threads))
    # OpenMP's idle threads spin by default, on cores that Horovod's thread and other programs need too: on a busy
    # machine two threads of torch were 10 times slower than one, and 5 times faster again without spinning
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def keras_modules(backend: str, detected: Detected) -> dict[str, str]:
    """The modules that Keras on a backend needs, in the order to import them, each with the command that helps.

    Horovod is among them only if a launcher started this process.

    Raises:
        ConfigError: a backend that hvdtrain has no adapter for.
    """
    install = {
        "tensorflow": install_command("keras", "build"),
        "torch": install_command("keras", "torch", "build"),
    }
    if backend not in install:
        remedy = "--backend tensorflow|torch, or KERAS_BACKEND"
        raise ConfigError("hvdtrain trains Keras on tensorflow or torch", backend, remedy, shared=True)
    horovod = build_horovod_command()
    launched = detected.launcher != "none"
    needed = {"numpy": install[backend]}
    needed |= {"horovod": horovod} if launched else {}  # before the slow ones: a broken one is known at once
    needed |= {backend: install[backend], "keras": install[backend]}
    needed |= {f"horovod.{backend}": horovod} if launched else {}
    return needed


# the engine imports it: it looks for an accelerator while it loads, and must be told which before
_LEFT_TO_THE_ENGINE = {"deepspeed"}
# what an engine needs beside PyTorch, each with the command that helps
_ENGINE_MODULES: dict[str, Callable[[], dict[str, str]]] = {
    "horovod": lambda: dict.fromkeys(("horovod", "horovod.torch"), build_horovod_command()),
    "deepspeed": lambda: {"deepspeed": install_command("torch", "deepspeed")},
}


def torch_modules(engine: str, detected: Detected, *, torchvision: bool = True) -> dict[str, str]:
    """The modules that a PyTorch program needs under an engine, in the order to import them, each with the command
    that helps.

    Args:
        engine: as the user gave it; "auto" is resolved as `hvdtrain.init` does.
        detected: what the launcher says.
        torchvision: whether the program uses it.

    Raises:
        LauncherError: this launcher cannot start that engine's ranks.
    """
    try:
        chosen = choose_engine(engine, detected, "torch")
    except HvdtrainError as error:
        error.shared = True  # the launcher told every rank the same
        raise
    install = install_command("torch", "build")
    needed = dict.fromkeys(("numpy", "torch", *(["torchvision"] * torchvision)), install)
    return needed | _ENGINE_MODULES.get(chosen, dict)()


def find_modules(needed: Mapping[str, str]) -> None:
    """Looks for modules without importing them; takes milliseconds.

    Args:
        needed: module to the command that installs it.

    Raises:
        LauncherError: names all that are missing, this Python, and the commands.
    """
    roots = dict.fromkeys(name.partition(".")[0] for name in needed)
    missing = [root for root in roots if importlib.util.find_spec(root) is None]
    if missing:
        commands = [command for name, command in needed.items() if name.partition(".")[0] in missing]
        raise LauncherError(
            f"every rank needs {', '.join(roots)}",
            f"no {', '.join(missing)} in {_this_python()}",
            # the frameworks first: Horovod is built for those it finds
            " && ".join(sorted(dict.fromkeys(commands), key=lambda command: "build-horovod" in command)),
        )


def import_modules(needed: Mapping[str, str]) -> None:
    """Imports modules, quietly; one that is broken is an error with the command that helps.

    Raises:
        LauncherError: it cannot be loaded.
    """
    with quiet():
        for name, command in needed.items():
            if name in _LEFT_TO_THE_ENGINE:
                continue
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise LauncherError(f"{name} must load in {_this_python()}", str(error), command) from error


def _this_python() -> str:
    return f"{sys.executable} (Python {sys.version.split()[0]}) on {socket.gethostname()}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps TensorFlow's C++ notes off the terminal, unless TF_CPP_MIN_LOG_LEVEL asks for them.

    While it loads, TensorFlow writes to file descriptor 2 before any log level counts. That goes to a file,
    which is shown if loading fails.
    """
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # errors
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as notes:
        os.dup2(notes.fileno(), 2)
        loaded = False
        try:
            yield
            loaded = True
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            if not loaded:
                notes.seek(0)
                sys.stderr.write(notes.read().decode(errors="replace"))


# ---- the run directory


def choose_run_dir(wanted: Path | None, stem: str, *, resume: bool, data_sha256: str) -> Path:
    """The directory of this run; call it on rank 0.

    Args:
        wanted: what the user gave; None: the next free ``runs/<stem>-N`` (when resuming, the newest).
        stem: the program's name.
        resume: whether to go on with the run that is there.
        data_sha256: of the training data.

    Raises:
        ConfigError: nothing to resume, or a run on other data; ``runs`` cannot be written.
    """
    root = Path("runs")
    newest = max((int(path.name.removeprefix(f"{stem}-")) for path in _numbered(stem)), default=0)
    if resume:
        run_dir = wanted or root / f"{stem}-{newest}"
        _check_resumable(run_dir, data_sha256)
        return run_dir
    if wanted is not None:
        return wanted
    while True:
        newest += 1
        try:
            (root / f"{stem}-{newest}").mkdir(parents=True)  # ours now: another run takes the next number
            return root / f"{stem}-{newest}"
        except FileExistsError:
            continue
        except OSError as error:
            came = f"{root.absolute()}: {error.strerror}"
            raise ConfigError("a run needs a directory to write to", came, "name one: --run-dir DIR") from error


def _numbered(stem: str) -> list[Path]:
    """The directories ``runs/<stem>-N``, by number."""
    numbers = [path.name.removeprefix(f"{stem}-") for path in Path("runs").glob(f"{stem}-*")]
    return [Path("runs") / f"{stem}-{n}" for n in sorted((n for n in numbers if n.isdecimal()), key=int)]


def choose_run(wanted: Path | None, stem: str, *, resume: bool, data_sha256: str) -> tuple[Path, bool]:
    """The directory of this run, and whether to go on with what is in it; call it on rank 0.

    As `choose_run_dir`; and a job that was started again (`hvdtrain.restart`) goes on with the run that it made
    earlier, without `resume`. If it had not come so far as to make one, it starts.

    Raises:
        ConfigError: as `choose_run_dir`; or the job has made several runs, so that it takes a name to tell which.
    """
    if not resume and restarts(os.environ):
        own = [run_dir for run_dir in ([wanted] if wanted else _numbered(stem)) if goes_on(run_dir)]
        if len(own) > 1 and job_of(os.environ):
            came = f"restart {restarts(os.environ)} of {job_of(os.environ)}, which made {', '.join(map(str, own))}"
            raise ConfigError("a job that is started again goes on with its run", came, "name it: --run-dir DIR")
        if own:
            wanted, resume = own[-1], True
    return choose_run_dir(wanted, stem, resume=resume, data_sha256=data_sha256), resume


def goes_on(run_dir: Path) -> bool:
    """Whether this process belongs to a job that was started again, and `run_dir` holds the run that it made earlier.

    Where nothing names the job, whatever run is there is taken for its own.
    """
    if not restarts(os.environ):
        return False
    earlier, job = read_run(run_dir), job_of(os.environ)
    return earlier is not None and any(job in (None, attempt.get("job")) for attempt in earlier.get("attempts", [{}]))


def check_run_dir(run_dir: Path, *, resume: bool) -> None:
    """Refuses what `RunLog` will refuse, as far as that can be told before a framework is imported.

    Raises:
        ConfigError: cannot be written, or holds a run that has ended.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        earlier = read_run(run_dir)
    except OSError as error:
        came = f"{run_dir}: {error.strerror}"
        raise ConfigError(
            "a run directory is one that this user can write", came, "name another: --run-dir DIR"
        ) from error
    if not os.access(run_dir, os.W_OK):
        came = f"{run_dir}: not writable by user {os.getuid()}"
        raise ConfigError("a run directory is one that this user can write", came, "name another: --run-dir DIR")
    status = (earlier or {}).get("status", "running")
    if status != "running" and not (resume or goes_on(run_dir)):  # one that says "running" may be alive: RunLog knows
        came = f"{run_dir} holds a run that is {status}"
        raise ConfigError("a run directory holds one run", came, "name another: --run-dir DIR, or add --resume")


def _check_resumable(run_dir: Path, data_sha256: str) -> None:
    try:
        earlier = read_run(run_dir)
    except OSError as error:
        came = f"{run_dir}: {error.strerror}"
        raise ConfigError("--resume reads a run's directory", came, "correct --run-dir") from error
    if earlier is None:
        remedy = "leave --resume out to start a run, or name its directory: --run-dir DIR"
        raise ConfigError("--resume goes on with a run", f"no run in {run_dir}", remedy)
    config = earlier.get("config", {})
    if config.get("data_sha256") != data_sha256:
        came = f"{run_dir} was trained on other data: {config.get('data')}"
        raise ConfigError("a run goes on with the data it was started with", came, "give the same --data")
