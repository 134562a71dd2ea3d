"""Sessions with the probes on all hosts at once: one ssh session a host, requests and replies, a deadline for each.

The doctor sends the probe's text through the session's standard input. So a host needs only some Python, and the
probe leaves no files there. The probe ends when its session ends, for any reason.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hvdtrain.cluster.hosts import probe
from hvdtrain.cluster.hosts.channel import Channel
from hvdtrain.cluster.hosts.protocol import Message
from hvdtrain.cluster.hosts.ssh import Ssh, SshProblem, are_this_machine, not_started
from hvdtrain.comm.link import encode
from hvdtrain.core.errors import ConfigError

Request = Mapping[str, Any]

# Python 2 understands it as well, and says what it is. The session starts in the home folder: a random.py there must
# not be taken for Python's own.
_START = (
    "import sys; sys.path=[folder for folder in sys.path if folder];"
    " sys.version_info>=(3,6) or sys.exit('this is Python '+sys.version.split()[0]);"
    """ print(sys.argv[2][::-1]+'{"type":"hello"}'); sys.stdout.flush();"""
    " exec(compile(sys.stdin.read(int(sys.argv[1])),'probe','exec'))"
)
_END_S = 2.0
_FLUSH_EVERY_S = 0.05  # while a host has not taken all that was written


def source() -> str:
    """Returns the text of the probe."""
    files = probe.__file__, str(Path(__file__).with_name("probe_links.py"))
    parts = [Path(file).read_text(encoding="ascii") for file in files]
    return "\n".join([*parts, 'serve({"facts": facts}, sys.argv[2][::-1])', ""])


class Sessions:
    """The probes on all hosts that answer; hosts that stop answering are lost. Close them, also on Ctrl-C.

    A question to all costs its time limit at most, however many hosts hang.
    """

    def __init__(self, names: Sequence[str], python: str, ssh: Ssh) -> None:
        """Starts a probe in each host's `python`; on this machine without ssh."""
        self.alive: dict[str, Channel] = {}
        self.lost: dict[str, SshProblem] = {}  # why the others do not answer
        self._events: queue.SimpleQueue[tuple[Channel, Message | None]] = queue.SimpleQueue()
        text = source()
        argv = [python, "-c", _START, str(len(text))]
        for name, local in are_this_machine(names).items():
            try:
                self.alive[name] = Channel(name, argv, ssh, self._events.put, local=local.result())
                self.alive[name].write(text.encode())
            except ConfigError as error:
                self.lost[name] = SshProblem("unknown_name", f"{error.rule}: {error.received}", error.remedy)
            except OSError as error:
                self.lost[name] = not_started(error, name)

    def ask(self, requests: Mapping[str, Request], timeout_s: float) -> dict[str, Message]:
        """Returns the answers of the hosts that gave one; all are asked at once."""
        waiting = [name for name in requests if name in self.alive]
        for name in waiting:
            self.alive[name].write(encode(requests[name]))
        replies: dict[str, Message] = {}
        deadline = time.monotonic() + timeout_s
        while waiting:
            left_s = max(0.0, deadline - time.monotonic())
            all_written = all([self.alive[name].flush() for name in waiting])
            try:
                channel, reply = self._events.get(timeout=left_s if all_written else min(left_s, _FLUSH_EVERY_S))
            except queue.Empty:
                if left_s:
                    continue
                break
            name = channel.name
            if reply is not None and reply.get("type") == "hello":  # what waits for it is sent now
                continue
            if reply is None and name in self.alive:
                self.give_up(name, self.alive[name].problem())
            elif reply is not None and name in waiting:
                replies[name] = reply
            waiting = [other for other in waiting if other != name]
        for name in waiting:
            self.give_up(name, self.alive[name].problem())
        # one may have answered, and ended while others were waited for
        return {name: replies[name] for name in requests if name in replies and name in self.alive}

    def give_up(self, name: str, problem: SshProblem) -> None:
        """Ends one host's session: the host is lost."""
        self.lost[name] = problem
        channel = self.alive.pop(name)
        channel.kill()
        channel.close(_END_S)

    def close(self) -> None:
        """Ends all of them; returns when probes and sessions are gone."""
        channels = list(self.alive.values())
        self.alive.clear()
        with ThreadPoolExecutor(max(1, len(channels))) as pool:
            list(pool.map(lambda channel: channel.close(_END_S), channels))
