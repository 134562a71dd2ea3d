"""Runs examples on Keras: see run.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
from run import main


def run(space: dict[str, Any], file: Path, code: Any) -> None:
    keras.config.set_floatx("float64")
    exec(code, space)
    np.savez(file.open("wb"), **{str(n): value.numpy() for n, value in enumerate(space["model"].weights)})


if __name__ == "__main__":
    main("keras", run)
