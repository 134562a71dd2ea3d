"""A job that is preempted, by SIGTERM or SIGUSR1 to one rank or to all: Slurm, Kubernetes, spot instances.

A rank notes and prints its first signal. The signal travels to all ranks with the numbers of the next update; they save
after it and end (`hvdtrain.checkpoint.parts`). A rank ends at once, as SIGTERM does by default, if no update will come:

- at another SIGTERM, unless it comes within a second: launchers and schedulers send the first one twice;
- if `hvdtrain launch` itself ends the job because a rank or a host has failed (HVDTRAIN_ENDING), or if it has no place
  for this rank any more;
- when it has waited for the others in one place for 10 s, and twice as long as in any update so far.

Python runs a signal handler only when the main thread returns from its present operation, which may be an endless
collective. So a separate thread reads the numbers of signals from the file that Python writes them to. It ignores
signals that the user handles or ignores.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from hvdtrain.comm import elastic
from hvdtrain.core import variables
from hvdtrain.core.errors import PREEMPTED_CODE, ConfigError
from hvdtrain.watch.meeting import Tracker

ENDS, ASKS = b"now", b"ask"  # what it says: it ends the job; SIGUSR1 asks the ranks to
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_TWICE_S = 1.0
_BLOCKED_S = 10.0
_TICK_S = 0.2


def wanted(environ: Mapping[str, str]) -> bool:
    """Returns True if signals are to be acted on; raises ConfigError for a variable that is neither on nor off."""
    value = environ.get(variables.PREEMPTION, "") or "on"
    if value not in ("on", "off"):
        raise ConfigError(
            f"{variables.PREEMPTION} must be on or off",
            repr(value),
            f"{variables.PREEMPTION}=off: signals end a rank at once",
        )
    return value == "on"


class Notice:
    """Notes whether this rank was preempted (`preempted`)."""

    def __init__(self, rank: int, tracker: Tracker, environ: Mapping[str, str]) -> None:
        self.preempted = False
        self._rank, self._tracker, self._ending = rank, tracker, environ.get(variables.ENDING)
        self._told_s = self._term_s = float("inf")

    def follow(self, rank: int, tracker: Tracker) -> None:
        """Watches another rank number and tracker from now on."""
        self._rank, self._tracker = rank, tracker

    def note(self, number: int, now_s: float) -> bool:
        """Notes a signal; returns True if it must end the process at once."""
        if number not in SIGNALS:
            return False
        if number == signal.SIGTERM:
            if _agent_says(self._ending) == ENDS or _dismissed() or now_s - self._term_s > _TWICE_S:
                return True
            self._term_s = min(self._term_s, now_s)
        if not self.preempted:
            self.preempted, self._told_s = True, now_s
            if (line := elastic.line()) is not None:
                line.say(do="signalled", signal=number)
            print(
                f"hvdtrain: rank {self._rank} got {signal.Signals(number).name}: after the next update all ranks save"
                f" and end, with exit code {PREEMPTED_CODE} (another SIGTERM ends this one at once)",
                file=sys.stderr,
                flush=True,
            )
        return False

    def blocked(self, now_s: float) -> bool:
        """Returns True if this rank has waited too long for the others, or has left the job for good."""
        limit_s = max(_BLOCKED_S, 2 * self._tracker.longest_s)
        waits = now_s - self._told_s >= limit_s and self._tracker.stuck(limit_s) is not None
        return waits or (self.preempted and _dismissed())


def _agent_says(file: str | None) -> bytes:
    with contextlib.suppress(OSError):  # another user's, or in another container
        return Path(file).read_bytes() if file is not None else b""
    return b""


def _dismissed() -> bool:
    line = elastic.line()
    return line is not None and line.dismissed


class _Watch:
    """The handlers, and the thread that a notice is given signals by."""

    def __init__(self, notice: Notice) -> None:
        self.notice = notice
        self._pid = os.getpid()
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handled = [number for number in SIGNALS if is_free(number)]
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in self._handled:
            signal.signal(number, _noted)
        self._thread = threading.Thread(target=self._run, name="hvdtrain preemption", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            found = select.select([self._reader], [], [], _TICK_S if self.notice.preempted else None)[0]
            numbers = os.read(self._reader, 64) if found else b""
            if found and not numbers:
                return
            now_s = time.monotonic()
            ours = [number for number in numbers if number in self._handled]
            if any([self.notice.note(number, now_s) for number in ours]) or self.notice.blocked(now_s):
                _end()

    def hand_on(self, number: int) -> None:
        """Passes the thread a signal that Python has not written because other code had set the wakeup descriptor (an
        asyncio loop leaves none behind); sets the descriptor again unless other code has set another."""
        other = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if other != self._writer:
            if other != -1:
                signal.set_wakeup_fd(other)
            os.write(self._writer, bytes([number]))

    def close(self) -> None:
        """Gives signals their default action back, in the process itself and in one that was forked from it."""
        signal.set_wakeup_fd(-1)
        for number in self._handled:
            if signal.getsignal(number) is _noted:
                signal.signal(number, signal.SIG_DFL)
        os.close(self._writer)
        if os.getpid() == self._pid:
            self._thread.join()
        os.close(self._reader)


def _noted(number: int, frame: FrameType | None) -> None:
    """Python has written the number already, as a rule."""
    if _watch is not None:
        _watch.hand_on(number)


def is_free(number: int) -> bool:
    """Returns True if a signal has its default action: no handler of Python, or of a C library (faulthandler)."""
    return signal.getsignal(number) is signal.SIG_DFL and is_default("self", number)


def is_default(process: int | str, number: int) -> bool:
    """Returns True if a process neither handles nor ignores a signal, as its /proc/PID/status lists both."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return True
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigCgt:", "SigIgn:"))]
    return not any(mask >> (number - 1) & 1 for mask in masks)


