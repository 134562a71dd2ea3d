"""The gradients of the update that is being gathered, and where in the loop the user stands.

Partial sums of micro-batches are put aside, so between micro-batches `p.grad` is None: `zero_grad` in any form
and clipping, which belong to the whole update, do no harm there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor, nn

from hvdtrain.comm import elastic
from hvdtrain.core.errors import ConfigError
from hvdtrain.private.torch import multiply_each_
from hvdtrain.torch.engines import unprepared
from hvdtrain.torch.losses.loss_graph import nodes_of
from hvdtrain.torch.losses.tally import Number, Tally, double
from hvdtrain.torch.update.batches import Batch
from hvdtrain.torch.update.several import members_of
from hvdtrain.watch.preemption import is_preempted

# idle: backward() is next. more: another backward() for the same batch was announced. partial: a micro-batch is done
# that is not the last of its update. ready: p.grad is the gradient of the global batch, and step() is next.
State = Literal["idle", "more", "partial", "ready"]
TWICE = (
    "to replace the gradients of the same batch: optimizer.backward(loss, again=True);\n"
    "for several losses of one batch: optimizer.backward(first, more=True), then optimizer.backward(last)"
)
_running: list[Gradients] = []  # whose backward pass is under way; hooks run in threads of autograd's


class Gradients:
    """The gradients of one update."""

    def __init__(
        self, module: nn.Module, device: torch.device, optimizer: torch.optim.Optimizer, *, staged: bool = False
    ) -> None:
        self._optimizer = optimizer
        self._parameters = list(module.parameters())  # a walk through all modules takes longer than all the rest here
        self._device = device
        self._call = "optimizer.forward_backward(x, y, loss_fn)" if staged else "optimizer.backward(loss)"
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self.state: State = "idle"
        self.batch: Batch | None = None  # the last one whose backward pass began
        self.tally = Tally()  # of the update: this rank's part of its loss, and the weights
        self.had_some = False  # the complete update has a gradient
        self.gathering = False  # the user stands within an update
        self._weight: Number = 0.0
        self._shared = False
        self.used = False  # an update was made, or the prepared optimizer was closed
        unprepared.prepared(self._parameters, members_of(optimizer))
        self._watch()
        self._aside: list[tuple[nn.Parameter, Tensor]] = []
        self._samples_seen = 0

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    def begin(
        self, batch: Batch, weight: Number | None, unit: Number, share: float | None = None
    ) -> tuple[Number, Number]:
        """Prepares `p.grad`, which the backward pass of `batch` adds to; `add_loss` follows. Returns two numbers: the
        weight, which is the divisor of the batch's mean loss (None: samples) or this rank's `share` of a loss of the
        whole batch, and the factor of the mean loss. Given weights are divided by `unit`, a power of two. Raises
        `ConfigError` if a layer was frozen within an update, or if only some of its batches have given weights."""
        self._open_update(batch)
        tally, new = self.tally, batch is not self.batch
        given = weight is not None
        if tally.given not in (None, given):
            raise ConfigError(
                "weight= must be given for all batches of an update, or for none",
                "weight= was " + ("given now, and not before" if given else "given before, and not now"),
                "give weight= in every backward() of the update, or in none",
            )
        tally.given = given
        amount: Number = batch.amount if weight is None or batch.padding else weight
        if share is not None:
            amount = share * batch.planned
        if new:
            self._samples_seen += 0 if batch.step is None else batch.step.global_samples
            tally.weight = tally.weight + amount
            self._weight = amount
        elif share is not None or self._shared:
            pass  # the ranks' weights have one sum, whichever of the two they are
        elif isinstance(amount, Tensor) or isinstance(self._weight, Tensor):
            tally.problems = tally.problems + (torch.as_tensor(amount) != self._weight).double()  # nothing waits
        elif amount != self._weight:
            raise ConfigError(
                "all losses of one batch (more=True) must have the same weight=",
                f"weight={self._weight:g}, then weight={amount:g}",
                "divide both losses by the same count, and give it as weight= to both",
            )
        self.batch = batch
        self._shared = share is not None
        if share is not None:
            return amount, share
        return amount, batch.weight if not given or batch.padding else amount / (batch.planned * unit)

    def _open_update(self, batch: Batch) -> None:
        if self.gathering and self.batch is not None and batch.place[0] != self.batch.place[0]:
            self.drop()  # the user left the epoch in the middle of an update
        for parameter in self._parameters:
            # a new update starts from nothing, even if zero_grad was forgotten; nor does what another model's loss left
            # between two micro-batches count
            parameter.grad = None
        if not self.gathering:
            self._watch()
            self.gathering = True
            self._samples_seen = 0
            self.tally = Tally()
        if any(not parameter.requires_grad for parameter, _ in self._aside):
            raise ConfigError(
                "layers cannot be frozen in the middle of an update",
                "a layer was frozen between micro-batches: its accumulated gradient would not be averaged",
                "call requires_grad_(False) after the step() that applies an update",
            )
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside = []

    def add_loss(self, loss: Tensor, weight: Number, coefficient: Number) -> None:
        # on the CPU a number costs less than a tensor; elsewhere to ask for the number is to wait for the device
        value = float(loss.detach()) if self._device.type == "cpu" else loss.detach().double().reshape(())
        self.tally.count(value, weight, coefficient)

    def sums(self, place: float) -> Tensor:
        """Returns float64 [k], to be summed over ranks: this rank's `tally`, of the update at this place."""
        self.tally.place, self.tally.rates = place, 0.0
        for index, group in enumerate(self._optimizer.param_groups):
            self.tally.rates = self.tally.rates + double(group["lr"]) * math.sqrt(index + 1)
        self.tally.preempted = float(is_preempted())
        self.tally.leaves = float(elastic.ranks().wants_to_leave)
        return self.tally.tensor(self._device)

    # -- backward passes that are not the optimizer's ---------------------------------------------------------
    @contextmanager
    def differentiating(self) -> Iterator[None]:
        """Allows gradients while the context is open."""
        _running.append(self)
        try:
            yield
        finally:
            _running.remove(self)

    def _watch(self) -> None:
        """Registers hooks that refuse gradients of no prepared optimizer, also on parameters unfrozen since."""
        for parameter in self._parameters:
            if parameter.requires_grad and id(parameter) not in self._hooks:
                hook = partial(_on_gradient, ref(self))
                self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(hook)

    def close(self) -> None:
        unprepared.closed(self._parameters, members_of(self._optimizer), used=self.used)
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def refuse_foreign(self) -> None:
        """Raises `ConfigError` for a gradient of a backward pass that is not this model's."""
        if not _running:
            raise ConfigError(
                f"gradients must come from {self._call}: it weighs, scales and averages them",
                "loss.backward() was called, or a pipeline's own step()",
                f"write {self._call} instead, with the optimizer that prepare() returned;\n"
                "with a GradScaler: optimizer.backward(scaler.scale(loss))",
                code=27,
            )
        if self.state == "ready":
            raise ConfigError(
                "another model's loss cannot change a model's gradients between backward() and step()",
                "the backward pass of another prepared model reached this model's parameters",
                "call step() first; or detach the input of the other model: critic(fake.detach());\n"
                "prepare parts that one loss trains (an encoder and a decoder) as one model, with one optimizer",
            )

    def check_turn(self, batch: Batch) -> None:
        """Raises `ConfigError` where no backward pass of `batch` is due."""
        if self.state == "ready":
            counted, same = batch.step is not None, batch is self.batch
            ways = [
                "to accumulate the gradients of 4 batches: prepare(..., accumulate=4), with backward() and step()"
                " on each batch and its mean loss, undivided"
            ] * (not same) + [TWICE] * (same or not counted)
            raise ConfigError(
                "backward() cannot be called again before optimizer.step()",
                "backward() was called again" + ", for the next batch" * (counted and not same),
                "call optimizer.backward(loss), then optimizer.step(), or optimizer.skip() to discard the update;\n"
                + ";\n".join(ways),
                code=29,
            )
        if self.state != "more" and batch is self.batch:
            raise ConfigError(
                "backward() cannot be called twice on the same batch",
                "a second backward() on the same batch, the latest of the loader that prepare() was given",
                "train on each batch within that loader's own loop: for x, y in train: ...\n"
                "(not over list(train), a prefetcher, or another loader: torch.utils.data.ConcatDataset joins data);\n"
                "for several updates of one batch: optimizer.backward(loss, again=True);\nfor several"
                " losses: optimizer.backward(first, more=True), then optimizer.backward(last); or add them",
                code=30,
            )

    def reopen(self, batch: Batch) -> None:
        """Has the batch that was differentiated last done again: its gradients, if they are still there, go. Raises
        `ConfigError` if an update is more than this batch, or is being gathered."""
        if self.state in ("more", "partial") or not batch.whole_update:
            raise ConfigError(
                "backward() cannot be repeated on a batch that is not a whole update",
                "the batch is one of several micro-batches, or more=True announced another backward()",
                "prepare(..., accumulate=1); for several losses of one pass: more=True before the last, no again=",
            )
        self.drop()
        self.batch = None

    def put_aside(self, state: State) -> None:
        """Keeps a partial sum until the next backward."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None
        self.state = state

    def complete(self) -> None:
        """Notes that the reduction is done; raises `ConfigError` if batches of the update had no backward pass."""
        batch = self.batch
        assert batch is not None
        self.state = "ready"
        self.had_some = any(parameter.grad is not None for parameter in self._parameters)
        if batch.update_samples and self._samples_seen != batch.update_samples:
            raise ConfigError(
                "every batch of an update needs a backward(): the samples are weighed together",
                f"batches with {self._samples_seen} of {batch.update_samples} samples had a backward()",
                "do not skip batches within an update of several micro-batches",
            )

    def drop(self) -> None:
        """Forgets the update: it is applied, or its partial sum is of no use."""
        self._aside = []
        self.gathering = False
        self.state = "idle"

    def restart(self) -> None:
        """Forgets everything, the last batch too: a checkpoint was restored."""
        self.drop()
        self.batch = None

    def refuse_in_update(self) -> None:
        """Raises `ConfigError` unless the user stands between two updates."""
        if self.gathering:
            raise ConfigError("this is not possible within an update", "an update has begun", "call it after step()")

    def refuse_zero_grad(self) -> None:
        """Raises `ConfigError` where zeroing would throw away an update."""
        if self.state == "ready":
            raise ConfigError(
                "zero_grad() cannot be called between backward() and step()",
                "zero_grad() before the update was applied",
                "call zero_grad() before backward(), or after step(); optimizer.skip() discards an update;\n" + TWICE,
                code=31,
            )


def _on_gradient(of: ref[Gradients], parameter: Tensor) -> None:
    gradients = of()  # not held: a model that is dropped is freed with all that was put on it
    if gradients is not None and gradients not in _running:
        gradients.refuse_foreign()


def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies in place, whichever devices the gradients are on."""
    for device in dict.fromkeys(gradient.device for gradient in gradients):
        own = [gradient for gradient in gradients if gradient.device == device]
        multiply_each_(own, factor.to(device))


