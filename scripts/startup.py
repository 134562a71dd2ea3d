#!/usr/bin/env python3
"""Where the seconds to the first update of `horovodrun -np 2 python -m hvdtrain.keras_mnist` go.

    scripts/startup.py [--rounds 5] [CHECKOUT ...]     default: this one

Checkouts take turns. Printed are medians [least]: seconds since the command began, and the processor's of a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROBE = """
import json, os, sys, time
from hvdtrain import current, keras_mnist
from hvdtrain.world import startup

marks = []
def noted(owner, name, label, last=False):
    inner = getattr(owner, name)
    def call(*args, **options):
        result = inner(*args, **options)
        marks.append((label, time.time() - float(sys.argv[1]), time.process_time()))
        if last:
            world = current()
            open(sys.argv[2] + str(world.rank), "w").write(json.dumps(marks))
            world.barrier()  # both files are there
            os._exit(0)
        return result
    setattr(owner, name, call)

noted(startup, "find_modules", "Python, hvdtrain, flags")
noted(startup, "import_modules", "TensorFlow, Keras, Horovod imported")
noted(keras_mnist.hvdtrain, "init", "hvdtrain.init")
train = keras_mnist.train
def trained(args, world):
    from hvdtrain.keras.state import start, steps
    noted(keras_mnist, "load_mnist", "data, compared")
    noted(start, "start", "run log, model, broadcast, proof")
    noted(steps, "_after_first", "first update, replicas and loss compared", last=True)
    train(args, world)
keras_mnist.train = trained
keras_mnist.main([])
"""


def once(checkout: Path, ranks: int = 2) -> list[tuple[str, float, float]]:
    """Returns, of each part, its name, and seconds of time and of the processor until its end: means over ranks."""
    environ = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = ["horovodrun", "-np", str(ranks), sys.executable, "-c", PROBE, str(time.time()), f"{folder}/"]
        subprocess.run(command, cwd=folder, env=environ, capture_output=True, timeout=300, check=False)
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]
    return [(row[0][0], max(r[1] for r in row), sum(r[2] for r in row) / ranks) for row in zip(*found, strict=True)]


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    args = p.parse_args()
    rounds = [[once(checkout.resolve()) for checkout in args.checkouts] for _ in range(args.rounds)]
    for index, checkout in enumerate(args.checkouts):
        print(f"{checkout}, {args.rounds} rounds\n{'until the end of':42}{'seconds':>16}{'processor':>16}")
        for row in zip(*(its[index] for its in rounds), strict=True):
            wall, used = ([r[k] for r in row] for k in (1, 2))
            columns = (f"{statistics.median(found):.2f} [{min(found):.2f}]" for found in (wall, used))
            print(f"{row[0][0]:42}" + "".join(f"{column:>16}" for column in columns))


if __name__ == "__main__":
    main()
