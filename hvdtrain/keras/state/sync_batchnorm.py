"""Batch normalisation over the batches of all ranks: one all-reduce a layer forward, one backward.

The layer stays Keras' own, and so does what it saves: only `_moments`, which gives mean and variance of a batch, is
replaced on the instance, where Keras does not track it. Each rank counts by its live samples, so that uneven batches
give what one process with all of them computes, and a batch that only keeps a rank in step counts nothing.
Formulas: Ioffe and Szegedy, arXiv 1502.03167, section 3, with sums over ranks in place of sums over the batch.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
from keras import ops

from hvdtrain.core.errors import ConfigError
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import KerasSession
from hvdtrain.keras.state.replicas import torch_modules, untrained
from hvdtrain.keras.state.units import refuse_where_ranks_part
from hvdtrain.private.keras import in_stateless_scope

_HOOK = "_moments"
_PLAIN = keras.layers.BatchNormalization


def synchronize(model: keras.Model, session: KerasSession) -> None:
    """Makes batch-norm layers normalise over all ranks if they, or `prepare`, ask for it; others are plain again.

    Raises:
        ConfigError: a layer whose class computes its statistics in its own way.
    """
    for path, module in torch_modules(model) if session.prepared.sync_batchnorm and not session.prepared.alone else ():
        if any(normalises(part) for part in module.modules()):
            raise ConfigError(
                "synchronized batch normalization needs keras.layers.BatchNormalization",
                f"{path} holds a PyTorch module with batch normalisation of its own",
                "use that layer, or remove sync_batchnorm=True",
            )
    session.moments = [(layer, _hook_of(layer, session, index)) for index, layer in enumerate(_layers(model))]
    of_step(session)
    own = sum(hook is None for _, hook in session.moments)
    if own and not session.prepared.alone:
        session.prepared.say(
            f"{own} batch-norm layer(s) use each rank's own batch;"
            " for the global batch: prepare(..., sync_batchnorm=True)",
            once="batch norm",
        )


def of_step(session: KerasSession) -> None:
    """Puts the layers in this session's hands; models that were prepared one after the other may share some."""
    for layer, hook in session.moments:
        if hook is None:
            vars(layer).pop(_HOOK, None)
        else:
            vars(layer)[_HOOK] = hook


def _hook_of(layer: Any, session: KerasSession, index: int) -> Any:
    if session.prepared.alone or not (session.prepared.sync_batchnorm or layer.synchronized):
        return None
    if getattr(type(layer), _HOOK) is not getattr(_PLAIN, _HOOK):
        raise ConfigError(
            "synchronized batch normalization needs keras.layers.BatchNormalization",
            f"{layer.name} is a {type(layer).__name__}, which computes its statistics itself",
            "use that layer, or remove synchronized=True and sync_batchnorm=True",
        )
    return functools.partial(_moments, layer, session, index)


def is_synchronized(layer: Any) -> bool:
    """Returns True if the layer's moving statistics are those of all ranks' samples, on every rank."""
    return isinstance(layer, _PLAIN) and _HOOK in vars(layer)


def normalises(module: Any) -> bool:
    """Returns True if a PyTorch module is a batch normalisation."""
    return any(kind.__name__ == "_BatchNorm" for kind in type(module).__mro__)


def own_statistics(model: keras.Model) -> list[Any]:
    """Returns the variables that are not trained and that change with this rank's own samples."""
    shared = {id(v) for layer in _layers(model) if is_synchronized(layer) for v in layer.non_trainable_variables}
    return [variable for variable in untrained(model) if id(variable) not in shared]


def _layers(model: keras.Model) -> list[Any]:
    return [layer for layer in model._flatten_layers() if isinstance(layer, _PLAIN)]


def _moments(layer: Any, session: KerasSession, index: int, inputs: Any, mask: Any) -> tuple[Any, Any]:
    """Returns mean and variance [channels] over all ranks, as the layer's own `_moments` does over one batch."""
    sums = _own_sums(layer, inputs, mask)
    if not in_stateless_scope():  # there Keras asks for shapes only, whenever a rank builds
        sums = _of_all_ranks(sums, session, index)
    channels = inputs.shape[layer.axis]
    total, squares, count = sums[:channels], sums[channels : 2 * channels], ops.stop_gradient(sums[2 * channels :])
    divisor = count + (0.0 if mask is None else keras.backend.epsilon())  # as Keras divides where there is a mask
    mean = total / divisor
    variance = ops.maximum((squares - 2.0 * mean * total + count * mean * mean) / divisor, 0.0)
    return ops.cast(mean, inputs.dtype), ops.cast(variance, inputs.dtype)


def _own_sums(layer: Any, inputs: Any, mask: Any) -> Any:
    """Returns this rank's sum, sum of squares and count for each channel ([3 x channels]; without a mask one count),
    in float64: a difference of squares then loses nothing that float32 would keep.
    """
    axes = layer._reduction_axes
    if mask is None:
        count = ops.reshape(ops.cast(BACKEND.elements(inputs) / inputs.shape[layer.axis], "float64"), (1,))
        mean, variance = ops.mean(inputs, axes), ops.var(inputs, axes)
    else:
        kept = ops.cast(ops.broadcast_to(ops.expand_dims(mask, -1), ops.shape(inputs)), "bool")
        counted = ops.sum(ops.cast(kept, inputs.dtype), axes, keepdims=True)
        some = ops.maximum(counted, 1.0)
        center = ops.sum(ops.where(kept, inputs, 0), axes, keepdims=True) / some
        spread = ops.sum(ops.square(ops.where(kept, inputs - center, 0)), axes, keepdims=True) / some
        count, mean, variance = (ops.reshape(a, (-1,)) for a in (ops.cast(counted, "float64"), center, spread))
    mean, variance = ops.cast(mean, "float64"), ops.cast(variance, "float64")
    return ops.concatenate([count * mean, count * (variance + mean * mean), count])


def _of_all_ranks(sums: Any, session: KerasSession, index: int) -> Any:
    """The sum over ranks, through which gradients go: what the ranks' losses make of it counts by their samples."""
    live = session.live
    if live is not None:
        refuse_where_ranks_part(
            live,
            "synchronised batch normalisation sums over ranks: all must reach the layer in every step",
            "call the layer in train_step itself, or leave synchronized=True and sync_batchnorm=True out",
        )
    name = f"{session.prepared.name}.batchnorm.{index}.{BACKEND.number_of_call(live)}"
    with session.prepared.world.tracker.reduction("batch normalisation"):
        return BACKEND.differentiable_sum(sums, 1.0 if live is None else live.samples, name)
