"""Devices as words, and what there is of them: memory, cores."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.plan import costs
from hvdtrain.pipeline.plan.schedule import AHEAD
from hvdtrain.world.world import current

CPU_POOL = "cpu"
USABLE = 0.95  # of a GPU's memory that is free, or ours: the rest goes to fragments


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
        index = device.index if device.index is not None else torch.cuda.current_device() if gpus else 0
        if index >= gpus:
            there = ", ".join([*(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(gpus)), "cpu"])
            raise ConfigError(
                "a device of a pipeline exists",
                f"{word}; there is {there}",
                "name one that is there (CUDA_VISIBLE_DEVICES may hide some)",
            )
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise ConfigError("a pipeline runs on cpu and cuda devices", str(word))
    return torch.device("cpu")


def planned(device: torch.device, speed: float = 1.0) -> costs.Device:
    """A device as a plan sees it: the CPU's stages share its cores, and its memory is not rationed."""
    if device.type != "cuda":
        return costs.Device(str(device), speed=speed, pool=CPU_POOL)
    free, _ = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return costs.Device(str(device), speed=speed, memory_bytes=(free + ours) * USABLE, ahead=AHEAD)


def kind_of(device: torch.device) -> str:
    """Devices of one kind take the same time."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def core_blocks(stages: int) -> list[tuple[int, ...]]:
    """The cores of each of several CPU stages; empty tuples where they have to share.

    PyTorch's number of threads is what this process was given: with fewer threads than stages nothing is pinned, and
    each stage runs one thread wherever there is room. Ranks of one host that may all run anywhere take the next ones.
    """
    cores = sorted(os.sched_getaffinity(0))
    usable = min(len(cores), torch.get_num_threads())
    if usable < stages:
        return [()] * stages
    world = current()
    before = world.local_rank * usable if world and world.local_size * usable <= len(cores) else 0
    ends = [before + usable * index // stages for index in range(stages + 1)]
    return [tuple(cores[start:end]) for start, end in zip(ends, ends[1:], strict=False)]


def cpu_slots(stages: int) -> int:
    """How many of this process's CPU stages may be in a pass at once, if there are too few cores for all; else 0.

    Each stage runs at least one thread. More of them than cores would displace each other's caches, and nobody could
    tell how long a pass takes.
    """
    cores = len(os.sched_getaffinity(0))
    return cores if stages > cores else 0
