"""`hvdtrain checkpoint export RUN --to torch|safetensors DIR`, `hvdtrain checkpoint import SOURCE --into RUN`: to and
from plain PyTorch files and safetensors; one process, no GPU. It runs no code of a file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

PROGRESS = ("epoch", "step", "samples_seen")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain checkpoint`."""
    parser.description = __doc__
    ways = parser.add_subparsers(dest="way", metavar="WAY", required=True)
    out = ways.add_parser("export", help="write a run's checkpoint in another format")
    out.add_argument(
        "run_dir", type=Path, metavar="RUN", help="directory of a run, of its checkpoints, or one checkpoint"
    )
    out.add_argument(
        "--to", choices=("torch", "safetensors"), required=True, help="format; safetensors has the weights only"
    )
    out.add_argument("target", type=Path, metavar="DIR", help="a new directory")
    out.add_argument("--which", choices=("latest", "best"), default="latest")
    into = ways.add_parser("import", help="make a run's checkpoint of a PyTorch file or of safetensors")
    into.add_argument("source", type=Path, metavar="SOURCE", help="a PyTorch file, a safetensors file or a directory")
    into.add_argument("--into", type=Path, required=True, metavar="RUN", help="run whose checkpoints get this one")
    into.add_argument("--optimizer", metavar="CLASS", help="class of the optimizer in SOURCE, for example AdamW")
    for name in PROGRESS:
        into.add_argument(f"--{name.replace('_', '-')}", type=int, help="where the training stands, if known")


def run(args: argparse.Namespace) -> int:
    """Exports or imports a checkpoint, and prints what it wrote."""
    from hvdtrain.checkpoint.checkpoint_folder import read_info
    from hvdtrain.torch import exchange

    if args.way == "export":
        path = exchange.export(args.run_dir, args.target, args.to, which=args.which)
        print(f"{path} is in {args.target}")
        return 0
    place = {name: getattr(args, name) for name in PROGRESS if getattr(args, name) is not None}
    path = exchange.import_(args.source, args.into, optimizer_class=args.optimizer, progress=place)
    its = read_info(path).progress
    where = f"epoch {its.epoch}, counted from 0, after {its.step} updates of {its.samples_seen} samples"
    print(f"{args.source} is in {path}: a run that restores it continues with {where}")
    return 0
