"""Call sites: the line of the user's that led somewhere, through libraries."""

from __future__ import annotations

import linecache
import os
import re
import sys
import threading
import traceback
from types import FrameType

from hvdtrain.core.version import qualified_name

# frames of these are not the user's, who called them
_LIBRARIES = (
    frozenset({"hvdtrain", "keras", "tensorflow", "torch", "deepspeed", "horovod", "lightning", "torchmetrics"})
    | sys.stdlib_module_names
)


def user_line(frame: FrameType | None = None) -> str:
    """Returns the line of the user's that led here, such as "train.py:31: evaluate(model, data)"; "?" if there is
    none. It is the innermost one outside of libraries, seen from `frame`, by default from the caller."""
    frame = users_frame(frame if frame is not None else sys._getframe(1))
    return "?" if frame is None else _shown(frame, line_of(frame))


def raised_at(error: BaseException) -> str:
    """Returns the line of the user's that an error has come through last, as `user_line` does; "" if none is known."""
    found = [at for at in traceback.walk_tb(error.__traceback__) if is_users(at[0])]
    return _shown(*found[-1]) if found else ""


def _shown(frame: FrameType, number: int) -> str:
    path = frame.f_code.co_filename
    text = linecache.getline(path, number, frame.f_globals).strip()
    shown = text if len(text) <= 100 else text[:97] + "..."
    return f"{os.path.basename(path)}:{number}" + (f": {shown}" if shown else "")


def line_of(frame: FrameType) -> int:
    """Returns the line that a frame is at; where it has none, as another thread's may for a moment, its function's."""
    return frame.f_lineno or frame.f_code.co_firstlineno


def users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    return frame


def is_users(frame: FrameType) -> bool:
    module = (frame.f_globals.get("__name__") or "").partition(".")[0]
    generated = os.path.basename(frame.f_code.co_filename).startswith("__autograph_generated_file")
    return module not in _LIBRARIES and not generated


def function_of(frame: FrameType | None) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{qualified_name(frame.f_code)}" if frame is not None else ""


def in_thread() -> str:
    """Returns a label of this thread, equal on all ranks: its name without numbers, which count threads."""
    name = threading.current_thread().name
    return "" if name == "MainThread" else " in thread " + re.sub(r"[-_]\d+", "", name)
