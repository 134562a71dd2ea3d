"""One call of a pipeline: a worker for each stage does what its row of the schedule says.

A worker waits for the values (or gradients) of its next action, and hands on what comes out. Nothing else orders the
stages: the schedule does, by the order of each stage's own actions. Workers of GPUs only issue, and need no threads:
the calling thread gives each in turn what is ready for it.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from hvdtrain.core.errors import ConfigError, HvdtrainError, is_out_of_memory
from hvdtrain.pipeline.batchnorm import Pooled
from hvdtrain.pipeline.context import Context
from hvdtrain.pipeline.microbatch import join, map_tensors, tensors_of
from hvdtrain.pipeline.places import Mark, Places, StageDevice, mark
from hvdtrain.pipeline.plan.schedule import Action
from hvdtrain.pipeline.plan.simulate import Span
from hvdtrain.pipeline.rng import Draws, Generators
from hvdtrain.pipeline.stage import Stage


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
    key: Hashable = "loss"  # which loss it is: the same in every step
    outputs: list[Any] = field(default_factory=list)  # of each micro-batch, where they are wanted
    sizes: Sequence[int] = ()  # of all micro-batches, where the loss sees the whole batch: one target, one weight
    leaves: dict[int, Any] = field(default_factory=dict)  # then: what it is differentiated by

    def __call__(self, output: Any, micro: int, on: StageDevice, there: Mark) -> tuple[Tensor, Tensor]:
        """The mean loss over the micro-batch, and what is differentiated.

        Args:
            there: when targets and factor are.
        """
        if not self.weights[micro]:
            nothing = torch.zeros((), device=on.device)
            return nothing, nothing
        target, factor = on.bring((self.targets[micro], self.factor), there)
        loss = self.loss(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not (loss.requires_grad or not torch.is_grad_enabled()):
            received = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            if isinstance(loss, Tensor) and loss.numel() == 1:
                received += ", requires_grad=False"
            raise ConfigError(
                "loss(output, target) returns one number that can be differentiated: the mean over its samples",
                received,
                "for example torch.nn.CrossEntropyLoss()",
            )
        loss = loss.reshape(())
        return loss, loss * (self.weights[micro] * factor)


@dataclass
class Call:
    """What one call does.

    Attributes:
        orders: each stage's actions.
        recompute: each stage's micro-batches whose backward runs the forward again.
        inputs: the model's arguments, by micro-batch.
        gradients: filled with those of the tensors in the inputs; None: nobody wants them.
        head: None in inference.
        pooled: gathers batch-norm statistics; None leaves the layers alone.
        draws: None: from the global generator.
        offload: what is kept for a backward pass waits in the host's memory.
        timeline: filled with every pass, in seconds of time.perf_counter; None: not.
        turn: held during each action where stages must not run at the same time.
    """

    stages: Sequence[Stage]
    places: Places
    orders: Sequence[Sequence[Action]]
    recompute: Sequence[frozenset[int]]
    inputs: Sequence[tuple[Any, ...]]
    head: Head | None
    pooled: Pooled | None
    draws: Draws | None
    finishing: list[bool]
    gradients: list[list[Tensor | None]] | None = None
    offload: bool = False
    timeline: list[Span] | None = None
    turn: Any = field(default_factory=nullcontext)

    def run(self) -> list[Any]:
        """Runs all stages to their end; after an error or an interruption no thread is left.

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
        self.context = Context(threads=self.places.threads)
        outside = (self.head.targets, self.head.factor) if self.head else ()
        self.there = mark((list(self.inputs), outside))
        for values in self.inputs:
            self.forwards[0].put((values, self.there))
        at = self.places.stage_devices()
        workers = [_Worker(self, index, one) for index, one in enumerate(at)]
        try:
            if self.places.threads:
                self._run_threads(workers, at)
            else:
                self.context.run(partial(self._issue, workers))
        finally:
            self.places.host_is_read()
        if self.failure is not None:
            self.places.close()
            self._raise(*self.failure)
        return self.results

    def _issue(self, workers: Sequence[_Worker]) -> None:
        """Every worker in turn does one action of those whose values are there, until nothing is left."""
        waiting = [worker for worker in workers if worker.order]
        while waiting and self.failure is None:
            for worker in [worker for worker in waiting if worker.is_ready()]:
                self._guarded(worker, worker.act)
            waiting = [worker for worker in waiting if not worker.is_done]
        for worker in workers:
            worker.kept.clear()

    def _run_threads(self, workers: Sequence[_Worker], at: Sequence[StageDevice]) -> None:
        intra_op = torch.get_num_threads()
        try:
            self.places.run(at, [partial(self._work, worker) for worker in workers], self.stop)
        except RuntimeError as error:
            raise StageError(
                "each stage of a pipeline works in a thread of its own",
                str(error),
                "fewer threads or processes of this user: ulimit -u, the container's pids limit",
            ) from error
        finally:
            # a thread's number of threads is also what threads that are made later start with
            if torch.get_num_threads() != intra_op:
                torch.set_num_threads(intra_op)

    def _work(self, worker: _Worker) -> None:
        self._guarded(worker, lambda: self.context.run(worker.run))
        worker.kept.clear()

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
            else "mend the model there, or the batch; this step's gradients are dropped, those of earlier steps kept",
        ) from error


