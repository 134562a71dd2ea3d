"""One call of a pipeline: a worker for each device runs its row of the schedule.

A worker waits for the values (or gradients) of its next action, and hands on the result. Only the schedule orders the
stages, by the order of each device's own actions. Workers of GPUs only issue work, and need no threads: the calling
thread issues each worker's ready actions in turn.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from hvdtrain.core.errors import HvdtrainError, is_out_of_memory
from hvdtrain.pipeline.plan.schedule import Action
from hvdtrain.pipeline.run.batchnorm import Pooled
from hvdtrain.pipeline.run.passes import Head, Passes
from hvdtrain.pipeline.run.stage import Stage
from hvdtrain.pipeline.values.places import Places, StageDevice, mark
from hvdtrain.pipeline.values.rng import Draws
from hvdtrain.pipeline.values.threads import Context


class StageError(HvdtrainError):
    """A stage of a pipeline failed; the message names it."""


class _Stopped(Exception):
    """Another stage has failed, or the caller was interrupted."""


@dataclass
class StageCall:
    """A call of a pipeline."""

    stages: Sequence[Stage]
    places: Places
    orders: Sequence[Sequence[Action]]  # each stage's actions
    recompute: Sequence[frozenset[int]]  # each stage's micro-batches whose backward runs the forward again
    inputs: Sequence[tuple[Any, ...]]  # the model's arguments, by micro-batch
    head: Head | None  # None in inference
    pooled: Pooled | None  # gathers batch-norm statistics; None leaves the layers alone
    draws: Draws | None  # None: from the global generator
    finishing: list[bool]
    gradients: list[list[Tensor | None]] | None = None  # filled with those of the inputs' tensors; None: not wanted

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
        workers = [_Worker(self, one, self.orders[index], index) for index, one in enumerate(at)]
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

    def _issue(self, workers: Sequence[_Worker]) -> None:
        """Runs one action of each worker whose values are there, in turn, until no work remains."""
        waiting = [worker for worker in workers if worker.order]
        while waiting and self.failure is None:
            for worker in [worker for worker in waiting if worker.is_ready()]:
                self._guarded(worker, worker.act)
            waiting = [worker for worker in waiting if not worker.is_done]
        for worker in workers:
            worker.clear()

    def _run_threads(self, workers: Sequence[_Worker], at: Sequence[StageDevice]) -> None:
        intra_op = torch.get_num_threads()
        try:
            self.places.run(at, [partial(self._work, worker) for worker in workers], self.stop)
        except RuntimeError as error:
            ends = "interpreter shutdown" in str(error)
            raise StageError(
                "each stage of a pipeline needs a thread of its own",
                str(error),
                "at the program's end Python starts no threads: let the main thread wait for the one that trains\n"
                "(thread.join()), and take no step in atexit"
                if ends
                else "fewer threads or processes of this user: ulimit -u, the container's pids limit",
            ) from error
        finally:
            # a thread's number of threads is also what threads that are made later start with
            if torch.get_num_threads() != intra_op:
                torch.set_num_threads(intra_op)

    def _work(self, worker: _Worker) -> None:
        self._guarded(worker, lambda: self.context.run(worker.run))
        worker.clear()

    def _guarded(self, worker: _Worker, act: Callable[[], None]) -> None:
        try:
            act()
        except _Stopped:
            return
        except BaseException as error:
            with self._failing:
                if self.failure is None:
                    self.failure = (worker.index, worker.action, error)
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
        what = f"{action.kind} of micro-batch {action.micro + 1} of {len(self.inputs)}" if action else "its start"
        text = str(error).strip()
        raise StageError(
            f"stage {index + 1} of {len(self.stages)} ({stage.name}, {stage.device}) failed in the {what}",
            f"{type(error).__name__}: {text[:600]}\nin {place.name}, {place.filename}:{place.lineno}",
            'more micro-batches, remat="all", balance="memory" or more devices need less memory'
            if is_out_of_memory(error)
            else "correct the model there, or the batch; this step's gradients are dropped, earlier ones are kept",
        ) from error


class _Worker:
    """A stage's part of a call: its passes, in the order of the schedule."""

    def __init__(self, call: StageCall, device: StageDevice, order: Sequence[Action], index: int) -> None:
        self._call, self._device, self.index = call, device, index
        self._passes = Passes(call, index, device)
        self.order = order
        self._done = 0
        self.action: Action | None = None

    @property
    def is_done(self) -> bool:
        """Returns True if no work remains."""
        return self._done == len(self.order)

    def is_ready(self) -> bool:
        """Returns True if the values of its next action are there."""
        queue = self._queue(self.order[self._done])
        return queue is None or not queue.empty()

    def _queue(self, action: Action) -> SimpleQueue[Any] | None:
        """Returns the queue that an action's values come from; None: they come from the stage itself."""
        if action.kind == "forward":
            return self._call.forwards[self.index]
        return None if self._passes.is_last else self._call.backwards[self.index]

    def run(self) -> None:
        """Runs all actions, in the stage's own thread."""
        self._device.settle()
        while not self.is_done:
            self.act()

    def act(self) -> None:
        """The next action, when its values are there."""
        call, action = self._call, self.order[self._done]
        self.action = action
        values, there = call.take(self._queue(action))
        self._done += 1
        call.finishing[self.index] = self.is_done
        with self._device.turn():
            self._passes.do(action, self._device.bring(values, there))
        call.finishing[self.index] = False

    def clear(self) -> None:
        """Lets go of everything."""
        self._passes.kept.clear()
