"""Who am I, and what ranks say to each other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import PROGRAMS, REPOSITORY, Result, clean_environment, run_ranks
from launcher_variables import HOROVODRUN, TORCHRUN

from hvdtrain.core import errors
from hvdtrain.core.errors import ConfigError, MainRankError

FOLDER = PROGRAMS / "core"


class TestErrors:
    def test_text_has_rule_what_came_and_remedy(self) -> None:
        error = ConfigError("epochs must be >= 1", "epochs=0", "give --epochs 1\nor more")
        assert str(error) == "epochs must be >= 1\n  received: epochs=0\n  fix: give --epochs 1\n       or more"

    def test_a_shared_error_is_told_once(self) -> None:
        error = MainRankError("the data must be there", "/nowhere", "give --data")
        assert errors.describe("program", error, 1) == (
            "program: rank 1: ended with rank 0: the data must be there (received: /nowhere)"
        )
        assert "fix: give --data" in errors.describe("program", error, 0)
        lines = errors.describe("program", MainRankError("a", "b\nc"), 1)
        assert lines == "program: rank 1: ended with rank 0: a (received: b; c)"


class TestInit:
    """`init` in processes of their own: it seeds, and it imports an adapter."""

    def run(self, code: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n{code}"]
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

    def test_horovod_built_for_something_else_names_the_command(self) -> None:
        code = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "hvdtrain.keras":
            raise OSError('/lib/horovod/torch/mpi_lib_v2.so: undefined symbol: _ZN5torch')
sys.meta_path.insert(0, Broken())
from hvdtrain import LauncherError, init
try:
    init("keras")
except LauncherError as error:
    print(error)
"""
        done = self.run(code, **HOROVODRUN)
        assert "hvdtrain build-horovod --install" in done.stdout, done.stdout + done.stderr
        assert "horovod" in done.stdout.splitlines()[1], "what came is the loader's own words"

    def test_a_framework_missing_names_the_command(self) -> None:
        code = """
import sys
sys.modules["keras"] = None
from hvdtrain import ConfigError, init
try:
    init("keras")
except ConfigError as error:
    print(error)
"""
        done = self.run(code)
        assert "[keras]'" in done.stdout, done.stdout + done.stderr

    def test_alone_needs_no_horovod_and_seeds(self) -> None:
        code = """
import os, random, sys, torch_engine, numpy
from hvdtrain import current, init
draws = []
for _ in range(2):
    with init("torch", seed=5) as world:
        draws.append((random.random(), numpy.random.rand()))
        assert current() is world and world.launcher == "none" and world.engine == "solo"
assert current() is None and draws[0] == draws[1], draws
assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
assert not [name for name in sys.modules if name.startswith(("horovod", "torch."))]
print("done")
"""
        done = self.run(code)
        assert done.stdout == "done\n", done.stderr

    def test_torchrun_is_refused_with_the_remedy(self) -> None:
        code = "import torch_engine\nfrom hvdtrain import init\ninit('torch', engine='horovod')"
        done = self.run(code, **TORCHRUN)
        assert "cannot be started by torchrun" in done.stderr
        assert "horovodrun -np 4" in done.stderr


SCENARIOS = [
    "identity", "broadcast", "gather", "mean", "mean_of_names_that_differ", "sum", "agree", "on_main",
    "on_main_error", "on_main_hvdtrain_error", "on_main_result_that_cannot_travel", "on_main_system_exit",
]  # fmt: skip


@pytest.fixture(scope="module", params=["forked horovodrun", pytest.param("mpirun", marks=pytest.mark.thorough)])
def talk(request: pytest.FixtureRequest) -> Result:
    """One job of two real ranks that plays every scenario; each is a test of its own below."""
    return run_ranks([FOLDER / "world_ranks.py", *SCENARIOS], 2, launcher=request.param)


class TestRanks:
    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_scenario(self, talk: Result, scenario: str) -> None:
        for rank in range(2):
            assert f"{scenario}: passed" in talk.ranks_output.get(rank, ""), talk.text

    def test_ends_well(self, talk: Result, request: pytest.FixtureRequest) -> None:
        talk.check()
        launcher = request.node.callspec.params["talk"].removeprefix("forked ")
        assert all(f"launcher: {launcher}" in talk.ranks_output[rank] for rank in range(2))

    @pytest.mark.parametrize("launcher", ["horovodrun", pytest.param("mpirun", marks=pytest.mark.thorough)])
    def test_an_error_on_rank_0_ends_all_and_is_readable(self, launcher: str) -> None:
        done = run_ranks([FOLDER / "world_ranks.py", "main_fails"], 2, launcher=launcher, timeout_s=60)
        assert done.returncode != 0
        assert "the data must be there" in done.text and "/nowhere" in done.text
        assert done.seconds < 30, f"{done.seconds} s to end"

    def test_an_error_on_one_rank_ends_all(self) -> None:
        done = run_ranks([FOLDER / "world_ranks.py", "one_fails"], 2, timeout_s=60)
        assert done.returncode != 0
        assert "rank 1: only here" in done.text
        assert "past the barrier" not in done.text

    def test_seeds_that_differ_are_refused_on_every_rank(self) -> None:
        done = run_ranks([FOLDER / "world_ranks.py", "other_seed"], 2)
        for rank in range(2):
            assert "the seed must be the same on every rank" in done.ranks_output[rank], done.text
            assert "rank 1: 8" in done.ranks_output[rank]

    def test_launcher_and_engine_that_disagree_are_refused(self) -> None:
        # every process alone: what Horovod does when its MPI is not the launcher's
        code = "import torch_engine; torch_engine.BLIND = True; from hvdtrain import init; init('torch')"
        done = run_ranks(["-c", code], 2, launcher="horovodrun", env={"PYTHONPATH": f"{FOLDER}:{REPOSITORY}"})
        assert done.returncode != 0
        # whichever rank ends first takes the other with it
        assert re.search(r"horovodrun reports rank [01] of 2, blind reports rank 0 of 1", done.text), done.text
