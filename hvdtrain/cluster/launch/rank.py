"""The processes an agent starts: a rank with its two pipes, whose bytes become lines, and the rendezvous' child.

A rank also has a third stream, in both directions: its line to the launcher, of JSON objects.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.cluster.launch import processes
from hvdtrain.comm.link import Decoder, Outbox, encode
from hvdtrain.core import variables
from hvdtrain.core.keywords import nearest
from hvdtrain.core.version import SAFE_PATH
from hvdtrain.watch.preemption import is_default

DRAIN_S = 0.5  # how long a rank's pipes are read after its end, if something that it started keeps them open
LOOK_EVERY_S = 0.5  # at whether a rank is stopped
LONGEST_BYTES = 1 << 16  # a line without an end is cut there
RETURNED = ".returned"  # the last line of it, if the rank came to its end
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # from the launcher to ranks that handle them
REWRITTEN_EVERY_S = 5.0  # how often a line that is rewritten in place ("\r") is shown while it is
_END_WITH_THE_AGENT = functools.partial(processes.die_with_parent, signal.SIGKILL)


class LineSplitter:
    """Splits what one process writes to one stream.

    Of a line that is rewritten with "\\r" the last state counts, as on a terminal; while it is being rewritten, one
    state every few seconds is passed on, so that a long epoch shows life.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._shown_s = float("-inf")

    def feed(self, data: bytes, now_s: float) -> list[str]:
        """Returns the lines that are complete with `data`; `now_s` is a monotonic clock's."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = [_text(line) for line in whole]
        half_end = b"\r" if self._rest.endswith(b"\r") else b""  # perhaps the first half of "\r\n"
        *rewritten, last = self._rest.removesuffix(b"\r").split(b"\r")
        if rewritten and now_s - self._shown_s >= REWRITTEN_EVERY_S:
            lines.append(_text(rewritten[-1]))
            self._shown_s = now_s
        self._rest = last + half_end
        while len(self._rest) > LONGEST_BYTES:
            lines.append(_text(self._rest[:LONGEST_BYTES]))
            self._rest = self._rest[LONGEST_BYTES:]
        return lines

    def close(self) -> list[str]:
        """Returns the last line, if the stream ended within one."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest.strip(b"\r") else []


def _text(line: bytes) -> str:
    return next((part for part in reversed(line.split(b"\r")) if part), b"").decode(errors="replace")


def _taken(splitter: LineSplitter | Decoder, data: bytes, now_s: float) -> list[Any]:
    return splitter.feed(data) if isinstance(splitter, Decoder) else splitter.feed(data, now_s)


def _last(splitter: LineSplitter | Decoder) -> list[str]:
    return [] if isinstance(splitter, Decoder) else splitter.close()  # half a message says nothing


class StartError(Exception):
    """A rank that could not be started, with the reason."""


