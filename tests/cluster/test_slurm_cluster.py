"""The batch script under a real Slurm: 2 tasks, preempted, at its time limit, cancelled, with a rank that fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from built_in import few_digits
from harness import PROGRAMS, clean_environment
from slurm_daemons import TEMPLATE, Job, Slurm, slurm

EPOCHS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with slurm() as running:
        yield running


@pytest.fixture
def queue(cluster: Slurm) -> Iterator[Slurm]:
    """An empty queue, and nothing running when the test ends."""
    yield cluster
    cluster.clear()


# ---- the script, without Slurm


@pytest.mark.parametrize(
    ("arguments", "starter", "told"), [((), "srun", "usage: sbatch"), (("true",), "mpirun", "srun or launch")]
)
def test_wrong_use_is_told(arguments: tuple[str, ...], starter: str, told: str) -> None:
    env = clean_environment(
        {"HVDTRAIN_STARTER": starter, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a", "SLURM_NTASKS": "2"}
    )
    done = subprocess.run(["bash", TEMPLATE, *arguments], env=env, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and told in done.stderr


@pytest.mark.parametrize(("starts", "code"), [(True, 0), (False, 1)])
def test_an_srun_that_starts_nothing_is_no_success(starts: bool, code: int, tmp_path: Path) -> None:
    """srun of Slurm 22.05 ends with 0 after "task 0 launch failed: Unspecified error"."""
    srun = tmp_path / "srun"
    flags = "while [ $# -gt 0 ] && [ $1 != sh ]; do shift; done\n"
    srun.write_text(f"#!/bin/bash\n{flags}" + 'SLURM_PROCID=0 "$@"\n' * starts)
    srun.chmod(0o755)
    job = {"HVDTRAIN_STARTER": "srun", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a", "SLURM_NTASKS": "2"}
    env = clean_environment(job | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)})
    done = subprocess.run(
        ["bash", TEMPLATE, "echo", "a rank", "$(no)"], env=env, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == code, done.stderr
    assert ("\na rank $(no)\n" in done.stdout) == starts and ("no rank was started" in done.stderr) != starts
    assert os.listdir(tmp_path) == ["srun"]


SAVES = "trap 'echo saved >>log; exit 0' USR1; echo $$ >pid; while :; do sleep 0.1; done"


@pytest.mark.parametrize("asks", [True, False])
def test_ranks_are_asked_to_save_before_the_requeue(asks: bool, tmp_path: Path, limit) -> None:
    """The commands of Slurm are stand-ins that note what they are asked for."""
    flags = "while [ $# -gt 0 ] && [ $1 != sh ]; do [ $1 = --export=ALL ] && echo all >>log; shift; done\n"
    stubs = {
        "srun": f'{flags}SLURM_PROCID=0 exec "$@"',
        "scancel": 'echo "scancel $*" >>log; kill -USR1 $(cat pid)',
        "scontrol": 'echo "$*" >>log; kill -KILL $(cat pid)',
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"HVDTRAIN_STARTER": "srun", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a", "SLURM_NTASKS": "1"}
    job |= {} if asks else {"HVDTRAIN_SAVE_SIGNAL": "none"}
    env = clean_environment(job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    script = subprocess.Popen(["bash", TEMPLATE, "bash", "-c", SAVES], cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        script.send_signal(signal.SIGUSR1)
        script.wait(20)
    finally:
        script.kill()
        script.wait()
    saves = ["scancel --signal=USR1 7", "saved"] if asks else []
    assert (tmp_path / "log").read_text().splitlines() == ["all", *saves, "requeue 7"]
    limit("C14", "the time limit of a Slurm job", mended="ranks are asked to save first, then it is requeued")


# ---- under Slurm


@pytest.fixture(scope="module")
def few_pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return few_digits(tmp_path_factory.mktemp("data"))


def epochs_in(run_dir: Path) -> list[list[int]]:
    """Epochs that ended, by attempt."""
    attempts: list[list[int]] = []
    path = run_dir / "events.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            event: dict[str, Any] = json.loads(line)
        except ValueError:
            continue  # it is being written
        if event["kind"] in ("start", "resume"):
            attempts.append([])
        elif event["kind"] == "epoch":
            attempts[-1].append(event["epoch"])
    return attempts


@pytest.mark.thorough
@pytest.mark.slow
def test_preempted_it_is_requeued_and_resumes(queue: Slurm, few_pictures: Path, tmp_path: Path) -> None:
    command: list[str | Path] = ["python", "-m", "hvdtrain.keras_mnist", "--data", few_pictures, "--run-dir", "run"]
    job = queue.submit(tmp_path, *command, "--epochs", str(EPOCHS), "--per-rank-batch", "32")
    run_dir = tmp_path / "run"
    queue.wait(lambda: sum(map(len, epochs_in(run_dir))) >= 2 or job.state == "FAILED", 150, job.described)
    assert job.state == "RUNNING", job.described()
    queue.call("sbatch", "--partition=urgent", "--ntasks=2", "--output=/dev/null", "--wrap", "true")
    job.start_now()
    job.wait_for("COMPLETED", limit_s=200)

    run = json.loads((run_dir / "run.json").read_text())
    assert run["status"] == "finished" and run["launcher"] == "srun" and run["world"]["size"] == 2
    assert [attempt["job"] for attempt in run["attempts"]] == [f"slurm-hvdtrain-test-{job.number}"] * 2
    before, after = epochs_in(run_dir)
    saved = re.search(rf"resuming after epoch (\d+) of {EPOCHS}", job.text())
    assert saved is not None, job.described()
    # the epochs go on after the last checkpoint: it is written just after the epoch is noted, or the run ended between
    assert before == list(range(len(before))) and 2 <= len(before) <= int(saved[1]) + 1 <= EPOCHS
    assert after == list(range(int(saved[1]), EPOCHS))
    assert "DUE TO PREEMPTION" in job.text() and "restart 0, by srun" in job.text() and "restart 1" in job.text()


WAITING = """\
import os, pathlib, sys, time
rank = os.environ.get("SLURM_PROCID", os.environ.get("HOROVOD_RANK"))
print("rank", rank, "restart", os.environ.get("SLURM_RESTART_COUNT", "0"), flush=True)
deadline = time.monotonic() + 60
while not pathlib.Path("go").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
sys.exit(int(pathlib.Path("go").read_text()) if rank == "1" else 0)
"""


@pytest.fixture
def waiting(tmp_path: Path) -> Path:
    """A program whose ranks wait for a file; rank 1 ends with the exit code that is in it."""
    (tmp_path / "waiting.py").write_text(WAITING)
    return tmp_path


def both_wait(job: Job, *, restart: int) -> None:
    for rank in (0, 1):
        job.wait_for_text(f"rank {rank} restart {restart}")


@pytest.mark.thorough
def test_at_its_time_limit_it_requeues_itself(queue: Slurm, waiting: Path) -> None:
    job = queue.submit(waiting, "python", "waiting.py")
    both_wait(job, restart=0)
    queue.call("scancel", "--batch", "--signal=USR1", job.number)  # what --signal=B:USR1@120 does in time
    job.start_now()
    both_wait(job, restart=1)
    (waiting / "go").write_text("0")
    job.wait_for("COMPLETED")
    assert "time limit, requeued" in job.text()


def test_at_its_time_limit_it_requeues_itself_so_often_only(queue: Slurm, waiting: Path) -> None:
    job = queue.submit(waiting, "python", "waiting.py", HVDTRAIN_MAX_RESTARTS="0")
    both_wait(job, restart=0)
    queue.call("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for_text("not again")
    (waiting / "go").write_text("0")
    job.wait_for("COMPLETED")  # the ranks were left alone
    assert job.facts()["Restarts"] == "0"


def test_cancelled_it_does_not_come_back(queue: Slurm, waiting: Path) -> None:
    job = queue.submit(waiting, "python", "waiting.py")
    both_wait(job, restart=0)
    queue.call("scancel", job.number)
    job.wait_for("CANCELLED")
    queue.wait(lambda: not queue.jobs_processes(), 15, lambda: str(queue.jobs_processes()))
    assert job.facts()["Restarts"] == "0" and job.state == "CANCELLED"


def test_a_rank_that_fails_ends_the_job(queue: Slurm, waiting: Path) -> None:
    (waiting / "waiting.py").write_text(WAITING.replace("else 0)", "else time.sleep(60))"))
    (waiting / "go").write_text("7")
    job = queue.submit(waiting, "python", "waiting.py")
    job.wait_for("FAILED")
    # srun ends with the largest code of all, which is that of a rank that it ended (128 + 15)
    assert "task 1: Exited with exit code 7" in job.text() and job.facts()["ExitCode"] == "143:0", job.described()


RANKS = """\
import os, sys
from hvdtrain.core.launchers import detect
me = detect(os.environ)
print("launched", me.launcher, me.rank, "of", me.size, "on", me.node, "job", os.environ["HVDTRAIN_JOB"], flush=True)
sys.exit(7 if me.rank == 1 and "fail" in sys.argv else 0)
"""


def test_without_pmix_the_script_starts_ranks_by_hvdtrain_launch(queue: Slurm, tmp_path: Path) -> None:
    """Hosts and ranks are those of the job; the job ends with the code of the rank that failed."""
    (tmp_path / "ranks.py").write_text(RANKS)
    job = queue.submit(tmp_path, "python", "ranks.py", "fail", HVDTRAIN_STARTER="launch")
    job.wait_for("FAILED", limit_s=60)
    for rank in (0, 1):
        assert f"launched horovodrun {rank} of 2 on 0 job slurm-hvdtrain-test-{job.number}" in job.text(), (
            job.described()
        )
    assert job.facts()["ExitCode"] == "7:0", job.described()


def test_a_program_trains_on_the_ranks_of_srun(queue: Slurm, tmp_path: Path) -> None:
    case = "case_training_equals_one_process"
    job = queue.submit(tmp_path, "python", PROGRAMS / "torch/engines.py", "worlds.json", "auto", case)
    job.wait_for("COMPLETED", limit_s=120)
    assert f"passed {case}" in job.text(), job.described()
    worlds = json.loads((tmp_path / "worlds.json").read_text())
    assert worlds == [[rank, 2, rank, 2, 0, "horovod", "srun"] for rank in (0, 1)]


@pytest.mark.thorough
@pytest.mark.parametrize("program", ["lightning/as_written", "lightning/fabric_loops", "huggingface/as_written"])
def test_integrations_find_the_ranks_of_srun(queue: Slurm, tmp_path: Path, program: str) -> None:
    case = "case_a_plain_loop" if "fabric" in program else "case_classification_with_an_uneven_end"
    job = queue.submit(tmp_path, "python", PROGRAMS / f"{program}.py", "auto", case)
    job.wait_for("COMPLETED", limit_s=120)
    assert f"passed {case}" in job.text() and "averaging proven: 2 ranks" in job.text(), job.described()
