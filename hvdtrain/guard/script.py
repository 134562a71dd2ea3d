"""A script is run as Python would run it, with what it imports watched; and at its end the ranks part together."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from hvdtrain.core import flags, launchers
from hvdtrain.core.errors import ConfigError, LauncherError
from hvdtrain.guard import hooks, keras_watch, torch_watch
from hvdtrain.guard.session import GuardSession


def run(what: str, argv: Sequence[str], module: bool, *, warn: bool, report: Path | None, every: int) -> int:
    """Runs a script or module under watch; returns its exit code. Raises ConfigError if a file cannot be used."""
    if not module:
        source_of(what, module)
    if report is not None:
        with contextlib.suppress(LauncherError):  # which the script's own hvd.init() reports
            if launchers.detect(os.environ).rank == 0:
                flags.check_file("--report", report)
    session = GuardSession(warn=warn, report=report, every=every)
    hooks.install({**torch_watch.hooks(session), **keras_watch.hooks(session)})
    try:
        code = execute(what, argv, module)
    except SystemExit:
        session.close()
        raise
    (session.close if code else session.finish)()
    return code


def source_of(what: str, module: bool) -> Path:
    """Returns the file of a script or module, which is not imported; raises ConfigError if there is none."""
    if not module:
        if not os.path.isfile(what):
            raise ConfigError("the script must be a file", what, "its path, train.py; or -m for a module")
        return Path(what)
    found, places = None, [os.getcwd(), *sys.path]
    for part in what.split("."):  # importlib.util.find_spec would import the packages, before guard's hooks are there
        found = PathFinder.find_spec(part, places)
        places = list(found.submodule_search_locations or []) if found is not None else []
    if found is not None and found.submodule_search_locations is not None:
        found = PathFinder.find_spec("__main__", places)
    if found is None or found.origin is None:
        raise ConfigError("-m needs the name of a module on Python's path", what, "-m package.train, from its folder")
    return Path(found.origin)


def execute(what: str, argv: Sequence[str], module: bool) -> int:
    """Runs a script or module as Python would; returns its exit code, or lets its SystemExit through."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as `python script.py` has it; the command line's own unwinds
    sys.argv = [what, *argv]
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(what))
    try:
        if module:
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(os.path.abspath(what), run_name="__main__")  # as `__file__` of a program is
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    except BaseException as error:
        _print_as_python_would(error)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__  # as Python does
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _print_as_python_would(error: BaseException) -> None:
    """Prints the traceback without the frames that ran the script and those that its calls passed through."""
    shown = traceback.TracebackException.from_exception(error)
    own = (str(Path(__file__).parent), "<frozen runpy>", str(runpy.__file__))
    frames = [frame for frame in shown.stack if not frame.filename.startswith(own)]
    shown.stack = traceback.StackSummary.from_list(frames)
    sys.stdout.flush()
    # a script that does not compile has no frames
    print("".join(shown.format() if frames else shown.format_exception_only()), end="", file=sys.stderr)
