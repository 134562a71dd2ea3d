"""Times and bytes of a chain of segments on one device, under the conditions that a stage has there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hvdtrain.core.errors import is_out_of_memory
from hvdtrain.pipeline.run.stage import Copies
from hvdtrain.pipeline.trace.restore import device_of, resized, to_device
from hvdtrain.pipeline.trace.segments import Segment
from hvdtrain.pipeline.values.places import StageDevice
from hvdtrain.pipeline.values.threads import Context, side_by_side
from hvdtrain.values.nested import map_tensors, tensors_of

Call = Callable[..., tuple[Any, ...]]


@dataclass
class Seconds:
    """Seconds of one pass: of each segment, and of the whole in one go (0: it does not fit)."""

    forward: list[float]
    backward: list[float]
    whole_forward: float = 0.0
    whole_backward: float = 0.0


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

    If the model is elsewhere, copies of its parts are measured: all at once or, where that does not fit (`fits`), one
    after the other. `stopped` ends what is being measured.
    """

    def __init__(self, segments: Sequence[Segment], example: tuple[Any, ...], device: torch.device) -> None:
        self.segments, self._example, self._device = segments, example, device
        self._chain = segments[0].chain
        self._clock = DeviceClock(device)
        self._is_here = device_of(self._chain.program.model) == device
        self.fits = True
        self.stopped = threading.Event()
        self._copies: Copies | None = None  # the latest
        self._calls, self._whole = self._bind(range(len(segments)))

    def _bind(self, indices: Sequence[int]) -> tuple[list[Call], Call]:
        """Segments as functions on the device, and the whole chain as one."""
        chain = self._chain
        if self._is_here:
            bind, moved = chain.program.bind, None
        else:
            self._copies = copies = Copies(chain, self._device)
            bind, moved = copies.bind, (device_of(chain.program.model), self._device)
        calls = [chain.function(index, index + 1, bind, self.segments[index].name, moved) for index in indices]
        whole = chain.function(0, len(self.segments), bind, "whole", moved) if len(indices) > 1 else calls[0]
        if indices[-1] == len(self.segments) - 1:
            calls[-1] = _with_loss(calls[-1])
        return calls, _with_loss(whole)

    def batch(self, samples: int) -> tuple[Any, ...]:
        """Arguments of so many samples."""
        return to_device(resized(self._example, samples), self._device)

    def _call(self, index: int) -> Call:
        if self.stopped.is_set():
            raise Stopped
        return self._calls[index] if self.fits else self._bind([index])[0][0]

    def seconds(self, samples: int) -> Seconds:
        """Runs every segment forward and backward, and then the whole."""
        try:
            return self._seconds(samples)
        except Exception as error:
            if self._is_here or not self.fits or not is_out_of_memory(error):
                raise
        self.fits, self._calls, self._copies = False, [], None
        self._whole = None  # type: ignore[assignment]
        return self._seconds(samples)

    def _seconds(self, samples: int) -> Seconds:
        clock, marks = self._clock, []
        values = self.batch(samples)
        for index in range(len(self.segments)):
            values, *its = self._one(index, values)
            marks.append(its)
        pairs = [(clock.between(a, b), clock.between(b, c)) for a, b, c in marks]
        found = Seconds([forward for forward, _ in pairs], [back for _, back in pairs])
        if self.fits:
            found.whole_forward, found.whole_backward = self.whole(samples)
        return found

    def _one(self, index: int, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any, Any, Any]:
        """Runs a segment forward and backward; returns the next one's input, and the times before, between and
        after."""
        call = self._call(index)
        given = map_tensors(torch.clone, values) if self.segments[index].mutates else values
        start = self._clock.now()
        outputs = call(*given)
        middle = self._clock.now()
        del given
        backward(outputs)
        return map_tensors(as_leaf, outputs), start, middle, self._clock.now()

    def inputs(self, samples: int) -> list[tuple[Any, ...]]:
        """Returns what each segment is given."""
        found = [self.batch(samples)]
        for index in range(len(self.segments) - 1):
            found.append(self._one(index, found[-1])[0])
        return found

    def stretch(self, indices: Sequence[int], inputs: Sequence[tuple[Any, ...]]) -> float:
        """Returns the seconds of these segments, forward and backward, each on what `inputs` has for it."""
        ends = [self._one(index, inputs[index])[1:] for index in indices]
        return sum(self._clock.between(start, end) for start, _, end in ends)

    def whole(self, samples: int) -> tuple[float, float]:
        """Seconds of one forward and one backward pass through all segments."""
        if self.stopped.is_set():
            raise Stopped
        clock, values = self._clock, self.batch(samples)
        start = clock.now()
        outputs = self._whole(*values)
        middle = clock.now()
        backward(outputs)
        end = clock.now()
        return clock.between(start, middle), clock.between(middle, end)

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
    """Runs `work` in a thread of its own that has what a stage's thread has; raises what it raises."""
    return together([device], [work], stop)[0]


def together(devices: Sequence[StageDevice], works: Sequence[Callable[[], Any]], stop: threading.Event) -> list[Any]:
    """Runs each in a thread on its device, at once; sets `stop`, at which works must end, at an error or Ctrl-C."""
    results: list[Any] = [None] * len(devices)
    failures: list[BaseException] = []
    context = Context(threads=True)

    def run(index: int) -> None:
        def work() -> None:
            with torch.enable_grad(), context.autocast():
                results[index] = works[index]()

        try:
            devices[index].settle()
            with devices[index].turn():
                context.run(work)
        except BaseException as error:
            failures.append(error)
            stop.set()

    intra_op = torch.get_num_threads()
    try:
        side_by_side([partial(run, index) for index in range(len(devices))], "hvdtrain profile", stop.set)
    finally:
        torch.set_num_threads(intra_op)  # a thread's number is also what later ones start with
    if failures:
        raise failures[0]
    return results
