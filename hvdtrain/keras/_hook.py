"""Hooks into Keras: ``optimizer.apply`` of the outermost optimizer, and ``model.train_step``.

Every training path of Keras 3 ends in ``apply`` of the outermost optimizer, before unscaling, clipping,
weight decay and EMA. The override sits on the instance, so class, config and saved files stay those of plain
Keras, and load without Horovod or hvdtrain. The other side of that: ``load_model``, ``clone_model``,
``from_config`` and another ``compile`` give an optimizer without the hook, which the train step's guard
refuses.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.optimizers.base_optimizer import BaseOptimizer

from hvdtrain.errors import ConfigError, ReplicaError
from hvdtrain.keras import _random, _reduce, _state, _steps
from hvdtrain.keras._backend import BACKEND
from hvdtrain.keras._session import KEY, LiveBatch, Session, is_stock, leaves_of, missing_hook, optimizers_of

HOOKS = ("apply", "check_finite", "_clip_gradients")


# -------------------------------------------------------------------- the optimizer
def hook_optimizer(optimizer: Any, session: Session, index: int = 0) -> None:
    """Makes ``optimizer`` average its gradients over the session's ranks; in place, once.

    Args:
        optimizer: the outermost one (``LossScaleOptimizer`` if there is one).
        session: whose ranks and options.
        index: which of the model's optimizers, for the names of its collectives.

    Raises:
        ConfigError: gradient accumulation inside a ``MultiOptimizer``.
        ReplicaError: Horovod's own wrapper.
    """
    if session.alone:
        vars(optimizer)[KEY] = session
        return
    if is_stock(optimizer):
        raise missing_hook("the model", optimizer)
    unhook(optimizer)
    name = f"{session.name}.{index}"
    accumulating = [leaf for leaf in leaves_of(optimizer) if leaf.gradient_accumulation_steps]
    if accumulating and len(leaves_of(optimizer)) > 1:
        raise ConfigError(
            "gradient accumulation cannot be combined with MultiOptimizer over several ranks",
            f"gradient_accumulation_steps={accumulating[0].gradient_accumulation_steps} in {accumulating[0].name!r}",
            "accumulate by a larger per-rank batch, or use one optimizer",
        )
    own = vars(optimizer)  # not setattr: Keras and TensorFlow would track what they are given
    own[KEY] = session
    own["apply"] = types.MethodType(functools.partial(_apply, name=name, once_per_update=bool(accumulating)), optimizer)
    if accumulating:
        leaf = accumulating[0]
        vars(leaf)["_clip_gradients"] = types.MethodType(
            functools.partial(_clip_gradients, session=session, name=f"{name}.update"), leaf
        )
        if leaf is not optimizer:
            own["check_finite"] = types.MethodType(functools.partial(_check_finite, name=f"{name}.finite"), optimizer)


def unhook(optimizer: Any) -> None:
    """Gives an optimizer (and what it wraps) its own methods back."""
    for holder in [optimizer, *leaves_of(optimizer), getattr(optimizer, "inner_optimizer", None)]:
        if holder is not None and KEY in vars(holder):
            for name in HOOKS:
                vars(holder).pop(name, None)
            vars(holder).pop(KEY)
    for leaf in leaves_of(optimizer):
        vars(leaf).pop("_clip_gradients", None)


def is_hooked(optimizer: Any) -> bool:
    """True if this optimizer's ``apply`` averages over ranks."""
    return KEY in vars(optimizer) and "apply" in vars(optimizer)


def _apply(self: Any, grads: Any, trainable_variables: Any = None, *, name: str, once_per_update: bool) -> Any:
    """Replaces ``apply`` on the instance; ``type(self).apply`` is the original."""
    session: Session = vars(self)[KEY]
    _refuse_branch(self, session)
    grads = list(grads)
    variables = list(trainable_variables) if trainable_variables is not None else self._trainable_variables
    if session.live is None and name not in session.compared:
        session.compared.add(name)
        _compare_alone(self, variables, session)
    special = [_reduce.overwrites(variable) for variable in variables]
    plain = _reduce.weigh([None if s else g for g, s in zip(grads, special, strict=True)], session)
    if not once_per_update:
        plain = _reduce.average(plain, session, name)
    if any(special):
        grads = _reduce.maximum(grads, variables, session, name)
    grads = [g if s else p for g, p, s in zip(grads, plain, special, strict=True)]
    before, session.applying = session.applying, True
    try:
        return type(self).apply(self, grads, trainable_variables if trainable_variables is None else variables)
    finally:
        session.applying = before


