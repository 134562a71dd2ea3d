"""Around Keras' own `fit` of a prepared model: what all ranks must agree on, and that they step and stop in step.

Put on the instance, as all hooks are: it sees the data and the callbacks that `fit` is given, with or without
ours among them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np

from hvdtrain.comm import elastic
from hvdtrain.core.errors import ConfigError, by_rank
from hvdtrain.keras import fit_callbacks
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import KEY, KerasSession, RunningFit, hook, lr_not_applied
from hvdtrain.keras.data.loader import KerasLoader
from hvdtrain.keras.data.streams import open_ended
from hvdtrain.keras.elastic_fit import ElasticFit, check_elastic
from hvdtrain.keras.state import start
from hvdtrain.keras.state.steps import same_work
from hvdtrain.world import same_data
from hvdtrain.world.world import World

_K = keras.callbacks
# they end nothing within an epoch; any other callback with one of these hooks may
_ENDS_EPOCHS_ONLY = (
    _K.BackupAndRestore, _K.CSVLogger, _K.EarlyStopping, _K.History, _K.LearningRateScheduler, _K.ModelCheckpoint,
    _K.ProgbarLogger, _K.ReduceLROnPlateau, _K.RemoteMonitor, _K.SwapEMAWeights, _K.TensorBoard,
)  # fmt: skip
_WITHIN_EPOCHS = (
    "on_train_begin", "on_epoch_begin", "on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end",
)  # fmt: skip
_INSTEAD = {  # of what fit(loader) does not read
    "y": "hvdtrain.keras.loader((x, y), ...)",
    "class_weight": "hvdtrain.keras.loader((x, y), ..., class_weight=)",
    "validation_split": "validation_data=hvdtrain.keras.loader((x_val, y_val), ...) instead of validation_split=",
    "batch_size": "remove batch_size=; the batch of a rank is loader(..., per_rank_batch=)",
    "steps_per_epoch": "remove steps_per_epoch=; a part of endless data makes an epoch:\n"
    "loader(lambda: itertools.islice(batches(), steps * ranks))",
    "sample_weight": "hvdtrain.keras.loader((x, y, sample_weight), ...)",
}


def wrap_fit(model: keras.Model) -> None:
    """Puts the checks around `model.fit`, once; the model has its session."""
    hook(model, "fit", partial(_fit, model))


def _fit(model: keras.Model, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs `fit`. Each line stands on those before it."""
    call = FitCall(model, inner, args, kwargs)
    _refuse_unread(call.given)
    _skip_empty_rest(call)
    if "verbose" in call.given and not call.session.prepared.world.is_main:  # one progress line is enough
        call.given["verbose"] = 0
    within = _begin(call)
    its = elastic.ranks()
    if its.may_change:
        check_elastic(model, call.session, its, call.callbacks, within=within)
    data = call.session.fit.data
    if call.given.get("validation_data") is data and isinstance(data, KerasLoader):  # each has a place of its own
        call.given["validation_data"] = data.apart()
    _add_callbacks(call, within=within)
    _check_rate(call)
    _check_counts(call)
    _start_without_callbacks(call)
    _compare_ranks(call)
    with _timed(call), _elastic(call, its), open_ended(), _running(call.session):
        start.check_averages(model)
        return call.run()


class FitCall:
    """A call of `fit`: its arguments, and what hvdtrain adds to them.

    Attributes:
        given: the arguments, by name.
        callbacks: those that it will run, in their order (of a `CallbackList` those in it).
    """

    def __init__(
        self, model: keras.Model, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self.model, self.session, self._inner = model, vars(model)[KEY], inner
        signature = inspect.signature(inner)
        signature.bind(*args, **kwargs)  # raises Python's own error
        parameters = signature.parameters.values()
        names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):  # of a user's fit(self, *args)
            names += list(inspect.signature(keras.Model.fit).parameters)[1 + len(names) :]
        self._positional = names[: len(args)]
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.given: dict[str, Any] = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        received = self.given.get("callbacks")
        self.callbacks: list[Any] = keras.tree.flatten(getattr(received, "callbacks", received) or [])

    @property
    def first_epoch(self) -> int:
        return int(self.given.get("initial_epoch") or 0)

    def has(self, kind: type) -> bool:
        """Returns True if one of the callbacks is of this kind."""
        return any(isinstance(callback, kind) for callback in self.callbacks)

    @property
    def others(self) -> list[Any]:
        """The callbacks that are not hvdtrain's."""
        return [callback for callback in self.callbacks if not isinstance(callback, fit_callbacks.Callback)]

    def run(self) -> Any:
        """Runs Keras' `fit` with the callbacks."""
        named = {**self.given, "callbacks": self.callbacks}
        positional = [named.pop(name) for name in self._positional]
        return self._inner(*positional, **named)


