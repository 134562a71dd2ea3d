"""Refuses, before Keras is imported, the backends whose training step has no place for Horovod."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from hvdtrain.core.errors import ConfigError

SUPPORTED = ("tensorflow", "torch")


def check_backend(name: str) -> None:
    """Raises `ConfigError` for a Keras backend that is not supported."""
    if name in SUPPORTED:
        return
    raise ConfigError(
        "hvdtrain.keras trains on the tensorflow and torch backends of Keras 3",
        f"KERAS_BACKEND={name}" + ("" if os.environ.get("KERAS_BACKEND") else " (from keras.json)"),
        "set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before Keras is imported"
        + ("; on JAX, Keras has its own keras.distribution.DataParallel" if name == "jax" else ""),
    )


def configured() -> str:
    """Returns the backend that Keras will start with: `KERAS_BACKEND`, else that of its `keras.json`."""
    path = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras") / "keras.json"
    try:
        own = json.loads(path.read_text(encoding="utf-8")).get("backend")
    except (OSError, ValueError, AttributeError):
        own = None  # no such file, or one that Keras will complain of itself
    return os.environ.get("KERAS_BACKEND") or str(own or SUPPORTED[0])


if "keras" not in sys.modules:  # else its backend is what it is, and _backend.py looks at that
    check_backend(configured())
