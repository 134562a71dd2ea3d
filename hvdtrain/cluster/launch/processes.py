"""Processes of this machine as the kernel shows them: their descendants, the stopped ones, their end with a parent.

Also the code that ends a job's processes when its agent has ended: the agent's guard, and a sweep by a second session.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from hvdtrain.core import variables

TICK_S = 0.1
# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here, not after a fork


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent dies, so that none is out of reach."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: int) -> None:
    """Lets the kernel send this process a signal when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def descendants(ancestor: int) -> list[int]:
    """Returns the processes below `ancestor` that still run, without zombies."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    zombies = set()
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (found := _stat(int(entry))):
            state, parent = found
            children[parent].append(int(entry))
            if state in "ZX":
                zombies.add(int(entry))
    found_all, waiting = [], list(children[ancestor])
    while waiting:
        pid = waiting.pop()
        waiting += children[pid]
        if pid not in zombies:
            found_all.append(pid)
    return found_all


def is_stopped(pid: int) -> bool:
    """Returns True if a process is stopped by a signal; one that a debugger holds is not."""
    found = _stat(pid)
    return found is not None and found[0] == "T"


def send(pids: Iterable[int], number: int) -> set[int]:
    """Sends a signal to processes, and wakes those that are stopped; returns those of other users, as sudo makes."""
    forbidden = set()
    for pid in pids:
        try:
            os.kill(pid, number)
            if number not in (signal.SIGKILL, signal.SIGCONT):
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue
        except PermissionError:
            forbidden.add(pid)
    return forbidden


def marked(variable: str, value: str) -> list[int]:
    """Returns the processes that were started with this variable, as far as this user may look."""
    wanted, found = f"{variable}={value}".encode(), []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):  # another user's, or gone
                if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return found


def command_of(pid: int) -> str:
    """Returns a process's command line, for people."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace")[:200]


def guard(agent: int, *, passes_on: bool = False) -> int:
    """Waits for the agent, a child of this process, then kills what it left; returns its exit code.

    With `passes_on` a signal goes to it as it came; else as SIGTERM.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda came, _: send([agent], came if passes_on else signal.SIGTERM))
    while True:
        try:
            pid, status = os.waitpid(-1, os.WUNTRACED)
        except ChildProcessError:
            return 1
        if os.WIFSTOPPED(status):  # stopped it could not end the ranks, whatever became of the launcher
            send([pid], signal.SIGCONT)
        elif pid == agent:
            break
    not_ours: set[int] = set()
    while left := set(descendants(os.getpid())) - not_ours:
        not_ours |= send(left, signal.SIGKILL)
        time.sleep(TICK_S / 10)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def sweep(token: str, grace_s: float) -> None:
    """Ends what an attempt left on this host, after the grace: an agent that only lost its launcher ends it itself."""
    began = time.monotonic()
    while (left := marked(variables.LAUNCH, token)) and time.monotonic() - began < grace_s:
        time.sleep(TICK_S)
    while left and time.monotonic() - began < grace_s + 2.0:
        send(left, signal.SIGKILL)
        time.sleep(TICK_S / 10)
        left = marked(variables.LAUNCH, token)


def _stat(pid: int) -> tuple[str, int] | None:
    """The state's letter and the parent of a process, proc(5); None: it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, parent, *_ = text.rpartition(")")[2].split()  # the name before may hold anything
    return state, int(parent)