def _refuse_unread(given: dict[str, Any]) -> None:
    if not isinstance(given.get("x"), KerasLoader):
        return
    arrays = ("y", "sample_weight")  # which are neither true nor false
    unread = [name for name in _INSTEAD if (given.get(name) is not None if name in arrays else given.get(name))]
    if unread:
        raise ConfigError(
            "fit(loader) cannot take these arguments: loader() has labels, weights and batches",
            f"fit({', '.join(f'{name}=' for name in unread)})",
            "\n".join(_INSTEAD[name] for name in unread),
            shared=True,
        )


# -------------------------------------------------------------------- where it begins
def _skip_empty_rest(call: FitCall) -> None:
    """Turns to the next epoch if the rest of a restored one fills no step (`tail="drop"`, larger batches)."""
    place, data = call.session.place, call.given.get("x")
    now = place.progress
    restored = place.restored_random is not None and call.given.get("initial_epoch") == now.epoch
    within = restored and now.samples_in_epoch > 0
    if within and isinstance(data, KerasLoader) and not data.has_more(now.epoch, now.samples_in_epoch):
        place.progress = replace(now, epoch=now.epoch + 1, samples_in_epoch=0)
        call.given["initial_epoch"] = now.epoch + 1


def _begin(call: FitCall) -> bool:
    """Puts the data where `fit` begins, or where a restored run had stopped; True if that is within an epoch."""
    place, first = call.session.place, call.first_epoch
    progress = place.progress
    data = call.given["x"] if isinstance(call.given.get("x"), KerasLoader) else None
    call.session.fit = RunningFit(data=data)
    restored = place.restored_random is not None
    if restored and first != progress.epoch:
        raise ConfigError(
            "a restored run must resume in the epoch that it stopped in",
            f"progress is in epoch {progress.epoch}, fit(initial_epoch={first})",
            f"fit(..., initial_epoch=progress.epoch, epochs={progress.epoch + 1} or more);\n"
            "to start a new training from these weights, restore only them:\n"
            "state = hvdtrain.keras.model_state(model)\n"
            'Checkpointer.restore({"model.keras": state["model.keras"]})',
            shared=True,
        )
    order = None if data is None else data.identity()
    if restored and progress.samples_in_epoch and None not in (order, place.order) and order != place.order:
        raise ConfigError(
            "a run that resumes within an epoch needs the data and the order it began with",
            f"saved with {place.order}; now {order}",
            "give the same data, seed and shuffle (a PyDataset: the same batches on any number of ranks);\n"
            "or start a new run directory",
            shared=True,
        )
    place.order = order
    if data is not None and (restored or data.first_epoch != first):
        data.go_on(first, progress.samples_in_epoch if restored else 0)
    elif data is None and restored and progress.samples_in_epoch:
        call.session.prepared.say(
            f"continues after {progress.samples_in_epoch} samples of epoch {first}: the data must skip those"
        )
    elif data is None:
        place.progress = replace(progress, samples_in_epoch=0)
    return data is not None and data.done(first) > 0


# -------------------------------------------------------------------- its callbacks
def _add_callbacks(call: FitCall, *, within: bool) -> None:
    """Adds the callbacks that every `fit` has, and puts all in order: ours, the user's, and those that save.

    A checkpoint holds what others have set, but not the average that `SwapEMAWeights` puts into the model after it.
    """
    session = call.session
    call.callbacks.append(fit_callbacks.EpochOfLoaders(session))
    if within and session.place.restored_random is not None:
        call.callbacks.append(fit_callbacks.RateOfRestored(session))
        call.callbacks.insert(0, fit_callbacks.MetricsOfRestored(session))
    others, swaps = call.others, _first_swap(call.others)
    first, last = (
        [c for c in call.callbacks if isinstance(c, fit_callbacks.Callback) and c.comes_last is late]
        for late in (False, True)
    )
    call.callbacks[:] = [*first, *others[:swaps], *last, *others[swaps:]]
    session.place.callbacks = call.callbacks
    if not session.prepared.alone:
        _write_on_main(call)


