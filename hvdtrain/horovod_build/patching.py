"""The patches that turn Horovod 0.28.1 (2023) into one that builds and works today, and what applies them.

Each is a file of `patches/`: at its head what breaks without it, then a diff as `git apply` takes it. Here they are
applied without git, which an image may lack and whose settings of a user could change a line's end: each line at its
very number, for the source distribution is always the same (`build.checked`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from hvdtrain.core.errors import HvdtrainError

FOLDER = Path(__file__).parent / "patches"

# In this order, for every target.
ALWAYS = (
    "cxx17", "gcc13", "gcc13-gloo", "gcc14-flatbuffers", "cmake4-gloo", "no-distutils", "rpath", "torch-answers-first",
    "check-build-survives", "built-at-once", "gloo-stall-check", "gloo-interface", "gloo-address", "gloo-start-again",
    "torch-wait-sleeps", "idle-cycle", "zero-grad-set-to-none", "broadcast-takes-no-step",
    "horovodrun-no-traceback", "keras3-optimizer", "keras3-sync-batch-norm", "keras3-on-torch", "unity-build",
    "no-debug-symbols", "one-gloo", "xla-ops", "torch-backward-names", "elastic-any-name", "gloo-start-fails",
    "gloo-waits-asleep", "timeline-writes-asleep", "shared-memory",
)  # fmt: skip
# Then, for one target only, and why not for the other. They are the last ones: line numbers above hold for both.
BY_GPU = {
    "none": {"no-cuda": "with NCCL the compiler must be found, and PyTorch's CUDA used"},
    "nccl": {
        "tensorflow-late-nccl": "without NCCL there is nothing to look up",
        "cuda-cxx17": "without NCCL nothing compiles CUDA kernels",
        "cuda-one-abi": "without NCCL nothing compiles CUDA kernels",
        "libcuda-so-1": "without NCCL nothing loads the driver",
    },
}

_FILE = re.compile(
    r"^diff --git a/(.+) b/\1\n(?:new file mode \d+\n)?--- (?:a/\1|/dev/null)\n\+\+\+ b/\1\n", re.MULTILINE
)
_HUNK = re.compile(r"^@@ -(\d+).*\n", re.MULTILINE)


@dataclass(frozen=True)
class Patch:
    """A patch, as its file has it."""

    name: str
    reason: str  # what breaks without it, and where that was reported
    diff: str  # what it changes

    @classmethod
    def read(cls, name: str) -> Patch:
        """Returns the patch of that name."""
        reason, start, diff = (FOLDER / f"{name}.patch").read_text(encoding="utf-8").partition("diff --git ")
        return cls(name, reason.strip(), start + diff)

    def hunks(self) -> Iterable[tuple[str, int, list[str]]]:
        """Yields the file, the number of its first line before this patch (0: a new file), and the lines, of every
        hunk."""
        _, *files = _FILE.split(self.diff)
        for file, text in zip(files[::2], files[1::2], strict=True):
            _, *hunks = _HUNK.split(text)
            for first, lines in zip(hunks[::2], hunks[1::2], strict=True):
                yield file, int(first), lines.split("\n")[:-1]


def needed(gpu: str) -> list[Patch]:
    """Returns the patches for a build with `gpu` support ("none" or "nccl"), in their order."""
    return [Patch.read(name) for name in (*ALWAYS, *BY_GPU[gpu])]


def apply(source: Path, patches: Iterable[Patch]) -> None:
    """Applies `patches` to the unpacked source distribution at `source`."""
    for patch in patches:
        grown: dict[str, int] = {}  # lines that the hunks above added to the file
        for file, first, hunk in patch.hunks():
            path = source / file
            lines = path.read_bytes().decode().split("\n") if first else [""]
            before = [line[1:] for line in hunk if line[:1] != "+"]
            after = [line[1:] for line in hunk if line[:1] != "-"]
            start = max(first - 1, 0) + grown.get(file, 0)
            if lines[start : start + len(before)] != before:
                received = f"other lines from {start + 1} on"
                raise HvdtrainError(f"patch '{patch.name}' must find its lines in {file}", received)
            lines[start : start + len(before)] = after
            grown[file] = grown.get(file, 0) + len(after) - len(before)
            path.write_bytes("\n".join(lines).encode())


def table() -> str:
    """Returns the patches for people: name, files, when, reason."""
    when = {name: f"--gpu {gpu} only: {why}" for gpu, names in BY_GPU.items() for name, why in names.items()}
    lines = []
    for name in (*ALWAYS, *when):
        patch = Patch.read(name)
        files = ", ".join(dict.fromkeys(file for file, _, _ in patch.hunks()))
        lines.append(f"{name}  ({files}; {when.get(name, 'always')})\n{indent(patch.reason, '    ')}\n")
    return "\n".join(lines)
