"""Keras 3 on Horovod, for the TensorFlow and the PyTorch backend: N ranks train like one process.

::

    world = hvdtrain.init("keras")
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=...)
    data = hvk.loader((x, y), per_rank_batch=32)
    hvk.prepare(model, data, lr=hvdtrain.LR(base=0.1, reference_batch=32))
    model.fit(data, epochs=3, callbacks=hvk.callbacks(model))
    print(hvk.evaluate(model, (x_test, y_test), per_rank_batch=32))

Horovod's own Keras wrapper trains without averaging under Keras 3, and raises no error; this package uses only
Horovod's primitive operations. Model files load without Horovod and without hvdtrain.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any, TypeVar

from hvdtrain.keras.backends.chosen import BACKEND  # isort: skip  (refuses a backend before Keras starts it)
import keras

from hvdtrain.checkpoint.checkpoint import Checkpointer
from hvdtrain.comm import elastic
from hvdtrain.core import variables
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.keywords import refuses_other_keywords
from hvdtrain.core.lr import LR, NOT_LR
from hvdtrain.core.proof import Proof
from hvdtrain.keras import averaging, fit, fit_callbacks
from hvdtrain.keras.backends.engine import UPDATES, world_of
from hvdtrain.keras.backends.session import (
    KEY,
    KerasSession,
    Prepared,
    leaves_of,
    require_compiled,
    require_keras,
    session_of,
)
from hvdtrain.keras.checkpoint import model_state
from hvdtrain.keras.data.create import loader
from hvdtrain.keras.data.loader import KerasLoader
from hvdtrain.keras.evaluation import evaluate, hook_reads, predict
from hvdtrain.keras.state import start
from hvdtrain.keras.state.replicas import fingerprint
from hvdtrain.keras.state.units import whole
from hvdtrain.record.log import RunLog
from hvdtrain.world.world import World

__all__ = [
    "KerasLoader",
    "Proof",
    "callbacks",
    "evaluate",
    "fingerprint",
    "loader",
    "model_state",
    "predict",
    "prepare",
    "verify",
    "whole",
]

T = TypeVar("T")


@refuses_other_keywords(
    backward_passes_per_step="gradient_accumulation_steps= of the Keras optimizer",
    learning_rate="lr=hvdtrain.LR(base=0.1, reference_batch=...)",
)
def prepare(
    model: T,
    data: KerasLoader | None = None,
    *,
    world: World | None = None,
    lr: LR | None = None,
    per_rank_batch: int | None = None,
    compression: str | None = None,
    sparse_as_dense: bool = False,
    sync_batchnorm: bool = False,
    verify: bool = True,
    watch_every: int = 0,
    whole: bool = False,
) -> T:
    """Makes a compiled model (or an optimizer) average its gradients over all ranks, in place; returns it.

    Also covers sparse gradients, mixed precision with loss scaling, gradient accumulation (one reduction per update),
    clipping (after the average), EMA, `steps_per_execution`, `run_eagerly` and custom train steps. Each rank's batch is
    weighted by its samples. A single rank trains unchanged.

    Example:
        data = hvk.loader((x_train, y_train), per_rank_batch=32)
        hvk.prepare(model, data, lr=hvdtrain.LR(base=0.1, reference_batch=32))

    Args:
        model: a compiled model; or an optimizer, to be given to `compile` (then call `callbacks` before `fit`).
        data: the loader that you give to `fit`; the learning rate is computed from its batch size.
        world: the ranks; default: those of `hvdtrain.init`.
        lr: the learning rate as a function of samples seen; `callbacks` set it before each batch.
        per_rank_batch: samples of a rank in a full step; needed for `lr` if there is no `data`.
        compression: `"fp16"` sends gradients as float16, divided by the number of ranks before the cast, so that the
            sum overflows only if one rank's gradient would. Gradients below 6e-8 x ranks vanish. Default: the value of
            HVDTRAIN_COMPRESSION.
        sparse_as_dense: reduce `IndexedSlices` as dense tensors.
        sync_batchnorm: batch-norm layers normalise over the samples of all ranks, as layers with `synchronized=True`
            do. Each needs one all-reduce forward and one backward. In training all ranks must call the same layers.
        verify: prove before the first step that gradients are averaged (under a second; see `verify`).
        watch_every: compare the replicas every so many steps; 0: never.
        whole: `compute_loss` (and so every loss given to `compile`) gets the global batch's `y`, `y_pred` and
            `sample_weight`, in the order of the data: any loss is then that of one process. Metrics get a rank's rows.

    Raises:
        ConfigError: the model is not compiled; an option is unknown; the learning rate has no batch size, is scaled
            twice, or comes with a schedule.
    """
    compression = compression or variables.without_none(os.environ.get(variables.COMPRESSION))
    _check_options(model, compression, watch_every, whole=whole, sync_batchnorm=sync_batchnorm)
    world = world_of(world)
    prepared = Prepared(
        world, compression, sparse_as_dense, verify, watch_every, lr=lr,
        per_rank_batch=_batch_of(data, lr, per_rank_batch), sync_batchnorm=sync_batchnorm,
        samples=data.plan.samples * data.unit if isinstance(data, KerasLoader) else 0, whole=whole,
    )  # fmt: skip
    if not prepared.alone:
        clock = prepared.clock  # not the session, which goes with the model
        world.tracker.phase = lambda: clock.phase
    if isinstance(model, keras.optimizers.Optimizer):
        optimizer = model
    else:
        require_compiled(model)
        optimizer = model.optimizer  # type: ignore[attr-defined]
    if lr is not None:
        fit_callbacks.check_rate(optimizer, lr, fit_callbacks.global_batch(prepared, optimizer))
    session = KerasSession(prepared)
    UPDATES.close()
    if optimizer is model:
        averaging.hook_optimizer(optimizer, session)
    else:
        averaging.attach(model, session)
        fit.wrap_fit(model)
        hook_reads(model)
    return model


def _check_options(model: Any, compression: str | None, watch_every: int, *, whole: bool, sync_batchnorm: bool) -> None:
    if compression not in (None, "fp16"):
        raise ConfigError("compression must be None or 'fp16'", f"compression={compression!r}", "compression='fp16'")
    require_keras(model)
    if watch_every < 0:
        raise ConfigError("watch_every must be a number of steps, 0 for never", f"watch_every={watch_every}")
    is_optimizer = isinstance(model, keras.optimizers.Optimizer)
    if whole and (is_optimizer or elastic.ranks().may_change):
        raise ConfigError(
            "whole=True needs a compiled model, in a job that is not elastic",
            "prepare(optimizer, whole=True)" if is_optimizer else "whole=True in an elastic job",
            "prepare the compiled model; or hvdtrain.keras.whole(y, y_pred) in a train_step",
        )
    if sync_batchnorm and is_optimizer:
        raise ConfigError(
            "sync_batchnorm=True needs a model, not an optimizer",
            "prepare(optimizer, sync_batchnorm=True)",
            "prepare the compiled model, or give its layers synchronized=True",
        )


def callbacks(
    model: keras.Model,
    *,
    run: RunLog | None = None,
    checkpointer: Checkpointer | None = None,
    save_every: int = 0,
    extra: MutableMapping[str, Any] | None = None,
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that `fit` needs on every rank; it runs them before your own.

    They compare the ranks' settings, broadcast rank 0's weights, optimizer and random state, prove the averaging,
    compute epoch logs over all ranks' samples, set the learning rate, compare the replicas, and write the record and
    the checkpoints. Give every rank `EarlyStopping` and other callbacks that may end training: if one rank stops, all
    stop after the same step. Keras' callbacks that write files (`ModelCheckpoint`, `CSVLogger`, `TensorBoard`, and
    their subclasses) write on rank 0 only.

    After `Checkpointer.restore(model_state(model))` training resumes at the checkpoint, even within an epoch: also give
    `fit` `initial_epoch=progress.epoch`. Otherwise it continues from the model's last `fit`.

    Example:
        checkpoints = hvdtrain.Checkpointer("run/checkpoints")
        model.fit(data, epochs=10, callbacks=hvk.callbacks(model, checkpointer=checkpoints))

    Args:
        model: compiled; prepared itself, or compiled with a prepared optimizer.
        run: the run's record.
        checkpointer: saves after each epoch, as long as weights are finite.
        save_every: also saves within an epoch, at the first chance at or after every so many steps (with
            `steps_per_execution=4` and `save_every=10`: after 12, 20, 32, 40, ...). Needs a `KerasLoader`.
        extra: objects of your own that are saved with the model; see `model_state`.

    Raises:
        ConfigError: the model has no optimizer.
    """
    require_keras(model)
    require_compiled(model)
    session = _session_for(model)
    fit.wrap_fit(model)
    prepared, place = session.prepared, session.place
    place.saves = checkpointer is not None
    count = fit_callbacks.Count(session)
    found: list[keras.callbacks.Callback] = [fit_callbacks.StartOfFit(session)]
    if not prepared.alone:
        found.append(fit_callbacks.EndOfEpoch(session))
    watches = prepared.watch_every > 0 and not prepared.alone
    if watches or elastic.ranks().may_change or any(part is not None for part in (prepared.lr, run, checkpointer)):
        found.append(count)
    if prepared.lr is not None:
        found.append(fit_callbacks.Rate(session, prepared.lr, model.optimizer))
    if watches:
        found.append(fit_callbacks.ReplicaWatch(session))
    place.records = run is not None and getattr(model, "_loss_tracker", None) is not None
    if checkpointer is not None:
        checkpointer.run = checkpointer.run or run
        found.append(fit_callbacks.Save(session, checkpointer, save_every, extra))
    if run is not None:
        steps = fit_callbacks.Record(session, run, count)
        found += [steps, fit_callbacks.RecordEpoch(session, steps)]
    return found


