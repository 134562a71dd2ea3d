"""The callbacks for `fit`: start-up checks and broadcast, metrics of all ranks, progress, learning rate, watch.

Each does one thing; `callbacks` (in `__init__`) puts them in the order they need. Collectives run only in
hooks that all ranks reach at the same step, and never in a callback that Keras may call from a thread
(`async_safe`).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from hvdtrain.checkpoint.parts import Progress
from hvdtrain.comm import turns
from hvdtrain.comm.elastic import note_progress
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.lr import LR
from hvdtrain.keras import averaging
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import KerasSession, is_built, is_hooked, missing_hook
from hvdtrain.keras.data.loader import KerasLoader
from hvdtrain.keras.state import metric_states, replicas, start
from hvdtrain.keras.state.rate import rate_of
from hvdtrain.keras.state.steps import ended_early


class Callback(keras.callbacks.Callback):
    """Base of ours; `fit` puts them before all others, but for some.

    Attributes:
        comes_last: after all others, which have then set what a checkpoint is to hold.
        fed: what a rank that comes in the middle of a `fit` gets of another's, by name.
    """

    comes_last = False
    fed: tuple[str, ...] = ()

    def __init__(self, session: KerasSession) -> None:
        super().__init__()
        self.session = session
        self.world = session.world


class StartOfFit(Callback):
    """Re-checks the hooks, compares the ranks' settings and gives all ranks rank 0's state, before the first step."""

    def set_model(self, model: keras.Model) -> None:
        """Called by `fit` before it makes its train function: the last moment to change what it will trace."""
        super().set_model(model)
        if not self.session.alone and not is_hooked(model.optimizer):
            inner = getattr(model.optimizer, "inner_optimizer", None)
            if inner is None or not is_hooked(inner):
                raise missing_hook(model.name, model.optimizer)
        averaging.attach(model, self.session)
        self._in_epoch = False

    def on_train_begin(self, logs: Any = None) -> None:
        session, model = self.session, self.model
        if not session.fitting:  # Python looks up `model.fit` before it makes the arguments
            raise ConfigError(
                "fit() is looked up when hvdtrain knows the model: it checks the data and the callbacks",
                "model.fit(..., callbacks=hvdtrain.keras.callbacks(model)) of a model that was not prepared before",
                "prepare the compiled model first; with a prepared optimizer make the callbacks first: ours ="
                " hvdtrain.keras.callbacks(model), then model.fit(..., callbacks=ours)",
                shared=True,
            )
        session.ready = False
        session.wants_broadcast = not session.alone
        if is_built(model):
            start.start(model, session)
        # else: the first train step builds the model, then starts

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.session.executions, self._in_epoch = 0, True
        if self.session.changing is not None:
            self.session.changing.begin_epoch()

    def on_test_begin(self, logs: Any = None) -> None:
        if self._in_epoch:
            self.session.clock.enter("other")
            ended_early(self.model, self.session, self.params.get("steps"))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.on_test_begin()
        self._in_epoch = False

    def on_train_end(self, logs: Any = None) -> None:
        replicas.average_statistics(self.model, self.world)


class EndOfEpoch(Callback):
    """At the end of each epoch: replicas compared, moving statistics equal on all ranks, and logs that are those of all
    ranks' samples.

    What a callback sets on one rank only (or by the logs of a batch, which are each rank's own) parts the replicas:
    said before validation and checkpoints see them. Statistics are averaged before that, too. No hook for batches: with
    one, Keras on torch would wait for every step's metrics before it starts the next step.
    """

    def __init__(self, session: KerasSession) -> None:
        super().__init__(session)
        self._in_epoch = self._dealt = self._said_so = False
        self._train: tuple[metric_states.States, float] | None = None
        self.results: dict[str, float] | None = None  # of a validation that ranks may be lost in
        self._validation = ExitStack()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._in_epoch, self._train, self.results = True, None, None

    def before_validation(self) -> None:
        """Once an epoch."""
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
            if not self.session.by_samples:
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
        known.update({log: known[name] for log, name in self.session.logs.items() if name in known})
        for log in self.session.raw & known.keys():
            del known[log]
        own = {k: float(v) for k, v in logs.items() if k not in known and isinstance(v, (int, float))}
        for validates in (
            False,
            True,
        ):  # what a user's step returns beside the metrics: Keras logs that of the last batch
            last = {k: v for k, v in own.items() if k.startswith("val_") is validates}
            data = validation_loader(self.model) if validates else self.session.fitted
            if last:
                known.update(self.world.mean(last, weight=samples or 1.0 if data is None else data.last_rows))
        logs.update({key: known[key] for key in logs if key in known})

    def validated(self) -> dict[str, float]:
        """Returns the metrics of validation, of all ranks' samples; collective."""
        states, samples = self._now()
        same = not self._dealt and metric_states.same(states, self.world)
        if same and not self._said_so:
            self.session.say("validation: all ranks evaluate the same samples; loader(...) would deal them")
            self._said_so = True
        if self.session.changing is not None and not (same or self._dealt or self.world.size == 1):
            raise ConfigError(
                "an elastic job validates on samples that it can deal anew, or that all ranks have",
                "validation data of each rank's own",
                "validation_data=hvdtrain.keras.loader((x, y), per_rank_batch=...)",
                shared=True,
            )
        return metric_states.results(self.model, states, self.world, samples, same=same)

    def _trained(self, *, validates: bool) -> None:
        """The first thing after the last batch; a rank that validates meets one that does not, and both say so."""
        self.world.agree("validation of this epoch", validates)
        replicas.check_equal(replicas.replicated(self.model), self.world, when="at the end of an epoch")
        replicas.average_statistics(self.model, self.world)

    def _now(self) -> tuple[metric_states.States, float]:
        return metric_states.states(self.model), metric_states.seen(self.model)[1]


class Count(Callback):
    """Counts updates and samples of all ranks, as `session.progress`: what the learning rate, the record and the
    checkpoint go by. It goes on from the last `fit`, so that a loop of `fit` calls is one training.
    """

    last_step_samples = 0
    fed = ("_next_batch",)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        progress, data = self.session.progress, self.session.fitted
        self._next_batch = 0 if self.session.changing is None else self.session.changing.skipped
        done = progress.samples_in_epoch
        if data is not None:
            done = data.done(epoch) + (data.samples_of(0, self._next_batch) if self._next_batch else 0)
        self.session.progress = replace(progress, epoch=epoch, samples_in_epoch=done)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now, data = self.session.progress, self.session.fitted
        # Keras counts the last execution as a full one
        done = min(batch + 1, self.params.get("steps") or batch + 1) if data is None else data.steps_until(batch + 1)
        steps = done - self._next_batch  # several with steps_per_execution
        if data is None:
            samples = steps * (self.session.per_rank_batch or 0) * self.world.size
        else:
            samples = data.samples_of(self._next_batch, done)
        self._next_batch = done
        self.session.progress = Progress(
            now.epoch, now.step + steps, now.samples_seen + samples, now.samples_in_epoch + samples
        )
        self.last_step_samples = samples
        note_progress(self.session.progress.step)
        turns.updated("keras", self._few)

    def _few(self) -> list[float]:
        """Some of the weights of each variable."""
        values = (np.ravel(BACKEND.to_numpy(variable)) for variable in self.model.trainable_variables)
        return [float(x) for value in values for x in value[:: value.size // 16 + 1]]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        now, data = self.session.progress, self.session.fitted
        if data is not None and not data.complete(self._next_batch):
            return  # a stop left samples of the epoch
        left = (self.params.get("steps") or 0) - self._next_batch
        if left > 0 and self.session.saves:
            self.session.say(
                f"epoch {epoch} was stopped {left} step(s) before its end: with data that hvdtrain does not deal its"
                " checkpoint is that of a whole epoch, so a resumed run goes on with the next"
            )
        self.session.progress = Progress(now.epoch + 1, now.step, now.samples_seen, 0)


class Rate(Callback):
    """Sets the learning rate before each batch, from the samples seen; nothing else may."""

    fed = ("_now", "global_batch")

    def __init__(self, session: KerasSession, lr: LR, global_batch: int) -> None:
        super().__init__(session)
        self.lr, self.global_batch = lr, global_batch

    def on_train_begin(self, logs: Any = None) -> None:
        self._now: float | None = None
        self._set()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        found = rate_of(self.model.optimizer)
        if self._now is not None and not np.isclose(found, self._now, rtol=1e-5, atol=0):
            raise ConfigError(
                "the learning rate is set in one place: lr=, or something else",
                f"lr= had set {self._now:g}, epoch {epoch} begins with {found:g}",
                "leave out what sets it (a callback?), or lr=",
                shared=True,
            )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._set()

    def _set(self) -> None:
        rate = self.lr.at(self.session.progress.samples_seen, self.global_batch)
        if rate != self._now:
            self.model.optimizer.learning_rate = rate
            self._now = rate


class ReplicaWatch(Callback):
    """Compares the replicas every so many steps: one checksum per variable, one small all-reduce."""

    fed = ("_steps", "_next_batch")

    def __init__(self, session: KerasSession) -> None:
        super().__init__(session)
        self.every = session.watch_every
        self._steps = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._checksums: Any = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._next_batch = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before, self._steps = self._steps, self._steps + batch + 1 - self._next_batch
        self._next_batch = batch + 1
        if self._steps // self.every == before // self.every:  # several steps with steps_per_execution
            return
        if self._checksums is None:
            self._variables = replicas.replicated(self.model)
            self._checksums = BACKEND.make_checksums(self._variables)
        replicas.check_equal(self._variables, self.world, self._checksums, when=f"after step {self._steps}")


def validation_loader(model: keras.Model) -> KerasLoader | None:
    """Returns the loader that `fit` validates on; None: other data."""
    data = getattr(getattr(model, "_eval_epoch_iterator", None), "data_adapter", None)
    return data if isinstance(data, KerasLoader) else None
