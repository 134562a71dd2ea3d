"""The optimizer of a training loop: backward, step, and what happens between them, in the right order."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hvdtrain.core.errors import ConfigError
from hvdtrain.runs.parts import Progress
from hvdtrain.torch.amp import ScalerAdapter, widened
from hvdtrain.torch.checks import replicas
from hvdtrain.torch.checks.nonfinite import Reading, first_bad_layer, gradient_error
from hvdtrain.torch.checks.out_of_memory import explained
from hvdtrain.torch.checks.pieces import pieces_differ
from hvdtrain.torch.checks.tally import SIZE, Number, Weight, weight_of, wrong
from hvdtrain.torch.clock import CLOCK
from hvdtrain.torch.data.batches import Batch, require_batch
from hvdtrain.torch.engines.base import EngineModel
from hvdtrain.torch.gradients import Gradients, check_loss, scale, zero_gradients
from hvdtrain.torch.model import Model
from hvdtrain.torch.session import Session, not_finite, rates_of
from hvdtrain.torch.staged import SMALLER_STAGES, Loss, in_one_call, run_step


class Optimizer(torch.optim.Optimizer):
    """What `prepare` returns for the user's optimizer, which it holds; torch's schedulers take it for one.

    Attributes:
        wrapped: the user's optimizer.
        progress: where training stands after the last update, skipped ones counted.
    """

    def __init__(self, session: Session) -> None:
        # not torch's own __init__: there is one set of groups and of state, the wrapped optimizer's
        self.wrapped = session.optimizer
        self.session = session
        self.progress = Progress()
        self._model = Model(session)
        held = None if session.in_parts is None else session.in_parts.tensors
        self._stepper = ScalerAdapter(self.wrapped, partial(_step_engine, session), held)
        self._layer = ""
        self._updated: Batch | None = None
        self._compared = session.world.size == 1
        # nothing that stays on model and optimizer may refer to this one: when it is dropped, they are plain again
        guard = self.wrapped.register_step_pre_hook(partial(_refuse_bare_step, ref(session)))
        self._closing = finalize(self, _close, guard, session.gradients, session.engine_model)
        self._closing.atexit = False

    # -- one update ------------------------------------------------------------------------------------------
    def forward_backward(self, x: Any, y: Any, loss: Loss, *, weight: Weight = None) -> Tensor:
        """Runs the model on this rank's batch, forward and backward; the loop for whole models and pipelines alike.

        For a whole model it is `backward(loss(model(x), y))`; a pipeline runs micro-batch by micro-batch, and
        gradients of its last stages travel while the first ones still compute.

        Args:
            x: what the model takes; a tuple is its positional arguments. Tensors have samples along dimension 0.
            y: the targets.
            loss: called with outputs and targets; the mean over what it is given.
            weight: what that mean divides by: as of `backward`, or a function of the targets that adds up over pieces,
                `lambda y: (y != -100).sum()`, which a pipeline calls for each micro-batch.

        Returns:
            The mean loss of the batch, detached; a scalar. Of a pipeline on a rank that has no samples left: 0.

        Raises:
            As `backward`.
        """
        args = x if isinstance(x, tuple) else (x,)
        if self.session.staged is not None:
            return self._run_stages(args, y, loss, weight)
        given = weight(y) if callable(weight) else weight
        self._prove_pieces(args, y, loss, weight)
        mean = loss(self._model(*args), y)
        self.backward(mean, weight=given)
        return mean.detach()

    def _prove_pieces(self, args: tuple[Any, ...], y: Any, loss: Loss, weight: Weight) -> None:
        """On the first batch: whether model and loss can be put together of two pieces of it."""
        session, proof = self.session, self.session.proof
        batch = session.batches.now()
        if proof.outputs is None or batch is None or batch.padding or isinstance(weight, (int, float, Tensor)):
            return
        with session.gradients.differentiating():
            proof.suspicion = pieces_differ(session, self._model, args, y, loss, weight)

    def _run_stages(self, args: tuple[Any, ...], y: Any, loss: Loss, weight: Weight) -> Tensor:
        session, gradients = self.session, self.session.gradients
        batch = require_batch(session.batches.now())
        gradients.check_turn(batch)
        session.batches.called(args)
        session.batches.check_calls()
        whole = weight(y) if callable(weight) else weight
        given = None if whole is None else weight_of(whole, session.engine.device)
        amount, coefficient = gradients.begin(batch, given, session.precision.unit)
        session.last_call, session.last_method = (args, {}), None
        CLOCK.enter("backward")  # and forward, in turns
        device = session.engine.device
        sums = torch.zeros(SIZE, dtype=torch.float64, device=device) if batch.is_last_micro_batch else None
        mean = torch.zeros((), device=device)

        def passes() -> None:
            nonlocal mean
            if not batch.padding:  # else nothing counts, and no other rank waits within the passes
                try:
                    mean = run_step(session, args, y, loss, coefficient, weight)
                except ConfigError as error:  # seen in this rank's own samples: the others are in the reduction
                    if session.world.size == 1:
                        raise
                    session.proof.found(f"{error.rule}: {error.received}; {error.remedy}", gradients.tally)
                    gradients.tally.text = str  # nothing more to say
                else:
                    gradients.add_loss(mean, amount, coefficient)
            if sums is not None:
                sums.copy_(gradients.sums())

        with explained("passes of the pipeline", session.sizes, SMALLER_STAGES), gradients.differentiating():
            session.engine_model.run(passes, reduce=sums is not None, extras=sums)
        self._conclude(batch, mean, sums)
        return mean

    def backward(self, loss: Tensor, *, weight: float | Tensor | None = None, more: bool = False) -> None:
        """Differentiates the mean loss of this rank's batch.

        After the batch that completes an update, `p.grad` is the gradient of the mean loss over all ranks and
        micro-batches, sum(weight x gradient) / sum(weight), unscaled. Before, `p.grad` is None.
        On ddp and deepspeed clone a gradient to keep it: the next update uses its memory again, as PyTorch's own does.
        Factors that autograd does not see (weights divided by their batch mean, advantages normalised under `no_grad`)
        are found only by `hvdtrain.torch.check(step, batch)`.

        Args:
            loss: a scalar, the mean over this rank's batch: of its samples, or of what `weight` counts; not a sum
                that is divided by the samples of all ranks.
            weight: what that mean divides by, if not by samples: a number, or a scalar (which may be on a GPU: nothing
                waits for it). `(y != -100).sum()` with `ignore_index`, `class_weights[y].sum()` with class
                weights, `mask.sum()` for tokens. A batch of weight 0 does not count, even if its loss is NaN.
            more: another backward for the same batch follows, of another loss; they add up.

        Raises:
            ConfigError: no batch, a second backward for one batch, backward instead of step, no scalar, or a pipeline.
                On every rank: what the loss divides by is not its weight, or no weight makes it right.
            NonFiniteError: on every rank, when the loss of one is NaN or infinite.
            HvdtrainError: out of memory.
        """
        session, gradients = self.session, self.session.gradients
        if session.staged is not None:
            raise in_one_call("optimizer.backward(loss)", "loss = optimizer.forward_backward(x, y, loss_fn)")
        batch = require_batch(session.batches.now())
        gradients.check_turn(batch)
        session.batches.check_calls()
        check_loss(loss)
        self._model.check_entered()
        given = None if weight is None else weight_of(weight, session.engine.device)
        amount, coefficient = gradients.begin(batch, given, session.precision.unit)
        gradients.add_loss(loss, amount, coefficient)
        if not batch.padding:
            samples = batch.step.samples if batch.step is not None else session.samples_called()
            session.proof.look_once(loss, amount, samples, gradients.tally)
            session.proof.read(loss, amount, samples, gradients.tally)
        CLOCK.enter("backward")
        sums = gradients.sums() if batch.is_last_micro_batch and not more else None
        self._differentiate(loss, amount, coefficient, sums)
        self._conclude(batch, loss, sums, more=more)

    def _conclude(self, batch: Batch, loss: Tensor, sums: Tensor | None, *, more: bool = False) -> None:
        """What follows on the passes of a batch; `sums`, if it is the last of an update, are under way."""
        session, gradients = self.session, self.session.gradients
        if not batch.padding:
            self._find_layer(loss)
        if sums is not None:
            CLOCK.enter("communication")
            session.engine_model.finish()
            CLOCK.enter("optimizer")
            gradients.complete()
            self._settle_update(batch, sums)
        else:
            gradients.put_aside("more" if more else "partial")
        if not more:
            session.batches.done()
        CLOCK.enter("other")

    def _differentiate(self, loss: Tensor, weight: Number, coefficient: Number, sums: Tensor | None) -> None:
        session, gradients = self.session, self.session.gradients
        wide = widened(loss)
        factor = coefficient.to(wide.device, wide.dtype) if isinstance(coefficient, Tensor) else coefficient
        scaled = session.precision.scale(wide.reshape(()) * factor)
        with (
            explained("backward pass", session.sizes),
            gradients.differentiating(),
            zero_gradients(gradients.parameters(), weight),
        ):
            session.engine_model.backward(scaled, reduce=sums is not None, extras=sums)

    def _find_layer(self, loss: Tensor) -> None:
        """Looks for the layer while the batch and the parameters are still those that gave a bad loss."""
        session = self.session
        if session.losses.at_once and not self._layer and not math.isfinite(float(loss.detach())):
            args, kwargs = session.last_call or ((), {})
            with session.precision.autocast():
                call: Any = session.last_method if session.staged is None else session.staged
                self._layer = first_bad_layer(session.module, args, kwargs, call)

    def _settle_update(self, batch: Batch, sums: Tensor) -> None:
        """Once the gradients are there: checks loss and weights, divides by what the weights really sum to (samples may
        have been left out), takes the scale away."""
        session, tally = self.session, self.session.gradients.tally
        every, weight = sums[0], sums[1]
        if tally.given or batch.update_samples:  # any data set may turn out to have fewer samples than planned
            unit = session.precision.unit if tally.given else 1.0
            # without asking for the sum: that would make a GPU wait
            factor = torch.where(weight > 0, batch.planned * unit / weight, torch.zeros_like(weight))
            present = [gradient for _, gradient in session.gradients_here()]
            if present and not (factor.device.type == "cpu" and float(factor) == 1.0):
                scale(present, factor)
            every = every * factor
        layer, self._layer = self._layer, ""
        session.losses.add(Reading(
            self.progress.step + 1, batch.place[0], every, tally.loss, layer,
            wrong(sums, session.world.size), session.proof.explain(tally, sums, lambda: self.lr),
        ))  # fmt: skip
        if tally.given:
            session.precision.note_weights(weight / batch.planned)
        if session.in_parts is not None and session.options.amp == "fp16":
            session.in_parts.spread_infinity()
        session.precision.unscale(self._stepper)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Scales the gradients of the update so that their norm is at most `max_norm`.

        Returns:
            Their norm before; None while the update is not complete: then there is nothing to clip.

        Raises:
            ConfigError: no backward before.
        """
        state = self.session.gradients.state
        if state == "idle":
            raise ConfigError(
                "gradients are clipped between backward() and step()",
                "clip_grad_norm_() without backward() before",
                "optimizer.backward(loss); optimizer.clip_grad_norm_(1.0); optimizer.step()",
            )
        if state != "ready":
            return None
        session = self.session
        if session.in_parts is not None:
            if not norm_type > 0:
                raise ConfigError("with zero=2 norm_type is above 0", f"norm_type={norm_type}", "2.0, or float('inf')")
            with session.world.in_step("optimizer.clip_grad_norm_() with zero=2"):
                norm = session.in_parts.clip_grad_norm_(max_norm, norm_type)
        else:
            norm = torch.nn.utils.clip_grad_norm_(session.gradients.parameters(), max_norm, norm_type)
        # with a gradient scaler an infinite gradient is a matter of course: the step will be skipped
        if session.losses.at_once and session.options.amp != "fp16" and not math.isfinite(float(norm)):
            raise gradient_error(not_finite(session), float(norm), self.progress.step + 1)
        return norm

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Applies the update: clips, sets the learning rate, steps. Before the update is complete it does nothing.

        Raises:
            ConfigError: no backward before, a closure, or gradients that were thrown away.
            NonFiniteError: the norm of the gradients is not finite.
            ReplicaError: after the first update, and every `watch_every` updates, when replicas differ.
        """
        session, gradients = self.session, self.session.gradients
        self._check_step(closure)
        if gradients.state == "partial":
            gradients.state = "idle"
            return
        CLOCK.enter("optimizer")
        if session.rates is not None:
            session.rates.apply(self.progress.samples_seen)
        if session.options.clip is not None:
            self.clip_grad_norm_(session.options.clip)
        with explained("optimizer's step", session.sizes):
            session.precision.step(self._stepper)
        if session.in_parts is not None:
            for parameter in gradients.parameters():
                parameter.grad = None  # nothing to be read, or added to
        gradients.drop()
        if session.batches.data is not None:
            session.handed_out(session.batches.data.step)  # what was saved of buffers is put back, and kept on
        self._advance()
        every = session.options.watch_every
        due = bool(every and self.progress.step % every == 0) or not self._compared
        if due and session.world.size > 1:
            self._compared = self._compared or gradients.had_some
            replicas.check_equal(session.module, session.world, f"after update {self.progress.step}")
        CLOCK.enter("other")

    def _check_step(self, closure: object) -> None:
        gradients = self.session.gradients
        if closure is not None:
            raise ConfigError("the loss is differentiated by optimizer.backward(loss)", "step(closure)", "step()")
        if gradients.state in ("idle", "more"):
            raise ConfigError(
                "optimizer.step() follows optimizer.backward(loss)",
                "no backward() since the last step()"
                if gradients.state == "idle"
                else "backward(..., more=True) announced another backward()",
                "write optimizer.backward(loss) instead of loss.backward(), and step() after each",
            )
        if gradients.state == "ready" and not self._stepper.has_gradients() and gradients.had_some:
            raise ConfigError(
                "the gradients of an update are zeroed after it is applied",
                "they are gone between backward() and step()",
                "zero_grad() belongs before backward(), or after step()",
            )

    def _advance(self) -> None:
        batch = self.session.gradients.batch
        assert batch is not None
        epoch, in_epoch = self.session.batches.applied(batch)
        self.progress = Progress(
            epoch, self.progress.step + 1, self.progress.samples_seen + batch.update_samples, in_epoch
        )
        self._updated = batch

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes `p.grad`. Partial sums of an update that is being gathered are not touched.

        Raises:
            ConfigError: an update is complete and not applied.
        """
        self.session.gradients.refuse_zero_grad()
        self.wrapped.zero_grad(set_to_none)

    # -- looking ---------------------------------------------------------------------------------------------
    @property
    def lr(self) -> float:
        """The learning rate of the first group, in the last update."""
        return rates_of(self.wrapped)[0]

    @property
    def skipped_steps(self) -> int:
        """Updates left out because a gradient was infinite (amp="fp16")."""
        return self.session.precision.skipped_steps

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

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refused: an engine is tied to the parameters it was given."""
        raise ConfigError(
            "an optimizer has all its groups before it is prepared",
            "add_param_group() after prepare()",
            "add the group first; parameters that join later can be frozen until then",
        )

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

    def close(self) -> None:
        """Takes the hooks off model and optimizer, which are plain again; dropping this optimizer does it too.

        With zero= collective: the optimizer gets its whole state back (not when it is dropped: ranks drop it alone).
        """
        if self._closing.alive and self.session.parted is not None:
            state = self.state_dict()
            self._closing()
            self.wrapped.load_state_dict(state)
        self._closing()


def _close(guard: RemovableHandle, gradients: Gradients, model: EngineModel) -> None:
    guard.remove()
    gradients.close()
    model.close()


def _step_engine(session: Session) -> None:
    session.stepping = True
    try:
        session.engine_model.step()
    finally:
        session.stepping = False


def _refuse_bare_step(of: ref[Session], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    session = of()
    if session is not None and session.world.size > 1 and not session.stepping:
        raise ConfigError(
            "the prepared optimizer takes the steps: it knows when gradients are those of all ranks",
            f"step() of the {type(optimizer).__name__} that was given to prepare()",
            "model, optimizer = prepare(model, optimizer, ...), then optimizer.step() with the one returned",
        )
