"""Runs scripts of tests/horovod_scripts one after another in this process, as `python script.py args` would each.

usage: in_turn.py FOLDER "script.py args" ...

What they print, and the weights of the `model` that they leave, go to FOLDER/RANK.json. They share one start of Horovod
(`hvd.init()` of one that runs already does nothing), and FOLDER as working directory.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[2] / "horovod_scripts"


def weights(model: Any) -> list[float]:
    """Every trainable number of a PyTorch or Keras model."""
    if hasattr(model, "parameters"):
        return [number for p in model.parameters() for number in p.detach().double().reshape(-1).tolist()]
    return [float(number) for variable in model.trainable_variables for number in variable.numpy().reshape(-1)]


def main() -> None:
    folder, *lines = sys.argv[1:]
    os.chdir(folder)
    found = {}
    for line in lines:
        name, *arguments = shlex.split(line)
        sys.argv = [str(SCRIPTS / name), *arguments]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            left = runpy.run_path(sys.argv[0], run_name="__main__")
        found[line] = {"printed": printed.getvalue(), "weights": weights(left["model"])}
    rank = left["hvd"].rank()
    Path(f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
