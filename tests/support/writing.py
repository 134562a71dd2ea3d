"""The process that writes a program's checkpoints."""

from __future__ import annotations

import psutil


def writer() -> psutil.Process:
    """Return this process's."""
    (found,) = [its for its in psutil.Process().children() if "hvdtrain.checkpoint.writer" in " ".join(its.cmdline())]
    return found
