"""A `fit` of an elastic job: its reaction when ranks are lost or join, and the state that each rank gets.

`hvdtrain.comm.elastic` moves ranks to the next formation. A failed update is half done: part of its graph has run. So
`ElasticFit` copies all variables before each update, and puts them back. Then the remaining ranks synchronize, the rest
of the epoch is dealt again, and the update is made of a new batch, within the same call of Keras' train function: `fit`
and its callbacks notice nothing. A new process enters Keras' loop in the middle.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np

from hvdtrain.checkpoint.parts import Progress
from hvdtrain.comm.elastic import JobRanks, Member
from hvdtrain.core.errors import ConfigError, RanksLost
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import KerasSession, first_made, is_built, leaves_of, optimizers_of
from hvdtrain.keras.data.loader import KerasLoader, known
from hvdtrain.keras.data.sources import DatasetBatches
from hvdtrain.keras.data.streams import WalkedLoader
from hvdtrain.keras.fit_callbacks import Count, EndOfEpoch, StartOfFit
from hvdtrain.keras.state import replicas, rng
from hvdtrain.keras.state.callback_counts import States, feed, states_of

Steps = Iterator[tuple[int, int, Any]]
RULE = "an elastic job must train one Keras model, in one fit() that can repeat a batch"


def check_elastic(
    model: keras.Model, session: KerasSession, its: JobRanks, callbacks: Sequence[Any], *, within: bool
) -> None:
    """Raises ConfigError for a `fit` (that begins `within` an epoch) which could not continue with other ranks."""
    data = session.fit.data
    by_index = (
        isinstance(data, KerasLoader)
        and not isinstance(data, WalkedLoader)
        and not isinstance(data.source, DatasetBatches)
    )
    kinds = set(map(type, callbacks))
    optimizers = [leaf for optimizer in optimizers_of(model) for leaf in leaves_of(optimizer)]
    needs = {
        "one fit in the program, of one model": its.member is None,
        "fit(hvdtrain.keras.loader(...)) of arrays or of a PyTorch Dataset with a length": by_index,
        "callbacks=[*hvdtrain.keras.callbacks(model), ...]": {StartOfFit, EndOfEpoch, Count} <= kinds,
        "a model that is built before fit (keras.Input, or model.build(shape))": is_built(model),
        "sync_batchnorm=False, and no synchronized=True": all(hook is None for _, hook in session.moments),
        "optimizers without gradient_accumulation_steps": not any(
            leaf.gradient_accumulation_steps for leaf in optimizers
        ),
        "to begin with a whole epoch": not within,
    }
    wrong = [need for need, met in needs.items() if not met]
    if wrong:
        raise ConfigError(
            RULE,
            f"this fit() needs {'; '.join(wrong)}",
            "remove --min-np, --max-np and --host-discovery: --max-restarts resumes from the last checkpoint",
            shared=True,
        )


class ElasticFit(Member):
    """A `fit` whose ranks may change; `its` keeps this process in the job.

    Attributes:
        size: the number of ranks, as traced functions read it.
        leaving: 1 if the launcher asks this rank to change to another formation; a step sends it.
        leaves: True if all ranks know that one of them was asked.
        skipped: steps of the epoch that were done before this rank joined.
    """

    def __init__(self, model: keras.Model, session: KerasSession, its: JobRanks, callbacks: Sequence[Any]) -> None:
        self.model, self.session = model, session
        self._its, self.callbacks = its, callbacks
        self._data: KerasLoader = session.fit.data
        self.size, self.leaving = BACKEND.number(session.prepared.world.size), BACKEND.number(0.0)
        self.leaves = False
        self.skipped = 0
        self._updates = 0
        self._late = self._comes = False
        self._fed: tuple[list[np.ndarray], States] | None = None
        self._began = session.place.progress  # when this epoch did
        self._reading: Any = None  # Keras' iterator over the epochs
        self._variables: list[Any] = []
        self._copies: Callable[[], list[Any]] | None = None
        self._logs: Any = None

    # -- Keras' loop ---------------------------------------------------------------------------------------------
    def reads(self) -> AbstractContextManager[None]:
        """Lets a `fit` inside begin, and continue, its data within an epoch."""

        def made(iterator: Any) -> None:
            whole: Callable[[], Steps] = iterator._enumerate_iterator
            iterator._enumerate_iterator = lambda: (step for step in whole() if step[0] >= self.skipped)
            self._reading = iterator

        return first_made(BACKEND.epoch_iterator, made)

    def enter(self) -> None:
        """Lets a new process meet the others, and continue where they are; all callbacks have begun."""
        if self._its.joining:
            self._its.begin_epoch()

    def begin_epoch(self) -> None:
        """Runs first in an epoch."""
        if not self._comes:
            self.skipped = 0
            self._its.begin_epoch()
        self.session.place.executions = self.skipped // self._steps_of_one

    def epoch_has_begun(self) -> None:
        """Runs when all of hvdtrain's callbacks know the epoch."""
        if self._comes:
            self._feed()  # again: some of Keras' have restarted their counts
            self._comes = False
        else:
            self._began = self.session.place.progress

    @property
    def _steps_of_one(self) -> int:
        return int(self.model.steps_per_execution or 1)

    def update(self, run: Callable[[Any], Any], data: Any) -> Any:
        """Returns the result of Keras' train function for the next batch, on the ranks that remain in the end."""
        its = self._its
        its.in_epoch()
        if self._fed is not None:  # again: callbacks have begun an epoch that the others began before this state
            self._feed()
            self._fed = None
        if self._copies is None:
            self._variables = replicas.everything(self.model)
            self._copies = BACKEND.make_copies(self._variables)
        if self.leaves:
            its.regroup(None)
            data = BACKEND.given_of(self._reading._current_iterator)
        if its.wants_to_leave:
            self.leaving.assign(1.0)
        while True:
            before = self._copies()
            try:
                with BACKEND.rank_losses():
                    self._logs = run(data)
                self._updates += 1
                break
            except RanksLost as lost:
                BACKEND.put_back(self._variables, before)
                its.regroup(lost)
            if self._late:
                self._late = False
                self._logs = self._logs or self.model.get_metrics_result()
                break
            data = BACKEND.given_of(self._reading._current_iterator)
        its.updated()
        return self._logs

    def evaluate(self, evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs `evaluate` of the model: the validation within `fit` is done again where ranks are lost in it."""
        epoch = next(callback for callback in self.callbacks if isinstance(callback, EndOfEpoch))
        epoch.before_validation()

        def once() -> dict[str, float]:
            with BACKEND.rank_losses():
                evaluate(*args, **kwargs)
            return epoch.validated()

        epoch.results = self._its.run("validation", once)
        return dict(epoch.results)

    # -- what ranks tell each other ------------------------------------------------------------------------------
    @property
    def updates(self) -> int:
        return self._updates

    def place(self) -> Any:
        began, data = self._began, self._data
        steps = data.steps_until(self.session.place.executions * self._steps_of_one)
        samples = data.samples_of(0, steps)
        now = Progress(began.epoch, began.step + steps, began.samples_seen + samples, began.samples_in_epoch + samples)
        return {
            "began": began,
            "now": now,
            "steps": steps,
            "preempted": self.session.place.preempted,
            "whole": data.plan.global_batch,
        }

    def state(self) -> bytes:
        values = [BACKEND.to_numpy(variable) for variable in self._shared()]
        return pickle.dumps((values, states_of(self.callbacks), rng.capture(self.model), self._updates))

    def _shared(self) -> list[Any]:
        return [*self.model.weights, *replicas.optimizer_variables(self.model)]

    def take(self, state: bytes, *, new: bool) -> None:
        values, callbacks, random, self._updates = pickle.loads(state)  # of a rank of this job
        self._fed = (values, callbacks if new else {})
        self._feed()
        self._late, self._comes = not new, new
        if not new:
            self._fed = None
        else:
            rng.restore(self.model, random)
            rng.apply_derived(self.model, random, max(1, self.session.prepared.world.rank))

    def _feed(self) -> None:
        assert self._fed is not None
        values, callbacks = self._fed
        for variable, value in zip(self._shared(), values, strict=True):
            variable.assign(value)
        feed(self.callbacks, callbacks)

    def go_on(self, place: Any, *, late: bool) -> None:
        session, world = self.session, self.session.prepared.world
        self.size.assign(world.size)
        self.leaving.assign(0.0)
        self.leaves, session.place.preempted = False, place["preempted"]
        for loader in known:
            if loader is not self._data:
                loader.redeal(world)
        self._data.redeal(world, place["whole"], (place["now"].epoch, place["steps"]))
        if self._comes:
            session.place.progress, self._began, self.skipped = place["now"], place["began"], place["steps"]
            session.proofs.compared.add("step")
            self.model._initial_epoch = place["now"].epoch
        elif session.fit.runs:
            self._reading._current_iterator = iter(self._reading._get_iterator())
