"""What a prepared optimizer is to schedulers, gradient scalers, checkpoints and logs: an optimizer like any other."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from weakref import finalize, ref

import torch
from torch.utils.hooks import RemovableHandle

from hvdtrain.checkpoint.parts import Progress
from hvdtrain.core.errors import ConfigError
from hvdtrain.torch.engines.base import EngineModel
from hvdtrain.torch.update.batches import Batch
from hvdtrain.torch.update.gradients import Gradients
from hvdtrain.torch.update.refusals import check_held
from hvdtrain.torch.update.session import Session, rates_of
from hvdtrain.torch.update.several import members_of
from hvdtrain.torch.values.clock import CLOCK


class Facade(torch.optim.Optimizer):
    """The part of `Optimizer` that trains nothing.

    Attributes:
        wrapped: the user's optimizer; of a list, one that steps them all.
        progress: where training stands after the last update, skipped ones counted.
    """

    # a fused optimizer would be given the scale to divide by, which this one keeps to itself: scalers divide first
    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What `GradScaler.step` asks first; raises `ConfigError` where it would find no gradients."""
        if self.session.gradients.state == "partial":
            raise ConfigError(
                "a GradScaler of your own cannot step after a batch that completes no update",
                "scaler.step(optimizer) with accumulate=",
                'prepare(..., amp="fp16", accumulate=...) instead of it: optimizer.backward(loss), optimizer.step()',
            )
        return False

    def __init__(self, session: Session) -> None:
        # not torch's own __init__: there is one set of groups and of state, the wrapped optimizer's
        self.wrapped = session.optimizer
        self.session = session
        self.progress = Progress()
        self._updated: Batch | None = None
        self._epoch = -1  # whose replicas were compared last
        # nothing that stays on model and optimizer may refer to this one: when it is dropped, they are plain again
        refuse = partial(_refuse_bare_step, ref(session))
        guards = [member.register_step_pre_hook(refuse) for member in members_of(self.wrapped)]
        self._closing = finalize(self, _close, guards, session.gradients, session.engine_model)
        self._closing.atexit = False

    # -- looking ---------------------------------------------------------------------------------------------
    @property
    def lr(self) -> float:
        """The learning rate of the first group, in the last update."""
        return rates_of(self.wrapped)[0]

    @property
    def skipped_steps(self) -> int:
        """Updates left out because a gradient was infinite (amp="fp16")."""
        return self.session.precision.skipped_steps

    @property
    def preempted(self) -> bool:
        """A rank was preempted (SIGTERM, SIGUSR1): True on all ranks after the same update (on a GPU: two later).

        A loop over a `Loader` need not look: it saves and ends by itself, where the loader is asked for the next batch.
        Any other one saves, and raises `hvdtrain.Preempted`.
        """
        return self.session.told

    def record(self) -> dict[str, Any]:
        """What `RunLog.step` takes, for the batch just done.

        The loss is the mean over all ranks' samples of the update (on a GPU: of one some updates ago, so that nothing
        waits). For a micro-batch that completed no update, samples is 0 and the loss None.
        """
        batch, self._updated = self._updated, None
        return {
            "step": self.progress.step,
            "epoch": batch.place[0] if batch is not None else self.progress.epoch,
            "samples_seen": self.progress.samples_seen,
            "loss": self.session.losses.last if batch is not None else None,
            "lr": self.lr,
            "samples": batch.update_samples if batch is not None else 0,
            "seconds": CLOCK.take(),
        }

    def phases(self) -> dict[str, float]:
        """Returns this rank's seconds by phase since the last `record`: for `RunLog.epoch`, after an evaluation and a
        checkpoint."""
        return CLOCK.take()

    # -- being an optimizer ----------------------------------------------------------------------------------
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.wrapped.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.wrapped.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.wrapped.defaults

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's; with zero= put together of all ranks' parts, and collective."""
        parted = self.session.parted
        if parted is None:
            return self.wrapped.state_dict()
        with self.session.world.in_step("optimizer.state_dict() with zero="):
            return parted.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the wrapped optimizer; give every rank the same."""
        if self.session.parted is not None:
            self.session.parted.check_state(state_dict)
        self.wrapped.load_state_dict(state_dict)
        self.loaded()

    def loaded(self) -> None:
        """The wrapped optimizer's state was loaded, the same on every rank."""
        if self.session.parted is not None:
            self.session.parted.share_out()
        if self.session.rates is not None:
            self.session.rates.forget()

    def compare_replicas(self) -> None:
        """After the next update the ranks compare their weights."""
        self._epoch = -1

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's, between two updates: of parameters of the model, which were frozen until now.

        Call it on every rank: an update whose ranks have other rates is refused. With `prepare(..., lr=...)` the
        group's rate is its base.

        Raises:
            ConfigError: parameters that are not the model's, within an update, or with zero=.
        """
        session = self.session
        session.gradients.refuse_in_update()
        if session.parted is not None:
            raise ConfigError(
                "with zero= an optimizer has all its groups before it is prepared",
                "add_param_group() after prepare()",
                "optimizer.close(), add the group, and prepare() again",
            )
        given = param_group["params"]
        param_group["params"] = [given] if isinstance(given, torch.Tensor) else list(given)
        check_held(session.module, param_group["params"])
        self.wrapped.add_param_group(param_group)
        self.compare_replicas()  # what joins may be new, and drawn by each rank for itself

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.wrapped.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.wrapped.register_step_post_hook(hook)

    def __repr__(self) -> str:
        return repr(self.wrapped)

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # not there yet
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.optim.Optimizer:
        """A copy of the wrapped optimizer, plain."""
        return copy.deepcopy(self.wrapped, memo)

    def close(self) -> None:
        """Takes the hooks off model and optimizer, which are plain again; dropping this optimizer does it too.

        With zero= collective: the optimizer gets its whole state back (not when it is dropped: ranks drop it alone).
        """
        if self._closing.alive and self.session.parted is not None:
            state = self.state_dict()
            self._closing()
            self.wrapped.load_state_dict(state)
        self._closing()


def _close(guards: list[RemovableHandle], gradients: Gradients, model: EngineModel) -> None:
    for guard in guards:
        guard.remove()
    gradients.close()
    model.close()


def _refuse_bare_step(of: ref[Session], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    session = of()
    if session is not None and session.world.size > 1 and not session.stepping:
        raise ConfigError(
            "the prepared optimizer takes the steps: it knows when gradients are those of all ranks",
            f"step() of the {type(optimizer).__name__} that was given to prepare()",
            "model, optimizer = prepare(model, optimizer, ...), then optimizer.step() with the one returned",
        )
