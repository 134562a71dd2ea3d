"""Who am I: the launcher table, the GPU rule, and what ranks say to each other."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPOSITORY, Result, clean_environment, run_ranks
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain import errors, world
from hvdtrain.errors import ConfigError, HvdtrainError, LauncherError, MainRankError
from hvdtrain.launchers import LAUNCHERS, tasks_per_node
from hvdtrain.world import Detected, SoloEngine, World, choose_engine, detect, gpus_for

PROGRAMS = Path(__file__).parent / "programs"

HOROVODRUN = {
    "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2", "HOROVOD_HOSTNAME": "host2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4321",
    "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1", "PMIX_RANK": "3",
}  # fmt: skip
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SBATCH = {
    "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_NODELIST": "host[1-2]",
}  # fmt: skip
SRUN = SBATCH | {
    "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "MASTER_ADDR": "host1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
OPENPAI = {
    "PAI_TASK_INDEX": "1", "PAI_TASK_ROLE_TASK_COUNT_worker": "2", "PAI_CURRENT_TASK_ROLE_NAME": "worker",
    "PAI_CURRENT_TASK_ROLE_GPU_COUNT": "2", "PAI_HOST_IP_worker_0": "10.0.0.1",
    "PAI_HOST_IP_worker_1": "10.0.0.2", "PAI_worker_0_SynPort_PORT": "5000",
    "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
}  # fmt: skip
MPIJOB = OPEN_MPI | {"K_MPI_JOB_ROLE": "worker", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}


class TestDetect:
    def test_nothing_set_is_a_world_of_one(self) -> None:
        assert detect({"HOME": "/root", "HOROVOD_CYCLE_TIME": "1"}) == Detected("none", 0, 1, 0, 1, 0, None)

    @pytest.mark.parametrize(
        ("environ", "launcher", "node", "rendezvous"),
        [
            (HOROVODRUN, "horovodrun", 1, "10.0.0.1:4321"),
            (OPEN_MPI, "mpirun", -1, None),
            (HYDRA, "mpirun", -1, None),
            (SRUN, "srun", 1, None),
            (TORCHRUN, "torchrun", 1, "host1:29500"),
            (OPENPAI, "openpai", 1, "10.0.0.1:5000"),
            (MPIJOB, "mpijob", -1, None),
        ],
        ids=["horovodrun", "open-mpi", "hydra", "srun", "torchrun", "openpai", "mpijob"],
    )
    def test_every_launcher(self, environ: dict[str, str], launcher: str, node: int, rendezvous: str | None) -> None:
        assert detect(environ) == Detected(launcher, 3, 4, 1, 2, node, rendezvous)
        assert launcher in LAUNCHERS

    @pytest.mark.parametrize(
        ("outer", "inner", "launcher"),
        [
            (SRUN, OPEN_MPI, "mpirun"),
            (SRUN, HYDRA, "mpirun"),
            (SRUN, HOROVODRUN, "horovodrun"),
            (SRUN, TORCHRUN, "torchrun"),
            (SBATCH, OPEN_MPI, "mpirun"),
            (OPEN_MPI, HOROVODRUN, "horovodrun"),
            (OPEN_MPI, TORCHRUN, "torchrun"),
            (OPENPAI, HOROVODRUN, "horovodrun"),
            (OPENPAI, TORCHRUN, "torchrun"),
            (MPIJOB, HOROVODRUN, "horovodrun"),
        ],
    )
    def test_the_inner_launcher_wins(self, outer: dict[str, str], inner: dict[str, str], launcher: str) -> None:
        # the outer one says something else: rank 0, as it does when it started the inner launcher once a job
        changed = {n: "0" if n.endswith(("RANK", "PROCID", "LOCALID")) else v for n, v in outer.items()}
        assert detect(changed | inner).launcher == launcher
        assert detect(changed | inner).rank == 3

    @pytest.mark.parametrize(
        ("environ", "needed"),
        [
            (HOROVODRUN, ["HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
                          "HOROVOD_CROSS_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"]),
            (OPEN_MPI, ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                        "OMPI_COMM_WORLD_LOCAL_SIZE"]),
            (HYDRA, ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]),
            (SRUN, ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"]),
            (TORCHRUN, ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
                        "MASTER_PORT"]),
            (OPENPAI, ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "PAI_HOST_IP_worker_0", "PAI_worker_0_SynPort_PORT"]),
            (MPIJOB, ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                      "OMPI_COMM_WORLD_LOCAL_SIZE"]),
        ],
        ids=["horovodrun", "open-mpi", "hydra", "srun", "torchrun", "openpai", "mpijob"],
    )  # fmt: skip
    def test_a_missing_variable_is_named(self, environ: dict[str, str], needed: list[str]) -> None:
        for name in needed:
            for broken in ({n: v for n, v in environ.items() if n != name}, environ | {name: ""}):
                with pytest.raises(LauncherError, match=f"{name} is missing"):
                    detect(broken)

    @pytest.mark.parametrize("value", ["x", "-1", "1.0", "0x1", "²"])
    def test_what_is_not_a_count_is_refused(self, value: str) -> None:
        with pytest.raises(LauncherError, match="HOROVOD_LOCAL_RANK"):
            detect(HOROVODRUN | {"HOROVOD_LOCAL_RANK": value})

    @pytest.mark.parametrize(
        "change",
        [
            {"HOROVOD_RANK": "4"},
            {"HOROVOD_SIZE": "0"},
            {"HOROVOD_LOCAL_RANK": "2"},
            {"HOROVOD_LOCAL_SIZE": "5"},
            {"HOROVOD_RANK": "0"},
        ],
    )
    def test_contradictions_are_refused(self, change: dict[str, str]) -> None:
        with pytest.raises(LauncherError, match="rank < size"):
            detect(HOROVODRUN | change)

    @given(st.dictionaries(st.sampled_from(sorted(HOROVODRUN | SRUN | TORCHRUN | OPENPAI | MPIJOB | HYDRA)),
                           st.sampled_from(["", "0", "1", "2", "7", "a", "2(x3),1", "-1"])))  # fmt: skip
    def test_any_environment_gives_a_sound_world_or_a_launcher_error(self, environ: dict[str, str]) -> None:
        try:
            found = detect(environ)
        except LauncherError as error:
            assert error.rule and error.came
            return
        assert 0 <= found.rank < found.size
        assert 0 <= found.local_rank < found.local_size <= found.size
        assert found.launcher in LAUNCHERS


class TestSlurm:
    def test_a_batch_script_is_one_process(self) -> None:
        assert detect(SBATCH).launcher == "none"

    @pytest.mark.parametrize("step", ["batch", "", "4294967291", "4294967290", "extern", "interactive"])
    def test_slurms_own_steps_are_one_process(self, step: str) -> None:
        assert detect(SBATCH | {"SLURM_STEP_ID": step}).launcher == "none"

    def test_the_step_counts_not_the_allocation(self) -> None:
        smaller = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
                          "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}  # fmt: skip
        assert detect(smaller) == Detected("srun", 1, 2, 0, 1, 1, None)

    def test_uneven_nodes(self) -> None:
        uneven = SRUN | {"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_PROCID": "6",
                         "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}  # fmt: skip
        assert detect(uneven) == Detected("srun", 6, 7, 0, 1, 3, None)

    def test_pmi2_under_srun_is_srun(self) -> None:
        assert detect(SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}).launcher == "srun"

    def test_tasks_per_node_as_an_option(self) -> None:
        without = {n: v for n, v in SRUN.items() if not n.endswith("TASKS_PER_NODE")}
        assert detect(without | {"SLURM_NTASKS_PER_NODE": "2"}).local_size == 2
        with pytest.raises(LauncherError, match="SLURM_STEP_TASKS_PER_NODE is missing"):
            detect(without)

    def test_a_step_of_one_task_needs_nothing_more(self) -> None:
        one = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
        assert detect(one) == Detected("srun", 0, 1, 0, 1, 0, None)

    @given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 5)), min_size=1, max_size=6))
    def test_expansion(self, runs: list[tuple[int, int]]) -> None:
        text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
        assert tasks_per_node(text) == [count for count, times in runs for _ in range(times)]

    @pytest.mark.parametrize("text", ["", "2(x", "x3", "2(x3)1", "2;3"])
    def test_not_slurms_form(self, text: str) -> None:
        with pytest.raises(LauncherError, match="Slurm writes"):
            tasks_per_node(text)


class TestClusters:
    def test_ranks_of_an_mpijob_come_through_ssh_without_the_pods_variables(self) -> None:
        assert detect(OPEN_MPI | {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"}).launcher == "mpijob"

    def test_an_mpijob_that_forgot_mpirun_is_refused(self) -> None:
        with pytest.raises(LauncherError, match="mpirun"):
            detect({"K_MPI_JOB_ROLE": "launcher"})

    def test_openpai_without_counts_counts_the_hosts(self) -> None:
        named = {n: v for n, v in OPENPAI.items() if "COUNT" not in n}
        assert detect(named) == detect(OPENPAI)

    def test_openpai_with_several_gpus_a_task_needs_the_local_rank(self) -> None:
        alone = {n: v for n, v in OPENPAI.items() if not n.startswith("LOCAL_")}
        with pytest.raises(LauncherError, match="LOCAL_RANK is missing"):
            detect(alone)
        assert detect(alone | {"PAI_CURRENT_TASK_ROLE_GPU_COUNT": "1"}).size == 2

    def test_deepspeeds_names(self) -> None:
        names = {n: v for n, v in TORCHRUN.items() if n not in ("LOCAL_WORLD_SIZE", "GROUP_RANK")}
        del names["TORCHELASTIC_RUN_ID"]
        assert detect(names | {"LOCAL_SIZE": "2", "CROSS_RANK": "1"}) == detect(TORCHRUN)


class TestGpus:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ((0, 1, 0), ()),
            ((0, 1, 1), (0,)),
            ((1, 2, 4), (1,)),
            ((1, 2, 4, 2), (2, 3)),
            ((3, 4, 1), (0,)),  # masked by the launcher: each rank sees its own
            ((1, 2, 2, 2), (0, 1)),
            ((0, 1, 8, 4), (0, 1, 2, 3)),
        ],
    )
    def test_rule(self, arguments: tuple[int, ...], expected: tuple[int, ...]) -> None:
        assert gpus_for(*arguments) == expected

    @given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 40))
    def test_ranks_that_see_all_share_none(self, local_size: int, per_rank: int, spare: int) -> None:
        visible = local_size * per_rank + spare
        taken = [gpu for rank in range(local_size) for gpu in gpus_for(rank, local_size, visible, per_rank)]
        assert len(taken) == len(set(taken)) == local_size * per_rank
        assert set(taken) <= set(range(visible))

    @pytest.mark.parametrize("arguments", [(0, 4, 3), (0, 2, 3, 2), (0, 1, 1, 2)])
    def test_too_few(self, arguments: tuple[int, ...]) -> None:
        with pytest.raises(LauncherError, match="GPUs"):
            gpus_for(*arguments)

    @pytest.mark.parametrize("arguments", [(1, 1, 1), (-1, 1, 1), (0, 1, -1), (0, 1, 1, 0)])
    def test_arguments_out_of_range(self, arguments: tuple[int, ...]) -> None:
        with pytest.raises(ConfigError):
            gpus_for(*arguments)


class TestChooseEngine:
    @pytest.mark.parametrize("launcher", ["horovodrun", "mpirun", "srun", "mpijob"])
    def test_launchers_that_start_horovod(self, launcher: str) -> None:
        assert choose_engine("auto", Detected(launcher, 0, 2, 0, 2, 0, None)) == "horovod"

    @pytest.mark.parametrize("launcher", ["torchrun", "openpai"])
    def test_launchers_that_cannot(self, launcher: str) -> None:
        started = Detected(launcher, 0, 2, 0, 2, 0, "host:1")
        with pytest.raises(LauncherError, match=f"cannot be started by {launcher}") as caught:
            choose_engine("auto", started)
        assert "horovodrun -np 2" in caught.value.remedy
        assert choose_engine("ddp", started) == "ddp"  # the adapter knows its engines
        assert choose_engine("auto", Detected(launcher, 0, 1, 0, 1, 0, None)) == "solo"

    def test_alone(self) -> None:
        assert choose_engine("auto", detect({})) == "solo"
        with pytest.raises(LauncherError, match="one process"):
            choose_engine("solo", detect(HOROVODRUN))


class TestSolo:
    def test_collectives_are_the_identity(self) -> None:
        alone = World.solo(seed=3)
        assert (alone.rank, alone.size, alone.is_main, alone.seed, alone.engine) == (0, 1, True, 3, "solo")
        assert alone.broadcast("x") == "x"
        assert alone.gather({"a": 1}) == [{"a": 1}]
        assert alone.mean({"loss": 2.0}, weight=7) == {"loss": 2.0}
        assert alone.sum({"n": 2}) == {"n": 2.0}
        assert alone.on_main(lambda a, b: a + b, 1, b=2) == 3
        alone.agree("anything", object)
        alone.barrier()

    def test_mean_without_weight_is_nan_not_zero(self) -> None:
        assert math.isnan(World.solo().mean({"loss": 1.0}, weight=0)["loss"])

    @pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
    def test_weights_that_mean_nothing(self, weight: float) -> None:
        with pytest.raises(HvdtrainError, match="weights"):
            World.solo().mean({"loss": 1.0}, weight=weight)

    def test_errors_of_on_main_pass_through(self) -> None:
        with pytest.raises(ZeroDivisionError):
            World.solo().on_main(lambda: 1 // 0)

    def test_root_must_be_a_rank(self) -> None:
        with pytest.raises(ConfigError, match="root"):
            World.solo().broadcast(1, root=1)

    def test_engine_protocol(self) -> None:
        assert isinstance(SoloEngine(), world.Engine)
        assert SoloEngine().sum_floats([1, 2]) == [1.0, 2.0]
        with pytest.raises(ValueError, match="root"):
            SoloEngine().broadcast_bytes(None, 0)


class TestErrors:
    def test_text_has_rule_what_came_and_remedy(self) -> None:
        error = ConfigError("epochs must be >= 1", "epochs=0", "give --epochs 1\nor more")
        assert str(error) == "epochs must be >= 1\n  came: epochs=0\n  fix: give --epochs 1\n       or more"

    def test_errors_travel(self) -> None:
        error = pickle.loads(pickle.dumps(ConfigError("a", "b", "c")))
        assert (type(error), error.rule, error.came, error.remedy) == (ConfigError, "a", "b", "c")

    def test_a_shared_error_is_told_once(self) -> None:
        error = MainRankError("the data must be there", "/nowhere", "give --data")
        assert errors.describe("program", error, 1) == (
            "program: rank 1: ended with rank 0: the data must be there (came: /nowhere)"
        )
        assert "fix: give --data" in errors.describe("program", error, 0)

    def test_a_bug_is_told_with_its_traceback(self) -> None:
        try:
            1 // 0  # noqa: B018
        except ZeroDivisionError as error:
            assert "test_world.py" in errors.describe("program", error, 0)

    def test_exit_code_and_one_block(self) -> None:
        code = "from hvdtrain import ConfigError, exit_with; exit_with('program', ConfigError('a', 'b', 'c'), 0)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=clean_environment(), check=False
        )
        assert (done.returncode, done.stderr) == (2, "program: rank 0: a\n  came: b\n  fix: c\n")


class TestInit:
    """`init` in processes of their own: it seeds, and it imports an adapter."""

    def run(self, code: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(PROGRAMS)!r})\n{code}"]
        return subprocess.run(
            command, capture_output=True, text=True, env=clean_environment(env), cwd=REPOSITORY, timeout=60,
            check=False,
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("call", "rule"),
        [
            ("init('jax')", "framework must be"),
            ("init('torch', device='tpu')", "device must be"),
            ("init('torch', gpus_per_rank=0)", "gpus_per_rank must be"),
            ("init('torch', seed=-1)", "seed must be"),
            ("init('torch', seed=1.5)", "seed must be"),
        ],
    )
    def test_wrong_arguments(self, call: str, rule: str) -> None:
        done = self.run(f"from hvdtrain import init, ConfigError\ntry: {call}\nexcept ConfigError as e: print(e)")
        assert rule in done.stdout, done.stderr

    def test_horovod_missing_names_the_command(self, tmp_path: Path) -> None:
        # a real missing module: a Horovod-less path, simulated by a meta path finder that knows no horovod
        code = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "horovod":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Without())
import torch_engine
from hvdtrain import LauncherError, init
try:
    init("torch")
except LauncherError as error:
    print(error)
"""
        done = self.run(code, **HOROVODRUN)
        assert "hvdtrain build-horovod --install" in done.stdout, done.stdout + done.stderr
        assert sys.executable in done.stdout

    def test_alone_needs_no_horovod_and_seeds(self) -> None:
        code = """
import random, sys, torch_engine, numpy
from hvdtrain import current, init
draws = []
for _ in range(2):
    with init("torch", seed=5) as world:
        draws.append((random.random(), numpy.random.rand()))
        assert current() is world and world.launcher == "none" and world.engine == "solo"
assert current() is None and draws[0] == draws[1], draws
assert not [name for name in sys.modules if name.startswith(("horovod", "torch."))]
print("done")
"""
        done = self.run(code)
        assert done.stdout == "done\n", done.stderr

    def test_torchrun_is_refused_with_the_remedy(self) -> None:
        code = "import torch_engine\nfrom hvdtrain import init\ninit('torch')"
        done = self.run(code, **TORCHRUN)
        assert "cannot be started by torchrun" in done.stderr
        assert "horovodrun -np 4" in done.stderr


