"""The gradients of the update that is being gathered, and where in the loop the user stands.

Partial sums of micro-batches are put aside, so between micro-batches ``p.grad`` is None: ``zero_grad`` in any form
and clipping, which belong to the whole update, do no harm there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from hvdtrain.errors import ConfigError
from hvdtrain.torch._batches import Batch

# idle: backward() is next. more: another backward() for the same batch was announced. partial: a micro-batch is done
# that does not close its update. ready: p.grad is the gradient of the global batch, and step() is next.
State = Literal["idle", "more", "partial", "ready"]


class Gradients:
    """One update's gradients.

    Args:
        module: its trainable parameters.
        device: of the losses that are added up.

    Attributes:
        state: see `State`.
        loss: this rank's part of the update's mean loss: a number on the CPU, a tensor elsewhere.
        samples: this rank's live ones in the update.
        batch: the last one whose backward pass began.
        had_some: the complete update has a gradient.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._parameters = list(module.parameters())  # a walk through all modules takes longer than all the rest here
        self._device = device
        self.state: State = "idle"
        self.batch: Batch | None = None
        self.loss: Tensor | float = 0.0
        self.samples = 0
        self.had_some = False
        self._open = False
        self._aside: list[tuple[nn.Parameter, Tensor]] = []
        self._samples_seen = 0

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    def begin(self, batch: Batch, loss: Tensor) -> None:
        """Makes ``p.grad`` what the backward pass of `batch`, which gave `loss`, adds to.

        Raises:
            ConfigError: the loop is out of order, or the loss is not a mean.
        """
        self.check_turn(batch)
        check_loss(loss)
        self.open(batch)
        self.add_loss(batch, loss)

    def open(self, batch: Batch) -> None:
        """As `begin`, for a batch whose loss is not known yet; `add_loss` follows."""
        if self._open and self.batch is not None and batch.epoch != self.batch.epoch:
            self.drop()  # the user left the epoch in the middle of an update
        if not self._open:
            for parameter in self._parameters:
                parameter.grad = None  # a new update starts from nothing, even if zero_grad was forgotten
            self._open = True
            self._samples_seen = self.samples = 0
            self.loss = 0.0
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside = []
        if batch is not self.batch:
            self._samples_seen += batch.global_samples
            self.samples += batch.samples
        self.batch = batch

    def add_loss(self, batch: Batch, loss: Tensor) -> None:
        """Counts the mean loss of a batch."""
        if not batch.ghost:
            # on the CPU a number costs less than a tensor; elsewhere to ask for the number is to wait for the device
            value = float(loss.detach()) if self._device.type == "cpu" else loss.detach().double().reshape(())
            self.loss = self.loss + value * batch.weight

    def sums(self) -> Tensor:
        """Returns float64 [2], to be summed over ranks: this rank's `loss` and `samples`."""
        if isinstance(self.loss, Tensor):
            return torch.stack([self.loss, torch.full_like(self.loss, self.samples)])
        return torch.tensor([self.loss, self.samples], dtype=torch.float64, device=self._device)

    def check_turn(self, batch: Batch) -> None:
        """Raises `ConfigError` where no backward pass of `batch` is due."""
        if self.state == "ready":
            raise ConfigError(
                "optimizer.step() comes after the backward() that completes an update",
                "backward() was called again",
                "call optimizer.backward(loss), then optimizer.step(), for each batch",
            )
        if self.state != "more" and batch is self.batch:
            raise ConfigError(
                "each batch of the loader is differentiated once",
                "a second backward() for the same batch",
                "for several losses: optimizer.backward(first, more=True), then optimizer.backward(last); or add them",
            )

    def put_aside(self, state: State) -> None:
        """Keeps a partial sum until the next backward."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None
        self.state = state

    def complete(self) -> None:
        """The reduction is done.

        Raises:
            ConfigError: batches of the update had no backward pass.
        """
        batch = self.batch
        assert batch is not None
        self.state = "ready"
        self.had_some = any(parameter.grad is not None for parameter in self._parameters)
        if batch.update_samples and self._samples_seen != batch.update_samples:
            raise ConfigError(
                "every batch of an update needs its backward(): the samples are weighed together",
                f"batches with {self._samples_seen} of {batch.update_samples} samples had one",
                "do not skip batches within an update of several micro-batches",
            )

    def stepped(self) -> None:
        """The update is applied."""
        self.state = "idle"
        self._open = False

    def drop(self) -> None:
        """Forgets a partial sum."""
        self._aside = []
        self._open = False
        self.state = "idle"

    def restart(self) -> None:
        """Forgets everything, the last batch too: a checkpoint was restored."""
        self.drop()
        self.batch = None

    def refuse_in_update(self) -> None:
        """Raises `ConfigError` unless the user stands between two updates."""
        if self._open:
            raise ConfigError("this belongs between two updates", "an update is being gathered", "call it after step()")

    def refuse_zero_grad(self) -> None:
        """Raises `ConfigError` where zeroing would throw away an update."""
        if self.state == "ready":
            raise ConfigError(
                "the gradients of an update are zeroed after it is applied",
                "zero_grad() between backward() and step()",
                "zero_grad() belongs before backward(), or after step()",
            )


@contextmanager
def uncounted(parameters: Sequence[nn.Parameter], ghost: bool) -> Iterator[None]:
    """While it lasts, and `ghost`, gradients are exactly 0: a weight of 0 does not undo a loss that is NaN."""
    hooks = [parameter.register_hook(torch.zeros_like) for parameter in parameters] if ghost else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_loss(loss: Tensor, *, untracked: bool = False) -> None:
    """Raises `ConfigError` unless `loss` is one number, with a gradient (unless `untracked`)."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not (loss.requires_grad or untracked):
        came = (
            f"{type(loss).__name__}"
            if not isinstance(loss, Tensor)
            else f"shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
        )
        raise ConfigError(
            "backward() takes the loss: one number, the mean over this rank's batch",
            came,
            "optimizer.backward(loss_fn(model(x), y)), with reduction='mean', outside of torch.no_grad()",
        )
