"""Errors that a user can act on: the rule that was broken, what was received, and what to type next.

Programs print them without a traceback and end with exit code 2, any other error with 1 (`exit_with`), so that
`hvdtrain launch --max-restarts` does not repeat what would be refused again. docs/exit-codes.md lists all codes.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import sys
import threading
import traceback as traceback_module
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

EXIT_CODE = 2  # of what is refused
FAULT_CODE = 1  # of what failed, as Python's own
HUNG_CODE = 75  # of a rank that waits for one that hangs: another attempt may go well (EX_TEMPFAIL of sysexits.h)
PREEMPTED_CODE = 85  # of a job that was preempted, and has saved (as HTCondor has it: "checkpoint, start me again")
OUT_OF_STEP_CODE = 76  # of a rank blocked in a collective operation that others do not come to
GUARD_CODE = 77  # of a job whose training was found to be wrong
NOT_STARTED_CODE = 127  # as a shell says it of a command that is not there
PIPE_CODE = 141  # 128 + SIGPIPE, as of a program that the signal ends
HOST_LOST_CODE = 255  # as ssh's own
_JOBS = "launch guard rehearse"


class ExitCode(NamedTuple):
    """A row of the table of exit codes that each command's --help and docs/exit-codes.md show."""

    code: str  # as people write it
    commands: str  # that end with it; "": every one
    meaning: str  # in words


EXIT_CODES = (
    ExitCode("0", "", "success"),
    ExitCode(str(FAULT_CODE), "", "the command failed, for example because standard output cannot be written"),
    ExitCode(str(FAULT_CODE), "doctor", "warnings, no errors"),
    ExitCode(str(FAULT_CODE), "migrate", "a line cannot be converted, or the two scripts train differently"),
    ExitCode(str(FAULT_CODE), "verify", "a check does not hold, or a rank failed"),
    ExitCode(str(FAULT_CODE), "why", "no cause is known"),
    ExitCode(str(EXIT_CODE), "", "the input or the environment was refused; a restart would not help"),
    ExitCode(str(EXIT_CODE), "doctor", "errors: a job would not start, or would train wrong"),
    ExitCode(str(EXIT_CODE), "migrate", "nothing was proven: the old script does not run here"),
    ExitCode(str(HUNG_CODE), _JOBS, "a rank hangs and the others wait for it"),
    ExitCode(str(OUT_OF_STEP_CODE), _JOBS, "ranks wait for one another at different lines; never restarted"),
    ExitCode(str(GUARD_CODE), "guard rehearse", "the training was found to be wrong"),
    ExitCode(
        str(PREEMPTED_CODE),
        "launch",
        "the job was preempted (SIGTERM, SIGUSR1); the ranks print what they saved",
    ),
    ExitCode(str(NOT_STARTED_CODE), "launch", "the ranks' command cannot be started"),
    ExitCode("N", _JOBS, "the script's exit code; of a job: that of the first rank that failed"),
    ExitCode("128+N", "", "signal N ended the command (129 SIGHUP, 130 Ctrl-C, 143 SIGTERM)"),
    ExitCode("128+N", "launch rehearse", "signal N ended the first rank that failed (137 SIGKILL, 147 SIGSTOP)"),
    ExitCode(str(PIPE_CODE), "", "the reader of standard output has gone, as in `| head`; it ends a job"),
    ExitCode(str(HOST_LOST_CODE), "launch", "a host is lost or cannot be reached"),
)


def exit_codes_of(command: str) -> str:
    """Returns the part of a command's --help that lists its exit codes."""
    rows = [row for row in EXIT_CODES if not row.commands or command in row.commands.split()]
    return "\n".join(["exit codes:", *(f"  {row.code:<7}{row.meaning}" for row in rows)])


