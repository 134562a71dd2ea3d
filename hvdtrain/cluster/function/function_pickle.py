"""Pickles a call of `hvdtrain.run` for a rank, and the answer for the caller, with cloudpickle.

The rank's `__main__` also has the objects of the caller's program, under their names, so that `pickle`, `torch.save`
and multiprocessing find them there. Code keeps its file's name and its lines, for tracebacks. An answer has only
numbers for the classes that the caller had sent: the caller gets its own classes again.
"""

from __future__ import annotations

import functools
import io
import linecache
import pickle
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import cloudpickle

_MAIN = ("__main__", "__mp_main__")  # the latter: the program, in a process that multiprocessing spawned
_CODE_OF_NO_FILE = "<dynamic-code>"  # cloudpickle's name of every file
_CACHED = type(functools.lru_cache(len))


class _Pickler(cloudpickle.Pickler):
    """Pickles as cloudpickle does, and notes what it meets: classes that it sends, names, lines of files, objects."""

    def __init__(self, file: IO[bytes], known: Sequence[Any] = ()) -> None:
        """`known`: what both sides have; only its number is sent."""
        super().__init__(file)
        self._known = {id(its): number for number, its in enumerate(known)}
        self.classes: list[type] = []
        self.named: dict[str, Any] = {}
        self.sources: dict[str, list[str]] = {}
        self.met: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        return self._known.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        self.met.append(obj)
        kind = type(obj)
        if kind is types.CodeType:
            name = obj.co_filename
            self.sources.setdefault(name, linecache.getlines(name))
            make, args = self.dispatch_table[kind](obj)
            return make, tuple(name if arg == _CODE_OF_NO_FILE else arg for arg in args)
        if issubclass(kind, (type, types.FunctionType, _CACHED)) and obj.__module__ in _MAIN:
            name = obj.__qualname__
            if _main().get(name) is obj:
                self.named[name] = obj
            if kind is _CACHED:
                return _cached, (obj.__wrapped__, obj.cache_parameters())
        reduced = super().reducer_override(obj)
        if issubclass(kind, type) and reduced is not NotImplemented and len(reduced) > 2:  # not by its module
            self.classes.append(obj)
        return reduced


def _cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _main() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _load(stream: IO[bytes], known: Sequence[Any]) -> Any:
    unpickler: Any = pickle.Unpickler(stream)
    unpickler.persistent_load = known.__getitem__
    return unpickler.load()


def dump_call(function: Any, args: Any, kwargs: Any) -> tuple[bytes, list[type]]:
    """Returns a call, pickled, and the classes that went with it; raises what the objects raise."""
    main = _main()
    pickler = _Pickler(stream := io.BytesIO(), [main])
    pickler.globals_ref[id(main)] = main  # functions of the program share it there, too
    if "__mp_main__" in sys.modules:
        cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])
    saving = getattr(sys.modules.get("keras"), "saving", None)
    registered = saving.get_custom_objects() if saving is not None else {}  # models name it so in their files
    registered = {name: its for name, its in registered.items() if getattr(its, "__module__", None) in _MAIN}
    about = {name: main[name] for name in ("__file__", "__package__") if name in main}
    # the last three grow while the first are pickled, and are of the same objects: nothing new is met in them
    pickler.dump((about, function, args, kwargs, registered, pickler.named, pickler.classes, pickler.sources))
    return stream.getvalue(), pickler.classes


def load_call(stream: IO[bytes]) -> tuple[Any, Any, Any, list[type]]:
    """Returns function, args, kwargs and the classes that came, after the program's names were given to `__main__`."""
    sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    about, function, args, kwargs, registered, named, classes, sources = _load(stream, [_main()])
    _main().update(about | named)
    linecache.cache.update({name: (1, None, lines, name) for name, lines in sources.items() if lines})
    if registered:
        import keras

        keras.saving.get_custom_objects().update(registered)
        for name, its in registered.items():
            if ">" in name:
                keras.saving.register_keras_serializable(*name.rsplit(">", 1))(its)
    return function, args, kwargs, classes


def why_not(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Returns which part of a call cannot be pickled; "" if none is found."""
    parts = {f"args[{place}]": its for place, its in enumerate(args)}
    parts |= {f"kwargs[{name!r}]": its for name, its in kwargs.items()}
    names = {id(its): name for name, its in _main().items()}
    parts |= {names[id(its)]: its for its in reversed(_met(function)) if id(its) in names}  # the innermost first
    return next((f"{what}: " for what, its in parts.items() if _met(its)), "")


def _met(its: Any) -> list[Any]:
    """Returns what was met up to what cannot be pickled; nothing if all can."""
    pickler = _Pickler(io.BytesIO())
    try:
        pickler.dump(its)
    except Exception:  # a pickler raises what the objects raise
        return pickler.met
    return []


def dump(value: Any, known: Sequence[type], *links: tuple[str, bytes]) -> bytes:
    """Returns an answer, pickled, an exception with its links to others; raises what the objects raise."""
    _Pickler(stream := io.BytesIO(), known).dump((value, *links))
    return stream.getvalue()


def load(data: bytes, known: Sequence[type]) -> Any:
    """Returns an answer; raises what the objects raise."""
    value, *links = _load(io.BytesIO(data), known)
    for name, linked in links:
        setattr(value, name, load(linked, known))
    return value


def dump_raised(error: BaseException, known: Sequence[type]) -> bytes:
    """Returns an exception, pickled, with the causes and contexts that a traceback shows, up to one that cannot be
    pickled; b"": it cannot be itself."""
    link = "__cause__" if error.__suppress_context__ else "__context__"
    other = getattr(error, link)
    try:
        load(dump(error, known), known)
        links = [(link, data)] if other is not None and (data := dump_raised(other, known)) else []
        return dump(error, known, *links)
    except Exception:  # the traceback on standard error says what it was
        return b""
