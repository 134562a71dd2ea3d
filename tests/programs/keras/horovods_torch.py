"""Horovod's own Keras wrapper, as the recipe's wheel has it, on Keras 3's PyTorch backend against plain Keras of one
process, in float64, as where TensorFlow is not installed.

usage: horovods_torch.py FOLDER
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import keras
import numpy as np
import torch

common.block("tensorflow", "tf_keras")

import horovod.keras as hvd  # noqa: E402
import horovod.torch as hvd_torch  # noqa: E402

O = keras.optimizers  # noqa: E741
L = keras.layers
SAMPLES, BATCH = 48, 12
RNG = np.random.default_rng(0)
X, WORDS, Y = RNG.normal(size=(SAMPLES, 5)), RNG.integers(0, 50, (SAMPLES, 4)), RNG.normal(size=(SAMPLES, 2))


@keras.saving.register_keras_serializable("horovods_torch")
class Mse(keras.losses.Loss):
    """That of Keras rounds to float32 on PyTorch."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return keras.ops.sum(keras.ops.square(keras.ops.subtract(y_pred, y_true))) / y_pred.shape[0]


class Own(keras.Sequential):
    """A train step of one's own, whose gradients nobody clears but itself."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        variables = self.trainable_variables
        self.zero_grad()
        loss = ((self(x, training=True) - y) ** 2).sum() / len(x)
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply_gradients([(v.value.grad, v) for v in variables])
        return {"loss": loss}


def dense(kind: type = keras.Sequential) -> Any:
    keras.utils.set_random_seed(1)
    return kind([keras.Input((5,)), common.dense(8, activation="tanh"), common.dense(2)])


def words() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,)), L.Embedding(50, 3), L.Flatten(), common.dense(2)])


def mine(data: np.ndarray) -> np.ndarray:
    """This rank's samples, so that the ranks' batches make up those of one process."""
    each = BATCH // hvd.size()
    return data.reshape(-1, hvd.size(), each, *data.shape[1:])[:, hvd.rank()].reshape(-1, *data.shape[1:])


def numbers(value: Any) -> np.ndarray:
    value = getattr(value, "value", value)
    return np.asarray(value.detach() if isinstance(value, torch.Tensor) else value)


def apart(a: Any, b: Any) -> float:
    return max(float(np.abs(numbers(x) - numbers(y)).max()) for x, y in zip(a, b, strict=True))


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def variables(*values: Any) -> list[Any]:
    return [keras.Variable(np.asarray(value, float), dtype="float64") for value in values]


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def fitted(model: Any, optimizer: Any, x: Any, y: Any, batch: int, callbacks: Any = ()) -> Any:
    model.compile(optimizer(model) if callable(optimizer) else optimizer, Mse())
    model.fit(x, y, batch_size=batch, shuffle=False, epochs=2, verbose=0, callbacks=list(callbacks))
    return model


def gap(ours: Any, plain: Any, make: Any = dense, x: np.ndarray = X) -> float:
    one = fitted(make(), ours, mine(x), mine(Y), BATCH // hvd.size())
    return apart(one.get_weights(), fitted(make(), plain, x, Y, BATCH).get_weights())


def by_batches() -> float:
    models = []
    for optimizer, x, y in [(hvd.DistributedOptimizer(O.Adam(0.05)), mine(X), mine(Y)), (O.Adam(0.05), X, Y)]:
        model = dense()
        model.compile(optimizer, Mse())
        for xs, ys in zip(np.split(x, SAMPLES // BATCH), np.split(y, SAMPLES // BATCH), strict=True):
            model.train_on_batch(xs, ys)
        models.append(model.get_weights())
    return apart(*models)


def fits() -> dict[str, float]:
    ours, momentum, clipped = hvd.DistributedOptimizer, {"momentum": 0.9}, {"global_clipnorm": 0.5}
    twice = {"gradient_accumulation_steps": 2}

    def groups(model: Any) -> Any:
        return ours(O.SGD(0.1), groups=[layer.trainable_weights for layer in model.layers[:1]])

    return {
        "SGD with momentum": gap(ours(O.SGD(0.1, **momentum)), O.SGD(0.1, **momentum)),
        "Adam, clipped": gap(ours(O.Adam(0.01, **clipped)), O.Adam(0.01, **clipped)),
        "AdamW, decaying": gap(ours(O.AdamW(0.01, weight_decay=0.3)), O.AdamW(0.01, weight_decay=0.3)),
        "accumulated": gap(ours(O.SGD(0.1, **twice)), O.SGD(0.1, **twice)),
        "sum": gap(ours(O.SGD(0.1), op=hvd.Sum), O.SGD(0.1 * hvd.size())),
        "predivided": gap(ours(O.SGD(0.1), gradient_predivide_factor=2.0), O.SGD(0.1)),
        "two groups": gap(ours(O.SGD(0.1), groups=2), O.SGD(0.1)),
        "two groups, by their old name": gap(ours(O.SGD(0.1), num_groups=2), O.SGD(0.1)),
        "groups of variables": gap(groups, O.SGD(0.1)),
        "words": gap(ours(O.SGD(0.1)), O.SGD(0.1), words, WORDS),
        "words, as dense": gap(ours(O.SGD(0.1), sparse_as_dense=True), O.SGD(0.1), words, WORDS),
        "a step of its own": gap(ours(O.Adam(0.05)), O.Adam(0.05), lambda: dense(Own)),
        "by batches": by_batches(),
    }


def in_sets() -> float:
    """Ranks of even and of odd numbers train two models."""
    each = [[rank for rank in range(hvd.size()) if rank % 2 == odd] for odd in (0, 1)]
    sets = [hvd_torch.add_process_set(ranks) for ranks in each]
    ranks, own = each[hvd.rank() % 2], sets[hvd.rank() % 2]
    x, y = X.reshape(hvd.size(), -1, 5), Y.reshape(hvd.size(), -1, 2)
    model, plain = dense(), dense()
    model.compile(hvd.PartialDistributedOptimizer(O.SGD(0.1), process_set=own), Mse())
    plain.compile(O.SGD(0.1), Mse())
    for _ in range(2):
        model.train_on_batch(x[hvd.rank()], y[hvd.rank()])
        plain.train_on_batch(np.concatenate(x[ranks]), np.concatenate(y[ranks]))
    return apart(model.get_weights(), plain.get_weights())


def gradients(model: Any, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    loss = Mse()(torch.tensor(y), model(torch.tensor(x)))
    return [numbers(g) for g in torch.autograd.grad(loss, [v.value for v in model.trainable_variables])]


def local_layer() -> dict[str, float]:
    """One step with a layer of each rank's own, whose gradients are divided by the number of ranks, or not."""
    found, rate = {}, 0.1
    for name, scaled in {"scaled": True, "not scaled": False}.items():
        model = dense()
        start, own, every = model.get_weights(), gradients(model, mine(X), mine(Y)), gradients(model, X, Y)
        own = [gradient / (hvd.size() if scaled else 1) for gradient in own]
        local = {"local_layers": model.layers[0], "scale_local_gradients": scaled}
        model.compile(hvd.PartialDistributedOptimizer(O.SGD(rate), **local), Mse())
        model.train_on_batch(mine(X), mine(Y))
        wanted = [w - rate * g for w, g in zip(start, [*own[:2], *every[2:]], strict=True)]
        found[name] = apart(model.get_weights(), wanted)
        found["all averaged"] = apart(model.get_weights(), [w - rate * g for w, g in zip(start, every, strict=True)])
    return found


