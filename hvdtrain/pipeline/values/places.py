"""Where stages work: devices, threads with cores of their own, streams of GPUs; and how values come there.

On CPUs every stage has a thread: nothing else would let two of them compute at once. GPUs compute by themselves: the
calling thread issues what all stages do, in the order of the schedule.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.plan import costs
from hvdtrain.pipeline.plan.schedule import AHEAD
from hvdtrain.pipeline.values.threads import Crew
from hvdtrain.values.nested import map_tensors, tensors_of
from hvdtrain.world.world import current

USABLE = 0.95  # of a GPU's memory that is free, or ours: the rest goes to fragments


def parse_devices(devices: str | Sequence[str | torch.device]) -> list[torch.device]:
    """Returns ["cuda:0", "cuda:1"] or "cuda:0,cuda:1" as devices; raises `ConfigError` if one does not exist."""
    words = [word.strip() for word in devices.split(",")] if isinstance(devices, str) else list(devices)
    if not words or "" in words:
        raise ConfigError("a pipeline needs a device for each stage", repr(devices), 'for example "cuda:0,cuda:1"')
    return [_device(word) for word in words]


def _device(word: str | torch.device) -> torch.device:
    try:
        device = torch.device(word)
    except (RuntimeError, TypeError) as error:
        raise ConfigError("a device must be named like cpu or cuda:0", repr(word), 'for example "cpu,cpu"') from error
    gpus = torch.cuda.device_count()
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device() if gpus else 0
        if index >= gpus:
            there = ", ".join([*(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(gpus)), "cpu"])
            raise ConfigError(
                "a device of the pipeline does not exist",
                f"{word}; this machine has {there}",
                "name a device of this machine (CUDA_VISIBLE_DEVICES may hide some)",
            )
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise ConfigError("devices of a pipeline must be cpu or cuda", str(word))
    return torch.device("cpu")


def planned(device: torch.device, speed: float = 1.0) -> costs.Device:
    """A device as a plan sees it: the CPU's memory is not rationed."""
    if device.type != "cuda":
        return costs.Device(str(device), speed=speed)
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


# By device, what tells when the values that lie there are: those of the CPU are there at once, unless a GPU sends them.
Mark = dict[torch.device, Any]


def where(tensor: Tensor) -> torch.device:
    """A tensor's device."""
    return tensor.device


def mark(values: Any) -> Mark:
    """Records an event after the last operation so far of the current stream of each GPU where values lie."""
    found: Mark = {}
    for tensor in tensors_of(values):
        device = where(tensor)
        if device.type == "cuda" and device not in found:
            found[device] = torch.cuda.Event()
            found[device].record(torch.cuda.current_stream(device))
    return found


class StageDevice:
    """A stage's device, as the stage's thread uses it. `cores`: its own; (): one thread on any; None: the caller's."""

    def __init__(self, device: torch.device, cores: tuple[int, ...] | None = None) -> None:
        self.device = device
        self.cores = cores

    def settle(self) -> None:
        """Sets the cores and the number of threads of the stage's own thread; both end with it."""
        if self.cores is None:
            return
        if self.cores and os.sched_getaffinity(0) != set(self.cores):
            os.sched_setaffinity(0, self.cores)
        count = max(1, len(self.cores))
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)

    def turn(self) -> AbstractContextManager[None]:
        """Returns the context that each pass runs in."""
        return nullcontext()

    def bring(self, values: Any, there: Mark) -> Any:
        """Values from another stage, or from outside, on this device; leaves that want gradients stay such leaves."""
        for event in there.values():
            event.synchronize()
        if all(where(tensor) == self.device for tensor in tensors_of(values)):
            return values
        return map_tensors(lambda t: t.detach().to(self.device).requires_grad_(t.requires_grad), values)


