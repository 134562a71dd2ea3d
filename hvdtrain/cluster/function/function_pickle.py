"""How a call of `hvdtrain.run` travels to a rank, and the answer back: by cloudpickle, and what that leaves undone.

On the rank what stands in the caller's program stands in `__main__` as well, under its name, so that `pickle`,
`torch.save` and multiprocessing find it there; code keeps its file's name and its lines, for tracebacks. On the way
back a class that the caller had sent is named, not sent: it is the caller's own again, which cloudpickle would fill
anew with the rank's methods.
"""

from __future__ import annotations

import contextlib
import functools
import io
import linecache
import os
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import IO, Any

import cloudpickle

_MAIN = ("__main__", "__mp_main__")  # the latter: the program, in a process that multiprocessing spawned
_LONGEST_CHAIN = 20  # of an exception's causes and contexts
_CODE_OF_NO_FILE = "<dynamic-code>"  # cloudpickle's name of every file
_CACHED = type(functools.lru_cache(len))


class _Pickler(cloudpickle.Pickler):
    """cloudpickle's, for one call or one answer.

    Attributes:
        classes: those that went with all they are.
        named: what of the program went, by its name there.
        sources: lines of the program's files, by file name.
    """

    def __init__(self, file: IO[bytes], known: Sequence[type] = (), linked: Collection[int] = ()) -> None:
        """`known`: classes that only their number is sent of; `linked`: ids of exceptions that others may lead to."""
        super().__init__(file)
        self._known, self._linked = {id(its): number for number, its in enumerate(known)}, linked
        self._main = sys.modules["__main__"]
        self.classes: list[type] = []
        self.named: dict[str, Any] = {}
        self.sources: dict[str, list[str]] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Returns how an object is made again, as `pickle` asks."""
        kind = type(obj)
        if id(obj) in self._known:
            return sent_class, (self._known[id(obj)],)
        if issubclass(kind, types.CodeType):
            return self._code(obj)
        if issubclass(kind, BaseException):
            return self._exception(obj)
        if kind is weakref.WeakKeyDictionary:  # singledispatch has one
            return kind, (dict(obj),)
        inner = getattr(obj, "__module__", None) in _MAIN
        if kind is _CACHED and inner:
            reduced: Any = (_cached, (obj.__wrapped__, obj.cache_parameters()))
        else:
            reduced = super().reducer_override(obj)
        if reduced is not NotImplemented and issubclass(kind, (type, types.FunctionType, _CACHED)):
            if issubclass(kind, type) and len(reduced) > 2:
                self.classes.append(obj)
            name = getattr(obj, "__qualname__", "")
            if inner and vars(self._main).get(name) is obj:
                self.named[name] = obj
        return reduced

    def _code(self, code: types.CodeType) -> Any:
        name = code.co_filename
        if name == vars(self._main).get("__file__") or not os.path.isfile(name):  # a notebook's cell
            self.sources.setdefault(name, linecache.getlines(name))
        make, args = self.dispatch_table[types.CodeType](code)
        return make, tuple(name if arg == _CODE_OF_NO_FILE else arg for arg in args)

    def _exception(self, error: BaseException) -> Any:
        cls = type(error)
        reduced: Any = error.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        make, args, *rest = reduced
        base = next(its for its in cls.__mro__ if its.__module__ == "builtins")
        if make is cls and cls.__reduce__ is base.__reduce__:  # its own __init__ may take other arguments
            make, args = _made_again, (cls, base, args)
        links = [its if id(its) in self._linked else None for its in (error.__cause__, error.__context__)]
        state = (rest[0] if rest else None, *links, error.__suppress_context__)
        return make, args, state, None, None, _set_state


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, known: Sequence[type]) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, sent_class.__name__):
            return self._known.__getitem__
        return super().find_class(module, name)


def sent_class(number: int) -> type:
    """Stands for a class that the caller had sent; only a name in what is pickled."""
    raise pickle.UnpicklingError(f"class {number} of another call")


def _cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _made_again(cls: type[BaseException], base: Any, args: Sequence[Any]) -> BaseException:
    """An exception as its nearest built-in class makes it, without the `__init__` of its own."""
    error: BaseException = base.__new__(cls, *args)
    base.__init__(error, *args)
    return error


def _set_state(error: BaseException, state: tuple[Any, Any, Any, bool]) -> None:
    attributes, error.__cause__, error.__context__, suppress = state
    if attributes is not None:
        error.__setstate__(attributes)
    error.__suppress_context__ = suppress


class _MainGlobals:
    """Stands for the globals of `__main__`, wherever it is loaded."""

    def __reduce__(self) -> Any:
        return _main_globals, ()


def _main_globals() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


# ---- a call


def dump_call(function: Any, args: Any, kwargs: Any) -> tuple[bytes, list[type]]:
    """Returns a call, pickled, and the classes that went with it.

    Raises:
        Exception: as the objects do.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    main = vars(pickler._main)
    pickler.globals_ref[id(main)] = _MainGlobals()  # so that functions of the program share them
    about = {name: main[name] for name in ("__file__", "__package__") if name in main}
    with _by_value():
        # the last three grow while the first are pickled, and are of the same objects: nothing new is met in them
        pickler.dump((about, function, args, kwargs, _keras_names(), pickler.named, pickler.classes, pickler.sources))
    return stream.getvalue(), pickler.classes


