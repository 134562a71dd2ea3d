"""A classifier of pictures cut over the devices of its rank, as --pipeline and --plan ask for it.

Every rank has the same stages: rank 0 measures and decides, the others follow.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvdtrain.core import flags
from hvdtrain.core.errors import ConfigError
from hvdtrain.vision.recipes import Settings
from hvdtrain.world.resources import usable_cores
from hvdtrain.world.world import World

if TYPE_CHECKING:
    import torch

    from hvdtrain.pipeline import Pipeline
    from hvdtrain.pipeline.tuning.planner import ParallelPlan

_MOST_CPU_STAGES = 4  # that --plan auto thinks of


# ---- flags


def check_flags(args: argparse.Namespace) -> None:
    """Refuses flags of a pipeline without one, and what a pipeline cannot do."""

    def given(*names: str) -> list[str]:
        values = {name: getattr(args, name.replace("-", "_")) for name in names}
        return [f"--{name} {value}".removesuffix(" True") for name, value in values.items() if value]

    how = given("micro-batches", "pipeline-schedule", "remat")
    cut = given("plan") + ([] if args.pipeline is None else ["--pipeline"])
    other = given("compile", "sync-batchnorm")
    rule = remedy = ""
    if how and args.plan:
        rule, remedy = "--plan cannot be combined with flags that it chooses", f"remove {' '.join(how)}"
    elif how and not cut:
        rule, remedy = "these flags need --pipeline", "add --pipeline N, with N stages"
    elif cut and other:
        rule, remedy = "a pipeline cannot be combined with --compile or --sync-batchnorm", "choose one"
    elif cut and args.engine not in ("auto", "solo", "horovod"):
        rule = "a pipeline needs --engine horovod or solo"
        other, remedy = given("engine"), "--engine horovod, started with horovodrun, mpirun or srun"
    if rule:
        raise ConfigError(rule, " ".join([*cut, *how, *other]), remedy, shared=True)


def devices_of_stages(text: str) -> list[str] | int:
    """A type for flags: how many stages, or the device of each."""
    if text.isdigit() and int(text) > 0:
        return int(text)
    devices = [part.strip() for part in text.split(",")]
    if all(part in ("cpu", "cuda") or (part.startswith("cuda:") and part[5:].isdigit()) for part in devices):
        return devices
    raise argparse.ArgumentTypeError(
        f"must be a number of stages, or their devices (cpu,cpu or cuda:0,cuda:1), not {text!r}"
    )


def micro_batches(text: str) -> int | str:
    """A type for flags: "auto", or how many."""
    return text if text == "auto" else flags.whole(1)(text)


def gpus_per_rank(args: argparse.Namespace) -> int:
    """Returns how many GPUs each rank needs, if there are any."""
    stages = len(set(args.pipeline) - {"cpu"}) if isinstance(args.pipeline, list) else args.pipeline or 1
    return max(args.gpus_per_rank, stages)


def device(args: argparse.Namespace) -> str:
    """Returns the device for `init`: with "auto", "cpu" if all named stages are on the CPU."""
    only_cpu = isinstance(args.pipeline, list) and set(args.pipeline) == {"cpu"}
    return "cpu" if only_cpu and args.device == "auto" else args.device


# ---- cutting


def stages_of(args: argparse.Namespace, world: World) -> list[str]:
    """The devices of this rank's stages: those named, else its own GPUs, else the CPU once a stage."""
    own = [f"cuda:{index}" for index in world.devices]
    if isinstance(args.pipeline, list):
        return args.pipeline
    if args.pipeline is None:  # --plan auto
        return own or ["cpu"] * max(1, min(_MOST_CPU_STAGES, int(usable_cores(world))))
    return own or ["cpu"] * args.pipeline


def apply(
    args: argparse.Namespace, plan: Settings, network: torch.nn.Module, image_size: int, world: World
) -> tuple[Pipeline | None, Settings]:
    """Cuts the model if --pipeline or --plan is given; collective. Returns the pipeline, or None for a model that stays
    whole; and the settings, which a plan may change. Raises `ConfigError` on every rank."""
    if args.pipeline is None and not args.plan:
        return None, plan
    from hvdtrain.pipeline import split

    devices = stages_of(args, world)
    example = pictures(plan.per_rank_batch, image_size)
    if args.plan:
        return _apply_plan(args, plan, network, example, devices, world)
    made: list[Pipeline] = []

    def measured() -> dict[str, Any]:
        """Cuts by measured times; returns how the other ranks cut likewise."""
        made.append(
            split(
                network,
                example,
                devices,
                micro_batches="auto" if args.micro_batches is None else args.micro_batches,
                schedule=args.pipeline_schedule or "1f1b",
                remat=args.remat or "never",
            )
        )
        return _cut([len(stage.segments) for stage in made[0].stages], made[0])

    cut = world.on_main(measured)
    return made[0] if made else split(network, example, devices, **cut), plan


def _apply_plan(
    args: argparse.Namespace, plan: Settings, network: torch.nn.Module, example: torch.Tensor, devices: list[str],
    world: World,
) -> tuple[Pipeline | None, Settings]:  # fmt: skip
    """Cuts the model as rank 0 plans; collective."""
    from hvdtrain.pipeline import split
    from hvdtrain.pipeline.tuning import planner

    chosen: ParallelPlan = world.on_main(
        planner.choose,
        network,
        example,
        devices=devices,
        batch=plan.per_rank_batch,
        optimizer_copies=2.0 if plan.optimizer == "adamw" else 1.0,  # two moments, or the momentum
    )
    if world.is_main:
        print(f"plan: {chosen}", flush=True)
    plan = plan.in_parts(chosen.accumulate)
    if chosen.stages == 1:
        left = len(set(devices)) - 1
        if world.is_main and left:
            print(f"whole on one device: {left} of this rank's devices stay idle; start a rank for each", flush=True)
        return None, plan
    return split(network, example[: plan.per_rank_batch], devices[: chosen.stages], **_cut(chosen.sizes, chosen)), plan


def _cut(sizes: Sequence[int], like: ParallelPlan | Pipeline) -> dict[str, Any]:
    """Returns options of `hvdtrain.pipeline.split` from a plan, or from another rank's cut; nothing is measured."""
    return {
        "balance": list(sizes), "micro_batches": like.micro_batches, "schedule": like.schedule, "remat": like.remat,
    }  # fmt: skip


def pictures(samples: int, image_size: int) -> torch.Tensor:
    """Noise, to measure with: float32 [samples, 3, image_size, image_size]."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 3, image_size, image_size, generator=generator)
