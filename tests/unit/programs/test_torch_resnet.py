"""The ResNet program, really run: every launch form and engine, folders of pictures, resuming, its flags."""

from __future__ import annotations

import dataclasses

import pytest

from hvdtrain import torch_resnet
from hvdtrain.core.errors import ConfigError
from hvdtrain.vision import pipelines
from hvdtrain.world.world import World

# ---- flags


def test_flags_are_frozen() -> None:
    flags = {flag for action in torch_resnet.parser()._actions for flag in action.option_strings}
    assert flags == {
        "-h", "--help", "--model", "--epochs", "--per-rank-batch", "--accumulate", "--optimizer", "--lr", "--schedule",
        "--warmup-epochs", "--weight-decay", "--label-smoothing", "--clip", "--amp", "--sync-batchnorm", "--seed",
        "--data", "--image-size", "--workers", "--strict", "--run-dir", "--resume", "--weights", "--save-every",
        "--decode-whole",
        "--engine", "--device", "--gpus-per-rank", "--compression", "--channels-last", "--compile", "--watch-every",
        "--zero", "--pipeline", "--micro-batches", "--pipeline-schedule", "--remat", "--plan",
    }  # fmt: skip


def test_help_fits_and_tells(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        torch_resnet.main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for part in ("examples:", "horovodrun -np 2 python -m hvdtrain.torch_resnet", "ImageNet's layout", "dataparallel"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 120


def test_flags_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="--weights"):
        torch_resnet.check_flags(torch_resnet.parser().parse_args(["--resume", "--weights", "x"]))
    torch_resnet.check_flags(torch_resnet.parser().parse_args(["--weights", "x"]))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--micro-batches 4 --remat all", "add --pipeline N"),
        ("--plan auto --remat all", "--plan cannot be combined with"),
        ("--pipeline 2 --compile", "--pipeline 2 --compile"),
        ("--pipeline 2 --sync-batchnorm", "cannot be combined with --compile or --sync-batchnorm"),
        ("--plan auto --engine ddp", "--engine horovod"),
        ("--pipeline gpu", "cuda:0,cuda:1"),
        ("--pipeline 0", "a number of stages"),
        ("--pipeline 2 --micro-batches 0", "micro-batches"),
    ],
)
def test_what_a_pipeline_cannot_do_is_told_before_anything_starts(flags: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        torch_resnet.check_flags(torch_resnet.parser().parse_args(flags.split()))


def test_devices_of_the_stages() -> None:
    def of(flags: str, gpus: tuple[int, ...] = ()) -> tuple[list[str], int, str]:
        args = torch_resnet.parser().parse_args(flags.split())
        torch_resnet.check_flags(args)
        world = dataclasses.replace(World.solo(), devices=gpus)
        stages = pipelines.stages_of(args, world)
        return stages, pipelines.gpus_per_rank(args), pipelines.device(args)

    assert of("--pipeline 2") == (["cpu", "cpu"], 2, "auto")
    assert of("--pipeline 2", (2, 3)) == (["cuda:2", "cuda:3"], 2, "auto"), "each rank its own"
    assert of("--pipeline cpu,cpu,cpu") == (["cpu"] * 3, 1, "cpu")
    assert of("--pipeline cuda:0,cuda:1", (0, 1)) == (["cuda:0", "cuda:1"], 2, "auto")
    assert of("--pipeline cuda:0,cuda:0", (0,)) == (["cuda:0", "cuda:0"], 1, "auto")
    assert of("--plan auto --gpus-per-rank 4", (0, 1, 2, 3)) == ([f"cuda:{i}" for i in range(4)], 4, "auto")