def load_call(stream: IO[bytes]) -> tuple[Any, Any, Any, list[type]]:
    """Returns function, args, kwargs and the classes that came, after the program's names were given to `__main__`."""
    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    about, function, args, kwargs, keras_names, named, classes, sources = pickle.load(stream)
    vars(main).update(about | named)
    for name, lines in sources.items():
        if lines:
            linecache.cache[name] = sum(map(len, lines)), None, lines, name
    if keras_names:
        import keras

        for name, its in keras_names.items():
            package, mark, short = name.rpartition(">")
            if mark:
                keras.saving.register_keras_serializable(package, short)(its)
            else:
                keras.saving.get_custom_objects()[name] = its
    return function, args, kwargs, classes


def why_not(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Returns which part of a call cannot be pickled, as far as that can be told; "" if not."""
    parts = [(f"args[{place}]", its) for place, its in enumerate(args)]
    parts += [(f"kwargs[{name!r}]", its) for name, its in kwargs.items()]
    return next((f"{what}: " for what, its in parts if not _travels(its)), _culprit(function, set()))


def _culprit(its: Any, seen: set[int]) -> str:
    seen.add(id(its))
    if isinstance(its, type):
        inner = {name: getattr(value, "__func__", value) for name, value in vars(its).items()}
    elif isinstance(its, types.FunctionType):
        cells = zip(its.__code__.co_freevars, its.__closure__ or (), strict=True)
        names = _names(its.__code__)
        inner = {name: its.__globals__[name] for name in names if name in its.__globals__}
        for name, cell in cells:
            with contextlib.suppress(ValueError):  # empty
                inner[name] = cell.cell_contents
    else:
        return ""
    for name, value in inner.items():
        if id(value) not in seen and not _travels(value):
            return _culprit(value, seen) or f"{name}, to which {its.__qualname__} refers: "
    return ""


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(its) for its in code.co_consts if isinstance(its, types.CodeType)]
    return set(code.co_names).union(*inner)


def _travels(its: Any) -> bool:
    try:
        dump_call(its, (), {})
    except Exception:  # a pickler raises what the objects raise
        return False
    return True


@contextlib.contextmanager
def _by_value() -> Iterator[None]:
    spawned = sys.modules.get("__mp_main__")
    if spawned is None or spawned.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(spawned)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(spawned)


def _keras_names() -> dict[str, Any]:
    """What the program has registered with Keras: models name it so in their files."""
    saving = getattr(sys.modules.get("keras"), "saving", None)
    names = saving.get_custom_objects() if saving is not None else {}
    return {name: its for name, its in names.items() if getattr(its, "__module__", None) in _MAIN}


# ---- an answer


def dump(value: Any, known: Sequence[type], linked: Collection[int] = ()) -> bytes:
    """Returns an answer, pickled.

    Raises:
        Exception: as the objects do.
    """
    stream = io.BytesIO()
    _Pickler(stream, known, linked).dump(value)
    return stream.getvalue()


def load(data: bytes, known: Sequence[type]) -> Any:
    """Returns an answer.

    Raises:
        Exception: as the objects do.
    """
    return _Unpickler(data, known).load()


def dump_raised(error: BaseException, known: Sequence[type]) -> bytes:
    """Returns an exception, pickled, with those of its causes and contexts that can be; b"": it cannot be itself."""
    chain: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting and len(chain) < _LONGEST_CHAIN:
        its = waiting.pop(0)
        if its is not None and not any(its is other for other in chain):
            chain.append(its)
            waiting += [its.__cause__, its.__context__]

    def sent(its: BaseException, linked: Collection[int]) -> bytes:
        try:
            data = dump(its, known, linked)
            load(data, known)
        except Exception:  # the traceback on standard error says what it was
            return b""
        return data

    fit = {id(its) for its in chain if sent(its, ())}
    return sent(error, fit) if id(error) in fit else b""
