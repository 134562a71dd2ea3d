"""A script is run as Python would run it, with what it imports watched; and at its end the ranks part together."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.core.errors import ConfigError
from hvdtrain.guard import hooks, keras_watch, torch_watch
from hvdtrain.guard.session import Session


def run(what: str, argv: Sequence[str], module: bool, *, warn: bool, report: Path | None, every: int) -> int:
    """Runs a script or module under watch; returns its exit code, 0 unless it asks for another.

    Raises:
        ConfigError: there is no such file.
    """
    if not module and not os.path.isfile(what):
        raise ConfigError("the script must be a file", what, "hvdtrain guard train.py ..., or -m for a module")
    session = Session(warn=warn, report=report, every=every)
    hooks.install({**torch_watch.hooks(session), **keras_watch.hooks(session)})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as `python script.py` has it; the command line's own unwinds
    sys.argv = [what, *argv]
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(what))
    try:
        if module:
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(what, run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            session.close()
            raise
    except BaseException as error:
        _print_as_python_would(error)
        session.close()
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    session.finish()
    return 0


def _print_as_python_would(error: BaseException) -> None:
    """Without the frames of what ran the script, and of what its calls went through."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        if name != "runpy" and not name.startswith("hvdtrain.guard"):
            frames.append(trace)
        trace = trace.tb_next
    for outer, inner in zip(frames, frames[1:], strict=False):
        outer.tb_next = inner
    if frames:
        frames[-1].tb_next = None
    sys.stdout.flush()
    traceback.print_exception(type(error), error, frames[0] if frames else None)  # None: it does not compile
