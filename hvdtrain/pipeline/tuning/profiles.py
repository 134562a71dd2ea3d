"""Measures a model's segments on the real devices: seconds, bytes, transfers."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.plan.costs import ZERO, Curve, Device, Link, SegmentCost
from hvdtrain.pipeline.trace.restore import all_training, preserved_state
from hvdtrain.pipeline.trace.segments import Segment, segments
from hvdtrain.pipeline.tuning.measure import Bytes, DeviceClock, Seconds, SegmentBench, on_device
from hvdtrain.pipeline.values.microbatch import samples_of
from hvdtrain.pipeline.values.places import kind_of, parse_devices, planned, stage_devices

BUDGET_S = 5.0  # for the repeats of one size: one at least is always taken
TRANSFERS_BYTES = (2**14, 2**24)


@dataclass(frozen=True)
class Profile:
    """The measured costs of a model, made by `profile`.

    Example:
        measured.save("profile.json")
        measured = hvdtrain.pipeline.Profile.load("profile.json")

    Attributes:
        costs: of each segment, on the first device.
        devices: each with its speed against the first, and its memory.
        links: from each device to the next one.
        samples: micro-batch sizes that were measured.
    """

    costs: tuple[SegmentCost, ...]
    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    samples: tuple[int, ...] = ()

    def save(self, path: str | Path) -> None:
        """Writes the profile as JSON."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1, default=str), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads a file of `save`; raises `ConfigError` for another file."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(
                costs=tuple(_cost(entry) for entry in data["costs"]),
                devices=tuple(Device(**entry) for entry in data["devices"]),
                links=tuple(Link(**entry) for entry in data["links"]),
                samples=tuple(data["samples"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError("a profile must be a file that Profile.save wrote", f"{path}: {error}") from error


def _cost(entry: Mapping[str, Any]) -> SegmentCost:
    def read(value: Any) -> Any:
        return Curve(tuple((at, cost) for at, cost in value["points"])) if isinstance(value, Mapping) else value

    return SegmentCost(**{name: read(value) for name, value in entry.items()})


def profile(
    model: nn.Module | Sequence[Segment],
    example: Any,
    devices: str | Sequence[str | torch.device],
    *,
    sizes: Sequence[int] | None = None,
    optimizer_copies: float = 1.0,
    repeats: int = 3,
    timed: bool = True,
) -> Profile:
    """Measures the costs of each segment of a model, forward and backward.

    Runs each segment in training mode on the first device, in a thread with a stage's cores. The model, its gradients,
    buffers and the random state do not change; autocast counts if it is on.

    Example:
        measured = hvdtrain.pipeline.profile(model, example, ["cuda:0", "cuda:1"])

    Args:
        model: the model, or its segments.
        example: a batch: a tensor [batch, ...] or a tuple of arguments.
        devices: one per stage, as for `hvdtrain.pipeline.split`.
        sizes: samples of the micro-batches that are measured; default: a sixteenth and a quarter of the batch.
        optimizer_copies: the optimizer's values per parameter: SGD with momentum 1, Adam 2.
        repeats: of each measurement, at most; large ones take fewer.
        timed: False measures bytes only, no times.

    Raises:
        ConfigError: the model fails on every size.
    """
    arguments = example if isinstance(example, tuple) else (example,)
    parts = segments(model, example) if isinstance(model, nn.Module) else list(model)
    places = parse_devices(devices)
    whole = parts[0].chain.program.model
    batch = samples_of(arguments)
    # larger ones where the model takes no small ones: batch norm wants several values
    shares = ((16, 4), (2,), (1,))
    wanted = [sorted({max(1, math.ceil(batch / share)) for share in some}) for some in shares]
    if sizes is not None:
        wanted = [sorted(set(sizes))]
    with preserved_state(whole, *places), all_training(whole, None if whole.training else True):
        bench = SegmentBench(parts, arguments, places[0])
        found = on_device(stage_devices(places)[0], lambda: _by_size(bench, wanted, repeats, timed), bench.stopped)
        costs = _costs(parts, found, optimizer_copies)
        if not timed:
            return Profile(costs, tuple(map(planned, places)), (Link(),) * (len(places) - 1), tuple(found))
        speeds = _speeds(parts, arguments, places, bench, min(found))
        links = tuple(_link(a, b) for a, b in zip(places, places[1:], strict=False))
    known = tuple(planned(place, speeds[kind_of(place)]) for place in places)
    return Profile(costs, known, links, tuple(found))


Found = dict[int, tuple[Bytes, list[Seconds]]]


def _by_size(bench: SegmentBench, wanted: Sequence[Sequence[int]], repeats: int, timed: bool) -> Found:
    """Returns measurements by micro-batch size, of the first sizes that can be run (batch norm, memory)."""
    found: Found = {}
    failure: Exception | None = None
    for sizes in wanted:
        for size in sizes:
            try:
                kept = bench.bytes(size)  # and the layers have planned their work for this shape
                found[size] = (kept, _repeated(bench, size, repeats) if timed else [])
            except (RuntimeError, ValueError) as error:  # what layers raise; the first also for memory
                failure = error
        if found:
            return found
    raise ConfigError(
        "a model must run on micro-batches of its example to be measured",
        f"{[size for sizes in wanted for size in sizes]} samples: {type(failure).__name__}: {str(failure)[:300]}",
        "a larger example, or balance=[...]: segments of each stage",
    ) from failure


def _repeated(bench: SegmentBench, size: int, repeats: int) -> list[Seconds]:
    start = time.perf_counter()
    taken: list[Seconds] = []
    bench.seconds(size)
    while len(taken) < repeats and (not taken or time.perf_counter() - start < BUDGET_S):
        taken.append(bench.seconds(size))
    return taken


def _costs(parts: Sequence[Segment], found: Found, optimizer_copies: float) -> tuple[SegmentCost, ...]:
    seen: set[int] = set()
    medians = {size: _medians(seconds) for size, (_, seconds) in found.items() if seconds}
    costs = []
    for index, part in enumerate(parts):
        mine = [t for t in (*part.parameters(), *part.buffers()) if id(t) not in seen]  # shared: lives with the first
        seen |= {id(tensor) for tensor in mine}
        held = sum(tensor.numel() * tensor.element_size() for tensor in mine)
        trained = sum(t.numel() * t.element_size() for t in mine if isinstance(t, nn.Parameter) and t.requires_grad)
        times = [
            Curve(tuple((size, passes[kind][index]) for size, passes in medians.items())) if medians else ZERO
            for kind in (0, 1)
        ]
        costs.append(
            SegmentCost(
                part.name,
                forward_s=times[0],
                backward_s=times[1],
                fixed_bytes=held + trained + int(trained * optimizer_copies),
                gradient_bytes=trained,
                activation_bytes=Curve(tuple((size, kept.kept[index]) for size, (kept, _) in found.items())),
                output_bytes=Curve(tuple((size, kept.output[index]) for size, (kept, _) in found.items())),
            )
        )
    return tuple(costs)


def _medians(repeats: Sequence[Seconds]) -> list[list[float]]:
    """Returns the medians of each segment's forward passes, and of its backward passes."""
    forward_and_backward = zip(*repeats, strict=True)
    return [[statistics.median(one) for one in zip(*passes, strict=True)] for passes in forward_and_backward]


def _speeds(
    parts: Sequence[Segment], arguments: tuple[Any, ...], places: Sequence[torch.device], first: SegmentBench, size: int
) -> dict[str, float]:
    """Returns the speed of each kind of device against the first, by the time of a pass."""
    speeds = {kind_of(places[0]): 1.0}
    for index, place in enumerate(places):
        if kind_of(place) in speeds:
            continue
        bench, device = SegmentBench(parts, arguments, place), stage_devices(places)[index]
        ours = on_device(stage_devices(places)[0], lambda: _pass_seconds(first, size), first.stopped)
        theirs = on_device(device, lambda s=bench: _pass_seconds(s, size), bench.stopped)  # type: ignore[misc]
        speeds[kind_of(place)] = ours / theirs
    return speeds


def _pass_seconds(bench: SegmentBench, size: int) -> float:
    bench.seconds(size)
    taken = [bench.seconds(size) for _ in range(3)]
    return statistics.median(sum(forward) + sum(backward) for forward, backward in taken)


def _link(a: torch.device, b: torch.device) -> Link:
    """Measures latency and rate of copies from one device to another."""
    if a == b:
        return Link()
    clock = DeviceClock(b if b.type == "cuda" else a)
    seconds = []
    for size in TRANSFERS_BYTES:
        source = torch.ones(size, dtype=torch.uint8, device=a)
        taken = []
        for _ in range(8):
            start = clock.now()
            source.to(b)
            taken.append(clock.between(start, clock.now()))
        seconds.append(statistics.median(taken[2:]))
    small, large = TRANSFERS_BYTES
    rate = (large - small) / max(seconds[1] - seconds[0], 1e-9)
    return Link(max(0.0, seconds[0] - small / rate), rate)
