"""Sets each parameter group's learning rate from the contract `hvdtrain.LR`, as a function of samples seen."""

from __future__ import annotations

import math
from typing import Any

import torch

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.lr import LR


class Rates:
    """The rates of one optimizer: each group's own base, times what the contract says of its base.

    Args:
        optimizer: made with base rates.
        lr: the contract.
        global_batch: samples of an update: ranks x per-rank batch x accumulation.

    Raises:
        ConfigError: no group has the contract's base rate; one whose rate was scaled already, say.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, lr: LR, global_batch: int) -> None:
        self._optimizer = optimizer
        self.lr = lr
        self.global_batch = global_batch
        self._bases = rates_of(optimizer)
        if not any(math.isclose(base, lr.base, rel_tol=1e-5) for base in self._bases):
            lr.check_optimizer(self._bases[0], global_batch)
        self._last: list[float] | None = None
        self._marks = _marks(optimizer)
        self._refuse_scheduler(getattr(optimizer.step, "_wrapped_by_lr_sched", False))

    def apply(self, samples_seen: int) -> None:
        """Sets the rates of the update that begins after `samples_seen` samples.

        Raises:
            ConfigError: something else has set a rate since the last update, or is about to.
        """
        self._refuse_scheduler(_marks(self._optimizer) != self._marks)
        now = rates_of(self._optimizer)
        if self._last is not None and now != self._last:
            raise ConfigError(
                "one hand sets the learning rate: prepare(..., lr=...) does so before each update",
                f"it was set to {self._last}, and is now {now}",
                "take the scheduler away, or leave lr= out and keep the scheduler",
            )
        factor = self.lr.at(samples_seen, self.global_batch) / self.lr.base
        for group, base in zip(self._optimizer.param_groups, self._bases, strict=True):
            _set(group, base * factor)
        self._last = rates_of(self._optimizer)

    def forget(self) -> None:
        """A checkpoint has set the rates; the next update sets them anew."""
        self._last = None
        self._marks = _marks(self._optimizer)

    def _refuse_scheduler(self, found: bool) -> None:
        """Before it has done anything: some begin after many epochs."""
        if found:
            raise ConfigError(
                "prepare(..., lr=...) sets the learning rate before each update",
                "a scheduler of torch.optim.lr_scheduler was made for the same optimizer",
                "take the scheduler away, or leave lr= out and keep the scheduler",
            )


def _marks(optimizer: torch.optim.Optimizer) -> list[bool]:
    """Which groups torch's schedulers have written their initial rate to, which they do at once."""
    return ["initial_lr" in group for group in optimizer.param_groups]


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """The rate of each group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def _set(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):  # of capturable optimizers
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
