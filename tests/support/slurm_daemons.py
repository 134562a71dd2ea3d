"""A Slurm of one's own on this machine: munged, slurmctld and slurmd with their own ports, key, state, configuration.

Nothing of the machine's Slurm, if it has one, is read or touched. The daemons and all jobs live in a PID namespace
where that is allowed, which ends with the test process, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from harness import REPOSITORY, clean_environment, kill_all, processes_of
from starter_process import TOKEN

TEMPLATE = REPOSITORY / "scripts" / "slurm.sbatch"
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "setpriv")
# `python` and `hvdtrain` are this environment's, in jobs too
_PATH = os.pathsep.join((str(Path(sys.executable).parent), "/usr/sbin", "/sbin", os.environ.get("PATH", "")))
# Two partitions of the one node: what waits in "urgent" preempts what runs in "normal", which is requeued.
_CONFIGURATION = """\
ClusterName=hvdtrain-test
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
TmpFS={folder}/tmp
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={node} NodeAddr=127.0.0.1 Port={node_port} CPUs=2 State=UNKNOWN
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


class Slurm:
    """A running Slurm; `environment` is what its commands and jobs get."""

    def __init__(self, folder: Path, token: str, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.token = token
        self.environment = environment

    def call(self, *command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        """Runs one of Slurm's commands; returns what it printed, fails the test with it if it fails."""
        done = subprocess.run(
            [str(part) for part in command], env={**self.environment, **(env or {})}, cwd=cwd or self.folder,
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def submit(self, cwd: Path, *command: str | Path, flags: tuple[str, ...] = (), **env: str) -> Job:
        """Submits the template with a command for its ranks; returns the job."""
        number = self.call("sbatch", "--parsable", *flags, TEMPLATE, *command, cwd=cwd, env=env).strip()
        return Job(self, number, cwd / f"slurm-{number}.log")

    def logs(self) -> str:
        """The ends of the daemons' logs, for messages."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-15:]) for log in logs)

    def clear(self) -> None:
        """Cancels every job and waits until nothing of theirs runs."""
        self.call("scancel", "--me", "--quiet")
        self.wait(lambda: not self.jobs_processes(), 20, lambda: str(self.jobs_processes()))

    def jobs_processes(self) -> list[str]:
        """Command lines of what runs for jobs: what has our token and a job's number."""
        found = []
        for process in processes_of(self.token):
            with contextlib.suppress(psutil.Error):  # gone meanwhile
                if process.environ().get("SLURM_JOB_ID"):
                    found.append(" ".join(process.cmdline())[:100])
        return found

    def wait(self, done: Callable[[], bool], limit_s: float, told: Callable[[], str] = str) -> None:
        """Polls until `done`; fails the test after `limit_s` with what `told` says and the daemons' logs."""
        deadline = time.monotonic() + limit_s
        while not done():
            assert time.monotonic() < deadline, f"not within {limit_s} s: {told()}\n{self.logs()}"
            time.sleep(0.1)


@dataclass(frozen=True)
class Job:
    """A job of the template; `log` is its output."""

    slurm: Slurm
    number: str
    log: Path

    def facts(self) -> dict[str, str]:
        """What `scontrol show job` says, name to value."""
        words = self.slurm.call("scontrol", "show", "job", self.number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    @property
    def state(self) -> str:
        return self.facts()["JobState"]

    def wait_for(self, *states: str, limit_s: float = 30) -> None:
        self.slurm.wait(lambda: self.state in states, limit_s, self.described)

    def wait_for_text(self, text: str, limit_s: float = 30) -> None:
        self.slurm.wait(lambda: text in self.text(), limit_s, self.described)

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def described(self) -> str:
        return f"job {self.number}: {self.facts()}\n{self.text()}"

    def start_now(self) -> None:
        """Ends the two minutes that Slurm lets pass before it starts a requeued job again.

        Some seconds remain: slurmd tells a requeued job from the killed one by their times, in whole seconds.
        """
        self.wait_for("PENDING")
        self.slurm.call("scontrol", "update", f"JobId={self.number}", "StartTime=now+3seconds")


@contextlib.contextmanager
def slurm() -> Iterator[Slurm]:
    """Starts the daemons; everything is gone when the block ends. Skips the test where Slurm is not installed."""
    missing = [name for name in NEEDED if shutil.which(name, path=_PATH) is None]
    if missing:
        pytest.skip(f"no Slurm on this machine: {', '.join(missing)} missing (apt-get install slurmctld slurmd munge)")
    token = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="hvdtrain-slurm-") as name:
        folder = Path(name)
        # waiting ranks of Open MPI spin; on a busy machine that starves the ones that compute
        calm = {"OMPI_MCA_mpi_yield_when_idle": "1"}
        environment = clean_environment({TOKEN: token, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf"), **calm})
        _configure(folder)
        started = subprocess.Popen(
            [*_namespace(), "sh", "-c", _DAEMONS, "daemons", str(folder)], env=environment, cwd=folder,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=(folder / "start.log").open("wb"),
            start_new_session=True,
        )  # fmt: skip
        running = Slurm(folder, token, environment)
        try:
            running.wait(lambda: _ready(running), 20)
            yield running
        finally:
            kill_all(token, grace_s=1)
            started.kill()
            started.wait()


# munged refuses sockets and keys that others could reach; `wait` so that the namespace lives as long as its daemons
_DAEMONS = """
munged --foreground --force --socket="$1/munge/socket" --key-file="$1/munge/key" --log-file="$1/munge/log" \
  --pid-file="$1/munge/pid" --seed-file="$1/munge/seed" >"$1/munged.log" 2>&1 &
slurmctld -D -i >"$1/slurmctld.log" 2>&1 &
slurmd -D >"$1/slurmd.log" 2>&1 &
wait
"""


def _namespace() -> list[str]:
    """The start of a command whose whole tree ends with this process: where allowed, by a PID namespace of its own."""
    die_with_us = ["setpriv", "--pdeathsig", "KILL"]
    namespace = ["unshare", "--pid", "--mount-proc", "--fork", "--kill-child=KILL"]
    allowed = subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode == 0
    return [*die_with_us, *namespace] if allowed else die_with_us


def _configure(folder: Path) -> None:
    for part in ("munge", "state", "spool", "tmp"):
        (folder / part).mkdir(mode=0o700)
    folder.chmod(0o755)
    (folder / "munge" / "key").write_bytes(os.urandom(32))
    (folder / "munge" / "key").chmod(0o400)
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        ports = {"controller_port": one.getsockname()[1], "node_port": two.getsockname()[1]}
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    node = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, user=user, node=node, **ports))


def _ready(running: Slurm) -> bool:
    told = subprocess.run(
        ["scontrol", "show", "node"], env=running.environment, capture_output=True, text=True, timeout=30, check=False
    )
    return "State=IDLE" in told.stdout
