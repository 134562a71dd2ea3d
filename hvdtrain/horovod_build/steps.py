"""Commands run one after another: a line each on the terminal, everything in one log."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hvdtrain.core.errors import HvdtrainError

Say = Callable[[str], None]
LOG_TAIL_LINES = 30
# of compilers (file:line:column, file(line)), linkers, CMake, make and pip
_ERROR = re.compile(
    r"^\S*: (fatal )?error: |^(error|nvcc error|ptxas fatal|CMake Error)\b|^g?make.*\*\*\* "
    r"|undefined reference|No space left",
    re.IGNORECASE,
)


class Commands:
    """Runs commands one after another: a line each on the terminal, everything in one log, its end on failure."""

    def __init__(self, log: Path, say: Say) -> None:
        self.log, self.say = log, say
        log.write_text("")

    def __call__(self, what: str, command: list[str], **options: Any) -> str:
        """Runs `command`; returns what it printed. Options: env, cwd, progress (function of a line), timeout_s."""
        self.say(what)
        progress = options.pop("progress", None)
        printed: list[str] = []
        with self.log.open("a") as log, _process(command, **options) as process:
            log.write(f"$ {' '.join(command)}\n")
            for line in process.stdout or ():
                log.write(line)
                printed.append(line)
                if progress:
                    progress(line)
            code = process.wait()
        if code:
            # after a compiler's error comes setup.py's traceback
            first = next((at for at, line in enumerate(printed) if _ERROR.search(line)), None)
            which, at = ("last lines", -LOG_TAIL_LINES) if first is None else ("first error", first)
            lines = "    ".join(printed[at:][:LOG_TAIL_LINES]).rstrip()
            rule, received = f"{what}: failed with exit code {code}", f"the {which} of its log:\n    {lines}"
            raise HvdtrainError(rule, received, f"the whole log is {self.log}")
        return "".join(printed)


@contextmanager
def _process(
    command: list[str], timeout_s: float = threading.TIMEOUT_MAX, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A child in its own session whose whole tree is gone when the block ends, and after that time."""
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    process = subprocess.Popen(command, start_new_session=True, **options)
    deadline = threading.Timer(timeout_s, _kill_tree, [process])
    try:
        deadline.start()
        yield process
    finally:
        deadline.cancel()
        if process.poll() is None:
            _kill_tree(process)
            process.wait()


def _kill_tree(process: subprocess.Popen[str]) -> None:
    import psutil  # one of the build modules the environment check asks for

    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