def verify(model: keras.Model, *, world: World | None = None) -> Proof:
    """Proves that this model's gradients are averaged over ranks and its replicas are equal; collective.

    Applies one update with known gradients, different on every rank, through the model's own optimizer, compares it
    with the update of their mean, and restores weights, slots, counters, metrics and random state bit for bit.

    Example:
        print(hvk.verify(model))

    Args:
        model: compiled and built.
        world: the ranks; default: those of `hvdtrain.init`.

    Raises:
        ReplicaError: on every rank, if gradients are not averaged (no hook, or Horovod's own wrapper), or replicas or
            settings differ.
    """
    require_keras(model)
    require_compiled(model)
    from hvdtrain.keras.state import averaging_proof

    found = session_of(model) or session_of(model.optimizer)
    if found is not None and world is not None and world.comm is not found.prepared.world.comm:
        raise ConfigError("verify() needs the world that the model was prepared with", "another world")
    session = found if found is not None else KerasSession(Prepared(world_of(world)))
    if session.prepared.alone:
        return Proof(1, len(model.trainable_variables))
    UPDATES.close()  # the proof reports an optimizer that is not prepared
    with BACKEND.eager():
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        start.check_agreement(model, session)
        return averaging_proof.prove(model, session)


def _session_for(model: keras.Model) -> KerasSession:
    """The model's session, that of its prepared optimizer, or a new one for a model that was not prepared."""
    known = (session_of(holder) for holder in (model, model.optimizer, *leaves_of(model.optimizer)))
    found = next(filter(None, known), None) or KerasSession(Prepared(world_of(None)))
    vars(model)[KEY] = found
    return found


