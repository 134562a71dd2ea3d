"""The first half of an update: forward and backward passes, and what is made of their sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from hvdtrain.checkpoint.parts import Progress
from hvdtrain.core.errors import ConfigError, HvdtrainError, RanksLost, ReplicaError
from hvdtrain.torch.engines import unprepared
from hvdtrain.torch.engines.base import Pass
from hvdtrain.torch.losses.loss_graph import leaves_of, recomputes_reentrantly
from hvdtrain.torch.losses.loss_proof import Looked
from hvdtrain.torch.losses.tally import SIZE, Number, Tally, Weight, out_of_step, weight_of, wrong
from hvdtrain.torch.update.amp import ScalerAdapter, widened
from hvdtrain.torch.update.batches import Batch, require_batch
from hvdtrain.torch.update.gradients import check_loss, refuse_divided, scale, zero_gradients
from hvdtrain.torch.update.model import Model
from hvdtrain.torch.update.nonfinite import PendingLosses, first_bad_layer
from hvdtrain.torch.update.pieces import model_differs, pieces_differ
from hvdtrain.torch.update.regroup import check_once, go_on_without
from hvdtrain.torch.update.session import Session, rates_of
from hvdtrain.torch.update.staged import SMALLER_STAGES, Arguments, Loss, in_one_call, pieces_for, run_step
from hvdtrain.torch.update.terms import MeanTerm, Terms, terms_of
from hvdtrain.torch.update.whole import given_gradients, gradients_of, is_whole, joined
from hvdtrain.torch.update.whole import whole as whole_values
from hvdtrain.torch.values.clock import CLOCK
from hvdtrain.torch.values.out_of_memory import explained
from hvdtrain.values.generators import of_devices, random_streams, restore_streams
from hvdtrain.values.nested import map_tensors, tensors_of
from hvdtrain.values.preserved import Saved, buffers_of, put_back

T = TypeVar("T")


class _MicroBatch(NamedTuple):
    """A batch of an update whose loss is of the whole batch: `outputs` of the model, without their graph, are leaves
    of the loss's; `streams` and `buffers` are as its first pass began."""

    arguments: Arguments
    outputs: Any
    y: Any
    batch: Batch
    streams: dict[str, Any]
    buffers: Saved


