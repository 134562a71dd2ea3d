"""One host's agent, seen from the launcher: the process that reaches it (ssh, or the agent itself on this machine)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import hvdtrain
from hvdtrain.cluster.hosts import Host
from hvdtrain.cluster.protocol import Decoder, Message, encode
from hvdtrain.cluster.ssh import Ssh, SshProblem, explain

AGENT = "hvdtrain.cluster.launch.agent"
_PACKAGES = Path(hvdtrain.__file__).resolve().parent.parent
_KEPT_BYTES = 8192  # of standard error


class Connection:
    """A host's agent. One thread reads its messages, one its standard error; sending never waits.

    Attributes:
        host: the host.
        local: whether it is this machine.
        hello: the agent's first message, once it came.
        why_left: why the agent ends the job there by itself, if it does.
        ended: whether the agent said that nothing is left there.
        closed: whether no more can come, or is waited for.
        left: whether the connection has ended by itself.
    """

    def __init__(
        self, host: Host, python: str, ssh: Ssh, hear: Callable[[Connection, Message | None], None], *, local: bool
    ) -> None:
        """Start the agent.

        Args:
            host: where.
            python: the interpreter there.
            ssh: how it is reached.
            hear: gets every message, and None at the end; called by a thread, and must not wait there.
            local: whether the host is this machine (`is_this_machine`, which may have to ask a slow name server).

        Raises:
            OSError: the command could not be started.
        """
        self.host, self.local, self._python, self._ssh, self._hear = host, local, python, ssh, hear
        self.hello: Message | None = None
        self.why_left: str | None = None
        self.ended = self.closed = self.left = False
        self._decoder, self._unsent, self._said = Decoder(), bytearray(), bytearray()
        self._heard_s = time.monotonic()
        # `-m` looks in the working directory first. Elsewhere that is the user's home, where a random.py may lie: -P.
        # Here it makes the agent of this very hvdtrain run, also from a checkout that is not installed.
        agent = [python, "-m", AGENT]
        command: Sequence[str] = agent if self.local else ssh.command(host.name, [python, "-P", "-m", AGENT])
        # a session of its own: a Ctrl-C in the terminal is the launcher's to handle
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            start_new_session=True, cwd=_PACKAGES if self.local else None,
        )  # fmt: skip
        assert self._process.stdin is not None
        self._inward = self._process.stdin.fileno()
        os.set_blocking(self._inward, False)
        self._threads = [
            threading.Thread(target=work, name=f"{work.__name__} {host.name}", daemon=True)
            for work in (self._read_messages, self._read_errors)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, kind: str, **fields: object) -> None:
        """Send a message; what the other side does not take now goes with the next `flush`."""
        self._unsent += encode(kind, **fields)
        self.flush()

    def flush(self) -> None:
        """Send what is left."""
        try:
            while self._unsent and self._inward >= 0:
                del self._unsent[: os.write(self._inward, self._unsent[: 1 << 16])]
        except BlockingIOError:
            return
        except OSError:  # it is gone, which the reading thread tells
            self._unsent.clear()

    def note(self, message: Message | None) -> None:
        """Take in what a message, or the end, says of the connection itself."""
        if message is None:
            self.closed = self.left = True
        elif message["type"] == "hello":
            self.hello = message
        elif message["type"] == "leaving":
            self.why_left = message["why"]
        elif message["type"] == "ended":
            self.ended = True

    def silent_s(self) -> float:
        """Return for how long nothing came."""
        return time.monotonic() - self._heard_s

    def problem(self) -> SshProblem:
        """Return why the agent did not say hello, or is gone."""
        returncode = self._process.poll()
        if returncode is not None:
            self._threads[1].join(timeout=1.0)
        said = (self._said.decode(errors="replace") + self._decoder.noise.decode(errors="replace")).strip()
        found = explain(self.host.name, returncode, said, self._ssh, python=self._python)
        if self.local and found.kind in ("other", "timeout"):
            what = f"the agent on this machine ended with {returncode}: {said[-2000:] or 'it said nothing'}"
            return SshProblem("other", what, f"try: {' '.join(self._process.args)}")  # type: ignore[arg-type]
        return found

    def close(self, wait_s: float) -> None:
        """Let the agent go, which ends what it has; wait for it, and end the process that reaches it.

        Args:
            wait_s: for an agent that is known to be there.
        """
        wait_s = 0.0 if self.closed or self.hello is None else wait_s
        if self._inward >= 0:
            self._inward = -1
            assert self._process.stdin is not None
            self._process.stdin.close()
        for stop, patience_s in ((None, wait_s), (self._process.terminate, 1.0 if not self.local else 7.0)):
            if stop is not None:
                stop()
            if self._waited(patience_s):
                break
        else:
            self._process.kill()
            self._process.wait()
        reading, errors = self._threads
        reading.join(timeout=5.0)
        errors.join(timeout=1.0)  # an ssh master in the background may hold standard error open
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            if not any(thread.is_alive() for thread in self._threads):
                pipe.close()

    def _waited(self, patience_s: float) -> bool:
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def sweep(self, token: str, grace_s: float) -> None:
        """End what an agent that is gone without a word may have left on the host; it has the grace, if it lives."""
        words = [self._python, "-P", "-m", AGENT, "--sweep", token, f"{grace_s:g}"]
        command: Sequence[str] = words if self.local else self._ssh.command(self.host.name, words)
        folders = {"PYTHONPATH": os.pathsep.join([str(_PACKAGES), os.environ.get("PYTHONPATH", "")])}
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):  # the host cannot be reached: it is lost
            subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=grace_s + 5.0, check=False,
                env=os.environ | folders if self.local else None, start_new_session=True,
            )  # fmt: skip

    def _read_messages(self) -> None:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while data := os.read(descriptor, 1 << 16):
            self._heard_s = time.monotonic()
            for message in self._decoder.feed(data):
                self._hear(self, message)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # so that its exit code tells why
        self._hear(self, None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        while data := os.read(self._process.stderr.fileno(), 1 << 12):
            self._said = (self._said + data)[-_KEPT_BYTES:]
