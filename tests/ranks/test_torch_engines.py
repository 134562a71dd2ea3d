"""Every engine of the PyTorch adapter, on real ranks, through the protocol they share; and how their ranks meet."""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch_cases
from harness import PROGRAMS, Result, run_ranks
from limits import Limit
from passing import verdict_on

FOLDER = PROGRAMS / "torch"
TRAINING = "case_training_equals_one_process"


def job(engine: str, launcher: str, folder: Path, *cases: str, begin: str = "") -> tuple[Result, list[list[Any]]]:
    """Runs all cases on two ranks, or those named, after what beginning.py arranges; returns the ranks' worlds."""
    out = folder / f"{engine}.json"
    program = [str(FOLDER / "engines.py"), str(out), engine, *cases]
    if begin:
        program = [str(FOLDER / "beginning.py"), begin, *program]
    done = run_ranks(program, 2, launcher=launcher, timeout_s=120)
    assert out.exists(), done.text
    return done, json.loads(out.read_text())


def quiet(done: Result) -> bool:
    """Whether ranks printed what the program prints, and nothing else."""
    lines = {line for text in done.ranks_output.values() for line in text.splitlines()}
    return not any(done.ranks_error.values()) and all(line == "done" or line.startswith("passed ") for line in lines)


@pytest.fixture(scope="module", params=["ddp", pytest.param("deepspeed", marks=pytest.mark.thorough)])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Result, list[Any]]:
    return request.param, *job(request.param, "forked torchrun", tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("case", torch_cases.names("engines.py"))
def test_two_ranks(case: str, both: tuple[str, Result, list[Any]]) -> None:
    assert case in torch_cases.passed(both[1].out), both[1].text


def test_the_world(both: tuple[str, Result, list[Any]]) -> None:
    engine, done, worlds = both
    assert quiet(done.check()), done.text
    assert worlds == [[rank, 2, rank, 2, 0, engine, "torchrun"] for rank in (0, 1)]


JOBS = itertools.count()


def cluster(kind: str) -> list[dict[str, str]]:
    """What Slurm, or OpenPAI with one process a task, sets for the two ranks of a job, both on this machine."""
    if kind == "srun":
        job = f"{os.getpid()}{next(JOBS)}"  # of its own, as its port comes from it
        return [
            {"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": rank,
             "SLURM_LOCALID": rank, "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2",
             "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_NODELIST": "nobody[1-2]"}
            for rank in "01"
        ]  # fmt: skip
    with socket.socket() as probe:  # the kernel gives out ports in turn: this one stays free for a while
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    return [
        {"PAI_TASK_INDEX": rank, "PAI_CURRENT_TASK_ROLE_NAME": "worker", "PAI_TASK_ROLE_TASK_COUNT_worker": "2",
         "PAI_HOST_IP_worker_0": "127.0.0.1", "PAI_HOST_IP_worker_1": "127.0.0.1",
         "PAI_PORT_LIST_worker_0_SynPort": port}
        for rank in "01"
    ]  # fmt: skip


def spawn(variables: list[dict[str, str]], *program: object) -> Result:
    command: list[str | Path] = [FOLDER / "spawn.py", json.dumps(variables), *map(str, program)]
    return run_ranks(command, 1, timeout_s=120)


@pytest.mark.parametrize(
    ("kind", "engine"), [("srun", "ddp"), pytest.param("openpai", "auto", marks=pytest.mark.thorough)]
)
def test_clusters_variables_make_a_world(kind: str, engine: str, tmp_path: Path) -> None:
    """Two processes that have nothing but what Slurm or OpenPAI (one process a task) would have set."""
    out = tmp_path / "out.json"
    variables = cluster(kind)
    spawn(variables, FOLDER / "engines.py", out, engine, TRAINING).check()
    local = [(0, 2), (1, 2)] if kind == "srun" else [(0, 1), (0, 1)]
    assert json.loads(out.read_text()) == [[rank, 2, *local[rank], 0, "ddp", kind] for rank in (0, 1)]


@pytest.mark.parametrize(
    ("launcher", "how"),
    [("forked torchrun", ["fork"]), pytest.param("torchrun --max-restarts=1", [], marks=pytest.mark.thorough)],
)
def test_a_ddp_job_comes_up_in_every_attempt(launcher: str, how: list[str], tmp_path: Path, limit: Limit) -> None:
    """torchrun's agent keeps its store: ranks must not meet in what an earlier attempt left there."""
    out = tmp_path / "attempt"
    run_ranks([FOLDER / "restarted.py", out, *how], 2, launcher=launcher, timeout_s=120).check()
    assert out.read_text() == "1"
    limit("T35", "torchrun --max-restarts=1: a ddp job that fails once", mended="each attempt comes up")


@pytest.mark.thorough
@pytest.mark.parametrize(("launcher", "begin"), [("horovodrun", "taken"), ("mpirun", "")])
def test_nothing_says_where_to_meet(launcher: str, begin: str, tmp_path: Path) -> None:
    """A free port is sent through the launcher's server; under mpirun it is one of the job's name."""
    done, worlds = job("ddp", launcher, tmp_path, TRAINING, begin=begin)
    assert quiet(done.check()), done.text
    assert [its[5:] for its in worlds] == [["ddp", launcher]] * 2


def test_nothing_of_a_group_outlives_the_program() -> None:
    """A thread of Gloo that lets go of a tensor while Python ends aborts: none is left when the exit hooks are done."""
    code = """import atexit, os
def threads():
    return [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
atexit.register(lambda: print(sum("gloo" in name for name in threads())))
import hvdtrain, torch
hvdtrain.init("torch", engine="ddp", device="cpu")
assert any("gloo" in name for name in threads())"""
    done = run_ranks(["-c", code], 2, launcher="forked torchrun").check()
    assert done.ranks_output == {0: "0", 1: "0"}, done.text


@pytest.mark.parametrize("case", torch_cases.names("dataparallel.py"))
def test_pieces(case: str) -> None:
    done = output_of_pieces()
    assert not done.err
    problem = verdict_on(case, done.out)
    assert not problem, problem


@functools.cache
def output_of_pieces() -> Result:
    return run_ranks([FOLDER / "dataparallel.py"], 1).check()


def test_refusals() -> None:
    done = run_ranks([FOLDER / "engine_refusals.py"], 1).check()
    assert not done.err, "one clear block, no stacks of C++"
    said = json.loads(done.out)
    for case, words in {
        "taken": ["rank 0 must be able to listen on localhost", "address already in use", "MASTER_PORT"],
        "unreachable": ["rank 1 must be able to reach rank 0 at localhost", "Connection refused"],
        "unknown host": ["reach rank 0 at nowhere.invalid", "not known"],
        "absent": [
            "all 2 ranks must start within 1 s",
            "rank 1 did not arrive, rank 0 reports",
            "HVDTRAIN_START_TIMEOUT_S",
        ],
        "no port": ["MASTER_PORT is missing"],
        "sync over pieces": ["dataparallel with 2 devices", "remove sync_batchnorm"],
        "compiled pieces": ["torch.compile is not supported with engine='dataparallel'"],
        "compiled by prepare": ["torch.compile is not supported with engine='dataparallel'"],
        "counts rows": ["scale_grad_by_freq=True needs the whole batch in one pass"],
        "counts frozen rows": ["nothing"],
        "float64": ["must be float32, bfloat16 or float16 with engine='deepspeed'", "weight is float64"],
        "no deepspeed": ["LauncherError", "No module named 'deepspeed'", "-m pip install", "deepspeed]"],
    }.items():
        for word in words:
            assert word in said[case], f"{case}: {said[case]}"
