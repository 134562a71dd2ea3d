"""A rank's part in the guard: its reports, and how the ranks end together.

Each rank sends reports to rank 0 over a separate connection, so that they never mix with the script's collective
operations: a rank that has joined, or is in a collective that others skip, can still report. A rank that waits for
others is found as in hvdtrain's own programs (`core.in_step`).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hvdtrain.comm.lines import user_line
from hvdtrain.comm.link import WELCOME, RankLink, connect
from hvdtrain.core import flags, launchers, variables
from hvdtrain.core.errors import GUARD_CODE, ConfigError
from hvdtrain.guard import rates
from hvdtrain.guard.judge import Judge, as_json
from hvdtrain.watch import watch
from hvdtrain.watch.meeting import END, OFF, Place

PROGRAM = "hvdtrain guard"
_TICK_S = 0.1
_OUT_OF_STEP = (
    "call what is collective on every rank, in the same order: not under `if hvd.rank() == 0:`;\nbreak and continue on"
    " every rank alike, and give every rank the same number of batches (DistributedSampler, drop_last), or hvd.join();"
    "\nbroadcast_object without name= is called after its object's type, which must then be the same on every rank"
)


class GuardSession:
    """A rank, from the script's `hvd.init()` on; `every`: updates between two comparisons of the replicas."""

    def __init__(self, *, warn: bool, report: Path | None, every: int) -> None:
        self._warn, self._report, self.every = warn, report, every
        self.rank, self.size = 0, 1  # until Horovod has started
        self.on = False  # ranks are watched
        self.tracker = OFF
        self.joins = 0  # of the ranks: each starts to count its updates again
        self.steps: dict[str, int] = {}  # updates done, by optimizer
        self.at_end: list[Callable[[], None]] = []  # report what has changed since the last comparison
        self._met = False
        self._unwritten: ConfigError | None = None
        self._pid = os.getpid()
        self._links: dict[int, RankLink] = {}
        self._lock, self._over = threading.RLock(), threading.Event()
        self._done: set[int] = set()
        self._depth = threading.local()
        self._reported: set[tuple[str, str]] = set()

    def meet(self, rank: int, size: int, broadcast: Callable[[Any], Any]) -> None:
        """Connects the ranks, the first time; `broadcast` gives every rank rank 0's object; collective."""
        if self._met or size < 2:
            self._rates()
            return
        self._met, self.rank, self.size = True, rank, size
        reason = "an elastic job's ranks come and go" if os.environ.get("HOROVOD_ELASTIC") == "1" else ""
        if getattr(sys.modules.get("keras.src.backend.config"), "_BACKEND", "") == "torch":
            reason = "Keras on its PyTorch backend"
        if reason:
            if rank == 0:
                print(f"{PROGRAM}: not watched: {reason}", file=sys.stderr, flush=True)
            return
        found = launchers.detect(os.environ)
        # without a word of the user's, no script of theirs is ended for being slow
        environ = {variables.HANG_S: "0", **os.environ}
        listener, meeting = watch.listen(found, environ) if rank == 0 else (None, None)
        door, where = watch.listen(found, {}) if rank == 0 else (None, None)
        meeting, where = broadcast((meeting, where))
        self.tracker = watch.start(rank, size, meeting, listener)
        self.tracker.remedy, self.tracker.steps = _OUT_OF_STEP, 0
        self._judge = Judge()
        if not where.addresses:
            return
        if rank == 0:
            assert door is not None
            self._welcome(door, where.token)
            broadcast(None)
        else:
            link = connect(where, rank)
            broadcast(None)
            if link is None:
                print(f"{PROGRAM}: rank {rank} cannot reach rank 0, and is not watched", file=sys.stderr, flush=True)
                return
            self._links[0] = link
        self.on = True
        threading.Thread(target=self._listen, name=PROGRAM, daemon=True).start()
        self._rates()

    def _welcome(self, door: socket.socket, token: str) -> None:
        """Takes the other ranks' connections, on a thread: some may not come."""

        def take() -> None:
            while len(self._links) < self.size - 1 and not self._over.is_set():
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    link = RankLink(door.accept()[0])
                    for message in link.receive(_TICK_S * 20):
                        if hmac.compare_digest(str(message["token"]), token):
                            link.socket.sendall(WELCOME)
                            self._links[int(message["rank"])] = link
            door.close()

        door.setblocking(True)
        threading.Thread(target=take, name=PROGRAM, daemon=True).start()

    def _rates(self) -> None:
        if not self.on:
            return
        path = getattr(sys.modules["__main__"], "__file__", None) or sys.argv[0]
        with contextlib.suppress(OSError, UnicodeDecodeError):
            source = Path(path).read_text(encoding="utf-8")
            for number in rates.scaled_twice(source):
                self.find(
                    "rate-scaled-twice", "a learning rate must be multiplied by the number of ranks once",
                    f"hvd.size() = {self.size} is in it twice", "lr=base * hvd.size(), in one place",
                    line=f"{os.path.basename(path)}:{number}: {source.splitlines()[number - 1].strip()}",
                )  # fmt: skip

    def report(self, **report: Any) -> None:
        """Sends a report to rank 0; this rank continues."""
        if not self.on or os.getpid() != self._pid:
            return
        if self.rank == 0:
            self._take(0, report)
            return
        try:
            self._links[0].send(**report)
        except OSError:  # rank 0 is gone, which the engine reports
            self.on = False

    def find(self, name: str, rule: str, received: str, remedy: str, *, line: str | None = None) -> None:
        """Reports what this rank alone has found, once per source line; does not return if that ends the job."""
        line = line or user_line()
        if not self.on or (name, line) in self._reported or os.getpid() != self._pid:
            return
        self._reported.add((name, line))
        self.report(kind="finding", name=name, line=line, rule=rule, received=received, remedy=remedy)
        if not self._warn and self.rank:
            self._over.wait(60)  # until rank 0 ends all

    @contextlib.contextmanager
    def collective(self, key: str) -> Iterator[None]:
        """Notes that this rank is in an operation that needs all others; within another one it is part of it."""
        depth = getattr(self._depth, "value", 0)
        if depth or not self.tracker.on or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._depth.value = 1
        try:
            with self.tracker.update(f"in {key}"):
                yield
        finally:
            self._depth.value = 0

    def wrapped_collective(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls what all ranks must call; of a process set's operations the others know nothing."""
        if kwargs.get("process_set") is not None:
            return original(*args, **kwargs)
        name = kwargs.get("name")
        if name is None and args and original.__name__ == "broadcast_object":
            name = args[2] if len(args) > 2 else type(args[0]).__name__  # as Horovod calls it
        with self.collective(original.__name__ + (f" of {name!r}" if name else "")):
            return original(*args, **kwargs)

    def stepped(self, name: str) -> None:
        """An optimizer has done an update."""
        self.steps[name] = self.steps.get(name, 0) + 1
        self.tracker.stepped(max(self.steps.values()))

    def joined(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Joins all ranks; each has done its own number of updates, so the count starts again."""
        with self.collective("join"):
            result = original(*args, **kwargs)
        self.joins += 1
        self.tracker.updates = self.joins << 32
        return result

    def _listen(self) -> None:
        while not self._over.is_set():
            links = dict(self._links)
            if not links:
                self._over.wait(_TICK_S)
            for rank, link in links.items():
                try:
                    for message in link.receive(_TICK_S / len(links)):
                        if self.rank == 0:
                            self._take(rank, message)
                        elif "end" in message:
                            watch.end_all(message["end"], self.rank, [link], PROGRAM, GUARD_CODE)
                        else:
                            self._over.set()
                except (OSError, ValueError):
                    self._links.pop(rank, None)
                    if self.rank:
                        self._over.set()

    def _take(self, rank: int, report: Any) -> None:
        with self._lock:
            if report["kind"] == "done":
                self._done.add(rank)
                return
            finding = self._judge.take(rank, report)
            if finding is None:
                return
            if self._warn:
                received = finding.received.replace("\n", "\n            ")
                text = f"{finding.text}\n  received: {received}\n  fix: {finding.remedy}"
                print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)
                return
            self._write()
            if self._unwritten is not None:
                print(f"{PROGRAM}: {self._unwritten}", file=sys.stderr, flush=True)
            error = [finding.text, finding.received, finding.remedy]
            watch.end_all(error, 0, list(self._links.values()), PROGRAM, GUARD_CODE)

    def _write(self) -> None:
        if self._report is not None:
            try:
                text = json.dumps(as_json(self._judge, self.steps), indent=1) + "\n"
                flags.write_file("--report", self._report, text)
            except ConfigError as error:  # raised once the other ranks have ended
                self._unwritten = error

    def finish(self) -> None:
        """Ends when all scripts have; rank 0 prints what was proven, or raises ConfigError (the report's file)."""
        for report in self.at_end:
            report()
        if self.on:
            place = Place(END, self.tracker.meetings + 1, "", f"at the end of {os.path.basename(sys.argv[0])}")
            with self.tracker.waiting(place):
                if self.rank == 0:
                    self._done.add(0)
                    while not self._done.issuperset({0, *self._links}):
                        self._over.wait(_TICK_S / 4)
                    self._say()
                    for link in list(self._links.values()):
                        with contextlib.suppress(OSError):
                            link.send(bye=True)
                else:
                    self.report(kind="done")
                    self._over.wait()
        elif self.rank == 0:
            lines = [] if self._met else ["nothing to compare: one rank, or a script without hvd.init()"]
            lines += [f"nothing was watched: {self._report} is not written"] if self._report is not None else []
            for line in lines:
                print(f"{PROGRAM}: {line}", file=sys.stderr)
        self.close()
        if self._unwritten is not None:
            raise self._unwritten

    def _say(self) -> None:
        with self._lock:
            judge = self._judge
            self._write()
            updates = sum(self.steps.values())
            summary = f"{updates} update(s) of {len(self.steps)} optimizer(s) on {self.size} ranks"
            if judge.findings:
                summary += f"; {len(judge.findings)} finding(s) above"
            elif judge.averaged:
                summary += f": averaged, and the replicas equal in all {judge.compared} comparisons"
            else:
                summary += ": nothing was compared"
            if alone := judge.alone():
                summary += f"; not on all ranks, and not compared: {', '.join(alone)}"
            print(f"{PROGRAM}: {summary}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the threads and connections."""
        self._over.set()
        self.on = False
        self.tracker.close()
        for link in list(self._links.values()):
            link.close()
