"""Flags of programs and commands: an error is one of ours, and says what is right."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from typing import NoReturn, TypeVar

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
