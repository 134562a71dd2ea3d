"""Which engine a launch calls for: the table, and what it refuses."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from launcher_variables import HOROVODRUN, MPIJOB, OPEN_MPI, OPENPAI, SRUN, TORCHRUN

from hvdtrain.comm.engines import ENGINES, HorovodCollectives, choose_engine
from hvdtrain.core.errors import ConfigError, LauncherError
from hvdtrain.core.launchers import Detected, detect

MPI = [HOROVODRUN, OPEN_MPI, SRUN, MPIJOB]
OTHERS = [TORCHRUN, OPENPAI, {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}]


@pytest.mark.parametrize("framework", ["torch", "keras"])
@pytest.mark.parametrize("environ", MPI)
def test_launchers_of_horovod_start_horovod(environ: dict[str, str], framework: str) -> None:
    assert choose_engine("auto", detect(environ), framework) == "horovod"


@pytest.mark.parametrize("environ", OTHERS, ids=["torchrun", "openpai", "by-hand"])
def test_launchers_that_cannot_start_horovod_start_ddp(environ: dict[str, str]) -> None:
    detected = detect(environ)
    assert choose_engine("auto", detected, "torch") == "ddp"
    for asked in (("horovod", "torch"), ("auto", "keras")):
        with pytest.raises(LauncherError, match=f"horovod's ranks cannot be started by {detected.launcher}") as caught:
            choose_engine(asked[0], detected, asked[1])
        assert "horovodrun -np 4" in caught.value.remedy


@pytest.mark.parametrize("launcher", ["none", "torchrun", "openpai"])
def test_one_process_is_solo(launcher: str) -> None:
    alone = Detected(launcher, 0, 1, 0, 1, 0, None)
    assert choose_engine("auto", alone, "torch") == choose_engine("auto", alone, "keras") == "solo"
    for engine, kind in ENGINES.items():
        assert choose_engine(engine, alone, kind.frameworks[0]) == engine


@pytest.mark.parametrize("engine", ["ddp", "deepspeed"])
@pytest.mark.parametrize("environ", [*MPI, *OTHERS])
def test_process_groups_run_under_every_launcher(environ: dict[str, str], engine: str) -> None:
    assert choose_engine(engine, detect(environ), "torch") == engine


@pytest.mark.parametrize(("engine", "framework"), [("ddp", "keras"), ("dataparallel", "keras"), ("nccl", "torch")])
def test_engines_the_framework_does_not_have(engine: str, framework: str) -> None:
    with pytest.raises(ConfigError, match=f"engine= for {framework} must be .*horovod or solo"):
        choose_engine(engine, detect({}), framework)


@pytest.mark.parametrize(
    ("environ", "has", "lacks", "remedy"),
    [(HOROVODRUN, "mpi", "Gloo", "mpirun"), (OPEN_MPI, "gloo", "MPI", "horovodrun --gloo")],
)
def test_a_horovod_built_without_what_the_launcher_needs(
    environ: dict[str, str], has: str, lacks: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """conda-forge's has no Gloo: started over it, its extension ends in a segmentation fault."""
    hvd = SimpleNamespace(mpi_built=lambda: has == "mpi", gloo_built=lambda: has == "gloo", init=None)
    monkeypatch.setattr("hvdtrain.comm.engines.start_horovod", lambda *_: pytest.fail("started"))
    with pytest.raises(LauncherError, match=f"this Horovod has no {lacks}") as caught:
        HorovodCollectives.join(hvd, detect(environ), ())
    assert remedy in caught.value.remedy and "build-horovod" in caught.value.remedy


@pytest.mark.parametrize("users", [{}, {"HOROVOD_IDLE_CYCLE_TIME": "5", "OMPI_MCA_mpi_yield_when_idle": "0"}])
def test_ranks_that_wait_leave_the_cores_alone(users: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the framework; what the user has set stays."""
    quiet = {"HOROVOD_IDLE_CYCLE_TIME": "20", "OMPI_MCA_mpi_yield_when_idle": "1"}
    monkeypatch.setattr(os, "environ", dict(users))
    found: list[dict[str, str]] = []
    monkeypatch.setattr("hvdtrain.comm.engines.start_horovod", lambda *_: found.append(dict(os.environ)))
    place = {name: lambda: 0 for name in ("rank", "size", "cross_rank", "local_rank", "local_size")}
    HorovodCollectives.join(SimpleNamespace(mpi_built=lambda: True, init=None, **place), detect(OPEN_MPI), ())
    assert {name: found[0][name] for name in quiet} == {**quiet, **users}
