"""Which callbacks may end an epoch early: read off their code, before `fit` begins."""

from __future__ import annotations

import io
import sys
import types
from contextlib import suppress
from pathlib import PurePath
from typing import Any

import keras
import numpy as np

_K = keras.callbacks
# they end nothing within an epoch; any other callback with a hook for batches may, if it knows a model
_HARMLESS = (
    _K.BackupAndRestore, _K.CSVLogger, _K.EarlyStopping, _K.History, _K.LearningRateScheduler, _K.ModelCheckpoint,
    _K.ProgbarLogger, _K.ReduceLROnPlateau, _K.RemoteMonitor, _K.SwapEMAWeights, _K.TensorBoard,
)  # fmt: skip
_HOOKS = ("on_train_begin", "on_epoch_begin", "on_batch_begin", "on_batch_end", "on_train_batch_begin",
          "on_train_batch_end")  # fmt: skip
_OF_A_MODEL = {"model", "_model", "stop_training", "setattr"}
_PLAIN = (bool, int, float, complex, str, bytes, np.ndarray, np.generic, io.IOBase, PurePath)


def may_stop(callback: Any) -> bool:
    """True if a callback may set `model.stop_training` within an epoch."""
    if type(callback) in _HARMLESS:
        return False
    hooked = any(not getattr(getattr(callback, name, None), "_is_default", False) for name in _HOOKS)
    return hooked and _reaches_a_model(callback, set())


def _reaches_a_model(value: Any, seen: set[int]) -> bool:
    """False if what a callback holds is plain, and the code of all its functions, and of those that they call, names no
    model: a timer, a logger. Then ranks need not ask each other after every step. What is overlooked is no stop on one
    rank alone, but an error: see `steps`."""
    if id(value) in seen or value is None or isinstance(value, (*_PLAIN, types.BuiltinFunctionType)):
        return False
    if isinstance(value, (type, types.ModuleType)):  # the user's own may hold anything
        home = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
        own = isinstance(value, type) and issubclass(value, _K.Callback)  # of super(): its code is read below
        return not own and home.split(".")[0] not in {*sys.stdlib_module_names, "numpy"}
    seen.add(id(value))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_reaches_a_model(item, seen) for item in value)
    if isinstance(value, dict):
        return any(_reaches_a_model(item, seen) for item in value.values())
    if isinstance(value, _K.Callback):
        kinds = [kind for kind in type(value).__mro__ if kind not in _K.Callback.__mro__]
        held = [item for name, item in vars(value).items() if name not in ("_model", "_params", "params")]
        return any(
            _reaches_a_model(item, seen) for item in [*held, *(f for kind in kinds for f in vars(kind).values())]
        )
    if isinstance(value, property):
        return any(_reaches_a_model(function, seen) for function in (value.fget, value.fset))
    function = getattr(value, "__func__", value)
    if not isinstance(function, types.FunctionType):
        return True
    codes = [function.__code__]
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    names = {word for code in codes for word in (*code.co_names, *code.co_consts) if isinstance(word, str)}
    parameters = {word for code in codes for word in code.co_varnames}  # of set_model(self, model)
    used = [function.__globals__.get(name) for name in names]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # empty: `history = model.fit(...)`, used in a function that fit is given
            used.append(cell.cell_contents)
    used += [getattr(value, "__self__", None), *(function.__defaults__ or ())]  # whose method it is
    used += (function.__kwdefaults__ or {}).values()
    return bool((names | parameters) & _OF_A_MODEL) or any(_reaches_a_model(item, seen) for item in used)
