"""The launcher table and the GPU rule, for every launcher there is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launcher_variables import HOROVODRUN, HYDRA, MPIJOB, OPEN_MPI, OPENPAI, SBATCH, SRUN, TORCHRUN

from hvdtrain.core.errors import LauncherError
from hvdtrain.core.launchers import LAUNCHERS, Detected, detect, gpus_for, meeting_point
from hvdtrain.core.slurm import expand, job_hosts, port_of, tasks_per_node

# on hvdtrain launch's ranks besides: a place to meet that nobody has looked at
MADE_UP = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "20000", "HVDTRAIN_MASTER_PORT": "20000"}
LAUNCHED = HOROVODRUN | MADE_UP


class TestDetect:
    def test_nothing_set_is_a_world_of_one(self) -> None:
        assert detect({"HOME": "/root", "HOROVOD_CYCLE_TIME": "1"}) == Detected("none", 0, 1, 0, 1, 0, None)

    @pytest.mark.parametrize(
        ("environ", "launcher", "node", "rendezvous"),
        [
            (HOROVODRUN, "horovodrun", 1, "10.0.0.1:4321"),
            (OPEN_MPI, "mpirun", -1, None),
            (HYDRA, "mpirun", -1, None),
            (SRUN, "srun", 1, f"host1:{port_of('7', '0')}"),
            (TORCHRUN, "torchrun", 1, "host1:29500"),
            (OPENPAI, "openpai", 1, "10.0.0.1:5000"),
            (MPIJOB, "mpirun", -1, None),
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

    @given(st.dictionaries(st.sampled_from(sorted(HOROVODRUN | SRUN | TORCHRUN | OPENPAI | MPIJOB | HYDRA)),
                           st.sampled_from(["", "0", "1", "2", "7", "a", "2(x3),1", "-1"])))  # fmt: skip
    def test_any_environment_gives_a_sound_world_or_a_launcher_error(self, environ: dict[str, str]) -> None:
        try:
            found = detect(environ)
        except LauncherError as error:
            assert error.rule and error.received
            return
        assert 0 <= found.rank < found.size
        assert 0 <= found.local_rank < found.local_size <= found.size
        assert found.launcher in LAUNCHERS


class TestStrangers:
    """Launchers that are not in the table start ranks as well: each would train alone."""

    @pytest.mark.parametrize(
        ("rank", "size"),
        [("PMIX_RANK", "PMIX_SIZE"), ("PALS_RANKID", "PALS_SIZE"), ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
         ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"), ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")],
    )  # fmt: skip
    def test_are_refused_unless_alone(self, rank: str, size: str) -> None:
        for environ in ({rank: "1"}, {rank: "0", size: "2"}):
            with pytest.raises(LauncherError, match="a launcher hvdtrain knows") as caught:
                detect(environ)
            assert rank in caught.value.received
        assert detect({rank: "0", size: "1"}).launcher == "none"


class TestSlurm:
    @pytest.mark.parametrize("step", ["batch", "", "4294967291", "4294967290", "extern", "interactive"])
    def test_slurms_own_steps_are_one_process(self, step: str) -> None:
        assert detect(SBATCH | {"SLURM_STEP_ID": step}).launcher == "none"

    @given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 5)), min_size=1, max_size=6))
    def test_expansion(self, runs: list[tuple[int, int]]) -> None:
        text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
        assert tasks_per_node(text) == [count for count, times in runs for _ in range(times)]

    def test_node_lists_are_expanded(self) -> None:
        assert expand("gpu[03-04,07],login") == ["gpu03", "gpu04", "gpu07", "login"]
        assert expand("rack[0-1]node[9-10]") == ["rack0node9", "rack0node10", "rack1node9", "rack1node10"]

    def test_hosts_of_a_job(self) -> None:
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-2],b", "SLURM_TASKS_PER_NODE": "2(x2),1"}
        assert job_hosts(job) == "a1:2,a2:2,b:1"
        assert job_hosts({name: value for name, value in job.items() if name != "SLURM_JOB_ID"}) is None
        with pytest.raises(LauncherError, match="every node"):
            job_hosts(job | {"SLURM_TASKS_PER_NODE": "2(x2)"})

    @pytest.mark.parametrize("nodes", ["", "[", "host[", "host[a]", "host 1", "host[1-2", ",", "a;b", "a[1-]", "$(a)"])
    def test_not_a_node_list(self, nodes: str) -> None:
        with pytest.raises(LauncherError, match="SLURM_JOB_NODELIST must be written"):
            expand(nodes)


class TestMeetingPoint:
    """Where the ranks of a torch.distributed group find rank 0."""

    def at(self, environ: dict[str, str]) -> tuple[str, int] | str:
        return meeting_point(environ, detect(environ))

    @pytest.mark.parametrize(
        ("environ", "point"),
        [
            (TORCHRUN, ("host1", 29500)),
            (OPENPAI, ("10.0.0.1", 5000)),
            (SRUN, ("host1", port_of("7", "0"))),
            (SRUN | {"MASTER_ADDR": "host9", "MASTER_PORT": "1234"}, ("host9", 1234)),
            (SRUN | {"MASTER_ADDR": "host9"}, ("host9", port_of("7", "0"))),
            (SRUN | {"MASTER_PORT": "1234"}, ("host1", 1234)),
            (OPEN_MPI | {"MASTER_ADDR": "host9", "MASTER_PORT": "1234"}, ("host9", 1234)),
            (HOROVODRUN | {"MASTER_ADDR": "host9", "MASTER_PORT": "1234"}, ("host9", 1234)),
            (TORCHRUN | {"MASTER_ADDR": "fe80::1"}, ("fe80::1", 29500)),
        ],
    )
    def test_launchers_that_say(self, environ: dict[str, str], point: tuple[str, int]) -> None:
        assert self.at(environ) == point

    @pytest.mark.parametrize(
        ("environ", "how"),
        [
            (HOROVODRUN, "rendezvous"),
            (LAUNCHED, "rendezvous"),
            (LAUNCHED | {"MASTER_PORT": "1234"}, ("10.0.0.1", 1234)),
            (LAUNCHED | {"MASTER_ADDR": "host9"}, ("host9", 20000)),
        ],
        ids=["horovodrun", "launch", "launch, a port", "launch, a host"],
    )
    def test_rank_0_finds_a_free_port_where_the_user_names_none(
        self, environ: dict[str, str], how: str | tuple[str, int]
    ) -> None:
        assert self.at(environ) == how

    def test_steps_of_a_job_do_not_share_a_port(self) -> None:
        ports = {int(self.at(SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})[1])
                 for job in range(100, 103) for step in range(3)}  # fmt: skip
        assert len(ports) == 9
        assert all(1024 < port < 32768 for port in ports)

    def test_under_mpirun_ranks_of_one_host_work_it_out_and_others_need_to_be_told(self) -> None:
        here = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
        one, two = (self.at(OPEN_MPI | here | {"PMIX_NAMESPACE": name}) for name in ("1", "2"))
        assert one[0] == two[0] == "127.0.0.1" and one[1] != two[1]
        for environ in (OPEN_MPI | {"PMIX_NAMESPACE": "1"}, HYDRA, MPIJOB, OPEN_MPI | {"MASTER_PORT": "1234"}):
            with pytest.raises(LauncherError, match="needs MASTER_ADDR and MASTER_PORT") as caught:
                self.at(environ)
            assert "mpirun: -x MASTER_ADDR -x MASTER_PORT" in caught.value.remedy


class TestClusters:
    def test_an_mpijob_that_forgot_mpirun_is_refused(self) -> None:
        with pytest.raises(LauncherError, match="mpirun"):
            detect({"K_MPI_JOB_ROLE": "launcher"})

    def test_openpai_with_several_gpus_a_task_needs_the_local_rank(self) -> None:
        alone = {n: v for n, v in OPENPAI.items() if not n.startswith("LOCAL_")}
        with pytest.raises(LauncherError, match="LOCAL_RANK is missing"):
            detect(alone)
        assert detect(alone | {"PAI_CURRENT_TASK_ROLE_GPU_COUNT": "1"}).size == 2


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
