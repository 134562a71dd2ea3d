"""Flags of programs and commands, whose errors are `ConfigError`, with what is right."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.keywords import nearest

# flags of other launchers, and what they are here
_ELSEWHERE = dict.fromkeys(("--nproc-per-node", "--nproc_per_node", "--num_processes"), "--np")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are `ConfigError`: what it does not know, with the nearest name that it knows."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            kind = "a flag" if name.startswith("-") else "an argument"
            known = [flag for action in self._actions for flag in action.option_strings]
            raise self._error(f"{name} is not {kind} of {self.prog}{nearest(_ELSEWHERE.get(name, name), known)}")
        return namespace, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            hint = nearest(str(value), known)
            if isinstance(action, argparse._SubParsersAction):
                raise self._error(f"{value} is not a command of {self.prog}{hint}")
            raise argparse.ArgumentError(action, f"must be one of {', '.join(known)}, not {value}{hint}")

    def error(self, message: str) -> NoReturn:
        """Raises `ConfigError`, in plainer words than argparse's."""
        text = re.sub(r"^argument (\S+): must ", r"\1 must ", message)
        text = re.sub(r"^argument (\S+): expected ", r"\1 needs ", text)
        raise self._error(text.replace("the following arguments are required:", f"{self.prog} needs"))

    def _error(self, rule: str) -> ConfigError:
        return ConfigError(rule, remedy=f"{self.prog} --help", shared=True)


class Parser(_Parser):
    """The parser of a program, whose errors are printed once (by rank 0) on any number of ranks."""

    def __init__(self, module: str, *, description: str, epilog: str) -> None:
        super().__init__(
            f"python -m {module}",
            description=description,
            epilog=epilog,
            usage="%(prog)s [flags]",
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32),
        )


class LateParser(_Parser):
    """The parser of a subcommand, to which `fill` adds arguments when it is parsed: `--help` of one command imports
    the modules of no other."""

    def __init__(self, *, fill: Callable[[argparse.ArgumentParser], None] = lambda _: None, **more: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **more)
        self._fill = fill

    def fill(self) -> None:
        fill, self._fill = self._fill, lambda _: None
        fill(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.fill()
        return super().parse_known_args(args, namespace)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Prints like argparse, but raises if standard output cannot be written, which argparse hides."""
        if file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)


def fill_all(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of all subcommands of a parser, at any depth."""
    if isinstance(parser, LateParser):
        parser.fill()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                fill_all(command)


Number = TypeVar("Number", int, float)


def _number(kind: str, convert: Callable[[str], Number], fits: Callable[[Number], bool]) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        with contextlib.suppress(ValueError):
            if fits(value := convert(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {kind}, not {text!r}")

    return parse


def whole(least: int) -> Callable[[str], int]:
    """A type for flags: a whole number, at least `least`."""
    return _number(f"a whole number >= {least}", int, lambda value: value >= least)


positive = _number("a number > 0", float, lambda value: 0 < value < math.inf)
at_least_0 = _number("a number >= 0", float, lambda value: 0 <= value < math.inf)
LONGEST_S = 2e6  # poll() counts in milliseconds, 31 bits of them
_SECONDS = f"a number of seconds, at most {LONGEST_S:.0f} (23 days),"
seconds = _number(f"{_SECONDS} > 0", float, lambda value: 0 < value <= LONGEST_S)
seconds_or_0 = _number(f"{_SECONDS} >= 0", float, lambda value: 0 <= value <= LONGEST_S)


# ---- the file that a flag names for what was found


@contextlib.contextmanager
def _refused(flag: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        rule, received = f"{flag} names a file that can be written", f"{path}: {error.strerror}"
        raise ConfigError(rule, received, f"{flag} FILE") from error


def check_file(flag: str, path: Path, *, parents: bool = False) -> None:
    """Raises `ConfigError` for a file, named by a flag, that cannot be written; leaves nothing. `parents`: makes its
    folders."""
    with _refused(flag, path):
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        if new or path.is_file() or path.is_dir():  # others, as a pipe, may wait for a reader when they are opened
            path.open("ab").close()
        if new:
            os.unlink(os.path.realpath(path))


def write_file(flag: str, path: Path, text: str) -> None:
    """Writes a file; raises as `check_file`."""
    with _refused(flag, path):
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
