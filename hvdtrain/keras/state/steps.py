"""Around each step of a prepared model: that ranks take the same number of them, on samples of their own, to equal
weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from hvdtrain.checkpoint.parts import end
from hvdtrain.comm.elastic import repeated
from hvdtrain.core.errors import ReplicaError
from hvdtrain.keras.backends.session import KEY, KerasSession, has_own_step, hook, map_leaves
from hvdtrain.keras.state import decompose, replicas
from hvdtrain.watch import preemption
from hvdtrain.world import same_data


def wrap_train_function(model: keras.Model) -> None:
    """Makes Keras' train function count and compare steps, and end where the ranks were preempted."""

    def make_train_function(inner: Callable[..., None], force: bool = False) -> Any:
        if model.train_function is None or force:
            inner(force=force)
            model.train_function = _counting(model, model.train_function)
        return model.train_function

    if hook(model, "make_train_function", make_train_function):
        model.train_function = None


def _end_if_preempted(session: KerasSession) -> None:
    """Raises `Preempted` before a step if all ranks know of a preemption and the last step is saved."""
    if session.place.preempted:
        saving = session.fit.saving
        done = "" if saving is None else saving.save()
        if done or saving is None:
            give = "hvdtrain.keras.callbacks(model, checkpointer=hvdtrain.Checkpointer(...))"
            end(session.prepared.world, [done] if done else [], give)


def _counting(model: keras.Model, inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(inner)
    def train_function(data: Any) -> Any:
        session: KerasSession = vars(model)[KEY]
        _end_if_preempted(session)
        if not session.prepared.alone:
            return _step_of_all(model, session, inner, data)
        session.prepared.clock.enter("train_step")
        logs = inner(data)
        session.place.preempted = preemption.is_preempted()
        return logs

    return train_function


def _step_of_all(model: keras.Model, session: KerasSession, inner: Callable[[Any], Any], data: Any) -> Any:
    place, proofs, world = session.place, session.proofs, session.prepared.world
    if preemption.is_preempted():
        session.notes.preempted.assign(1.0)
    is_first = "step" not in proofs.compared
    tries = _tries(model, session, is_first)
    if tries or (is_first and proofs.undealt):
        session.notes.want_batch()
    key = f"of {session.prepared.name.replace('hvdtrain.', 'model ')}"

    def run(data: Any) -> Any:
        session.prepared.clock.enter("train_step")
        with world.tracker.update(key):  # it waits for the ranks
            return inner(data)

    logs = run(data) if place.elastic is None else place.elastic.update(run, data)
    place.executions += 1
    proofs.executed += 1
    if is_first:
        proofs.compared.add("step")
        _after_first(model, session)
    if tries:
        _try_loss(model, session, is_first)
    session.notes.kept_batch = None
    if model.stop_training and not session.fit.stops_in_epoch:
        raise ReplicaError(
            "all ranks must stop at the same step",
            f"model.stop_training was set on rank {world.rank}, but not by a callback that fit() was given",
            "set it in a callback's hook, given to fit() on every rank",
        )
    return logs


@repeated
def _after_first(model: keras.Model, session: KerasSession) -> None:
    """Checks after the first update that the replicas are equal, and that each saw samples of its own."""
    world = session.prepared.world
    replicas.check_equal(replicas.replicated(model), world, when="after the first step")
    if session.proofs.undealt:
        batch = map_leaves(keras.ops.convert_to_numpy, session.notes.kept_batch)
        cards = world.gather(same_data.of_arrays(batch) if _has_contents(batch) else None)
        if cards[0] is not None and all(card == cards[0] for card in cards):
            raise same_work(f"the first batch is the same on all {world.size} ranks")


def _has_contents(batch: Any) -> bool:
    """Returns True if numbers of a batch differ from one another, unlike those of made-up data."""
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None and leaf.dtype.kind in "fiu"]
    return any(leaf.size and np.ptp(leaf) > 0 for leaf in leaves)


def _tries(model: keras.Model, session: KerasSession, is_first: bool) -> bool:
    """Returns True if the loss is tried at the next step, on all ranks: at steps 1, 2, 4, 8 ... and an epoch's first.

    Ranks that come later count the steps of an epoch as the others do, and no others.
    """
    if not session.prepared.verify or (has_own_step(model) and not is_first):
        return False
    executed = session.proofs.executed
    is_due = session.place.elastic is None and executed & (executed + 1) == 0
    return is_first or is_due or session.place.executions == 0


@repeated
def _try_loss(model: keras.Model, session: KerasSession, is_first: bool) -> None:
    decompose.check(model, session, is_first=is_first)


def ended_early(model: keras.Model, session: KerasSession, steps: int | None) -> None:
    """Raises on a rank whose own data ended before the steps that all ranks had agreed to take; local."""
    if session.prepared.alone or session.fit.data is not None or steps is None or model.stop_training:
        return
    expected = -(-steps // int(model.steps_per_execution or 1))
    executions = session.place.executions
    if executions < expected:
        raise ReplicaError(
            "every rank must take the same number of steps",
            f"rank {session.prepared.world.rank}: the data ended after {executions} of {expected} steps of an epoch",
            "data = hvdtrain.keras.loader(dataset), of all the data;\n"
            "or give each rank endless data: dataset.repeat(), or `while True` in the generator",
        )


def same_work(received: str) -> ReplicaError:
    """Returns the error for ranks that all train on the same samples."""
    return ReplicaError(
        "each rank must train on samples of its own",
        received + ": the same work as many times, for what one rank alone would learn",
        "data = hvdtrain.keras.loader((x, y), per_rank_batch=...), or loader(dataset) of batches,\n"
        "or loader(function) that begins a generator of batches; then model.fit(data)",
        shared=True,
    )
