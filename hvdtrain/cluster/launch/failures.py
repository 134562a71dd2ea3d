"""Why a job failed: finds the rank to blame among those that ended, and describes its failure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.core.errors import EXIT_CODE, OUT_OF_STEP_CODE, PREEMPTED_CODE
from hvdtrain.horovod_build.prove_rank import TOO_LATE

SETTLE_S = 0.5  # after the first rank that fails: others that failed before it may still be on their way here
CONSEQUENCE_SETTLE_S = 5.0  # if what it says is that another failed: time for that one's interpreter to end
LONGEST_WAIT_S = 60.0  # before a job that makes no progress is started again

# what ranks say when another one left them: Gloo, Horovod, NCCL, torch.distributed, hvdtrain
_CONSEQUENCE = re.compile(
    r"HorovodInternalError|Horovod has been shut down|Connection closed by peer|Connection reset by peer"
    r"|connectFullMesh failed|Horovod initialization failed|Timed out waiting \d+ms for \w+ operation"
    r"|remote process exited or there was a network error|rank \d+: ended with rank 0|MainRankError: "
)
_LOOK_AT_LINES = 15
_OUTLIVED_LINES = 20  # more than an error's message and what libraries write at the interpreter's end
_KILLED = {
    signal.SIGKILL: "; out of memory is the usual reason: dmesg | grep -i 'out of memory' on {host}",
    signal.SIGBUS: "; a full /dev/shm is the usual reason",
}
# what PyTorch, the kernel and Python's shared_memory print of a full /dev/shm
_NO_SHARED_MEMORY = re.compile(
    r"(/dev/shm|</torch_|shared memory|/psm_).*No space left|No space left.*(/dev/shm|/psm_)"
    r"|insufficient shared memory|\b[Bb]us error"
)


@dataclass(frozen=True)
class Failure:
    """The failure that ended a job."""

    rank: int | None  # None: the host failed
    host: str
    code: int  # the job's exit code: the rank's, 128+N when signal N ended it, 255 for a lost host
    why: str
    lines: tuple[str, ...] = ()  # the rank's last ones
    after_s: float = 0.0  # since the ranks were started

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.host}" if self.rank is not None else self.host

    @property
    def remedy(self) -> str:
        """Returns the fix, if the rank's end shows it; else ""."""
        if self.code == 128 + signal.SIGBUS or any(map(_NO_SHARED_MEMORY.search, self.lines)):
            remedy = f"give /dev/shm more room (df /dev/shm on {self.host})"
            return f"{remedy}: in a container docker run --shm-size=8g, or --ipc=host"
        return ""

    def in_words(self, limit_s: float) -> str:
        """Returns the failed rank and the reason, for ranks that end themselves after a limit."""
        return f"{self.who}: {f'not done in {limit_s:g} s' if self.code == TOO_LATE else self.why}"


@dataclass(frozen=True)
class RankEnd:
    """The end of one rank."""

    rank: int
    host: str
    code: int  # negative for a signal
    at_s: float  # by the launcher's clock
    first_traceback_s: float | None = None  # when the traceback that it ended with began to arrive
    lines: tuple[str, ...] = ()  # its last ones
    done: bool = True  # False: it should have reported that it came to its end, and did not

    @property
    def failed(self) -> bool:
        """Returns True if the job must end."""
        return self.code not in (0, PREEMPTED_CODE) or not self.done

    @property
    def preempted(self) -> bool:
        return self.code == PREEMPTED_CODE

    @property
    def is_consequence(self) -> bool:
        """Returns True if its last lines report that another rank left it."""
        # Gloo's own exception, uncaught, ends in abort()
        spoke = self.code > 0 or self.code == -signal.SIGABRT
        return spoke and any(_CONSEQUENCE.search(line) for line in self.lines[-_LOOK_AT_LINES:])


class Restarts:
    """Decides whether a failed job is started again: counts failures in a row without progress."""

    def __init__(self, most: int) -> None:
        """Args: most: how many failures in a row without progress are followed by another attempt."""
        self._most, self._furthest, self._in_a_row = most, 0, 0

    def after(self, failed: Failure, updates: int) -> tuple[float | None, str]:
        """Returns how long to wait before the next attempt (None: there is none), and what to report.

        `updates`: how far the failed attempt came, counted through the whole run.
        """
        progress = updates > self._furthest
        self._furthest = max(self._furthest, updates)
        self._in_a_row = 0 if progress else self._in_a_row + 1
        if self._most == 0 or failed.code in (EXIT_CODE, OUT_OF_STEP_CODE):  # it would be so again
            return None, ""
        if self._in_a_row > self._most:
            return None, ""
        if progress:
            return 0.0, f"restart after progress (to update {updates})"
        return min(2.0 ** (self._in_a_row - 1), LONGEST_WAIT_S), f"restart {self._in_a_row} of {self._most}"


class Tracebacks:
    """The times at which each rank's last traceback began (`began_s`); a rank that continues has handled its error."""

    def __init__(self) -> None:
        self.began_s: dict[int, float] = {}
        self._lines_since: dict[int, int] = {}

    def note(self, rank: int, lines: Sequence[str], now_s: float) -> None:
        """Takes in what a rank wrote."""
        for line in lines:
            if line.startswith("Traceback (most recent call last)"):
                self.began_s.setdefault(rank, now_s)
                self._lines_since[rank] = 0
            elif rank in self.began_s and not line.startswith(" "):
                self._lines_since[rank] += 1
                if self._lines_since[rank] > _OUTLIVED_LINES:
                    del self.began_s[rank]


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Returns the rank to blame, None if all ended well; pure.

    A rank that raises first shuts Horovod down, which may end others before it: messages count before times.
    """
    failed = [end for end in ends if end.failed]
    return min(failed, key=lambda end: (end.is_consequence, end.first_traceback_s or end.at_s, end.rank), default=None)


def left_the_others(first: RankEnd, ends: Sequence[RankEnd]) -> RankEnd | None:
    """Returns the rank that ended well before another one failed for want of it, None where it was not so; pure."""
    before = [end for end in ends if end.code == 0 and end.done and end.at_s <= first.at_s]
    return min(before, key=lambda end: end.at_s) if first.is_consequence and before else None


def settled(ends: Sequence[RankEnd], now_s: float) -> bool:
    """Returns True if the first failure can be named: enough time has passed for earlier ends to arrive."""
    failed = [end for end in ends if end.failed]
    wait_s = CONSEQUENCE_SETTLE_S if all(end.is_consequence for end in failed) else SETTLE_S
    return bool(failed) and now_s - min(end.at_s for end in failed) >= wait_s


def described(code: int, host: str) -> str:
    """Returns a rank's end in words; `code` is negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"ended by signal {-code}"
    return f"ended by {number.name}{_KILLED.get(number, '').format(host=host)}"


def as_exit_code(code: int) -> int:
    """Returns a rank's exit code as a shell does: 128+N for signal N."""
    return 128 - code if code < 0 else code
