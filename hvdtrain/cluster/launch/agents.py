"""The agents of a job's hosts, together: reached at the same time, kept alive, and let go."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hvdtrain
from hvdtrain.cluster.hosts.channel import Channel
from hvdtrain.cluster.hosts.hosts import Host
from hvdtrain.cluster.hosts.protocol import BEAT_S, Message
from hvdtrain.cluster.hosts.ssh import SshProblem, are_this_machine, is_this_machine, not_started
from hvdtrain.cluster.launch.failures import Tracebacks
from hvdtrain.cluster.launch.job import Job
from hvdtrain.comm.link import encode
from hvdtrain.core.errors import ConfigError, LauncherError
from hvdtrain.core.version import SAFE_PATH, __version__

AGENT = "hvdtrain.cluster.launch.agent"
_PACKAGES = Path(hvdtrain.__file__).resolve().parent.parent


class Connection(Channel):
    """A host's agent.

    Attributes:
        ended: the agent reported that no process of the job remains there.
        closed: no more messages can arrive, or are awaited.
        left: the other side ended the connection.
    """

    def __init__(
        self, host: Host, job: Job, on_message: Callable[[tuple[Connection, Message | None]], None], *, local: bool
    ) -> None:
        self.host, self._job = host, job
        self.hello: Message | None = None  # the agent's first message
        self.why_left: str | None = None  # why the agent ends the job there by itself
        self.ended = self.closed = self.left = False
        self.token = ""  # of what was started there: if the agent disappears, what it left is ended
        # `-m` looks in the working directory first. Elsewhere that is the user's home, where a random.py may lie.
        # Here it makes the agent of this very hvdtrain run, also from a checkout that is not installed.
        argv = [job.python, "-m", AGENT] if local else [job.python, *SAFE_PATH, "-m", AGENT]
        super().__init__(host.name, argv, job.ssh, on_message, local=local, cwd=_PACKAGES)

    def send(self, kind: str, **fields: object) -> None:
        self.write(encode({"type": kind, **fields}, self.mark))

    def note(self, message: Message | None) -> None:
        """Updates the connection's state from a message, or from its end (None)."""
        if message is None:
            self.closed = self.left = True
        elif message["type"] == "hello":
            self.hello = message
        elif message["type"] == "leaving":
            self.why_left = message["why"]
        elif message["type"] == "ended":
            self.ended = True

    def close(self, wait_s: float) -> None:
        """Lets the agent go, which ends what it has; one that is known to be there is waited for."""
        super().close(0.0 if self.closed or self.hello is None else wait_s)

    def sweep(self) -> None:
        """Ends what an agent that is gone without a word may have left on the host; it has the grace, if it lives."""
        grace_s = self._job.timeouts.grace_s
        words = [self._job.python, *SAFE_PATH, "-m", AGENT, "--sweep", self.token, f"{grace_s:g}"]
        command = words if self.local else self._job.ssh.command(self.host.name, words)
        folders = {"PYTHONPATH": os.pathsep.join([str(_PACKAGES), os.environ.get("PYTHONPATH", "")])}
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):  # the host cannot be reached: it is lost
            subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=grace_s + 5.0, check=False,
                env=os.environ | folders if self.local else None, start_new_session=True,
            )  # fmt: skip


OnLine = Callable[[int, str, str], None]  # rank, "stdout", "stderr" or "result", line
Event = tuple[Connection | None, Message | None]  # None, None: nobody reads the output any more
TAIL_LINES = 200  # of each rank, kept for when it fails: a traceback down from the user's line
_FLUSH_S = 0.002  # between two looks at whether an agent takes more of what it is sent


