"""Puts a wheel in the place of whatever Horovod is installed here."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from hvdtrain.core.errors import HvdtrainError

NAMES = ("horovod", "hvdtrain-horovod")  # distributions of the module `horovod`
_ELSEWHERE = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER")  # would have pip install where Python does not look


def replace(wheel: Path) -> None:
    """Installs a wheel of `NAMES` alone: pip would lay one over the other, and later remove files of both with one.

    The wheel has been proven: pip has installed it elsewhere. Raises HvdtrainError if pip cannot do it here.
    """
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    for name in NAMES:
        if name in installed:
            _must(wheel, "uninstall", "-y", name)
    _must(wheel, "install", "--no-deps", "--no-index", str(wheel))


def _must(wheel: Path, verb: str, *words: str) -> None:
    command = [sys.executable, "-m", "pip", verb, "-q", "--disable-pip-version-check", *words]
    env = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        remedy = f"{sys.executable} -m pip install --force-reinstall --no-deps --no-index {wheel}"
        raise HvdtrainError(f"pip cannot {verb} Horovod here", done.stderr.strip()[-2000:], remedy)