@dataclass
class _Kept:
    """What the backward pass of a micro-batch needs."""

    inputs: Any  # leaves
    outputs: Any = None  # with their graph; of the last stage, what is differentiated
    random: tuple[Any, ...] | None = None  # of all generators, where nothing else runs
    buffers: list[Tensor] | None = None


class _Worker:
    """One stage's part of a call."""

    def __init__(self, call: Call, index: int, device: StageDevice) -> None:
        self._call = call
        self.index = index
        self._stage, self._device = call.stages[index], device
        self.order, self._again = call.orders[index], call.recompute[index]
        self._last = index == len(call.stages) - 1
        self._last_backward = max((i for i, one in enumerate(self.order) if one.kind == "backward"), default=None)
        self._generators = Generators(self._stage.device)
        self._norms = call.pooled.of(self._stage.modules()) if call.pooled else ()
        self._done = 0
        self.kept: dict[int, _Kept] = {}
        self.action: Action | None = None

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return self._done == len(self.order)

    def is_ready(self) -> bool:
        """Whether the values of its next action are there."""
        queue = self._queue(self.order[self._done])
        return queue is None or not queue.empty()

    def _queue(self, action: Action) -> SimpleQueue[Any] | None:
        """Where an action's values come from; None: from this stage itself."""
        if action.kind == "forward":
            return self._call.forwards[self.index]
        return None if self._last else self._call.backwards[self.index]

    def run(self) -> None:
        """All actions, in the stage's own thread."""
        self._device.settle()
        while not self.is_done:
            self.act()

    def act(self) -> None:
        """The next action, when its values are there."""
        call, action = self._call, self.order[self._done]
        self.action = action
        values, there = call.take(self._queue(action))
        call.finishing[self.index] = self._done == self._last_backward
        with call.turn, self._device.turn():
            started = time.perf_counter()
            values = self._device.bring(values, there)
            (self._forward if action.kind == "forward" else self._backward)(action.micro, values)
            if call.timeline is not None:
                ended = time.perf_counter()
                call.timeline.append(Span(self.index, action.kind, action.micro, started, ended))
        call.finishing[self.index] = False
        self._done += 1

    # -- forward ---------------------------------------------------------------------------------------------
    def _forward(self, micro: int, values: Any) -> None:
        call = self._call
        again = micro in self._again
        kept = self.kept[micro] = _Kept(values) if call.head is not None else _Kept(None)
        if again:
            self._remember(kept)
        with torch.no_grad() if again else self._saving(values):
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
            call.forwards[self.index + 1].put((sent, mark(sent)))

    def _pass(self, values: Any, micro: int, *, again: bool) -> Any:
        call, stage = self._call, self._stage
        for layer in self._norms:
            layer.turn(micro, again=again)
        if stage.mutates:  # in place: a leaf must not be changed, nor what is needed to run the pass again
            values = map_tensors(torch.clone, values)
        with call.context.autocast():
            if call.draws is None or not stage.may_draw:
                return stage(values)
            for segment in stage.segments:
                with self._stream(segment.index, micro, again=again) if segment.may_draw else nullcontext():
                    values = segment(*values)
            return values

    def _stream(self, what: Hashable, micro: int, *, again: bool) -> AbstractContextManager[None]:
        """What draws a segment, or the loss, runs inside of."""
        draws = self._call.draws
        return nullcontext() if draws is None else draws.of(self._generators, what, micro, again=again)

    def _finish(self, outputs: Any, micro: int) -> Any:
        """The last stage's outputs are the model's."""
        call = self._call
        (output,) = outputs
        if call.head is None:
            call.results[micro] = output
            return None
        if call.head.outputs:
            call.head.outputs[micro] = map_tensors(torch.detach, output)
        if call.head.sizes:
            call.head.leaves[micro] = map_tensors(lambda t: t.detach().requires_grad_(t.is_floating_point()), output)
            if len(call.head.leaves) == len(call.inputs):
                self._whole_loss(call.head)
            return outputs
        loss, differentiated = self._loss(output, micro, again=False)
        call.results[micro] = loss.detach()
        return (differentiated,)

    def _loss(self, output: Any, micro: int, *, again: bool) -> tuple[Tensor, Tensor]:
        head = self._call.head
        assert head is not None
        with self._call.context.autocast(), self._stream(head.key, micro, again=again):
            return head(output, micro, self._device, self._call.there)

    def _whole_loss(self, head: Head) -> None:
        """Of all micro-batches together, and its backward pass as far as their outputs."""
        with torch.enable_grad():
            whole = join([head.leaves[micro] for micro in range(len(head.sizes))], head.sizes)
            loss, differentiated = self._loss(whole, 0, again=False)
        self._call.results[0] = loss.detach()
        differentiated.backward()

    def _saving(self, values: Any) -> AbstractContextManager[Any]:
        """What a forward pass runs inside of, as to what it keeps."""
        if not self._call.offload or self._call.head is None:
            return nullcontext()
        here = (*self._stage.parameters(), *self._stage.buffers(), *tensors_of(values))
        return self._device.offloading({tensor.untyped_storage().data_ptr() for tensor in here})

    def _remember(self, kept: _Kept) -> None:
        """What a pass depends on besides its inputs: the generators, and buffers that it may change."""
        if self._call.draws is None:
            kept.random = self._generators.everything()
        kept.buffers = [buffer.detach().clone() for buffer in self._stage.changing_buffers()]

    # -- backward --------------------------------------------------------------------------------------------
    def _backward(self, micro: int, gradients: Any) -> None:
        kept = self.kept.pop(micro)
        outputs = self._repeat(kept, micro) if micro in self._again else kept.outputs
        kept.outputs = None
        roots, given = [], []
        head = self._call.head
        if self._last and head is not None and head.sizes:
            gradients = [leaf.grad for leaf in tensors_of(head.leaves.pop(micro))]
        arrived = gradients if gradients is not None else [None]
        for output, gradient in zip(tensors_of(outputs), arrived, strict=True):
            if output.requires_grad and (gradient is not None or gradients is None):
                roots.append(output)
                given.append(gradient)
        del outputs
        if roots:
            torch.autograd.backward(roots, given)
        if self.index:
            leaves = tensors_of(kept.inputs)
            gradients = [leaf.grad for leaf in leaves]
            self._call.backwards[self.index - 1].put((gradients, mark(gradients)))
            for leaf in leaves:
                leaf.grad = None
        elif self._call.gradients is not None:
            self._call.gradients[micro] = [leaf.grad for leaf in tensors_of(kept.inputs)]

    def _repeat(self, kept: _Kept, micro: int) -> Any:
        """Runs the forward pass once more, now with its graph; buffers and generators end as they are."""
        buffers = self._stage.changing_buffers()
        now = [buffer.detach().clone() for buffer in buffers]
        assert kept.buffers is not None
        _put(buffers, kept.buffers)
        swapped = nullcontext() if kept.random is None else self._generators.swapped(kept.random)
        try:
            with swapped, torch.enable_grad():
                outputs = self._pass(kept.inputs, micro, again=True)
                if not self._last or (self._call.head is not None and self._call.head.sizes):
                    return outputs
                return (self._loss(outputs[0], micro, again=True)[1],)
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
