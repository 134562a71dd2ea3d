"""Runs one check of `hvdtrain bench gpu`; defines what a check finds."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hvdtrain.comm.turns import orders
from hvdtrain.core.launchers import detect


@dataclass(frozen=True)
class Goal:
    """A figure that must not be above its limit; None: it is not judged."""

    what: str
    value: float
    limit: float | None

    @property
    def kept(self) -> bool:
        """Returns True if the goal is kept; NaN is not."""
        return self.limit is None or self.value <= self.limit


Found = tuple[list[Goal], dict[str, Any]]  # goals, and figures that are only printed


class NotHere(Exception):
    """A check needs a package that is not installed; the text names it."""


def apart(mine: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    """The largest difference of two state dicts, from names to tensors; infinite where one is not finite."""
    if set(mine) != set(plain):
        return float("inf")
    gaps = [(mine[name].cpu() - plain[name].cpu()).abs().max().item() for name in plain if plain[name].numel()]
    return max(gap if gap == gap else float("inf") for gap in map(float, gaps))


def main() -> int:
    """Runs the check, and sends what it found once the bench asks for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", help="MODULE.FUNCTION of this folder")
    parser.add_argument("engine", nargs="?")
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--shared", action="store_true", help="ranks share a device")
    args = parser.parse_args()
    module, _, function = args.job.partition(".")
    try:
        goals, figures = getattr(importlib.import_module(f"hvdtrain.bench.gpu.{module}"), function)(args)
        found = {"goals": [asdict(goal) | {"kept": goal.kept} for goal in goals], "figures": figures}
    except NotHere as reason:
        found = {"not here": str(reason)}
    for _, connection in orders(detect(os.environ).rank):
        connection.send(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
