"""Finds ranks that wait in vain, and ends the job with the lines of all.

A rank that is blocked inside a collective cannot ask the others through another collective. So rank 0 listens on a
separate port. A rank that has been in one place for some seconds sends its place there; a rank that makes progress
sends nothing and opens no connection.

When all are stuck and none of them can continue (`meeting.deadlocked`), rank 0 asks again, because a rank that was
stopped in the meantime may have an old report; then every rank prints the error and ends. When some have waited longer
than the hang time for one that is in no collective, rank 0 asks all for their state (`hang.judge`), and again, with all
stacks, before it ends the job.
"""

from __future__ import annotations

import contextlib
import gc
import hmac
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hvdtrain.comm import elastic
from hvdtrain.comm.arrival import listen_to_ranks, seconds_of
from hvdtrain.comm.link import LONGEST_REPORT, WELCOME, Meeting, RankLink, connect
from hvdtrain.comm.ring import place_of, read_ring
from hvdtrain.core import variables
from hvdtrain.core.errors import HUNG_CODE, OUT_OF_STEP_CODE, ReplicaError, describe, end_now, ending
from hvdtrain.core.launchers import Detected
from hvdtrain.watch import bundle, hang, looks
from hvdtrain.watch.meeting import State, Tracker, deadlocked, out_of_step

Links = Mapping[int, RankLink]  # by rank
ANSWER_S = 2.5  # that a rank has to say what it does; one that holds Python's lock, or is stopped, cannot
_AFTER_S = 3.0
_TICK_S = 0.25
_HANG_S = 28.0  # it is named within 30: looks are a second apart
_UNHEARD = 0.8  # of the hang time, that rank 1 waits to hear of rank 0
_CLOSE_S = 10.0
_LAST_WORDS_S = 2.0  # rank 0 ends last: a launcher that sees it gone ends the others


def after_s(environ: Mapping[str, str]) -> float:
    """Returns how long a rank may be in one place before the others are asked; 0 for never; see `seconds_of`."""
    return seconds_of(environ, variables.IN_STEP_S, _AFTER_S, never=True)


def hang_s(environ: Mapping[str, str]) -> float:
    """Returns how long a rank may let others wait; 0 for ever; see `seconds_of`."""
    return seconds_of(environ, variables.HANG_S, _HANG_S, never=True)


def listen(detected: Detected, environ: Mapping[str, str]) -> tuple[socket.socket | None, Meeting]:
    """Opens rank 0's socket (None: there is none), and returns it with what the others must know."""
    seconds = after_s(environ)
    nowhere = Meeting(seconds, (), 0, "")
    if not seconds:
        return None, nowhere
    try:
        listener, addresses = listen_to_ranks(detected, environ)
    except OSError as error:  # to train without is better than not to train
        print(f"hvdtrain: ranks that wait for one another will not be named: {error}", file=sys.stderr, flush=True)
        return None, nowhere
    listener.setblocking(False)
    port, token = listener.getsockname()[1], secrets.token_hex(16)
    return listener, Meeting(seconds, addresses, port, token, hang_s(environ))


def start(
    rank: int,
    size: int,
    meeting: Meeting | None,
    listener: socket.socket | None,
    who: Sequence[tuple[str, int]] = (),
) -> Tracker:
    """Returns the tracker that keeps this rank in step with the others, and starts the thread that watches it.

    Args:
        rank, size: this process's rank, and the number of ranks.
        meeting: rank 0's addresses and settings, as all ranks have received them; None: one process.
        listener: rank 0's listening socket; None on other ranks.
        who: host and process of each rank, if known.
    """
    tracker = Tracker(rank, size, on=meeting is not None and meeting.after_s > 0)
    if meeting is not None and meeting.addresses:
        tracker.watch = Watch(tracker, meeting, listener, who)
    return tracker


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
        own: looks.Own,
        size: int,
        who: Sequence[tuple[str, int]],
        end: Callable[[list[str], list[RankLink], list[int]], None],
    ) -> None:
        self._own, self._size, self._who, self._end = own, size, who, end
        self._round: Round | None = None
        self._number, self._next, self._left_alone = 0, 0.0, ""
        self.reached: set[int] = set()

    def answer(self, rank: int, message: Mapping[str, Any]) -> None:
        """Takes in a rank's report on itself."""
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
        """Judges, on rank 1, a rank 0 that sends nothing while rank 1 waits for it: it may be stopped."""
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
            text = [error.title, error.received, error.remedy]
            bundle.write(path, text, verdict, reports, silent)
            self._end(text, list(links.values()), verdict.ranks)
        elif verdict.kind:
            notes = hang.notes(verdict, {**reports, **silent}, hang_s)
            place = f"{verdict} {reports[min(reports)]['updates']}"
            if place != self._left_alone:
                self._left_alone = place
                print(notes, file=sys.stderr, flush=True)

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