_WRITES = (_K.ModelCheckpoint, _K.CSVLogger, _K.TensorBoard, _K.RemoteMonitor)
_CALLED = [name for name in dir(_K.Callback) if name.startswith("on_")]
_SAVES = ("save", "save_weights")


def _write_on_main(call: FitCall) -> None:
    """Makes Keras' callbacks that write files do so on rank 0 only; raises ConfigError for BackupAndRestore."""
    world = call.session.prepared.world
    for callback in call.callbacks:
        if isinstance(callback, _K.BackupAndRestore):
            raise ConfigError(
                "BackupAndRestore cannot resume a training on several ranks",
                type(callback).__name__,
                "callbacks=hvk.callbacks(model, checkpointer=hvdtrain.Checkpointer(DIR));\n"
                "call its restore() before fit",
            )
        if isinstance(callback, _WRITES) and vars(callback).get(KEY) is not world:
            vars(callback)[KEY] = world
            if isinstance(callback, _K.TensorBoard) and not world.is_main:
                callback.write_graph, callback.embeddings_freq = False, 0  # in set_model, which every rank needs
            methods = {name: getattr(callback, name) for name in _CALLED}
            for name, method in methods.items():
                if not getattr(method, "_is_default", False):  # Keras' mark
                    setattr(callback, name, partial(_on_main, world, callback, method))


