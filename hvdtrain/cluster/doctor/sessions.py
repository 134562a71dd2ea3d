"""Talking with the probes on all hosts at once: one ssh session a host, requests in, answers out, a deadline for each.

The probe's text goes through the session's standard input, so nothing needs to be installed there but some Python, and
nothing is left there. When the session ends, for whatever reason, so does the probe.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from hvdtrain.cluster.doctor import probe_links
from hvdtrain.cluster.ssh import Ssh, SshProblem, explain, is_this_machine
from hvdtrain.core.errors import ConfigError

Request = Mapping[str, Any]
Reply = dict[str, Any]

OLDEST = "3.6"
# Python 2 understands it as well, and says what it is. The session starts in the home folder: a random.py there must
# not be taken for Python's own.
_START = (
    "import sys; sys.path=[folder for folder in sys.path if folder];"
    " sys.version_info>=(3,6) or sys.exit('this is Python '+sys.version.split()[0]);"
    " exec(compile(sys.stdin.read(int(sys.argv[1])),'probe','exec'))"
)
_STDERR_BYTES = 1 << 16
_END_S = 2.0


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


class Session:
    """The probe on one host.

    Args:
        host: its name; this machine's own runs the probe without ssh.
        python: the interpreter there.
        ssh: how to reach it.
    """

    def __init__(self, host: str, python: str, ssh: Ssh) -> None:
        self.host, self.python, self.ssh = host, python, ssh
        try:
            self.local = is_this_machine(host)
        except ConfigError as error:
            raise Lost(SshProblem("unknown_name", f"{error.rule}: {error.came}", error.remedy)) from error
        text = source()
        argv = [python, "-c", _START, str(len(text))]
        try:
            self._process = subprocess.Popen(
                argv if self.local else ssh.command(host, argv), start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            raise Lost(_not_started(host, python, error, local=self.local)) from error
        self._said = b""
        self._answers: queue.Queue[bytes | None] = queue.Queue()
        self.noise: list[str] = []  # what the host's shell prints before the probe does
        assert self._process.stdout and self._process.stderr
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self._send(text)

    def ask(self, request: Request, timeout_s: float) -> Reply:
        """Return the answer to a request.

        Raises:
            Lost: none within the time, or the session has ended.
        """
        self._send(json.dumps(request) + "\n")
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise Lost(explain(self.host, None, self._stderr(), self.ssh, python=self.python)) from None
            if line is None:
                raise Lost(self._ended())
            text = line.decode(errors="replace")
            noise, mark, answer = text.partition(probe_links.MARK)
            if mark:
                return json.loads(answer)
            self.noise.append(noise.rstrip())

    def close(self) -> None:
        """Ends the probe and the session; returns when both are gone."""
        assert self._process.stdin and self._process.stdout and self._process.stderr
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        for reader in self._readers:
            reader.join(_END_S)
        for stream in (self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                stream.close()

    def kill(self) -> None:
        """Ends the session at once."""
        self._process.kill()
        self._process.wait()

    def _send(self, text: str) -> None:
        """Writes; a session that has ended is noticed where its answer is awaited."""
        assert self._process.stdin
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()

    def _read(self, stream: IO[bytes]) -> None:
        for line in iter(stream.readline, b""):
            self._answers.put(line)
        self._answers.put(None)

    def _listen(self, stream: IO[bytes]) -> None:
        for line in iter(stream.readline, b""):
            self._said = (self._said + line)[-_STDERR_BYTES:]

    def _stderr(self) -> str:
        return self._said.decode(errors="replace")

    def _ended(self) -> SshProblem:
        """Why the session ended by itself."""
        self._answers.put(None)  # for the next question
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            code = None
        self._readers[1].join(_END_S)
        said = self._stderr()
        if "this is Python " in said:
            version = said.partition("this is Python ")[2].split()[0]
            what = f"the Python called on {self.host} is {version}: too old even for the probe ({OLDEST})"
            return SshProblem("no_python", what, "install this machine's Python there, or name another: --python PATH")
        return explain(self.host, code, said or "\n".join(self.noise), self.ssh, python=self.python)


def _not_started(host: str, python: str, error: OSError, *, local: bool) -> SshProblem:
    if local:
        return SshProblem("no_python", f"{python} does not run on this machine: {error.strerror}", "--python PATH")
    return SshProblem("no_ssh", f"no ssh on this machine to reach {host}", "apt-get install openssh-client")


class Sessions:
    """The probes on all hosts that answer; hosts that stop answering go to `lost`.

    A question to all costs its time limit at most, however many hosts hang.
    """

    def __init__(self) -> None:
        self.alive: dict[str, Session] = {}
        self.lost: dict[str, SshProblem] = {}

    def open(self, names: Sequence[str], python: str, ssh: Ssh) -> None:
        """Starts the sessions, all at once."""

        def start(name: str) -> Session | SshProblem:
            try:
                return Session(name, python, ssh)
            except Lost as error:
                return error.problem

        with ThreadPoolExecutor(max(1, min(len(names), 64))) as pool:
            for name, result in zip(names, pool.map(start, names), strict=True):
                if isinstance(result, Session):
                    self.alive[name] = result
                else:
                    self.lost[name] = result

    def ask(self, requests: Mapping[str, Request], timeout_s: float) -> dict[str, Reply]:
        """Return the answers of the hosts that gave one; all are asked at once."""

        def one(name: str) -> Reply | SshProblem:
            try:
                return self.alive[name].ask(requests[name], timeout_s)
            except Lost as error:
                return error.problem

        names = [name for name in requests if name in self.alive]
        replies: dict[str, Reply] = {}
        with ThreadPoolExecutor(max(1, len(names))) as pool:
            try:
                results = dict(zip(names, pool.map(one, names), strict=True))
            except BaseException:  # Ctrl-C: nobody waits for answers any more
                for session in self.alive.values():
                    session.kill()
                raise
        for name, result in results.items():
            if isinstance(result, SshProblem):
                self.give_up(name, result)
            else:
                replies[name] = result
        return replies

    def give_up(self, name: str, problem: SshProblem) -> None:
        """Ends one host's session, which is lost."""
        self.lost[name] = problem
        session = self.alive.pop(name)
        session.kill()
        session.close()

    def close(self) -> None:
        """Ends all of them."""
        sessions = list(self.alive.values())
        self.alive.clear()
        with ThreadPoolExecutor(max(1, len(sessions))) as pool:
            list(pool.map(Session.close, sessions))


@contextlib.contextmanager
def sessions() -> Iterator[Sessions]:
    """Give sessions that are all ended afterwards, also on Ctrl-C."""
    found = Sessions()
    try:
        yield found
    finally:
        found.close()
