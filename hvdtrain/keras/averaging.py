"""Hooks into Keras: `optimizer.apply` of the outermost optimizer, and `model.train_step`.

Every training path of Keras 3 ends in `apply` of the outermost optimizer, before unscaling, clipping,
weight decay and EMA. The override sits on the instance, so class, config and saved files stay those of plain
Keras, and load without Horovod or hvdtrain. The other side of that: `load_model`, `clone_model`,
`from_config` and another `compile` give an optimizer without the hook, which the train step's guard
refuses.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import keras

from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import (
    HOOKS,
    KEY,
    KerasSession,
    LiveBatch,
    has_own_step,
    hook,
    is_built,
    is_hooked,
    is_stock,
    leaves_of,
    lr_not_applied,
    missing_hook,
    optimizers_of,
    replaced,
    while_set,
)
from hvdtrain.keras.state import metric_states, reduce, replicas, rng, start, steps, sync_batchnorm, units
from hvdtrain.private.keras import BaseOptimizer, CompileLoss, CompileMetrics


# -------------------------------------------------------------------- the optimizer
def hook_optimizer(optimizer: Any, session: KerasSession, index: int = 0) -> None:
    """Makes the `index`th outermost optimizer average its gradients over the session's ranks; in place, once.

    Raises:
        ConfigError: gradient accumulation inside a `MultiOptimizer`.
        ReplicaError: Horovod's own wrapper.
    """
    if session.prepared.alone:
        vars(optimizer)[KEY] = session
        return
    if is_stock(optimizer):
        raise missing_hook("the model", optimizer)
    unhook(optimizer)
    name = f"{session.prepared.name}.{index}"
    accumulating = [leaf for leaf in leaves_of(optimizer) if leaf.gradient_accumulation_steps]
    if accumulating and len(leaves_of(optimizer)) > 1:
        raise ConfigError(
            "gradient accumulation cannot be combined with MultiOptimizer over several ranks",
            f"gradient_accumulation_steps={accumulating[0].gradient_accumulation_steps} in {accumulating[0].name!r}",
            "accumulate by a larger per-rank batch, or use one optimizer",
        )
    own = vars(optimizer)  # not setattr: Keras and TensorFlow would track what they are given
    own[KEY] = session
    apply = functools.partial(_apply, name=name, once_per_update=bool(accumulating))
    vars(apply)["__name__"] = "apply"  # which TensorFlow asks for where a user's tf.function calls it
    own["apply"] = types.MethodType(apply, optimizer)
    if accumulating:
        _average_once_per_update(accumulating[0], optimizer, name)


def _average_once_per_update(leaf: Any, optimizer: Any, name: str) -> None:
    """Hooks gradient accumulation, whose gradients are each rank's own until an update is due."""

    def clip(leaf: Any, grads: Sequence[Any]) -> Any:  # ranks count the same steps, and so all are in the branch
        session: KerasSession = vars(optimizer)[KEY]
        averaged = reduce.average(list(grads), session.prepared, session.ranks, f"{name}.update")
        return type(leaf)._clip_gradients(leaf, averaged)

    def check_finite(optimizer: Any, grads: Sequence[Any]) -> Any:  # all ranks skip a step, or none
        return BACKEND.agree_finite(type(optimizer).check_finite(optimizer, grads), f"{name}.finite")

    vars(leaf)["_clip_gradients"] = types.MethodType(clip, leaf)
    if leaf is not optimizer:
        vars(optimizer)["check_finite"] = types.MethodType(check_finite, optimizer)


def unhook(optimizer: Any) -> None:
    """Gives an optimizer (and what it wraps) its own methods back."""
    for holder in [optimizer, *leaves_of(optimizer), getattr(optimizer, "inner_optimizer", None)]:
        if holder is not None and KEY in vars(holder):
            for name in HOOKS:
                vars(holder).pop(name, None)
            vars(holder).pop(KEY)
    for leaf in leaves_of(optimizer):
        vars(leaf).pop("_clip_gradients", None)