def _compare_alone(optimizer: Any, variables: Sequence[Any], session: Session) -> None:
    """Before the first update outside a prepared model's step (a loop of the user's, or ``fit`` of a model that our
    callbacks never met): are the variables equal on all ranks? Collective.
    """
    with BACKEND.eager():
        if any(BACKEND.to_numpy(v).shape != tuple(v.shape) for v in variables):  # TensorFlow is still making them
            raise ReplicaError(
                "a model is known to hvdtrain, or built, before its first step",
                f"optimizer {optimizer.name!r} was prepared without its model, whose variables are not there yet",
                "give fit() hvdtrain.keras.callbacks(model), or prepare the compiled model instead of the optimizer",
                shared=True,
            )
        _state.check_same_variables(variables, session.world)
        _state.check_equal(
            variables, session.world, lambda: BACKEND.checksums(variables), when="before the first update"
        )


def _clip_gradients(self: Any, grads: Sequence[Any], *, session: Session, name: str) -> Any:
    """With gradient accumulation: one reduction per update, of the accumulated mean, before it is clipped.

    Runs inside the update branch of Keras' ``cond``; ranks take it together, because they count the same
    steps.
    """
    return type(self)._clip_gradients(self, _reduce.average(list(grads), session, name))


def _check_finite(self: Any, grads: Sequence[Any], *, name: str) -> Any:
    """With accumulation under loss scaling gradients are still rank-local here: all ranks skip a step, or
    none.
    """
    return BACKEND.agree_finite(type(self).check_finite(self, grads), name)


def _refuse_branch(optimizer: Any, session: Session) -> None:
    """Refuses to communicate where ranks may take different ways: inside a ``LossScaleOptimizer``."""
    unseen = not session.attached and keras.config.dtype_policy().name == "mixed_float16"
    if BACKEND.in_branch() or (unseen and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)):
        raise ReplicaError(
            # one sentence with the remedy in it: Keras re-raises errors from inside a cond with their first
            # part only
            "the outermost optimizer must do the averaging: under mixed_float16 compile() wraps yours in a"
            " LossScaleOptimizer, whose ranks may skip different steps; call hvdtrain.keras.prepare(model) after"
            " compile(), or give fit() hvdtrain.keras.callbacks(model)",
            f"gradients reached {type(optimizer).__name__} {optimizer.name!r} inside the wrapper",
        )


# -------------------------------------------------------------------- the model
def attach(model: keras.Model, session: Session) -> None:
    """Puts the session's hooks on a compiled model's optimizers and its train step, and XLA off. Can be
    repeated.
    """
    vars(model)[KEY] = session
    session.attached = True
    session.by_weight = divides_by_weights(model)
    from hvdtrain.keras import _fit

    _fit.wrap_fit(model, session)
    if session.alone:
        return
    _steps.wrap_train_function(model)
    for index, optimizer in enumerate(optimizers_of(model)):
        hook_optimizer(optimizer, session, index)
    _no_xla(model, session)
    if "train_step" not in vars(model):
        vars(model)["train_step"] = _make_train_step(model, model.train_step)
        vars(model)["make_train_function"] = _note_train_function(model, model.make_train_function)
        model.train_function = None


def divides_by_weights(model: keras.Model) -> bool:
    """True if the loss is a mean over sample weights instead of samples; ranks must then weigh by those.

    Raises:
        ReplicaError: a loss that sums over the batch: the mean over ranks is an N-th of the sum over the global batch.
    """
    losses = [loss for loss in keras.tree.flatten(getattr(model, "loss", None)) if loss is not None]
    kinds = {getattr(loss, "reduction", None) for loss in losses}
    if "sum" in kinds:
        raise ReplicaError(
            "the loss must be a mean over the batch: ranks average their gradients",
            f"reduction='sum' in {', '.join(type(loss).__name__ for loss in losses)}",
            "leave reduction out (the default is the mean), and scale the learning rate instead",
            shared=True,
        )
    return kinds == {"mean_with_sample_weight"}


