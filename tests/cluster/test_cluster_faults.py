"""What can happen to a job on two hosts, with limits set to LIMIT_S: it ends in time, with the right code, and nothing
is left. With the default limits, and many more faults: tests/cluster/faults.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster_hosts import Cluster, cluster
from harness import PROGRAMS
from pictures import write_folder

from hvdtrain.record.log import read_events

STEPS = PROGRAMS / "cluster" / "steps.py"
START_S = 120  # until ranks have imported their framework, on a busy machine
LIMIT_S = 4.0  # --lost-after and --stopped-after
GRACE_S = 2.0
BUSY_S = 5.0  # what a busy machine may add to a stated bound


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster(2) as c:
        yield c


@dataclass
class Launched:
    """A job in its course: one rank a host, of `steps.py` as a rule, started by `hvdtrain launch` on host1."""

    c: Cluster
    folder: Path
    process: subprocess.Popen[bytes]

    def steps(self, rank: int) -> int:
        """How many a rank has done; its file has its process id before that."""
        text = (self.folder / f"rank-{rank}").read_text() if (self.folder / f"rank-{rank}").exists() else "0 0"
        return int(text.split()[1])

    def wait_for_steps(self, more: int = 3) -> None:
        """Until both ranks have done some steps more."""
        wanted = [self.steps(rank) + more for rank in (0, 1)]
        self.wait_until(lambda: all(self.steps(rank) >= wanted[rank] for rank in (0, 1)), START_S)

    def wait_until(self, what: Callable[[], bool], timeout_s: float) -> float:
        """Until something holds that is told by no event; returns the seconds it took."""
        start = time.monotonic()
        while not what():
            assert self.process.poll() is None, f"the launcher has ended\n{self.text}"
            assert time.monotonic() - start < timeout_s, f"not after {timeout_s} s\n{self.text}"
            time.sleep(0.02)
        return time.monotonic() - start

    def end(self, timeout_s: float) -> int:
        """Return the exit code; nothing of the job may be left on any host."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {timeout_s} s; {self.c.running()}\n{self.text}") from None
        assert self.c.left_after(1) == [], self.text
        return code

    @property
    def text(self) -> str:
        return (self.folder / "output").read_text()

    def attempts(self) -> list[dict]:
        return json.loads((self.folder / "logs" / "launch.json").read_text())["attempts"]

    def finish(self) -> None:
        (self.folder / "finish").touch()


@pytest.fixture
def launch(hosts: Cluster, tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start a job; it is ended with the test, however that ends."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*flags: str, program: Sequence[str | Path] = ()) -> Launched:
        limits = ["--lost-after", f"{LIMIT_S}", "--stopped-after", f"{LIMIT_S}", "--grace", f"{GRACE_S}"]
        line = ["hvdtrain", "launch", "-np", "2", "-H", "host1:1,host2:1", "--log-dir", f"{tmp_path}/logs"]
        line += [*limits, *flags]
        program = program or [sys.executable, STEPS, tmp_path]
        with (tmp_path / "output").open("wb") as output:
            started.append(hosts.popen("host1", [*line, "--", *program], stdout=output, stderr=subprocess.STDOUT))
        return Launched(hosts, tmp_path, started[0])

    yield start
    hosts.end_all()
    for process in started:
        process.kill()
        process.wait()
    hosts.restore("host2")
    assert hosts.left_after(10) == []


@pytest.mark.slow
def test_a_rank_is_killed_and_training_goes_on_from_its_checkpoint(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    run_dir, epochs, pictures = tmp_path / "run", 3, write_folder(tmp_path / "pictures")
    flags = ["--model", "resnet18", "--data", pictures, "--image-size", "40", "--workers", "0", "--run-dir", run_dir]
    flags += ["--per-rank-batch", "2", "--epochs", str(epochs)]
    job = launch("--max-restarts", "1", program=[sys.executable, "-m", "hvdtrain.torch_resnet", *flags])
    job.wait_until(lambda: any((run_dir / "checkpoints").glob("epoch-*")), START_S)
    (rank,) = (process for process in job.c.pids("host2") if "hvdtrain.torch_resnet" in process.cmdline())
    rank.kill()
    assert job.end(START_S) == 0, job.text
    first, second = job.attempts()
    assert (first["exit_code"], first["failure"]["rank"]) == (128 + signal.SIGKILL, 1)
    assert "SIGKILL" in first["failure"]["why"] and second["exit_code"] == 0
    run = json.loads((run_dir / "run.json").read_text())
    assert run["status"] == "finished" and len(run["attempts"]) == 2
    resumed = re.search(r"resuming after (\d+) of (\d+) samples", job.text)
    assert resumed and 0 < int(resumed[1]) < int(resumed[2]), job.text
    done = [event["epoch"] for event in read_events(run_dir) if event["kind"] == "epoch"]
    assert len(done) <= epochs + 1, "at most one epoch is done again"
    # that of the epoch whose checkpoint it goes on from may have been lost with the rank that was killed, after that
    # checkpoint was written: most often the first one's
    last = int(resumed[1]) * epochs // int(resumed[2]) - 1
    assert {*done, last} == set(range(epochs)), (done, resumed[0])


def test_a_cut_host_ends_the_job_on_both_sides_and_it_goes_on_when_the_host_is_back(
    launch: Callable[..., Launched],
) -> None:
    job = launch("--max-restarts", "1")
    job.wait_for_steps()
    job.c.cut("host2")
    alone = job.wait_until(lambda: not job.c.pids("host2"), 60)
    assert alone < LIMIT_S + GRACE_S + 2 + BUSY_S, "a host that hears nothing ends its ranks by itself"
    job.wait_until(lambda: bool(job.attempts()), 60)
    assert job.attempts()[0]["exit_code"] == 255
    job.c.restore("host2")
    job.wait_until(lambda: "restarts 1" in job.text, START_S)
    job.finish()
    assert job.end(60) == 0
    first, second = job.attempts()
    assert (first["failure"]["rank"], first["failure"]["host"], second["exit_code"]) == (None, "host2", 0)