def loaded(folder: Path) -> dict[str, Any]:
    """A saved model is one of plain Keras; loaded by Horovod it goes on as one process."""
    each = BATCH // hvd.size()
    model = fitted(dense(), hvd.DistributedOptimizer(O.Adam(0.01)), mine(X), mine(Y), each)
    same = fitted(dense(), O.Adam(0.01), X, Y, BATCH)
    file = folder / "model.keras"
    if hvd.rank() == 0:
        model.save(file)
        same.save(folder / "plain.keras")
    hvd.allreduce(np.zeros(1), name="saved")
    ours, plain = hvd.load_model(str(file)), keras.saving.load_model(file)
    plain.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    ours.fit(mine(X), mine(Y), batch_size=each, shuffle=False, verbose=0)
    kinds = [saved_optimizer(folder / name) for name in ("model.keras", "plain.keras")]
    return {"gap": apart(ours.get_weights(), plain.get_weights()), "plain": kinds[0] == kinds[1] and len(kinds[0]) > 3}


def saved_optimizer(file: Path) -> dict[str, Any]:
    """What the file says of it, but for the number in its name."""
    found: dict[str, Any] = json.loads(zipfile.ZipFile(file).read("config.json"))["compile_config"]["optimizer"]
    found["config"].pop("name")
    return found


