"""The current environment: what Horovod will be built for, whether the recipe accepts it; puts the wheel there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.core.errors import HvdtrainError
from hvdtrain.horovod_build.support import CUDA_FOR_TENSORFLOW, note_untested, refuse_unsupported

# Needed by Horovod's setup.py, and (but for setuptools and wheel) at run time by horovodrun.
BUILD_MODULES = {
    "setuptools": "setuptools", "wheel": "wheel", "packaging": "packaging", "cloudpickle": "cloudpickle",
    "psutil": "psutil", "yaml": "pyyaml", "cffi": "cffi",
}  # fmt: skip
NAMES = ("horovod", "hvdtrain-horovod")  # distributions of the module `horovod`
_ELSEWHERE = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER")  # would have pip install where Python does not look
NCCL_OF_TENSORFLOW = "nvidia-nccl-cu12"  # brought by tensorflow[and-cuda]

_PROBE_TORCH = """
import json, torch
print(json.dumps(dict(version=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip,
                      cxx11=bool(torch.compiled_with_cxx11_abi()))))
"""


@dataclass(frozen=True)
class Environment:
    """Everything a wheel depends on; also the cache key."""

    python: str
    python_tag: str  # e.g. cpython-311-x86_64-linux-gnu
    machine: str
    cpu_flags: str  # the instruction sets that Horovod's build turns on by looking at this machine
    torch: str | None
    torch_cuda: str | None  # CUDA version that PyTorch was built with, None for a CPU build
    torch_cxx11: bool | None
    tensorflow: str | None
    cmake: str
    gcc: str
    mpi: str | None
    gpu: str  # "none" or "nccl"
    nccl: str | None

    @property
    def cuda(self) -> str | None:
        """The CUDA that it is compiled with: PyTorch's; without PyTorch, the one for TensorFlow; None: with none."""
        return (self.torch_cuda or CUDA_FOR_TENSORFLOW) if self.gpu == "nccl" else None

    def frameworks(self) -> list[str]:
        return [name for name in ("torch", "tensorflow") if getattr(self, name)]

    def untested(self) -> list[str]:
        """Returns a note for each version that is newer than the tested ones."""
        versions = {"Python": self.python, "torch": self.torch, "tensorflow": self.tensorflow}
        versions |= {"cmake": self.cmake, "gcc": self.gcc}
        return [note for name, version in versions.items() if version and (note := note_untested(name, version))]

    def describe(self) -> str:
        torch = f"torch {self.torch}" if self.torch else "no torch"
        tensorflow = f"TensorFlow {self.tensorflow}" if self.tensorflow else "no TensorFlow"
        gpu = f"NCCL {self.nccl} on CUDA {self.cuda}" if self.cuda else "no GPU support"
        return (
            f"Python {self.python}, {torch}, {tensorflow}, {self.mpi or 'no MPI'}, {gpu}, "
            f"gcc {self.gcc}, cmake {self.cmake}"
        )


def look(gpu: str = "auto", mpi: str = "auto") -> Environment:
    """Probes the environment this runs in; raises HvdtrainError with all that is missing, or too old.

    Args:
        gpu: "auto" (NCCL where `cuda_here` finds what it is for), "none" or "nccl".
        mpi: "auto" (use MPI if its compiler wrapper is installed), "on" or "off".
    """
    problems: list[str] = []
    torch = torch_here(problems)
    tensorflow = distribution_version("tensorflow", "tensorflow-cpu")
    cmake, gcc = _tool_version("cmake", problems), _tool_version("c++", problems)
    versions = {"Python": platform.python_version(), "cmake": cmake, "gcc": gcc}
    versions |= {"torch": torch.get("version"), "tensorflow": tensorflow}
    known = {name: version for name, version in versions.items() if version is not None}
    problems += [reason for name, version in known.items() if (reason := refuse_unsupported(name, version))]
    if not torch and not tensorflow:
        problems.append("neither torch nor tensorflow is installed here: pip install 'hvdtrain[torch,keras]'")
    missing = [package for module, package in BUILD_MODULES.items() if importlib.util.find_spec(module) is None]
    if missing:
        problems.append(f"missing Python packages: pip install {' '.join(missing)}")
    problems += _gpu_problems(gpu, torch)
    mpi_version = _mpi(mpi, problems)
    if problems:
        remedy = "change what is named above, then run `hvdtrain build-horovod` again"
        raise HvdtrainError("this environment cannot build Horovod", "; ".join(problems), remedy)
    use_nccl = gpu == "nccl" or (gpu == "auto" and cuda_here(torch) is not None)
    nccl = distribution_version("nvidia-nccl-cu13", NCCL_OF_TENSORFLOW) or "of the system"
    python_tag = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    return Environment(
        python=platform.python_version(), python_tag=python_tag, machine=platform.machine(), cpu_flags=_cpu_flags(),
        torch=torch.get("version"), torch_cuda=torch.get("cuda"), torch_cxx11=torch.get("cxx11"), tensorflow=tensorflow,
        cmake=cmake or "", gcc=gcc or "", mpi=mpi_version,
        gpu="nccl" if use_nccl else "none", nccl=nccl if use_nccl else None,
    )  # fmt: skip


