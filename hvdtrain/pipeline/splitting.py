"""`split`: makes a pipeline of a model, an example and devices."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import nn

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.plan import schedule as plan
from hvdtrain.pipeline.plan.costs import stage_costs
from hvdtrain.pipeline.plan.partition import partition
from hvdtrain.pipeline.plan.simulate import simulate
from hvdtrain.pipeline.run.runtime import Pipeline, check_setting
from hvdtrain.pipeline.run.stage import build_stages
from hvdtrain.pipeline.trace.segments import Segment, from_modules, segments
from hvdtrain.pipeline.tuning.profiles import profile
from hvdtrain.pipeline.values.microbatch import Chunk, flat, marked, samples_of
from hvdtrain.pipeline.values.places import parse_devices
from hvdtrain.pipeline.values.threads import uninterrupted
from hvdtrain.world.resources import keep_freed_memory

BatchNorm = Literal["batch", "micro"]
Balance = Literal["time", "memory"]
P = ParamSpec("P")
Result = TypeVar("Result")
_splitting = threading.RLock()
MOST_MICRO_BATCHES = 256  # that are tried; smaller parts of a large batch would only cost more


def _one_at_a_time(function: Callable[P, Result]) -> Callable[P, Result]:
    """A split replaces parts of PyTorch, and sets the generators, for all threads."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> Result:
        with _splitting:
            return function(*args, **kwargs)

    return called


@_one_at_a_time
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
    chunk: Chunk = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Splits a model over local devices and returns it as a pipeline.

    Example:
        pipe = hvdtrain.pipeline.split(model, example, ["cuda:0", "cuda:1"])
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)

    Args:
        model: a module that `torch.fx` can trace, or with `modules` any module. Its parameters and buffers move to the
            stages' devices, as `model.to()` would move them; do not call the model itself any more.
        example: a batch of the size that you will train with: a tensor [batch, ...], or a tuple of arguments.
        devices: one per stage: ["cuda:0", "cuda:1"] or "cuda:0,cuda:1"; "cpu,cpu" is two stages on the CPU, each with
            its share of the cores (call `hvdtrain.init` before you build the model).
        micro_batches: parts that a batch is cut into; "auto": the number that the measured costs predict to be fastest.
        balance: which segments a stage gets: "time" measures them and makes the slowest stage as fast as possible,
            "memory" makes the fullest stage as small as possible; or the number of segments of each stage.
        schedule: "1f1b" or "gpipe"; see `hvdtrain.pipeline.plan.schedule.actions`.
        remat: the activations to recompute instead of keeping them: `hvdtrain.pipeline.plan.schedule.recomputed`.
        batch_norm: "batch": running statistics are those of whole batches; "micro": of micro-batches, one by one.
        modules: for models that cannot be traced: the model's parts in order, each called with the result of the one
            before; strings name submodules.
        chunk: for each argument 0 (tensors as long as the batch are cut along dimension 0) or None (every micro-batch
            gets it whole): for inputs that may be as long as the batch by chance, like a mask. A dict sets it for some,
            by keyword or place; a list or dict in place of a 0 sets it for parts of a nested argument.
        kwargs: the example's keyword arguments; steps and calls take the same ones.

    Raises:
        ConfigError: outputs for the two halves of the example differ from those of the whole. Or, before anything is
            moved: a device that does not exist, more stages than segments, a balance that does not add up, fewer
            samples than micro-batches, an unknown setting, a model that cannot be traced.
    """
    places = parse_devices(devices)
    for name, value in (("schedule", schedule), ("remat", remat), ("batch_norm", batch_norm)):
        check_setting(name, value)
    if isinstance(balance, str) and balance not in get_args(Balance):
        raise ConfigError(f"balance= must be one of {', '.join(get_args(Balance))}, or a list", repr(balance))
    names = tuple(kwargs or ())
    example = marked(flat(example, kwargs, names), chunk, names)
    batch = samples_of(example)
    if micro_batches != "auto":
        if isinstance(micro_batches, bool) or not isinstance(micro_batches, int):
            raise ConfigError("micro_batches= must be a whole number or 'auto'", repr(micro_batches))
        plan.micro_batch_sizes(batch, micro_batches)
    if any(place.type == "cpu" for place in places):
        keep_freed_memory()  # before there are threads
    with uninterrupted():
        parts = segments(model, example, names) if modules is None else from_modules(modules, model, example, names)
    sizes, count = _resolved(
        parts, example, places, batch=batch, micro_batches=micro_batches, balance=balance, schedule=schedule,
        remat=remat,
    )  # fmt: skip
    pipe = Pipeline(
        model, build_stages(model, parts, sizes, places), micro_batches=count, schedule=schedule, remat=remat,
        batch_norm=batch_norm, segments=parts, chunk=chunk,
    )  # fmt: skip
    pipe.check_example(example)
    return pipe


def _resolved(
    parts: Sequence[Segment],
    example: Any,
    places: Sequence[torch.device],
    *,
    batch: int,
    micro_batches: int | Literal["auto"],
    balance: Balance | Sequence[int],
    schedule: plan.Schedule,
    remat: plan.Remat,
) -> tuple[Sequence[int], int]:
    """Segments of each stage, and micro-batches; measures only if one of them is not given."""
    _check_sizes(parts, len(places), balance)
    if len(places) == 1:
        return [len(parts)], 1 if micro_batches == "auto" else micro_batches
    if micro_batches != "auto" and not isinstance(balance, str):
        return list(balance), micro_batches
    measured = profile(parts, example, places, timed=micro_batches == "auto" or balance == "time")

    def cut(count: int) -> tuple[int, ...]:
        return partition(
            measured.costs, measured.devices, batch=batch, micro_batches=count, schedule=schedule, remat=remat,
            links=measured.links, balance=balance,
        ).sizes  # fmt: skip

    if micro_batches != "auto":
        return cut(micro_batches), micro_batches
    found = []
    most = min(batch, MOST_MICRO_BATCHES)
    for count in sorted({*plan.usual_counts(most), most}):
        try:
            sizes = cut(count)
        except ConfigError:
            continue
        step = simulate(
            stage_costs(measured.costs, sizes, measured.devices), sizes=plan.micro_batch_sizes(batch, count),
            schedule=schedule, remat=remat, links=measured.links,
        )  # fmt: skip
        found.append((step.step_s, count, sizes))
    if not found:
        cut(batch)  # says what does not fit
    _, count, sizes = min(found)
    return sizes, count


def _check_sizes(parts: Sequence[Segment], stages: int, balance: Balance | Sequence[int]) -> None:
    if stages > len(parts):
        names = ", ".join(part.name for part in parts)
        raise ConfigError(
            "every stage needs a segment",
            f"{stages} stages for {len(parts)} segment(s): {names}",
            f"at most {len(parts)} device(s); or modules=[...] with smaller parts",
        )
    if isinstance(balance, str):
        return
    sizes = list(balance)
    if len(sizes) != stages or sum(sizes) != len(parts) or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ConfigError(
            "balance=[...] must give each stage at least one segment, and use all segments",
            f"{sizes} for {stages} stage(s) and {len(parts)} segments:\n{_numbered(parts)}",
            f"{stages} number(s) that sum to {len(parts)}",
        )


def _numbered(parts: Sequence[Segment]) -> str:
    """Returns a text of all segments if they are few, else of the first five and the last five."""
    lines = [f"{part.index}: {part.name}" for part in parts]
    return "\n".join(lines if len(lines) <= 12 else [*lines[:5], "...", *lines[-5:]])
