"""`hvdtrain guard`: runs an unmodified Horovod script, and names what would train wrong, with file and line.

Every rank runs its script through it: `horovodrun -np 4 hvdtrain guard train.py --epochs 3`. Only what the script
imports is watched. What is found ends the job on all ranks with exit code 77 (ranks that wait for one another: 76).
"""

from __future__ import annotations

import argparse
from pathlib import Path

EPILOG = """\
examples:
  horovodrun -np 4 hvdtrain guard train.py --epochs 3
  hvdtrain launch -np 4 -- hvdtrain guard --warn --report guard.json train.py
  horovodrun -np 4 hvdtrain guard -m package.train --epochs 3
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain guard`."""
    parser.description, parser.epilog = __doc__, EPILOG
    parser.usage = "hvdtrain guard [--warn] [--report FILE] [--every N] (SCRIPT | -m MODULE) ..."
    add = parser.add_argument
    # fmt: off
    add("--warn", action="store_true", help="print each finding once, and continue")
    add("--report", type=Path, metavar="FILE", help="JSON file for the findings and the proofs; rank 0 writes it")
    add("--every", type=int, default=100, metavar="N",
        help="compare the replicas every N updates, and after the first two (default: %(default)s)")
    add("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    add("script", metavar="SCRIPT", help="the script that each rank runs")
    add("argv", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    # fmt: on


def run(args: argparse.Namespace) -> int:
    """Runs the script under watch; returns the exit code."""
    from hvdtrain.core.errors import ConfigError
    from hvdtrain.guard import script

    if args.every < 1:
        raise ConfigError("--every must be a whole number of updates, 1 or more", str(args.every))
    return script.run(args.script, args.argv, args.module, warn=args.warn, report=args.report, every=args.every)
