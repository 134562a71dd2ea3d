"""`hvdtrain checkpoint export RUN --to dcp|safetensors DIR`, `hvdtrain checkpoint import SOURCE --into RUN`: to and
from PyTorch's distributed checkpoints (DCP) and plain safetensors; one process, no GPU, and no code of a file is run.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain checkpoint`."""
    parser.description = __doc__
    ways = parser.add_subparsers(dest="way", metavar="WAY", required=True)
    out = ways.add_parser("export", help="write a run's checkpoint in another format")
    out.add_argument("run_dir", type=Path, metavar="RUN", help="a run, its checkpoints, or one of them")
    out.add_argument("--to", choices=("dcp", "safetensors"), required=True, help="safetensors: the weights alone")
    out.add_argument("target", type=Path, metavar="DIR", help="a directory that is made")
    out.add_argument("--which", choices=("latest", "best"), default="latest")
    out.add_argument("--model-key", default="model", help="in the DCP state; app.model is within another")
    out.add_argument("--optimizer-key", default="optim")
    into = ways.add_parser("import", help="make a run's checkpoint of a DCP directory or of safetensors")
    into.add_argument("source", type=Path, metavar="SOURCE", help="a DCP directory, a safetensors file or a directory")
    into.add_argument("--into", type=Path, required=True, metavar="RUN", help="its checkpoints get one more")
    into.add_argument("--model-key", help="in the DCP state, where it has no usual name")
    into.add_argument("--optimizer-key")
    into.add_argument("--optimizer", metavar="CLASS", help="of the optimizer whose state it is: AdamW")
    for name in ("epoch", "step", "samples-seen"):
        into.add_argument(f"--{name}", type=int, help="where the training stands, if the source does not say")


def run(args: argparse.Namespace) -> int:
    """Writes it, and says what was written."""
    from hvdtrain.checkpoint.checkpoint_folder import read_info
    from hvdtrain.torch import exchange

    if args.way == "export":
        keys = {"model": args.model_key, "optimizer": args.optimizer_key}
        path = exchange.export(args.run_dir, args.target, args.to, which=args.which, **keys)
        print(f"{path} is in {args.target}")
        return 0
    given = {"epoch": args.epoch, "step": args.step, "samples_seen": args.samples_seen}
    path = exchange.import_(
        args.source,
        args.into,
        model=args.model_key,
        optimizer=args.optimizer_key,
        optimizer_class=args.optimizer,
        progress={name: value for name, value in given.items() if value is not None},
    )
    its = read_info(path).progress
    where = f"epoch {its.epoch}, counted from 0, after {its.step} updates of {its.samples_seen} samples"
    print(f"{args.source} is in {path}: a run that restores it goes on with {where}")
    return 0
