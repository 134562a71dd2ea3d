"""Runs a script on one rank of a proof up to an update, and writes what its models hold.

usage: python -m hvdtrain.migrate.rank FRAMEWORK TEXT SCRIPT FOLDER UPDATES ARGS...

TEXT, on torch or keras, is run as if it were SCRIPT, with ARGS. FOLDER/RANK.npz gets the tensors, FOLDER/RANK.json
their names, how many updates there were, and whether these were all of the script's.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

_WATCHES = {
    "torch": ("rank_torch", "TorchScriptWatch"),
    "keras": ("rank_keras", "KerasScriptWatch"),
}


def seed() -> int:
    """Returns what this rank's random numbers begin with: unlike on each, so that a broadcast is needed."""
    return int(os.environ["HOROVOD_RANK"])


class Enough(BaseException):
    """Ends the script after its updates; no `except Exception` of the script catches it."""


def gap(before: np.ndarray, after: np.ndarray) -> float:
    """Returns the largest difference relative to the largest value; infinite if shapes differ, or a value is NaN."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return math.inf
    if np.array_equal(before, after):
        return 0.0
    wide = [array.astype(complex if np.iscomplexobj(array) else float) for array in (before, after)]
    found = float(np.abs(wide[1] - wide[0]).max()) / (float(np.abs(wide[0]).max()) or 1.0)
    return found if math.isfinite(found) else math.inf


def main() -> None:
    framework, text, script, folder, updates, *args = sys.argv[1:]
    program = Path(text).read_bytes()
    # a script that averages by hand wraps nothing
    wraps = b"DistributedOptimizer" in program or b".prepare(" in program
    module, name = _WATCHES[framework]
    watch = getattr(importlib.import_module(f"hvdtrain.migrate.{module}"), name)(int(updates), wraps=wraps)
    sys.argv, sys.path[0] = [script, *args], os.path.dirname(script)
    main_module = types.ModuleType("__main__")
    main_module.__file__ = script
    sys.modules["__main__"] = main_module
    whole = True
    try:
        exec(compile(program, script, "exec"), vars(main_module))
    except Enough:
        whole = False
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    _leave(watch, Path(folder), whole=whole)


def _leave(watch: Any, folder: Path, *, whole: bool) -> None:
    """Writes the tensors of a watch, waits for the other ranks, and exits at once: the script may be within a loop."""
    arrays, eps = watch.tensors()
    rank = watch.rank()
    np.savez(folder / f"{rank}.npz", *arrays.values())
    moved = max((gap(before, arrays[name]) for name, before in watch.start.items() if name in arrays), default=0.0)
    record = {"updates": watch.updates, "eps": eps, "whole": whole, "moved": moved}
    (folder / f"{rank}.json").write_text(json.dumps(record))
    watch.end()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    from hvdtrain.migrate import rank as itself  # by its name, under which the watches know it

    itself.main()
