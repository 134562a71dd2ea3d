"""The backend that Keras runs on, and what the adapter asks of it.

`BACKEND` is the one place where the adapter branches on Keras' backend: tensor and collective operations, of which both
backends have all. Variables are `keras.Variable`, tensors the backend's own. An operation with a `name` is collective:
all ranks call it with the same name. A backend whose training step has no place for Horovod is refused.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from hvdtrain.core.errors import ConfigError, missing_package

if TYPE_CHECKING:
    from hvdtrain.keras.backends.tensorflow import TensorFlowBackend
    from hvdtrain.keras.backends.torch import TorchBackend


def _refuse_unsupported(name: str) -> None:
    if name in ("tensorflow", "torch"):
        return
    raise ConfigError(
        "hvdtrain.keras needs the tensorflow or torch backend of Keras 3",
        f"KERAS_BACKEND={name}" + ("" if os.environ.get("KERAS_BACKEND") else " (from keras.json)"),
        "set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before Keras is imported"
        + (";\non JAX, Keras has its own keras.distribution.DataParallel" if name == "jax" else ""),
        code=3,
    )


def _choose() -> TensorFlowBackend | TorchBackend:
    """Returns the backend Keras was imported with, or starts with."""
    if "keras" not in sys.modules:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # TensorFlow's C++ prints warnings and errors, no notes
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name in ("jax", "openvino"):  # of a backend that is not installed
            _refuse_unsupported(error.name)
        raise missing_package(error, "keras") from error

    name = keras.backend.backend()
    _refuse_unsupported(name)
    if name == "tensorflow":
        from hvdtrain.keras.backends.tensorflow import TensorFlowBackend

        return TensorFlowBackend()
    from hvdtrain.keras.backends.torch import TorchBackend

    return TorchBackend()


BACKEND = _choose()
