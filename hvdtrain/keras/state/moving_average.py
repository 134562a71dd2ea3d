"""The weights themselves, where an optimizer with `use_ema` trains one epoch in two fits.

Keras writes the average over the weights at the end of each `fit`. Two fits of whole epochs are what they are in
plain Keras. But fits that end or begin within an epoch (`Loader.go_on`) are one training, as if nothing had been
stopped: what follows continues with the weights as the last step left them, and so does a checkpoint in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from hvdtrain.core.errors import ConfigError
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import KerasSession, TrainingPlace, leaves_of, optimizers_of


@dataclass(frozen=True)
class KeptWeights:
    """Weights and their averages, as the last step left them; `began_within`: they end the rest of an epoch."""

    values: Sequence[Any]
    began_within: bool


def _averaged(model: keras.Model) -> list[Any]:
    """The weights that have an average, each followed by it."""
    found: list[Any] = []
    for leaf in leaves_of(model.optimizer):
        if getattr(leaf, "use_ema", False) and leaf.built:
            pairs = zip(leaf._trainable_variables, leaf._model_variables_moving_average, strict=True)
            found += [variable for pair in pairs if pair[1] is not None for variable in pair]
    return found


def _overwritten(model: keras.Model) -> list[Any]:
    """Returns `_averaged(model)` if weights and averages are equal bit for bit, as `fit` ends; otherwise []."""
    found = _averaged(model)
    pairs = zip(found[::2], found[1::2], strict=True)
    same = (np.array_equal(BACKEND.to_numpy(weight), BACKEND.to_numpy(average)) for weight, average in pairs)
    return found if all(same) else []


def keep(model: keras.Model, place: TrainingPlace, *, is_rest: bool) -> None:
    """Keeps weights and averages at an epoch's end that may be `fit`'s, before Keras writes or swaps them."""
    ends = is_rest or model.stop_training
    place.kept_weights = KeptWeights(BACKEND.copies(_averaged(model)), is_rest) if ends else None


def forget(place: TrainingPlace) -> None:
    """Forgets them: a checkpoint is loaded, which has the weights themselves."""
    place.kept_weights, place.loaded = None, True


def _not_swapped(callbacks: Sequence[Any]) -> None:
    """Resets `SwapEMAWeights` of the last fit: the weights themselves are in the model, it would swap them first."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            callback._ema_weights_in_model = False


def check(model: keras.Model) -> None:
    """Checks a model before its first update, and before `fit`, where Keras on torch builds the optimizer.

    Raises:
        ConfigError: `fit` would end with averages of one optimizer in place of weights that another one updates.
    """
    several = len(optimizers_of(model)) > 1
    if several and any(getattr(leaf, "use_ema", False) and not leaf.built for leaf in leaves_of(model.optimizer)):
        raise ConfigError(
            "of several optimizers, one with use_ema must be built before fit(), which ends with the averages",
            f"{model.optimizer.name} (model.optimizer) is not built",
            "model.optimizer.build(the variables that it updates), before fit",
            shared=True,
        )


def go_on(model: keras.Model, session: KerasSession, callbacks: Sequence[Any], *, within: bool) -> None:
    """Puts the weights themselves back, before a `fit` that begins `within` an epoch, or after the rest of one."""
    check(model)
    place = session.place
    last, place.kept_weights = place.kept_weights, None
    if place.loaded:  # whatever an earlier fit left in the model
        place.loaded = False
        _not_swapped(callbacks)
    variables = _overwritten(model)
    if variables and last is not None and (within or last.began_within):
        BACKEND.put_back(variables, last.values)
        _not_swapped(callbacks)
        session.prepared.say(
            "use_ema: continues with the weights themselves, as one fit would; Keras had written the average over them"
            " at the end of the last fit, which ended or began within an epoch"
        )
    elif variables and place.saves:
        session.prepared.say(
            "use_ema: continues from the average, which Keras wrote over the weights at the end of the last fit; a run"
            " that is resumed from the last checkpoint of a fit continues with the weights themselves, as in one fit:"
            " train in one fit(epochs=...), and both are the same",
            once="average",
        )


@contextmanager
def themselves(model: keras.Model, place: TrainingPlace) -> Iterator[None]:
    """Gives the model the weights that training continues with while open."""
    variables = _overwritten(model) if place.kept_weights is not None else []
    before = BACKEND.copies(variables)
    if variables:
        BACKEND.put_back(variables, place.kept_weights.values)
    try:
        yield
    finally:
        BACKEND.put_back(variables, before)
