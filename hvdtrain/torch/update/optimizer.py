"""The optimizer of a training loop: backward, step, and what happens between them, in the right order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hvdtrain.core.errors import ConfigError
from hvdtrain.runs.parts import Progress
from hvdtrain.torch.checks import replicas
from hvdtrain.torch.checks.loss_graph import recomputes_reentrantly
from hvdtrain.torch.checks.nonfinite import Reading, first_bad_layer, gradient_error
from hvdtrain.torch.checks.out_of_memory import explained
from hvdtrain.torch.checks.pieces import pieces_differ
from hvdtrain.torch.checks.tally import SIZE, Number, Weight, weight_of, wrong
from hvdtrain.torch.clock import CLOCK
from hvdtrain.torch.data.nested import map_tensors
from hvdtrain.torch.engines.base import Pass
from hvdtrain.torch.model import Model
from hvdtrain.torch.session import Session, not_finite
from hvdtrain.torch.staged import SMALLER_STAGES, Arguments, Loss, in_one_call, run_step
from hvdtrain.torch.update.amp import ScalerAdapter, widened
from hvdtrain.torch.update.batches import Batch, require_batch
from hvdtrain.torch.update.facade import Facade
from hvdtrain.torch.update.gradients import check_loss, scale, zero_gradients
from hvdtrain.torch.update.several import Several


class Optimizer(Facade):
    """What `prepare` returns for the user's optimizer, which it holds; torch's schedulers take it for one."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._model = Model(session)
        held = None if session.in_parts is None else session.in_parts.tensors
        self._stepper = ScalerAdapter(self.wrapped, partial(_step_engine, session), held)
        self._layer = ""
        self._compared = session.world.size == 1
        self._mean: Tensor | None = None  # loss of the update
        self._counted: Batch | None = None  # as seen
        self._recomputes: bool | None = None  # parts of the model within the backward pass

    # -- one update ------------------------------------------------------------------------------------------
    def forward_backward(
        self,
        x: Any,
        y: Any,
        loss: Loss,
        *,
        kwargs: Mapping[str, Any] | None = None,
        weight: Weight = None,
        again: bool = False,
        outputs: bool = False,
    ) -> Any:
        """Runs the model on this rank's batch, forward and backward; the loop for whole models and pipelines alike.

        For a whole model it is `backward(loss(model(x, **kwargs), y))`; a pipeline runs micro-batch by micro-batch, and
        gradients of its last stages travel while the first ones still compute.

        Args:
            x: what the model takes; a tuple is its positional arguments. Tensors have samples along dimension 0.
            y: the targets.
            loss: called with outputs and targets; the mean over what it is given.
            kwargs: the model's keyword arguments; of a pipeline those that it was split with.
            weight: what that mean divides by: as of `backward`, or a function of the targets that adds up over pieces,
                `lambda y: (y != -100).sum()`, which a pipeline calls for each micro-batch.
            again: as of `backward`.
            outputs: return the model's outputs as well, for metrics.

        Returns:
            The mean loss of the batch, detached; a scalar. Of a pipeline on a rank that has no samples left: 0. With
            `outputs` a tuple of it and the outputs, detached (None on such a rank).

        Raises:
            As `backward`.
        """
        arguments = Arguments(x if isinstance(x, tuple) else (x,), dict(kwargs or {}))
        kept: list[Any] = []
        if self.session.staged is not None:
            mean = self._run_stages(arguments, y, loss, weight, again, kept if outputs else None)
        else:
            given = weight(y) if callable(weight) else weight
            self._prove_pieces(arguments, y, loss, weight)
            kept = [self._model(*arguments.args, **arguments.kwargs)]
            mean = loss(kept[0], y)
            self.backward(mean, weight=given, again=again)
            mean = mean.detach()
        return (mean, map_tensors(Tensor.detach, kept[0]) if kept else None) if outputs else mean

    def _prove_pieces(self, arguments: Arguments, y: Any, loss: Loss, weight: Weight) -> None:
        """On the first batch: whether model and loss can be put together of two pieces of it."""
        session, proof = self.session, self.session.proof
        batch = session.batches.now()
        if proof.outputs is None or batch is None or batch.padding or isinstance(weight, (int, float, Tensor)):
            return
        with session.gradients.differentiating():
            proof.suspicion = pieces_differ(session, self._model, arguments, y, loss, weight)

    def _run_stages(
        self, arguments: Arguments, y: Any, loss: Loss, weight: Weight, again: bool, outputs: list[Any] | None
    ) -> Tensor:
        session, gradients = self.session, self.session.gradients
        session.batches.called(arguments)
        batch = self._take_turn(again)
        whole = weight(y) if callable(weight) else weight
        given = None if whole is None else weight_of(whole, session.engine.device)
        amount, coefficient = gradients.begin(batch, given, session.precision.unit)
        session.last_call, session.last_method = arguments, None
        CLOCK.enter("backward")  # and forward, in turns
        device = session.engine.device
        sums = torch.zeros(SIZE, dtype=torch.float64, device=device) if batch.is_last_micro_batch else None
        mean = torch.zeros((), device=device)

        def passes() -> None:
            nonlocal mean
            if not batch.padding:  # else nothing counts, and no other rank waits within the passes
                try:
                    mean = run_step(session, arguments, y, loss, coefficient, weight, outputs)
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
            session.engine_model.run(passes, Pass(reduce=sums is not None, extras=sums))
        self._conclude(batch, mean, sums)
        return mean

    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | Tensor | None = None,
        more: bool = False,
        retain_graph: bool = False,
        again: bool = False,
    ) -> None:
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
            retain_graph: as torch's: another backward goes through the same graph.
            again: the batch was differentiated before, and is once more, for an update of its own (several a batch), or
                in place of the gradients that are there. Need not be said where the model is called on tensors that
                the loader handed out.

        Raises:
            ConfigError: no batch, a second backward for one batch, backward instead of step, no scalar, or a pipeline.
                On every rank: what the loss divides by is not its weight, or no weight makes it right.
            NonFiniteError: on every rank, when the loss of one is NaN or infinite.
            HvdtrainError: out of memory.
        """
        session, gradients = self.session, self.session.gradients
        if session.staged is not None:
            raise in_one_call("optimizer.backward(loss)", "loss = optimizer.forward_backward(x, y, loss_fn)")
        batch = self._take_turn(again)
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
        self._differentiate(loss, amount, coefficient, sums, retain_graph)
        self._conclude(batch, loss, sums, more=more)

    def _take_turn(self, again: bool) -> Batch:
        """Returns the batch that is to be differentiated, if its turn has come."""
        session, gradients = self.session, self.session.gradients
        batch = require_batch(session.batches.now())
        own = session.batches.check_calls()
        if again or (own and gradients.state == "idle" and batch is gradients.batch):
            self._reopen(batch)
        gradients.check_turn(batch)
        return batch

    def _reopen(self, batch: Batch) -> None:
        if self.session.gradients.state == "ready":
            self.session.precision.forget()
        self.session.gradients.reopen(batch)

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

    def _differentiate(
        self, loss: Tensor, weight: Number, coefficient: Number, sums: Tensor | None, retain_graph: bool
    ) -> None:
        session, gradients = self.session, self.session.gradients
        reduce = sums is not None
        if reduce and self._recomputes is None:
            self._recomputes = recomputes_reentrantly(loss)
        wide = widened(loss)
        factor = coefficient.to(wide.device, wide.dtype) if isinstance(coefficient, Tensor) else coefficient
        scaled = session.precision.scale(wide.reshape(()) * factor)
        with (
            explained("backward pass", session.sizes),
            gradients.differentiating(),
            zero_gradients(gradients.parameters(), weight),
        ):
            session.engine_model.backward(scaled, Pass(reduce, sums, retain_graph, self._recomputes))

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
        skips = session.options.amp == "fp16"
        if skips or tally.given or batch.update_samples:  # any data set may turn out to have fewer samples than planned
            unit = session.precision.unit if tally.given else 1.0
            # without asking for the sum: that would make a GPU wait
            factor = torch.where(weight > 0, batch.planned * unit / weight, torch.zeros_like(weight))
            if skips:  # the forward pass has overflown: the scaler is to see it
                factor = torch.where(torch.isfinite(every), factor, torch.inf)
            present = [gradient for _, gradient in session.gradients_here()]
            if present and not (factor.device.type == "cpu" and float(factor) == 1.0):
                scale(present, factor)
            every = every * factor
        self._mean = every
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

    def step(self, closure: Callable[[], object] | None = None) -> Tensor | None:  # type: ignore[override]
        """Applies the update: clips, sets the learning rate, steps. Before the update is complete it does nothing.

        Args:
            closure: for optimizers that compute the loss several times (LBFGS, SAM): calls the model and
                `optimizer.backward(loss)` on the batch at hand.

        Returns:
            With a closure: the mean loss of all ranks, float64, as it was when the optimizer last asked for it.

        Raises:
            ConfigError: no backward before, or gradients that were thrown away; a closure under accumulation, with
                amp="fp16", for several optimizers, or on DeepSpeed.
            NonFiniteError: the norm of the gradients is not finite.
            ReplicaError: after the first update, and every `watch_every` updates, when replicas differ.
        """
        session, gradients = self.session, self.session.gradients
        self._check_step(closure is not None)
        if gradients.state == "partial":
            gradients.state = "idle"
            return None
        CLOCK.enter("optimizer")
        if session.rates is not None:
            session.rates.apply(self.progress.samples_seen)
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
        due = bool(every and self.progress.step % every == 0) or not self._compared
        if due and session.world.size > 1:
            self._compared = self._compared or gradients.had_some
            replicas.check_equal(session.module, session.world, f"after update {self.progress.step}")
        CLOCK.enter("other")
        return None if closure is None else self._mean

    def _evaluate(self, closure: Callable[[], object]) -> Tensor | None:
        """What the wrapped optimizer calls for the loss and its gradients: those of all ranks, which ask alike."""
        session = self.session
        self._reopen(require_batch(session.batches.now()))
        with torch.enable_grad():
            closure()
        if session.gradients.state != "ready":
            raise ConfigError(
                "a closure differentiates the batch at hand",
                "it returned without optimizer.backward(loss)",
                "def closure(): loss = loss_fn(model(x), y); optimizer.backward(loss); return loss",
            )
        if session.options.clip is not None:
            self.clip_grad_norm_(session.options.clip)
        CLOCK.enter("optimizer")
        return self._mean

    def skip(self) -> None:
        """Leaves out the update that `backward` has completed: weights and the optimizer's state stay as they are, the
        samples count as seen. Call it on every rank: `p.grad` is the same there, and so is what it decides.

        Raises:
            ConfigError: no update is complete.
        """
        if self.session.gradients.state != "ready":
            raise ConfigError(
                "optimizer.skip() takes the place of step() after an update's last backward()",
                "no update is complete",
                "optimizer.backward(loss), then step() or skip()",
            )
        for parameter in self.session.gradients.parameters():
            parameter.grad = None
        self.session.precision.forget()
        self._close_update()

    def _close_update(self) -> None:
        session, gradients = self.session, self.session.gradients
        if session.in_parts is not None:
            for parameter in gradients.parameters():
                parameter.grad = None  # nothing to be read, or added to
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
                    "a closure computes the loss and the gradients of a whole update, as often as the optimizer asks",
                    "step(closure) within an update" if not wrong else "step(closure) where that cannot be",
                    f"it needs {', '.join(wrong)}; or optimizer.backward(loss) and step()",
                )
        elif gradients.state in ("idle", "more"):
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
        new = 0 if batch is self._counted else batch.update_samples  # several updates of a batch have seen it once
        self.progress = Progress(epoch, self.progress.step + 1, self.progress.samples_seen + new, in_epoch)
        self._updated = self._counted = batch

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes `p.grad`. Partial sums of an update that is being gathered are not touched.

        Raises:
            ConfigError: an update is complete and not applied.
        """
        self.before_zero_grad()
        self.wrapped.zero_grad(set_to_none)

    def before_zero_grad(self) -> None:
        """Raises `ConfigError` where zeroing would throw away an update that nobody has left out."""
        session = self.session
        if session.gradients.state == "ready" and session.precision.amp is None and bool(not_finite(session)):
            self.skip()  # a gradient scaler of the user's own has done so
        session.gradients.refuse_zero_grad()


def _step_engine(session: Session, closure: Callable[[], object] | None = None) -> None:
    session.stepping = True
    try:
        session.engine_model.step(closure)
    finally:
        session.stepping = False
