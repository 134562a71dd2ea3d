"""Runs one job on many hosts: an agent on each, their ranks started together, watched, and ended together.

`hvdtrain launch`, `doctor` and `verify` start ranks with `run`. It returns when no process of the job remains on the
hosts that it can still reach; on the others the agent ends the job (hvdtrain.cluster.launch.agent).
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from hvdtrain.cluster.launch.agents import Agents, OnLine
from hvdtrain.cluster.launch.elastic import ElasticRunning
from hvdtrain.cluster.launch.failures import Failure
from hvdtrain.cluster.launch.job import Job, JobPlan
from hvdtrain.cluster.launch.rank import PASSED_ON
from hvdtrain.cluster.launch.running import ENDING, IGNORED, Heard, Interrupted, Outcome, Running, plan_of


def run(
    job: Job,
    *,
    on_line: OnLine | None = None,
    on_plan: Callable[[JobPlan], None] | None = None,
    heard: Heard | None = None,
) -> Outcome:
    """Runs a job to its end.

    SIGINT, SIGTERM and SIGHUP end the job: the ranks get the signal, and SIGKILL after the grace period. A second one
    kills at once. After SIGTERM the ranks may use the grace period to save. Ranks that handle SIGUSR1 and SIGUSR2 get
    them. SIGTSTP (Ctrl-Z) does nothing. Call it in the main thread only, which alone receives signals.

    Args:
        job: what to run.
        on_line: gets each line a rank writes: rank, "stdout", "stderr" or "result" (`Job.given`), line. A separate
            thread calls it; when it blocks, so do the ranks. Its exception ends the job and is raised here.
        on_plan: gets the plan before the ranks start.
        heard: gets the events of the running job.

    Raises:
        ConfigError: fewer slots than ranks; no network that the hosts share.
        LauncherError: hosts that cannot be reached, or that lack what the job needs; each is named.
    """
    with _signals() as received:
        agents = Agents(job, on_line)
        running = (Running if job.elastic is None else ElasticRunning)(job, agents, received, heard or Heard())
        try:
            with contextlib.suppress(Interrupted):
                running.run(on_plan)
        finally:
            running.close()
    if agents.failed is not None:
        raise agents.failed
    return running.outcome


def result_of(job: Job, mark: str) -> tuple[dict[str, Any] | None, Failure | None]:
    """Runs a job whose rank 0 prints a result behind a mark; returns it (see `result_in`), and what made the job end.

    Raises what `run` raises, and if the user ended the job KeyboardInterrupt, or what the signal's handler raises.
    """
    lines: list[str] = []

    def take(rank: int, stream: str, line: str) -> None:
        if rank == 0:
            lines.append(line)

    outcome = run(job, on_line=take)
    if outcome.interrupted is not None:
        signal.raise_signal(outcome.interrupted)  # its handler is the caller's again: SIGTERM is no Ctrl-C
        raise KeyboardInterrupt
    return result_in(lines, mark), outcome.failed


def result_in(lines: Sequence[str], mark: str) -> dict[str, Any] | None:
    """Returns the last JSON that a rank printed behind a mark; None: it printed none."""
    found = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
    return json.loads(found[-1]) if found else None


def look(job: Job) -> JobPlan:
    """Returns the plan for a job: asks the hosts, and starts no ranks. Raises what `run` raises."""
    agents = Agents(job, None)
    try:
        agents.meet(lambda: None)
        return plan_of(job, agents)
    finally:
        agents.close(wait_s=2.0)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects the signals that end a job or are passed on, instead of what they do otherwise."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (*ENDING, *PASSED_ON, IGNORED):
            # `nohup`, or a shell that starts in the background: what is ignored stays so
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, note)
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # then the exit codes of processes are lost
            before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