def _apply(self: Any, grads: Any, trainable_variables: Any = None, *, name: str, once_per_update: bool) -> Any:
    """Replaces `apply` on the instance; `type(self).apply` is the original."""
    session: KerasSession = vars(self)[KEY]
    _refuse_branch(self, session)
    grads = list(grads)
    variables = list(trainable_variables) if trainable_variables is not None else self._trainable_variables
    live = session.live
    if live is None:
        _check_alone(self, variables, session, name)
    elif not BACKEND.usable_here(live.samples):
        session.prepared.say(
            "optimizer.apply runs in a tf.function of its own: batches of unequal size weigh the same there"
        )
        live = None
    special = [reduce.overwrites(variable) for variable in variables]
    plain: list[Any] = [None if s else g for g, s in zip(grads, special, strict=True)]
    if live is not None:
        plain = reduce.weigh(plain, live, session.ranks)
    if not once_per_update:
        plain = reduce.average(plain, session.prepared, session.ranks, name)
    if any(special):
        grads = reduce.maximum(grads, variables, session.ranks, name)
    grads = [g if s else p for g, p, s in zip(grads, plain, special, strict=True)]
    with nullcontext() if session.live is None else while_set(session.live, "applying", True):
        return type(self).apply(self, grads, trainable_variables if trainable_variables is None else variables)


def _check_alone(optimizer: Any, variables: Sequence[Any], session: KerasSession, name: str) -> None:
    """Checks an update outside of a prepared model's step; before the first one replicas must be equal: collective."""
    prepared, compared = session.prepared, session.proofs.compared
    if name not in compared:
        compared.add(name)
        with BACKEND.eager():
            if any(BACKEND.to_numpy(v).shape != tuple(v.shape) for v in variables):  # TensorFlow still makes them
                raise ReplicaError(
                    "a model must be built, or known to hvdtrain, before its first step",
                    f"optimizer {optimizer.name!r} was prepared without its model, whose variables do not exist yet",
                    "give fit() hvdtrain.keras.callbacks(model), or prepare the compiled model instead of the"
                    " optimizer",
                    shared=True,
                )
            replicas.check_same_variables(variables, prepared.world)
            replicas.check_equal(variables, prepared.world, when="before the first update")
            prepared.say(
                "updates outside of a prepared model's train step: all ranks weigh the same, whatever samples each has"
                ' (loader(..., tail="drop") deals the same number to all)'
                + ("" if session.fit.runs else lr_not_applied(prepared, optimizer)),
                once="alone",
            )


def _refuse_branch(optimizer: Any, session: KerasSession) -> None:
    """Refuses to communicate where ranks may take different ways: inside a `LossScaleOptimizer`."""
    unseen = session.notes is None and keras.config.dtype_policy().name == "mixed_float16"
    if BACKEND.in_branch() or (unseen and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)):
        raise ReplicaError(
            # with the remedy in it: Keras re-raises errors from inside a cond with their first part only
            "the outermost optimizer must average: call hvdtrain.keras.prepare(model) after compile()",
            f"gradients reached {type(optimizer).__name__} {optimizer.name!r} inside the wrapper\n"
            "(ranks of a LossScaleOptimizer, which compile() adds under mixed_float16, may skip different steps)",
            "prepare the compiled model, or give fit() hvdtrain.keras.callbacks(model)",
        )


# -------------------------------------------------------------------- the model
def attach(model: keras.Model, session: KerasSession) -> None:
    """Puts the session's hooks on a compiled model's optimizers and its train step; can be repeated."""
    if vars(model).get(KEY) is not session:
        model.train_function = None  # what was traced is another session's
        vars(model)[KEY] = session
    if session.notes is None:
        session.notes = BACKEND.notes()
    sync_batchnorm.synchronize(model, session)
    steps.wrap_train_function(model)
    if session.prepared.alone:
        hook_own_steps(model)
        return
    _refuse_stateful(model)
    hook_test_step(model)
    if session.prepared.whole:
        units.hook_loss(model)
    for index, optimizer in enumerate(optimizers_of(model)):
        hook_optimizer(optimizer, session, index)
    # Horovod's operations have no XLA kernel, nor does torch.compile see through them
    if getattr(model, "jit_compile", False):
        model.jit_compile = False
        model.train_function = None
        session.prepared.say(
            f"model {model.name!r}: jit_compile=True is now False: all-reduces cannot be compiled into the step"
        )
    if hook(model, "train_step", functools.partial(_train_step, model)):
        model.train_function = None


