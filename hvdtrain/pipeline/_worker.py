"""One call of a pipeline: a worker for each stage does what its row of the schedule says.

A worker waits for the values (or gradients) of its next action, and hands on what comes out. Nothing else orders the
stages: the schedule does, by the order of each stage's own actions.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from hvdtrain.errors import ConfigError, HvdtrainError
from hvdtrain.pipeline._batchnorm import Pooled
from hvdtrain.pipeline._cutting import map_tensors, tensors_of
from hvdtrain.pipeline._lanes import Lane
from hvdtrain.pipeline._random import Draws, Generators
from hvdtrain.pipeline._stage import Stage
from hvdtrain.pipeline.plan import Action

_SAYINGS = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class StageError(HvdtrainError):
    """A stage of a pipeline failed; the message names it."""


class _Stopped(Exception):
    """Another stage has failed, or the caller was interrupted."""


@dataclass
class Head:
    """What follows the last stage in training: the loss of each micro-batch, and its share in the gradient.

    Where the share is 0 the loss is not called and nothing is differentiated: there may be a NaN, which times 0 is one.
    """

    loss: Callable[[Any, Any], Tensor]
    targets: Sequence[Any]
    weights: Sequence[float]
    factor: float | Tensor

    def __call__(self, output: Any, micro: int, lane: Lane) -> tuple[Tensor, Tensor]:
        """Returns the mean loss over the micro-batch, and what is differentiated."""
        if not self.weights[micro]:
            nothing = torch.zeros((), device=lane.device)
            return nothing, nothing
        loss = self.loss(output, lane.bring(self.targets[micro], None))
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not (loss.requires_grad or not torch.is_grad_enabled()):
            came = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            if isinstance(loss, Tensor) and loss.numel() == 1:
                came += ", requires_grad=False"
            raise ConfigError(
                "loss(output, target) returns one number that can be differentiated: the mean over its samples",
                came,
                "for example torch.nn.CrossEntropyLoss()",
            )
        loss = loss.reshape(())
        factor = self.factor.to(loss.device) if isinstance(self.factor, Tensor) else self.factor
        return loss, loss * (self.weights[micro] * factor)


@dataclass
class Call:
    """What one call does.

    Attributes:
        orders: each stage's actions.
        recompute: each stage's micro-batches whose backward runs the forward again.
        inputs: the model's arguments, by micro-batch.
        head: None in inference.
        pooled: gathers batch-norm statistics; None leaves the layers alone.
        draws: None: from the global generator.
        timeline: filled with (stage, kind, micro-batch, start, end), in seconds of time.perf_counter; None: not.
        turn: held during each action where stages must not run at the same time.
    """

    stages: Sequence[Stage]
    lanes: Sequence[Lane]
    orders: Sequence[Sequence[Action]]
    recompute: Sequence[frozenset[int]]
    inputs: Sequence[tuple[Any, ...]]
    head: Head | None
    pooled: Pooled | None
    draws: Draws | None
    finishing: list[bool]
    timeline: list[tuple[int, str, int, float, float]] | None = None
    turn: Any = field(default_factory=nullcontext)

    def run(self) -> list[Any]:
        """Runs all stages to their end; no thread outlives it.

        Returns:
            For each micro-batch its output, or, with a head, its mean loss.

        Raises:
            StageError: from what a stage raised; errors of hvdtrain's own pass as they are.
        """
        count = len(self.stages)
        self.results: list[Any] = [None] * len(self.inputs)
        self.failure: tuple[int, Action | None, BaseException] | None = None
        self._stop = threading.Event()
        self._failing = threading.Lock()
        self.forwards: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(count)]
        self.backwards: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(count)]
        self._context = _Context()
        for values in self.inputs:
            self.forwards[0].put((values, None))
        workers = [_Worker(self, index) for index in range(count)]
        if count == 1:
            self._work(workers[0])
        else:
            self._run_threads(workers)
        if self.failure is not None:
            self._raise(*self.failure)
        return self.results

    def _run_threads(self, workers: Sequence[_Worker]) -> None:
        ended: list[bool] = [False] * len(workers)
        news: SimpleQueue[None] = SimpleQueue()

        def work(worker: _Worker) -> None:
            try:
                self._work(worker)
            finally:
                ended[worker.index] = True
                news.put(None)

        threads = [
            threading.Thread(target=work, args=(worker,), name=f"hvdtrain pipeline stage {worker.index}")
            for worker in workers
        ]
        intra_op = torch.get_num_threads()
        for thread in threads:
            thread.start()
        interrupt: BaseException | None = None
        while not all(ended):
            try:
                news.get()  # not join(): a join that Ctrl-C interrupts takes its thread for ended (CPython issue 90882)
            except BaseException as error:
                interrupt = interrupt or error
                self.stop()
        for thread in threads:
            _see_off(thread)
        # a thread's number of threads is also what threads that are made later start with
        torch.set_num_threads(intra_op)
        if interrupt is not None:
            raise interrupt

    def _work(self, worker: _Worker) -> None:
        try:
            with self.lanes[worker.index].active(), self._context.entered():
                worker.run()
        except _Stopped:
            return
        except BaseException as error:
            with self._failing:
                if self.failure is None:
                    self.failure = (worker.index, worker.action, error)
            self.stop()
        finally:
            worker.kept.clear()

    def stop(self) -> None:
        """Lets every worker end before its next action."""
        self._stop.set()
        for queue in (*self.forwards, *self.backwards):
            queue.put(None)

    def take(self, queue: SimpleQueue[Any]) -> Any:
        """The next message; raises `_Stopped`."""
        message = queue.get()
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
            else "mend the model there, or the batch; the gradients of this step are dropped",
        ) from error


def _see_off(thread: threading.Thread) -> None:
    """Waits until a thread that has done its work is gone from the system as well.

    Before Python 3.13 `join` returns a moment earlier (CPython issue 110829). In that moment PyTorch takes the thread's
    own Python objects back, for which it needs the interpreter: if that has ended meanwhile, the process aborts.
    """
    thread.join()
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        os.sched_yield()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch, or a library below it, had no memory left."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(s in str(error) for s in _SAYINGS)


class _Context:
    """What the caller's thread has set, for threads of our own: gradients, autocast."""

    def __init__(self) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        kinds = ["cpu"] + ["cuda"] * torch.cuda.is_available()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in kinds
            if torch.is_autocast_enabled(kind)
        ]

    @contextmanager
    def entered(self) -> Iterator[None]:
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad):
            yield

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Around each forward pass, not around the thread: weights cast for one pass may not be kept for another."""
        if not self._autocast:
            yield
            return
        (kind, dtype, cache), *more = self._autocast
        with torch.autocast(kind, dtype=dtype, cache_enabled=cache):
            if more:
                with torch.autocast(more[0][0], dtype=more[0][1], cache_enabled=more[0][2]):
                    yield
            else:
                yield


@dataclass
class _Kept:
    """What the backward pass of a micro-batch needs."""

    inputs: Any  # leaves
    outputs: Any = None  # with their graph; of the last stage, what is differentiated
    random: list[Tensor] | None = None
    buffers: list[Tensor] | None = None


class _Worker:
    """One stage's part of a call."""

    def __init__(self, call: Call, index: int) -> None:
        self._call = call
        self.index = index
        self._stage, self._lane = call.stages[index], call.lanes[index]
        self._order, self._again = call.orders[index], call.recompute[index]
        self._last = index == len(call.stages) - 1
        self._generators = Generators(self._stage.device) if self._stage.draws else None
        self._norms = call.pooled.of(self._stage.modules()) if call.pooled else ()
        self.kept: dict[int, _Kept] = {}
        self.action: Action | None = None

    def run(self) -> None:
        call, backward = self._call, [i for i, action in enumerate(self._order) if action.kind == "backward"]
        for position, action in enumerate(self._order):
            self.action = action
            queue = call.forwards if action.kind == "forward" else call.backwards
            from_outside = not (action.kind == "backward" and self._last)
            values, mark = call.take(queue[self.index]) if from_outside else (None, None)
            if call._stop.is_set():
                raise _Stopped
            call.finishing[self.index] = bool(backward) and position == backward[-1]
            with call.turn, self._lane.turn():
                started = time.perf_counter()
                values = self._lane.bring(values, mark)
                (self._forward if action.kind == "forward" else self._backward)(action.micro, values)
                del values
                if call.timeline is not None:
                    ended = time.perf_counter()
                    call.timeline.append((self.index, action.kind, action.micro, started, ended))
        call.finishing[self.index] = False

    # -- forward ---------------------------------------------------------------------------------------------
    def _forward(self, micro: int, values: Any) -> None:
        call = self._call
        again = micro in self._again
        kept = self.kept[micro] = _Kept(values) if call.head is not None else _Kept(None)
        if again:
            self._remember(kept)
        with torch.no_grad() if again else nullcontext():
            outputs = self._pass(values, micro, again=False)
            if self._last:
                outputs = self._finish(outputs, micro)
        if call.head is None:
            del self.kept[micro]
        elif not again:
            kept.outputs = outputs
        if not self._last:
            wants = again and torch.is_grad_enabled()
            sent = map_tensors(lambda tensor: _leaf(tensor, wants), outputs)
            call.forwards[self.index + 1].put((sent, self._lane.mark()))

    def _pass(self, values: Any, micro: int, *, again: bool) -> Any:
        call, stage = self._call, self._stage
        for layer in self._norms:
            layer.micro, layer.discard = micro, again
        if stage.mutates_input:  # in place: a leaf must not be changed, nor what is needed to run the pass again
            values = map_tensors(torch.clone, values)
        with call._context.autocast():
            if call.draws is None or self._generators is None:
                return stage(values)
            for segment in stage.segments:
                with call.draws.of(self._generators, segment.index, micro) if segment.draws else nullcontext():
                    values = segment(*values)
            return values

    def _finish(self, outputs: Any, micro: int) -> Any:
        """The last stage's outputs are the model's."""
        call = self._call
        (output,) = outputs
        if call.head is None:
            call.results[micro] = output
            return None
        with call._context.autocast():
            loss, differentiated = call.head(output, micro, self._lane)
        call.results[micro] = loss.detach()
        return (differentiated,)

    def _remember(self, kept: _Kept) -> None:
        """What a pass depends on besides its inputs: the generators, and buffers that it may change."""
        if self._generators is not None and self._call.draws is None:
            kept.random = self._generators.get()
        kept.buffers = [buffer.detach().clone() for buffer in self._stage.buffers()]

    # -- backward --------------------------------------------------------------------------------------------
    def _backward(self, micro: int, gradients: Any) -> None:
        kept = self.kept.pop(micro)
        outputs = self._repeat(kept, micro) if micro in self._again else kept.outputs
        kept.outputs = None
        roots, given = [], []
        arrived = gradients if gradients is not None else [None]
        for output, gradient in zip(tensors_of(outputs), arrived, strict=True):
            if output.requires_grad and (gradient is not None or self._last):
                roots.append(output)
                given.append(gradient)
        del outputs
        if roots:
            torch.autograd.backward(roots, given)
        if self.index:
            leaves = tensors_of(kept.inputs)
            self._call.backwards[self.index - 1].put(([leaf.grad for leaf in leaves], self._lane.mark()))
            for leaf in leaves:
                leaf.grad = None

    def _repeat(self, kept: _Kept, micro: int) -> Any:
        """Runs the forward pass once more, now with its graph; buffers and generators end as they are."""
        buffers = list(self._stage.buffers())
        now = [buffer.detach().clone() for buffer in buffers]
        assert kept.buffers is not None
        _put(buffers, kept.buffers)
        lent = nullcontext() if kept.random is None or self._generators is None else self._generators.lent(kept.random)
        try:
            with lent, torch.enable_grad():
                outputs = self._pass(kept.inputs, micro, again=True)
                if not self._last:
                    return outputs
                assert self._call.head is not None
                with self._call._context.autocast():
                    return (self._call.head(outputs[0], micro, self._lane)[1],)
        finally:
            _put(buffers, now)


def _leaf(tensor: Tensor, wants: bool) -> Tensor:
    """What the next stage gets: the same memory, a graph of its own."""
    needed = tensor.requires_grad or (wants and tensor.is_floating_point())
    return tensor.detach().requires_grad_(needed)


def _put(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        # through .data: no graph that is still to be differentiated depends on the values
        buffer.data.copy_(value)
