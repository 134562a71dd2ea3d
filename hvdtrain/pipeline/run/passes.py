"""The passes of one stage over micro-batches: forward, backward, and the loss that follows the last stage."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.plan.schedule import Action
from hvdtrain.pipeline.values.microbatch import is_differentiable, not_joined
from hvdtrain.pipeline.values.places import Mark, StageDevice, mark
from hvdtrain.pipeline.values.rng import alone
from hvdtrain.values.generators import of_devices
from hvdtrain.values.nested import join, map_tensors, tensors_of

Call = Any  # `worker.StageCall`, which makes these


@dataclass
class Head:
    """The loss after the last stage in training: that of each micro-batch, and its share in the gradient.

    If the share is 0, the loss is not called and nothing is differentiated: it may be NaN, and NaN times 0 is NaN.
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
        """Returns the mean loss of the micro-batch, and what is differentiated; `there`: when the targets are."""
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
                "loss(output, target) must return one differentiable number: the mean over its samples",
                received,
                "for example torch.nn.CrossEntropyLoss()",
            )
        loss = loss.reshape(())
        return loss, loss * (self.weights[micro] * factor)


@dataclass
class _Kept:
    """The data that the backward pass of a micro-batch needs."""

    inputs: Any  # leaves
    outputs: Any = None  # with their graph; of the last stage, what is differentiated
    random: tuple[Any, ...] | None = None  # of all generators, where nothing else runs
    buffers: list[Tensor] | None = None


class Passes:
    """A stage's part of a call."""

    def __init__(self, call: Call, index: int, device: StageDevice) -> None:
        self._call = call
        self.index = index
        self._stage, self._device = call.stages[index], device
        self._again = call.recompute[index]
        self.is_last = index == len(call.stages) - 1
        self._generators = of_devices(self._stage.device)
        self._norms = call.pooled.of(self._stage.modules()) if call.pooled else ()
        self.kept: dict[int, _Kept] = {}

    def do(self, action: Action, values: Any) -> None:
        """Runs one pass; `values` come from the stage before, or are gradients from the stage after."""
        if action.kind == "forward":
            self.forward(action.micro, values)
        else:
            self.backward(action.micro, values)

    # -- forward ---------------------------------------------------------------------------------------------
    def forward(self, micro: int, values: Any) -> None:
        call = self._call
        again = micro in self._again
        kept = self.kept[micro] = _Kept(values) if call.head is not None else _Kept(None)
        if again:
            self._remember(kept)
        with torch.no_grad() if again else nullcontext():
            outputs = self._pass(values, micro, again=False)
            if self.is_last:
                outputs = self._finish(outputs, micro)
        if call.head is None:
            del self.kept[micro]
        elif not again:
            kept.outputs = outputs
        if not self.is_last:
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
            if call.draws is None or not (stage.may_draw or stage.repeats):
                return stage(values)
            for segment in stage.segments:
                stream: AbstractContextManager[None] = nullcontext()
                if segment.may_draw or segment.repeats:
                    key, repeats = segment.index, segment.repeats
                    stream = call.draws.of(self._generators, key, micro, again=again, repeats=repeats)
                with stream:
                    values = segment(*values)
            return values

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
            call.head.leaves[micro] = map_tensors(lambda t: t.detach().requires_grad_(is_differentiable(t)), output)
            if len(call.head.leaves) == len(call.inputs):
                self._whole_loss(call.head)
            return outputs
        loss, differentiated = self._loss(output, micro, again=False)
        call.results[micro] = loss.detach()
        return (differentiated,)

    def _loss(self, output: Any, micro: int, *, again: bool) -> tuple[Tensor, Tensor]:
        head, draws = self._call.head, self._call.draws
        assert head is not None
        stream = nullcontext() if draws is None else draws.of(self._generators, head.key, micro, again=again)
        with self._call.context.autocast(), stream:
            return head(output, micro, self._device, self._call.there)

    def _whole_loss(self, head: Head) -> None:
        """Computes the loss of all micro-batches together, and its backward pass as far as their outputs."""
        with torch.enable_grad():
            whole = join([head.leaves[micro] for micro in range(len(head.sizes))], head.sizes, not_joined)
            loss, differentiated = self._loss(whole, 0, again=False)
        self._call.results[0] = loss.detach()
        differentiated.backward()

    def _remember(self, kept: _Kept) -> None:
        """Keeps what a pass depends on other than its inputs: the generators, and buffers that it may change."""
        if self._call.draws is None:
            kept.random = self._generators.everything()
        kept.buffers = [buffer.detach().clone() for buffer in self._stage.changing_buffers()]

    # -- backward --------------------------------------------------------------------------------------------
    def backward(self, micro: int, gradients: Any) -> None:
        kept = self.kept.pop(micro)
        outputs = self._repeat(kept, micro) if micro in self._again else kept.outputs
        kept.outputs = None
        roots, given = [], []
        head = self._call.head
        if self.is_last and head is not None and head.sizes:
            gradients = [leaf.grad for leaf in tensors_of(head.leaves.pop(micro))]
        arrived = gradients if gradients is not None else [None]
        for output, gradient in zip(tensors_of(outputs), arrived, strict=True):
            if output.requires_grad and (gradient is not None or gradients is None):
                roots.append(output)
                given.append(gradient)
        del outputs
        for layer in self._norms:
            layer.turn(micro)
        with alone() if self._stage.repeats else nullcontext():
            if roots:
                torch.autograd.backward(roots, given)
        if self.index:
            leaves = tensors_of(kept.inputs)
            gradients = [leaf.grad for leaf in leaves]
            self._call.backwards[self.index - 1].put((gradients, mark(gradients)))
        elif self._call.gradients is not None:
            self._call.gradients[micro] = [leaf.grad for leaf in tensors_of(kept.inputs)]

    def _repeat(self, kept: _Kept, micro: int) -> Any:
        """Runs the forward pass again, now with its graph; restores buffers and generators at the end."""
        buffers = self._stage.changing_buffers()
        now = [buffer.detach().clone() for buffer in buffers]
        assert kept.buffers is not None
        _put(buffers, kept.buffers)
        swapped = nullcontext() if kept.random is None else self._generators.preserved(kept.random)
        try:
            with swapped, torch.enable_grad():
                outputs = self._pass(kept.inputs, micro, again=True)
                if not self.is_last or (self._call.head is not None and self._call.head.sizes):
                    return outputs
                return (self._loss(outputs[0], micro, again=True)[1],)
        finally:
            _put(buffers, now)


def _leaf(tensor: Tensor, wants: bool) -> Tensor:
    """Returns a tensor for the next stage: the same memory, a graph of its own."""
    needed = tensor.requires_grad or (wants and is_differentiable(tensor))
    return tensor.detach().requires_grad_(needed)


def _put(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        # through .data: no graph that is still to be differentiated depends on the values
        buffer.data.copy_(value)