class Agents:
    """Connections to all hosts, their events in one queue, and the ranks' output on its way to `on_line`."""

    def __init__(self, job: Job, on_line: OnLine | None) -> None:
        """Starts to reach the hosts that get ranks, all at once; raises LauncherError if ssh cannot be started."""
        hosts = list(job.ranks)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        # not much more than WINDOW of each host
        self._lines: queue.SimpleQueue[tuple[Connection, Message] | None] = queue.SimpleQueue()
        self._on_line = on_line
        self.failed: Exception | None = None  # what `on_line` raised
        self.tails: dict[int, collections.deque[str]] = collections.defaultdict(
            lambda: collections.deque(maxlen=TAIL_LINES)
        )
        self.results: dict[int, str] = {}  # the last line of each rank's result
        self.tracebacks = Tracebacks()
        # all names first and at once: an agent that is there already would take a launcher that still asks for dead
        local = {name: its.result() for name, its in are_this_machine([host.name for host in hosts]).items()}
        self._job, self._beaten_s = job, 0.0
        self._dropped: dict[Connection, threading.Thread] = {}  # and what lets them go
        self.connections: list[Connection] = []
        self._relay = threading.Thread(target=self._pass_lines_on, name="ranks' output", daemon=True)
        self._relay.start()
        for host in hosts:
            try:
                self.connections.append(Connection(host, job, self._take, local=local[host.name]))
            except OSError as error:
                self.close()
                raise _unreached([(host, not_started(error, host.name))]) from error
        self.send("settings", **vars(job.timeouts))

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message to every host."""
        for connection in self.connections:
            if connection not in self._dropped:
                connection.send(kind, **fields)

    def find(self, host: Host) -> None:
        """Begins to reach one more host; what comes of it is an event, "found" without a connection."""

        def look() -> None:  # a name server may be slow
            try:
                found: Message = {"type": "found", "host": host, "local": is_this_machine(host.name)}
            except ConfigError as error:
                found = {"type": "found", "host": host, "why": error.received}
            self._events.put((None, found))

        threading.Thread(target=look, name=f"look {host.name}", daemon=True).start()

    def add(self, host: Host, *, local: bool) -> Connection:
        """Starts the agent of one more host; raises OSError if the command that reaches it cannot be started."""
        connection = Connection(host, self._job, self._take, local=local)
        self.connections.append(connection)
        connection.send("settings", **vars(self._job.timeouts))
        return connection

    def drop(self, connection: Connection) -> None:
        """Drops the agent of one host, which ends the remaining processes of the attempt there; the others stay."""
        connection.closed = True
        work = threading.Thread(target=_let_go, args=(connection, 0.0), name=f"let go {connection.name}", daemon=True)
        self._dropped[connection] = work
        work.start()

    def next(self, timeout_s: float) -> Event | None:
        """Returns the next event, None on a timeout; sends the agents heartbeats, which keep them alive."""
        now = time.monotonic()
        if now - self._beaten_s >= BEAT_S:
            self._beaten_s = now
            self.send("beat")
        if not all([its.flush() for its in self.connections if its not in self._dropped]):
            timeout_s = min(timeout_s, _FLUSH_S)
        try:
            connection, message = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if connection is not None and message is not None and message["type"] == "taken":
            connection.send("taken", count=message["count"])
            return None
        if connection in self._dropped:
            return None
        if connection is not None:
            connection.note(message)
        return connection, message

    def meet(self, check: Callable[[], None]) -> None:
        """Waits for the hello of every agent.

        Calls `check`, which may raise, several times a second. Raises LauncherError with each host that is missing.
        """
        deadline = time.monotonic() + self._job.timeouts.start_s
        while time.monotonic() < deadline and not all(its.hello or its.closed for its in self.connections):
            check()
            self.next(0.1)
        silent = [its for its in self.connections if its.hello is None]
        if silent:
            raise _unreached([(its.host, its.problem()) for its in silent])
        versions = [(its.host.name, its.hello["version"]) for its in self.connections if its.hello]
        others = [f"{name}: {version}" for name, version in versions if version != __version__]
        if others:
            fix = "install the same hvdtrain on every host, or name the Python that has it: --python PATH"
            raise LauncherError(
                "every host needs the same hvdtrain", f"here {__version__}, {', '.join(others)}", fix, code=49
            )

    def close(self, wait_s: float = 0.0, *, look: Callable[[], None] = lambda: None) -> None:
        """Lets every agent go, at once, after `wait_s` at most, and ends what reaches them; then passes on the last
        output. Calls `look` several times a second."""
        left = [its for its in self.connections if its not in self._dropped]
        work = [threading.Thread(target=_let_go, args=(its, wait_s)) for its in left]
        for thread in work:
            thread.start()
        for thread in [*work, *self._dropped.values(), self._relay]:
            if thread is self._relay:
                self._lines.put(None)
            while thread.is_alive():
                thread.join(0.1)
                look()

    def _take(self, event: tuple[Connection, Message | None]) -> None:
        connection, message = event
        if message is None or message["type"] != "out":
            self._events.put(event)
            return
        # kept here and not where lines are passed on, which may be far behind
        rank, lines = message["rank"], message["lines"]
        if message["stream"] == "result":
            self.results[rank] = lines[-1]
        else:
            self.tails[rank].extend(lines)
            self.tracebacks.note(rank, lines, time.monotonic())
        self._lines.put((connection, message))

    def _pass_lines_on(self) -> None:
        while (found := self._lines.get()) is not None:
            connection, message = found
            if self._on_line is not None and self.failed is None:
                try:
                    for line in message["lines"]:
                        self._on_line(message["rank"], message["stream"], line)
                except Exception as error:  # a reader that went away; or a bug, which must not leave ranks waiting
                    self.failed = error
                    self._events.put((None, None))
            self._events.put((connection, {"type": "taken", "count": 1}))


def _let_go(its: Connection, wait_s: float) -> None:
    its.close(wait_s)
    if its.token and its.left and not its.ended and its.hello is not None:
        its.sweep()


def _unreached(problems: Sequence[tuple[Host, SshProblem]]) -> LauncherError:
    received = "\n".join(problem.what for _, problem in problems)
    fix = "\n".join(dict.fromkeys(problem.fix for _, problem in problems))
    rule = f"the agent must start on every host (from {socket.gethostname()})"
    return LauncherError(rule, received, fix)