class Rank:
    """A rank's process, which leads its own session (`pid`); `line` is the descriptor of its line to the launcher."""

    def __init__(
        self, rank: int, argv: Sequence[str], cwd: str, env: Mapping[str, str], given: int | None = None
    ) -> None:
        """Starts it; `given`: a file that is its standard input, in which case it may give a result."""
        self.rank = rank
        self.code: int | None = None  # negative for a signal; None while it runs
        self.ended_s = 0.0
        self.reported = self.stop_reported = False  # to the launcher: the end, and that the process is stopped
        self._stopped_since_s: float | None = None
        self._looked_s = 0.0
        self._streams: dict[int, tuple[str, LineSplitter | Decoder]] = {}
        self._signals: list[int] = []  # that the rank has still to get
        inner: dict[str, int] = {}
        for stream in ("stdout", "stderr", *(["result"] if given is not None else [])):
            descriptor, inner[stream] = os.pipe()
            self._streams[descriptor] = stream, LineSplitter()
        ours, theirs = socket.socketpair()
        self.line, inner["line"] = ours.detach(), theirs.detach()
        self._streams[self.line] = "line", Decoder()
        passed = {variables.AGENT_FD: inner["line"]}
        passed |= {variables.RESULT_FD: inner["result"]} if given is not None else {}
        env = {**env, **{name: str(descriptor) for name, descriptor in passed.items()}}
        # opened anew, so that each rank reads from the start
        inner["stdin"] = os.open(os.devnull if given is None else f"/proc/self/fd/{given}", os.O_RDONLY)
        try:
            self._process = subprocess.Popen(
                argv, cwd=cwd, env=env, stdin=inner["stdin"],
                stdout=inner["stdout"], stderr=inner["stderr"], pass_fds=list(passed.values()), start_new_session=True,
                preexec_fn=_END_WITH_THE_AGENT,
            )  # fmt: skip
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._close_pipes()
            raise StartError(_why_not(argv, cwd, error)) from error
        finally:
            for descriptor in inner.values():
                os.close(descriptor)
        self.pid = self._process.pid
        for descriptor in self._streams:
            os.set_blocking(descriptor, False)
        self._unsaid = Outbox(self.line)

    def open_pipes(self) -> list[int]:
        return list(self._streams)

    def read(self, descriptor: int, now_s: float) -> tuple[str, list[Any]]:
        """Returns the stream's name and the lines that came, of "line" messages; closes the descriptor at its end."""
        stream, splitter = self._streams[descriptor]
        data = _what_is_there(descriptor, 1 << 16)
        if data is None:
            return stream, []
        if data:
            return stream, _taken(splitter, data, now_s)
        del self._streams[descriptor]
        os.close(descriptor)
        return stream, _last(splitter)

    def say(self, message: Mapping[str, Any]) -> None:
        """Sends a message to the rank; what it does not take now goes with the next `flush`."""
        self._unsaid.write(encode(message))
        self.flush()

    def flush(self) -> None:
        """Sends the remaining messages to the rank."""
        if self.line in self._streams:
            self._unsaid.flush()

    def signal(self, number: int) -> None:
        """Sends a signal; one of `PASSED_ON`, which would end a rank without a handler, waits for one."""
        self._signals.append(number)
        self.deliver()

    def deliver(self) -> None:
        """Sends the signals that are due."""
        for number in list(self._signals):
            if self.code is None and not (number in PASSED_ON and is_default(self.pid, number)):
                self._signals.remove(number)
                processes.send([self.pid], number)

    def ended(self, code: int, now_s: float) -> None:
        """Notes that the process was waited for."""
        self.code = self._process.returncode = code
        self.ended_s = now_s

    def is_over(self, now_s: float) -> bool:
        """Returns True if it has exited, its output is drained, and the exit is not yet reported."""
        return self.code is not None and not self.reported and (not self._streams or now_s - self.ended_s >= DRAIN_S)

    def close(self) -> list[tuple[str, list[Any]]]:
        """Returns the last lines, by stream, and lets the pipes go."""
        self.reported = True
        last = []
        for descriptor, (stream, splitter) in self._streams.items():
            lines = []
            # no more than the pipe held: something that the rank left may fill it as fast as it is read
            left = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ) if stream != "line" else 1 << 20
            while left > 0 and (data := _what_is_there(descriptor, left)):
                left -= len(data)
                lines += _taken(splitter, data, 0.0)
            last.append((stream, lines + _last(splitter)))
        self._close_pipes()
        return last

    def stopped_s(self, now_s: float) -> float:
        """Returns for how long the process has been stopped by a signal, as far as was seen; 0 when it is not."""
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            stopped = processes.is_stopped(self.pid)
            self._stopped_since_s = (self._stopped_since_s or now_s) if stopped else None
            self.stop_reported = self.stop_reported and stopped
        return 0.0 if self._stopped_since_s is None else now_s - self._stopped_since_s

    def _close_pipes(self) -> None:
        for descriptor in self._streams:
            os.close(descriptor)
        self._streams.clear()


def rendezvous_process() -> subprocess.Popen[bytes]:
    """Starts the process that serves Horovod's rendezvous; see `ask` and `rendezvous`."""
    safe = SAFE_PATH if getattr(sys.flags, "safe_path", False) else ()  # as the agent itself was started
    return subprocess.Popen(
        [sys.executable, *safe, "-m", "hvdtrain.cluster.launch.rendezvous"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, bufsize=0, start_new_session=True, preexec_fn=_END_WITH_THE_AGENT,
    )  # fmt: skip


def ask(process: subprocess.Popen[bytes], **asked: Any) -> None:
    """Has it serve something else; it answers with a line."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, which is told
        process.stdin.write(encode(asked))
        process.stdin.flush()


def _what_is_there(descriptor: int, most_bytes: int) -> bytes | None:
    """Returns what a pipe holds; b"": it has ended, None: nothing yet."""
    try:
        return os.read(descriptor, most_bytes)
    except BlockingIOError:
        return None
    except ConnectionResetError:  # a line whose other end was closed with something unread
        return b""


def _why_not(argv: Sequence[str], cwd: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError) and error.filename == cwd:
        return f"no directory {cwd}"
    if isinstance(error, FileNotFoundError):
        place = "" if "/" in argv[0] else f" on this host's PATH{nearest(argv[0], ('python', 'python3'))}"
        return f"no program {argv[0]}{place}"
    if isinstance(error, OSError):
        return f"{error.filename or argv[0]}: {error.strerror}"
    return f"{argv[0]}: {error}"
