"""The frame of every benchmark: start, progress, result; and jobs that take turns.

All jobs are started, and only one at a time runs; the others are stopped by signal.
So every arm is measured again and again within the same minutes, and a machine that is slow for a while is slow for
all of them; and no arm pays for the threads of another (Horovod's wake up every millisecond). Results are paired by
round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hvdtrain.core import flags, variables
from hvdtrain.core.errors import ConfigError, HvdtrainError, LauncherError, build_horovod_command, install_command
from hvdtrain.core.launchers import detect
from hvdtrain.record import stats

CLOCKS = ("wall", "cpu")  # of all threads of a process, which a busy machine disturbs less
MEMORY = "memory"  # the most bytes so far, where a job tells
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")}
ONE_THREAD["OMP_WAIT_POLICY"] = "PASSIVE"
Turns = Mapping[str, tuple[str, dict[str, Any]]]  # by name: the job, and its order
END_WITHIN_S = 15.0
# ranks that were stopped for minutes find that their peers have been silent for so long
PATIENCE = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3600", "HOROVOD_STALL_CHECK_DISABLE": "1"}
# Open MPI refuses root without both variables; the jobs are our own
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def begin(bench: str, args: argparse.Namespace, rule: str) -> dict[str, Any]:
    """Returns a result without figures yet.

    Raises:
        ConfigError: started by a launcher (which breaks `rule`), or no place for the result.
    """
    if detect(os.environ).launcher != "none":
        raise ConfigError(rule, "started by a launcher", f"hvdtrain bench {bench}")
    flags.check_file("--out", args.out, parents=True)  # minutes of measuring must not end in an error about it
    return {
        "format": 1, "bench": bench, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "machine": stats.machine(),
        "settings": {key: value for key, value in vars(args).items() if isinstance(value, (int, float, str, list))},
    }  # fmt: skip


def progress(text: str) -> None:
    """Prints to standard error, so that the table can be piped."""
    print(text, file=sys.stderr, flush=True)


def finish(args: argparse.Namespace, result: dict[str, Any], report: Callable[[Mapping[str, Any]], str]) -> int:
    """Writes every sample, prints the tables; returns 0."""
    result["load_after"] = round(os.getloadavg()[0], 2)
    flags.write_file("--out", args.out, json.dumps(result, indent=1) + "\n")
    print(report(result))
    print(f"every sample: {args.out}", flush=True)
    return 0


def measured_on(result: Mapping[str, Any]) -> str:
    """Returns the machine, and what else it had to do."""
    machine = result["machine"]
    return (
        f"{machine['processor']}, {machine['cores_usable']} cores, load {machine['load_1min']} before,"
        f" {result['load_after']} after"
    )


def heading(what: str, result: Mapping[str, Any]) -> str:
    """Returns what was measured, on which machine, with which versions: a line each."""
    versions = " ".join(f"{name} {version}" for name, version in result["machine"]["versions"].items())
    return "\n".join(filter(None, [what, measured_on(result), versions]))


# ---- jobs that take turns


@dataclass
class Arm:
    """A job: its command, and a connection to each of its ranks, by rank."""

    name: str
    process: subprocess.Popen[bytes]
    log: Any
    ranks: dict[int, Connection] = field(default_factory=dict)
    # not numbers, which another process may have by the time a signal is sent
    processes: dict[int, int] = field(default_factory=dict)

    def tail(self) -> str:
        """The end of what the job printed."""
        self.log.seek(0)
        return "\n".join(self.log.read().decode(errors="replace").strip().splitlines()[-25:])

    def send_signal(self, sign: signal.Signals) -> None:
        for descriptor in self.processes.values():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                signal.pidfd_send_signal(descriptor, sign)


class InterleavedJobs:
    """Starts jobs and lets one at a time work; use it as a context manager: no process outlives it.

    Attributes:
        ready_s, turn_s: how long a job may take until it is ready, and for a turn.
    """

    ready_s, turn_s = 180.0, 300.0

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._arms: dict[str, Arm] = {}

    def __enter__(self) -> InterleavedJobs:
        self._folder = tempfile.TemporaryDirectory(prefix="hvdtrain-turns-")
        return self

    def __exit__(self, *_: object) -> None:
        for arm in self._arms.values():
            arm.send_signal(signal.SIGCONT)
        for arm in self._arms.values():
            _end(arm)
        self._folder.cleanup()

    def end(self, name: str) -> int | None:
        """Ends a job, before the others; returns its exit code, None if there is no such job."""
        if (arm := self._arms.pop(name, None)) is None:
            return None
        arm.send_signal(signal.SIGCONT)
        _end(arm)
        return arm.process.returncode

    def start(
        self, name: str, command: Sequence[str], ranks: int, environ: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Starts a job and waits until its ranks are ready for their first turn; then stops it.

        Args:
            environ: what it alone gets.

        Raises:
            HvdtrainError: it ended, or was not ready in time; with the end of its output.
        """
        key = secrets.token_hex(16)
        address = str(Path(self._folder.name) / key[:8])
        with Listener(address, "AF_UNIX", authkey=key.encode()) as listener:
            environment = (
                self._environment
                | PATIENCE
                | AS_ROOT
                | dict(environ)
                | {variables.TURNS_ADDRESS: str(listener.address), variables.TURNS_KEY: key}
            )
            log = (Path(self._folder.name) / f"{name}.log").open("w+b")
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
            arm = self._arms[name] = Arm(name, process, log)
            deadline = time.monotonic() + self.ready_s
            # accept() has no time limit of its own: the socket inside has
            listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
            while len(arm.ranks) < ranks:
                try:
                    connection = listener.accept()
                except TimeoutError:
                    self._check(arm, deadline)
                    continue
                rank, pid = self._receive(arm, connection, deadline)
                arm.ranks[rank], arm.processes[rank] = connection, os.pidfd_open(pid)
        arm.send_signal(signal.SIGSTOP)

    def turn(self, name: str, **order: Any) -> list[Any]:
        """Lets one job work: sends every rank the same order; returns their answers, in rank order."""
        arm = self._arms[name]
        deadline = time.monotonic() + self.turn_s
        arm.send_signal(signal.SIGCONT)
        for connection in arm.ranks.values():
            connection.send(order)
        answers = [self._receive(arm, arm.ranks[rank], deadline) for rank in sorted(arm.ranks)]
        arm.send_signal(signal.SIGSTOP)
        return answers

    def rounds(self, turns: Turns, count: int, what: str) -> dict[str, dict[str, list[float]]]:
        """Lets every turn come once a round, another one first each time; reports progress as `what`.

        Returns the seconds of each turn by clock, round by round: those of its slowest rank; of its largest the memory.
        """
        found: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in turns} for kind in (*CLOCKS, MEMORY)}
        for number in range(count):
            progress(f"{what}: round {number + 1} of {count}")
            for name in stats.rotated(turns, number):
                job, order = turns[name]
                answers = self.turn(job, **order)
                for kind, samples in found.items():
                    samples[name].append(max(answer.get(kind, 0.0) for answer in answers))
        return found

    def _receive(self, arm: Arm, connection: Connection, deadline: float) -> Any:
        while not connection.poll(1.0):
            self._check(arm, deadline)
        try:
            return connection.recv()
        except EOFError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                arm.process.wait(END_WITHIN_S)  # it may print more
            raise _failed(arm, "one of its ranks ended") from None

    def _check(self, arm: Arm, deadline: float) -> None:
        if arm.process.poll() is not None:
            raise _failed(arm, f"it ended with {arm.process.returncode}")
        if time.monotonic() > deadline:
            raise _failed(arm, "it took too long")


