"""Random state of a rank: seed generators of the model, Keras' global one, torch's, numpy's and Python's.

All ranks start from rank 0's seed generators; rank r > 0 then goes its own way with a seed derived from rank
0's state and r, so that dropout masks differ over ranks, and still follow from the seed alone. Rank 0 keeps
its own: one process draws exactly what plain Keras draws.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

from hvdtrain.keras._backend import BACKEND
from hvdtrain.world import World


def seed_variables(model: keras.Model) -> list[Any]:
    """Returns the states of the model's seed generators (and of Keras' global one, if it was used)."""
    metrics = [variable for metric in model.metrics for variable in metric.variables]
    known = {id(variable) for variable in [*model.weights, *metrics]}
    seeds = [variable for variable in model.variables if id(variable) not in known]
    shared = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    if shared is not None and all(shared.state is not seed for seed in seeds):
        seeds.append(shared.state)
    return seeds


def capture(model: keras.Model) -> dict[str, np.ndarray]:
    """Returns this rank's random state as plain arrays (no pickle needed to store them)."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    assert kind == "MT19937" and version == 3
    state = {f"seed.{i}": BACKEND.to_numpy(v).copy() for i, v in enumerate(seed_variables(model))}
    state["python"] = np.array(words, np.uint64)
    state["python_gauss"] = np.array([] if gauss is None else [gauss], np.float64)
    state["numpy"] = np.asarray(keys, np.uint32)
    state["numpy_gauss"] = np.array([position, has_gauss, cached], np.float64)
    state.update({key: value.copy() for key, value in BACKEND.random_state().items()})
    return state


def restore(model: keras.Model, state: Mapping[str, np.ndarray]) -> None:
    """Puts a state of ``capture`` back; a generator that the state does not know keeps its own."""
    for i, variable in enumerate(seed_variables(model)):
        if f"seed.{i}" in state:
            variable.assign(state[f"seed.{i}"])
    gauss = state["python_gauss"]
    random.setstate((3, tuple(int(w) for w in state["python"]), float(gauss[0]) if gauss.size else None))
    position, has_gauss, cached = state["numpy_gauss"]
    np.random.set_state(
        ("MT19937", np.asarray(state["numpy"], np.uint32), int(position), int(has_gauss), float(cached))
    )
    BACKEND.set_random_state({key: np.asarray(value) for key, value in state.items()})


def derive(state: Mapping[str, np.ndarray], rank: int) -> dict[str, int]:
    """Returns a seed in [0, 2**31) for each entry of rank 0's state, for another rank; pure."""
    out = {}
    for key, value in state.items():
        digest = hashlib.sha256(f"{key}:{rank}:".encode() + np.ascontiguousarray(value).tobytes()).digest()
        out[key] = int.from_bytes(digest[:4], "little") & 0x7FFFFFFE
    return out


def split_streams(model: keras.Model, world: World) -> None:
    """Gives every rank its own random streams, derived from rank 0's; collective."""
    if world.size == 1:
        return
    apply_derived(model, world.broadcast(capture(model) if world.is_main else {}), world.rank)


def apply_derived(model: keras.Model, state: Mapping[str, np.ndarray], rank: int) -> None:
    """Sets this rank's streams to those that follow from rank 0's state.

    Only what layers draw from changes (seed generators, torch). Python's and numpy's generators stay as they
    are: programs use them for decisions that all ranks must take alike.
    """
    if rank == 0:
        return
    seeds = derive({key: value for key, value in state.items() if key.startswith(("seed.", "torch_cpu"))}, rank)
    for i, variable in enumerate(seed_variables(model)):
        if f"seed.{i}" in seeds:
            counter = np.array(state[f"seed.{i}"])
            counter[0] = seeds[f"seed.{i}"]
            variable.assign(counter)
    if "torch_cpu" in seeds:
        BACKEND.reseed(seeds["torch_cpu"])
