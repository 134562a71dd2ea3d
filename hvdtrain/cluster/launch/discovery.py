"""Which hosts an elastic job may use now: what a command of the user's prints, asked again and again."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

from hvdtrain.cluster.hosts.hosts import Host, parse_hosts
from hvdtrain.core.errors import ConfigError

EVERY_S = 1.0
TIMEOUT_S = 10.0


def command_in(text: str) -> tuple[str, ...]:
    """Returns the words of a command, which runs without a shell; raises ConfigError if it cannot be split."""
    words, why = [], "the command is empty"
    try:
        words = shlex.split(text)
    except ValueError as error:
        why = str(error)
    if not words:
        raise ConfigError("--host-discovery must be a command", f"{text!r}: {why}", '--host-discovery "sh hosts.sh"')
    return tuple(words)


def asked(command: Sequence[str], timeout_s: float = TIMEOUT_S, closed: threading.Event | None = None) -> list[Host]:
    """Returns the hosts that a command prints, a line each: "host1:4".

    Once `closed` is set, or after the timeout, the command is ended, with what it has started. Raises ConfigError then,
    and if it cannot be started, fails, or prints something else.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:  # files: what it leaves holds no pipe open
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            raise _no_list(command, f"{error.filename or command[0]}: {error.strerror}") from error
        until_s = time.monotonic() + timeout_s
        while process.poll() is None and time.monotonic() < until_s and not (closed is not None and closed.is_set()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise _no_list(command, f"not done in {timeout_s:g} s")
        output, complained = ((file.seek(0), file.read().decode(errors="replace"))[1] for file in (out, err))
    if process.returncode != 0:
        raise _no_list(command, f"exit code {process.returncode}: {complained.strip()[-500:] or 'it printed nothing'}")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    try:
        return parse_hosts(",".join(lines)) if lines else []
    except ConfigError as error:
        raise _no_list(command, error.received) from error


def first(command: Sequence[str], slots: int, timeout_s: float) -> list[Host]:
    """Returns the first hosts that have so many slots; raises ConfigError if there are none in time."""
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            hosts = asked(command)
            if sum(host.slots for host in hosts) >= slots:
                return hosts
            raise _no_list(command, f"{', '.join(map(str, hosts)) or 'none'}: fewer than {slots} slot(s)")
        except ConfigError:
            if time.monotonic() >= until_s:
                raise
        time.sleep(EVERY_S)


def _no_list(command: Sequence[str], what: str) -> ConfigError:
    return ConfigError("--host-discovery must print hosts as host1:4, one a line", f"{shlex.join(command)}: {what}")


class Discovery:
    """A thread that runs the discovery command, so that nothing waits for a slow command; `close` ends it.

    `on_hosts` gets every list that differs from the last one. The callback `_say` prints each new failure once.
    """

    def __init__(self, command: Sequence[str], on_hosts: Callable[[list[Host]], None], say: Callable[[str], None]):
        self._command, self._on_hosts, self._say = command, on_hosts, say
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host discovery", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        last: list[Host] | None = None
        wrong = ""
        while not self._closed.is_set():
            try:
                hosts = asked(self._command, closed=self._closed)
            except ConfigError as error:
                if error.received != wrong and not self._closed.is_set():
                    self._say(f"{error.received}; the hosts stay as they are")
                wrong = error.received
            else:
                wrong = ""
                if hosts != last:
                    last = hosts
                    self._on_hosts(hosts)
            self._closed.wait(EVERY_S)
