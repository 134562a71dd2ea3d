"""A stand-in for `torch.cuda`'s streams and events, on CPU tensors: it records who may run when, as vector clocks, and
notes every read that is not ordered after its write, and all memory that may be used again before it was read.

What computes runs on the CPU, in a `TorchDispatchMode` that sees each operation as one of the current stream's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hvdtrain.pipeline.values import places

CPU = torch.device("cpu")
Clock = dict[int, int]  # by stream: how many of its operations are over


def gpu(index: int) -> torch.device:
    return torch.device("cuda", index)


def merge(into: Clock, other: Clock) -> None:
    for stream, count in other.items():
        into[stream] = max(into.get(stream, 0), count)


class Stream:
    """A queue of operations; events order it after others."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self.device, self.clock = device, Clock()
        self.recorder, self.number = recorder, len(recorder.streams)
        recorder.streams.append(self)

    def tick(self) -> int:
        """One more operation, issued now."""
        merge(self.clock, self.recorder.host)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]

    def wait_event(self, event: Event) -> None:
        merge(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        merge(self.clock, other.clock)


class Event:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.clock = recorder, Clock()

    def record(self, stream: Stream) -> None:
        stream.tick()
        self.clock = dict(stream.clock)

    def synchronize(self) -> None:
        self.recorder.waits += 1
        merge(self.recorder.host, self.clock)


@dataclass
class Memory:
    """A storage: where it lies, whose pool it came from, who uses it."""

    name: str
    alive: Any
    device: torch.device
    pool: Stream | None
    written: tuple[Stream, int] | None
    used: list[tuple[Stream, int]] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)


class Recorder(TorchDispatchMode):
    """Records while it is entered.

    Attributes:
        problems: what is not in order.
        streams: all that were made; the first of each device are the callers'.
        waits: how often the host waited.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problems: list[str] = []
        self.streams: list[Stream] = []
        self.host: Clock = {}
        self.waits = 0
        self.memory: dict[int, Memory] = {}
        self.pinned: set[int] = set()
        self.current: dict[torch.device, Stream] = {}
        self.device = gpu(0)

    # -- torch.cuda --------------------------------------------------------------------------------------------------
    @contextmanager
    def patched(self) -> Iterator[Recorder]:
        """torch.cuda is this recorder."""
        with ExitStack() as stack:
            for name, what in {
                "Stream": lambda device: Stream(self, device), "Event": lambda blocking=False: Event(self),
                "current_stream": self.current_stream, "stream": self.on_stream, "device": self.on_device,
            }.items():  # fmt: skip
                stack.enter_context(mock.patch.object(torch.cuda, name, what))
            for name, what in {"where": self.where, "copied": self.copied, "pinned": self.in_pinned}.items():
                stack.enter_context(mock.patch.object(places, name, what))
            stack.enter_context(
                mock.patch.object(Tensor, "record_stream", lambda tensor, stream: self.record_stream(tensor, stream))
            )
            yield self

    def current_stream(self, device: torch.device) -> Stream:
        if device not in self.current:
            self.current[device] = Stream(self, device)
        return self.current[device]

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before, device = self.current_stream(stream.device), self.device
        self.current[stream.device], self.device = stream, stream.device
        try:
            yield
        finally:
            self.current[stream.device], self.device = before, device

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device
        try:
            yield
        finally:
            self.device = before

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        self.memory[key(tensor)].recorded.add(stream.number)

    # -- tensors -----------------------------------------------------------------------------------------------------
    def put(self, tensor: Tensor, device: torch.device, name: str) -> Tensor:
        """A tensor that the caller has just made on a device."""
        stream = self.current_stream(device) if device.type == "cuda" else None
        self.new(tensor, device, stream, stream, name)
        return tensor

    def new(self, tensor: Tensor, device: torch.device, pool: Stream | None, by: Stream | None, name: str) -> None:
        written = (by, by.tick()) if by else None
        weak = StorageWeakRef(tensor.untyped_storage())
        self.memory[key(tensor)] = Memory(name, weak, device, pool, written, [written] if written else [])

    def where(self, tensor: Tensor) -> torch.device:
        known = self.memory.get(key(tensor))
        return known.device if known else CPU

    def copied(self, tensor: Tensor, device: torch.device) -> Tensor:
        """As ATen/native/cuda/Copy.cu does it."""
        source, into = self.where(tensor), self.current_stream(device)
        into.tick()
        by = into
        if source.type == "cuda":
            by = self.current_stream(source)
            merge(by.clock, into.clock)
        elif key(tensor) not in self.pinned:
            self.problems.append("the host waits for a copy from memory that is not pinned")
        self.read(tensor, by)
        with torch.utils._python_dispatch._disable_current_modes():
            copy = tensor.detach().clone()
        self.new(copy, device, into, by, f"a copy on {device}")
        merge(into.clock, by.clock)
        return copy

    def in_pinned(self, tensor: Tensor) -> Tensor:
        if key(tensor) not in self.pinned:
            with torch.utils._python_dispatch._disable_current_modes():
                tensor = tensor.clone()
            self.pinned.add(key(tensor))
        return tensor

    def read(self, tensor: Tensor, by: Stream, *, write: bool = False) -> None:
        now = by.tick()
        known = self.memory.get(key(tensor))
        if known is None:
            return
        if known.device not in (CPU, by.device):
            self.problems.append(f"{known.name} on {known.device} is used by an operation on {by.device}")
        for other, then in known.used if write else [known.written] if known.written else []:
            if by.clock.get(other.number, 0) < then:
                self.problems.append(f"{known.name} is {'changed' if write else 'read'} before stream {other.number}"
                                     f" is done with it, by stream {by.number}")  # fmt: skip
        known.used.append((by, now))
        if write:
            known.written = (by, now)

    def look_at_what_is_gone(self) -> None:
        """Its memory may be given to the next operation of the stream whose pool it came from."""
        for address, known in list(self.memory.items()):
            if not known.alive.expired():
                continue
            del self.memory[address]
            pool = known.pool
            if pool is None:
                continue
            merge(pool.clock, self.host)
            for by, then in known.used:
                if by is not pool and by.number not in known.recorded and pool.clock.get(by.number, 0) < then:
                    self.problems.append(f"the memory of {known.name} is free while stream {by.number} uses it")
                    break

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.look_at_what_is_gone()
        by = self.current_stream(self.device)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        before = {key(tensor) for tensor in given}
        views = all(key(tensor) in before for tensor in made) and func._schema.name != "aten::_to_copy"
        changes = func._schema.is_mutable
        if changes or not views or not made:
            for position, tensor in enumerate(given):
                self.read(tensor, by, write=changes and position == 0)
        for tensor in made:
            if key(tensor) not in before and key(tensor) not in self.memory:
                self.new(tensor, by.device, by, by, f"what {func._schema.name} made")
        return outputs


def key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
