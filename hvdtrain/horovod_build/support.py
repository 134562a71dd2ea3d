"""What the recipe accepts. The one table of versions in the code; docs/versions.md lists what was tested and when.

Versions older than `oldest` are refused: they are known not to work. Versions newer than `newest` were not tested. They
are built all the same, with a note: every wheel is proven on 2 ranks before it is used.
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
    "13.2": (
        "nvidia-cuda-nvcc==13.2.86",
        "nvidia-cuda-crt==13.2.86",
        "nvidia-nvvm==13.2.86",
        "nvidia-cuda-cccl==13.2.86",
        "nvidia-cuda-runtime==13.2.86",
    ),
}
# Compute capabilities the kernels are compiled for: A100, A10/RTX 30, RTX 40/L4, H100/H200, B200, RTX 50.
# CUDA 13 dropped everything older than 7.5. PTX of the last one serves newer devices.
CUDA_ARCHITECTURES = dict.fromkeys(CUDA_WHEELS, "80,86,89,90,100,120")
# Without PyTorch, TensorFlow's extension is compiled with this one and has its runtime inside. TensorFlow's own CUDA is
# 12, of whose compiler PyPI has parts only (nvidia-cuda-nvcc-cu12: ptxas and libnvvm; no nvcc, cudafe++, fatbinary).
CUDA_FOR_TENSORFLOW = "13.0"


@dataclass(frozen=True)
class Versions:
    """The supported releases of one dependency."""

    oldest: str  # releases before this one are refused
    newest: str  # the newest release series that was tested
    why: str  # the reason for `oldest`

    def too_old(self, version: str) -> bool:
        return parse(version) < parse(self.oldest)


SUPPORTED = {
    "Python": Versions("3.10", "3.14", "the frameworks have no wheels for older ones"),
    "torch": Versions("2.11", "2.15", "older ones lack headers that the patches rely on"),
    "tensorflow": Versions("2.20", "2.21", "the headers of older ones and their XLA have another layout"),
    "cmake": Versions("3.25", "4", "older ones do not know the CUDA 13 compiler"),
    "gcc": Versions("12", "15", "PyTorch's headers need complete C++17, and C++20 from 2.14 on"),
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
    """Returns the reason why `version` of `name` is refused, or None if it is accepted."""
    supported = SUPPORTED[name]
    if not supported.too_old(version):
        return None
    return f"{name} {version} is not supported: {supported.oldest} is the oldest that is ({supported.why})"


def note_untested(name: str, version: str) -> str | None:
    """Returns a note if `version` of `name` is newer than all tested ones, or None."""
    newest = SUPPORTED[name].newest
    if parse(version)[: len(parse(newest))] <= parse(newest):
        return None
    return f"{name} {version} is newer than {newest}, the newest that was tested: the proof on 2 ranks decides"
