"""A rank of `hvdtrain.run`: reads a function from its standard input, calls it, and hands back what it returned.

It is started with BOOT, which finds modules where the caller finds them, before anything else is imported.
"""

from __future__ import annotations

import base64
import io
import os
import sys
import traceback
from typing import Any

from hvdtrain.cluster.launch.rank import RESULT

# the first line of the input is a JSON list, the caller's own places for modules; "" stands for the working directory
BOOT = """\
import json, sys
sys.path[:1] = json.loads(sys.stdin.buffer.readline())
from hvdtrain.cluster.function_rank import main
sys.exit(main())
"""
_PIECE_BYTES = 3 << 14  # of a result in one line


def main() -> int:
    """Returns the exit code; what the function raises ends the process as it ends a program."""
    import cloudpickle

    result = int(os.environ.pop(RESULT))
    os.set_inheritable(result, False)
    function, args, kwargs = cloudpickle.load(sys.stdin.buffer)
    try:
        value: Any = function(*args, **kwargs)
    except Exception as error:
        _hand_back(result, "raised", _sendable(error))
        raise
    try:
        data = cloudpickle.dumps(value)
    except Exception:  # a pickler raises what the objects raise
        traceback.print_exc()
        _hand_back(result, "returned what cannot be pickled")
        return 1
    _hand_back(result, "returned", data)
    return 0


def _sendable(error: Exception) -> bytes:
    """The exception, pickled; b"": it cannot be, or not be read again."""
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(error)
        cloudpickle.load(io.BytesIO(data))
    except Exception:  # the traceback on standard error says what it was
        return b""
    return data


def _hand_back(descriptor: int, how: str, data: bytes = b"") -> None:
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(f"{how}\n".encode())
        for start in range(0, len(data), _PIECE_BYTES):
            stream.write(base64.b64encode(data[start : start + _PIECE_BYTES]) + b"\n")
        stream.write(b".\n")  # whole: a rank that is killed while it writes leaves no end
