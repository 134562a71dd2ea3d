"""The callbacks for `fit` that write: the run log and the checkpoints."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

import numpy as np

from hvdtrain.checkpoint.checkpoint import Checkpointer
from hvdtrain.checkpoint.parts import tell_if_lost
from hvdtrain.core.errors import ConfigError, HvdtrainError, NonFiniteError
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import KerasSession
from hvdtrain.keras.checkpoint import check_saveable, model_state
from hvdtrain.keras.fit_callbacks import Callback, Count
from hvdtrain.keras.state import metric_states
from hvdtrain.keras.state.rate import rate_of
from hvdtrain.record.log import RunLog


class Record(Callback):
    """Writes steps to the run log, and where their time went.

    Keras tells apart: waiting for a batch (up to `on_train_batch_begin`, and what the step says itself), the step (from
    the call of the train function: `state.steps`), and what comes between two steps.
    """

    def __init__(self, session: KerasSession, run: RunLog, count: Count) -> None:
        super().__init__(session)
        self.run, self.count = run, count
        self.epoch_started = self._waited = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        self.session.clock.enter("other")
        self.session.clock.take()  # setting up is no part of a step
        if self.session.fitted is not None:
            self.run.facts = replace(self.run.facts, workers=self.session.fitted.source.workers)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch_started = time.perf_counter()
        self._seen = (0.0, 0.0)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.session.clock.enter("other")
        self._waited = float(self.session.waited)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.session.clock.enter("other")
        seconds, waited = self.session.clock.take(), float(self.session.waited) - self._waited
        if waited > 0:
            seconds["input"] = seconds.get("input", 0.0) + waited
            seconds["train_step"] = seconds.get("train_step", 0.0) - waited
        now = self.session.progress
        self.run.step(
            step=now.step, epoch=now.epoch, samples_seen=now.samples_seen,
            loss=self._loss(logs or {}), lr=rate_of(self.model.optimizer),
            samples=self.count.last_step_samples, seconds=seconds,
        )  # fmt: skip

    def on_test_begin(self, logs: Any = None) -> None:
        self.session.clock.enter("evaluation")

    def on_test_end(self, logs: Any = None) -> None:
        self.session.clock.enter("other")

    def _loss(self, logs: dict[str, Any]) -> float:
        """The global batch's: Keras' own is the mean since the epoch began, and this rank's."""
        if not self.session.alone:
            noted = BACKEND.loss_noted(self.session) if self.session.records else float("nan")
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
        self.steps.run.epoch(epoch, numbers, seconds, self.session.clock.take())


class Wait(Callback):
    """Comes after all others: from here on Keras fetches the next batch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.session.clock.enter("input")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.session.clock.enter("input")


class Save(Callback):
    """Writes a checkpoint after each epoch; and within it, if asked, at the first chance at or after every so many
    steps (with `steps_per_execution` that is after the call that held the step). Weights that are not finite are not
    written: earlier checkpoints stay.
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
        if self.every_steps and self.session.fitted is None:
            raise ConfigError(
                "a checkpoint within an epoch knows its place in the data from the plan that deals it",
                f"save_every={self.every_steps}, data that hvdtrain does not deal",
                "fit(hvdtrain.keras.loader(...)), or save after each epoch only",
            )
        check_saveable(self.model)
        self._saved_at = self.session.progress.step
        self._done = f"what it has learned is in {self.checkpointer.directory}"
        self.session.saving = self

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        data = self.session.fitted
        last = data is not None and data.complete(batch + 1)  # the epoch's own checkpoint follows at once
        step = self.session.progress.step
        due = self.every_steps and step // self.every_steps > self._saved_at // self.every_steps
        told = self.session.told and step > self._saved_at
        if (due or (told and data is not None)) and not last:
            self._save({})
        elif told and data is None:
            self.session.say(
                "preempted: data that hvdtrain does not deal has no place within an epoch, so this one goes on first,"
                " and is saved",
                once="told",
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        metrics = {key: float(value) for key, value in (logs or {}).items() if np.ndim(value) == 0}
        self._save(metrics)

    def on_train_end(self, logs: Any = None) -> None:
        before = self.session.clock.enter("checkpoint")
        self.checkpointer.wait()
        self.session.clock.enter(before)

    def _save(self, metrics: dict[str, float]) -> None:
        try:
            self._save_once(metrics)
        except HvdtrainError as error:
            if not self.session.told:
                raise
            tell_if_lost(error)
            self._save_once(metrics)

    def _save_once(self, metrics: dict[str, float]) -> None:
        progress = self.session.progress
        self._saved_at, self._done = progress.step, "weights that are not finite are in no checkpoint"
        before = self.session.clock.enter("checkpoint")
        try:
            state = model_state(self.model, extra=self.extra)
            path = self.checkpointer.save(state, progress=progress, metrics=metrics)
            self._done = f"saved in {path}"
        except NonFiniteError as error:
            self.session.say(f"no checkpoint after step {progress.step}: {error if self._finite else error.rule}")
            self._finite = False
        finally:
            self.session.clock.enter(before)

    # ---- of a fit that is preempted (`hvdtrain.checkpoint.parts.Saver`)
    @property
    def order(self) -> str:
        return str(self.checkpointer.directory)

    def save(self) -> str:
        """Returns where the last step is saved; "": nowhere yet."""
        if self._saved_at != self.session.progress.step:
            return ""
        try:
            self.checkpointer.wait()
        except HvdtrainError as error:
            tell_if_lost(error)
            self._save({})
            self.checkpointer.wait()
        return self._done