class Watch:
    """A rank's thread that watches its `Tracker`."""

    def __init__(
        self,
        tracker: Tracker,
        meeting: Meeting,
        listener: socket.socket | None = None,
        who: Sequence[tuple[str, int]] = (),
    ) -> None:
        self._tracker, self._meeting, self._listener = tracker, meeting, listener
        self._closing = threading.Event()
        self._question, self._asking = 0, False
        self._own = looks.Own(tracker, meeting)
        self._rounds = Rounds(self._own, tracker.size, who, self._end_hung)
        self._formation = elastic.ranks().formation
        run = self._speak if tracker.rank else self._compare
        self._thread = threading.Thread(target=run, name="hvdtrain in step", daemon=True)
        self._thread.start()

    def close(self, *, wait: bool = True) -> None:
        """Ends the thread; other ranks can no longer reach it."""
        self._closing.set()
        if wait:
            self._thread.join(_CLOSE_S)
        self._own.close()

    def use_run_dir(self, run_dir: Path) -> None:
        """Does `looks.Own.use_run_dir`."""
        self._own.use_run_dir(run_dir)

    def _end_hung(self, error: list[str], links: Sequence[RankLink], ranks: Sequence[int]) -> None:
        """Ends the job; an elastic one continues without the ranks that hang."""
        if elastic.ranks().lose(ranks, self._formation):
            print(describe("hvdtrain", ReplicaError(*error), self._tracker.rank), file=sys.stderr, flush=True)
        else:
            self._end_all(error, links)

    def _end_all(self, error: list[str], links: Sequence[RankLink], code: int = HUNG_CODE) -> None:
        self._own.close()
        self._tracker.run_dir = None  # what the main thread fails with meanwhile comes of it
        end_all(error, self._tracker.rank, links, code=code)

    # -- every rank but 0 ------------------------------------------------------------------------------------------
    def _speak(self) -> None:
        link: RankLink | None = None
        sent: State | None = None
        hang_s = self._meeting.hang_s
        shy_s = min(self._meeting.after_s, hang_s / 3) if hang_s else float("inf")
        heard_s, pinged = time.monotonic(), False
        while not self._closing.is_set():
            idle_s = self._own.tick()
            state = self._tracker.stuck(self._meeting.after_s)
            if link is None and (state is not None or idle_s > shy_s):
                link, sent = connect(self._meeting, self._tracker.rank), None
            unheard_s = min(idle_s, time.monotonic() - heard_s) if self._tracker.rank == 1 and hang_s else 0.0
            if unheard_s > _UNHEARD * hang_s + ANSWER_S and (link is None or pinged):
                self._rounds.without_rank_0(linked=link is not None)
            if link is None:
                self._closing.wait(_TICK_S)
                continue
            try:
                if state != sent:
                    link.send(at=state)
                    sent = state
                if unheard_s > _UNHEARD * hang_s and not pinged:
                    link.send(ping=True)
                    pinged = True
                for message in link.receive(_TICK_S):
                    heard_s, pinged = time.monotonic(), False
                    if "end" in message:
                        self._end_all(message["end"], [link], message["code"])
                    if "look" in message:
                        link.send(look=self._own.report(full=message["full"]), asked=message["look"])
                    if "ask" in message:
                        sent = self._tracker.stuck(self._meeting.after_s)
                        link.send(at=sent, asked=message["ask"])
            except (OSError, ValueError):  # rank 0 is gone, which is the engine's to say
                link.close()
                link = None
                self._closing.wait(_TICK_S)
        if link is not None:
            link.close()

    # -- rank 0 ----------------------------------------------------------------------------------------------------
    def _compare(self) -> None:
        assert self._listener is not None
        links: dict[RankLink, int] = {}  # rank; 0 until it has sent which rank it is
        reports: dict[int, Mapping[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, None)
            while not self._closing.is_set():
                idle_s = self._own.tick()
                for key, _ in selector.select(_TICK_S):
                    if key.data is None:
                        with contextlib.suppress(OSError):
                            link = RankLink(self._listener.accept()[0])
                            links[link] = 0
                            selector.register(link.socket, selectors.EVENT_READ, link)
                    elif not self._take(key.data, links, reports):
                        selector.unregister(key.data.socket)
                        rank = links.pop(key.data)
                        if rank not in links.values():  # it may have come through several addresses
                            reports.pop(rank, None)
                        key.data.close()
                self._judge(list(links), reports)
                if self._meeting.hang_s:
                    self._rounds.go_on({rank: link for link, rank in links.items() if rank}, idle_s)
        for link in links:
            link.close()
        self._listener.close()

    def _take(self, link: RankLink, links: dict[RankLink, int], reports: dict[int, Mapping[str, Any]]) -> bool:
        """Takes in a rank's messages; returns False if the link must be closed."""
        try:
            for message in link.receive(0):
                if links[link] and "look" in message:
                    self._rounds.answer(links[link], message)
                elif links[link] and "ping" in message:
                    link.send(pong=True)
                elif links[link]:
                    reports[links[link]] = message
                elif hmac.compare_digest(str(message["token"]), self._meeting.token):
                    links[link] = int(message["rank"])
                    link.longest = LONGEST_REPORT
                    self._rounds.reached.add(links[link])
                    link.socket.sendall(WELCOME)
                else:
                    return False
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True

    def _judge(self, links: list[RankLink], reports: Mapping[int, Mapping[str, Any]]) -> None:
        """Ends the job when all ranks wait for one another, and have confirmed it on request."""
        mine = self._tracker.stuck(self._meeting.after_s)
        states = [mine, *(reports.get(rank, {}).get("at") for rank in range(1, self._tracker.size))]
        stuck = [state for state in states if state is not None]
        if len(stuck) < self._tracker.size or not deadlocked(stuck):
            self._asking = False
        elif not self._asking:
            self._asking = True
            self._question += 1
            for link in links:
                with contextlib.suppress(OSError):
                    link.send(ask=self._question)
        elif all(report.get("asked") == self._question for report in reports.values()):
            error = out_of_step(stuck, self._tracker.remedy)
            text = [error.title, error.received, error.remedy]
            if self._own.run_dir is not None:  # where `hvdtrain why` looks
                ranks = list(range(self._tracker.size))
                reported = {rank: {"rank": rank, "at": state} for rank, state in enumerate(stuck)}
                bundle.write(
                    bundle.path_of(self._own.run_dir), text, hang.Verdict("out of step", ranks, ranks), reported, {}
                )
            self._end_all(text, links, OUT_OF_STEP_CODE)


def end_all(
    error: list[str], rank: int, links: Sequence[RankLink], program: str = "hvdtrain", code: int = OUT_OF_STEP_CODE
) -> NoReturn:
    """Prints the error (rule, received, remedy) and ends this process, whose main thread is blocked.

    Rank 0 sends it to the others first, and waits until they have printed it: a launcher ends all when one rank ends.
    The links are rank 0's to all others, or another rank's to rank 0; without one this rank prints the whole error.
    """
    with ending():
        try:
            _speak(error, rank, links, program, code)
        finally:
            end_now(code)  # even if printing the error fails


def _speak(error: list[str], rank: int, links: Sequence[RankLink], program: str, code: int) -> None:
    rule, received, remedy = error
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    print(
        describe(program, ReplicaError(rule, received, remedy, shared=rank == 0 or bool(links)), rank),
        file=sys.stderr,
        flush=True,
    )
    with contextlib.suppress(OSError):  # the engine breaks as soon as one rank is gone: nothing more to report
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for link in links:
        with contextlib.suppress(OSError):
            if rank == 0:
                link.send(end=error, code=code)
            else:  # this says that it is printed; the engine of rank 0 would abort if this rank were gone first
                link.socket.shutdown(socket.SHUT_WR)
    _end_children()
    deadline = time.monotonic() + _LAST_WORDS_S
    for link in links:
        with contextlib.suppress(OSError, ValueError):
            while time.monotonic() < deadline:
                link.receive(0.1)


def _end_children() -> None:
    """Ends this rank's workers: one in an endless loop would outlive it, and keep the launcher waiting."""
    pools: Any = sys.modules.get("multiprocessing.pool")
    for found in gc.get_objects() if pools is not None else ():
        # not isinstance, which asks for `__class__`: a weak proxy whose object is gone raises
        if issubclass(type(found), pools.Pool):  # its thread would start another for each that ends
            found._worker_handler._state = pools.TERMINATE
    multiprocessing = sys.modules.get("multiprocessing")
    with contextlib.suppress(OSError, ValueError):
        for child in multiprocessing.active_children() if multiprocessing is not None else ():
            child.kill()
