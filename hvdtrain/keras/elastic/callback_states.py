"""What callbacks have counted so far, for a rank that comes into the middle of a `fit`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

_PLAIN = (bool, int, float, str, type(None), np.ndarray, np.generic)
_COUNTING = (
    keras.callbacks.EarlyStopping, keras.callbacks.History, keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
)  # fmt: skip
States = Mapping[tuple[str, int], Any]


def states_of(callbacks: Sequence[Any]) -> States:
    """Returns what those of Keras and hvdtrain count, and the `state_dict()` of others that have one; picklable."""
    return {key: state for key, callback in _numbered(callbacks) if (state := _state_of(callback)) is not None}


def feed(callbacks: Sequence[Any], states: States) -> None:
    """Puts it into the callbacks of another rank, as far as that has the same ones."""
    for key, callback in _numbered(callbacks):
        if key in states and hasattr(callback, "load_state_dict"):
            callback.load_state_dict(states[key])
        elif key in states:
            vars(callback).update(states[key])


def _numbered(callbacks: Sequence[Any]) -> Iterator[tuple[tuple[str, int], Any]]:
    """Each by its class, and how many of that class came before: rank 0 may have more of them than others."""
    seen: dict[str, int] = {}
    for callback in callbacks:
        name = type(callback).__qualname__
        seen[name] = seen.get(name, -1) + 1
        yield (name, seen[name]), callback


def _state_of(callback: Any) -> Any:
    if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
        return callback.state_dict()
    if names := getattr(callback, "fed", ()):
        return {name: vars(callback)[name] for name in names if name in vars(callback)}
    if isinstance(callback, _COUNTING):
        return {name: value for name, value in vars(callback).items() if _is_plain(value)}
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, _PLAIN)
