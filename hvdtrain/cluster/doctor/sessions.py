"""Talking with the probes on all hosts at once: one ssh session a host, requests in, answers out, a deadline for each.

The probe's text goes through the session's standard input, so nothing needs to be installed there but some Python, and
nothing is left there. When the session ends, for whatever reason, so does the probe.
"""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.cluster.channel import Channel
from hvdtrain.cluster.protocol import Message
from hvdtrain.cluster.ssh import Ssh, SshProblem, is_this_machine, not_started
from hvdtrain.core.errors import ConfigError

Request = Mapping[str, Any]
_Answer = TypeVar("_Answer")

# Python 2 understands it as well, and says what it is. The session starts in the home folder: a random.py there must
# not be taken for Python's own.
_START = (
    "import sys; sys.path=[folder for folder in sys.path if folder];"
    " sys.version_info>=(3,6) or sys.exit('this is Python '+sys.version.split()[0]);"
    " exec(compile(sys.stdin.read(int(sys.argv[1])),'probe','exec'))"
)
_END_S = 2.0
_FLUSH_EVERY_S = 0.05  # while a host has not taken all that was written


def source() -> str:
    """Return the text of the probe."""
    folder = Path(__file__).parent
    parts = [(folder / name).read_text(encoding="ascii") for name in ("probe.py", "probe_links.py")]
    return "\n".join([*parts, 'serve({"facts": facts})', ""])


class Lost(Exception):
    """A host does not answer (any more)."""

    def __init__(self, problem: SshProblem) -> None:
        super().__init__(problem.what)
        self.problem = problem


class Session(Channel):
    """The probe on one host.

    Args:
        name: the host; this machine's own runs the probe without ssh.
        python: the interpreter there.
        ssh: how to reach it.

    Raises:
        Lost: it cannot be started.
    """

    def __init__(self, name: str, python: str, ssh: Ssh) -> None:
        self._replies: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        text = source()
        argv = [python, "-c", _START, str(len(text))]
        try:
            super().__init__(name, argv, ssh, self._replies.put, local=is_this_machine(name))
        except ConfigError as error:
            raise Lost(SshProblem("unknown_name", f"{error.rule}: {error.came}", error.remedy)) from error
        except OSError as error:
            raise Lost(not_started(error, name)) from error
        self.write(text.encode())

    def ask(self, request: Request, timeout_s: float) -> Message:
        """Return the answer to a request.

        Raises:
            Lost: none within the time, or the session has ended.
        """
        self.write(json.dumps(request).encode() + b"\n")
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                reply = self._replies.get(timeout=left_s if self.flush() else min(left_s, _FLUSH_EVERY_S))
            except queue.Empty:
                if left_s:
                    continue
                raise Lost(self.problem()) from None
            if reply is None:
                self._replies.put(None)  # for the next question
                raise Lost(self.problem())
            return reply

    def close(self, wait_s: float = _END_S) -> None:
        """End the probe and the session; returns when both are gone."""
        super().close(wait_s)


class Sessions:
    """The probes on all hosts that answer; hosts that stop answering go to `lost`. Close them, also on Ctrl-C.

    A question to all costs its time limit at most, however many hosts hang.
    """

    def __init__(self, names: Sequence[str], python: str, ssh: Ssh) -> None:
        """Start the sessions, all at once."""
        self.alive: dict[str, Session] = {}
        self.lost: dict[str, SshProblem] = {}
        self.alive = self._of_all(names, lambda name: Session(name, python, ssh))

    def ask(self, requests: Mapping[str, Request], timeout_s: float) -> dict[str, Message]:
        """Return the answers of the hosts that gave one; all are asked at once."""
        names = [name for name in requests if name in self.alive]
        return self._of_all(names, lambda name: self.alive[name].ask(requests[name], timeout_s))

    def give_up(self, name: str, problem: SshProblem) -> None:
        """End one host's session, if it has one: the host is lost."""
        self.lost[name] = problem
        if session := self.alive.pop(name, None):
            session.kill()
            session.close()

    def close(self) -> None:
        """End all of them."""
        sessions = list(self.alive.values())
        self.alive.clear()
        with ThreadPoolExecutor(max(1, len(sessions))) as pool:
            list(pool.map(Session.close, sessions))

    def _of_all(self, names: Sequence[str], work: Callable[[str], _Answer]) -> dict[str, _Answer]:
        """What `work` returns for each host, done for all at once; those it loses are given up."""

        def one(name: str) -> _Answer | Lost:
            try:
                return work(name)
            except Lost as lost:
                return lost

        with ThreadPoolExecutor(max(1, len(names))) as pool:
            try:
                results = dict(zip(names, pool.map(one, names), strict=True))
            except BaseException:  # Ctrl-C: nobody waits for answers any more
                for session in self.alive.values():
                    session.kill()
                raise
        for name, result in results.items():
            if isinstance(result, Lost):
                self.give_up(name, result.problem)
        return {name: result for name, result in results.items() if not isinstance(result, Lost)}
