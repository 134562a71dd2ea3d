"""What callbacks have counted so far: sent to ranks that join a `fit`, and written to checkpoints."""

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
_SAVED = {
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "best_weights", "wait"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
}
States = Mapping[tuple[str, int], Any]


def saved_of(callbacks: Sequence[Any]) -> list[Any]:
    """Returns what a checkpoint keeps of Keras' own callbacks, as `[class, how many came before, counts]`."""
    states = []
    for (name, index), callback in _numbered(callbacks):
        names = [name for kind, names in _SAVED.items() if isinstance(callback, kind) for name in names]
        if names:
            states.append([name, index, {name: vars(callback)[name] for name in names if name in vars(callback)}])
    return states


def states_of(callbacks: Sequence[Any]) -> States:
    """Returns what those of Keras and hvdtrain count, and the `state_dict()` of others that have one; picklable."""
    return {key: state for key, callback in _numbered(callbacks) if (state := _state_of(callback)) is not None}


def feed(callbacks: Sequence[Any], states: States) -> None:
    """Puts counts into callbacks of the same classes, in the same order."""
    for key, callback in _numbered(callbacks):
        if key in states and hasattr(callback, "load_state_dict"):
            callback.load_state_dict(states[key])
        elif key in states:
            vars(callback).update(states[key])


def _numbered(callbacks: Sequence[Any]) -> Iterator[tuple[tuple[str, int], Any]]:
    """Yields each by its class, and how many of that class came before: rank 0 may have more of them than others."""
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
        own = "min_delta"  # which has a sign by now
        return {name: value for name, value in vars(callback).items() if name != own and _is_plain(value)}
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, _PLAIN)