def asked(environ: Mapping[str, str]) -> bool:
    """Returns True if the launcher's agent holds back a signal that asks this rank to end (`ASKS`)."""
    return wanted(environ) and is_free(signal.SIGUSR1) and _agent_says(environ.get(variables.ENDING)) == ASKS


def _end() -> None:
    """Does what SIGTERM does by default, from any thread."""
    with contextlib.suppress(OSError, ValueError):
        print("hvdtrain: ended by SIGTERM, without waiting for an update", file=sys.stderr, flush=True)
    ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), ctypes.c_void_p(signal.SIG_DFL))
    os.kill(os.getpid(), signal.SIGTERM)


_watch: _Watch | None = None


def is_preempted() -> bool:
    """Returns True if this rank was preempted."""
    return _watch is not None and _watch.notice.preempted


def watch(rank: int, tracker: Tracker, environ: Mapping[str, str]) -> None:
    """Notes signals from now on, until `release`; only in the main thread, and if no other code receives them."""
    global _watch
    release()
    if not wanted(environ) or threading.current_thread() is not threading.main_thread():
        return
    before = signal.set_wakeup_fd(-1)  # how one asks for it
    signal.set_wakeup_fd(before)
    if before == -1 and any(map(is_free, SIGNALS)):
        _watch = _Watch(Notice(rank, tracker, environ))


def follow(rank: int, tracker: Tracker) -> None:
    """Notes this process's new rank, after the ranks have changed."""
    if _watch is not None:
        _watch.notice.follow(rank, tracker)


def release() -> None:
    """Signals do again what they did before `watch`."""
    global _watch
    if _watch is not None and threading.current_thread() is threading.main_thread():  # which alone may
        its, _watch = _watch, None
        its.close()


# ---- forked processes (workers) end by SIGTERM, and what they are told is not this rank's, however early it comes
_forking = threading.local()


def _before_fork() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS) if _watch is not None else None


def _after_fork() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_fork() -> None:
    release()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_fork)
