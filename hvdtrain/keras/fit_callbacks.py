"""The callbacks for `fit`: start-up checks and broadcast, metrics of all ranks, progress, learning rate, watch, the run
log and the checkpoints; and those that `fit` adds itself.

Each does one thing; `callbacks` (in `__init__`) and `fit` put them in the order they need. Collectives run only in
hooks that all ranks reach at the same step, and never in a callback that Keras may call from a thread
(`async_safe`).
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from hvdtrain.checkpoint.checkpoint import Checkpointer
from hvdtrain.checkpoint.parts import Progress, tell_if_lost
from hvdtrain.comm import turns
from hvdtrain.comm.elastic import note_progress, repeated
from hvdtrain.core.errors import ConfigError, HvdtrainError, NonFiniteError, ReplicaError
from hvdtrain.core.lr import LR
from hvdtrain.keras import averaging
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import KerasSession, Prepared, is_built, is_hooked, leaves_of, missing_hook
from hvdtrain.keras.checkpoint import model_state
from hvdtrain.keras.data.loader import KerasLoader
from hvdtrain.keras.state import callback_counts, metric_states, replicas, start
from hvdtrain.keras.state.steps import ended_early
from hvdtrain.record.log import RunLog
from hvdtrain.world.world import World


class Callback(keras.callbacks.Callback):
    """Base of ours; `fit` puts them before all others.

    Attributes:
        comes_last: after all others, which have then set what a checkpoint is to hold.
        fed: names of attributes that a rank gets from another one when it joins in the middle of a `fit`.
    """

    comes_last = False
    fed: tuple[str, ...] = ()

    def __init__(self, session: KerasSession) -> None:
        super().__init__()
        self.session, self.place = session, session.place
        self.world, self.clock = session.prepared.world, session.prepared.clock

    @property
    def data(self) -> Any:
        """The `KerasLoader` that `fit` reads; `None`: data that hvdtrain does not deal."""
        return self.session.fit.data


class StartOfFit(Callback):
    """Re-checks the hooks, compares the ranks' settings and gives all ranks rank 0's state, before the first step."""

    def set_model(self, model: keras.Model) -> None:
        """Called by `fit` before it makes its train function: the last moment to change what it will trace."""
        super().set_model(model)
        if not self.session.prepared.alone and not is_hooked(model.optimizer):
            inner = getattr(model.optimizer, "inner_optimizer", None)
            if inner is None or not is_hooked(inner):
                raise missing_hook(model.name, model.optimizer)
        averaging.attach(model, self.session)
        self._in_epoch = False

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.session.fit.runs:  # Python looks up `model.fit` before it makes the arguments
            raise ConfigError(
                "callbacks(model) must be called before model.fit is looked up: it replaces fit()",
                "model.fit(..., callbacks=hvdtrain.keras.callbacks(model)) of a model that was not prepared before",
                "prepare the compiled model first; or, with a prepared optimizer, make the callbacks first:\n"
                "ours = hvdtrain.keras.callbacks(model); model.fit(..., callbacks=ours)",
                shared=True,
            )
        proofs = self.session.proofs
        proofs.ready, proofs.wants_broadcast = False, not self.session.prepared.alone
        if is_built(self.model):  # else when its first step has built it
            start.start(self.model, self.session)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.place.executions, self._in_epoch = 0, True
        if self.place.elastic is not None:
            self.place.elastic.begin_epoch()

    def on_test_begin(self, logs: Any = None) -> None:
        if self._in_epoch:
            self.clock.enter("other")
            ended_early(self.model, self.session, self.params.get("steps"))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.on_test_begin()
        self._in_epoch = False

    def on_train_end(self, logs: Any = None) -> None:
        replicas.average_statistics(self.model, self.world)


class EndOfEpoch(Callback):
    """Compares replicas, averages moving statistics and makes logs those of all ranks' samples, as an epoch ends.

    It has no hook for batches: with one, Keras on torch would wait for every step's metrics before the next step.
    """

    def __init__(self, session: KerasSession) -> None:
        super().__init__(session)
        self._in_epoch = self._dealt = False
        self._train: tuple[metric_states.States, float] | None = None
        self.results: dict[str, float] | None = None  # of a validation that ranks may be lost in
        self._validation = ExitStack()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._in_epoch, self._train, self.results = True, None, None

    def before_validation(self) -> None:
        """Compares replicas and keeps the metrics of training, once an epoch."""
        if self._train is None:
            self._trained(validates=True)
            self._train = self._now()  # validation is about to reset the metrics of training

    def on_test_begin(self, logs: Any = None) -> None:
        if self._in_epoch:
            self._validation.close()  # of one that ranks were lost in
            self.before_validation()
            self._dealt = validation_loader(self.model) is not None
            # losses are then those of global batches; those that do not divide by samples take a word among the ranks
            batches = getattr(getattr(self.model, "_eval_epoch_iterator", None), "num_batches", None)
            if not self.session.proofs.by_samples:
                self.world.agree("number of validation steps (loader(...) deals the same to all ranks)", batches)
            even = self._dealt or (batches is not None and self.world.gather(batches) == [batches] * self.world.size)
            self._validation.enter_context(averaging.together(self.model, even=even))

    def on_test_end(self, logs: Any = None) -> None:
        self._validation.close()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._in_epoch = False
        validated = self._train is not None
        if not validated:
            self._trained(validates=False)
        self.world.agree("set of epoch logs", sorted(logs))
        train, samples = self._train or self._now()
        known = metric_states.results(self.model, train, self.world, samples)
        if validated:
            results = self.validated() if self.results is None else self.results
            known.update({f"val_{name}": value for name, value in results.items()})
        known = metric_states.by_log(known, self.session.proofs.metric_of)
        own = {k: float(v) for k, v in logs.items() if k not in known and isinstance(v, (int, float))}
        # what a user's step returns beside the metrics: Keras logs that of the last batch
        for validates, data in ((False, self.data), (True, validation_loader(self.model))):
            last = {k: v for k, v in own.items() if k.startswith("val_") is validates}
            if last:
                known.update(self.world.mean(last, weight=samples or 1.0 if data is None else data.last_rows))
        logs.update({key: known[key] for key in logs if key in known})

    def validated(self) -> dict[str, float]:
        """Returns the metrics of validation, of all ranks' samples; collective."""
        states, samples = self._now()
        same = not self._dealt and metric_states.same(states, self.world)
        if same:
            text = "validation: all ranks evaluate the same samples; loader(...) would deal them"
            self.session.prepared.say(text, once="validation")
        if self.place.elastic is not None and not (same or self._dealt or self.world.size == 1):
            raise ConfigError(
                "an elastic job needs validation data that hvdtrain deals, or that all ranks have",
                "each rank has validation data of its own",
                "validation_data=hvdtrain.keras.loader((x, y), per_rank_batch=...)",
                shared=True,
            )
        return metric_states.results(self.model, states, self.world, samples, same=same)

    def _trained(self, *, validates: bool) -> None:
        """Compares replicas after the last batch; a rank that validates, and one that does not, both raise an error."""
        self.world.agree("validation of this epoch", validates)
        replicas.check_equal(replicas.replicated(self.model), self.world, when="at the end of an epoch")
        replicas.average_statistics(self.model, self.world)

    def _now(self) -> tuple[metric_states.States, float]:
        return metric_states.states(self.model), metric_states.seen(self.model)[1]


