"""Around Keras' own `fit` of a prepared model: what all ranks must agree on, that they step and stop together.

Put on the instance, as all hooks are: it sees the data and the callbacks that `fit` is given, with or without
ours among them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np

from hvdtrain.comm import elastic
from hvdtrain.comm.elastic import repeated
from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.keras import fit_callbacks, fit_records
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import KEY, KerasSession, hook, leaves_of
from hvdtrain.keras.changing import Changing
from hvdtrain.keras.data.loader import KerasLoader
from hvdtrain.keras.data.walked import open_ended
from hvdtrain.keras.state import moving_average, start
from hvdtrain.keras.state.changing_fit import check_elastic
from hvdtrain.keras.state.steps import same_work
from hvdtrain.keras.state.stopping import may_stop
from hvdtrain.world import same_data
from hvdtrain.world.world import World

_K = keras.callbacks
_SET = (_K.ReduceLROnPlateau, _K.LambdaCallback)  # of Keras' own, those that may set something at an epoch's end
_UNREAD = ("class_weight", "validation_split", "steps_per_epoch")


def wrap_fit(model: keras.Model) -> None:
    """Puts the checks around `model.fit`, once; the model has its session."""
    hook(model, "fit", functools.partial(_fit, model))


def _fit(model: keras.Model, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    session: KerasSession = vars(model)[KEY]
    signature = inspect.signature(inner)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    more = bound.arguments[rest] if rest is not None else {}
    unnamed = _by_position(bound)
    given: dict[str, Any] = {**bound.arguments, **more, **unnamed}

    def give(name: str, value: Any) -> None:
        if name in unnamed:
            raise ConfigError(
                "hvdtrain adds callbacks of its own to those of fit(), and reads a loader for validation by itself",
                f"{name} by its position, in a fit{signature} of {type(model).__name__}'s own",
                f"fit(..., {name}=...)",
                shared=True,
            )
        (bound.arguments if name in bound.arguments else more)[name] = value

    _refuse_unread(given)
    if _nothing_left(session, given):
        progress = session.progress = replace(session.progress, epoch=session.progress.epoch + 1, samples_in_epoch=0)
        give("initial_epoch", progress.epoch)
        given["initial_epoch"] = progress.epoch
    if _begins_within(session, given):
        return _in_two(model, give, bound)
    if not session.world.is_main and "verbose" in bound.arguments and given["verbose"] == "auto":
        bound.arguments["verbose"] = 0  # one progress bar: rank 0's
    within = _begin(session, given)
    its = elastic.active()
    if its is not None:
        check_elastic(model, session, its, _listed(given.get("callbacks")))
    loader: KerasLoader | None = session.fitted
    validates_on_it = given.get("validation_data") is loader
    if loader is not None and validates_on_it:
        give("validation_data", loader.apart())  # each has its own place in the data
    callbacks = _with(EpochReporter(session, began_within=within), given.get("callbacks"))
    if within and session.restored_random is not None:
        callbacks = _with(RateOfRestored(session), callbacks)
    callbacks = _in_order(callbacks)
    if not session.alone:
        _write_on_main(session, _listed(callbacks))
    _check_clock(session, callbacks, given)
    _tell_what_is_not_saved(session, callbacks)
    if session.restored_random is not None and not any(
        isinstance(c, fit_callbacks.StartOfFit) for c in _listed(callbacks)
    ):
        start.start(model, session)
    if not session.alone:
        if not any(isinstance(callback, fit_callbacks.EndOfEpoch) for callback in _listed(callbacks)):
            session.say(
                "fit() without hvdtrain.keras.callbacks(model): its logs and history, and what EarlyStopping and others"
                " make of them, are each rank's own; moving statistics are not made equal",
                once="callbacks",
            )
        session.compared.clear()
        callbacks = _together(session, callbacks, given)
    timing: AbstractContextManager[None] = nullcontext()
    if any(isinstance(callback, fit_records.Record) for callback in _listed(callbacks)):
        callbacks, timing = _with(fit_records.Wait(session), callbacks), BACKEND.timed_input(session)
    reading: AbstractContextManager[None] = nullcontext()
    if its is not None:
        if not any(isinstance(callback, _K.History) for callback in _listed(callbacks)):
            callbacks = [*callbacks, _K.History()]  # which a rank that comes gets from another
        its.member = session.changing = Changing(model, session, its, _listed(callbacks))
        reading = session.changing.reads()
    give("callbacks", callbacks)
    moving_average.go_on(model, session, _listed(callbacks), within=within)
    session.fitting = True
    try:
        with timing, reading, open_ended():
            return inner(*bound.args, **bound.kwargs)
    finally:
        session.fitting, session.stops_in_epoch, session.saving = False, True, None
        if loader is not None:
            loader.leave_nothing_out()
        session.fitted = session.restored_random = None


def _goes_on_within(session: KerasSession, given: dict[str, Any]) -> bool:
    """Whether a restored run goes on within an epoch of data that knows the place."""
    restored = session.restored_random is not None and given.get("initial_epoch") == session.progress.epoch
    return restored and session.progress.samples_in_epoch > 0 and isinstance(given.get("x"), KerasLoader)


def _nothing_left(session: KerasSession, given: dict[str, Any]) -> bool:
    """Whether what is left of that epoch fills no step: `tail="drop"`, and more ranks or larger batches than before."""
    progress = session.progress
    return _goes_on_within(session, given) and not given["x"].has_more(progress.epoch, progress.samples_in_epoch)


def _begins_within(session: KerasSession, given: dict[str, Any]) -> bool:
    """Whether a restored run goes on within an epoch, and has others to train after that."""
    return _goes_on_within(session, given) and (given.get("epochs") or 1) > session.progress.epoch + 1


def _in_two(model: keras.Model, give: Callable[[str, Any], None], bound: inspect.BoundArguments) -> Any:
    """Keras' epochs have as many steps as the first: so what is left of that one is a `fit` of its own."""
    session: KerasSession = vars(model)[KEY]
    epochs, first = bound.arguments["epochs"], session.progress.epoch
    callbacks = _listed(bound.arguments.get("callbacks"))
    if not session.alone:
        _write_on_main(session, callbacks)  # before a method is muted: it would take that one
    users = [
        one for one in callbacks if not type(one).__module__.startswith("hvdtrain.") and not isinstance(one, _K.History)
    ]
    give("epochs", first + 1)
    with _muted(users, "on_train_end") as ends:  # for them it is one training: they start no file again
        begun = model.fit(*bound.args, **bound.kwargs)
    if model.stop_training:
        for callback, logs in ends:
            callback.on_train_end(logs)
        return begun
    give("initial_epoch", first + 1)
    give("epochs", epochs)
    with _muted(users, "on_train_begin"):
        history = model.fit(*bound.args, **bound.kwargs)
    if isinstance(history, _K.History) and isinstance(begun, _K.History):
        history.epoch = begun.epoch + history.epoch
        history.history = {name: begun.history.get(name, []) + its for name, its in history.history.items()}
    return history


