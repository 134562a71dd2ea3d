"""The `hvdtrain` command: one subcommand a module, imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from hvdtrain.core import flags
from hvdtrain.core.errors import (
    EXIT_CODE,
    FAULT_CODE,
    PIPE_CODE,
    ConfigError,
    HvdtrainError,
    exit_codes_of,
    missing_package,
)
from hvdtrain.core.flags import LateParser

# name -> (module with add_arguments(parser) and run(args) -> exit code, one line of help)
COMMANDS = {
    "launch": ("hvdtrain.commands.launch", "run a command on N ranks of many hosts, and end them together"),
    "doctor": ("hvdtrain.commands.doctor", "print what is wrong with this machine or cluster, and the fix"),
    "why": ("hvdtrain.commands.why", "print why a run hung or was killed: which rank, which line, and what to do"),
    "rehearse": ("hvdtrain.commands.rehearse", "try your script on as many ranks as it shall have, on this machine"),
    "guard": ("hvdtrain.guard", "run your Horovod script, and name what in it would train wrong, with file and line"),
    "migrate": ("hvdtrain.migrate", "convert your Horovod script to hvdtrain, and prove that both train the same"),
    "verify": ("hvdtrain.commands.verify", "train a toy on your cluster, and prove that it is trained right"),
    "build-horovod": (
        "hvdtrain.horovod_build",
        "build a Horovod wheel for the frameworks installed here, and prove it",
    ),
    "report": ("hvdtrain.commands.report", "make one page about runs: curves, where time went, faults, advice"),
    "bench": ("hvdtrain.bench", "measure, in paired runs, against the alternatives"),
    "plan": ("hvdtrain.commands.plan", "rank the ways to train a model on given devices, by speed and memory"),
}

_FRAMEWORKS = {"torch": "torch", "torchvision": "torch", "tensorflow": "keras", "keras": "keras"}  # extra of a package


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code (`hvdtrain.core.errors.EXIT_CODES` lists them)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _open_standard_streams()
    program = " ".join(["hvdtrain", *(name for name in argv[:1] if name in COMMANDS)])
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # the interpreter itself would do it too late to handle an error
    except HvdtrainError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return EXIT_CODE
    except ModuleNotFoundError as error:
        framework = _FRAMEWORKS.get((error.name or "").partition(".")[0])
        if framework is None:
            raise
        print(f"{program}: {missing_package(error, framework)}", file=sys.stderr)
        return EXIT_CODE
    except RuntimeError as error:
        if str(error) != "can't start new thread":
            raise
        remedy = "raise what limits them: ulimit -u and -v, a container's number of processes, memory"
        refused = HvdtrainError("hvdtrain must be able to start threads", str(error), remedy)
        print(f"{program}: {refused}", file=sys.stderr)
        return EXIT_CODE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            if not _standard_output_fails():
                raise
            print(f"{program}: standard output cannot be written: {error.strerror}", file=sys.stderr)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it at the end
        return PIPE_CODE if isinstance(error, BrokenPipeError) else FAULT_CODE


def _run(argv: Sequence[str]) -> int:
    parser = _parser()
    _refuse_without_launch(argv)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        signal.signal(signal.SIGHUP, _end)
    return args.run(args)


def _refuse_without_launch(argv: Sequence[str]) -> None:
    """Raises ConfigError for `hvdtrain run ...`, and for flags of horovodrun without a command."""
    name = argv[0] if argv else ""
    if name in ("run", "-np", "--np", "-H", "--hosts", "-hostfile", "--hostfile"):
        kind, rest = ("a command", argv[1:]) if name == "run" else ("a flag", argv)
        rule = f"{name} is not {kind} of hvdtrain; did you mean hvdtrain launch?"
        raise ConfigError(rule, remedy=shlex.join(["hvdtrain", "launch", *rest]))


def _open_standard_streams() -> None:
    """Makes descriptors 0, 1 and 2 usable on any terminal, before a command opens anything.

    A descriptor that is closed becomes /dev/null: Python has no stream for it, and the next socket would take its
    number. A character that an encoding lacks is written as an escape.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 - stays open
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _standard_output_fails() -> bool:
    """Returns True if nothing can be written to standard output: tries, as an error does not name its file."""
    try:
        return not os.write(1, b"\n")
    except OSError:
        return True


def _end(number: int, frame: object) -> NoReturn:
    """Exits on SIGTERM or a closed terminal, so that what a command started (compilers, ranks) ends with it."""
    sys.exit(128 + number)


def _fill(name: str, parser: argparse.ArgumentParser) -> None:
    implementation = importlib.import_module(COMMANDS[name][0])
    implementation.add_arguments(parser)
    parser.set_defaults(run=implementation.run)
    parser.epilog = f"{parser.epilog or ''}\n{exit_codes_of(name)}"


def whole_parser() -> argparse.ArgumentParser:
    """Returns the parser of `hvdtrain` with the arguments of all its commands."""
    parser = _parser()
    flags.fill_all(parser)
    return parser


def _parser() -> argparse.ArgumentParser:
    from hvdtrain import __version__

    parser = LateParser(prog="hvdtrain", description="Train on Horovod with today's PyTorch, TensorFlow and Keras 3.")
    parser.add_argument("--version", action="version", version=f"hvdtrain {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=LateParser)
    for name, (_, line) in COMMANDS.items():
        commands.add_parser(name, help=line, fill=partial(_fill, name))
    return parser


if __name__ == "__main__":
    sys.exit(main())
