"""The fastest of several settings, by as few runs as it takes: the best so far and a challenger take turns until it is
known which of them is faster. Nothing here knows what is run."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from hvdtrain.record.stats import Interval, ratio_of_medians, rotated

CLEARLY = 1.1  # slower in every round by so much: no more rounds
LEAST = 5  # rounds for any other verdict
CLOSE_ENOUGH = 1.03  # times the fastest: what lies below may be chosen instead
Setting = TypeVar("Setting")
Pairs = Iterator[tuple[float, float]]


class Refused(Exception):
    """A challenger that cannot be used; the text is the reason."""


class PairOutcome(NamedTuple):
    """The outcome of a challenger, and its time over that of the best (None: no round)."""

    outcome: str  # "faster", "slower", "not faster", "within the noise", "undecided: ...", "thrown out: ..."
    ratio: Interval | None


@dataclass
class Search(Generic[Setting]):
    """Lets settings race: `race` gives seconds of two, round by round, or raises `Refused`; a round that has begun is
    finished. Faster by less than `margin` is not faster."""

    race: Callable[[Setting, Setting], Pairs]
    budget_s: float = math.inf
    margin: float = 0.0
    confidence: float = 0.95
    clock: Callable[[], float] = time.monotonic
    began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.began_s = self.clock()

    def spent_s(self) -> float:
        """Seconds since the beginning."""
        return self.clock() - self.began_s

    def compared(
        self, best: Setting, challenger: Setting, rounds: tuple[int, int], until_s: float | None = None
    ) -> PairOutcome:
        """Lets two settings take turns until one is known to be faster. `rounds`: until the challenger is, and at most;
        `until_s`: when no other round begins (default: the budget)."""
        ratios: list[float] = []
        ratio: Interval | None = None
        try:
            for one, other in self.race(best, challenger):
                ratios.append(other / one)
                ratio = ratio_of_medians(ratios, [1.0] * len(ratios), self.confidence)
                if outcome := judged(ratios, ratio, rounds, self.margin):
                    return PairOutcome(outcome, ratio)
                if self.spent_s() > (self.budget_s if until_s is None else until_s):
                    break
        except Refused as why:
            return PairOutcome(f"thrown out: {why}", ratio)
        return PairOutcome("undecided: no time", ratio)


def race_in_turns(run: Callable[[Setting], float], best: Setting, challenger: Setting) -> Pairs:
    """Yields seconds of two settings, another first in each round; infinite if it cannot run; after a warm-up."""
    if run(challenger) == math.inf:
        raise Refused("it cannot be run")
    for turn in itertools.count():
        seconds = {its: run(its) for its in rotated((best, challenger), turn)}
        if seconds[challenger] == math.inf:
            raise Refused("it can no longer be run")
        yield seconds[best], seconds[challenger]


def judged(ratios: Sequence[float], ratio: Interval, rounds: tuple[int, int], margin: float) -> str:
    """Returns the verdict on a challenger by its times over those of the best; "": needs another round; pure."""
    if len(ratios) >= 2 and min(ratios) > CLEARLY:
        return "slower"
    if len(ratios) >= LEAST and ratio.value > 1 - margin:
        return "slower" if ratio.low > 1 else "not faster"
    if len(ratios) >= (LEAST if max(ratios) < 1 / CLEARLY**2 else rounds[0]) and ratio.high < 1 - margin:
        return "faster"
    return "within the noise" if len(ratios) >= rounds[1] else ""


def climb(search: Search[int], start: int, predicted: Mapping[int, float], rounds: tuple[int, int]) -> tuple[int, bool]:
    """Returns the fastest of several counts, from `start`, whose time has one minimum over them, and whether no other
    can be faster by more than 3 %, with the search's confidence. Looks beside the best so far, where the predicted
    seconds are smaller first: a prediction that is off costs rounds, not the result."""
    order, best, settled, tried = sorted(predicted), start, True, {start}
    while True:
        at = order.index(best)
        beside = [one for one in order[max(0, at - 1) : at + 2] if one not in tried]
        if not beside:
            return best, settled
        if search.spent_s() >= search.budget_s:
            return best, False
        challenger = min(beside, key=predicted.__getitem__)
        tried.add(challenger)
        outcome, ratio = search.compared(best, challenger, rounds)
        if outcome == "faster":
            best, settled = challenger, True
        elif outcome.startswith("undecided") or (ratio is not None and ratio.low < 1 / CLOSE_ENOUGH):
            settled = False