# what PyTorch's CPU allocator, and CUDA libraries that allocate for themselves, say in a plain RuntimeError
OOM_MESSAGES = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class HvdtrainError(RuntimeError):
    """Base of everything hvdtrain refuses to do.

    Args:
        rule: what must hold, as one sentence.
        received: what was found instead, per rank where ranks differ.
        remedy: what the user can type or change.
        shared: True when every rank raises this same error, so that only rank 0 has to print it whole.
        code: the number under which docs/troubleshooting.md explains the error; 0: it does not.
    """

    def __init__(self, rule: str, received: str = "", remedy: str = "", *, shared: bool = False, code: int = 0) -> None:
        super().__init__(rule, received, remedy)
        self.code = code
        self.rule = rule
        self.received = received
        self.remedy = remedy
        self.shared = shared

    @property
    def title(self) -> str:
        """The first line: the rule, and the code that docs/troubleshooting.md explains."""
        return f"{self.rule} [HVT-{self.code:03}]" if self.code else self.rule

    def __str__(self) -> str:
        lines = [self.title]
        if self.received:
            lines.append("  received: " + self.received.replace("\n", "\n            "))
        if self.remedy:
            lines.append("  fix: " + self.remedy.replace("\n", "\n       "))
        return "\n".join(lines)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if a framework, or a library below it, had no memory left."""
    by_type = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's
    return by_type or any(message in str(error) for message in OOM_MESSAGES)


def by_rank(texts: Sequence[str]) -> str:
    """Returns a line for each rank, equal neighbours folded: "ranks 0-2: 0.1" / "rank 3: 0.2"."""
    lines, start = [], 0
    for end in range(1, len(texts) + 1):
        if end == len(texts) or texts[end] != texts[start]:
            lines.append(f"{f'rank {start}' if end == start + 1 else f'ranks {start}-{end - 1}'}: {texts[start]}")
            start = end
    return "\n".join(lines)


def install_command(*extras: str) -> str:
    """Returns the command that installs these extras for this Python (`pip` may be another's); a checkout in place."""
    checkout = Path(__file__).resolve().parents[2]
    editable = (checkout / "setup.cfg").is_file()
    name = f"-e '{checkout}[{','.join(extras)}]'" if editable else f"'hvdtrain[{','.join(extras)}]'"
    return f"{sys.executable} -m pip install {name}"


def build_horovod_command() -> str:
    """Returns the command that builds and installs Horovod for the Python that runs this."""
    return f"{sys.executable} -m hvdtrain build-horovod --install"


class ConfigError(HvdtrainError):
    """Wrong user input: a flag, the data, the run directory."""


def missing_package(error: ModuleNotFoundError, framework: str) -> ConfigError:
    """Returns the error for a package that an adapter ("torch", "keras") builds on, and that is not installed."""
    received = f"no module {error.name!r} in {sys.executable} on {os.uname().nodename}"
    return ConfigError(f"the {framework} adapter needs {error.name}", received, install_command(framework), code=2)


class ReplicaError(HvdtrainError):
    """Training that would be, or is, silently wrong."""


class CheckpointError(HvdtrainError):
    """No usable checkpoint, or one that cannot be written."""


class NonFiniteError(HvdtrainError):
    """Training has come to a loss, a gradient or weights that are NaN or infinite; earlier checkpoints are as they
    were, and can be restored in the same process."""


class LauncherError(HvdtrainError):
    """The launcher's environment and the engine do not make a consistent world."""


class RanksLost(HvdtrainError):
    """Ranks are gone in the middle of a collective operation; where the job is elastic, the others continue."""


class MainRankError(HvdtrainError):
    """Raised on every other rank when work that rank 0 did for all of them failed, with the name of rank 0's
    exception class (`error_type`) and its traceback as text."""

    def __init__(
        self, rule: str, received: str = "", remedy: str = "", *, error_type: str = "", main_traceback: str = ""
    ) -> None:
        super().__init__(rule, received, remedy, shared=True)
        self.error_type = error_type
        self.main_traceback = main_traceback


class Preempted(SystemExit):
    """The job was preempted (SIGTERM, SIGUSR1): raised on all ranks, after the same update, when they have saved.
    Uncaught it ends the program with exit code 85, and no traceback; `seen`: there was one in this program."""

    seen = False

    def __init__(self, code: int = PREEMPTED_CODE) -> None:
        super().__init__(code)
        Preempted.seen = True


def describe(program: str, error: BaseException, rank: int) -> str:
    """Returns the text that `exit_with` prints for `error` on this rank. Of an error that every rank raises, rank 0
    prints all and the others a line, in case rank 0 is killed before. Other errors have a traceback."""
    who = f"{program}: rank {rank}: "
    if not isinstance(error, HvdtrainError):
        text = "".join(traceback_module.format_exception(error)).rstrip()
        return f"{who}{type(error).__name__}: {error}\n{text}"
    if error.shared and rank != 0:
        received = f" (received: {'; '.join(error.received.splitlines())})" if error.received else ""
        return f"{who}ended with rank 0: {error.rule}{received}"
    return who + str(error)


_ending = threading.RLock()  # held by the thread that ends this process


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Keeps other threads from ending this process while one thread is inside. If the engine breaks, the main thread
    wakes up with an error of its own, and its end would hide the real one."""
    with _ending:
        yield


def _wait_for_end() -> None:
    with ending():
        return


def _fresh_in_child() -> None:
    global _ending
    _ending = threading.RLock()  # the thread that holds the other one is not in the child


atexit.register(_wait_for_end)
os.register_at_fork(after_in_child=_fresh_in_child)

_before_end: list[Callable[[], object]] = []


def before_end(call: Callable[[], object]) -> None:
    """Has `call()` run before `end_now`, as `atexit` has it run before a normal end."""
    _before_end.append(call)


def end_now(code: int) -> NoReturn:
    """Ends this process without the exit hooks of engines, which would wait for ranks that do not come."""
    with ending():
        for call in _before_end:
            call()
        os._exit(code)


_exits: list[object] = []  # codes other than 0 that this program has wanted to end with


def note_exits() -> None:
    """Has `sys.exit`, `exit` and `quit` note codes other than 0: Python shows them to nothing that runs at its end."""
    for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        plain = getattr(module, name, None)  # `python -S` has two of them not
        if plain is not None and not isinstance(plain, _NotingExit):
            setattr(module, name, _NotingExit(plain))


class _NotingExit:
    def __init__(self, exit_plainly: Callable[..., NoReturn]) -> None:
        self._exit_plainly = exit_plainly

    def __call__(self, status: object = None, /) -> NoReturn:
        note_exit(status)
        self._exit_plainly(status)

    def __repr__(self) -> str:
        return repr(self._exit_plainly)


def note_exit(status: object) -> None:
    """Notes the exit code of this program, unless it catches `SystemExit`; a preempted program has not failed."""
    if status and status != PREEMPTED_CODE:
        _exits.append(status)


def ends_badly() -> bool:
    """Returns True if a program that is at its end has failed: by an exception, or with a code other than 0."""
    return ended_by() is not None


def ended_by() -> BaseException | None:
    """Returns what has failed a program that is at its end, None where nothing has."""
    last: BaseException | None = getattr(sys, "last_value", None)
    return last if last is not None or not _exits else SystemExit(_exits[-1])


def exit_with(program: str, error: BaseException, rank: int) -> NoReturn:
    """Prints an error on standard error and ends this process with exit code 2 for an `HvdtrainError`, else 1.

    In a job of several ranks it ends at once (`end_now`), and the launcher ends the others. So close your files first.

    Example:
        try:
            train()
        except Exception as error:
            hvdtrain.exit_with("train.py", error, rank=world.rank)

    Args:
        program: the program's name, for the first line.
        error: the error to print.
        rank: this process's rank.
    """
    with contextlib.suppress(OSError):  # a reader that went away must not hide the error
        sys.stdout.flush()
    print(describe(program, error, rank), file=sys.stderr, flush=True)
    code = EXIT_CODE if isinstance(error, HvdtrainError) else FAULT_CODE
    world_module = sys.modules.get("hvdtrain.world.world")  # which may not have been imported
    world = world_module.current() if world_module is not None else None
    if world is not None and world.engine != "solo":
        world.tracker.fails(error)
        end_now(code)
    sys.exit(code)
