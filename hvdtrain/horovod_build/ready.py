"""Installs a ready wheel (`dist`) where one fits: for these frameworks, without a compiler."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from hvdtrain.core.errors import HvdtrainError
from hvdtrain.horovod_build.dist import NAME, version_for
from hvdtrain.horovod_build.environment import distribution_version, torch_here
from hvdtrain.horovod_build.proof import prove_installed
from hvdtrain.horovod_build.steps import Say, Steps


def install(location: str, say: Say) -> str:
    """Installs the ready wheel that fits from a folder, or a page of links, and proves it; returns its version.

    Raises:
        HvdtrainError: none fits, and nothing was changed; or the proof failed, and the wheel is gone again.
    """
    problems: list[str] = []
    torch, tensorflow = torch_here(problems), distribution_version("tensorflow", "tensorflow-cpu")
    if problems or not (torch or tensorflow):
        raise HvdtrainError(
            "a ready wheel of Horovod is for frameworks that are installed",
            "; ".join(problems) or "neither torch nor tensorflow is installed here",
            "pip install 'hvdtrain[torch,keras]'",
        )
    wanted = [version_for(torch.get("version"), torch.get("cuda"), tensorflow, mpi) for mpi in _mpi()]
    refused = []
    for version in wanted:
        choice = ["--no-index", "--find-links", location, f"{NAME}=={version}"]
        found = _pip("install", "--dry-run", *choice)
        if found.returncode:
            refused.append(found.stderr.strip().splitlines()[-1])
            continue
        with tempfile.TemporaryDirectory(prefix="hvdtrain-ready-") as folder:
            run = Steps(Path(folder) / "log", say)
            remove("horovod")
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", *choice]
            run(f"installing {NAME} {version}", command)
            frameworks = [name for name, there in (("torch", torch), ("tensorflow", tensorflow)) if there]
            try:
                prove_installed(frameworks, run)
            except HvdtrainError:
                remove(NAME)
                raise
        return version
    raise HvdtrainError(
        f"a ready wheel of Horovod must be of version {' or '.join(wanted)}",
        f"pip finds none at {location}: {'; '.join(dict.fromkeys(refused))}",
        "hvdtrain build-horovod --install",
    )


def remove(name: str) -> None:
    """Uninstalls a distribution of the module `horovod`, if it is there: pip would install another over it, and later
    remove files of both with one."""
    with suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution(name)
        done = _pip("uninstall", "-y", name)
        if done.returncode:
            raise HvdtrainError("the old Horovod must go", done.stderr.strip()[-2000:], f"pip uninstall {name}")


def _mpi() -> list[str | None]:
    """With MPI first, where one can start ranks."""
    if shutil.which("mpirun") is None:
        return [None]
    lines = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout.splitlines()
    return [lines[0] if lines else "MPI", None]


def _pip(verb: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", verb, "-q", "--disable-pip-version-check", *words]
    return subprocess.run(command, capture_output=True, text=True)
