"""Where a stage works: the cores or the streams that are its own, and how values come to it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from hvdtrain.core.world import current
from hvdtrain.pipeline.microbatch import map_tensors, tensors_of
from hvdtrain.pipeline.turns import Turns

# What tells when a value that was sent is there; None where values are there at once.
Mark = Any


class Lane(Protocol):
    """One stage's device, as the thread that works for the stage uses it."""

    device: torch.device

    @contextmanager
    def active(self) -> Iterator[None]:
        """What the thread runs inside."""
        ...

    def turn(self) -> AbstractContextManager[None]:
        """What each pass runs inside."""
        ...

    def mark(self) -> Mark:
        """After the last operation so far."""
        ...

    def bring(self, values: Any, mark: Mark) -> Any:
        """Values from another stage, or from outside, on this device; leaves that want gradients stay such leaves."""
        ...


def lanes(devices: Sequence[torch.device]) -> list[Lane]:
    """A lane for each stage. Stages on the CPU share out the cores; with fewer cores than stages, passes take turns."""
    on_cpu = [index for index, device in enumerate(devices) if device.type == "cpu"]
    blocks = dict(zip(on_cpu, core_blocks(len(on_cpu)), strict=True)) if on_cpu else {}
    alone, slots = len(devices) == 1, cpu_slots(len(on_cpu))
    turns = Turns(slots) if slots else None
    return [
        CudaLane(device) if device.type == "cuda" else CpuLane(device, None if alone else blocks.get(index, ()), turns)
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


class CpuLane:
    """Operations are done when they return.

    Args:
        device: the CPU.
        cores: the stage's own; empty: one thread on any; None: it works in the caller's thread, as that is.
        turns: that passes take with those of other stages; None: there are cores for all.
    """

    def __init__(self, device: torch.device, cores: tuple[int, ...] | None, turns: Turns | None = None) -> None:
        self.device = device
        self.cores = cores
        self._turns = turns

    @contextmanager
    def active(self) -> Iterator[None]:
        # both are the calling thread's own, and end with it
        if self.cores is not None:
            if self.cores:
                os.sched_setaffinity(0, self.cores)
            torch.set_num_threads(max(1, len(self.cores)))
        yield

    def turn(self) -> AbstractContextManager[None]:
        return self._turns.taken() if self._turns else nullcontext()

    def mark(self) -> Mark:
        return None

    def bring(self, values: Any, mark: Mark) -> Any:
        if mark is not None:
            mark.synchronize()
        return values if _are_on(values, self.device) else map_tensors(self._copy, values)

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device).requires_grad_(tensor.requires_grad)


class CudaLane:
    """Operations are queued on the caller's stream of the device; values come on a stream of their own, so that the
    next micro-batch arrives while this one is computed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compute = torch.cuda.current_stream(device)
        self._copies = torch.cuda.Stream(device)

    @contextmanager
    def active(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self._compute):
            yield

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()  # the device's own queue sees to it

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
