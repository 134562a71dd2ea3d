"""Which of several variants is fastest, by as few runs as it takes: a prediction says where to look, short trials in
turns say what is so. Nothing here knows what is run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hvdtrain.record.stats import Interval, ratio_of_means, rotated

LEAST_ROUNDS, MOST_ROUNDS = 3, 6  # with fewer than 3 runs an interval says nothing
CLOSE_ENOUGH = 1.03  # times the fastest: what lies below may be chosen instead
TRUSTED = 1.25  # a prediction whose errors differ by more says nothing about the order
REFERENCE = 0  # the key of what the candidates are compared with; candidates are counts, from 1


@dataclass
class Search:
    """The fastest of several candidates (counts, from 1), whose time has one minimum over them.

    It begins at the minimum of the prediction and at the candidates beside it, runs them in turns, and moves on when
    one at the edge leads: so a prediction that is off costs rounds, not the result. Candidates that are slower for
    sure are left out of further rounds.

    Attributes:
        run: takes a candidate, or `REFERENCE`; returns seconds, or infinity for what cannot be run.
        predicted: seconds by candidate; the candidates are its keys.
        confidence: of every interval.
        in_time: whether there is time for so many more seconds.
        reference: whether `REFERENCE` takes part.
        seconds: what was measured: by candidate, by round.
        settled: whether no other candidate can be faster by more than 3 %, with that confidence; and whether the
            reference is faster or slower.
    """

    run: Callable[[int], float]
    predicted: Mapping[int, float]
    confidence: float = 0.95
    in_time: Callable[[float], bool] = lambda seconds: True
    reference: bool = False
    seconds: dict[int, dict[int, float]] = field(default_factory=dict)
    settled: bool = False

    def __post_init__(self) -> None:
        self._order = sorted(self.predicted)
        self._active: list[int] = []
        self._slower: set[int] = set()

    def find(self) -> int:
        """Runs the rounds; returns the candidate to take (see `settled`)."""
        self._active = self._around(min(self._order, key=self.predicted.__getitem__))
        for turn in range(MOST_ROUNDS + LEAST_ROUNDS * len(self._order)):
            if turn and not self._time_for_a_round():
                break
            self._round(turn)
            leader = self.leader()
            self._leave_out_the_slower(leader)
            grown = self._look_beside(leader)
            self.settled = not grown and self._is_settled(leader)
            still = [one for one in self._active if one not in self._slower]
            enough = all(len(self.seconds.get(one, ())) >= MOST_ROUNDS for one in still)
            if self.settled or (enough and not grown):
                break
        return self.leader()

    def leader(self) -> int:
        """The fastest so far."""
        tried = [one for one in self._active if self.seconds.get(one)]
        return min([one for one in tried if one not in self._slower] or tried, key=self._believed)

    def _believed(self, one: int) -> float:
        """The estimate of a candidate; what it lacks in rounds the prediction stands in for, as far as it goes: at the
        level of what was measured. So one quick run does not make a winner, and a wrong prediction does not stay."""
        runs, seconds = len(self.seconds[one]), self._estimate(one)
        if runs >= LEAST_ROUNDS or seconds == math.inf:
            return seconds
        known = [self._estimate(its) / self.predicted[its] for its in self._active if self.seconds.get(its)]
        known = [ratio for ratio in known if ratio < math.inf]
        if max(known) > TRUSTED * min(known):
            return seconds
        scale = statistics.fmean(known)
        return (runs * seconds + (LEAST_ROUNDS - runs) * scale * self.predicted[one]) / LEAST_ROUNDS

    def compared(self, one: int, other: int) -> Interval | None:
        """The time of one candidate (or the reference) over that of another."""
        its = [{turn: s for turn, s in self.seconds.get(key, {}).items() if s < math.inf} for key in (one, other)]
        return ratio_of_means(its[0], its[1], self.confidence)

    def _estimate(self, one: int) -> float:
        """Seconds of a candidate, without how slow the machine was in the rounds it took part in."""
        if math.inf in self.seconds[one].values():
            return math.inf
        return statistics.median(seconds / self._level(turn) for turn, seconds in self.seconds[one].items())

    def _level(self, turn: int) -> float:
        """How slow the machine was in a round: its seconds over each one's mean. A candidate that came later is not
        judged by another time of day."""
        ratios = [
            its[turn] / statistics.fmean(its.values())
            for its in self.seconds.values()
            if turn in its and len(its) > 1 and math.inf not in its.values()
        ]
        return statistics.fmean(ratios) if ratios else 1.0

    def _around(self, one: int) -> list[int]:
        at = self._order.index(one)
        return self._order[max(0, at - 1) : at + 2]

    def _time_for_a_round(self) -> bool:
        """Or nothing has run yet."""
        if all(second == math.inf for one in self._active for second in self.seconds.get(one, {}).values()):
            return True
        last = [statistics.fmean(self.seconds[one].values()) for one in self._keys() if self.seconds.get(one)]
        return self.in_time(sum(second for second in last if second < math.inf))

    def _keys(self) -> list[int]:
        """Who runs in a round; the reference only as often as it takes to compare with it."""
        runs = len(self.seconds.get(REFERENCE, ()))
        wanted = self.reference and (runs < LEAST_ROUNDS or (runs < MOST_ROUNDS and not self._reference_is_clear()))
        return [one for one in self._active if one not in self._slower] + [REFERENCE] * wanted

    def _round(self, turn: int) -> None:
        for one in rotated(self._keys(), turn):
            seconds = self.run(one)
            self.seconds.setdefault(one, {})[turn] = seconds
            if seconds == math.inf:
                self._slower.add(one)
                self.reference = self.reference and one != REFERENCE

    def _leave_out_the_slower(self, leader: int) -> None:
        """Those that are slower for sure; and, with one minimum, those that are slower than one between."""
        beside = self._around(leader)
        for one in self._active:
            ratio = self.compared(one, leader)
            if one == leader or len(self.seconds[one]) < LEAST_ROUNDS or ratio is None:
                continue
            if ratio.low > 1 or (one not in beside and ratio.value > 1):
                self._slower.add(one)

    def _look_beside(self, leader: int) -> bool:
        """Takes in the neighbours of the one that leads, or of all if none can be run; returns whether there are new
        ones."""
        runs = math.inf not in self.seconds[leader].values()
        new = [
            one for of in ([leader] if runs else self._active) for one in self._around(of) if one not in self._active
        ]
        self._active = sorted({*self._active, *new})
        return bool(new)

    def _is_settled(self, leader: int) -> bool:
        others = [one for one in self._active if one != leader and one not in self._slower]
        ratios = [self.compared(leader, one) for one in others]
        sure = len(self.seconds[leader]) >= LEAST_ROUNDS
        beaten = all(ratio is not None and ratio.high <= CLOSE_ENOUGH for ratio in ratios)
        return sure and beaten and (not self.reference or self._reference_is_clear())

    def _reference_is_clear(self) -> bool:
        if len(self.seconds.get(REFERENCE, ())) < LEAST_ROUNDS:
            return False
        ratio = self.compared(REFERENCE, self.leader())
        return ratio is not None and (ratio.low > 1 or ratio.high < 1)
