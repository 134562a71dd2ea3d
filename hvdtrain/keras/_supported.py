"""Refuses, before Keras is imported, the backends whose training step has no place for Horovod."""

from __future__ import annotations

import os

from hvdtrain.errors import ConfigError

SUPPORTED = ("tensorflow", "torch")


def check_backend(name: str) -> None:
    """Raises ``ConfigError`` for a Keras backend that is not supported."""
    if name in SUPPORTED:
        return
    raise ConfigError(
        "hvdtrain.keras trains on the tensorflow and torch backends of Keras 3",
        f"KERAS_BACKEND={name}",
        "set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before Keras is imported"
        + ("; on JAX, Keras has its own keras.distribution.DataParallel" if name == "jax" else ""),
    )


check_backend(os.environ.get("KERAS_BACKEND") or SUPPORTED[0])
