"""`split`: a model, an example and devices become a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from hvdtrain.errors import ConfigError
from hvdtrain.pipeline import plan
from hvdtrain.pipeline._facts import batch_of
from hvdtrain.pipeline._segments import Segment, from_modules, segments
from hvdtrain.pipeline._stage import build_stages

if TYPE_CHECKING:
    from hvdtrain.pipeline.runtime import Pipeline

BatchNorm = Literal["batch", "micro"]
Balance = Literal["time", "memory"]


def split(
    model: nn.Module,
    example: Any,
    devices: str | Sequence[str | torch.device],
    *,
    micro_batches: int | Literal["auto"] = "auto",
    balance: Balance | Sequence[int] = "time",
    schedule: plan.Schedule = "1f1b",
    remat: plan.Remat = "never",
    batch_norm: BatchNorm = "batch",
    modules: Sequence[nn.Module | str] | None = None,
) -> Pipeline:
    """Splits a model over local devices and returns it as a pipeline.

    Args:
        model: any module that `torch.fx` can follow, or with `modules` any at all. Its parameters and buffers move to
            the stages' devices, as `model.to()` would move them; the model itself is not to be called any more.
        example: a batch of the size that will be trained with: a tensor [batch, ...], or a tuple of arguments.
        devices: one for each stage: ["cuda:0", "cuda:1"] or "cuda:0,cuda:1"; "cpu,cpu" is two stages on the CPU, each
            with its share of the cores.
        micro_batches: parts that a batch is cut into; "auto": what the measured costs predict to be fastest.
        balance: which segments a stage gets: "time" measures them and makes the slowest stage as fast as possible,
            "memory" makes the fullest stage as small as possible; or the number of segments of each stage.
        schedule: "1f1b" or "gpipe"; see `hvdtrain.pipeline.plan.actions`.
        remat: which activations are computed once more instead of kept; see `hvdtrain.pipeline.plan.recomputed`.
        batch_norm: "batch": running statistics are those of whole batches; "micro": of micro-batches, one by one.
        modules: the model's parts in order, each called with what the one before returns, for models that cannot be
            traced; strings name submodules.

    Raises:
        ConfigError: before anything is moved: a device that does not exist, more stages than segments, a balance that
            does not add up, fewer samples than micro-batches, an unknown word, a model that cannot be traced.
    """
    places = parse_devices(devices)
    _check_words(schedule, remat, batch_norm, balance)
    batch = batch_of(example if isinstance(example, tuple) else (example,))
    if micro_batches != "auto":
        if isinstance(micro_batches, bool) or not isinstance(micro_batches, int):
            raise ConfigError("micro_batches is a number or 'auto'", repr(micro_batches))
        plan.micro_batch_sizes(batch, micro_batches)
    parts = segments(model, example) if modules is None else from_modules(modules, model, example)
    sizes = _sizes(parts, len(places), balance)
    count = 1 if micro_batches == "auto" else micro_batches
    stages = build_stages(model, parts, sizes, places)
    from hvdtrain.pipeline.runtime import Pipeline

    return Pipeline(
        model, stages, micro_batches=count, schedule=schedule, remat=remat, batch_norm=batch_norm, segments=parts,
        profile=None,
    )  # fmt: skip


def parse_devices(devices: str | Sequence[str | torch.device]) -> list[torch.device]:
    """["cuda:0", "cuda:1"] or "cuda:0,cuda:1" as devices that exist.

    Raises:
        ConfigError: none given, not a device, or not on this machine.
    """
    words = [word.strip() for word in devices.split(",")] if isinstance(devices, str) else list(devices)
    if not words or "" in words:
        raise ConfigError("a pipeline has a device for each stage", repr(devices), 'for example "cuda:0,cuda:1"')
    return [_device(word) for word in words]


def _device(word: str | torch.device) -> torch.device:
    try:
        device = torch.device(word)
    except (RuntimeError, TypeError) as error:
        raise ConfigError("a device is named like cpu or cuda:0", repr(word), 'for example "cpu,cpu"') from error
    gpus = torch.cuda.device_count()
    if device.type == "cuda":
        index = device.index or 0
        if index >= gpus:
            there = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(gpus)) or "no CUDA device"
            raise ConfigError("a device of a pipeline exists", f"{word}; this process sees {there}, and cpu")
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise ConfigError("a pipeline runs on cpu and cuda devices", str(word))
    return torch.device("cpu")


def _check_words(schedule: Any, remat: Any, batch_norm: Any, balance: Any) -> None:
    words = {
        "schedule": (schedule, plan.SCHEDULES),
        "remat": (remat, plan.REMATS),
        "batch_norm": (batch_norm, get_args(BatchNorm)),
    }
    if isinstance(balance, str):
        words["balance"] = (balance, get_args(Balance))
    for name, (given, known) in words.items():
        if given not in known:
            raise ConfigError(f"{name} is one of {', '.join(known)}", repr(given))


def _sizes(parts: Sequence[Segment], stages: int, balance: Balance | Sequence[int]) -> list[int]:
    if stages > len(parts):
        names = ", ".join(part.name for part in parts)
        raise ConfigError(
            "every stage needs a segment",
            f"{stages} stages for {len(parts)} segment(s): {names}",
            f"at most {len(parts)} device(s); or modules=[...] with smaller parts",
        )
    if isinstance(balance, str):
        small, larger = divmod(len(parts), stages)
        return [small + (index < larger) for index in range(stages)]
    sizes = list(balance)
    if len(sizes) != stages or sum(sizes) != len(parts) or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ConfigError(
            "balance=[...] says how many segments each stage gets, at least one, all of them",
            f"{sizes} for {stages} stage(s) and {len(parts)} segments",
            "hvdtrain.pipeline.split(...).segments lists them",
        )
    return sizes