def hook_own_steps(model: keras.Model) -> None:
    """Gives steps of the user's own a batch as `fit(x, y)` gives it; Keras' own take any."""
    for name in ("train_step", "test_step"):
        own = getattr(type(model), name) is not getattr(keras.Model, name)
        if own and hook(model, name, lambda step, data: step(_as_keras_has_it(data))):
            model.train_function = model.test_function = None


def _refuse_stateful(model: keras.Model) -> None:
    """Refuses a state for each row of a batch: in checkpoints one rank's rows would stand for all ranks'."""
    asking = [layer.name for layer in model._flatten_layers() if getattr(layer, "stateful", False)]
    if asking:
        raise ConfigError(
            "a layer cannot keep a state of a batch's rows: each rank has other rows",
            f"stateful=True: {', '.join(asking)}",
            "remove stateful=, and cut sequences so that each needs no earlier state (or make the state an input)",
        )


def _train_step(model: keras.Model, inner: Callable[[Any], Any], data: Any) -> Any:
    """A model's train step (Keras' own or the user's): checks before it, the batch's weight around it."""
    session: KerasSession = vars(model)[KEY]
    _before_step(model, session, data)
    sync_batchnorm.of_step(session)
    samples, data, may_be_dead = _split_dead(data)
    session.notes.keep_batch(data)
    # a batch without a sample must leave no trace in metrics and moving statistics; building metrics computes a loss,
    # which is not one of this step's
    local = [*_metric_variables(model, data), *sync_batchnorm.own_statistics(model)] if may_be_dead else []
    with (
        _live_batch(session, samples) as live,
        units.of_step(session),
        units.weighed(session, data),
        _all_averaged(model, live),
        rng.of_step(session.place),
        _built_outside(),
    ):
        before = BACKEND.copies([model._loss_tracker.total]) if session.place.records else []
        with BACKEND.unmoved_if_dead(samples, local) if may_be_dead else nullcontext():
            step = functools.partial(inner, _as_keras_has_it(data))
            logs = metric_states.named(model, step, live.own, session.proofs.metric_of)
        if session.place.saves:
            rng.check_saved()
        if before:
            session.notes.note_loss(model._loss_tracker.total - before[0], live, f"{session.prepared.name}.loss")
        return logs