@contextmanager
def zero_gradients(
    parameters: Sequence[nn.Parameter], weight: Number, loss: Tensor, outputs: Sequence[Tensor]
) -> Iterator[None]:
    """Makes a loss contribute nothing while the context is open if `weight` is 0: that factor does not remove a NaN.
    Gradients are 0 where the loss enters the model's outputs, and of parameters that it reaches past them."""
    keep = partial(_where_counted, weight) if isinstance(weight, Tensor) else torch.zeros_like
    asked = isinstance(weight, Tensor) or not weight
    ends: list[Tensor] = [*parameters]
    if asked and outputs:
        past = {id(getattr(node, "variable", None)) for node in nodes_of(loss, outputs)}
        ends = [*(one for one in outputs if one.grad_fn is not None), *(one for one in parameters if id(one) in past)]
    hooks = [end.register_hook(keep) for end in ends] if asked else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _where_counted(weight: Tensor, gradient: Tensor) -> Tensor:
    return torch.where(weight.to(gradient.device) != 0, gradient, torch.zeros_like(gradient))


def refuse_divided(loss: Tensor, accumulate: int) -> None:
    """Raises `ConfigError` for a mean that is divided again by the number of batches of its update. A mean that is
    multiplied (`0.5 * loss`) has a weight."""
    node: Any = loss.grad_fn
    other = getattr(node, "_saved_other", None)
    if accumulate == 1 or not isinstance(other, Tensor) or other.dim() or other.requires_grad or other.is_cuda:
        return
    of = node.next_functions[0][0]
    if node.name() != "DivBackward0" or abs(other.item() - accumulate) > 1e-6 * accumulate or of is None:
        return
    if not of.name().startswith("Mean") and getattr(of, "_saved_reduction", 0) != 1:
        return  # a sum, of samples or of several losses, may well be divided by their number
    raise ConfigError(
        "the loss must not be divided by accumulate=: hvdtrain averages the batches of an update",
        f"a loss that is divided by {accumulate}, with accumulate={accumulate}",
        "optimizer.backward(loss), undivided, and optimizer.step() on each batch",
        shared=True,
        code=32,
    )


def check_loss(loss: Tensor, *, untracked: bool = False) -> None:
    """Raises `ConfigError` unless `loss` is one number, with a gradient (unless `untracked`)."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not (loss.requires_grad or untracked):
        received = (
            f"{type(loss).__name__}"
            if not isinstance(loss, Tensor)
            else f"shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
        )
        raise ConfigError(
            "backward() needs a loss: one number with a gradient, the mean over this rank's batch",
            received,
            "optimizer.backward(loss_fn(model(x), y)), with reduction='mean', outside of torch.no_grad()",
        )
