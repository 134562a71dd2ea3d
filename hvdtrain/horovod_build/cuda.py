"""Finds a CUDA compiler and NCCL for the extensions, or puts them together from PyPI's wheels."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from hvdtrain.core.errors import HvdtrainError
from hvdtrain.horovod_build.steps import Commands
from hvdtrain.horovod_build.support import CUDA_ARCHITECTURES, CUDA_WHEELS


def find(version: str, *, source: str, cache: Path, run: Commands) -> tuple[dict[str, str], str]:
    """Returns variables for Horovod's build with a CUDA compiler of `version` ("13.0"), and its origin in words.

    Args:
        source: "auto" (a complete installed toolkit of that version, else wheels), "wheels", or a toolkit's folder.
        cache: folder that keeps the assembled toolkit between builds.

    Raises:
        HvdtrainError: no such compiler can be had; the message names the wheels or the folder that were tried.
    """
    toolkit = _installed_toolkit(version, source) if source != "wheels" else None
    home = toolkit or _home_from_wheels(version, cache, run)
    variables = dict.fromkeys(("CUDA_HOME", "HOROVOD_CUDA_HOME", "CUDAToolkit_ROOT"), str(home))
    variables |= {
        "CUDACXX": str(home / "bin" / "nvcc"),
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_BUILD_CUDA_CC_LIST": CUDA_ARCHITECTURES.get(version, "80,90"),
    }
    # NCCL of the framework's own wheel: both use one library; under the name the linker wants; else CMake searches
    if library := _of_framework("nccl/lib/libnccl.so.2"):
        nccl = cache / "nccl"
        _link(nccl / "lib" / "libnccl.so", str(library))
        _link(nccl / "include", str(library.parent.parent / "include"))
        variables["HOROVOD_NCCL_HOME"] = str(nccl)
    if headers := _of_framework("cu13/include"):  # cuBLAS and others, which PyTorch's headers include
        variables["CPATH"] = str(headers)
    return variables, f"toolkit {toolkit}" if toolkit else f"wheels {', '.join(CUDA_WHEELS[version])}"


def _installed_toolkit(version: str, source: str) -> Path | None:
    installed = [os.environ.get("CUDA_HOME"), f"/usr/local/cuda-{version}", "/usr/local/cuda"]
    candidates = installed if source == "auto" else [source]
    reasons = []
    for candidate in filter(None, candidates):
        reason = _why_incomplete(Path(candidate), version)
        if reason is None:
            return Path(candidate)
        reasons.append(f"{candidate}: {reason}")
    if source != "auto":
        rule = f"--cuda must name a CUDA toolkit of version {version} (PyTorch's; for TensorFlow alone, 13.0)"
        raise HvdtrainError(rule, "; ".join(reasons), "give another folder, or --cuda wheels")
    return None


def _why_incomplete(home: Path, version: str) -> str | None:
    nvcc = home / "bin" / "nvcc"
    if not nvcc.is_file():
        return "no bin/nvcc"
    printed = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    if f"release {version}," not in printed:
        last = printed.strip().splitlines()[-1] if printed.strip() else "nothing"
        return f"nvcc is not of release {version} (it prints {last})"
    for needed in ("include/cuda_runtime.h", "lib64/libcudart.so", "lib64/libcudart_static.a"):
        if not (home / needed).exists():
            return f"no {needed}"
    return None


def _home_from_wheels(version: str, cache: Path, run: Commands) -> Path:
    """Installs the compiler's wheels beside each other; one folder then is a CUDA_HOME but for two links.

    nvcc finds its parts relative to its own real path, so it must not be a link into several site-packages.
    """
    if version not in CUDA_WHEELS:
        rule = f"PyPI does not have a usable CUDA compiler except for CUDA {', '.join(CUDA_WHEELS)}"
        received = f"PyTorch was built with CUDA {version}, and no complete toolkit of that version was found"
        remedy = f"install the CUDA {version} toolkit and pass --cuda DIR, or build with --gpu none"
        raise HvdtrainError(rule, received, remedy)
    target = cache / f"cuda-{version}"
    home = target / "nvidia" / "cu13"
    if not (home / "lib64").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(target)]
        run(f"fetching the CUDA {version} compiler from PyPI (about 100 MB)", command + list(CUDA_WHEELS[version]))
        _link(home / "lib" / "libcudart.so", "libcudart.so.13")
        _link(home / "lib64", "lib")  # last: it marks the folder complete
    return home


def _of_framework(path: str) -> Path | None:
    """Returns a file or folder of the CUDA wheels that the framework comes with, if it is there."""
    found = importlib.util.find_spec("nvidia")
    places = [Path(folder) / path for folder in (found and found.submodule_search_locations) or []]
    return next((place for place in places if place.exists()), None)


def _link(name: Path, target: str) -> None:
    name.parent.mkdir(parents=True, exist_ok=True)
    if name.is_symlink():
        name.unlink()
    name.symlink_to(target)
