"""A checkpoint part that is nothing but bytes, and two of them as a state."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hvdtrain.checkpoint.parts import Part
from hvdtrain.checkpoint.staging import StateFile


class Blob(Part):
    """Bytes that save and load themselves."""

    def __init__(self, content: bytes = b"") -> None:
        self.content = content

    def write(self, file: StateFile) -> None:
        file.write(self.content)

    def load(self, path: Path) -> None:
        self.content = path.read_bytes()


def state_of(step: int, size_bytes: int = 100) -> dict[str, Blob]:
    """Return a state whose every byte depends on `step`."""
    seeds = (hashlib.sha256(f"{step} {name}".encode()).digest() for name in "ab")
    blobs = (Blob((seed * (size_bytes // len(seed) + 1))[:size_bytes]) for seed in seeds)
    return dict(zip(("a.bin", "b.bin"), blobs, strict=True))


def content(state: dict[str, Blob]) -> dict[str, bytes]:
    return {name: part.content for name, part in state.items()}
