"""The optimizer of a training loop: `step`, and the calls that lead to it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from hvdtrain.checkpoint.parts import Progress
from hvdtrain.core.errors import ConfigError
from hvdtrain.torch.engines import replicas, unprepared
from hvdtrain.torch.engines.base import EngineModel
from hvdtrain.torch.losses.loss_proof import LossProof
from hvdtrain.torch.update.amp import ScalerAdapter
from hvdtrain.torch.update.batches import Batch, require_batch
from hvdtrain.torch.update.gradients import Gradients
from hvdtrain.torch.update.nonfinite import gradient_error
from hvdtrain.torch.update.passes import BatchPasses
from hvdtrain.torch.update.refusals import check_held
from hvdtrain.torch.update.regroup import compared, updated
from hvdtrain.torch.update.session import Session, not_finite, rates_of
from hvdtrain.torch.update.several import Several
from hvdtrain.torch.values.clock import CLOCK
from hvdtrain.torch.values.out_of_memory import explained
from hvdtrain.values.nested import tensors_of

_LOOKED_AT = 2  # updates, where no loader deals the data


class Optimizer(BatchPasses, torch.optim.Optimizer):
    """The optimizer that `prepare` returns. Schedulers and checkpoints accept it as an optimizer of PyTorch.

    Example:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        optimizer.backward(loss)
        optimizer.step()

    Attributes:
        wrapped: your optimizer; for a list, one that steps them all.
        progress: the progress of training after the last update, also a skipped one.
    """

    # a fused optimizer would be given the scale to divide by, which this one keeps to itself: scalers divide first
    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False, for `GradScaler.step`, which reads it first; raises `ConfigError` if gradients are incomplete."""
        if self.session.options.amp == "fp16":
            raise ConfigError(
                "a GradScaler of your own cannot be used with amp='fp16', which scales the loss itself",
                "scaler.step(optimizer) of an optimizer prepared with amp='fp16'",
                "remove the GradScaler: optimizer.backward(loss); optimizer.step()",
            )
        if self.session.gradients.state == "partial":
            raise ConfigError(
                "a GradScaler of your own cannot step after a batch that completes no update",
                "scaler.step(optimizer) with accumulate=",
                'prepare(..., amp="fp16", accumulate=...) instead of it: optimizer.backward(loss), optimizer.step()',
            )
        return False

    def __init__(self, session: Session) -> None:
        if isinstance(session, list):  # of groups: Horovod makes another one of the same class
            raise ConfigError(
                "an optimizer that prepare() returned cannot be wrapped again: it averages already",
                "hvd.DistributedOptimizer(optimizer), or another wrapper that makes one of its class",
                "remove the wrapper",
            )
        # not torch's own __init__: there is one set of groups and of state, the wrapped optimizer's
        self.wrapped = session.optimizer
        super().__init__(session)
        self._updated: Batch | None = None
        self._counted: Batch | None = None  # as seen
        self._epoch = -1  # whose replicas were compared last
        self._first: Tensor | None = None  # loss of the closure's first call
        self._alike = 0  # updates for which all ranks had the same batch
        self._stepper = ScalerAdapter(self.wrapped, partial(_step_engine, session))
        # nothing that stays on model and optimizer may refer to this one: when it is dropped, they are plain again
        self._closing = finalize(self, _close, session.gradients, session.proof, session.engine_model)
        self._closing.atexit = False

    # -- one update ------------------------------------------------------------------------------------------
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Scales the gradients of the update so that their norm is at most `max_norm`.

        Returns:
            Their norm before; None if the update is not complete: then nothing is clipped.

        Raises:
            ConfigError: no backward before.
        """
        state = self.session.gradients.state
        if self._void:
            return None
        if state == "idle":
            raise ConfigError(
                "clip_grad_norm_() must be called between backward() and step()",
                "clip_grad_norm_() without a backward() before it",
                "optimizer.backward(loss); optimizer.clip_grad_norm_(1.0); optimizer.step()",
            )
        if state != "ready":
            return None
        session = self.session
        norm = torch.nn.utils.clip_grad_norm_(session.gradients.parameters(), max_norm, norm_type)
        # with a gradient scaler an infinite gradient is a matter of course: the step will be skipped
        if session.losses.at_once and session.options.amp != "fp16" and not math.isfinite(float(norm)):
            raise gradient_error(not_finite(session), float(norm), self.progress.step + 1)
        return norm

    def step(self, closure: Callable[[], object] | None = None) -> Tensor | None:  # type: ignore[override]
        """Applies the update: clips, sets the learning rate, steps. Does nothing before the update is complete.

        Args:
            closure: for optimizers that compute the loss several times (LBFGS, SAM): calls the model and
                `optimizer.backward(loss)` on the current batch.

        Returns:
            With a closure: the mean loss of all ranks, float64, when the optimizer first asked for it.

        Raises:
            ConfigError: no backward before, or its gradients were discarded; a closure with accumulation, amp="fp16",
                several optimizers, or DeepSpeed.
            NonFiniteError: the norm of the gradients is not finite.
            ReplicaError: replicas differ; compared after the first update of an epoch and every `watch_every` updates.
        """
        session, gradients = self.session, self.session.gradients
        if self._void:
            return None
        self._check_step(closure is not None)
        if gradients.state == "partial":
            gradients.state = "idle"
            return None
        session.batches.check_not_saved(require_batch(gradients.batch if closure is None else session.batches.now()))
        CLOCK.enter("optimizer")
        if session.rates is not None:
            session.rates.apply(self.progress.samples_seen)
        self._first = None
        if closure is not None:
            with explained("optimizer's step", session.sizes):
                _step_engine(session, partial(self._evaluate, closure))
            self._check_step(closure=False)
        else:
            if session.options.clip is not None:
                self.clip_grad_norm_(session.options.clip)
            with explained("optimizer's step", session.sizes):
                session.precision.step(self._stepper)
        self._close_update()
        every = session.options.watch_every
        due = bool(every and self.progress.step % every == 0)
        if self._updated is not None and self._updated.place[0] != self._epoch and gradients.had_some:
            self._epoch, due = self._updated.place[0], due or session.options.verify  # an epoch has ended
        if due and session.world.size > 1:
            compare = partial(replicas.check_equal, session.module, session.world, f"after update {self.progress.step}")
            compared(session, compare)
        looks = session.options.verify and session.batches.data is None and self.progress.step <= _LOOKED_AT
        if looks and session.world.size > 1:
            self._compare_batches()
        CLOCK.enter("other")
        return self._first

    def _compare_batches(self) -> None:
        """Raises `ConfigError` where no loader deals the data, and all ranks train on the same; collective."""
        session = self.session
        given = {str(place): tensor for place, tensor in enumerate(tensors_of(session.last_call or ()))}
        mine = sorted(checksum for checksum in replicas.checksums(given).values() if checksum)
        self._alike += len(set(map(tuple, session.world.gather(mine)))) == 1 and bool(mine)
        if self._alike == _LOOKED_AT:
            raise ConfigError(
                "each rank must train on its own part of the data",
                f"the model was called on the same tensors on all {session.world.size} ranks, in each of the first"
                f" {_LOOKED_AT} updates;\nprepare() was given no loader",
                "train = hvdtrain.torch.loader(dataset, per_rank_batch), given to prepare() and read in the loop",
                shared=True,
                code=14,
            )

    def _evaluate(self, closure: Callable[[], object]) -> Tensor | None:
        """Computes the loss of all ranks and its gradients; the wrapped optimizer calls it alike on each rank."""
        session = self.session
        self._reopen(require_batch(session.batches.now()))
        with torch.enable_grad():
            closure()
        if session.gradients.state != "ready":
            raise ConfigError(
                "a closure must call optimizer.backward(loss)",
                "the closure returned without optimizer.backward(loss)",
                "def closure(): loss = loss_fn(model(x), y); optimizer.backward(loss); return loss",
            )
        if session.options.clip is not None:
            self.clip_grad_norm_(session.options.clip)
        CLOCK.enter("optimizer")
        self._first = self._mean if self._first is None else self._first
        return self._mean

    def skip(self) -> None:
        """Discards the update that `backward` completed: weights and state stay as they are, its samples count as seen.
        Call it on every rank.

        Raises:
            ConfigError: no update is complete.
        """
        if self._void:
            return
        if self.session.gradients.state != "ready":
            raise ConfigError(
                "optimizer.skip() must be called in place of step(), after an update's last backward()",
                "no update is complete",
                "optimizer.backward(loss), then step() or skip()",
            )
        for parameter in self.session.gradients.parameters():
            parameter.grad = None
        self.session.precision.forget()
        self._close_update()

    def _close_update(self) -> None:
        session, gradients = self.session, self.session.gradients
        gradients.drop()
        if session.batches.data is not None:
            session.handed_out(session.batches.data.step)  # what was saved of buffers is put back, and kept on
        self._advance()

    def _check_step(self, closure: bool) -> None:
        gradients, options = self.session.gradients, self.session.options
        if closure:
            several = isinstance(self.wrapped, Several)
            reasons = {
                "accumulate=1": options.accumulate > 1, 'amp="bf16", or none': options.amp == "fp16",
                "one optimizer": several, "a model that is not split": self.session.staged is not None,
            }  # fmt: skip
            wrong = [need for need, lacks in reasons.items() if lacks]
            if wrong or gradients.state in ("partial", "more"):
                raise ConfigError(
                    "step(closure) must compute the loss and the gradients of a whole update",
                    "step(closure) within an update" if not wrong else "step(closure) with other settings",
                    f"step(closure) needs {', '.join(wrong) or 'a new update'}; or optimizer.backward(loss) and step()",
                )
        elif gradients.state in ("idle", "more"):
            raise ConfigError(
                "optimizer.step() needs optimizer.backward(loss) before it",
                ("the update was refused" if self.session.proof.refused else "no backward() since the last step()")
                if gradients.state == "idle"
                else "backward(..., more=True) announced another backward()",
                "write optimizer.backward(loss) instead of loss.backward(); call step() once after it",
                code=28,
            )
        if gradients.state == "ready" and not self._stepper.has_gradients() and gradients.had_some:
            raise ConfigError(
                "gradients cannot be zeroed between backward() and step()",
                "no parameter has a gradient at step()",
                "call zero_grad() before backward(), or after step()",
            )

    def _advance(self) -> None:
        self.session.gradients.used = True
        batch = self.session.gradients.batch
        assert batch is not None
        epoch, in_epoch = self.session.batches.applied(batch)
        new = 0 if batch is self._counted else batch.update_samples  # several updates of a batch have seen it once
        self.progress = Progress(epoch, self.progress.step + 1, self.progress.samples_seen + new, in_epoch)
        self._updated = self._counted = batch
        updated(self.session, self.progress.step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes `p.grad`; keeps the partial sums of an incomplete update.

        Raises:
            ConfigError: an update is complete and not applied.
        """
        self.before_zero_grad()
        self.wrapped.zero_grad(set_to_none)

    def before_zero_grad(self) -> None:
        """Raises `ConfigError` where zeroing would discard an update that was not skipped."""
        session = self.session
        if session.gradients.state == "ready" and session.precision.amp is None and bool(not_finite(session)):
            self.skip()  # a gradient scaler of the user's own has done so
        session.gradients.refuse_zero_grad()

    # -- looking ---------------------------------------------------------------------------------------------
    @property
    def lr(self) -> float:
        """The learning rate of the first group in the last update."""
        return rates_of(self.wrapped)[0]

    @property
    def skipped_steps(self) -> int:
        """The number of updates skipped because a gradient was infinite (amp="fp16")."""
        return self.session.precision.skipped_steps

    @property
    def preempted(self) -> bool:
        """Returns True if a rank was preempted (SIGTERM, SIGUSR1): on all ranks after one update (on a GPU two later).

        A loop over a `Loader` saves and ends the run. Any other loop must save, and raise `hvdtrain.Preempted`.
        """
        return self.session.preempted

    def record(self) -> dict[str, Any]:
        """Returns the arguments of `RunLog.step` for the last batch.

        The loss is the mean over all ranks' samples of the update (on a GPU: of an update some steps ago, so that
        nothing waits). For a micro-batch that completed no update, samples is 0 and the loss None.
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
        """Returns this rank's seconds by phase since the last `record`, for `RunLog.epoch` after an evaluation."""
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
        """Returns the wrapped optimizer's state; with zero= it joins all ranks' parts, and is collective."""
        zero = self.session.zero
        if zero is None:
            return self.wrapped.state_dict()
        with self.session.world.in_step("optimizer.state_dict() with zero="):
            return zero.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state into the wrapped optimizer; give every rank the same."""
        self.wrapped.load_state_dict(state_dict)
        self.loaded()

    def loaded(self) -> None:
        """Notes that the wrapped optimizer's state was loaded, the same on every rank."""
        if self.session.zero is not None:
            self.session.zero.keep_own_state()
        if self.session.rates is not None:
            self.session.rates.forget()

    def compare_replicas(self) -> None:
        """Makes the ranks compare their weights after the next update."""
        self._epoch = -1

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer, between two updates: parameters of the model that were frozen.

        Call it on every rank, with the same rate. With `prepare(..., lr=...)` the group's rate is its base.

        Raises:
            ConfigError: the parameters are not the model's, or an update is incomplete.
        """
        session = self.session
        session.gradients.refuse_in_update()
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
        """Removes the hooks from model and optimizer, which are plain again; deleting this optimizer does the same.

        With zero= it is collective, and gives the optimizer its whole state back (deleting does not).
        """
        self.session.gradients.used = True
        if self._closing.alive and self.session.zero is not None:
            self.session.zero.give_back(self.state_dict())
        self._closing()


def _step_engine(session: Session, closure: Callable[[], object] | None = None) -> None:
    with unprepared.engine_steps():
        session.engine_model.step(closure)


def _close(gradients: Gradients, proof: LossProof, model: EngineModel) -> None:
    gradients.close()
    proof.forget()
    model.close()
