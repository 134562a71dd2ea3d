"""One call of a pipeline: a worker for each device runs its row of the schedule.

A worker waits for the values (or gradients) of its next action, and hands on the result. Only the schedule orders the
stages, by the order of each device's own actions. Workers of GPUs only issue work, and need no threads: the calling
thread issues each worker's ready actions in turn.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from hvdtrain.core.errors import HvdtrainError, is_out_of_memory
from hvdtrain.pipeline.plan.schedule import Action
from hvdtrain.pipeline.plan.simulate import Span
from hvdtrain.pipeline.run.batchnorm import Pooled
from hvdtrain.pipeline.run.passes import Head, Passes
from hvdtrain.pipeline.run.stage import Stage
from hvdtrain.pipeline.values.places import Places, StageDevice, mark
from hvdtrain.pipeline.values.rng import Draws
from hvdtrain.pipeline.values.threads import Context

_NAMES = {"weight": "backward for the weights"}


class StageError(HvdtrainError):
    """A stage of a pipeline failed; the message names it."""


class _Stopped(Exception):
    """Another stage has failed, or the caller was interrupted."""


@dataclass
class StageCall:
    """A call of a pipeline."""

    stages: Sequence[Stage]
    places: Places
    orders: Sequence[Sequence[Action]]  # each device's actions
    recompute: Sequence[frozenset[int]]  # each stage's micro-batches whose backward runs the forward again
    inputs: Sequence[tuple[Any, ...]]  # the model's arguments, by micro-batch
    head: Head | None  # None in inference
    pooled: Pooled | None  # gathers batch-norm statistics; None leaves the layers alone
    draws: Draws | None  # None: from the global generator
    finishing: list[bool]
    gradients: list[list[Tensor | None]] | None = None  # filled with those of the inputs' tensors; None: not wanted
    offload: bool = False  # what is kept for a backward pass waits in the host's memory
    timeline: list[Span] | None = None  # filled with every pass, in seconds of time.perf_counter; None: not
    turn: Any = field(default_factory=nullcontext)  # held during each action where stages must not run at the same time

    def run(self) -> list[Any]:
        """Runs all stages to their end; returns for each micro-batch its output or, with a head, its mean loss.

        Raises `StageError` from what a stage raised; hvdtrain's own errors pass unchanged. No thread remains.
        """
        count = len(self.stages)
        self.results: list[Any] = [None] * len(self.inputs)
        self.failure: tuple[int, Action | None, BaseException] | None = None
        self._stop = threading.Event()
        self._failing = threading.Lock()
        self.forwards: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(count)]
        self.backwards: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(count)]
        self.context = Context(threads=self.places.threads)
        outside = (self.head.targets, self.head.factor) if self.head else ()
        self.there = mark((list(self.inputs), outside))
        for values in self.inputs:
            self.forwards[0].put((values, self.there))
        at = self.places.stage_devices()
        passes = [Passes(self, index, at[index % len(at)]) for index in range(count)]
        workers = [_Row(self, one, self.orders[row], passes[row :: len(at)]) for row, one in enumerate(at)]
        try:
            if self.places.threads:
                self._run_threads(workers, at)
            else:
                self.context.run(partial(self._issue, workers))
        finally:
            self.places.lanes.host_is_read()
        if self.failure is not None:
            self.places.close()
            self._raise(*self.failure)
        return self.results

    def _issue(self, workers: Sequence[_Row]) -> None:
        """Runs one action of each worker whose values are there, in turn, until no work remains."""
        waiting = [worker for worker in workers if worker.order]
        while waiting and self.failure is None:
            for worker in [worker for worker in waiting if worker.is_ready()]:
                self._guarded(worker, worker.act)
            waiting = [worker for worker in waiting if not worker.is_done]
        for worker in workers:
            worker.clear()

    def _run_threads(self, workers: Sequence[_Row], at: Sequence[StageDevice]) -> None:
        intra_op = torch.get_num_threads()
        try:
            self.places.run(at, [partial(self._work, worker) for worker in workers], self.stop)
        except RuntimeError as error:
            raise StageError(
                "each stage of a pipeline needs a thread of its own",
                str(error),
                "fewer threads or processes of this user: ulimit -u, the container's pids limit",
            ) from error
        finally:
            # a thread's number of threads is also what threads that are made later start with
            if torch.get_num_threads() != intra_op:
                torch.set_num_threads(intra_op)

    def _work(self, worker: _Row) -> None:
        self._guarded(worker, lambda: self.context.run(worker.run))
        worker.clear()

    def _guarded(self, worker: _Row, act: Callable[[], None]) -> None:
        try:
            act()
        except _Stopped:
            return
        except BaseException as error:
            with self._failing:
                if self.failure is None:
                    self.failure = (worker.stage.index, worker.action, error)
            self.stop()

    def stop(self) -> None:
        """Lets every worker end before its next action."""
        self._stop.set()
        for queue in (*self.forwards, *self.backwards):
            queue.put(None)

    def take(self, queue: SimpleQueue[Any] | None) -> Any:
        """The next message; raises `_Stopped`."""
        message = queue.get() if queue is not None else (None, {})
        if message is None or self._stop.is_set():
            raise _Stopped
        return message

    def _raise(self, index: int, action: Action | None, error: BaseException) -> None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        # the frames hold activations, and who catches the error may keep it
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, (HvdtrainError, KeyboardInterrupt, SystemExit)):
            raise error
        stage = self.stages[index]
        what = (
            f"{_NAMES.get(action.kind, action.kind)} of micro-batch {action.micro + 1} of {len(self.inputs)}"
            if action
            else "its start"
        )
        text = str(error).strip()
        raise StageError(
            f"stage {index + 1} of {len(self.stages)} ({stage.name}, {stage.device}) failed in the {what}",
            f"{type(error).__name__}: {text[:600]}\nin {place.name}, {place.filename}:{place.lineno}",
            'more micro-batches, remat="all", balance="memory" or more devices need less memory'
            if is_out_of_memory(error)
            else "correct the model there, or the batch; this step's gradients are dropped, earlier ones are kept",
        ) from error


class _Row:
    """A device's part of a call: the passes of its stages, in the order of the schedule."""

    def __init__(self, call: StageCall, device: StageDevice, order: Sequence[Action], stages: Sequence[Passes]) -> None:
        self._call, self._device, self._stages = call, device, stages
        self.order = order
        ends = {(action.chunk, action.kind): at for at, action in enumerate(order) if action.kind != "forward"}
        self._ends = set(ends.values())  # a stage's last pass for its inputs, and for its weights
        self._done = 0
        self.action: Action | None = None

    @property
    def is_done(self) -> bool:
        """Returns True if no work remains."""
        return self._done == len(self.order)

    @property
    def stage(self) -> Passes:
        """The stage whose pass is done now."""
        return self._stages[self.action.chunk if self.action else 0]

    def is_ready(self) -> bool:
        """Returns True if the values of its next action are there."""
        queue = self._queue(self.order[self._done])
        return queue is None or not queue.empty()

    def _queue(self, action: Action) -> SimpleQueue[Any] | None:
        """Returns the queue that an action's values come from; None: they come from its stage itself."""
        stage = self._stages[action.chunk]
        if action.kind == "forward":
            return self._call.forwards[stage.index]
        return None if stage.is_last or action.kind == "weight" else self._call.backwards[stage.index]

    def run(self) -> None:
        """Runs all actions, in the device's own thread."""
        self._device.settle()
        while not self.is_done:
            self.act()

    def act(self) -> None:
        """The next action, when its values are there."""
        call, action = self._call, self.order[self._done]
        self.action, stage = action, self._stages[action.chunk]
        values, there = call.take(self._queue(action))
        call.finishing[stage.index] = self._done in self._ends
        with call.turn, self._device.turn():
            started = time.perf_counter()
            values = self._device.bring(values, there)
            stage.do(action, values)
            if call.timeline is not None:
                ended = time.perf_counter()
                call.timeline.append(Span(stage.index, action.kind, action.micro, started, ended))
        call.finishing[stage.index] = False
        self._done += 1

    def clear(self) -> None:
        """Lets go of everything."""
        for stage in self._stages:
            stage.kept.clear()
