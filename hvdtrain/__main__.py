"""The `hvdtrain` command: one subcommand a module, imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from hvdtrain.core.errors import HvdtrainError

# name -> (module with add_arguments(parser) and run(args) -> exit code, one line of help)
COMMANDS = {
    "launch": ("hvdtrain.commands.launch", "run a command on N ranks of many hosts, and end them together"),
    "doctor": ("hvdtrain.commands.doctor", "say what is wrong with this machine or cluster, and the fix"),
    "why": ("hvdtrain.commands.why", "say why a run hung or was killed: who, where, and what to do"),
    "rehearse": ("hvdtrain.commands.rehearse", "try your script on as many ranks as it shall have, on this machine"),
    "guard": ("hvdtrain.guard", "run your Horovod script, and name what in it would train wrong, with file and line"),
    "migrate": (
        "hvdtrain.migrate",
        "turn your Horovod script into one on hvdtrain, and prove that both train the same",
    ),
    "verify": ("hvdtrain.commands.verify", "train a toy on your cluster, and prove that it is trained right"),
    "build-horovod": (
        "hvdtrain.horovod_build",
        "build a Horovod wheel for the frameworks installed here, and prove it",
    ),
    "checkpoint": ("hvdtrain.commands.checkpoint", "checkpoints to and from PyTorch's DCP, and plain safetensors"),
    "report": (
        "hvdtrain.commands.report",
        "one page about a run, or several: curves, where time went, faults, advice",
    ),
    "bench": ("hvdtrain.bench", "measure, in paired runs, against the alternatives"),
    "plan": ("hvdtrain.commands.plan", "rank the ways to train a model on given devices, by speed and memory"),
    "scale": ("hvdtrain.commands.scale", "predict a step on 8 ... 4096 ranks from what a step and a link cost"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code (2: the input or the environment was refused)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(argv[0] if argv else None)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        signal.signal(signal.SIGHUP, _end)
    try:
        return args.run(args)
    except HvdtrainError as error:
        print(f"hvdtrain {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `hvdtrain ... | head`: the reader has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - so that the interpreter's last flush has somewhere to go
        return 141


def _end(number: int, frame: object) -> NoReturn:
    """SIGTERM, or a closed terminal, unwinds like an exit: what a command started (compilers, ranks) ends with it."""
    sys.exit(128 + number)


def _parser(wanted: str | None) -> argparse.ArgumentParser:
    """Only the wanted subcommand's module is imported: `hvdtrain --help` stays instant."""
    from hvdtrain import __version__

    parser = argparse.ArgumentParser(
        prog="hvdtrain", description="Train on Horovod with today's PyTorch, TensorFlow and Keras 3."
    )
    parser.add_argument("--version", action="version", version=f"hvdtrain {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module, line) in COMMANDS.items():
        command = commands.add_parser(name, help=line)
        if name == wanted:
            implementation = importlib.import_module(module)
            implementation.add_arguments(command)
            command.set_defaults(run=implementation.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