def head_gradients(step: int, rank: int) -> list[torch.Tensor | None]:
    """All ranks have the first, even ranks the second, odd ones the third (the other way round in the next step), rank
    0 alone the fourth, none the last."""
    even = (rank + step) % 2 == 0
    there = [True, even, not even, rank == 0, False]
    return [tensor(n + 1, rank + 2) if one else None for n, one in enumerate(there)]


def none_on_some(**settings: Any) -> float:
    ours, wanted = variables(*[[1.0, 2.0]] * 5), variables(*[[1.0, 2.0]] * 5)
    if "groups" in settings and settings["groups"] is None:
        settings["groups"] = [ours[:2], ours[3:]]
    optimizer, plain = hvd.DistributedOptimizer(O.AdamW(0.1, weight_decay=0.3), **settings), O.AdamW(0.1, 0.3)
    for step in (0, 1, 0, 1):
        optimizer.apply(head_gradients(step, hvd.rank()), ours)
        each = [head_gradients(step, rank) for rank in range(hvd.size())]
        there = [[one for one in of_one if one is not None] for of_one in zip(*each, strict=True)]
        plain.apply([sum(some) / hvd.size() if some else None for some in there], wanted)
    assert np.array_equal(numbers(ours[4]), [1.0, 2.0])
    return apart(ours, wanted)


def omitted() -> float:
    """Variables that a rank does not even name."""
    first, second, third = variables([1.0], [1.0], [1.0])
    optimizer = hvd.DistributedOptimizer(O.SGD(1.0))
    optimizer.build([first, second, third])
    optimizer.apply([tensor(1.0 + hvd.rank())] * 2, [first, second if hvd.rank() == 0 else third])
    others = sum(range(2, hvd.size() + 1))
    means = [(1 + others) / hvd.size(), 1 / hvd.size(), others / hvd.size()]
    return apart([first, second, third], [[1 - mean] for mean in means])


