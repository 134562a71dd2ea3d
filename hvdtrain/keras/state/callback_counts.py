"""What callbacks have counted so far: sent to ranks that join a `fit`, and written to checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

_COUNTED = {
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "best_weights", "wait"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
}
_HISTORY = {keras.callbacks.History: ("epoch", "history")}
States = Mapping[tuple[str, int], Any]  # by the callback's class, and how many of that class came before


def saved_of(callbacks: Sequence[Any]) -> States:
    """Returns what a checkpoint keeps of Keras' own callbacks."""
    states = {key: _attributes(callback, _counted(callback, _COUNTED)) for key, callback in _numbered(callbacks)}
    return {key: state for key, state in states.items() if state}


def states_of(callbacks: Sequence[Any]) -> States:
    """Returns what Keras' and hvdtrain's own count, and the `state_dict()` of others that have one; picklable."""
    states = {}
    for key, callback in _numbered(callbacks):
        if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
            states[key] = callback.state_dict()
        else:
            counted = _counted(callback, {**_COUNTED, **_HISTORY})
            states[key] = _attributes(callback, [*getattr(callback, "fed", ()), *counted])
    return states


def feed(callbacks: Sequence[Any], states: States) -> None:
    """Puts counts into callbacks of the same classes, in the same order."""
    for key, callback in _numbered(callbacks):
        if key in states and hasattr(callback, "load_state_dict"):
            callback.load_state_dict(states[key])
        elif key in states:
            vars(callback).update(states[key])


def _numbered(callbacks: Sequence[Any]) -> Iterator[tuple[tuple[str, int], Any]]:
    """Yields each with its key in `States`: rank 0 may have more of them than others."""
    seen: dict[str, int] = {}
    for callback in callbacks:
        name = type(callback).__qualname__
        seen[name] = seen.get(name, -1) + 1
        yield (name, seen[name]), callback


def _counted(callback: Any, by_kind: Mapping[type, Sequence[str]]) -> list[str]:
    return [name for kind, names in by_kind.items() if isinstance(callback, kind) for name in names]


def _attributes(callback: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: vars(callback)[name] for name in names if name in vars(callback)}
