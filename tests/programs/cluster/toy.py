"""A rank without a framework: `toy.py RANK:ACTION[:VALUE] ...`, what this rank does, one after the other.

"*" is every rank. A rank with nothing (more) to do ends well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

RANK = os.environ["HOROVOD_RANK"]
SLEEPER = "import signal, time; {} time.sleep(300)"


def line(text: str) -> None:
    """Write a line at once: a signal's line comes before or after it, and not within it."""
    os.write(1, f"{text}\n".encode())


def note(name: str) -> None:
    """Let a signal write a word, and go on."""
    number = signal.Signals[name]
    signal.signal(number, lambda *_: line(f"got {name}"))


def end_at(name: str) -> None:
    """Let a signal end the rank in its own way."""

    def end(*_: object) -> None:
        line(f"ending at {name}")
        sys.exit(0)

    signal.signal(signal.Signals[name], end)


def until(path: str) -> None:
    """Wait for a file."""
    line("waiting")
    while not os.path.exists(path):
        time.sleep(0.01)


def when_told(how: str) -> None:
    """At SIGUSR1, say that this rank is preempted, as hvdtrain does, and fail; or be ended by it."""

    def end(*_: object) -> None:
        if how == "dies":
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGUSR1)
        os.write(int(os.environ["HVDTRAIN_AGENT_FD"]), json.dumps({"do": "signalled", "signal": 10}).encode() + b"\n")
        os._exit(3)

    signal.signal(signal.SIGUSR1, end)


def orphan(kind: str) -> None:
    """Start a process that leaves this one's session and parent; "stubborn" ones ignore SIGTERM."""
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if kind == "stubborn" else ""
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER.format(ignore)!r}])"
    subprocess.run([sys.executable, "-c", program], start_new_session=True, stdout=subprocess.DEVNULL, check=True)


def many(count: str) -> None:
    """Write many lines, to both streams."""
    for number in range(int(count)):
        print(f"line {number} of rank {RANK}", file=sys.stderr if number % 2 else sys.stdout)


def wide(count: str) -> None:
    """Write megabytes: lines of a thousand characters."""
    for number in range(int(count)):
        print(f"{number:1000d}")


def flood(count: str) -> None:
    """Leave processes that write for ever to this one's standard output."""
    for _ in range(int(count)):
        subprocess.Popen(["yes"])


def shell(seconds: str) -> None:
    """Become a shell that has a child."""
    child = f"print('waiting', flush=True); import time; time.sleep({seconds})"
    os.execvp("sh", ["sh", "-c", f'{sys.executable} -c "{child}"; true'])


def save_slowly(path: str) -> None:
    """When asked to end, take six seconds to save."""

    def end(*_: object) -> None:
        time.sleep(6)
        open(path, "w").close()
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)


def updates(counts: str) -> None:
    """Say over the line how many updates are done: the first number in the first attempt, and so on."""
    count = counts.split(",")[int(os.environ.get("HVDTRAIN_RESTART", "0"))]
    said = json.dumps({"do": "updates", "count": int(count), "formation": 1})
    os.write(int(os.environ["HVDTRAIN_AGENT_FD"]), said.encode() + b"\n")


def fail_first(times: str) -> None:
    """Fail in the first attempts of a job."""
    if int(os.environ.get("HVDTRAIN_RESTART", "0")) < int(times):
        raise RuntimeError("not yet")


ACTIONS = {
    "say": lambda text: print(text, flush=True),
    "show": lambda name: print(f"{name}={os.environ.get(name)}", flush=True),
    "partial": lambda text: (sys.stdout.write(text), sys.stdout.flush()),
    "bytes": lambda text: os.write(1, bytes.fromhex(text)),
    "sleep": lambda seconds: time.sleep(float(seconds)),
    "wait": lambda seconds: (line("waiting"), time.sleep(float(seconds))),
    "exit": lambda code: sys.exit(int(code)),
    "raise": lambda text: (_ for _ in ()).throw(ValueError(text)),
    "kill": lambda name: os.kill(os.getpid(), signal.Signals[name]),
    "note": note,
    "end_at": end_at,
    "ignore": lambda name: signal.signal(signal.Signals[name], signal.SIG_IGN),
    "until": until,
    "when_told": when_told,
    "orphan": orphan,
    "many": many,
    "wide": wide,
    "fail_first": fail_first,
    "updates": updates,
    "flood": flood,
    "shell": shell,
    "save_slowly": save_slowly,
}

for argument in sys.argv[1:]:
    who, action, *value = argument.split(":", 2)
    if who in ("*", RANK):
        ACTIONS[action](*value)
