"""Joins this process to the others and carries bytes between them, through Horovod's primitive operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import keras
import numpy as np

from hvdtrain.comm.engines import Engine, HorovodCollectives, SoloEngine, gpus_of_rank
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.launchers import Detected
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import is_stock, replaced, session_of
from hvdtrain.private.keras import BaseOptimizer
from hvdtrain.world.resources import keep_freed_memory
from hvdtrain.world.world import World, current, given_or_current


def attach(detected: Detected, *, engine: str, device: str, gpus_per_rank: int, seed: int) -> Engine:
    """Starts the engine, pins this rank's GPUs and seeds Keras; called by `hvdtrain.init("keras")`.

    Raises:
        ConfigError: a GPU is requested, but none is visible.
        ModuleNotFoundError: Horovod is missing (the error of `init` shows how to build it).
    """
    devices = gpus_of_rank(detected, device, BACKEND.visible_gpus, BACKEND.name, gpus_per_rank)
    BACKEND.pin(devices, cpu_only=device == "cpu")
    if not devices:
        keep_freed_memory()
    keras.utils.set_random_seed(seed)
    if engine == "solo":
        return SoloEngine(devices=devices)
    for watched in (FITS, UPDATES):
        watched.close()
    FITS.enter_context(replaced(keras.Model, "fit", _fit))
    UPDATES.enter_context(replaced(BaseOptimizer, "apply", _apply))
    return KerasHorovodEngine.join(BACKEND.hvd, detected, devices)


# hvdtrain watches the fits of all models, and the updates of all optimizers, until these are closed
FITS, UPDATES = ExitStack(), ExitStack()


def _fit(original: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """Reports the first model that is fitted on several ranks without `prepare`: each rank trains alone."""
    if session_of(model) is None and session_of(getattr(model, "optimizer", None)) is None:
        _report(
            "fit() on {} ranks of a model that is not prepared", " before fit(data, callbacks=hvk.callbacks(model))"
        )
    return original(model, *args, **kwargs)


def _apply(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Reports the first update in a program that has prepared nothing: each rank trains alone."""
    UPDATES.close()
    if not is_stock(optimizer):  # Horovod's own averages
        what = f"{type(optimizer).__name__}.apply() on {{}} ranks, but prepare() was not called"
        _report(what, " before the first update; or prepare(optimizer) without compile()")
    return original(optimizer, *args, **kwargs)


def _report(what: str, when: str) -> None:
    world = current()
    if world is None or world.size == 1:
        return
    FITS.close()
    UPDATES.close()
    if world.is_main:
        print(
            f"hvdtrain: {what.format(world.size)}: hvdtrain averages nothing\n"
            f"  fix: hvdtrain.keras.prepare(model, data){when}",
            flush=True,
        )


class KerasHorovodEngine(HorovodCollectives):
    """`hvdtrain.comm.engines.Engine` on the Horovod of Keras' backend."""

    def host_sum(self, array: np.ndarray) -> np.ndarray:
        return BACKEND.host_allreduce(array, "sum", self.next_name())

    def host_broadcast(self, array: np.ndarray, root: int) -> np.ndarray:
        return BACKEND.host_broadcast(array, root, self.next_name())

    def host_gather(self, array: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        return BACKEND.host_allgather(array, self.next_name())


def world_of(world: World | None) -> World:
    """Returns the world given, or that of the last `init()`; raises ConfigError if it is another framework's."""
    found = given_or_current(world, "keras")
    if found.size > 1 and not isinstance(found.comm, KerasHorovodEngine):
        received = 'a world of "torch"'
        raise ConfigError('hvdtrain.keras needs hvdtrain.init("keras")', received, 'call hvdtrain.init("keras")')
    return found