def _on_main(world: World, callback: Any, method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Calls a method of a callback that writes; ModelCheckpoint's also on the other ranks, without writing."""
    if world.is_main:
        method(*args, **kwargs)
    elif isinstance(callback, _K.ModelCheckpoint):
        kept = {name: vars(callback.model).pop(name) for name in _SAVES if name in vars(callback.model)}
        vars(callback.model).update(dict.fromkeys(_SAVES, lambda *args, **kwargs: None))
        try:
            method(*args, **kwargs)
        finally:
            for name in _SAVES:
                del vars(callback.model)[name]
            vars(callback.model).update(kept)


def _first_swap(others: list[Any]) -> int:
    """Returns the place of `SwapEMAWeights` in a list, else the list's length."""
    return next((at for at, callback in enumerate(others) if isinstance(callback, _K.SwapEMAWeights)), len(others))


# -------------------------------------------------------------------- what is checked
def _check_rate(call: FitCall) -> None:
    """Checks that the learning rate is set in one place, and computed from the batch that is fitted."""
    rate = next((callback for callback in call.callbacks if isinstance(callback, fit_callbacks.Rate)), None)
    others = [c for c in call.callbacks if isinstance(c, (_K.ReduceLROnPlateau, _K.LearningRateScheduler))]
    if rate is not None and others:
        raise ConfigError(
            "the learning rate cannot be set elsewhere with lr=: a callback sets it",
            f"lr={rate.lr} and {type(others[0]).__name__}",
            f"remove {type(others[0]).__name__}, or lr= (then scale the optimizer's rate yourself)",
            shared=True,
        )
    data, prepared_batch = call.session.fit.data, call.session.prepared.per_rank_batch
    received = ""
    if data is not None and prepared_batch not in (None, data.per_rank_batch):
        received = f"loader(per_rank_batch={data.per_rank_batch})"
    elif data is None and _arrays(call) is not None and (call.given.get("batch_size") or 32) != prepared_batch:
        received = f"fit(batch_size={call.given.get('batch_size')}); Keras' default is 32"
    if rate is not None and received:
        raise ConfigError(
            "lr= needs the batch size that fit() uses",
            f"prepare(per_rank_batch={prepared_batch}), {received}",
            "give fit() the data that prepare() was given: prepare(model, data, lr=...), fit(data, ...)",
            shared=True,
        )


def _check_counts(call: FitCall) -> None:
    """Raises ConfigError if a run that resumes within an epoch has not counted the samples that its data skips."""
    data, progress, epoch = call.session.fit.data, call.session.place.progress, call.first_epoch
    left_out = data.done(epoch) if data is not None else 0
    if call.has(fit_callbacks.Count) and left_out and (progress.epoch, progress.samples_in_epoch) != (epoch, left_out):
        raise ConfigError(
            "a run that resumes within an epoch must have counted the samples that its data skips",
            f"{progress}, and data that skips {left_out} samples of epoch {epoch}",
            "after prepare(): Checkpointer.restore(hvdtrain.keras.model_state(model))",
            shared=True,
        )


def _start_without_callbacks(call: FitCall) -> None:
    """Starts a restored run here if `hvdtrain.keras.callbacks` are not there to do it."""
    if call.session.place.restored_random is not None and not call.has(fit_callbacks.StartOfFit):
        start.start(call.model, call.session)
    if not call.session.prepared.alone and not call.has(fit_callbacks.EndOfEpoch):
        call.session.prepared.say(
            "fit() without hvdtrain.keras.callbacks(model): its logs and history, and what EarlyStopping and others"
            " make of them, are each rank's own; moving statistics are not made equal"
            f"{lr_not_applied(call.session.prepared, call.model.optimizer)}\n"
            "  fix: fit(..., callbacks=hvdtrain.keras.callbacks(model))",
            once="callbacks",
        )


def _arrays(call: FitCall) -> Any:
    """Returns the in-memory data given to `fit`; `None` for a data set or generator."""
    data = tuple(call.given.get(name) for name in ("x", "y", "sample_weight"))
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    plain = leaves and all(isinstance(leaf, np.ndarray) or keras.ops.is_tensor(leaf) for leaf in leaves)
    return data if plain else None


def _compare_ranks(call: FitCall) -> None:
    """Compares the ranks' data, and adds the callback that makes stopping collective; collective."""
    session, world = call.session, call.session.prepared.world
    if session.prepared.alone:
        return
    session.proofs.compared.clear()
    data = _arrays(call)
    card = None if data is None else same_data.of_arrays(data)
    reports = world.gather((card, any(map(_may_stop_within, call.others)), call.has(fit_callbacks.EndOfEpoch)))
    ours = [has for _, _, has in reports]
    if any(ours) and not all(ours):
        raise ConfigError(
            "hvdtrain.keras.callbacks(model) must be given to fit() on every rank",
            by_rank(["with them" if has else "without them" for has in ours]),
            "model.fit(..., callbacks=hvk.callbacks(model)) on every rank, not under `if world.is_main:`",
            shared=True,
        )
    if card is not None and all(other == card for other, _, _ in reports):
        raise same_work(f"fit() was given the same {card.lengths[0]} samples on all {world.size} ranks")
    session.proofs.undealt = data is None and session.fit.data is None
    kind = fit_callbacks.LastOfBatch if any(stops for _, stops, _ in reports) else fit_callbacks.Last
    call.callbacks.append(kind(session, call.first_epoch))


def _may_stop_within(callback: Any) -> bool:
    """Returns True if a callback may set `model.stop_training` within an epoch, which ranks then share at each step."""
    if type(callback) in _ENDS_EPOCHS_ONLY:
        return False
    hooks = (getattr(callback, name, None) for name in _WITHIN_EPOCHS)
    return any(not getattr(hook, "_is_default", False) for hook in hooks)  # Keras' mark


# -------------------------------------------------------------------- around Keras' loop
@contextmanager
def _timed(call: FitCall) -> Iterator[None]:
    """Measures what a recorded run waits for its data."""
    if not call.has(fit_callbacks.Record):
        yield
        return
    call.callbacks.append(fit_callbacks.Wait(call.session))
    call.session.notes = call.session.notes or BACKEND.notes()  # of an optimizer that meets its model in this fit
    with call.session.notes.timed_input():
        yield


@contextmanager
def _elastic(call: FitCall, its: elastic.JobRanks) -> Iterator[None]:
    """Makes the `fit` of an elastic job the member that changes its ranks."""
    if not its.may_change:
        yield
        return
    if not call.has(_K.History):
        call.callbacks.append(_K.History())  # which a joining rank gets from another
    its.member = call.session.place.elastic = ElasticFit(call.model, call.session, its, call.callbacks)
    with its.member.reads():
        yield


@contextmanager
def _running(session: KerasSession) -> Iterator[None]:
    data, session.fit.runs = session.fit.data, True
    try:
        yield
    finally:
        if data is not None:
            data.leave_nothing_out()
        session.fit, session.place.restored_random = RunningFit(), None
        session.place.restored_counts, session.place.restored_metrics = None, ()