def _all_averaged(model: keras.Model, live: LiveBatch) -> AbstractContextManager[None]:
    """Refuses updates without averaging while a prepared model's step runs."""

    def apply(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not live.applying and not is_hooked(optimizer):
            raise missing_hook(model.name, optimizer)
        return original(optimizer, *args, **kwargs)

    return replaced(BaseOptimizer, "apply", apply)


@contextmanager
def _built_outside() -> Iterator[None]:
    """Builds metrics and losses outside of the step that TensorFlow traces, which it would trace twice for them."""

    def build(original: Any, *args: Any, **kwargs: Any) -> Any:
        with BACKEND.eager():
            return original(*args, **kwargs)

    with replaced(CompileMetrics, "build", build), replaced(CompileLoss, "build", build):
        yield


def hook_test_step(model: keras.Model) -> None:
    """Makes batches without a sample leave no trace in an evaluation, and weighs losses within `together`."""

    def test_step(inner: Callable[[Any], Any], data: Any) -> Any:
        session: KerasSession = vars(model)[KEY]
        samples, data, may_be_dead = _split_dead(data)
        with ExitStack() as around:
            if may_be_dead:
                around.enter_context(BACKEND.unmoved_if_dead(samples, _metric_variables(model, data)))
            own: dict[int, Any] = {}
            if session.joint is not None and not session.prepared.alone:
                own = around.enter_context(_live_batch(session, samples, even=session.joint)).own
                around.enter_context(units.weighed(session, data))
                if session.joint:
                    around.enter_context(units.of_step(session, trains=False))
            step = functools.partial(inner, _as_keras_has_it(data))
            return metric_states.named(model, step, own, session.proofs.metric_of, "val_")

    if hook(model, "test_step", test_step):
        hook(model, "_symbolic_build", _without_marks)
        model.test_function = None


def _without_marks(symbolic_build: Callable[..., Any], iterator: Any = None, data_batch: Any = None) -> Any:
    """Keras on torch gives it the first batch: a mark is no sample weight."""
    if iterator is not None:
        iterator = (
            (begin, end, [_split_dead(found[0])[1]] if isinstance(found, (list, tuple)) else found)
            for begin, end, found in iterator
        )
    return symbolic_build(iterator=iterator, data_batch=data_batch)


@contextmanager
def together(model: keras.Model, *, even: bool) -> Iterator[None]:
    """Makes batches of an evaluation the ranks' parts of global batches while open (`even`: all ranks have as many);
    else `evaluate` is this rank's own, as in plain Keras.
    """
    session: KerasSession = vars(model)[KEY]
    traced = session.test_functions

    def switch(joint: bool | None) -> None:  # what was traced for one is not for the other
        traced[session.joint], session.joint = model.test_function, joint
        model.test_function = traced.pop(joint, None)

    switch(even)
    try:
        model.make_test_function()
        yield
    finally:
        switch(None)


def _split_dead(data: Any) -> tuple[Any, Any, bool]:
    """Returns a batch's samples, the batch as the model may see it, and whether it may hold no sample at all."""
    if not isinstance(data, (tuple, list)) or len(data) != 3:
        return BACKEND.split_dead(data, None)[0], data, False
    x, y, sample_weight = data
    samples, shown = BACKEND.split_dead(x, sample_weight)
    return samples, (x, y, shown), sample_weight is not None


def _as_keras_has_it(data: Any) -> Any:
    """Returns a batch as `fit(x, y)` gives it to a step: without a mark in place of weights, and `x` alone as it is."""
    if not isinstance(data, tuple) or len(data) > 3:
        return data
    return keras.utils.pack_x_y_sample_weight(*keras.utils.unpack_x_y_sample_weight(data))


def _before_step(model: keras.Model, session: KerasSession, data: Any) -> None:
    """Checks a step, while TensorFlow traces it; before the first one builds, broadcasts and proves."""
    if not is_hooked(model.optimizer):
        raise missing_hook(model.name, model.optimizer)
    if session.proofs.ready:
        return
    with BACKEND.eager():
        if not is_built(model):
            _build(model, data)
            sync_batchnorm.synchronize(model, session)  # layers that were made just now
        start.start(model, session)


def _build(model: keras.Model, data: Any) -> None:
    """Builds a model by a batch; without its loss where that is of what only its own train step makes of the batch."""
    try:
        return model._symbolic_build(data_batch=data)
    except Exception:
        if not has_own_step(model):
            raise
    loss, vars(model)["_compile_loss"] = model._compile_loss, None
    try:
        model._symbolic_build(data_batch=data)
    finally:
        vars(model)["_compile_loss"] = loss


@contextmanager
def _live_batch(session: KerasSession, samples: Any, *, even: bool | None = None) -> Iterator[LiveBatch]:
    """Notes the batch of a step; in a train step the sum of all ranks' samples starts before the forward pass."""
    trains = even is None
    words = (session.words(), session.receive) if trains else ()
    start_sum = functools.cache(lambda: BACKEND.start_sum(samples, f"{session.prepared.name}.live", *words))
    live = session.live = LiveBatch(samples, functools.cache(lambda: BACKEND.finish_sum(start_sum())), even)
    try:
        if trains:
            start_sum()
        yield live
        if trains:
            live.total()  # a step that never reached the optimizer still takes part in the sum
    finally:
        session.live = None


def _metric_variables(model: keras.Model, data: Any) -> list[Any]:
    if any(isinstance(metric, CompileMetrics) and not metric.built for metric in model.metrics):
        with BACKEND.eager():
            model._symbolic_build(data_batch=data)
    return [variable for metric in model.metrics for variable in metric.variables]
