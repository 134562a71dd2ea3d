"""Times and bytes of a chain of segments on one device, under the conditions that a stage has there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hvdtrain.pipeline.run.stage import Copies
from hvdtrain.pipeline.trace.restore import device_of, resized, to_device
from hvdtrain.pipeline.trace.segments import Segment
from hvdtrain.pipeline.values.places import StageDevice
from hvdtrain.pipeline.values.threads import Context, Crew, surely
from hvdtrain.values.nested import map_tensors, tensors_of

Call = Callable[..., tuple[Any, ...]]


Seconds = tuple[list[float], list[float]]  # of one pass: of each segment, forward and backward


@dataclass
class Bytes:
    """The bytes of one pass over the chain, for each segment: kept for its backward pass, and handed to the next."""

    kept: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)


class Stopped(Exception):
    """The caller was interrupted."""


class DeviceClock:
    """Times on a device: of the processor, or of the GPU's own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, start: Any, end: Any) -> float:
        """Returns seconds; waits until `end` has happened."""
        if self._device.type != "cuda":
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class SegmentBench:
    """A chain on one device, to be measured there. A softmax over its outputs stands for the loss that will follow.

    If the model is elsewhere, copies of its parts are measured, one after the other: it may not fit there as a whole.
    `stopped` ends what is being measured.
    """

    def __init__(self, segments: Sequence[Segment], example: tuple[Any, ...], device: torch.device) -> None:
        self.segments, self._example, self._device = segments, example, device
        self._chain = segments[0].chain
        self._clock = DeviceClock(device)
        self._is_here = device_of(self._chain.program.model) == device
        self.stopped = threading.Event()
        self._copies: Copies | None = None  # of the segment that is measured

    def _call(self, index: int) -> Call:
        """Returns a segment as a function on the device."""
        if self.stopped.is_set():
            raise Stopped
        call: Call = self.segments[index]
        if not self._is_here:
            self._copies = Copies(self._chain, self._device)
            moved = device_of(self._chain.program.model), self._device
            call = self._chain.function(index, index + 1, self._copies.bind, self.segments[index].name, moved)
        return _with_loss(call) if index == len(self.segments) - 1 else call

    def batch(self, samples: int) -> tuple[Any, ...]:
        """Arguments of so many samples."""
        return to_device(resized(self._example, samples), self._device)

    def seconds(self, samples: int) -> Seconds:
        """Runs every segment forward and backward."""
        marks = []
        values = self.batch(samples)
        for index, segment in enumerate(self.segments):
            call = self._call(index)
            given = map_tensors(torch.clone, values) if segment.mutates else values
            start = self._clock.now()
            outputs = call(*given)
            middle = self._clock.now()
            del given
            backward(outputs)
            marks.append((start, middle, self._clock.now()))
            values = map_tensors(as_leaf, outputs)
        forward_s = [self._clock.between(start, middle) for start, middle, _ in marks]
        return forward_s, [self._clock.between(middle, end) for _, middle, end in marks]

    def bytes(self, samples: int) -> Bytes:
        """Runs every segment forward and notes what autograd keeps; weights and buffers do not count. What one segment
        keeps and the next one is given (the output of a ReLU) counts for the next."""
        model = self._chain.program.model
        fixed = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        kept: list[dict[int, int]] = []
        found = Bytes()
        alive: list[Any] = []  # no address is used twice
        values = self.batch(samples)
        for index, segment in enumerate(self.segments):
            call = self._call(index)
            own = set(fixed)
            given = map_tensors(torch.clone, values) if segment.mutates else values
            with saved_storages(alive) as saved:
                outputs = call(*given)
            if self._copies is not None:
                own |= {tensor.untyped_storage().data_ptr() for tensor in self._copies.tensors()}
            mine = {pointer: size for pointer, size in saved.items() if pointer not in own}
            if kept:
                for pointer in {t.untyped_storage().data_ptr() for t in tensors_of(values)} & mine.keys():
                    kept[-1].pop(pointer, None)
            kept.append(mine)
            values = map_tensors(as_leaf, outputs)
            found.output.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(values)))
        found.kept = [sum(storages.values()) for storages in kept]
        found.output[-1] = 0
        return found


def _with_loss(call: Call) -> Call:
    def both(*values: Any) -> tuple[Any, ...]:
        outputs = [t for t in tensors_of(call(*values)) if t.is_floating_point() and t.dim()]
        return tuple(output.log_softmax(-1).mean() for output in outputs)

    return both


def as_leaf(tensor: Tensor) -> Tensor:
    """Returns the same memory as the start of a new graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def backward(outputs: Any) -> None:
    """The backward pass from everything that has a graph, every gradient 1."""
    roots = [tensor for tensor in tensors_of(outputs) if tensor.grad_fn is not None]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


@contextmanager
def saved_storages(alive: list[Any]) -> Iterator[dict[int, int]]:
    """Yields what autograd keeps while the context is open: address of the memory -> bytes."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor.detach())
        return alive[-1]  # an operation that kept its own output would keep itself, and its weights, for ever

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def on_device(device: StageDevice, work: Callable[[], Any], stop: threading.Event) -> Any:
    """Runs `work` in a thread of its own that has what a stage's thread has, and returns its result, or raises what it
    raises; sets `stop`, at which it must end, at Ctrl-C."""
    results: list[Any] = []
    failures: list[BaseException] = []
    context = Context(threads=True)

    def measured() -> None:
        with torch.enable_grad(), context.autocast():
            results.append(work())

    def run() -> None:
        try:
            device.settle()
            with device.turn():
                context.run(measured)
        except BaseException as error:
            failures.append(error)

    intra_op, crew = torch.get_num_threads(), Crew("hvdtrain profile")
    try:
        crew.run([run], stop.set)
    finally:
        surely([crew.close])
        torch.set_num_threads(intra_op)  # a thread's number is also what later ones start with
    if failures:
        raise failures[0]
    return results[0]
