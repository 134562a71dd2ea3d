"""Flags of programs and commands: an error is one of ours, and says what is right."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

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


def whole(least: int) -> Callable[[str], int]:
    """A type for flags: a whole number, at least `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, not {text!r}")
        return value

    return parse


def positive(text: str) -> float:
    """A type for flags: a finite number above 0."""
    value = _finite(text)
    if value is None or value <= 0:
        raise argparse.ArgumentTypeError(f"must be a number > 0, not {text!r}")
    return value


def at_least_0(text: str) -> float:
    """A type for flags: a finite number, 0 or more."""
    value = _finite(text)
    if value is None or value < 0:
        raise argparse.ArgumentTypeError(f"must be a number >= 0, not {text!r}")
    return value


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
