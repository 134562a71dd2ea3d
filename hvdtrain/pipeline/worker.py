"""One call of a pipeline: a worker for each stage does what its row of the schedule says.

A worker waits for the values (or gradients) of its next action, and hands on what comes out. Nothing else orders the
stages: the schedule does, by the order of each stage's own actions.
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
from hvdtrain.pipeline.devices import StageDevice
from hvdtrain.pipeline.microbatch import map_tensors, tensors_of
from hvdtrain.pipeline.plan.schedule import Action
from hvdtrain.pipeline.plan.simulate import Span
from hvdtrain.pipeline.rng import Draws, Generators
from hvdtrain.pipeline.stage import Stage
from hvdtrain.pipeline.threads import side_by_side


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

    def __call__(self, output: Any, micro: int, on: StageDevice) -> tuple[Tensor, Tensor]:
        """Returns the mean loss over the micro-batch, and what is differentiated."""
        if not self.weights[micro]:
            nothing = torch.zeros((), device=on.device)
            return nothing, nothing
        loss = self.loss(output, on.bring(self.targets[micro], None))
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
        timeline: filled with every pass, in seconds of time.perf_counter; None: not.
        turn: held during each action where stages must not run at the same time.
    """

    stages: Sequence[Stage]
    stage_devices: Sequence[StageDevice]
    orders: Sequence[Sequence[Action]]
    recompute: Sequence[frozenset[int]]
    inputs: Sequence[tuple[Any, ...]]
    head: Head | None
    pooled: Pooled | None
    draws: Draws | None
    finishing: list[bool]
    timeline: list[Span] | None = None
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
        self.context = Context(threads=count > 1)
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
        intra_op = torch.get_num_threads()
        try:
            side_by_side([partial(self._work, worker) for worker in workers], "hvdtrain pipeline stage", self.stop)
        except RuntimeError as error:
            raise StageError(
                "each stage of a pipeline works in a thread of its own",
                str(error),
                "fewer threads or processes of this user: ulimit -u, the container's pids limit",
            ) from error
        finally:
            # a thread's number of threads is also what threads that are made later start with
            torch.set_num_threads(intra_op)

    def _work(self, worker: _Worker) -> None:
        try:
            with self.stage_devices[worker.index].active():
                self.context.run(worker.run)
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

    def __init__(self, call: Call, index: int) -> None:
        self._call = call
        self.index = index
        self._stage, self._device = call.stages[index], call.stage_devices[index]
        self._order, self._again = call.orders[index], call.recompute[index]
        self._last = index == len(call.stages) - 1
        self._generators = Generators(self._stage.device)
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
            with call.turn, self._device.turn():
                started = time.perf_counter()
                values = self._device.bring(values, mark)
                (self._forward if action.kind == "forward" else self._backward)(action.micro, values)
                del values
                if call.timeline is not None:
                    ended = time.perf_counter()
                    call.timeline.append(Span(self.index, action.kind, action.micro, started, ended))
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
            call.forwards[self.index + 1].put((sent, self._device.mark()))

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
        loss, differentiated = self._loss(output, micro, again=False)
        call.results[micro] = loss.detach()
        return (differentiated,)

    def _loss(self, output: Any, micro: int, *, again: bool) -> tuple[Tensor, Tensor]:
        head = self._call.head
        assert head is not None
        with self._call.context.autocast(), self._stream(head.key, micro, again=again):
            return head(output, micro, self._device)

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
            self._call.backwards[self.index - 1].put(([leaf.grad for leaf in leaves], self._device.mark()))
            for leaf in leaves:
                leaf.grad = None

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
                if not self._last:
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
