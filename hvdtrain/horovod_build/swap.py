"""Puts a wheel in the place of whatever Horovod is installed here, or leaves that as it was."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.core.errors import HvdtrainError

NAMES = ("horovod", "hvdtrain-horovod")  # distributions of the module `horovod`
_ELSEWHERE = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER")  # would have pip install where Python does not look
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def replace(wheel: Path) -> None:
    """Installs a wheel of `NAMES` alone: pip would lay one over the other, and later remove files of both with one.

    Signals wait until it is done. Raises HvdtrainError if it cannot be done; then the old one is as it was.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-old-horovod-") as folder, _signals_wait():
        installed = [name for name in NAMES if _files(name) is not None]
        kept = _keep(installed, Path(folder))
        try:
            for name in installed:
                _must(f"the old {name} must go", "uninstall", "-y", name)
            _must("the wheel must install", "install", "--no-deps", "--no-index", str(wheel))
        except BaseException:
            _put_back(kept)
            raise


def pip(verb: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs pip for this environment; what it printed is in the result."""
    command = [sys.executable, "-m", "pip", verb, "-q", "--disable-pip-version-check", *words]
    env = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    # a session of its own: Ctrl-C at the terminal is for the caller, who knows whether to wait
    return subprocess.run(command, capture_output=True, text=True, env=env, start_new_session=True)


def _must(rule: str, verb: str, *words: str) -> None:
    done = pip(verb, *words)
    if done.returncode:
        remedy = f"what was installed is there as before; by hand: {sys.executable} -m pip {verb} {' '.join(words)}"
        raise HvdtrainError(rule, done.stderr.strip()[-2000:], remedy)


def _files(name: str) -> list[Path] | None:
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return [Path(str(found.locate_file(file))).resolve() for file in found.files or ()]


def _keep(names: list[str], folder: Path) -> list[tuple[Path, Path]]:
    """Copies the files of distributions; returns where each was, and its copy."""
    files = {path for name in names for path in _files(name) or () if path.is_file()}
    kept = [(path, folder / str(number)) for number, path in enumerate(sorted(files))]
    for path, copy in kept:
        shutil.copy2(path, copy)
    return kept


def _put_back(kept: list[tuple[Path, Path]]) -> None:
    for name in NAMES:
        if _files(name) is not None:
            pip("uninstall", "-y", name)
    shutil.rmtree(Path(sysconfig.get_path("platlib")) / "horovod", ignore_errors=True)  # pip's, when it failed midway
    for path, copy in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(copy, path)


@contextmanager
def _signals_wait() -> Iterator[None]:
    came: list[int] = []
    before = {number: signal.signal(number, lambda which, _: came.append(which)) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for which in came[:1]:
            os.kill(os.getpid(), which)