def _no_xla(model: keras.Model, session: Session) -> None:
    """Horovod's operations have no XLA kernel (nor does torch.compile see through them)."""
    if getattr(model, "jit_compile", False):
        model.jit_compile = False
        model.train_function = None
        session.say(
            f"model {model.name!r}: jit_compile=True is now False: all-reduces cannot be compiled into the step"
        )


def _note_train_function(model: keras.Model, make: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a model's ``make_train_function``: what it makes is noted while it runs, for it waits for the ranks."""

    @functools.wraps(make)
    def make_train_function(force: bool = False) -> Any:
        if model.train_function is None or force:
            make(force)
            step = model.train_function

            def train_function(iterator: Any) -> Any:
                session: Session = vars(model)[KEY]
                with session.world.tracker.update(f"of {session.name.replace('hvdtrain.', 'model ')}"):
                    return step(iterator)

            model.train_function = train_function
        return model.train_function

    return make_train_function


def _make_train_step(model: keras.Model, inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a model's train step (its own or the user's): checks before it, the batch's weight around it."""

    @functools.wraps(inner)
    def train_step(data: Any) -> Any:
        session: Session = vars(model)[KEY]
        _before_step(model, session, data)
        _steps.note_batch(session, data)
        x, sample_weight = _parts_of(data)
        with _live_batch(session, x, sample_weight), _all_averaged(model, session), _random.of_step(session):
            if sample_weight is None:
                logs = inner(data)
                _random.check_saved(session)
                return logs
            # a batch without a live sample (all weights 0) must leave no trace in metrics and moving
            # statistics
            local = _rank_local(model, data)
            before = BACKEND.copies(local)
            logs = inner(data)
            _random.check_saved(session)
            assert session.live is not None
            BACKEND.unless_live(session.live.samples, local, before)
            return logs

    return train_step


def _parts_of(data: Any) -> tuple[Any, Any]:
    """Inputs and sample weights of a batch; all of it counts as inputs where it is a user's own structure."""
    if isinstance(data, (tuple, list)) and len(data) > 3:
        return data, None
    x, _, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    return x, sample_weight


@contextmanager
def _all_averaged(model: keras.Model, session: Session) -> Iterator[None]:
    """While a prepared model's step runs, no optimizer updates anything without averaging."""
    original = BaseOptimizer.apply

    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if not session.applying and not is_hooked(self):
            raise missing_hook(model.name, self)
        return original(self, grads, trainable_variables)

    BaseOptimizer.apply = apply
    try:
        yield
    finally:
        BaseOptimizer.apply = original


def _before_step(model: keras.Model, session: Session, data: Any) -> None:
    """Checks, and at the first step of a model that was not built: build, broadcast, proof.

    Under TensorFlow this runs while the step is traced, in eager mode (``init_scope``), where variables are
    real.
    """
    if not is_hooked(model.optimizer):
        raise missing_hook(model.name, model.optimizer)
    if session.ready:
        return
    from hvdtrain.keras import _start

    with BACKEND.eager():
        if not is_built(model):
            model._symbolic_build(data_batch=data)
        _start.start(model, session)


def is_built(model: keras.Model) -> bool:
    """True if every layer of the model has its variables."""
    parts = all(layer.built for layer in model._flatten_layers(include_self=False))
    called = type(model).call is not keras.Model.call  # a GAN has parts, but no call() to build it by
    return parts and (bool(model.built) or not called)


@contextmanager
def _live_batch(session: Session, x: Any, sample_weight: Any) -> Iterator[None]:
    """Notes the weight of the batch in flight and starts its sum over ranks, beside the forward pass."""
    samples = BACKEND.live(x, sample_weight, by_weight=session.by_weight)
    started = BACKEND.start_sum(samples, f"{session.name}.live")
    session.live = LiveBatch(samples, started, BACKEND.finish_sum)
    try:
        yield
        session.live.total()  # a step that never reached the optimizer still takes part in the sum
    finally:
        session.live = None


def _rank_local(model: keras.Model, data: Any) -> list[Any]:
    """Variables that a step changes on its own rank only: metric states, and statistics such as
    BatchNorm's.
    """
    if model._compile_metrics is not None and not model._compile_metrics.built:
        with BACKEND.eager():
            model._symbolic_build(data_batch=data)
    metrics = [variable for metric in model.metrics for variable in metric.variables]
    return [*metrics, *model.non_trainable_weights]