def torch_here(problems: list[str]) -> dict[str, Any]:
    """PyTorch's version and build, asked in a child so that this process stays small; {}: it is not there."""
    if importlib.util.find_spec("torch") is None:
        return {}
    done = subprocess.run([sys.executable, "-c", _PROBE_TORCH], capture_output=True, text=True)
    if done.returncode:
        problems.append(f"`import torch` fails: {done.stderr.strip().splitlines()[-1]}")
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def cuda_here(torch: dict[str, Any]) -> str | None:
    """The CUDA that a Horovod for the frameworks installed here is compiled with; None: they compute on CPUs.

    Args:
        torch: what `torch_here` found. A build for CPUs decides: its extension takes no CUDA, whatever TensorFlow is.
    """
    if torch:
        return torch.get("cuda")
    for_gpus = distribution_version("tensorflow") and distribution_version(NCCL_OF_TENSORFLOW)
    return CUDA_FOR_TENSORFLOW if for_gpus else None


def distribution_version(*names: str) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _tool_version(tool: str, problems: list[str]) -> str | None:
    path = shutil.which(os.environ.get("HOROVOD_CMAKE", tool) if tool == "cmake" else os.environ.get("CXX", tool))
    if path is None:
        package = {"cmake": "cmake", "c++": "g++"}[tool]
        problems.append(f"{package} is not installed: apt-get install {package}")
        return None
    flag = "--version" if tool == "cmake" else "-dumpfullversion"
    found = re.search(r"\d+(\.\d+)+", subprocess.run([path, flag], capture_output=True, text=True).stdout)
    if found is None:
        problems.append(f"{path} {flag} prints no version")
        return None
    return found.group()


def _gpu_problems(gpu: str, torch: dict[str, Any]) -> list[str]:
    if gpu == "nccl" and torch and torch.get("cuda") is None:
        return [f"--gpu nccl needs a CUDA build of PyTorch, or TensorFlow alone; found torch {torch['version']}"]
    if torch.get("hip") is not None:
        return ["ROCm builds of PyTorch are not supported: nothing here was ever run on one"]
    return []


def _mpi(wanted: str, problems: list[str]) -> str | None:
    """Returns the first line of `mpirun --version` if MPI can be compiled against, else None."""
    found = None
    if wanted != "off" and shutil.which("mpicxx") is not None and shutil.which("mpirun") is not None:
        lines = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout.splitlines()
        found = lines[0].strip() if lines else "MPI"
    if wanted == "on" and found is None:
        problems.append("--mpi on, but mpicxx or mpirun is missing: apt-get install openmpi-bin libopenmpi-dev")
    return found


def mpi_rpath() -> str:
    """ ":" and the folder of libmpi, to append to a run path; "" when the dynamic linker searches that folder anyway.

    An empty entry would make the linker search the current folder, hence the separator belongs to the folder.
    """
    done = subprocess.run(["mpicxx", "--showme:libdirs"], capture_output=True, text=True)
    folder = done.stdout.strip().split(" ")[0] if done.returncode == 0 else ""
    return "" if not folder or folder.startswith("/usr/lib") else f":{folder}"


def _cpu_flags() -> str:
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return ""
    return " ".join(flag for flag in ("avx", "f16c", "fma") if flag in words)


def put_in_place(wheel: Path) -> None:
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
