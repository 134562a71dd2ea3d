"""Random state of a rank: seed generators of the model, Keras' global one, torch's, numpy's and Python's.

All ranks start from rank 0's seed generators; rank r > 0 then goes its own way with a seed derived from rank
0's state and r, so that dropout masks differ over ranks, and still follow from the seed alone. Rank 0 keeps
its own: one process draws exactly what plain Keras draws.

Python's and numpy's generators stay alike on all ranks, because programs use them for decisions that all must take
alike; but within a train step (where it runs eagerly) each rank has a pair of its own: what a step draws is noise.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.generators import Generators, OwnRandom, State
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import KEY, KerasSession, TrainingPlace
from hvdtrain.private.keras import global_seed_generator, global_state
from hvdtrain.world.world import World

_HOST = Generators()  # Python's and numpy's; the backend keeps its own


def seed_variables(model: keras.Model) -> dict[str, Any]:
    """Returns the states of the model's seed generators, and of Keras' global one if it exists, by name."""
    metrics = [variable for metric in model.metrics for variable in metric.variables]
    known = {id(variable) for variable in [*model.weights, *metrics]}
    shared = global_state.get_global_attribute("global_seed_generator")
    own = shared.state if shared is not None else None
    seeds = [variable for variable in model.variables if id(variable) not in known and variable is not own]
    return {**{f"seed.{i}": v for i, v in enumerate(seeds)}, **({"seed.global": own} if own is not None else {})}


def make_global() -> None:
    """Makes Keras' global generator before a step's first draw does, so that it can be split and restored."""
    with BACKEND.eager():
        global_seed_generator()


def capture(model: keras.Model) -> dict[str, np.ndarray]:
    """Returns this rank's random state as plain arrays (no pickle needed to store them)."""
    state = {name: BACKEND.to_numpy(variable).copy() for name, variable in seed_variables(model).items()}
    state.update(_as_arrays(_HOST.everything(), ""))
    place = _place(model)
    if place.step_random is not None:
        state.update(_as_arrays(place.step_random.state, "step."))
    state.update({key: value.copy() for key, value in BACKEND.random_state().items()})
    return state


def restore(model: keras.Model, state: Mapping[str, np.ndarray]) -> None:
    """Puts a state of `capture` back; a generator that the state does not know keeps its own."""
    if "seed.global" in state:
        make_global()
    for name, variable in seed_variables(model).items():
        if name in state:
            variable.assign(state[name])
    _HOST.restore(_from_arrays(state, ""))
    if "step.python" in state:
        _place(model).step_random = OwnRandom(_HOST, _from_arrays(state, "step."))
    BACKEND.set_random_state({key: np.asarray(value) for key, value in state.items()})


def _place(model: keras.Model) -> TrainingPlace:
    session: KerasSession = vars(model)[KEY]
    return session.place


# -------------------------------------------------------------------- Python's and numpy's generators
def _as_arrays(state: State, prefix: str) -> dict[str, np.ndarray]:
    _, (version, words, gauss), (kind, keys, position, has_gauss, cached) = state
    assert kind == "MT19937" and version == 3
    return {
        f"{prefix}python": np.array(words, np.uint64),
        f"{prefix}python_gauss": np.array([] if gauss is None else [gauss], np.float64),
        f"{prefix}numpy": np.asarray(keys, np.uint32),
        f"{prefix}numpy_gauss": np.array([position, has_gauss, cached], np.float64),
    }


def _from_arrays(state: Mapping[str, np.ndarray], prefix: str) -> State:
    gauss = state[f"{prefix}python_gauss"]
    position, has_gauss, cached = state[f"{prefix}numpy_gauss"]
    words = tuple(int(word) for word in state[f"{prefix}python"])
    return (
        [],
        (3, words, float(gauss[0]) if gauss.size else None),
        ("MT19937", np.asarray(state[f"{prefix}numpy"], np.uint32), int(position), int(has_gauss), float(cached)),
    )


@contextmanager
def of_step(place: TrainingPlace) -> Iterator[None]:
    """Gives a train step that runs eagerly this rank's own Python and numpy generators."""
    if place.step_random is None or BACKEND.tracing():
        yield
        return
    with place.step_random.in_place():
        yield


# -------------------------------------------------------------------- each rank its own


def split_streams(model: keras.Model, world: World) -> None:
    """Gives every rank its own random streams, derived from rank 0's; collective."""
    if world.size == 1:
        return
    make_global()
    apply_derived(model, world.broadcast(capture(model) if world.is_main else {}), world.rank)


def apply_derived(model: keras.Model, state: Mapping[str, np.ndarray], rank: int) -> None:
    """Sets this rank's streams to those that follow from rank 0's state, but for Python's and numpy's generators."""
    seeds = {}
    for key, value in state.items():
        if key.startswith(("seed.", "torch_cpu", "python", "numpy")):
            digest = hashlib.sha256(f"{key}:{rank}:".encode() + np.ascontiguousarray(value).tobytes()).digest()
            seeds[key] = int.from_bytes(digest[:4], "little") & 0x7FFFFFFE
    own, noise = random.Random(seeds["python"]), np.random.RandomState(seeds["numpy"])
    own_state: State = [], own.getstate(), noise.get_state(legacy=True)
    _place(model).step_random = OwnRandom(_HOST, own_state)
    if rank == 0:
        return
    for name, variable in seed_variables(model).items():
        if name in seeds:
            counter = np.array(state[name])
            counter[0] = seeds[name]
            variable.assign(counter)
    BACKEND.reseed(seeds.get("torch_cpu", seeds["python"]))


def check_saved() -> None:
    """Raises ConfigError if the step being traced draws from `tf.random`, whose state no checkpoint can hold."""
    drawn = BACKEND.hidden_random()
    if drawn:
        raise ConfigError(
            "checkpoints must contain the state of all random numbers that a train step draws",
            f"operations with a state that cannot be read: {', '.join(drawn)}",
            "draw with keras.random.normal(shape) and the like instead of tf.random.normal(shape)",
            shared=True,
        )
