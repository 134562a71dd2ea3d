"""`hvdtrain bench`: measured in paired runs, against the alternatives."""

from __future__ import annotations

import argparse

from hvdtrain.bench import checkpoint, comm, gpu, pipeline, scale, train
from hvdtrain.bench import input as input_bench

BENCHES = {
    "checkpoint": (checkpoint, "how long training waits for a checkpoint, and its updates while one is written"),
    "comm": (comm, "sums over ranks: Horovod, MPI, a ring and parameter servers; every link's bytes"),
    "gpu": (gpu, "everything on this machine's GPU: right against plain references, and what it costs"),
    "input": (input_bench, "images a second that reach the training loop, against a plain DataLoader"),
    "pipeline": (pipeline, "a model split over CPU stages, against the naive split and other pipelines"),
    "scale": (scale, "how far off `hvdtrain scale` is: steps of real ranks beside what it predicts"),
    "train": (train, "step times of a prepared fit against plain Keras, and of more ranks against one"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand a benchmark."""
    which = parser.add_subparsers(dest="bench", metavar="BENCH", required=True)
    for name, (module, line) in BENCHES.items():
        one = which.add_parser(name, help=line, description=module.__doc__)
        one.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(one)


def run(args: argparse.Namespace) -> int:
    """Runs the chosen benchmark; returns its exit code."""
    module, _ = BENCHES[args.bench]
    return module.run(args)
