"""A process whose n-th call that changes a file ends it, or fails."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = ("write", "pwrite", "fsync", "rename", "unlink", "rmdir", "mkdir")


def break_at(number: int, fault: str, struck: str) -> None:
    """Have this process's n-th call end it ("KILL"), or fail with that error ("ENOSPC"); it makes `struck` first."""
    left = number

    def broken(call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **kw: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                Path(struck).touch()
            if left == 0 and fault == "KILL":
                os.kill(os.getpid(), signal.SIGKILL)
            if left == 0:
                raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)))
            return call(*args, **kw)

        return instead

    for name in CALLS:
        setattr(os, name, broken(getattr(os, name)))
