"""Checkpoints: bit-exact at the same size, every sample once at another, and the same files on every engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch_cases
from harness import Result, run_ranks
from limits import Limit

PROGRAM = torch_cases.FOLDER / "checkpoints.py"
# the first writes the checkpoint that all go on from
JOBS = {
    "horovod": ("forked horovodrun", 2, {}),
    "ddp": ("forked torchrun", 2, {}),
    "solo": ("forked", 1, {}),
    "dataparallel": ("forked", 1, {}),
    "deepspeed": ("forked torchrun", 2, {"DS_ACCELERATOR": "cpu"}),
    "ddp-zero1": ("forked torchrun", 2, {}),
    "deepspeed-zero1": ("forked torchrun", 2, {"DS_ACCELERATOR": "cpu"}),
}
THOROUGH = set(JOBS) - {"horovod", "dataparallel"}  # another number of ranks, and another engine
ENGINES = [pytest.param(engine, marks=[pytest.mark.thorough] * (engine in THOROUGH)) for engine in JOBS]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    here = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    thorough = any(item.get_closest_marker("thorough") for item in here)
    return {
        engine: run_ranks([PROGRAM, engine, folder], ranks, launcher=launcher, env=env, timeout_s=180)
        for engine, (launcher, ranks, env) in JOBS.items()
        if thorough or engine not in THOROUGH
    }


@pytest.mark.parametrize("case", torch_cases.names("checkpoints.py"))
@pytest.mark.parametrize("engine", ENGINES)
def test_checkpoint(case: str, engine: str, results: dict[str, Result]) -> None:
    assert case in torch_cases.passed(results[engine].out), results[engine].text


@pytest.mark.parametrize("engine", ENGINES)
def test_program_ends_well(engine: str, results: dict[str, Result]) -> None:
    results[engine].check()


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("ddp-zero1", ["solo"]),
        pytest.param("deepspeed-zero1", ["horovod", "ddp", "deepspeed", "solo"], marks=pytest.mark.thorough),
    ],
)
def test_what_has_parts_is_saved_whole(first: str, then: list[str], tmp_path: Path) -> None:
    """Written by ranks that each have a part of the optimizer's state, read by every other engine."""
    case = "case_any_engine_and_size_goes_on_from_the_common_checkpoint"
    for engine in (first, *then):
        launcher, ranks, env = JOBS[engine]
        written = ["case_a_run_goes_on_bit_for_bit"] if engine == first else []
        program: list[str | Path] = [PROGRAM, engine, tmp_path, "float32", *written, case]
        done = run_ranks(program, ranks, launcher=launcher, env=env, timeout_s=180).check()
        assert case in torch_cases.passed(done.out), done.text


STATE = torch_cases.FOLDER / "state.py"


@pytest.fixture(
    scope="module",
    params=["horovod", *(pytest.param(engine, marks=pytest.mark.thorough) for engine in ("solo", "ddp"))],
)
def state(request: pytest.FixtureRequest) -> Result:
    launcher, ranks, _ = JOBS[request.param]
    return run_ranks([STATE, request.param], ranks, launcher=launcher, timeout_s=180)


@pytest.mark.parametrize("case", torch_cases.names("state.py"))
def test_state(case: str, state: Result) -> None:
    assert case in torch_cases.passed(state.out), state.text


def test_limits_of_the_state(state: Result, limit: Limit) -> None:
    state.check()
    errors = dict(re.findall(r"error (t\d+\w*) (\S+)", state.out))
    limit("T8a", "rows of a MoCo queue are averaged over ranks: norm 0.52 instead of 1", exact=float(errors["t8"]))
    limit(
        "T8b", "checksums do not see the order: [3, 1] counts as [1, 3]", mended="a place's own factor for each element"
    )
    limit("T12", "a learning rate from numpy makes every checkpoint unreadable", exact=float(errors["t12"]))
    limit(
        "T14a", "a NaN gradient with a finite loss: NaN weights become the newest checkpoint",
        refused="weights that are not finite are not saved: training has diverged",
    )  # fmt: skip
    limit("T14b", "after NonFiniteError no way back", exact=float(errors["t14b"]))
    limit("T14c", "NonFiniteError is not public", mended="hvdtrain.NonFiniteError")
    limit("T15", "a scheduler, an average of weights: no slot in the checkpoint", exact=float(errors["t15"]))
    limit("T19i", "a buffer of another shape on each rank ends evaluate in an abort", refused="memory differs")


@pytest.mark.parametrize("engine", ["horovod", pytest.param("ddp", marks=pytest.mark.thorough)])
def test_nothing_prepared_is_left(engine: str, limit: Limit) -> None:
    launcher, ranks, _ = JOBS[engine]
    ended = run_ranks([torch_cases.FOLDER / "leaks.py", engine], ranks, launcher=launcher, timeout_s=240).check()
    grown = [float(found) for found in re.findall(r"workers 0, (\S+) MiB", ended.out)]
    assert len(grown) == ranks
    limit(
        "T16", "5 models in turn: 5 stay, with their worker processes", mended="8 in turn: none, less than 20 MiB more"
    )


KILLED = torch_cases.FOLDER / "killed_at_random.py"


@pytest.mark.parametrize("kills", [2, pytest.param(200, marks=pytest.mark.thorough)])
def test_killed_at_random_instants_a_run_ends_bit_for_bit(kills: int, tmp_path: Path) -> None:
    ended = run_ranks([KILLED, tmp_path, str(kills)], 1, timeout_s=60 + 15 * kills).check()
    assert f"{kills} kills" in ended.out and "all bit-equal" in ended.out
