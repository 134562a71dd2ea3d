"""Pickles a call of `hvdtrain.run` for a rank, and the answer for the caller, with cloudpickle.

The rank's `__main__` also has the functions and classes of the caller's program that were sent, under their names. So
`pickle` and multiprocessing find them there, and an answer names the caller's own classes.
"""

from __future__ import annotations

import inspect
import io
import linecache
import pickle
import sys
import types
from collections.abc import Mapping, Sequence
from typing import IO, Any

import cloudpickle


class _Pickler(cloudpickle.Pickler):
    """Pickles as cloudpickle does, but keeps the names of files in code, for tracebacks.

    Attributes:
        named: the functions and classes of the program that were met, by name.
        sources: the lines of the files that code was met of.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.named: dict[str, Any] = {}
        self.sources: dict[str, list[str]] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            name = obj.co_filename
            self.sources.setdefault(name, linecache.getlines(name))
            make, args = self.dispatch_table[types.CodeType](obj)
            return make, tuple(name if arg == "<dynamic-code>" else arg for arg in args)
        if isinstance(obj, (type, types.FunctionType)):
            own_name = obj.__qualname__
            if _program().get(own_name) is obj:
                self.named[own_name] = obj
        return super().reducer_override(obj)


def _program() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def dump_call(function: Any, args: Any, kwargs: Any) -> bytes:
    """Returns a call, pickled; raises what the objects raise."""
    pickler = _Pickler(stream := io.BytesIO())
    # the last two grow while the first are pickled
    pickler.dump((function, args, kwargs, pickler.named, pickler.sources))
    return stream.getvalue()


def load_call(stream: IO[bytes]) -> tuple[Any, Any, Any]:
    """Returns function, args and kwargs, after the program's names were given to `__main__`."""
    function, args, kwargs, named, sources = pickle.load(stream)
    _program().update(named)
    linecache.cache.update({name: (1, None, lines, name) for name, lines in sources.items() if lines})
    return function, args, kwargs


def why_not(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Returns which part of a call cannot be pickled; "" if none is found."""
    parts = {f"args[{place}]": its for place, its in enumerate(args)}
    parts |= {f"kwargs[{name!r}]": its for name, its in kwargs.items()}
    if inspect.isfunction(function):
        names = inspect.getclosurevars(function)
        parts |= {**names.globals, **names.nonlocals}
    for name, its in parts.items():
        try:
            cloudpickle.dumps(its)
        except Exception:  # a pickler raises what the objects raise
            return f"{name}: "
    return ""


def dump(answer: Any) -> bytes:
    """Returns an answer, pickled: by the names that the caller also has, or else by value; raises what the objects
    raise."""
    try:
        return pickle.dumps(answer)
    except Exception:  # a class that is defined in a function
        return cloudpickle.dumps(answer)
