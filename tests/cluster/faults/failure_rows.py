"""The faults of docs/failures.md, as data: how each is made, and what is promised then."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

import failure_makers as makers
from failure_job import Job

GRACE_S = 5.0  # --grace, --lost-after, --stopped-after and --hang-timeout as they are by default
LOST_S = STOPPED_S = 15.0
HANG_S = 28.0
SOON = ("--hang-timeout", "5")
ONE_ENDS_S = GRACE_S + 2  # docs/launching.md has these sums
HOST_LOST_S = LOST_S + GRACE_S + 2
HUNG_S = 5 + GRACE_S + 8
OUT_OF_STEP_S = 10 + GRACE_S + 2
SAVED_S = 2 * GRACE_S + 2
TOLD_LATER_S = 3 + ONE_ENDS_S  # a save that failed is told by the next one: ten updates here
TCP_WAITS_S = 120.0  # the longest that Linux waits before it sends a lost packet again
NO_WAY = 0.5  # a training that a fault does not hold up


@dataclass(frozen=True)
class Fault:
    """One row.

    Attributes:
        name: of the test.
        kind: a part of the page.
        what: for readers.
        code: the exit code.
        within_s: to the end on all hosts; of a job that goes on: the longest time without an update.
        says: what the first line to show must hold (a regular expression).
        in_program: the fault that a rank makes by itself (tests/programs/failures/train.py).
        make: makes it from outside, once the job trains.
        around: comes before the start.
        mend: comes before the training is resumed; `clear`: in the end.
        flags: of the launcher.
        goes_on: the job trains to its end by itself.
        quick: runs with every test.
    """

    name: str
    kind: str
    what: str
    code: int
    within_s: float
    says: str = ""
    in_program: str = ""
    make: Callable[[Job], None] | None = None
    around: Callable[[Job], None] | None = None
    mend: Callable[[Job], None] | None = None
    clear: Callable[[Job], None] | None = None
    flags: tuple[str, ...] = ()
    launcher: str = "hvdtrain launch"
    hosts: str = "host1:1,host2:1"
    np: int = 2
    pace_s: float = 0.1
    goes_on: bool = False
    quick: bool = False


RANK, HANG, STEP, HOST = "a rank fails", "a rank hangs", "ranks out of step", "hosts and their network"
DISK, LAUNCHER, TOLD = "disks and clocks", "launcher and agents", "preempted"
RESTART, ELASTIC, OTHERS = "started again (`--max-restarts`)", "elastic (`--min-np`)", "other launchers"
HUNG = "  received: .*has not reached the collective"
FAILED, LOST = "rank 1 on host2 failed first", "host host2 failed first"

FAULTS = [
    Fault("exception", RANK, "a rank raises an exception", 1, ONE_ENDS_S, FAILED, "raises"),
    Fault("exit", RANK, "`sys.exit(3)` on one rank", 3, ONE_ENDS_S, FAILED, "exits"),
    Fault("killed", RANK, "SIGKILL of a rank", 137, ONE_ENDS_S, FAILED, "killed"),
    Fault("segfault", RANK, "segmentation fault of a rank", 139, ONE_ENDS_S, FAILED, "segfault"),
    Fault("memory", RANK, "out of memory: the kernel ends a rank (cgroup, 64 MiB more than it had)", 137, ONE_ENDS_S,
          FAILED, "hog", makers.limit_memory, clear=makers.free_memory),
    Fault("nan", RANK, "NaN loss on one rank", 1, ONE_ENDS_S, "rank 1: nan", "nan"),
    Fault("worker_killed", RANK, "SIGKILL of a data worker", 1, ONE_ENDS_S, "is killed by signal",
          "worker_killed"),

    Fault("stopped", HANG, "SIGSTOP of a rank", 147, STOPPED_S + ONE_ENDS_S, FAILED, "stopped"),
    Fault("deadlock", HANG, "a lock that is never released", 75, HANG_S + GRACE_S + 8, HUNG, "deadlock"),
    Fault("deadlock_soon", HANG, "the same", 75, HUNG_S, HUNG, "deadlock", flags=SOON),
    Fault("loop", HANG, "an endless loop", 75, HUNG_S, HUNG, "loops", flags=SOON),
    Fault("worker_loops", HANG, "an endless loop in a data worker", 75, HUNG_S, HUNG, "worker_loops",
          flags=SOON),

    Fault("skips", STEP, "`world.gather` on rank 0 only", 76, OUT_OF_STEP_S, "rank 0: in gather", "skips"),
    Fault("order", STEP, "`world.barrier`, then `gather` on rank 0; the other way round on rank 1", 1, ONE_ENDS_S,
          "rank 0: in barrier", "order"),
    Fault("short", STEP, "a rank leaves the loop a batch before the others (uneven data in a loop of one's own)", 1,
          OUT_OF_STEP_S, "rank 0: in update", "short"),

    Fault("cut", HOST, "a host's link is cut", 255, HOST_LOST_S, LOST, "", makers.cut, mend=makers.restore),
    Fault("mute", HOST, "one way: what a host sends is lost", 255, HOST_LOST_S, LOST, "",
          makers.deaf_or_mute("host2"), mend=makers.free_links),
    Fault("deaf", HOST, "one way: what it is sent is lost", 255, HOST_LOST_S, LOST, "",
          makers.deaf_or_mute("host1"), mend=makers.free_links),
    Fault("lossy", HOST, "30 % of all packets are lost until five updates were done", 0, TCP_WAITS_S, "", "",
          makers.lose_packets, mend=makers.free_links, goes_on=True),
    Fault("power", HOST, "all of a host is killed (loss of power)", 255, HOST_LOST_S, LOST, "", makers.power_off,
          mend=makers.boot),

    Fault("slow_disk", DISK, "slow disk of rank 0's host: each fsync takes 2 s more", 0, NO_WAY, "", "",
          makers.slow_disk, makers.false_disk_and_clock, goes_on=True),
    Fault("full_disk", DISK, "the disk is full at a save", 1, TOLD_LATER_S, "No space left on device", "",
          makers.fill, makers.own_disk, makers.empty),
    Fault("read_only", DISK, "the disk becomes read-only", 1, TOLD_LATER_S, "Read-only file system", "",
          makers.read_only, makers.own_disk, makers.writable),
    Fault("writer", DISK, "SIGKILL of the process that writes a checkpoint", 1, TOLD_LATER_S, "killed by SIGKILL", "",
          makers.kill_writer, makers.false_disk_and_clock),
    Fault("clock", DISK, "the clock of a host jumps an hour ahead, then two back", 0, NO_WAY, "", "",
          makers.clock_jumps, makers.false_disk_and_clock, goes_on=True),

    Fault("launcher", LAUNCHER, "SIGKILL of the launcher", -9, SAVED_S, "", "", makers.kill_launcher),
    Fault("ctrl_c", LAUNCHER, "Ctrl-C", 130, SAVED_S, "SIGINT", "", makers.signal_launcher(signal.SIGINT)),
    Fault("terminal", LAUNCHER, "the terminal is closed (SIGHUP)", 129, SAVED_S, "SIGHUP", "",
          makers.signal_launcher(signal.SIGHUP)),
    Fault("agent", LAUNCHER, "SIGKILL of a host's agent", 255, ONE_ENDS_S, LOST, "", makers.kill_agent),
    Fault("session", LAUNCHER, "SIGKILL of the ssh session to a host", 255, ONE_ENDS_S, LOST, "",
          makers.kill_session),
    Fault("guard", LAUNCHER, "SIGKILL of the guard of the launcher's host", 255, ONE_ENDS_S, "host host1 failed", "",
          makers.kill_guard),
    Fault("agent_and_guard", LAUNCHER, "SIGKILL of a host's agent and its guard at once", 255, 2 * GRACE_S + 5, LOST,
          "", makers.kill_agent_and_guard),

    Fault("told_rank", TOLD, "preemption: SIGTERM to one rank", 85, SAVED_S, "SIGTERM", "told"),
    Fault("told_launcher", TOLD, "preemption: SIGTERM to the launcher", 85, SAVED_S, "SIGTERM", "",
          makers.signal_launcher(signal.SIGTERM)),
    Fault("told_usr1", TOLD, "preemption: SIGUSR1 to the launcher", 85, SAVED_S, "SIGUSR1", "",
          makers.signal_launcher(signal.SIGUSR1)),

    Fault("restart_killed", RESTART, "SIGKILL of a rank", 0, 40, FAILED, "killed", flags=("--max-restarts", "1"),
          goes_on=True, quick=True),
    Fault("restart_deadlock", RESTART, "a lock that is never released", 0, 40, HUNG, "deadlock",
          flags=("--max-restarts", "1", *SOON), goes_on=True),
    Fault("restart_cut", RESTART, "a host's link is cut for a while", 0, 60, "host2", "", makers.cut_and_restore,
          flags=("--max-restarts", "1"), goes_on=True),

    Fault("elastic_rank", ELASTIC, "SIGKILL of a rank, which is replaced", 0, 5, "lost: ended by SIGKILL", "",
          makers.is_replaced, flags=("--min-np", "1"), pace_s=0.3, goes_on=True),
    Fault("elastic_host", ELASTIC, "all of a host is killed", 0, LOST_S + 5, "host2 lost", "", makers.goes_on_alone,
          mend=makers.boot, flags=("--min-np", "1"), pace_s=0.2, goes_on=True),
    Fault("elastic_back", ELASTIC, "the same, and the host comes back", 0, 3 + 5, "host2 lost", "", makers.comes_back,
          mend=makers.boot, flags=("--min-np", "1", "--lost-after", "3"), pace_s=0.4, goes_on=True),
    Fault("elastic_twice", ELASTIC, "SIGKILL of a rank, and of another while the others meet", 0, 8,
          "lost: ended by SIGKILL", "", makers.dies_while_they_meet, flags=("--min-np", "1"), hosts="host1:1,host2:2",
          np=3, pace_s=0.2, goes_on=True),

    Fault("horovodrun", OTHERS, "horovodrun: SIGKILL of a rank", 1, 60, "", "killed", launcher="horovodrun"),
    Fault("horovodrun_deadlock", OTHERS, "horovodrun: a lock that is never released (`HVDTRAIN_HANG_S=5`)", 1, 60,
          HUNG, "deadlock", launcher="horovodrun"),
    Fault("mpirun", OTHERS, "mpirun: SIGKILL of a rank", 137, 60, "", "killed", launcher="mpirun"),
    Fault("mpirun_deadlock", OTHERS, "mpirun: a lock that is never released (`HVDTRAIN_HANG_S=5`)", 75, 60,
          HUNG, "deadlock", launcher="mpirun"),
]  # fmt: skip