SCENARIOS = [
    "identity", "broadcast", "gather", "mean", "mean_of_names_that_differ", "sum", "agree", "on_main",
    "on_main_error", "on_main_hvdtrain_error", "on_main_result_that_cannot_travel", "on_main_system_exit",
]  # fmt: skip


@pytest.fixture(scope="module", params=["horovodrun", "mpirun"])
def talk(request: pytest.FixtureRequest) -> Result:
    """One job of two real ranks that plays every scenario; each is a test of its own below."""
    return run_ranks([PROGRAMS / "world_ranks.py", *SCENARIOS], 2, launcher=request.param)


@pytest.mark.ranks
class TestRanks:
    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_scenario(self, talk: Result, scenario: str) -> None:
        for rank in range(2):
            assert f"{scenario}: passed" in talk.ranks_output.get(rank, ""), talk.text

    def test_ends_well(self, talk: Result) -> None:
        talk.check()

    @pytest.mark.parametrize("launcher", ["horovodrun", "mpirun"])
    def test_an_error_on_rank_0_ends_all_and_is_readable(self, launcher: str) -> None:
        done = run_ranks([PROGRAMS / "world_ranks.py", "main_fails"], 2, launcher=launcher, timeout_s=60)
        assert done.returncode != 0
        assert "the data must be there" in done.text and "/nowhere" in done.text
        assert done.seconds < 30, f"{done.seconds} s to end"

    def test_an_error_on_one_rank_ends_all(self) -> None:
        done = run_ranks([PROGRAMS / "world_ranks.py", "one_fails"], 2, timeout_s=60)
        assert done.returncode != 0
        assert "rank 1: only here" in done.text
        assert "past the barrier" not in done.text

    def test_seeds_that_differ_are_refused_on_every_rank(self) -> None:
        done = run_ranks([PROGRAMS / "world_ranks.py", "other_seed"], 2)
        for rank in range(2):
            assert "the seed must be the same on every rank" in done.ranks_output[rank], done.text
            assert "rank 1: 8" in done.ranks_output[rank]

    def test_launcher_and_engine_that_disagree_are_refused(self) -> None:
        # every process alone: what Horovod does when its MPI is not the launcher's
        code = "import torch_engine; torch_engine.BLIND = True; from hvdtrain import init; init('torch')"
        done = run_ranks(["-c", code], 2, env={"PYTHONPATH": f"{PROGRAMS}:{REPOSITORY}"})
        assert done.returncode != 0
        assert "horovodrun says rank 1 of 2, blind says rank 0 of 1" in done.text