def _batch_of(data: KerasLoader | None, lr: LR | None, per_rank_batch: int | None) -> int | None:
    """Returns the samples of a rank in a full step; raises ConfigError unless `data` or `per_rank_batch` sets them."""
    if data is not None and not isinstance(data, KerasLoader):
        raise ConfigError(
            "the data of prepare() must be a loader of hvdtrain.keras.loader",
            f"a {type(data).__name__}",
            "data = hvdtrain.keras.loader((x, y), per_rank_batch); or give per_rank_batch= instead of data",
        )
    if data is not None and per_rank_batch is not None:
        raise ConfigError(
            "the batch size must be set once: by data or by per_rank_batch=",
            f"data of {data.per_rank_batch} samples a rank, per_rank_batch={per_rank_batch}",
            "remove per_rank_batch=",
        )
    if lr is not None and not isinstance(lr, LR):
        raise ConfigError("lr= must be an hvdtrain.LR", f"lr={lr!r}", NOT_LR)
    if lr is not None and data is None and per_rank_batch is None:
        raise ConfigError(
            "lr= needs data or per_rank_batch=: it depends on the global batch",
            "lr= without a batch size",
            "data = hvdtrain.keras.loader(...); prepare(model, data, lr=...)\nor prepare(..., per_rank_batch=)",
        )
    return per_rank_batch if data is None else data.per_rank_batch