class Count(Callback):
    """Counts updates and samples of all ranks in `place.progress`, which the learning rate, the record and the
    checkpoints use. It continues from the last `fit`, so that a loop of `fit` calls is one training.
    """

    last_step_samples = 0
    fed = ("_next_batch",)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        progress, data = self.place.progress, self.data
        self._next_batch = 0 if self.place.elastic is None else self.place.elastic.skipped
        done = progress.samples_in_epoch
        if data is not None:
            done = data.done(epoch) + (data.samples_of(0, self._next_batch) if self._next_batch else 0)
        self.place.progress = replace(progress, epoch=epoch, samples_in_epoch=done)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now, data = self.place.progress, self.data
        # Keras counts the last execution as a full one
        done = min(batch + 1, self.params.get("steps") or batch + 1) if data is None else data.steps_until(batch + 1)
        steps = done - self._next_batch  # several with steps_per_execution
        if data is None:
            samples = steps * (self.session.prepared.per_rank_batch or 0) * self.world.size
        else:
            samples = data.samples_of(self._next_batch, done)
        self._next_batch = done
        self.place.progress = Progress(
            now.epoch, now.step + steps, now.samples_seen + samples, now.samples_in_epoch + samples
        )
        self.last_step_samples = samples
        note_progress(self.place.progress.step)
        turns.updated("keras", self._few)

    def _few(self) -> list[float]:
        """Returns some of the weights of each variable."""
        values = (np.ravel(BACKEND.to_numpy(variable)) for variable in self.model.trainable_variables)
        return [float(x) for value in values for x in value[:: value.size // 16 + 1]]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        now, data = self.place.progress, self.data
        if data is not None and not data.complete(self._next_batch):
            return  # a stop left samples of the epoch
        left = (self.params.get("steps") or 0) - self._next_batch
        if data is None and left > 0 and self.place.saves:  # a loader knows that the epoch is complete
            self.session.prepared.say(
                f"epoch {epoch} was stopped {left} step(s) before its end: with data that hvdtrain does not deal its"
                " checkpoint is that of a whole epoch, so a resumed run continues with the next"
            )
        self.place.progress = Progress(now.epoch + 1, now.step, now.samples_seen, 0)


class Rate(Callback):
    """Sets the learning rate before each batch, from the samples seen; nothing else may."""

    fed = ("_now", "global_batch")

    def __init__(self, session: KerasSession, lr: LR, optimizer: Any) -> None:
        super().__init__(session)
        self.lr, self.global_batch = lr, global_batch(session.prepared, optimizer)

    def on_train_begin(self, logs: Any = None) -> None:
        self._now: float | None = None
        self._set()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        found = rate_of(self.model.optimizer)
        if self._now is not None and not np.isclose(found, self._now, rtol=1e-5, atol=0):
            raise ConfigError(
                "the learning rate cannot be set elsewhere with lr=",
                f"lr= had set {self._now:g}, epoch {epoch} begins with {found:g}",
                "remove what sets the learning rate (a callback?), or remove lr=",
                shared=True,
            )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._set()

    def _set(self) -> None:
        rate = self.lr.at(self.place.progress.samples_seen, self.global_batch)
        if rate != self._now:
            self.model.optimizer.learning_rate = rate
            self._now = rate


def rate_of(optimizer: Any) -> float:
    """Returns an optimizer's current learning rate, of a variable or of a schedule."""
    rate = leaves_of(optimizer)[0].learning_rate  # of several (MultiOptimizer) the first one's
    return float(keras.ops.convert_to_numpy(rate.value if hasattr(rate, "value") else rate))


def global_batch(prepared: Prepared, optimizer: Any) -> int:
    """Returns the samples of one update: ranks x per-rank batch x accumulation, as far as an epoch has so many."""
    passes = max((leaf.gradient_accumulation_steps or 1) for leaf in leaves_of(optimizer))
    full = (prepared.per_rank_batch or 0) * prepared.world.size * passes
    return min(full, prepared.samples or full)


def check_rate(optimizer: Any, lr: LR, global_batch: int) -> None:
    """Raises ConfigError for an optimizer with a schedule, several rates, or a rate that was scaled already."""
    leaves = leaves_of(optimizer)
    if len(leaves) > 1:
        raise ConfigError(
            "lr= cannot set several learning rates",
            f"{type(optimizer).__name__} with {len(leaves)} optimizers, each with a rate of its own",
            "remove lr= and give each a learning_rate (or schedule) for the global batch",
        )
    own = leaves[0]._learning_rate
    if not isinstance(own, keras.Variable):
        raise ConfigError(
            "the learning rate cannot be set elsewhere with lr=: the optimizer has a schedule",
            f"lr={lr} and {type(own).__name__} in {leaves[0].name!r}",
            f"make the optimizer with learning_rate={lr.base}, or remove lr=",
        )
    lr.check_optimizer(rate_of(optimizer), global_batch)


class ReplicaWatch(Callback):
    """Compares the replicas every so many steps: one checksum per variable, one small all-reduce."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._step = self.place.progress.step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before, self._step = self._step, self.place.progress.step
        every = self.session.prepared.watch_every
        if self._step // every == before // every:  # several steps with steps_per_execution
            return
        replicas.check_equal(replicas.replicated(self.model), self.world, when=f"after step {self._step}")


class Record(Callback):
    """Writes steps to the run log, and their time: waiting for a batch, the step, and what comes in between."""

    def __init__(self, session: KerasSession, run: RunLog, count: Count) -> None:
        super().__init__(session)
        self.run, self.count = run, count
        self.epoch_started = self._waited = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        self.clock.enter("other")
        self.clock.take()  # setting up is no part of a step
        if self.data is not None:
            self.run.facts = replace(self.run.facts, workers=self.data.source.workers)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch_started = time.perf_counter()
        self._seen = tuple(map(float, self.place.restored_metrics[:2])) or (0.0, 0.0)  # of the loss, the first metric

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.clock.enter("other")
        self._waited = float(self.session.notes.waited)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.clock.enter("other")
        seconds, waited = self.clock.take(), float(self.session.notes.waited) - self._waited
        if waited > 0:
            seconds["input"] = seconds.get("input", 0.0) + waited
            seconds["train_step"] = seconds.get("train_step", 0.0) - waited
        now = self.place.progress
        self.run.step(
            step=now.step, epoch=now.epoch, samples_seen=now.samples_seen,
            loss=self._loss(logs or {}), lr=rate_of(self.model.optimizer),
            samples=self.count.last_step_samples, seconds=seconds,
        )  # fmt: skip

    def on_test_begin(self, logs: Any = None) -> None:
        self.clock.enter("evaluation")

    def on_test_end(self, logs: Any = None) -> None:
        self.clock.enter("other")

    def _loss(self, logs: dict[str, Any]) -> float:
        """Returns the global batch's loss: Keras' own is the mean since the epoch began, and this rank's."""
        if not self.session.prepared.alone:
            noted = self.session.notes.loss() if self.place.records else float("nan")
            return noted if np.isfinite(noted) and noted else float(logs.get("loss", float("nan")))
        total, count = self._seen
        self._seen = metric_states.seen(self.model)
        since = self._seen[1] - count
        return (self._seen[0] - total) / since if since > 0 else float(logs.get("loss", float("nan")))


class RecordEpoch(Callback):
    """Writes an epoch to the run log, of which its checkpoint is a part."""

    comes_last = True

    def __init__(self, session: KerasSession, steps: Record) -> None:
        super().__init__(session)
        self.steps = steps

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        numbers = {key: float(value) for key, value in (logs or {}).items() if np.ndim(value) == 0}
        seconds = time.perf_counter() - self.steps.epoch_started
        self.steps.run.epoch(epoch, numbers, seconds, self.clock.take())


class Wait(Callback):
    """Comes after all others: from here on Keras fetches the next batch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.clock.enter("input")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.clock.enter("input")


class Save(Callback):
    """Writes a checkpoint after each epoch, and on request at the first chance at or after every so many steps.

    Weights that are not finite are not written: earlier checkpoints stay.
    """

    comes_last = True
    fed = ("_saved_at",)

    def __init__(
        self,
        session: KerasSession,
        checkpointer: Checkpointer,
        every_steps: int,
        extra: MutableMapping[str, Any] | None = None,
    ) -> None:
        super().__init__(session)
        self.checkpointer, self.every_steps, self.extra = checkpointer, every_steps, extra
        self._finite = True

    def on_train_begin(self, logs: Any = None) -> None:
        if self.every_steps and self.data is None:
            raise ConfigError(
                "a checkpoint within an epoch needs data that hvdtrain deals",
                f"save_every={self.every_steps}, data that hvdtrain does not deal",
                "fit(hvdtrain.keras.loader(...)), or save after each epoch only",
            )
        self._saved_at = self.place.progress.step
        self._done = f"what it has learned is in {self.checkpointer.directory}"
        self.session.fit.saving = self

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        data = self.data
        last = data is not None and data.complete(batch + 1)  # the epoch's own checkpoint follows at once
        step = self.place.progress.step
        due = self.every_steps and step // self.every_steps > self._saved_at // self.every_steps
        asked_to_end = self.place.preempted and step > self._saved_at
        if (due or (asked_to_end and data is not None)) and not last:
            self._save({})
        elif asked_to_end and data is None:
            self.session.prepared.say(
                "preempted: data that hvdtrain does not deal has no place within an epoch, so this epoch is completed"
                " first, and saved",
                once="preempted",
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        metrics = {key: float(value) for key, value in (logs or {}).items() if np.ndim(value) == 0}
        self._save(metrics)

    def on_train_end(self, logs: Any = None) -> None:
        before = self.clock.enter("checkpoint")
        self.checkpointer.wait()
        self.clock.enter(before)

    def _save(self, metrics: dict[str, float]) -> None:
        try:
            self._save_once(metrics)
        except HvdtrainError as error:
            if not self.place.preempted:
                raise
            tell_if_lost(error)
            self._save_once(metrics)

    def _save_once(self, metrics: dict[str, float]) -> None:
        progress = self.place.progress
        self._saved_at, self._done = progress.step, "weights that are not finite are in no checkpoint"
        before = self.clock.enter("checkpoint")
        try:
            state = model_state(self.model, extra=self.extra)
            path = self.checkpointer.save(state, progress=progress, metrics=metrics)
            self._done = f"saved in {path}"
        except NonFiniteError as error:
            self.session.prepared.say(
                f"no checkpoint after step {progress.step}: {error if self._finite else error.rule}"
            )
            self._finite = False
        finally:
            self.clock.enter(before)

    # ---- of a fit that is preempted (`hvdtrain.checkpoint.parts.Saver`)
    @property
    def order(self) -> str:
        return str(self.checkpointer.directory)

    def save(self) -> str:
        """Returns where the last step is saved; "": nowhere yet."""
        if self._saved_at != self.place.progress.step:
            return ""
        try:
            self.checkpointer.wait()
        except HvdtrainError as error:
            tell_if_lost(error)
            self._save({})
            self.checkpointer.wait()
        return self._done


# -------------------------------------------------------------------- what fit adds itself
class EpochOfLoaders(Callback):
    """Passes the epoch to loaders, and restores what callbacks had counted."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        if self.place.elastic is not None:
            self.place.elastic.epoch_has_begun()
        if self.place.restored_counts is not None:  # after on_train_begin of all, which restarts counts
            callback_counts.feed(self.place.callbacks, self.place.restored_counts)
            self.place.restored_counts = None
        if self.data is not None:
            self.data.next_epoch = epoch

    def on_test_begin(self, logs: Any = None) -> None:
        validated = validation_loader(self.model)
        if validated is not None:
            validated.next_epoch = self.epoch  # its order is also the epoch's in a resumed run

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.data is not None and not self.session.prepared.alone and not self.model.stop_training:
            self.data.check_end(self.world)


class RateOfRestored(Callback):
    """Restores the rate of a run that resumes within an epoch: it includes what callbacks did as that began."""

    comes_last = True

    def on_train_begin(self, logs: Any = None) -> None:
        # noted before the epoch begins, and after what a user's on_train_begin may set
        rated = [leaf for leaf in leaves_of(self.model.optimizer) if isinstance(leaf._learning_rate, keras.Variable)]
        self._rates = [(leaf, keras.ops.convert_to_numpy(leaf.learning_rate)) for leaf in rated]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        for optimizer, rate in self._rates:
            optimizer.learning_rate = rate
        self._rates = []


class MetricsOfRestored(Callback):
    """Adds the metrics of the samples that an epoch had seen when it was saved, once its first step has made them."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.place.restored_metrics:
            metric_states.add(self.model, self.place.restored_metrics)
            self.place.restored_metrics = ()


class Last(Callback):
    """Comes after all others: ranks take the same number of steps, and a stop that one wants is one for all."""

    stops_in_epoch = False

    def __init__(self, session: KerasSession, first_epoch: int) -> None:
        super().__init__(session)
        self.first_epoch = first_epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self.session.fit.stops_in_epoch = self.stops_in_epoch
        first = getattr(self.model, "_initial_epoch", None) or self.first_epoch  # the former: BackupAndRestore
        length = {
            "steps per epoch": self.params.get("steps"), "epochs": self.params.get("epochs"), "initial epoch": first,
        }  # fmt: skip
        reports = self.world.gather(length)
        if any(report != reports[0] for report in reports):
            differ = [name for name in length if any(report[name] != reports[0][name] for report in reports)]
            raise ReplicaError(
                "every rank must take the same number of steps",
                "\n".join(f"rank {rank}: {report}" for rank, report in enumerate(reports)),
                "deal the data with hvdtrain.keras.loader((x, y), per_rank_batch): all ranks get the same number"
                if "steps per epoch" in differ
                else "give every rank the same " + " and ".join(f"{name.replace(' ', '_')}=" for name in differ),
                shared=True,
            )
        if "steps" in self.params and length["steps per epoch"] is None and self.data is None:
            raise ReplicaError(
                "every rank must take the same number of steps, so it must be known",
                "data of unknown length: a generator, or a tf.data.Dataset such as TFRecords",
                "data = hvdtrain.keras.loader(dataset), or loader(lambda: generator()), then fit(data);\n"
                "or give fit() each rank's own endless data (dataset.repeat()) and steps_per_epoch=",
                shared=True,
            )
        if self.place.elastic is not None:
            self.place.elastic.enter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._share_stop()

    def _share_stop(self) -> None:
        before = self.clock.enter("communication")  # it waits for the ranks
        self.model.stop_training = _any(bool(self.model.stop_training), self.world)
        self.clock.enter(before)


@repeated
def _any(mine: bool, world: World) -> bool:
    with world.in_step("end of a step", value=float(mine)) as wanted:
        return wanted > 0


class LastOfBatch(Last):
    """A `Last` that also shares a stop after every step, because some callback of some rank may stop there."""

    stops_in_epoch = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._share_stop()


def validation_loader(model: keras.Model) -> KerasLoader | None:
    """Returns the loader that `fit` validates on; None: other data."""
    data = getattr(getattr(model, "_eval_epoch_iterator", None), "data_adapter", None)
    return data if isinstance(data, KerasLoader) else None