def copies() -> dict[str, float]:
    """A step, a copy, a step of the copy: as one process takes them."""

    def configured(one: Any) -> Any:
        other = dense()
        other.compile_from_config(one.get_compile_config())
        return other

    def by(copied: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def made(one: Any) -> Any:
            other = dense()
            other.compile(copied(one.optimizer), Mse())
            return other

        return made

    def pickled(one: Any) -> Any:
        return pickle.loads(pickle.dumps(one))

    ways = {
        "deepcopy": copy.deepcopy, "pickle": pickled, "compile_from_config": configured,
        "deepcopy, optimizer": by(copy.deepcopy), "pickle, optimizer": by(pickled),
        "deserialize": by(lambda one: O.deserialize(O.serialize(one))),
        "from_config": by(lambda one: type(one).from_config(one.get_config())),
    }  # fmt: skip
    fresh, found = {"deserialize": "compile_from_config", "from_config": "compile_from_config"}, {}
    for name, way in ways.items():
        ours, plain = dense(), dense()
        ours.compile(hvd.DistributedOptimizer(O.SGD(0.05), op=hvd.Sum), Mse())
        plain.compile(O.SGD(0.05 * hvd.size()), Mse())
        ours.train_on_batch(mine(X), mine(Y))
        plain.train_on_batch(X, Y)
        ours, plain = way(ours), ways[fresh.get(name, name)](plain)
        ours.train_on_batch(mine(X), mine(Y))
        plain.train_on_batch(X, Y)
        found[name] = apart(ours.get_weights(), plain.get_weights())
    return found


def kept() -> dict[str, float]:
    """What an optimizer knows beside its configuration: state, a rate that is a function; gradients stay as given."""
    gradient = tensor(hvd.rank() * 2.0 / (hvd.size() - 1))
    (ours, plain), first, second = variables([0.0], [0.0]), O.SGD(0.1, momentum=0.9), O.SGD(0.1, momentum=0.9)
    for _ in range(2):
        first.apply([tensor(1.0)], [ours])
        second.apply([tensor(1.0)], [plain])
    wrapped = hvd.DistributedOptimizer(first)
    wrapped.apply([gradient], [ours])
    second.apply([tensor(1.0)], [plain])
    found = {
        "built": apart([ours], [plain]),
        "the gradient": apart([gradient], [[hvd.rank() * 2.0 / (hvd.size() - 1)]]),
    }
    (ours,) = variables([0.0])
    hvd.DistributedOptimizer(O.SGD(lambda: 0.5)).apply([gradient], [ours])
    return found | {"a function for a rate": apart([ours], [[-0.5]]), "the same": float(wrapped is not first)}


def one_more() -> float:
    """Rank 0 makes an optimizer more."""
    if hvd.rank() == 0:
        hvd.DistributedOptimizer(O.SGD(0.1))
    (ours,), optimizer = variables([0.0]), hvd.DistributedOptimizer(O.SGD(1.0))
    optimizer.apply([tensor(hvd.rank() + 1.0)], [ours])
    return apart([ours], [[-(hvd.size() + 1) / 2]])


def bfloat16() -> float:
    """No type of Horovod's operations; and two types in a group."""
    half, whole = keras.Variable([0.0], dtype="bfloat16"), keras.Variable([0.0], dtype="float64")
    optimizer = hvd.DistributedOptimizer(O.SGD(1.0), groups=1)
    optimizer.apply([tensor(2.0 * hvd.rank()).bfloat16(), tensor(2.0 * hvd.rank())], [half, whole])
    return apart([half.value.double(), whole], [[1.0 - hvd.size()]] * 2)


def callbacks() -> dict[str, Any]:
    """Different weights, broadcast; rates that warm up and fall; no correction of momentum, which is said."""
    rates, model = common.Rates(), dense()
    model.set_weights([w + hvd.rank() for w in model.get_weights()])
    model.compile(hvd.DistributedOptimizer(O.SGD(0.2, momentum=0.9)), Mse())
    schedule = hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.2, multiplier=0.1, start_epoch=3)
    warm = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.2, warmup_epochs=3, steps_per_epoch=4)
    metrics = hvd.callbacks.MetricAverageCallback()
    ours = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), metrics, warm, schedule, rates]
    alone: list[float] = []
    ours.insert(1, keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: alone.append(logs["loss"])))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit = model.fit(mine(X), mine(Y), batch_size=BATCH // hvd.size(), epochs=6, verbose=0, callbacks=ours)
    every = hvd.allgather(model.get_weights()[0][None])
    losses = hvd.allgather(np.array(alone)[None]).numpy()
    told = sum("momentum_correction" in str(one.message) for one in said)
    found = {"rates": rates.seen, "apart": apart([every[0]], [every[-1]]), "told": told}
    found["losses"] = apart([losses.mean(0)], [fit.history["loss"]])
    return found | {"losses apart": float(np.ptp(losses, axis=0).min())}


def first_step() -> dict[str, float]:
    """Other weights on each rank before they are broadcast: the first step is rank 0's, from all samples. A variable
    that is local keeps each rank's value."""
    ours, plain, local = dense(), dense(), hvd.callbacks.BroadcastGlobalVariablesCallback
    ours.set_weights([weight + hvd.rank() for weight in ours.get_weights()])
    ours.compile(hvd.DistributedOptimizer(O.Adam(0.1)), Mse())
    plain.compile(O.Adam(0.1), Mse())
    fits = {"batch_size": SAMPLES, "shuffle": False, "verbose": 0}
    ours.fit(mine(X), mine(Y), callbacks=[local(0)], **fits)
    plain.fit(X, Y, **fits)
    found = {"step": apart(ours.get_weights(), plain.get_weights())}
    for weight in ours.trainable_variables:
        weight.assign(keras.ops.zeros_like(weight) + hvd.rank())
    ours.optimizer.learning_rate = 0.0
    ours.fit(mine(X), mine(Y), callbacks=[local(0, local_variables=ours.trainable_variables[1])], **fits)
    wanted = [hvd.rank() if n == 1 else 0 for n in range(4)]
    return found | {"local": apart([weight.mean() for weight in ours.get_weights()], wanted)}


def best_checkpoint(folder: Path) -> list[float]:
    """What rank 0 kept: the weights of the best epoch, which is not the last."""
    model, best = dense(), hvd.callbacks.BestModelCheckpoint(monitor="loss")
    best.filepath = str(folder / "best.keras")
    worse = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 if epoch < 2 else 1e3)
    model.compile(O.SGD(0.01), Mse())
    seen: list[Any] = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(model.get_weights()))
    both = [worse, keep, *([best] if hvd.rank() == 0 else [])]
    model.fit(X, Y, batch_size=BATCH, shuffle=False, epochs=3, verbose=0, callbacks=both)
    hvd.allreduce(np.zeros(1), name="kept")
    weights = keras.saving.load_model(best.filepath).get_weights()
    return [apart(weights, one) for one in seen[1:]]


