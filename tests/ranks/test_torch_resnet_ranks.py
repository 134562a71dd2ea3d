"""The ResNet program, really run: every launch form and engine, folders of pictures, resuming, its flags."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import built_in
import pytest
from harness import Result, run_ranks
from pictures import CORRUPT, write_folder

from hvdtrain.record.log import read_events

SIDE = 40  # a ResNet makes 2x2 of it, so that a batch of one picture can be trained on


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("pictures"))


def run_program(launcher: str, ranks: int, *flags: object) -> Result:
    env = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    program = ["-m", "hvdtrain.torch_resnet", *map(str, flags)]
    return run_ranks(program, ranks, launcher=launcher, timeout_s=300, env=env)


def check_run(result: Result, run_dir: Path, ranks: int) -> dict[str, Any]:
    return built_in.check_run(result, run_dir, ranks, "top-1")


# ---- real runs


@pytest.mark.thorough
@pytest.mark.slow
def test_two_ranks_reach_the_accuracy(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = ["--model", "resnet18", "--data", "digits", "--epochs", 4, "--run-dir", run_dir]
    flags += ["--schedule", "cosine", "--warmup-epochs", 1]
    ended = check_run(run_program("horovodrun", 2, *flags), run_dir, 2)
    assert ended["top1"] >= 0.95 and ended["top5"] >= 0.99  # 0.99 after all 8 epochs: README
    epochs = [event for event in read_events(run_dir) if event["kind"] == "epoch"]
    assert [event["epoch"] for event in epochs] == list(range(4))
    check_phases(run_dir)


def check_phases(run_dir: Path) -> None:
    """Where the time went, on each rank, sums to the wall time; the first event also has what was before the loop."""
    events = read_events(run_dir)
    steps = [event for event in events if event["kind"] == "step"]
    wall = steps[-1]["time"] - steps[0]["time"]
    measured = sum(sum(event["seconds"].values()) for event in steps[1:])
    assert measured == pytest.approx(wall, rel=0.02)
    totals = [0.0, 0.0]
    for event in events:
        if event["kind"] == "epoch" and event["epoch"] > 0:
            totals = [total + sum(phases.values()) for total, phases in zip(totals, event["ranks"], strict=True)]
    assert totals[0] == pytest.approx(totals[1], rel=0.02) and totals[0] > wall / 2
    known = {"input", "forward", "backward", "communication", "optimizer", "checkpoint", "evaluation", "other"}
    assert set().union(*(event["seconds"] for event in steps)) == known


FORMS = [
    ("forked", 2, ("--pipeline", "cpu,cpu", "--micro-batches", "2", "--accumulate", "2", "--watch-every", "2")),
    *(
        pytest.param(launcher, ranks, flags, marks=pytest.mark.thorough)
        for launcher, ranks, flags in (
            ("none", 1, ()),
            ("none", 1, ("--engine", "dataparallel", "--gpus-per-rank", "2", "--optimizer", "adamw")),
            ("mpirun", 2, ("--compression", "fp16", "--accumulate", "2", "--clip", "1")),
            ("torchrun", 2, ("--engine", "ddp", "--amp", "bf16", "--sync-batchnorm")),
            ("torchrun", 2, ("--engine", "deepspeed", "--schedule", "cosine")),
            ("forked", 1, ("--plan", "auto", "--pipeline", "cpu,cpu")),
            ("horovodrun", 4, ("--channels-last", "--watch-every", "2", "--label-smoothing", "0.1")),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "ranks", "flags"), FORMS)
def test_launch_forms(launcher: str, ranks: int, flags: tuple[str, ...], pictures: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = run_program(
        launcher, ranks, "--model", "resnet18", "--data", pictures, "--image-size", SIDE, "--run-dir", run_dir,
        "--epochs", 1, "--per-rank-batch", 8 // ranks, *flags,
    )  # fmt: skip
    ended = check_run(result, run_dir, ranks)
    assert 0 <= ended["top1"] <= 1 and "top5" not in ended  # of noise
    run = built_in.record(run_dir)
    assert run["effective_batch"] == (16 if "--accumulate" in flags else 8)
    assert "3 classes" in result.ranks_output[0]
    assert ended["skipped"] == [str(pictures / "train" / "bee" / CORRUPT)]
    assert "skipped: 1 picture that cannot be read" in result.ranks_output[0]
    if "--pipeline" in flags and "--plan" not in flags:
        assert "2 micro-batches" in run["config"]["stages"]
    if "--plan" in flags:  # what is chosen is obeyed
        chosen = re.search(r"plan: (.*)", result.text)
        assert chosen and chosen[1].startswith("pipeline of 2 stages" if run["config"]["stages"] else "one device")
    engine = flags[flags.index("--engine") + 1] if "--engine" in flags else ("horovod" if ranks > 1 else "solo")
    assert run["world"]["engine"] == engine
