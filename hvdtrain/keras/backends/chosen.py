"""The backend that Keras runs on, and what the adapter asks of it.

`BACKEND` is the one place where the adapter branches on Keras' backend: tensor and collective operations, of which both
backends have all. Variables are `keras.Variable`, tensors the backend's own. An operation with a `name` is collective:
all ranks call it with the same name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras

from hvdtrain.keras.backends.supported import check_backend

if TYPE_CHECKING:
    from hvdtrain.keras.backends.tensorflow import TensorFlowBackend
    from hvdtrain.keras.backends.torch import TorchBackend


def _choose() -> TensorFlowBackend | TorchBackend:
    """Returns the backend Keras was imported with.

    Raises:
        ConfigError: a backend whose training step has no place for Horovod (JAX, OpenVINO, numpy).
    """
    name = keras.backend.backend()
    if name == "tensorflow":
        from hvdtrain.keras.backends.tensorflow import TensorFlowBackend

        return TensorFlowBackend()
    check_backend(name)  # a ~/.keras/keras.json may have chosen another one
    from hvdtrain.keras.backends.torch import TorchBackend

    return TorchBackend()


BACKEND = _choose()
