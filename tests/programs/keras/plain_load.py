"""Loads a checkpoint's model.keras as anybody would, where neither Horovod nor hvdtrain can be imported, and
trains on.

usage: plain_load.py MODEL.keras OUT.npz
"""

from __future__ import annotations

import sys

import keras
import numpy as np
from common import block, images, numpy_of, weights_of

block("horovod", "hvdtrain")

if __name__ == "__main__":
    model = keras.models.load_model(sys.argv[1])
    weights = weights_of(model)
    updates = int(numpy_of(model.optimizer.iterations))
    np.savez(sys.argv[2], *weights)
    x, y = images(16)
    model.fit(x.astype("float32"), y, epochs=2, verbose=0)
    moved = max(float(np.abs(a - b).max()) for a, b in zip(weights, weights_of(model), strict=True))
    print(f"loaded {type(model.optimizer).__name__} updates={updates} moved={moved > 0}")
    assert not any(name.split(".")[0] in ("horovod", "hvdtrain") for name in sys.modules), "imported after all"