class Lanes:
    """The streams on which values come to a GPU while it computes: made once, and one for each device they come from.

    A copy between GPUs runs on the current stream of the one it comes from, and into memory of the current stream of
    the one it goes to (ATen/native/cuda/Copy.cu): a lane has one on each.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, torch.device, torch.device], Any] = {}
        self._lock = threading.Lock()
        self._from_host: Any = None

    def bring(self, tensor: Tensor, device: torch.device, there: Mark, compute: Any) -> Tensor:
        """Returns a copy on another device, which `compute` may read from now on; `there`: when the tensor is."""
        source = where(tensor)
        into = self._stream(source, device, on=device)
        if source.type == "cuda":
            out = self._stream(source, device, on=source)
            out.wait_event(there[source])
            with torch.cuda.stream(into), torch.cuda.stream(out):
                copy = copied(tensor, device)
            tensor.record_stream(out)
        else:
            with torch.cuda.stream(into):
                if source in there:
                    into.wait_event(there[source])
                copy = copied(pinned(tensor), device)
            if source not in there:  # the caller's
                self._from_host = torch.cuda.Event()
                self._from_host.record(into)
        compute.wait_stream(into)
        # the allocator must not hand the copy's memory on while the computing stream reads it
        copy.record_stream(compute)
        return copy

    def host_is_read(self) -> None:
        """Waits until what the caller has on the host was read, so that it may be changed."""
        event, self._from_host = self._from_host, None
        if event is not None:
            event.synchronize()

    def _stream(self, source: torch.device, target: torch.device, *, on: torch.device) -> Any:
        with self._lock:
            if (source, target, on) not in self._streams:
                self._streams[source, target, on] = torch.cuda.Stream(on)
            return self._streams[source, target, on]


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy that this thread does not wait for."""
    return tensor.detach().to(device, non_blocking=True)


def pinned(tensor: Tensor) -> Tensor:
    """Returns a tensor of the CPU in memory that a GPU reads directly."""
    return tensor if tensor.is_pinned() else tensor.pin_memory()


class CudaDevice(StageDevice):
    """A GPU: operations are queued on the caller's stream; values come on streams of their own, so that the next
    micro-batch arrives while this one is computed.

    Memory that two streams use is freed when the host sees that both are done with it. To free it soon, the host waits
    if it is further ahead than `AHEAD` passes: the GPU always has one more pass to run.
    """

    def __init__(self, device: torch.device, lanes: Lanes) -> None:
        super().__init__(device)
        self._compute = torch.cuda.current_stream(device)
        self._lanes = lanes
        self._queued: deque[Any] = deque()

    @contextmanager
    def turn(self) -> Iterator[None]:
        while len(self._queued) >= AHEAD:
            self._queued.popleft().synchronize()
        with torch.cuda.device(self.device), torch.cuda.stream(self._compute):
            yield
            done = torch.cuda.Event(blocking=True)  # who waits for it sleeps
            done.record(self._compute)
        self._queued.append(done)

    def bring(self, values: Any, there: Mark) -> Any:
        if self.device in there:
            self._compute.wait_event(there[self.device])

        def here(tensor: Tensor) -> Tensor:
            if where(tensor) == self.device:
                return tensor
            copy = self._lanes.bring(tensor, self.device, there, self._compute)
            return copy.requires_grad_(tensor.requires_grad)

        return map_tensors(here, values)


def stage_devices(devices: Sequence[torch.device], lanes: Lanes | None = None) -> list[StageDevice]:
    """Returns each stage's device; CPU stages divide the cores."""
    on_cpu = [index for index, device in enumerate(devices) if device.type == "cpu"]
    blocks = dict(zip(on_cpu, core_blocks(len(on_cpu)), strict=True)) if on_cpu else {}
    alone, lanes = len(devices) == 1, lanes or Lanes()
    return [
        CudaDevice(device, lanes)
        if device.type == "cuda"
        else StageDevice(device, None if alone else blocks.get(index, ()))
        for index, device in enumerate(devices)
    ]


class Places:
    """The state that lasts between calls of a pipeline: streams and, with a CPU, a thread for each stage."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices, self.lanes = list(devices), Lanes()
        self.threads = len(devices) > 1 and any(device.type == "cpu" for device in devices)
        self._crew: Crew | None = None
        self._placed: Any = None

    def stage_devices(self) -> list[StageDevice]:
        """Returns the devices for one call, with the cores and streams that the calling thread has now."""
        return stage_devices(self._devices, self.lanes)

    def run(self, at: Sequence[StageDevice], works: Sequence[Callable[[], None]], stop: Callable[[], None]) -> None:
        """Runs each stage's work in the stage's thread; see `Crew.run`."""
        placed = os.sched_getaffinity(0), [one.cores for one in at]
        if self._crew is None or not self._crew.is_here or placed != self._placed:
            self.close()  # threads, and those that OpenMP made for them, stay on the cores they began with
            self._crew, self._placed = Crew("hvdtrain pipeline stage"), placed
        self._crew.run(works, stop)

    def close(self) -> None:
        """The threads end."""
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()
