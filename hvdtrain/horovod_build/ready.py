"""Installs a ready wheel (`dist`) where one fits: for these frameworks, without a compiler."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from hvdtrain.core import variables
from hvdtrain.core.errors import HvdtrainError
from hvdtrain.horovod_build.build import cache_folder, make_folder
from hvdtrain.horovod_build.dist import NAME, version_for
from hvdtrain.horovod_build.environment import cuda_here, distribution_version, mpi_here, torch_here
from hvdtrain.horovod_build.proof import prove
from hvdtrain.horovod_build.steps import Commands, Say
from hvdtrain.horovod_build.swap import pip, replace


def install(location: str, say: Say) -> str:
    """Installs the ready wheel that fits from a folder, or a page of links, once it is proven; returns its version.

    Raises HvdtrainError if none fits, or the proof fails; then the installed Horovod stays as it was.
    """
    problems: list[str] = []
    torch, tensorflow = torch_here(problems), distribution_version("tensorflow", "tensorflow-cpu")
    if problems or not (torch or tensorflow):
        rule = "a ready wheel of Horovod needs an installed PyTorch or TensorFlow"
        received = "; ".join(problems) or "neither torch nor tensorflow is installed here"
        raise HvdtrainError(rule, received, "pip install 'hvdtrain[torch,keras]'")
    frameworks = [name for name, there in (("torch", torch), ("tensorflow", tensorflow)) if there]
    cuda = cuda_here(torch)
    wanted = {version_for(torch.get("version"), cuda, tensorflow, mpi): mpi for mpi in (mpi_here(), None)}
    make_folder(cache_folder(), f"{variables.CACHE}=DIR")
    run = Commands(cache_folder() / "ready.log", say)
    none, failed = [], []
    with tempfile.TemporaryDirectory(prefix="hvdtrain-ready-") as folder:
        for version, mpi in wanted.items():
            found = pip(
                "download", "--no-deps", "--no-index", "--find-links", location, "-d", folder, f"{NAME}=={version}"
            )
            if found.returncode:
                lines = [line for line in found.stderr.splitlines() if line.startswith(("ERROR", "WARNING"))]
                none.append("; ".join(lines) or found.stderr.strip()[-2000:])
                continue
            (wheel,) = Path(folder).glob(f"*-{version}-*.whl")
            try:
                _check(wheel)
                prove(wheel, frameworks, run, mpi=mpi, nccl=cuda is not None)
            except HvdtrainError as error:
                failed.append(error)
                say(f"{wheel.name} is not taken: {error.rule}")
                continue
            say(f"installing {wheel.name}")
            replace(wheel)
            return version
    if failed:
        raise failed[0]
    rule = f"a ready wheel of Horovod must be of version {' or '.join(wanted)}"
    received = f"pip finds none at {location}: {'; '.join(dict.fromkeys(none))}"
    raise HvdtrainError(rule, received, "hvdtrain build-horovod --install")


def _check(wheel: Path) -> None:
    """Refuses a wheel that is damaged, or needs what is not there."""
    with zipfile.ZipFile(wheel) as packed:
        damaged = packed.testzip()
    if damaged:
        raise HvdtrainError("a ready wheel must be whole", f"{wheel.name} is damaged: {damaged}", "copy it again")
    checked = pip("install", "--dry-run", "--no-index", str(wheel))
    if checked.returncode:
        rule = "a ready wheel must find what it needs"
        raise HvdtrainError(rule, f"{wheel.name}: {checked.stderr.strip()[-2000:]}", "pip install what pip names")
