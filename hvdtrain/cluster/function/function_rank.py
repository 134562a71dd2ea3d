"""A rank of `hvdtrain.run`: reads a function from its standard input, calls it, and hands back what it returned.

It is started with BOOT, which finds modules where the caller finds them, before anything else is imported.
"""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import os
import sys
import traceback
from types import TracebackType
from typing import Any

from hvdtrain.cluster.launch.rank import RETURNED
from hvdtrain.core import variables
from hvdtrain.core.errors import ConfigError

# the first line of the input is a JSON list, the caller's own places for modules; "" stands for the working directory
BOOT = """\
import json, sys
sys.path[:1] = json.loads(sys.stdin.buffer.readline())
from hvdtrain.cluster.function.function_rank import main
sys.exit(main())
"""
RAISED = ".raised"
UNFIT = ".returned what cannot be pickled"
_PIECE_BYTES = 3 << 14  # of a result in one line
_OURS = (__file__, "<string>")


def main() -> int:
    """Returns the exit code; what the function raises ends the process as it ends a program."""
    from hvdtrain.cluster.function import function_pickle

    result, process = _Result(int(os.environ[variables.RESULT_FD])), os.getpid()
    os.environ[variables.RESULT_FD] = ""  # still there: no `hvdtrain.run` within one
    sys.excepthook = _show
    grace_s = float(sys.stdin.buffer.readline())
    function, args, kwargs = function_pickle.load_call(sys.stdin.buffer)
    try:
        value: Any = function(*args, **kwargs)
    except BaseException as error:
        if os.getpid() == process:  # and not a child that it forked
            data = b""
            with contextlib.suppress(Exception):  # the traceback on standard error shows an error that is not pickled
                data = function_pickle.dump(error)
            result.hand_back(RAISED, data)
            _end_within(grace_s)
        raise
    if os.getpid() != process:
        return 0
    try:
        data = function_pickle.dump(value)
    except Exception:  # a pickler raises what the objects raise
        traceback.print_exc()
        result.hand_back(UNFIT)
        _end_within(grace_s)
        return 1
    result.hand_back(RETURNED, data)
    return 0


def _end_within(limit_s: float) -> None:
    """Ends this process after that time, if a thread or a process of the function holds up its end."""
    with contextlib.suppress(OSError, ValueError):  # no standard output, or none that takes any
        sys.stdout.flush()
    # a thread of C's, which no lock holds up
    faulthandler.dump_traceback_later(max(limit_s, 0.1), exit=True, file=os.open(os.devnull, os.O_WRONLY))


def _show(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    """Prints an exception with the lines of the caller's program, of which the interpreter itself finds only files."""
    while tb is not None and tb.tb_frame.f_code.co_filename in _OURS:
        tb = tb.tb_next
    traceback.print_exception(kind, error, tb)


class _Result:
    """The descriptor through which the result goes."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._descriptor, self._file = descriptor, os.fstat(descriptor)

    def hand_back(self, how: str, data: bytes = b"") -> None:
        """Writes how the function ended, and what it gave; raises ConfigError if it has closed the descriptor."""
        if not self._is_open():
            rule = "the function of hvdtrain.run must leave descriptors open that it has not opened"
            received = f"it closed descriptor {self._descriptor}, through which its result goes to the caller"
            raise ConfigError(rule, received, "close single files, not os.closerange(...)")
        with os.fdopen(self._descriptor, "wb") as stream:
            for start in range(0, len(data), _PIECE_BYTES):
                stream.write(base64.b64encode(data[start : start + _PIECE_BYTES]) + b"\n")
            stream.write(f"{how}\n".encode())  # last: a rank that is killed while it writes leaves no end

    def _is_open(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._file)
        except OSError:
            return False
