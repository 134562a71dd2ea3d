"""The parts of a checkpoint: the model as plain Keras saves it, and every rank's random state."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdtrain.checkpoint import Part
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.keras import _random, _state
from hvdtrain.keras._hook import is_built
from hvdtrain.keras._session import Session, require_compiled, session_of, world_or_current
from hvdtrain.world import World


class ModelPart:
    """``model.keras``: ``keras.models.load_model`` opens it without Horovod and without hvdtrain."""

    def __init__(self, model: keras.Model) -> None:
        self.model = model

    def save(self, path: Path) -> None:
        self.model.save(path)

    def load(self, path: Path) -> None:
        """Reads weights and optimizer state into the model as it stands; runs no code from the file.

        Raises:
            CheckpointError: the file is of another model or another optimizer.
        """
        if not is_built(self.model):
            raise CheckpointError(
                "a model is built before a checkpoint is loaded into it",
                f"model {self.model.name!r} has no weights yet",
                "give it a keras.Input, or call model.build(input_shape)",
            )
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # Keras only warns when it skips an optimizer of another kind
                self.model.load_weights(path)
        except (ValueError, KeyError, UserWarning) as error:
            raise CheckpointError(
                f"the checkpoint must be of this model and optimizer ({path.name})",
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
                "build the model and compile it as the run did that wrote it, or start a new run directory",
            ) from error


class RandomPart:
    """``random.npz``: the random state of every rank, as plain arrays (nothing is unpickled)."""

    def __init__(self, model: keras.Model, world: World, states: list[dict[str, np.ndarray]]) -> None:
        self.model = model
        self.world = world
        self.states = states

    def save(self, path: Path) -> None:
        arrays = {f"{rank}/{key}": value for rank, state in enumerate(self.states) for key, value in state.items()}
        with open(path, "wb") as file:
            np.savez(file, world_size=np.array(len(self.states)), **arrays)  # type: ignore[arg-type]

    def load(self, path: Path) -> None:
        """Puts this rank's state back; at another world size, streams that follow from rank 0's.

        The state is put back once more when training starts, because building a model draws random numbers.
        """
        with np.load(path, allow_pickle=False) as stored:
            same_size = int(stored["world_size"]) == self.world.size
            mine = self.world.rank if same_size else 0
            state = {key.partition("/")[2]: stored[key] for key in stored.files if key.startswith(f"{mine}/")}
        _random.restore(self.model, state)
        if not same_size:
            _random.apply_derived(self.model, state, self.world.rank)
            state = _random.capture(self.model)
        session = session_of(self.model)
        if session is not None:
            session.restored_random = state


def model_state(model: keras.Model) -> Mapping[str, Part]:
    """Returns what a checkpoint of this model consists of, for ``Checkpointer.save`` and ``restore``;
    collective.

    Call it on every rank, right before the save or the restore: it makes the ranks' own state one (the mean
        of moving
    statistics and of accumulated gradients, so that all ranks go on from what rank 0 writes) and gathers
    random states.

    Args:
        model: compiled and prepared.

    Returns:
        ``{"model.keras": ..., "random.npz": ...}``

    Raises:
        ConfigError: the model has no optimizer.
    """
    require_compiled(model)
    session: Session | None = session_of(model)
    if session is None:
        raise ConfigError(
            "a model is prepared before it is saved", f"model {model.name!r} is not", "hvdtrain.keras.prepare(model)"
        )
    world = world_or_current(session.world)
    if is_built(model) and session.streams_set:  # training has begun: the ranks have state of their own
        _state.average_statistics(model, world)
        _state.average(_state.accumulators(model), world)
    states: list[dict[str, Any]] = world.gather(_random.capture(model))
    return {"model.keras": ModelPart(model), "random.npz": RandomPart(model, world, states)}
