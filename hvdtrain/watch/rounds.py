"""Rank 0 asks what every rank does, when it has been in one place for too long; and ends the job if one is hung."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.comm.link import RankLink
from hvdtrain.comm.ring import place_of, read_ring
from hvdtrain.watch import bundle, hang
from hvdtrain.watch.looks import Own

Links = Mapping[int, RankLink]  # by rank
ANSWER_S = 2.5  # that a rank has to say what it does; one that holds Python's lock, or is stopped, cannot


@dataclass
class Round:
    """A question of rank 0's: what does each rank do?"""

    number: int
    until: float  # ranks that have not answered by then are silent
    asked: set[int]  # the ranks that should answer
    full: bool  # with the stacks of all threads, to end the job by
    answers: dict[int, hang.Report] = field(default_factory=dict)


class Rounds:
    """Rank 0's questions, and rank 1's judgement of a rank 0 that asks nothing; `end` ends the job."""

    def __init__(
        self,
        own: Own,
        size: int,
        who: Sequence[tuple[str, int]],
        end: Callable[[list[str], list[RankLink], list[int]], None],
    ) -> None:
        self._own, self._size, self._who, self._end = own, size, who, end
        self._round: Round | None = None
        self._number, self._next, self._left_alone = 0, 0.0, ""
        self.reached: set[int] = set()

    def answer(self, rank: int, message: Mapping[str, Any]) -> None:
        """Takes what a rank says of itself."""
        if self._round is not None and message["asked"] == self._round.number:
            self._round.answers[rank] = message["look"]

    def go_on(self, links: Links, idle_s: float) -> None:
        """Asks, waits for answers, and judges; to be called all the time, with rank 0's idle time."""
        now = time.monotonic()
        if idle_s < self._own.hang_s * hang.STOPPED:
            self._round = None
        elif self._round is None:
            if now >= self._next:
                self._ask(links, set(links), full=False)
        elif self._round.asked <= self._round.answers.keys() or now >= self._round.until:
            last, self._round = self._round, None
            reports: dict[int, hang.Report] = {0: self._own.report(full=last.full), **last.answers}
            silent: dict[int, hang.Report] = {
                rank: self._unheard(rank) for rank in range(self._size) if rank not in reports
            }
            self._judge(reports, silent, links, full=last.full)

    def without_rank_0(self, *, linked: bool) -> None:
        """On rank 1, which waits, and does not hear of rank 0: it may be stopped."""
        if linked:
            self.reached.add(0)
        if time.monotonic() >= self._next:
            self._judge({1: self._own.report(full=True)}, {0: self._unheard(0)}, {}, full=True)

    def _judge(
        self, reports: dict[int, hang.Report], silent: dict[int, hang.Report], links: Links, *, full: bool
    ) -> None:
        hang_s = self._own.hang_s
        verdict = hang.judge(reports, silent, hang_s)
        if verdict.kind == "hung" and not full:
            self._ask(links, set(reports), full=True)
            return
        self._next = time.monotonic() + max(hang_s / 3, 1.0)
        if verdict.kind == "hung":
            for rank, known in silent.items():
                if known.get("state"):  # it is on this host
                    silent[rank] = {**known, "native": bundle.native_stack(known["pid"])}
            path = bundle.path_of(self._own.run_dir)
            error = hang.hung(verdict, reports, silent, hang_s, str(path or ""))
            text = [error.rule, error.received, error.remedy]
            bundle.write(path, text, verdict, reports, silent)
            self._end(text, list(links.values()), verdict.ranks)
        elif verdict.kind:
            said = hang.notes(verdict, {**reports, **silent}, hang_s)
            place = f"{verdict} {reports[min(reports)]['updates']}"
            if place != self._left_alone:
                self._left_alone = place
                print(said, file=sys.stderr, flush=True)

    def _ask(self, links: Links, ranks: set[int], *, full: bool) -> None:
        self._number += 1
        self._round = Round(self._number, time.monotonic() + ANSWER_S, ranks & links.keys(), full)
        for rank in self._round.asked:
            with contextlib.suppress(OSError):
                links[rank].send(look=self._number, full=full)

    def _unheard(self, rank: int) -> dict[str, Any]:
        """Returns what is known of a rank that does not answer."""
        path = place_of(self._own.run_dir, self._own.token, rank)
        host, pid = self._who[rank] if self._who else ("", 0)
        here = bool(pid) and host == socket.gethostname()
        page = (read_ring(path) if path is not None else None) or {}
        known = {"rank": rank, "host": host, "pid": pid, **page, "reached": here or rank in self.reached}
        return known | (bundle.state_of_process(pid) if here else {})
