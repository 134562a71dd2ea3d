"""Flags of programs and commands: an error is one of ours, and says what is right."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from hvdtrain.core.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `ConfigError`: told once (by rank 0) on any number of ranks."""

    def __init__(self, module: str, *, description: str, epilog: str) -> None:
        super().__init__(
            f"python -m {module}",
            description=description,
            epilog=epilog,
            usage="%(prog)s [flags]",
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32),
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message[:1].upper() + message[1:], remedy=f"{self.prog} --help", shared=True)


class LateParser(argparse.ArgumentParser):
    """The parser of a subcommand, whose arguments are added when the subcommand is parsed: so that `--help` of one
    command imports the modules of no other.

    Args:
        fill: adds them.
        more: as of `argparse.ArgumentParser`.
    """

    def __init__(self, *, fill: Callable[[argparse.ArgumentParser], None] = lambda _: None, **more: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **more)
        self._fill = fill

    def fill(self) -> None:
        """Adds the arguments, once."""
        fill, self._fill = self._fill, lambda _: None
        fill(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.fill()
        return super().parse_known_args(args, namespace)


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
