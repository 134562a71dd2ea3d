"""What a check says at its end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MARK = "HVDTRAIN-GPU "


@dataclass(frozen=True)
class Goal:
    """A figure that must not be above its limit; None: it is not judged."""

    what: str
    value: float
    limit: float | None

    @property
    def kept(self) -> bool:
        """False for what is no number, too."""
        return self.limit is None or self.value <= self.limit


def say(goals: Sequence[Goal], **figures: Any) -> None:
    """Says what was found; on rank 0."""
    judged = [asdict(goal) | {"kept": goal.kept} for goal in goals]
    print("\n" + MARK + json.dumps({"goals": judged, "figures": figures}), flush=True)


def not_here(reason: str) -> int:
    """Says what is missing; returns the exit code."""
    print(MARK + json.dumps({"not here": reason}), flush=True)
    return 1


def apart(mine: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    """The largest difference of two state dicts, from names to tensors; infinite where one is not finite."""
    if set(mine) != set(plain):
        return float("inf")
    gaps = [(mine[name].cpu() - plain[name].cpu()).abs().max().item() for name in plain if plain[name].numel()]
    return max(gap if gap == gap else float("inf") for gap in map(float, gaps))
