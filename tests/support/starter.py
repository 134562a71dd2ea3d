"""Ranks forked from a process that has imported their frameworks, for tests that do not care how ranks start.

A test process has one such process (`starter_process`) for each set of frameworks. What a program imports is read from
its text; a program that imports none, or in another environment, gets a cold start.
"""

from __future__ import annotations

import atexit
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from starter_process import NO_RUN, TOKEN, Asked

# Variables that are read when a program asks for them. Any other may be read while a framework is imported. Keras'
# backend is, and has starters of its own; a run that sets another gets a cold start.
_READ_LATE = re.compile(
    r"(HVDTRAIN_(?!TEST_IMPORTS)|HOROVOD_|OMPI_|PYTEST_|TMPDIR$|DS_ACCELERATOR$|MICRO$|DIES_AT_SAVE$|SPARE_BYTES$)"
)
_BACKEND = "KERAS_BACKEND"
_FRAMEWORKS = {"torch", "torchvision", "tensorflow"}  # a rank imports Horovod itself, if it may
_INTEGRATED = {"lightning", "torchmetrics", "transformers.trainer"}  # all programs of integrations fork from these
# pyarrow, which transformers imports, would start a thread of its allocator's: then nothing can be forked
_NO_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
_KEPT = 3  # starters of a test process: each has 200 to 400 MiB of its own


class Run:
    """A run, with `wait` as `subprocess.Popen` has it."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code, negative for a signal; raises TimeoutExpired if the run has not ended."""
        if self._code is None:
            self._line.settimeout(timeout)
            try:
                code = self._line.recv(16)
            except TimeoutError:
                raise subprocess.TimeoutExpired("a forked run", timeout or 0) from None
            self._line.close()
            self._code = int(code or -signal.SIGKILL)  # nothing: the starter is gone
        return self._code


class Starter:
    """A process that has imported frameworks, and forks runs.

    Args:
        frameworks: what it imports.
        environ: the environment in which it does so.
    """

    def __init__(self, frameworks: Sequence[str], environ: Mapping[str, str]) -> None:
        self.frameworks, self.environ = frameworks, dict(environ)
        self._line, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"exec(__import__('starter_process').serve({its_end.fileno()}, {list(frameworks)}))"
        with its_end:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], env={**environ, **_NO_THREAD, TOKEN: NO_RUN}, cwd="/",
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[its_end.fileno()],
                start_new_session=True,
            )  # fmt: skip

    def fits(self, frameworks: Sequence[str], environ: Mapping[str, str]) -> bool:
        """Returns True if a program that needs `frameworks` may start here with this environment."""
        different = {name for name, _ in self.environ.items() ^ environ.items()}
        lives = self.process.poll() is None
        return lives and self.frameworks == frameworks and all(map(_READ_LATE.match, different))

    def run(self, asked: Asked) -> Run:
        """Starts a run."""
        ours, its_end = socket.socketpair()
        with its_end:
            socket.send_fds(self._line, [json.dumps(vars(asked)).encode()], [its_end.fileno()])
        return Run(ours)

    def close(self) -> None:
        """Ends the process, and all that it has started."""
        self._line.close()
        self.process.wait()


_starters: list[Starter] = []  # the one that was used last is last
_lock = threading.Lock()


@atexit.register
def close() -> None:
    """Ends all starters."""
    while _starters:
        _starters.pop().close()


def start(asked: Asked, own: Iterable[str]) -> Run | None:
    """Starts a run; returns None if it needs a cold start. `own` names the variables that other runs do not have."""
    # a forked rank is not measured; HVDTRAIN_TEST_START=cold is there to compare
    if "COVERAGE_PROCESS_START" in asked.environ or asked.environ.get("HVDTRAIN_TEST_START") == "cold":
        return None
    early = [name for name in own if name != _BACKEND and not _READ_LATE.match(name)]
    with _lock:
        # in here: ast.parse in two threads at a time can end in a SystemError (Python 3.11)
        frameworks = [] if early else frameworks_of(asked)
        if not frameworks:
            return None
        fitting = [one for one in _starters if one.fits(frameworks, asked.environ)]
        chosen = fitting[0] if fitting else Starter(frameworks, asked.environ)
        _starters[:] = [*(one for one in _starters if one is not chosen), chosen]
        while len(_starters) > _KEPT:
            _starters.pop(0).close()
        return chosen.run(asked)


def processes() -> set[int]:
    """Returns the process ids of this test process's starters."""
    return {one.process.pid for one in _starters}


def frameworks_of(asked: Asked) -> list[str]:
    """Returns the frameworks that a program imports, itself or through modules beside it; [] if they are not known."""
    from hvdtrain.cluster.function.rehearsal import imported_by  # not for programs that import the harness

    text, backend = _text(asked.arguments, Path(asked.cwd)), asked.environ.get(_BACKEND)
    if re.search(r'environ\["KERAS_BACKEND"\] =', text) and not backend:
        return []  # chosen later
    names = _FRAMEWORKS & set(imported_by(text, backend or "tensorflow"))
    keras = ["keras"] * bool(re.search(r"^ *(?:import|from) .*\bkeras\b", text, re.MULTILINE))
    if keras and backend:  # whatever other framework it names
        names &= {backend}
    if {"torch", "tensorflow"} <= names:
        return []
    if "torch" in names and re.search(r"^from hvdtrain\.integrations", text, re.MULTILINE):
        names |= _INTEGRATED
    elif "torch" in names and re.search(r"^import torchmetrics\b", text, re.MULTILINE):
        names.add("torchmetrics")
    # keras.utils.set_random_seed seeds TensorFlow as well, for which it imports it
    return [*sorted(names), *keras, *["tensorflow"] * bool(keras and backend == "torch")]


def _text(arguments: Sequence[str], cwd: Path) -> str:
    """Returns the text of a program, and of the modules beside it that it imports."""
    first, *rest = arguments
    if first == "-W":
        return _text(rest[1:], cwd)
    if first == "-c":
        return rest[0]
    if [first, *rest[:2]] == ["-m", "hvdtrain", "guard"]:  # of the scripts that it runs, which may have arguments
        scripts = [script for script in (line.partition(" ")[0] for line in rest) if script.endswith(".py")]
        return "\n".join(_text([script], cwd) for script in scripts)
    file = cwd / (f"{rest[0].replace('.', '/')}.py" if first == "-m" else first)
    if not file.is_file():
        return ""
    beside = {path.stem: path for folder in (Path(__file__).parent, file.parent) for path in folder.glob("*.py")}
    texts, waiting = [], [file]
    while waiting:
        texts.append(waiting.pop().read_text(encoding="utf-8"))
        names = re.findall(r"^ *(?:import|from) (\w+)\b", texts[-1], re.MULTILINE)
        waiting += [path for name in names if (path := beside.pop(name, None))]
    return "\n".join(texts)
