"""Every engine of the PyTorch adapter, on real ranks, through the protocol they share; and how their ranks meet."""

from __future__ import annotations

import itertools
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from harness import PROGRAMS, Result, run_ranks
from limits import Limit

FOLDER = PROGRAMS / "torch"
EXACT = {"ddp": 1e-10, "deepspeed": 1e-6}


def facts(engine: str, launcher: str, folder: Path, *cases: str, begin: str = "") -> list[dict[str, Any]]:
    """What two ranks found, by rank; all cases, or those named; after what beginning.py arranges."""
    out = folder / f"{engine}.json"
    program = [str(FOLDER / "engines.py"), str(out), engine, *cases]
    if begin:
        program = [str(FOLDER / "beginning.py"), begin, *program]
    done = run_ranks(program, 2, launcher=launcher, timeout_s=120).check()
    assert quiet(done), done.text
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


def quiet(done: Result) -> bool:
    """Whether ranks printed what the program prints, and nothing else."""
    return set(done.ranks_output.values()) == {"done"} and not any(done.ranks_error.values())


@pytest.fixture(scope="module", params=["ddp", "deepspeed"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def both(engine: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return facts(engine, "torchrun", tmp_path_factory.mktemp(engine))


class TestTwoRanks:
    def test_the_world(self, engine: str, both: list[dict[str, Any]]) -> None:
        assert [found["world"] for found in both] == [[rank, 2, rank, 2, 0, engine, "torchrun"] for rank in (0, 1)]

    def test_collectives_take_every_type(self, both: list[dict[str, Any]]) -> None:
        for found in both:
            its = found["collectives"]
            others = {"bool": [True, False], "scalar": 4.0, "empty": [], "bytes": ["", "x"], "root": "from 1"}
            assert {name: its.pop(name) for name in others} == others
            assert len(its) == 9 and all(value == [[3, 6], [2, 3]] for value in its.values()), its

    def test_layers_that_take_part_here_and_there(self, both: list[dict[str, Any]]) -> None:
        """a: everywhere; b: one rank, first micro-batch; c: one rank, last; d: nowhere, so None and not zero."""
        expected = [{"a": 44.0, "b": 2.0, "c": 20.0, "d": None}, [2.0, 1.0]]
        assert all(found["branches"] == [expected, expected] for found in both), [f["branches"] for f in both]

    def test_without_reduction_each_rank_keeps_its_own(self, both: list[dict[str, Any]]) -> None:
        own = [found["local"]["a"] for found in both]
        assert own[1] == 2 * own[0] > 0

    def test_layers_frozen_and_thawed(self, both: list[dict[str, Any]]) -> None:
        for found in both:
            assert [(its["a"], its["b"]) for its in found["thaw"]] == [(3.0, None), (3.0, 3.0), (None, 3.0)]

    def test_forward_passes_without_backward(self, both: list[dict[str, Any]]) -> None:
        assert all(found["forwards"] == {"a": 2.0, "b": None, "c": 2.0, "d": None} for found in both)

    def test_training_equals_one_process(self, engine: str, both: list[dict[str, Any]]) -> None:
        for found in both:
            assert found["training"]["gap"] <= EXACT[engine]
            assert found["training"]["momentum"] > 10, "gradients large enough that clipping at 1 would show"
        assert both[0]["training"]["sum"] == both[1]["training"]["sum"], "replicas differ"

    def test_compression(self, both: list[dict[str, Any]]) -> None:
        assert all(found["compressed"] == {"None": 2.00390625, "fp16": 2.00390625, "bf16": 2.0} for found in both)

    def test_after_close_the_model_is_plain(self, both: list[dict[str, Any]]) -> None:
        assert [found["closed"] for found in both] == [{"grad": grad, "hooks": 0, "groups": 0} for grad in (1.0, None)]

    def test_batch_norm_over_all_ranks(self, both: list[dict[str, Any]]) -> None:
        for found in both:
            its = found["batchnorm"]
            assert its["counted"] <= 1e-10 and its["uncounted"] <= 1e-10 and its["evaluation"] <= 1e-10
            assert its["same names"] and its["synchronized"] == [True, False]
            assert its["plain"] > 1e-2 and its["alone"] > 1e-2, "the twins, whose ranks are on their own"

    def test_waiting_for_others_is_communication(self, both: list[dict[str, Any]]) -> None:
        waited, late = (found["phases"] for found in both)
        assert waited["communication"] > 0.4 and waited["backward"] < 0.2, waited
        assert late["communication"] < 0.3, late


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
    return run_ranks(command, 1, launcher="none", timeout_s=120)


@pytest.mark.parametrize(("kind", "engine"), [("srun", "ddp"), ("openpai", "auto")])
def test_clusters_variables_make_a_world(kind: str, engine: str, tmp_path: Path) -> None:
    """Two processes that have nothing but what Slurm or OpenPAI (one process a task) would have set."""
    out = tmp_path / "out.json"
    variables = cluster(kind)
    spawn(variables, FOLDER / "engines.py", out, engine, "training").check()
    found = json.loads(out.read_text())
    local = [(0, 2), (1, 2)] if kind == "srun" else [(0, 1), (0, 1)]
    assert [its["world"] for its in found] == [[rank, 2, *local[rank], 0, "ddp", kind] for rank in (0, 1)]
    assert all(its["training"]["gap"] <= 1e-10 for its in found)


@pytest.mark.parametrize(
    ("kind", "missing"),
    [("srun", "SLURM_STEP_NODELIST"), ("srun", "SLURM_LOCALID"), ("openpai", "PAI_HOST_IP_worker_0")],
)
def test_what_a_cluster_left_out_is_named(kind: str, missing: str) -> None:
    program = ["-c", "import hvdtrain; hvdtrain.init('torch', engine='ddp')"]
    variables = {name: value for name, value in cluster(kind)[1].items() if name != missing}
    done = spawn([variables], *program)
    assert done.returncode == 1
    assert f"{missing} missing" in done.err or f"{missing} is missing" in done.err, done.text


def test_a_ddp_job_comes_up_in_every_attempt(tmp_path: Path, limit: Limit) -> None:
    """torchrun's agent keeps its store: ranks must not meet in what an earlier attempt left there."""
    out = tmp_path / "attempt"
    run_ranks(
        [PROGRAMS / "torch" / "restarted.py", out], 2, launcher="torchrun --max-restarts=2", timeout_s=120
    ).check()
    assert out.read_text() == "2"
    limit("T35", "torchrun --max-restarts=2: a ddp job that fails twice", mended="each attempt comes up")


def test_a_rank_that_ended_is_noticed() -> None:
    done = spawn(cluster("srun"), FOLDER / "engine_loss.py", "ddp")
    assert done.returncode == 2, done.text
    assert "every rank must take part until the end" in done.err and "torch.distributed gave up" in done.err, done.err


@pytest.mark.parametrize(
    ("launcher", "engine", "begin"),
    [
        ("horovodrun", "ddp", "taken"),
        ("mpirun", "ddp", "taken"),
        ("mpirun", "ddp", "without-mpi4py"),
        pytest.param("horovodrun", "deepspeed", "taken", marks=pytest.mark.thorough),
        pytest.param("mpirun", "deepspeed", "taken", marks=pytest.mark.thorough),
    ],
)
def test_nothing_says_where_to_meet(launcher: str, engine: str, begin: str, tmp_path: Path) -> None:
    """A free port is told through the launcher's server, or MPI; without mpi4py it is one of the job's name."""
    found = facts(engine, launcher, tmp_path, "training", begin=begin)
    assert [its["world"][5:] for its in found] == [[engine, launcher]] * 2
    assert all(its["training"]["gap"] <= EXACT[engine] for its in found)


@pytest.mark.parametrize("how", ["raises", "ends well"])
def test_mpi_ends_with_the_ranks_that_met_through_it(how: str) -> None:
    """Where one has failed, the other waits in a collective; MPI's own end would wait for both."""
    code = "import hvdtrain\nworld = hvdtrain.init('torch', engine='ddp', device='cpu')\n"
    if how == "raises":
        code += "assert world.rank != 1, 'on purpose'\nworld.barrier()"
    done = run_ranks(["-c", code], 2, launcher="mpirun")
    assert (done.returncode != 0) == (how == "raises") and ("on purpose" in done.err) == (how == "raises"), done.text
    assert how == "raises" or not done.err, done.text


@pytest.mark.parametrize("engine", ["ddp", pytest.param("deepspeed", marks=pytest.mark.thorough)])
def test_nothing_of_a_group_outlives_the_program(engine: str) -> None:
    """A thread of Gloo that lets go of a tensor while Python ends aborts: none is left when the exit hooks are done."""
    code = f"""import atexit, os
def threads():
    return [open(f"/proc/self/task/{{task}}/comm").read().strip() for task in os.listdir("/proc/self/task")]
atexit.register(lambda: print(sum("gloo" in name for name in threads())))
import hvdtrain
hvdtrain.init("torch", engine="{engine}", device="cpu")
assert any("gloo" in name for name in threads())"""
    done = run_ranks(["-c", code], 2, launcher="torchrun").check()
    assert done.ranks_output == {0: "0", 1: "0"}, done.text


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = run_ranks([FOLDER / "dataparallel.py"], 1).check()
    assert not done.err
    its: dict[str, Any] = json.loads(done.out)
    return its


class TestPieces:
    def test_pieces_give_the_whole_batchs_loss_and_gradients(self, found: dict[str, Any]) -> None:
        assert len(found["losses"]) == 32
        assert all(gap <= 1e-12 for gap in found["losses"].values()), found["losses"]

    def test_of_a_loss_inside_the_model_only_that_of_each_sample_is_taken(self, found: dict[str, Any]) -> None:
        its = found["inside"]
        assert its.pop("each sample's") <= 1e-12 and its.pop("each sample's, in a tuple") <= 1e-12
        assert len(its) == 8
        for name, refused in its.items():
            assert "a row for each sample" in str(refused) and "reduction='none'" in refused, (name, refused)

    def test_memory_that_only_the_first_device_holds_is_told_once(self, found: dict[str, Any]) -> None:
        uneven, even = found["memory"]["uneven"], found["memory"]["even"]
        assert uneven.count("cuda:0 5.00 GiB, cuda:1 4.00 GiB") == 1
        assert "the first holds more" in uneven and "forward(x, y) returns that of each sample" in uneven
        assert even == "hvdtrain: most memory up to the first update: cuda:0 2.56 GiB, cuda:1 2.50 GiB"

    def test_pieces_are_even_and_never_empty(self, found: dict[str, Any]) -> None:
        assert found["sizes"] == [[3, 3, 2, 2], [1, 1, 1], [4, 4]]

    def test_buffers_are_the_first_pieces(self, found: dict[str, Any]) -> None:
        its = found["buffers"]
        assert its.pop("moved") > 1e-3
        assert its == {"statistics": 0.0, "batches": 1, "names": True, "dropout": True}

    def test_nested_inputs_and_outputs(self, found: dict[str, Any]) -> None:
        its = found["nested"]
        assert its["kinds"] == ["Pair", "OrderedDict", True, None] and its["left"]
        assert its["right"] == [1.0, 5.0, 9.0, 13.0, 17.0]
        assert "under dataparallel a model returns tensors" in its["refused"]

    def test_containers_of_the_users_own(self, found: dict[str, Any]) -> None:
        doubled, given = [0.0, 2.0, 4.0, 6.0], [0.0, 1.0, 2.0, 3.0]
        expected = {name: [name.capitalize(), doubled, 3.0, given] for name in ("fields", "wrapped")}
        assert found["containers"] == expected

    def test_how_many_pieces(self, found: dict[str, Any]) -> None:
        assert found["pieces"] == [["dataparallel", 1, pieces] for pieces in (2, 3, 4)]


def test_refusals() -> None:
    done = run_ranks([FOLDER / "engine_refusals.py"], 1, launcher="none").check()
    assert not done.err, "one clear block, no stacks of C++"
    said = json.loads(done.out)
    for case, words in {
        "taken": ["rank 0 must be able to listen on localhost", "address already in use", "MASTER_PORT"],
        "unreachable": ["rank 1 must be able to reach rank 0 at localhost", "Connection refused"],
        "unknown host": ["reach rank 0 at nowhere.invalid", "not known"],
        "absent": ["all 2 ranks must start within 1 s", "rank 1 did not come, says rank 0", "HVDTRAIN_START_TIMEOUT_S"],
        "no port": ["MASTER_PORT is missing"],
        "pieces": ["HVDTRAIN_CPU_DEVICES must be a whole number >= 1", "'two'"],
        "sync over pieces": ["dataparallel with 2 devices", "leave sync_batchnorm out"],
        "compiled pieces": ["under dataparallel a model is not compiled"],
        "compiled by prepare": ["under dataparallel a model is not compiled"],
        "float64": ["DeepSpeed reduces gradients of float32", "weight is float64"],
        "no deepspeed": ["LauncherError", "No module named 'deepspeed'", "-m pip install", "deepspeed]"],
    }.items():
        for word in words:
            assert word in said[case], f"{case}: {said[case]}"