class BatchPasses:
    """The passes of one batch, of a whole model or of stages; in the right order with those of other batches."""

    _stepper: ScalerAdapter

    def __init__(self, session: Session) -> None:
        self.session = session
        self.progress = Progress()
        self._model = Model(session)
        self._layer = ""
        self._mean: Tensor | None = None  # loss of the update
        self._failed: BaseException | None = None  # of a pass whose gradients other ranks wait for
        self._void = False  # the batch at hand is dealt again, to other ranks
        self._recomputes: bool | None = None  # parts of the model within the backward pass
        self._terms = Terms(0)
        self._micro_batches: list[_MicroBatch] = []  # of an update whose loss is of the whole batch

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
        whole: bool = False,
    ) -> Any:
        """Runs the model on this rank's batch, forward and backward, and returns the mean loss; also for a pipeline.

        For other models it is `backward(loss(model(x, **kwargs), y))`. A pipeline runs its micro-batches; its last
        stages send gradients while the first ones still compute. The errors are those of `backward`.

        Args:
            x: the model's input; a tuple is its positional arguments. Tensors have samples along dimension 0.
            y: the targets.
            loss: called with outputs and targets; returns their mean loss, a scalar.
            kwargs: the model's keyword arguments; of a pipeline those that it was split with.
            weight: the divisor of that mean: as of `backward`, or a function of the targets that adds up over pieces,
                `lambda y: (y != -100).sum()`, which a pipeline calls for each micro-batch.
            again: as of `backward`.
            outputs: True also returns the model's outputs, for metrics.
            whole: the loss is called once per update, with the outputs and targets of the global batch, as of
                `hvdtrain.torch.whole`; with accumulate= of all its batches, each of which the model then runs twice
                (GradCache, arXiv 2101.06983). It may be any loss, and draws the same random numbers on every rank.

        Returns:
            The mean loss of the batch, detached; a scalar; 0 for a pipeline's padding batch. With `whole` that of the
            global batch; None before the update's last batch. With `outputs` a tuple of it and the outputs, detached.
        """
        arguments = Arguments(x if isinstance(x, tuple) else (x,), dict(kwargs or {}))
        kept: list[Any] = []
        if whole:
            mean = self._run_whole(arguments, y, loss, weight, again, kept)
        elif self.session.staged is not None:
            mean = self._run_stages(arguments, y, loss, weight, again, kept if outputs else None)
        else:
            given = weight(y) if callable(weight) else weight
            self._prove_pieces(arguments, y, loss, weight)
            kept = [self._model(*arguments.args, **arguments.kwargs)]
            mean = loss(kept[0], y)
            self.backward(mean, weight=given, again=again)
            if isinstance(mean, (list, tuple)):
                mean = sum(math.prod(its[::2]) for its in mean)
            mean = mean.detach()
        return (mean, map_tensors(Tensor.detach, kept[0]) if kept else None) if outputs else mean

    def _run_whole(
        self, arguments: Arguments, y: Any, loss: Loss, weight: Weight, again: bool, kept: list[Any]
    ) -> Tensor | None:
        session = self.session
        batch = require_batch(session.batches.now())
        self._check_whole(batch, weight, in_parts=False)
        if batch.whole_update and session.staged is None:
            kept.append(self._model(*arguments.args, **arguments.kwargs))
            outputs, targets = whole_values(kept[0], y, world=session.world)
            with self._same_draws():
                mean = loss(outputs, targets)
            self.backward(mean, again=again)
            return mean.detach()
        return self._unless_dealt_again(partial(self._gather_whole, arguments, y, loss, again, kept))

    def _unless_dealt_again(self, run: Callable[[], T]) -> T | None:
        """Returns what `run` does; None if ranks change, before it or in it, and the batch at hand is dealt again."""
        self._void = self.session.batches.are_dealt_anew
        if self._void:
            return None
        try:
            return run()
        except RanksLost as lost:
            go_on_without(self.session, lost)
            self._void = True
            return None

    def _gather_whole(self, arguments: Arguments, y: Any, loss: Loss, again: bool, kept: list[Any]) -> Tensor | None:
        """A batch of several: its outputs now, and with the last one the loss of all, and every batch's gradients."""
        session, gradients = self.session, self.session.gradients
        if not gradients.gathering:
            self._micro_batches = []
        if session.staged is not None:
            session.batches.called(arguments)
        batch = self._take_turn(again)
        session.proof.close_batch()  # there is no loss of this rank's that could be tried
        share = 1 / session.world.size if batch.is_last_micro_batch else 0.0
        amount, coefficient = gradients.begin(batch, None, 1.0, share)
        streams, buffers = random_streams(session.world.devices), buffers_of(session.module.modules())
        with torch.no_grad(), pieces_for(session, arguments):
            kept.append(self._model(*arguments.args, **arguments.kwargs))
        outputs = map_tensors(Tensor.detach, kept[0])
        for output in tensors_of(outputs):
            output.requires_grad_(output.is_floating_point() or output.is_complex())
        self._micro_batches.append(_MicroBatch(arguments, outputs, y, batch, streams, buffers))
        if not batch.is_last_micro_batch:
            gradients.put_aside("partial")
            session.batches.done()
            return None
        micro_batches, self._micro_batches = self._micro_batches, []
        mean, entered = self._loss_of_all(micro_batches, loss)
        gradients.tally.count_whole(mean)
        gradients.add_loss(mean, amount, coefficient)
        sums = self._sums()
        self._passes_again(micro_batches, mean, entered, amount, coefficient, sums)
        self._conclude(batch, mean, sums)
        return mean.detach()

    def _passes_again(
        self,
        micro_batches: list[_MicroBatch],
        mean: Tensor,
        entered: tuple[list[Tensor], list[Tensor]],
        amount: Number,
        coefficient: Number,
        sums: Tensor,
    ) -> None:
        """Runs each batch of the update again, as it was then, and backward from the gradients of its outputs."""
        session = self.session
        CLOCK.enter("backward")
        after, buffers = random_streams(session.world.devices), buffers_of(session.module.modules())
        try:
            for one in micro_batches:
                is_last = one is micro_batches[-1]
                restore_streams(one.streams, session.world.devices)
                put_back(one.buffers)
                given = self._gradients_of(one, *entered, rest=is_last)
                if session.staged is not None:
                    self._stages_again(one, given, mean, coefficient, sums if is_last else None)
                    continue
                again_outputs = tensors_of(self._model(*one.arguments.args, **one.arguments.kwargs))
                passed = given_gradients(mean, *_entries(again_outputs, *given))
                self._differentiate(
                    passed, amount, coefficient, sums if is_last else None, False, counts=not one.batch.padding
                )
        finally:
            restore_streams(after, session.world.devices)
            put_back(buffers)
            session.batches.check_calls()

    def _loss_of_all(
        self, micro_batches: list[_MicroBatch], loss: Loss
    ) -> tuple[Tensor, tuple[list[Tensor], list[Tensor]]]:
        """The loss of the whole batch; what it was computed of, and the gradients by these."""
        session = self.session
        every, targets = joined(
            [(one.outputs, one.y) for one in micro_batches],
            [one.batch.step for one in micro_batches], session.world, session,
        )  # fmt: skip
        with self._same_draws():
            mean = loss(every, targets)
        check_loss(mean)
        entered = gradients_of(mean, session.module, session.world.size, retain_graph=False)
        if entered is None:
            raise ConfigError(
                "the loss must depend on the outputs", "a loss that does not depend on any output",
                "loss_fn(outputs, targets), called by forward_backward(x, y, loss_fn, whole=True)",
            )  # fmt: skip
        return mean, entered

    def _gradients_of(
        self, one: _MicroBatch, tensors: list[Tensor], found: list[Tensor], *, rest: bool
    ) -> tuple[dict[int, Tensor], list[tuple[nn.Parameter, Tensor]]]:
        """Returns the gradients by a batch's outputs, by number; with `rest` those by the loss's own parameters."""
        place = {id(leaf): index for index, leaf in enumerate(tensors_of(one.outputs))}
        pairs = list(zip(tensors, found, strict=True))
        by_output = {place[id(tensor)]: gradient for tensor, gradient in pairs if id(tensor) in place}
        direct = [(tensor, gradient) for tensor, gradient in pairs if rest and isinstance(tensor, nn.Parameter)]
        return by_output, direct

    def _stages_again(
        self,
        one: _MicroBatch,
        given: tuple[dict[int, Tensor], list[tuple[nn.Parameter, Tensor]]],
        mean: Tensor,
        coefficient: Number,
        sums: Tensor | None,
    ) -> None:
        """Runs a batch through the stages again, forward and backward from the gradients of its outputs."""

        def loss(outputs: Any, _: Any) -> Tensor:
            return given_gradients(mean, *_entries(tensors_of(outputs), *given))

        def passes() -> None:
            if not one.batch.padding:
                with self._refused_on_all_ranks():
                    run_step(self.session, one.arguments, None, loss, coefficient, None, None, whole=True)

        self._run_passes(passes, sums)

    def _run_passes(self, passes: Callable[[], None], sums: Tensor | None) -> None:
        """Runs a batch's passes through the stages; `sums` travel with the gradients of an update's last batch."""
        session, reduces = self.session, sums is not None

        def then_sums() -> None:
            passes()
            if sums is not None:
                sums.copy_(self._sums())

        with (
            explained("passes of the pipeline", session.sizes, SMALLER_STAGES),
            session.gradients.differentiating(),
            self._others_wait(reduces),
        ):
            session.engine_model.run(then_sums, Pass(reduce=reduces, extras=sums))

    @contextmanager
    def _refused_on_all_ranks(self) -> Iterator[None]:
        """Sends what the stages refuse, by this rank's own samples, with the sums that the other ranks wait for."""
        try:
            yield
        except ConfigError as error:
            if self.session.world.size == 1:
                raise
            tally = self.session.gradients.tally
            self.session.proof.found(f"{error.rule}: {error.received}; {error.remedy}", tally)
            tally.text = str  # nothing more to report

    def _same_draws(self) -> AbstractContextManager[None]:
        """Makes all ranks draw the same random numbers, those of the update, while the context is open."""
        world, seed = self.session.world, self.session.world.seed + self.progress.step + 1
        return nullcontext() if world.size == 1 else of_devices(self.session.engine.device).preserved(seed)

    def _prove_pieces(self, arguments: Arguments, y: Any, loss: Loss, weight: Weight) -> None:
        """Looks whether model and loss can be put together of two pieces of the batch, where a loss is tried."""
        session, proof = self.session, self.session.proof
        batch = session.batches.now()
        if batch is None or batch.padding or isinstance(weight, (int, float, Tensor)) or not proof.tries(batch):
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
                with self._refused_on_all_ranks():
                    mean = run_step(session, arguments, y, loss, coefficient, weight, outputs)
                    gradients.add_loss(mean, amount, coefficient)

        self._run_passes(passes, sums)
        self._conclude(batch, mean, sums)
        return mean

    def backward(
        self,
        loss: Tensor | Sequence[tuple[Tensor, float | Tensor]],
        *,
        weight: float | Tensor | None = None,
        more: bool = False,
        retain_graph: bool = False,
        again: bool = False,
    ) -> None:
        """Differentiates the mean loss of this rank's batch.

        After the batch that completes an update, `p.grad` is the gradient of the mean loss over all ranks and
        micro-batches, sum(weight x gradient) / sum(weight), unscaled. Before, `p.grad` is None.
        On ddp and deepspeed clone a gradient to keep it: the next update reuses its memory, as PyTorch's own does.
        At updates 1, 2, 4, 8 ..., and an epoch's first, hvdtrain checks the loss: its operations run again with other
        outputs for half of the samples (a GPU then waits, and needs the loss's memory a second time). The check does
        not find factors of the targets alone (weights divided by their batch mean); `hvdtrain.torch.check` does.

        Args:
            loss: a scalar, the mean over this rank's batch: of its samples, or of what `weight` counts; not a sum
                that is divided by the samples of all ranks. For a sum of several means, each with its own divisor, a
                list of (mean, divisor): `[(class_loss, len(y)), (box_loss, matched)]`. A mean whose divisor is 0 does
                not count. (mean, divisor, factor) with a number that changes from batch to batch, the same on every
                rank (a VAE's beta). Or a loss of the values that `hvdtrain.torch.whole` returned.
            weight: the divisor of that mean, if it is not the samples: a number, or a scalar (also on a GPU: nothing
                waits for it). `(y != -100).sum()` with `ignore_index`, `class_weights[y].sum()` with class weights,
                `mask.sum()` for tokens. A batch of weight 0 does not count, even if its loss is NaN.
            more: another backward for the same batch follows, of another loss; they add up.
            retain_graph: as torch's: another backward goes through the same graph.
            again: the batch was differentiated before, and is again: for another update (several per batch), or to
                replace the gradients. Not needed if the model is called on the loader's own tensors.

        Raises:
            ConfigError: no batch, a second backward for one batch, backward instead of step, no scalar, a pipeline, or
                a failed backward pass is tried again although there are other ranks.
                On every rank: the divisor of the loss is not its weight, or no weight makes it right.
            NonFiniteError: on every rank, if the loss of one is NaN or infinite.
            HvdtrainError: out of memory.
        """
        session = self.session
        if session.staged is not None:
            raise in_one_call("optimizer.backward(loss)", "loss = optimizer.forward_backward(x, y, loss_fn)")
        if isinstance(loss, (list, tuple)):
            run = partial(self._backward_terms, loss, weight, more, retain_graph, again)
        else:
            run = partial(self._backward, cast(Tensor, loss), weight, more, retain_graph, again)
        self._unless_dealt_again(run)

    def _backward(
        self, loss: Tensor, weight: float | Tensor | None, more: bool, retain_graph: bool, again: bool
    ) -> None:
        session, gradients = self.session, self.session.gradients
        batch = self._take_turn(again)
        check_loss(loss)
        refuse_divided(loss, session.accumulate)
        self._model.check_entered()
        if session.before is not None and not batch.padding:
            session.before.look(loss, batch)
        if session.proof.is_due:
            unprepared.note_reached(leaves_of(loss))
        if session.proof.is_due and batch.step is not None and is_whole(loss):
            session.proof.look_whole(loss, batch.step.samples, batch.step.global_samples)
        entered = gradients_of(loss, session.module, session.world.size, retain_graph)
        if entered is not None:
            self._check_whole(batch, weight)
            amount, coefficient = gradients.begin(batch, None, 1.0, 1 / session.world.size)
            gradients.tally.count_whole(loss)
        else:
            given = None if weight is None else weight_of(weight, session.engine.device)
            amount, coefficient = gradients.begin(batch, given, session.precision.unit)
            if given is not None and not batch.padding:
                session.proof.look_idle(loss, given, gradients.tally)
            if not batch.padding:
                samples = batch.step.samples if batch.step is not None else session.samples_called()
                by_model = partial(model_differs, session, loss, given=given is not None)
                looked = Looked(loss, amount, samples, weight, more=gradients.state == "more")
                session.proof.look(looked, gradients.tally, by_model)
        outputs = session.proof.tracked()
        if not more:
            session.proof.close_batch()
        gradients.add_loss(loss, amount, coefficient)
        CLOCK.enter("backward")
        sums = self._sums() if batch.is_last_micro_batch and not more else None
        passed = loss if entered is None else given_gradients(loss, *entered)
        self._differentiate(passed, amount, coefficient, sums, retain_graph, counts=not batch.padding, outputs=outputs)
        self._conclude(batch, loss, sums, weight=amount, more=more)

    def _backward_terms(
        self, given: Sequence[Any], weight: object, more: bool, retain_graph: bool, again: bool
    ) -> None:
        """Differentiates a sum of means, each of which is divided by what it counts on all ranks."""
        session, gradients = self.session, self.session.gradients
        terms, batch = terms_of(given, weight, more), self._take_turn(again)
        self._model.check_entered()
        if not gradients.gathering:
            self._terms = Terms(len(terms))
        self._terms.begin(terms)
        is_last = batch.is_last_micro_batch
        size = session.world.size
        amount, coefficient = gradients.begin(batch, None, 1.0, 1 / size if is_last else 0.0)
        counted = [] if batch.padding else [at for at, term in enumerate(terms) if term.divisor]
        outputs = self._look_at_terms(batch, terms, counted)
        terms = [MeanTerm(term.mean * term.factor, *term[1:]) for term in terms]
        CLOCK.enter("backward")
        if not is_last:
            for at, term in enumerate(terms):  # also those that do not count: other ranks' may go through batch norm
                divisor, last = 0.0 if batch.padding else term.divisor, at == len(terms) - 1
                passed = _tracked(term.mean, outputs)
                self._differentiate(
                    passed * (divisor or 1.0), divisor, 1.0, None, retain_graph or not last, counts=not batch.padding,
                    outputs=outputs,
                )  # fmt: skip
                self._terms.put_aside(at, gradients.parameters())
            self._terms.add(terms, counted)
            self._conclude(batch, terms[0].mean, None, weight=terms[0].divisor)
            return
        self._terms.add(terms, counted)
        with session.world.in_step("optimizer.backward([(mean, divisor), ...])", len(terms)):
            of_all = session.engine.sum_floats(self._terms.sent())
            totals = self._terms.compared(of_all, size, session.proof, gradients.tally)
        self._terms.restore(totals, gradients.parameters())
        mean = self._terms.mean(totals)
        gradients.add_loss(mean * size, amount, coefficient)
        sums = self._sums()
        whole = [terms[at].mean * (terms[at].divisor / totals[at]) for at in counted]
        passed = sum(whole[1:], whole[0]) if whole else _tracked(terms[0].mean, outputs)
        self._differentiate(
            passed * size, float(bool(whole)), coefficient, sums, retain_graph, counts=not batch.padding,
            outputs=outputs,
        )  # fmt: skip
        self._conclude(batch, mean, sums)

    def _look_at_terms(self, batch: Batch, terms: list[MeanTerm], counted: list[int]) -> list[Tensor]:
        """Has each mean tried, and returns the outputs that have a gradient."""
        session = self.session
        samples = batch.step.samples if batch.step is not None else session.samples_called()
        for at, term in enumerate([] if batch.padding else terms):
            if term.divisor:
                looked = Looked(term.mean, term.divisor, samples, term.given)
                session.proof.look(looked, self._terms.tallies[at])
            elif term.mean.requires_grad:
                session.proof.look_idle(term.mean, 0.0, self._terms.tallies[at])
        outputs = session.proof.tracked()
        if session.proof.is_due:
            for at in counted:
                unprepared.note_reached(leaves_of(terms[at].mean))
        session.proof.close_batch()
        if session.before is not None and counted:
            session.before.look(terms[counted[0]].mean, batch)
        return outputs

    def _check_whole(self, batch: Batch, weight: object, *, in_parts: bool = True) -> None:
        """Raises `ConfigError` for a loss of the whole batch that is weighed, or of a batch that is a part of one."""
        if weight is not None:
            raise ConfigError(
                "weight= is not supported for a loss of the whole batch",
                "backward(loss, weight=...) of a loss on what hvt.whole() returned",
                "optimizer.backward(loss)",
            )
        if in_parts and not batch.whole_update:
            raise ConfigError(
                "with accumulate= a loss of the whole batch needs the outputs of all batches of the update",
                f"backward() of a loss on what hvt.whole() returned, with accumulate={self.session.accumulate}",
                "optimizer.forward_backward(x, y, loss_fn, whole=True) on each batch",
            )

    def _take_turn(self, again: bool) -> Batch:
        """Returns the batch that is to be differentiated, if its turn has come."""
        session, gradients = self.session, self.session.gradients
        session.proof.pause()
        batch = require_batch(session.batches.now())
        if self._failed is not None:
            raise ConfigError(
                "a failed backward() cannot be retried: other ranks may have received a part of the gradients",
                f"backward() after the one that failed with {type(self._failed).__name__}: {str(self._failed)[:300]}",
                "let the error end the job, and start the job again: it resumes from its last checkpoint;\n"
                "after out of memory use a smaller per_rank_batch from the start",
            ) from self._failed
        own = session.batches.check_calls()
        if again or (own and gradients.state == "idle" and batch is gradients.batch):
            self._reopen(batch)
        gradients.check_turn(batch)
        return batch

    @contextmanager
    def _others_wait(self, reduces: bool) -> Iterator[None]:
        """Notes that a pass failed on whose gradients other ranks wait: they could be mistaken for later ones."""
        try:
            yield
        except RanksLost:
            raise
        except BaseException as error:
            if reduces and self.session.world.size > 1:
                self._failed = error
            raise

    def _sums(self) -> Tensor:
        """Returns what travels with an update's gradients."""
        session = self.session
        return session.gradients.sums(session.engine_model.place().digest() if session.world.tracker.on else 0.0)

    def _reopen(self, batch: Batch) -> None:
        check_once(self.session)
        if self.session.gradients.state == "ready":
            self.session.precision.forget()
        self.session.gradients.reopen(batch)

    def _conclude(
        self, batch: Batch, loss: Tensor, sums: Tensor | None, *, weight: Number = 1.0, more: bool = False
    ) -> None:
        """Completes a batch after its passes. `sums` are given for the last batch of an update; they are under way."""
        session, gradients = self.session, self.session.gradients
        if not batch.padding:
            self._find_layer(loss, weight)
        if sums is not None:
            CLOCK.enter("communication")
            session.engine_model.finish()
            CLOCK.enter("optimizer")
            try:
                self._settle_update(batch, sums)
                gradients.complete()
            except (ConfigError, ReplicaError):  # step() has nothing to apply, should the user catch it
                session.precision.forget()
                gradients.restart()
                session.proof.refuse()
                raise
            session.proof.refused = False
        else:
            gradients.put_aside("more" if more else "partial")
        if not more:
            session.batches.done()
        CLOCK.enter("other")

    def _differentiate(
        self,
        loss: Tensor,
        weight: Number,
        coefficient: Number,
        sums: Tensor | None,
        retain_graph: bool,
        *,
        counts: bool,
        outputs: Sequence[Tensor] = (),
    ) -> None:
        """Runs one backward pass of a scalar loss times the coefficient; of weight 0 nothing comes, even if it is NaN,
        but other ranks' gradients (by batch norm's statistics) still go through the outputs. `sums` travel with the
        gradients of an update's last pass; `counts`: the rank has samples."""
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
            zero_gradients(gradients.parameters(), weight, wide, outputs if counts else ()),
            self._others_wait(reduce),
        ):
            without = [p for p in gradients.parameters() if p.grad is None] if not (counts or reduce) else []
            session.engine_model.backward(scaled, Pass(reduce, sums, retain_graph, self._recomputes, counts))
            for parameter in without:
                parameter.grad = None

    def _find_layer(self, loss: Tensor, weight: Number) -> None:
        """Looks for the layer while the batch and the parameters are still those that gave a bad loss."""
        session = self.session
        wanted = session.losses.at_once and not self._layer
        if wanted and not math.isfinite(float(loss.detach())) and float(weight):
            args, kwargs = session.last_call or ((), {})
            with session.precision.autocast():
                call: Any = session.last_method if session.staged is None else session.staged
                self._layer = first_bad_layer(session.module, args, kwargs, call)

    def _settle_update(self, batch: Batch, sums: Tensor) -> None:
        """Checks loss and weights of an update, divides by the real sum of the weights, and removes the scale."""
        session, tally = self.session, self.session.gradients.tally
        every, weight = sums[0], sums[1]
        skips = session.options.amp == "fp16"
        if skips or tally.given or batch.update_samples:  # any data set may turn out to have fewer samples than planned
            unit = session.precision.unit if tally.given else 1.0
            # without asking for the sum: that would make a GPU wait
            factor = torch.where(weight > 0, batch.planned * unit / weight, torch.zeros_like(weight))
            if skips:  # the forward pass has overflown: the scaler is to see it
                factor = torch.where(torch.isfinite(every), factor, torch.inf)
            present = [p.grad for p in session.gradients.parameters() if p.grad is not None]
            if present and not (factor.device.type == "cpu" and float(factor) == 1.0):
                scale(present, factor)
            every = every * factor
        self._mean = every
        layer, self._layer = self._layer, ""
        session.losses.add(PendingLosses(
            self.progress.step + 1, batch.place[0], every, tally.loss, layer,
            wrong(sums, session.world.size), self._explain(tally, sums), sums[-2:],
        ))  # fmt: skip
        if tally.given:
            session.precision.note_weights(weight / batch.planned)
        session.precision.unscale(self._stepper)

    def _explain(self, tally: Tally, sums: Tensor) -> Callable[[], HvdtrainError]:
        """Returns what makes the error of an update that is refused, collective when it is called."""
        session, place = self.session, self.session.engine_model.place()
        wrong_weights = session.proof.explain(tally, sums, partial(rates_of, session.optimizer))

        def error() -> HvdtrainError:
            if bool(out_of_step(sums, session.world.size)):
                return session.engine_model.out_of_step(place)
            return wrong_weights()

        return error


def _entries(
    outputs: Sequence[Tensor], by_output: dict[int, Tensor], direct: Sequence[tuple[nn.Parameter, Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns where a loss of the whole batch enters the graph of these outputs, and its gradients there."""
    entries = [(outputs[at], gradient) for at, gradient in by_output.items() if outputs[at].requires_grad]
    entries += direct
    return [tensor for tensor, _ in entries], [gradient for _, gradient in entries]


def _tracked(mean: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    """Returns a mean, or in place of a constant, which counts nothing, what has a gradient."""
    return mean if mean.requires_grad or not outputs else outputs[0].sum()
