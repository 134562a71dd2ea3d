"""What happens once before the first step of a `fit`: agreement, rank 0's state, random streams, proof."""

from __future__ import annotations

import json
import zlib
from typing import Any

import keras

from hvdtrain.comm.elastic import repeated
from hvdtrain.core.errors import ConfigError
from hvdtrain.keras.backends.session import KerasSession, is_hooked, leaves_of, missing_hook, optimizers_of
from hvdtrain.keras.state import replicas, rng


def start(model: keras.Model, session: KerasSession) -> None:
    """Makes sure that training from here is right on all ranks, or raises; collective.

    Broadcasts rank 0's state first if the callbacks asked for it; without the callbacks replicas that differ
    are an error (a forgotten broadcast).
    """
    alone, place = session.prepared.alone, session.place
    if not alone and not is_hooked(model.optimizer):
        raise missing_hook(model.name, model.optimizer)
    if not model.optimizer.built:  # alone as well: some optimizers start from the weights as they then are
        check_averages(model)
        model.optimizer.build(model.trainable_variables)
    if not alone:
        session.proofs.proof = _made_equal(model, session)
        session.proofs.wants_broadcast = False
    if place.restored_random is not None:  # last of all, because building a model draws random numbers
        rng.restore(model, place.restored_random)
        place.restored_random, place.saves = None, True
    elif not place.streams_set:
        rng.split_streams(model, session.prepared.world)
    place.streams_set = session.proofs.ready = True


def check_averages(model: keras.Model) -> None:
    """Checks a model before its first update, and before `fit`, where Keras on torch builds the optimizer.

    Raises:
        ConfigError: `fit` would end with averages of one optimizer in place of weights that another one updates.
    """
    several = len(optimizers_of(model)) > 1
    if several and any(getattr(leaf, "use_ema", False) and not leaf.built for leaf in leaves_of(model.optimizer)):
        raise ConfigError(
            "of several optimizers, one with use_ema must be built before fit(), which ends with the averages",
            f"{model.optimizer.name} (model.optimizer) is not built",
            "model.optimizer.build(the variables that it updates), before fit",
            shared=True,
        )


@repeated
def _made_equal(model: keras.Model, session: KerasSession) -> Any:
    """Makes all ranks equal, or checks that they are; returns the proof of averaging, if `verify` requires one."""
    prepared, place, proofs = session.prepared, session.place, session.proofs
    world = prepared.world
    check_agreement(model, session)
    variables = [*model.trainable_weights, *replicas.untrained(model), *replicas.optimizer_variables(model)]
    replicas.check_same_variables(variables, world)
    if proofs.wants_broadcast:
        if place.streams_set and place.restored_random is None:  # not the first fit: each rank continues accumulating
            own = {id(variable) for variable in replicas.accumulators(model)}
            variables = [variable for variable in variables if id(variable) not in own]
        replicas.broadcast(variables, world)
    if prepared.verify and proofs.proof is None and world.size > 1:  # an elastic job may begin with one
        from hvdtrain.keras.state import averaging_proof

        proof = averaging_proof.prove(model, session)
        prepared.say(str(proof))
        return proof
    replicas.check_equal(replicas.replicated(model), world, when="when training starts")
    return proofs.proof


def check_agreement(model: keras.Model, session: KerasSession) -> None:
    """Raises ReplicaError on every rank for the first setting that differs among ranks; collective."""
    settings = _flat(_settings(model, session))
    session.prepared.world.agree_all(
        {key: settings[key] for key in sorted(settings, key=lambda key: ("learning_rate" not in key, key))},
        "every rank must train with the same {}",
        lambda key: (
            "scale the learning rate by the number of ranks, not by the rank; hvdtrain.LR does it for you"
            if "learning_rate" in key
            else "give all ranks the same value: same flags, same code path"
        ),
    )


def _settings(model: keras.Model, session: KerasSession) -> dict[str, Any]:
    prepared = session.prepared
    return {
        "optimizer": [
            {"class": type(optimizer).__name__, **json.loads(json.dumps(optimizer.get_config(), default=repr))}
            for optimizer in optimizers_of(model)
        ],
        "prepare": {
            "order of prepare() calls": prepared.name,
            "compression": prepared.compression,
            "sparse_as_dense": prepared.sparse_as_dense,
            "sync_batchnorm": prepared.sync_batchnorm,
            "verify": prepared.verify,
            "broadcast": session.proofs.wants_broadcast,
            "watch_every": prepared.watch_every,
            "averaging hook": is_hooked(model.optimizer),
        },
        "compile": {
            "run_eagerly": model.run_eagerly,
            "steps_per_execution": model.steps_per_execution,
            "loss": json.dumps(getattr(model, "loss", None), default=_described),
            "loss_weights": json.dumps(getattr(model._compile_loss, "_user_loss_weights", None), default=float),
        },
        "random state": "restored" if session.place.restored_random is not None else "fresh",
        "backend": keras.backend.backend(),
        "dtype policy": model.dtype_policy.name,
        "lr": repr(prepared.lr),
    }


def _described(loss: Any) -> Any:
    """A loss in words without addresses and paths, which are each process's own."""
    code = getattr(loss, "__code__", None)
    if code is not None:
        return f"{loss.__qualname__} {zlib.crc32(code.co_code):08x}"
    try:
        settings = loss.get_config()
    except (AttributeError, NotImplementedError):
        settings = {}
    plain = {key: value for key, value in settings.items() if isinstance(value, (str, int, float))}
    return [type(loss).__name__, *sorted((key, value) for key, value in plain.items() if key != "name")]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts and lists as one dict with dotted keys, without names (they count objects made in the process)."""
    if not isinstance(value, (dict, list)):
        return {prefix: value}
    out: dict[str, Any] = {}
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if key != "name":
            out.update(_flat(item, f"{prefix}.{key}" if prefix else str(key)))
    return out
