"""The ResNet program, really run: every launch form and engine, folders of pictures, resuming, its flags."""

from __future__ import annotations

import dataclasses

import pytest

from hvdtrain import torch_resnet
from hvdtrain.core.errors import ConfigError
from hvdtrain.vision import pipelines
from hvdtrain.world.world import World

# ---- flags


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--micro-batches 4 --remat all", "add --pipeline N"),
        ("--plan auto --remat all", "--plan cannot be combined with"),
        ("--pipeline 2 --compile", "--pipeline --compile"),
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