def pin(local_rank: int, count: int = 1) -> None:
    """Gives this process cores of its own, as far as there are so many."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[(local_rank * count + number) % len(cores)] for number in range(count)})


def launched(ranks: int, launcher: str) -> list[str]:
    """Returns the prefix of a job's command: empty for one rank, else a launcher of its ranks on this machine.

    Raises:
        LauncherError: it is not installed.
    """
    if ranks == 1:
        return []
    beside = Path(sys.executable).parent / launcher
    found = str(beside) if beside.exists() else shutil.which(launcher)
    if found is None:
        remedies = {"horovodrun": build_horovod_command(), "torchrun": install_command("torch")}
        remedy = f"{remedies.get(launcher, 'install Open MPI')}, or --ranks 1"
        raise LauncherError(f"{ranks} ranks cannot start without {launcher}", "not found on PATH", remedy)
    return [found, *{
        "horovodrun": ["--gloo", "-np", str(ranks), "-H", f"localhost:{ranks}"],
        "mpirun": ["-np", str(ranks), "--oversubscribe", "--bind-to", "none"],
        "torchrun": ["--standalone", f"--nproc-per-node={ranks}", "--no-python"],
    }[launcher]]  # fmt: skip


def _failed(arm: Arm, what: str) -> HvdtrainError:
    return HvdtrainError(f"a benchmark's job must end well: {arm.name}", f"{what}\n{arm.tail()}")


def shortened(error: HvdtrainError) -> str:
    """Returns how a job ended, and the last line that names the reason, without the launcher's mark."""
    lines = [re.sub(r"^\[\d+\]<\w+>: ?", "", line).strip() for line in error.received.splitlines()]
    first, *others = [line for line in lines if line] or [error.rule]
    telling = [its for its in others if ("Error" in its and "ChildFailed" not in its) or ": rank " in its] or others[
        -1:
    ]
    return ": ".join([first, *telling[-1:]])[:300]


def _end(arm: Arm) -> None:
    """Lets a job end; after a while makes it. Its ranks may have left its session, or lost their parent."""
    for connection in arm.ranks.values():
        connection.close()  # a rank that waits for its next turn ends
    for sign in (None, signal.SIGTERM, signal.SIGKILL):
        if sign is not None:
            arm.send_signal(sign)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(arm.process.pid, sign)
        # a job without a rank that is ready waits for nothing that could end
        if _ended_within(arm, END_WITHIN_S if sign or arm.ranks else 0.0):
            break
    for descriptor in arm.processes.values():
        os.close(descriptor)
    arm.log.close()


def _ended_within(arm: Arm, seconds: float) -> bool:
    """Returns True if the job and all its ranks end within so many seconds; waits for them."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(subprocess.TimeoutExpired):
        arm.process.wait(seconds)
    for descriptor in arm.processes.values():  # readable once the process has ended
        select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
    gone = [bool(select.select([descriptor], [], [], 0)[0]) for descriptor in arm.processes.values()]
    return arm.process.poll() is not None and all(gone)
