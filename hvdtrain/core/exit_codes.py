"""The exit codes of `hvdtrain` and of its jobs: the one table that each command's --help and docs/cluster.md show."""

from __future__ import annotations

from typing import NamedTuple

from hvdtrain.core.errors import EXIT_CODE, FAULT_CODE, HUNG_CODE, OUT_OF_STEP_CODE, PREEMPTED_CODE

GUARD_CODE = 77  # of a job whose training was found to be wrong
NOT_STARTED = 127  # as a shell says it of a command that is not there
PIPE_CODE = 141  # 128 + SIGPIPE, as of a program that the signal ends
HOST_LOST = 255  # as ssh's own
_JOBS = "launch guard rehearse"


class ExitCode(NamedTuple):
    """A row of the table.

    Attributes:
        code: as people write it.
        commands: that end with it; "": every one.
        meaning: in words.
    """

    code: str
    commands: str
    meaning: str


TABLE = (
    ExitCode("0", "", "success"),
    ExitCode(str(FAULT_CODE), "", "the command failed, for example because standard output cannot be written"),
    ExitCode(str(FAULT_CODE), "doctor", "warnings, no errors"),
    ExitCode(str(FAULT_CODE), "migrate", "a line cannot be converted, or the two scripts train differently"),
    ExitCode(str(FAULT_CODE), "verify", "a check does not hold, or a rank failed"),
    ExitCode(str(FAULT_CODE), "why", "no cause is known"),
    ExitCode(str(EXIT_CODE), "", "the input or the environment was refused; a restart would not help"),
    ExitCode(str(EXIT_CODE), "doctor", "errors: a job would not start, or would train wrong"),
    ExitCode(str(HUNG_CODE), _JOBS, "a rank hangs and the others wait for it"),
    ExitCode(str(OUT_OF_STEP_CODE), _JOBS, "ranks wait for one another at different lines; never restarted"),
    ExitCode(str(GUARD_CODE), "guard rehearse", "the training was found to be wrong"),
    ExitCode(str(PREEMPTED_CODE), "launch", "the ranks were told to end (SIGTERM, SIGUSR1), and have saved"),
    ExitCode(str(NOT_STARTED), "launch", "the ranks' command cannot be started"),
    ExitCode("N", _JOBS, "the script's exit code; of a job: that of the first rank that failed"),
    ExitCode("128+N", "", "signal N ended the command (129 SIGHUP, 130 Ctrl-C, 143 SIGTERM)"),
    ExitCode("128+N", "launch rehearse", "signal N ended the first rank that failed (137 SIGKILL, 147 SIGSTOP)"),
    ExitCode(str(PIPE_CODE), "", "the reader of standard output has gone, as in `| head`; it ends a job"),
    ExitCode(str(HOST_LOST), "launch", "a host is lost or cannot be reached"),
)


def help_of(command: str) -> str:
    """Returns the part of a command's --help that lists its exit codes."""
    rows = [row for row in TABLE if not row.commands or command in row.commands.split()]
    return "\n".join(["exit codes:", *(f"  {row.code:<7}{row.meaning}" for row in rows)])
