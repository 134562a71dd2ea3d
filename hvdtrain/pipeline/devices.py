"""Devices as words, what there is of them, and where a stage works: its own cores or streams, and how values come."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.world import current
from hvdtrain.pipeline.microbatch import map_tensors, tensors_of
from hvdtrain.pipeline.plan import schedule
from hvdtrain.pipeline.threads import FairSemaphore

CPU_POOL = "cpu"
USABLE = 0.95  # of a GPU's memory that is free, or ours: the rest goes to fragments
# What tells when a value that was sent is there; None where values are there at once.
Mark = Any


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


def planned(device: torch.device, speed: float = 1.0) -> schedule.Device:
    """A device as a plan sees it: the CPU's stages share its cores, and its memory is not rationed."""
    if device.type != "cuda":
        return schedule.Device(str(device), speed=speed, pool=CPU_POOL)
    free, _ = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return schedule.Device(str(device), speed=speed, memory_bytes=(free + ours) * USABLE)


def kind_of(device: torch.device) -> str:
    """Devices of one kind take the same time."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# ---- where a stage works


def stage_devices(devices: Sequence[torch.device]) -> list[StageDevice]:
    """Where each stage works. On the CPU they share out the cores; with fewer cores than stages, passes take turns."""
    on_cpu = [index for index, device in enumerate(devices) if device.type == "cpu"]
    blocks = dict(zip(on_cpu, core_blocks(len(on_cpu)), strict=True)) if on_cpu else {}
    alone, slots = len(devices) == 1, cpu_slots(len(on_cpu))
    turns = FairSemaphore(slots) if slots else None
    return [
        CudaDevice(device)
        if device.type == "cuda"
        else StageDevice(device, None if alone else blocks.get(index, ()), turns)
        for index, device in enumerate(devices)
    ]


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


class StageDevice:
    """One stage's device, as the thread that works for the stage uses it; a CPU: operations are done when they return.

    Args:
        device: the CPU.
        cores: the stage's own; empty: one thread on any; None: it works in the caller's thread, as that is.
        turns: that passes take with those of other stages; None: there are cores for all.
    """

    def __init__(
        self, device: torch.device, cores: tuple[int, ...] | None = None, turns: FairSemaphore | None = None
    ) -> None:
        self.device = device
        self.cores = cores
        self._turns = turns

    @contextmanager
    def active(self) -> Iterator[None]:
        """What the thread runs inside."""
        # both are the calling thread's own, and end with it
        if self.cores is not None:
            if self.cores:
                os.sched_setaffinity(0, self.cores)
            torch.set_num_threads(max(1, len(self.cores)))
        yield

    def turn(self) -> AbstractContextManager[None]:
        """What each pass runs inside."""
        return self._turns.taken() if self._turns else nullcontext()

    def mark(self) -> Mark:
        """After the last operation so far."""
        return None

    def bring(self, values: Any, mark: Mark) -> Any:
        """Values from another stage, or from outside, on this device; leaves that want gradients stay such leaves."""
        if mark is not None:
            mark.synchronize()
        if _are_on(values, self.device):
            return values
        return map_tensors(lambda t: t.detach().to(self.device).requires_grad_(t.requires_grad), values)


class CudaDevice(StageDevice):
    """A GPU: operations are queued on the caller's stream, which sees to turns; values come on a stream of their own,
    so that the next micro-batch arrives while this one is computed."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._compute = torch.cuda.current_stream(device)
        self._copies = torch.cuda.Stream(device)

    @contextmanager
    def active(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self._compute):
            yield

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record(self._compute)
        return event

    def bring(self, values: Any, mark: Mark) -> Any:
        if _are_on(values, self.device):
            if mark is not None:
                self._compute.wait_event(mark)
            return values
        brought = map_tensors(lambda tensor: self._copy(tensor, mark), values)
        self._compute.wait_stream(self._copies)
        return brought

    def _copy(self, tensor: Tensor, mark: Mark) -> Tensor:
        with torch.cuda.stream(self._copies):
            if mark is not None:
                self._copies.wait_event(mark)
            if tensor.is_cuda and tensor.device != self.device:
                # a copy between GPUs runs on the current stream of the one it comes from
                source = torch.cuda.Stream(tensor.device)
                if mark is not None:
                    source.wait_event(mark)
                with torch.cuda.stream(source):
                    copy = tensor.detach().to(self.device, non_blocking=True)
                tensor.record_stream(source)
            else:
                copy = tensor.detach().to(self.device, non_blocking=True)
        # the allocator must not hand the copy's memory on while the computing stream reads it
        copy.record_stream(self._compute)
        return copy.requires_grad_(tensor.requires_grad)


def _are_on(values: Any, device: torch.device) -> bool:
    return all(tensor.device == device for tensor in tensors_of(values))
