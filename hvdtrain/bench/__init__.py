"""`hvdtrain bench`: measured in paired runs, against the alternatives."""

from __future__ import annotations

import argparse
import importlib
from functools import partial

from hvdtrain.core.flags import LateParser

BENCHES = {  # each is a module of this folder
    "checkpoint": "how long training waits for a checkpoint, and its updates while one is written",
    "comm": "sums over ranks: Horovod, MPI, a ring and parameter servers; every link's bytes",
    "gpu": "everything on this machine's GPU: right against plain references, and what it costs",
    "input": "images a second that reach the training loop, against a plain DataLoader",
    "pipeline": "a model split over CPU stages, against the naive split and the tutorial's pattern",
    "train": "step times of a prepared fit against plain Keras, and of more ranks against one",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one subcommand for each benchmark."""
    which = parser.add_subparsers(dest="bench", metavar="BENCH", required=True, parser_class=LateParser)
    for name, line in BENCHES.items():
        which.add_parser(name, help=line, fill=partial(_fill, name))


def _fill(name: str, parser: argparse.ArgumentParser) -> None:
    module = importlib.import_module(f"{__name__}.{name}")
    parser.description = module.__doc__
    module.add_arguments(parser)
    parser.set_defaults(run_bench=module.run)


def run(args: argparse.Namespace) -> int:
    """Runs the chosen benchmark; returns its exit code."""
    code: int = args.run_bench(args)
    return code