@contextmanager
def _muted(callbacks: list[Any], name: str) -> Iterator[list[tuple[Any, Any]]]:
    """While open, a method of callbacks does nothing; gives the callbacks, and the logs, that it was called with."""
    kept = [(one, vars(one).get(name)) for one in callbacks]
    calls: list[tuple[Any, Any]] = []

    def note(callback: Any, logs: Any = None) -> None:
        calls.append((callback, logs))

    for one in callbacks:
        setattr(one, name, partial(note, one))
    try:
        yield calls
    finally:
        for one, own in kept:
            vars(one).pop(name)
            if own is not None:
                setattr(one, name, own)


def _by_position(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Names what the `fit(self, *args, **kwargs)` of a user's model passes on, by Keras' order."""
    kinds = [parameter.kind for parameter in bound.signature.parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        return {}
    first = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    names = list(inspect.signature(keras.Model.fit).parameters)[1 + first :]  # without self
    return dict(zip(names, bound.args[first:], strict=False))


def _refuse_unread(given: dict[str, Any]) -> None:
    if not isinstance(given.get("x"), KerasLoader):
        return
    unread = [name for name in _UNREAD if given.get(name)]
    if given.get("y") is not None:
        unread.insert(0, "y")
    if given.get("sample_weight") is not None:
        unread.append("sample_weight")
    if unread:
        raise ConfigError(
            "fit() does not read these beside loader(...), which deals labels and weights, and knows an epoch's steps",
            f"fit({', '.join(f'{name}=' for name in unread)})",
            "give them to hvdtrain.keras.loader((x, y, sample_weight), ..., class_weight=); leave steps_per_epoch= out"
            " (of data without end an epoch is a part: loader(lambda: itertools.islice(batches(), steps * ranks)))",
            shared=True,
        )


def _listed(callbacks: Any) -> list[Any]:
    return list(callbacks.callbacks if isinstance(callbacks, _K.CallbackList) else keras.tree.flatten(callbacks or []))


def _with(callback: Any, callbacks: Any) -> Any:
    if isinstance(callbacks, _K.CallbackList):  # fit() takes it as it is
        model = getattr(callbacks, "_model", None)
        returns = hasattr(model, "history") or any(isinstance(c, _K.History) for c in callbacks.callbacks)
        if model is None or not returns:
            raise ConfigError(
                "a CallbackList is taken as it is: it knows its model, and has the History that fit() returns",
                "CallbackList without model=" if model is None else "CallbackList without add_history=True",
                "give fit() a list, callbacks=[...]; or CallbackList(..., model=model, add_history=True, epochs=...)",
                shared=True,
            )
        callbacks.callbacks.append(callback)
        callback.set_params(callbacks.params)
        callback.set_model(callbacks.model)
        return callbacks
    return [*_listed(callbacks), callback]


def _in_order(callbacks: Any) -> Any:
    """Ours come first: all others see the logs of all ranks' samples, and what they set is not undone unseen. What
    saves comes last: a checkpoint holds what others have set (a rate, a counter), but not the average of weights that
    `SwapEMAWeights` puts into the model until the next epoch."""
    found = _listed(callbacks)
    ours = [callback for callback in found if isinstance(callback, fit_callbacks.Callback)]
    others = [callback for callback in found if callback not in ours]
    swaps = _first_swap(others)
    first, last = ([its for its in ours if its.comes_last is late] for late in (False, True))
    ordered = [*first, *others[:swaps], *last, *others[swaps:]]
    if isinstance(callbacks, _K.CallbackList):
        callbacks.callbacks[:] = ordered
        return callbacks
    return ordered


_WRITES = (_K.ModelCheckpoint, _K.CSVLogger, _K.TensorBoard, _K.RemoteMonitor)
_CALLED = [name for name in dir(_K.Callback) if name.startswith("on_")]


def _write_on_main(session: KerasSession, callbacks: list[Any]) -> None:
    """Has Keras' callbacks that write files do so on rank 0 only.

    Raises:
        ConfigError: BackupAndRestore, whose files know neither the samples nor the ranks.
    """
    for callback in callbacks:
        if isinstance(callback, _K.BackupAndRestore):
            raise ConfigError(
                "BackupAndRestore cannot resume a training on several ranks",
                type(callback).__name__,
                "callbacks=hvk.callbacks(model, checkpointer=hvdtrain.Checkpointer(DIR)), and its restore() before fit",
            )
        if isinstance(callback, _WRITES) and callback not in session.write_on_main:
            session.write_on_main.add(callback)
            if isinstance(callback, _K.TensorBoard) and not session.world.is_main:
                callback.write_graph, callback.embeddings_freq = False, 0  # in set_model, which every rank needs
            methods = {name: getattr(callback, name) for name in _CALLED}
            for name, method in methods.items():
                if not getattr(method, "_is_default", False):  # Keras' mark
                    setattr(callback, name, partial(_on_main, session, callback, method))


def _on_main(session: KerasSession, callback: Any, method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Calls a method of a callback that writes files.

    ModelCheckpoint is called on all ranks, without writing: what it counts (the best value) is right on the rank that
    becomes rank 0 in an elastic job.
    """
    if session.world.is_main:
        method(*args, **kwargs)
    elif isinstance(callback, _K.ModelCheckpoint):
        kept = {name: vars(callback.model).pop(name) for name in _SAVES if name in vars(callback.model)}
        vars(callback.model).update(dict.fromkeys(_SAVES, _does_nothing))
        try:
            method(*args, **kwargs)
        finally:
            for name in _SAVES:
                del vars(callback.model)[name]
            vars(callback.model).update(kept)


_SAVES = ("save", "save_weights")


def _does_nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a model's `save` on ranks other than 0."""


def _first_swap(others: list[Any]) -> int:
    """Returns where `SwapEMAWeights` stands in a list, else the list's length."""
    return next((at for at, callback in enumerate(others) if isinstance(callback, _K.SwapEMAWeights)), len(others))


class EpochReporter(fit_callbacks.Callback):
    """Tells loaders the epoch, which Keras does not; keeps the weights behind an average where `fit` ends within
    an epoch, or began there.
    """

    def __init__(self, session: KerasSession, *, began_within: bool) -> None:
        super().__init__(session)
        self.began_within = began_within

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        if self.session.changing is not None:
            self.session.changing.epoch_has_begun()
        if self.session.fitted is not None:
            self.session.fitted.next_epoch = epoch

    def on_test_begin(self, logs: Any = None) -> None:
        validated = fit_callbacks.validation_loader(self.model)
        if validated is not None:
            validated.next_epoch = self.epoch  # its order is the epoch's in a resumed run, too

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        data = self.session.fitted
        if data is not None and not self.session.alone and not self.model.stop_training:
            data.check_end(self.world)
        if self.began_within or self.model.stop_training:
            moving_average.keep(self.model, self.session, began_within=self.began_within)


class RateOfRestored(fit_callbacks.Callback):
    """Keeps the rate of a run that goes on within an epoch: what a callback makes of it as an epoch begins (0.7 times
    what it was) is in it already."""

    comes_last = True

    def on_train_begin(self, logs: Any = None) -> None:
        # noted before the epoch begins, and after what a user's on_train_begin may set
        rated = [leaf for leaf in leaves_of(self.model.optimizer) if isinstance(leaf._learning_rate, keras.Variable)]
        self._rates = [(leaf, keras.ops.convert_to_numpy(leaf.learning_rate)) for leaf in rated]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        for optimizer, rate in self._rates:
            optimizer.learning_rate = rate
        self._rates = []


# ------------------------------------------------------- the learning rate and the clock
def _begin(session: KerasSession, given: dict[str, Any]) -> bool:
    """Puts the data where `fit` begins, which is where a restored run had stopped; True if that is within an epoch.

    Raises:
        ConfigError: a restored run would go on with another epoch.
    """
    first = session.first_epoch = int(given.get("initial_epoch") or 0)
    progress = session.progress
    data = session.fitted = given["x"] if isinstance(given.get("x"), KerasLoader) else None
    restored = session.restored_random is not None
    if restored and first != progress.epoch:
        raise ConfigError(
            "a restored run goes on with the epoch it stopped in",
            f"progress is in epoch {progress.epoch}, fit(initial_epoch={first})",
            f"fit(..., initial_epoch=progress.epoch, epochs={progress.epoch + 1} or more); a new training that starts"
            ' from these weights restores them only: Checkpointer.restore({"model.keras": state["model.keras"]}), with'
            " state = hvdtrain.keras.model_state(model)",
            shared=True,
        )
    order = None if data is None else data.identity()
    if restored and progress.samples_in_epoch and None not in (order, session.order) and order != session.order:
        raise ConfigError(
            "a run goes on within an epoch with the data and the order it began with",
            f"saved with {session.order}; now {order}",
            "give the same data, seed and shuffle (a PyDataset: the same batches, whatever the ranks), or start a new"
            " run directory",
            shared=True,
        )
    session.order = order
    if data is not None and (restored or data.first_epoch != first):
        data.go_on(first, progress.samples_in_epoch if restored else 0)
    elif data is None and restored and progress.samples_in_epoch:
        session.say(f"goes on after {progress.samples_in_epoch} samples of epoch {first}: the data must skip those")
    elif data is None:
        session.progress = replace(progress, samples_in_epoch=0)
    return data is not None and data.done(first) > 0


def _check_clock(session: KerasSession, callbacks: Any, given: dict[str, Any]) -> None:
    """The learning rate is set in one place, and counts the samples that are fitted, which are those that are left."""
    found = _listed(callbacks)
    rate = next((callback for callback in found if isinstance(callback, fit_callbacks.Rate)), None)
    others = [c for c in found if isinstance(c, (_K.ReduceLROnPlateau, _K.LearningRateScheduler))]
    if rate is not None and others:
        raise ConfigError(
            "the learning rate is set in one place: lr=, or a callback",
            f"lr={rate.lr} and {type(others[0]).__name__}",
            f"leave {type(others[0]).__name__} out, or lr= (then scale the optimizer's rate yourself)",
            shared=True,
        )
    data, prepared_batch = session.fitted, session.per_rank_batch
    received = ""
    if data is not None and prepared_batch not in (None, data.per_rank_batch):
        received = f"loader(per_rank_batch={data.per_rank_batch})"
    elif data is None and _arrays(given) is not None and (given.get("batch_size") or 32) != prepared_batch:
        received = f"fit(batch_size={given.get('batch_size')}); Keras' default is 32"
    if rate is not None and received:
        raise ConfigError(
            "the learning rate is computed from the batch that is fitted",
            f"prepare(per_rank_batch={prepared_batch}), {received}",
            "give fit() the data that prepare() was given: prepare(model, data, lr=...), fit(data, ...)",
            shared=True,
        )
    counts = any(isinstance(callback, fit_callbacks.Count) for callback in found)
    progress, epoch = session.progress, session.first_epoch
    left_out = data.done(epoch) if data is not None else 0
    if counts and left_out and (progress.epoch, progress.samples_in_epoch) != (epoch, left_out):
        raise ConfigError(
            "a run that goes on within an epoch has counted the samples that its data leaves out",
            f"{progress}, and data that leaves out {left_out} samples of epoch {epoch}",
            "restore the checkpoint after prepare(): Checkpointer.restore(hvdtrain.keras.model_state(model)) puts"
            " counts and data where it was taken",
            shared=True,
        )


def _tell_what_is_not_saved(session: KerasSession, callbacks: Any) -> None:
    """Checkpoints have the model's state; what callbacks of Keras count is in no file (of BackupAndRestore, too), and
    what is set at an epoch's end after `SwapEMAWeights`, which they come before, is in a later one."""
    counting = [type(c).__name__ for c in _listed(callbacks) if isinstance(c, (_K.EarlyStopping, _K.ReduceLROnPlateau))]
    if session.saves and counting:
        session.say(
            f"{' and '.join(counting)}: a run that is resumed from a checkpoint begins to count there anew; the best"
            " value so far and the epochs without a better one are in no checkpoint",
            once="counting",
        )
    others = [callback for callback in _listed(callbacks) if not isinstance(callback, fit_callbacks.Callback)]
    after = others[_first_swap(others) + 1 :]
    late = [
        type(callback).__name__ for callback in after
        if getattr(callback.on_epoch_end, "__func__", None) is not _K.Callback.on_epoch_end
        and (not type(callback).__module__.startswith("keras.") or isinstance(callback, _SET))
    ]  # fmt: skip
    if session.saves and late:
        session.say(
            f"{' and '.join(late)}: listed after SwapEMAWeights, before which a checkpoint is taken: what on_epoch_end"
            " sets there is not in the checkpoint of that epoch. List SwapEMAWeights last",
            once="swap",
        )


# -------------------------------------------------------------------- the ranks together
def _arrays(given: dict[str, Any]) -> Any:
    """The in-memory data given to `fit`; `None` for a data set or generator."""
    data = (given.get("x"), given.get("y"), given.get("sample_weight"))
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    plain = leaves and all(isinstance(leaf, np.ndarray) or keras.ops.is_tensor(leaf) for leaf in leaves)
    return data if plain else None


def _together(session: KerasSession, callbacks: Any, given: dict[str, Any]) -> Any:
    """Compares the ranks' data, and adds the callback that makes stopping collective; collective."""
    data = _arrays(given)
    card = None if data is None else same_data.of_arrays(data).card
    others = [callback for callback in _listed(callbacks) if not isinstance(callback, fit_callbacks.Callback)]
    stops = any(may_stop(callback) for callback in others)
    reports = session.world.gather((card, stops))
    if card is not None and all(other == card for other, _ in reports):
        raise same_work(f"fit() was given the same {card[1][0]} samples on all {session.world.size} ranks")
    session.first_batch = None if data is not None or session.fitted is not None else False
    return _with((LastOfBatch if any(stop for _, stop in reports) else Last)(session), callbacks)


class Last(fit_callbacks.Callback):
    """Comes after all others: ranks take the same number of steps, and a stop that one wants is one for all."""

    stops_in_epoch = False

    def on_train_begin(self, logs: Any = None) -> None:
        self.session.stops_in_epoch = self.stops_in_epoch
        first = getattr(self.model, "_initial_epoch", None) or self.session.first_epoch  # the former: BackupAndRestore
        length = {
            "steps per epoch": self.params.get("steps"), "epochs": self.params.get("epochs"), "initial epoch": first,
        }  # fmt: skip
        reports = self.world.gather(length)
        if any(report != reports[0] for report in reports):
            raise ReplicaError(
                "every rank must take the same number of steps",
                "\n".join(f"rank {rank}: {report}" for rank, report in enumerate(reports)),
                "deal the data with hvdtrain.keras.loader((x, y), per_rank_batch): all ranks get the same number",
                shared=True,
            )
        if "steps" in self.params and length["steps per epoch"] is None and self.session.fitted is None:
            raise ReplicaError(
                "every rank must take the same number of steps, so it must be known",
                "data of unknown length (a generator, or a tf.data.Dataset such as TFRecords): a rank that ends first"
                " would leave the others waiting",
                "data = hvdtrain.keras.loader(dataset), or loader(lambda: generator()), of all the data on every rank,"
                " then fit(data); or fit(steps_per_epoch=...) of each rank's own data, which does not end before:"
                " dataset.repeat(), or `while True` in the generator",
                shared=True,
            )

        if self.session.changing is not None:
            self.session.changing.enter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._share_stop()

    def _share_stop(self) -> None:
        before = self.session.clock.enter("communication")  # it waits for the ranks
        self.model.stop_training = _any(bool(self.model.stop_training), self.world)
        self.session.clock.enter(before)


@repeated
def _any(mine: bool, world: World) -> bool:
    with world.in_step("end of a step", value=float(mine)) as wanted:
        return wanted > 0


class LastOfBatch(Last):
    """The same after every step: some callback of some rank may stop there."""

    stops_in_epoch = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._share_stop()
