"""What the recipe accepts. The one table of versions beside setup.cfg's pins.

A range is [first, last): `first` was built and tested, `last` is the first version known or expected not to
work. Everything outside is refused with the reason, because a Horovod that half works trains silently wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

HOROVOD_VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# CUDA compiler parts that PyPI carries as wheels, by the CUDA version of the PyTorch build. They must come from one
# release: nvcc calls cicc (nvvm) and includes crt headers of its own version. Only CUDA 13 wheels share one folder.
CUDA_WHEELS = {
    "13.0": (
        "nvidia-cuda-nvcc==13.0.88",
        "nvidia-cuda-crt==13.0.88",
        "nvidia-nvvm==13.0.88",
        "nvidia-cuda-cccl==13.0.85",
        "nvidia-cuda-runtime==13.0.96",
    ),
}
# Compute capabilities the kernels are compiled for: A100, A10/RTX 30, RTX 40/L4, H100/H200, B200, RTX 50.
# CUDA 13 dropped everything older than 7.5. PTX of the last one serves newer devices.
CUDA_ARCHITECTURES = {"13.0": "80,86,89,90,100,120"}
# Without PyTorch, TensorFlow's extension is compiled with this one and has its runtime inside. TensorFlow's own CUDA is
# 12, of whose compiler PyPI has parts only (nvidia-cuda-nvcc-cu12: ptxas and libnvvm; no nvcc, cudafe++, fatbinary).
CUDA_FOR_TENSORFLOW = "13.0"


@dataclass(frozen=True)
class Range:
    first: str
    last: str
    note: str

    def holds(self, version: str) -> bool:
        return parse(self.first) <= parse(version) < parse(self.last)


SUPPORTED = {
    "Python": Range("3.10", "3.15", "tested on 3.10 to 3.14 (3.14: PyTorch alone)"),
    "torch": Range("2.11", "2.16", "torch 2.16 and newer were not tested; older ones lack headers the edits rely on"),
    "tensorflow": Range("2.20", "2.22", "other releases were not tested: their headers and XLA layout differ"),
    "cmake": Range("3.25", "5", "older ones do not know the CUDA 13 compiler; CMake 5 does not exist yet"),
    "gcc": Range("12", "16", "PyTorch's headers need complete C++17; nvcc 13 takes gcc up to 15"),
}


def torch_cxx_standard(version: str | None) -> str:
    """The C++ standard that PyTorch's headers need: 2.14 and newer refuse to be compiled as C++17."""
    return "20" if version and parse(version) >= (2, 14) else "17"


def parse(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: '2.12.1+cu130' -> (2, 12, 1). Enough for ranges of releases."""
    numbers = []
    for piece in version.split("+")[0].split("."):
        digits = piece[: len(piece) - len(piece.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def refuse_unsupported(name: str, version: str) -> str | None:
    """The reason why `version` of `name` is refused, or None when it is accepted."""
    supported = SUPPORTED[name]
    if supported.holds(version):
        return None
    return f"{name} {version} is not between {supported.first} and {supported.last} (exclusive): {supported.note}"
