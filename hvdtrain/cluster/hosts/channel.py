"""A program on a host, seen from this machine: its messages, how long it is silent, and why it ended."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.cluster.hosts.protocol import mark_of
from hvdtrain.cluster.hosts.ssh import Ssh, SshProblem, explain
from hvdtrain.comm.link import Decoder, Outbox

_ERRORS_BYTES = 1 << 16  # of standard error are kept


class Channel:
    """A program on a host, run by ssh, or directly if the host is this machine.

    One thread reads its messages, one its standard error; writing never waits. Nothing is sent before the program's
    first message: the shell's start-up files could read it. `mark` begins each message, in both directions.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        ssh: Ssh,
        on_message: Callable[[Any], object],
        *,
        local: bool,
        cwd: Path | None = None,
    ) -> None:
        """Starts the program; raises OSError if it cannot be started.

        Args:
            name: the host.
            argv: the command there, which begins with an interpreter; it gets one more argument, for `mark_of`.
            ssh: how the host is reached.
            on_message: gets (this channel, message) for each, and (this channel, None) at the end; called by a thread,
                and must not wait there.
            local: the host is this machine (`is_this_machine`, which may have to ask a slow name server).
            cwd: where a local command runs.
        """
        self.name, self.local = name, local
        self._python, self._ssh, self._on_message = argv[0], ssh, on_message
        token = secrets.token_hex(8)
        argv, self.mark, self._answered = [*argv, token], mark_of(token), False
        self._decoder, self._errors = Decoder(self.mark), bytearray()
        self._heard_s = time.monotonic()
        # a session of its own: a Ctrl-C in the terminal is the launcher's to handle
        self._process = subprocess.Popen(
            argv if local else ssh.command(name, argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, bufsize=0, start_new_session=True, cwd=cwd if local else None,
        )  # fmt: skip
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None and stdout is not None and stderr is not None
        self._stdin, self._stdout, self._stderr = stdin, stdout, stderr
        os.set_blocking(stdin.fileno(), False)
        self._unsent = Outbox(stdin.fileno())
        self._threads = [
            threading.Thread(target=work, name=f"{work.__name__} {name}", daemon=True)
            for work in (self._read_messages, self._read_errors)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def noise(self) -> str:
        """Returns the received output that was no message, such as that of a shell's start-up files."""
        return self._decoder.noise.decode(errors="replace")

    def write(self, data: bytes) -> None:
        """Sends bytes; what the other side does not take now goes with the next `flush`."""
        self._unsent.write(data)
        self.flush()

    def flush(self) -> bool:
        """Sends the remaining data, once the program has begun; returns True if nothing can be sent now."""
        return not self._answered or self._stdin.closed or self._unsent.flush()

    def silent_s(self) -> float:
        """Returns for how long nothing came."""
        return time.monotonic() - self._heard_s

    def problem(self) -> SshProblem:
        """Returns why no message comes (any more)."""
        returncode = self._process.poll()
        if returncode is not None:
            self._threads[1].join(timeout=1.0)
        output = (self._errors.decode(errors="replace") + self.noise).strip()
        found = explain(self.name, returncode, output, self._ssh, python=self._python, answered=self._answered)
        if not self.local or found.kind not in ("other", "timeout"):
            return found
        how = "does not answer" if returncode is None else f"ended with {returncode}"
        what = f"{self._python} on this machine {how}: {output[-2000:] or 'it printed nothing'}"
        return SshProblem(found.kind, what, f"try: {shlex.join(self._process.args)}")  # type: ignore[arg-type]

    def close(self, wait_s: float) -> None:
        """Closes its standard input, which ends it; waits for it, and ends the process that reaches it."""
        self._stdin.close()
        if not self._waited(wait_s):
            self._process.terminate()
            if not self._waited(7.0 if self.local else 1.0):
                self.kill()
        reading, errors = self._threads
        reading.join(timeout=5.0)
        errors.join(timeout=1.0)  # an ssh master in the background may hold standard error open
        if not any(thread.is_alive() for thread in self._threads):
            self._stdout.close()
            self._stderr.close()

    def kill(self) -> None:
        """Ends the process that reaches it, at once."""
        self._process.kill()
        self._process.wait()

    def _waited(self, patience_s: float) -> bool:
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read_messages(self) -> None:
        while data := os.read(self._stdout.fileno(), 1 << 16):
            self._heard_s = time.monotonic()
            for message in self._decoder.feed(data):
                self._answered = True
                self._on_message((self, message))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # so that its exit code tells why
        self._on_message((self, None))

    def _read_errors(self) -> None:
        while data := os.read(self._stderr.fileno(), 1 << 12):
            self._errors = (self._errors + data)[-_ERRORS_BYTES:]