def elastic() -> dict[str, Any]:
    model = dense()
    model.compile(O.Adam(0.01), Mse())
    model.set_weights([w * 0 + 1 + hvd.rank() for w in model.get_weights()])
    state = hvd.elastic.KerasState(model, batch=20 + hvd.rank())
    model.optimizer.iterations.assign(5 + hvd.rank())
    state.sync()
    found = {"synced": float(model.get_weights()[0].max()), "iterations": int(model.optimizer.iterations.numpy())}
    model.set_weights([w * 0 + 7 for w in model.get_weights()])
    state.restore()
    return found | {"restored": float(model.get_weights()[0].max()), "batch": state.batch}


def overflow_on_one_rank() -> dict[str, Any]:
    """A float16 policy: all ranks skip the step, and have one scale."""
    keras.config.set_dtype_policy("mixed_float16")
    targets = mine(Y).astype("float32")
    if hvd.rank() == 1:
        targets[3] = 1e30
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((5,)), L.Dense(8, activation="tanh"), L.Dense(2)])
    model.compile(hvd.DistributedOptimizer(O.Adam(0.01)), "mse")
    model.fit(mine(X), targets, batch_size=BATCH // hvd.size(), shuffle=False, verbose=0)
    found = [model.get_weights()[0], np.float32(model.optimizer.dynamic_scale.numpy())]
    every = [hvd.allgather(np.asarray(one)[None]).numpy() for one in found]
    return {"apart": apart([one[0] for one in every], [one[-1] for one in every]), "scale": float(found[1])}


def values() -> float:
    """Arrays, numbers, tensors and variables."""
    rank, size = hvd.rank(), hvd.size()
    mean = (size - 1) / 2
    through = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (hvd.allreduce(through, op=hvd.Sum) * torch.arange(3.0)).sum().backward()
    found = [
        (through.grad, size * np.arange(3.0)),
        (hvd.allreduce(np.arange(4.0) + rank), np.arange(4.0) + mean),
        (hvd.allreduce(float(rank), name="a number"), mean),
        (hvd.allreduce(variables([1.0 * rank])[0], op=hvd.Sum), [mean * size]),
        (hvd.allreduce(tensor(rank), average=False, compression=hvd.Compression.fp16), [mean * size]),
        (hvd.allgather(np.full((rank + 1, 2), rank)).numpy().sum(), 2 * sum(r * (r + 1) for r in range(size))),
        (hvd.broadcast(tensor(rank + 5.0), size - 1), [size + 4.0]),
        (hvd.reducescatter(np.arange(2.0 * size) + rank), np.arange(2.0 * size)[2 * rank : 2 * rank + 2] + mean),
    ]
    return max(apart([one], [wanted]) for one, wanted in found)


def broadcasts() -> float:
    """All types that variables of Keras have, and tensors that are not contiguous."""
    kinds = ("float64", "float16", "bfloat16", "bool", "uint8", "uint32", "int64")
    sent = [keras.Variable(np.full((2, 3), hvd.rank() + 1), dtype=kind, trainable=False) for kind in kinds]
    sent += [keras.Variable(hvd.rank() + 1.0, dtype="float64"), torch.zeros(0), torch.ones(3, 2).t() + hvd.rank()]
    hvd.broadcast_variables(sent, root_rank=0)
    return max(float((getattr(one, "value", one).detach().double() - 1).abs().sum()) for one in sent)


def refusals() -> dict[str, str]:
    ours, (one,) = hvd.DistributedOptimizer, variables([0.0])
    sparse = ours(O.SGD(1.0))
    return {
        "a scale around it": refused(lambda: O.LossScaleOptimizer(ours(O.SGD(1.0)))),
        "twice": refused(lambda: ours(sparse)),
        "a name": refused(lambda: ours("sgd")),
        "one of PyTorch": refused(lambda: ours(torch.optim.SGD([one.value]))),
        "sparse": refused(lambda: sparse.apply([tensor(1.0).to_sparse()], [one])),
        "a tape": refused(lambda: sparse.compute_gradients(one.value.sum(), [one])),
        "all variables": refused(lambda: hvd.broadcast_global_variables(0)),
        "no layer": refused(lambda: hvd.PartialDistributedOptimizer(O.SGD(1.0), local_layers=["dense"])),
        "no variable": refused(lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables="dense")),
    }


def main(folder: Path) -> None:
    keras.config.set_floatx("float64")
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    hvd.init()
    nones = {"each": none_on_some(), "groups": none_on_some(groups=2), "of variables": none_on_some(groups=None)}
    fp16 = gap(hvd.DistributedOptimizer(O.SGD(0.1), compression=hvd.Compression.fp16), O.SGD(0.1))
    found = {
        "fits": fits(), "alone": gap(O.SGD(0.1, momentum=0.9), O.SGD(0.1, momentum=0.9)), "fp16": fp16,
        "sets": in_sets(), "local": local_layer(), "loaded": loaded(folder), "None": nones | {"omitted": omitted()},
        "copies": copies(), "kept": kept(), "one more": one_more(), "bfloat16": bfloat16(), "callbacks": callbacks(),
        "first": first_step(), "best": best_checkpoint(folder), "elastic": elastic(), "values": values(),
        "broadcasts": broadcasts(), "refused": refusals(), "overflow": overflow_on_one_rank(),
        "imported": sorted(name for name in sys.modules if name.split(".")[0] == "tensorflow"),
    }  # fmt: skip
    found["imported"] += [name for name in sys.modules if name.startswith("horovod.tensorflow")]
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
