"""The line between this rank and its host's agent (of `hvdtrain launch`): a `RankLink`.

The rank sends its number of completed updates, once a second at most and at its end. In an elastic job it also sends
the messages of `hvdtrain.comm.elastic`. A separate thread receives, because a launcher's message may have to interrupt
an operation in which the main thread is blocked.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from hvdtrain.comm.link import RankLink
from hvdtrain.core import variables
from hvdtrain.core.errors import before_end

_TICK_S = 1.0

Form = Mapping[str, Any]  # where a rank is in the next formation: rank, size, ..., address and port


class AgentLine:
    """This rank's end of the line, over the connected socket of a descriptor."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._link = RankLink(socket.socket(fileno=descriptor), longest=sys.maxsize)
        self._link.socket.settimeout(None)  # a rank waits for an agent that does not read
        self._lock = threading.Lock()
        self._forms: queue.SimpleQueue[Form | None] = queue.SimpleQueue()
        self._pid = os.getpid()
        self.formation = 0  # that this rank is in, counted from 1
        self.asked_to_leave = 0  # the newest formation that the launcher wants to be left at an update
        self.dismissed = False  # there is no place for this process any more
        self.cut: Callable[[], None] = lambda: None  # breaks what the ranks of this formation are connected by
        self._noted = self._sent = (0, 0)  # formation, updates
        atexit.register(self._tell_at_end)
        before_end(self._tell_at_end)
        threading.Thread(target=self._listen, name="hvdtrain agent", daemon=True).start()

    def say(self, **words: Any) -> None:
        """Sends to the launcher; discards what the launcher does not receive because this process ends."""
        with self._lock, contextlib.suppress(OSError):
            self._link.send(**words)

    def note(self, updates: int) -> None:
        """Notes how many updates are done, and reports the first of a formation now, others within a second."""
        self._noted = self.formation, updates
        if self._sent[0] != self.formation or not self._sent[1]:
            self._tell()

    def _tell_at_end(self) -> None:
        """Reports the updates of the last second: a job that fails twice is judged by each rank's progress."""
        if os.getpid() == self._pid:
            self._tell()

    def _tell(self) -> None:
        noted = self._noted
        if noted != self._sent:
            self._sent = noted
            self.say(do="updates", count=noted[1], formation=noted[0])

    def next_form(self) -> Form | None:
        """Waits for the next formation; None: no launcher is there to make one."""
        return self._forms.get()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                found = self._link.receive(_TICK_S)
                self._tell()
                for message in found:
                    self._take(message)
        self._forms.put(None)

    def _take(self, message: Mapping[str, Any]) -> None:
        if message["do"] == "form":
            self._forms.put(message)
        elif message["do"] == "regroup":
            self.asked_to_leave = max(self.asked_to_leave, int(message["formation"]))
        elif message["do"] == "dismiss":
            self.dismissed = True
        elif message["do"] == "abort" and int(message["formation"]) == self.formation:
            self.cut()


def line_of(environ: MutableMapping[str, str]) -> AgentLine | None:
    """Returns this process's line, which its own children do not get; None where no agent has given it one."""
    text = environ.pop(variables.AGENT_FD, "")
    try:
        return AgentLine(int(text)) if text else None
    except (OSError, ValueError):  # a program between agent and rank that closes what it does not know
        return None


class Connections:
    """The TCP connections that an engine has opened, which nothing but their end makes it give up."""

    def __init__(self) -> None:
        self._before: set[str] = set()
        self._own: dict[int, str] = {}
        self._open = False

    @contextlib.contextmanager
    def noted(self) -> Any:
        """A context in which every connection that is opened counts as the engine's."""
        self._before, self._open = set(_sockets().values()), True
        try:
            yield
        finally:
            self._own, self._open = self._opened(), False

    def _opened(self) -> dict[int, str]:
        return {number: name for number, name in _sockets().items() if name not in self._before}

    def cut(self) -> None:
        """Ends them, under any reader or writer; by any thread."""
        for number, name in (self._opened() if self._open else self._own).items():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as found:  # closed meanwhile
                if found.family == socket.AF_INET and found.type == socket.SOCK_STREAM and _name(number) == name:
                    found.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, str]:
    """Returns this process's sockets: the descriptor, and a name that is never used again."""
    found = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if (name := _name(number)).startswith("socket:"):
                found[number] = name
    return found


def _name(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")
