"""What the programs of Horovod's own Keras wrapper share, on both backends: data, models, and what is asked of both.

On PyTorch TensorFlow is blocked, as where it is not installed.
"""

from __future__ import annotations

import copy
import json
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import keras
import numpy as np

if common.BACKEND == "torch":
    common.block("tensorflow", "tf_keras")

import horovod.keras as hvd

O = keras.optimizers  # noqa: E741
Mse = keras.losses.MeanSquaredError
L = keras.layers
SAMPLES, BATCH = 24, 12
RNG = np.random.default_rng(0)
X, WORDS, Y = RNG.normal(size=(SAMPLES, 5)), RNG.integers(0, 50, (SAMPLES, 4)), RNG.normal(size=(SAMPLES, 2))
PLAIN: dict[str, Any] = {}  # losses and weights of plain Keras, by model and optimizer


def dense(kind: type = keras.Sequential, bias: bool = False) -> Any:
    """Of two variables, or four: Horovod's function of each optimizer is traced for each."""
    keras.utils.set_random_seed(1)
    return kind([keras.Input((5,)), L.Dense(8, activation="tanh", use_bias=bias), L.Dense(2, use_bias=bias)])


def biased() -> Any:
    return dense(bias=True)


def words() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,)), L.Embedding(50, 3), L.Flatten(), L.Dense(2, use_bias=False)])


def compiled(model: Any, optimizer: Any, traced: bool = False) -> Any:
    """On TensorFlow tracing takes longer than these steps: few need it."""
    eager = common.BACKEND == "tensorflow" and not traced
    model.compile(optimizer(model) if callable(optimizer) else optimizer, Mse(), jit_compile=False, run_eagerly=eager)
    return model


def mine(data: np.ndarray) -> np.ndarray:
    """This rank's samples, so that the ranks' batches make up those of one process."""
    each = BATCH // hvd.size()
    return data.reshape(-1, hvd.size(), each, *data.shape[1:])[:, hvd.rank()].reshape(-1, *data.shape[1:])


def numbers(value: Any) -> np.ndarray:
    value = getattr(value, "value", value)
    return np.asarray(value.detach() if hasattr(value, "detach") else value)


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


def tensor(*values: float) -> Any:
    return keras.ops.convert_to_tensor(values, dtype="float64")


def fitted(model: Any, x: Any, y: Any, batch: int, callbacks: Any = (), epochs: int = 1) -> Any:
    """Returns the history."""
    return model.fit(x, y, batch_size=batch, shuffle=False, epochs=epochs, verbose=0, callbacks=list(callbacks)).history


def gap(ours: Any, plain: Any, make: Callable[[], Any] = dense, x: np.ndarray = X, *, traced: bool = False) -> float:
    """Of the weights of ranks and of one process; on TensorFlow of the losses as well."""
    model, name = compiled(make(), ours, traced), str((make, plain.get_config()))
    metrics = [hvd.callbacks.MetricAverageCallback()] if common.BACKEND == "tensorflow" else []
    losses = fitted(model, mine(x), mine(Y), BATCH // hvd.size(), metrics)["loss"]
    if name not in PLAIN:
        other = compiled(make(), plain)
        PLAIN[name] = fitted(other, x, Y, BATCH)["loss"], other.get_weights()
    wanted, weights = PLAIN[name]
    return apart([*model.get_weights(), *([losses] * len(metrics))], [*weights, *([wanted] * len(metrics))])


def loaded(folder: Path) -> dict[str, Any]:
    """A saved model is one of plain Keras; loaded by Horovod it goes on as one process."""
    each, file = BATCH // hvd.size(), folder / "model.keras"
    model, same = compiled(dense(), hvd.DistributedOptimizer(O.Adam(0.01))), compiled(dense(), O.Adam(0.01))
    fitted(model, mine(X), mine(Y), each)
    fitted(same, X, Y, BATCH)
    if hvd.rank() == 0:
        model.save(file)
        same.save(folder / "plain.keras")
    hvd.allreduce(np.zeros(1), name="saved")
    ours, plain = hvd.load_model(str(file)), keras.saving.load_model(file)
    fitted(plain, X, Y, BATCH)
    fitted(ours, mine(X), mine(Y), each)
    kinds = [saved_optimizer(folder / name) for name in ("model.keras", "plain.keras")]
    return {"gap": apart(ours.get_weights(), plain.get_weights()), "plain": kinds[0] == kinds[1] and len(kinds[0]) > 3}


def saved_optimizer(file: Path) -> dict[str, Any]:
    """What the file says of it, but for the number in its name, and where Keras has its class."""
    found: dict[str, Any] = json.loads(zipfile.ZipFile(file).read("config.json"))["compile_config"]["optimizer"]
    found["config"].pop("name")
    if common.BACKEND == "tensorflow" and found["module"] == "keras.src.optimizers.adam":
        found |= {"module": "keras.optimizers", "registered_name": None}
    return found


def local_layer(gradients: Callable[..., list[np.ndarray]]) -> dict[str, float]:
    """One step with a layer of each rank's own, whose gradients are divided by the number of ranks, or not."""
    found, rate = {}, 0.1
    for name, scaled in {"scaled": True, "not scaled": False}.items():
        model = dense()
        start, own, every = model.get_weights(), gradients(model, mine(X), mine(Y)), gradients(model, X, Y)
        own = [gradient / (hvd.size() if scaled else 1) for gradient in own]
        local = {"local_layers": model.layers[0], "scale_local_gradients": scaled}
        compiled(model, hvd.PartialDistributedOptimizer(O.SGD(rate), **local)).train_on_batch(mine(X), mine(Y))
        wanted = [w - rate * g for w, g in zip(start, [*own[:1], *every[1:]], strict=True)]
        found[name] = apart(model.get_weights(), wanted)
        found["all averaged"] = apart(model.get_weights(), [w - rate * g for w, g in zip(start, every, strict=True)])
    return found


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
    """A step, a copy, a step of the copy: as one process takes them. All but a deep copy have the first weights."""
    ours = compiled(dense(), hvd.DistributedOptimizer(O.SGD(0.05), op=hvd.Sum))
    plain = compiled(dense(), O.SGD(0.05 * hvd.size()))
    ours.train_on_batch(mine(X), mine(Y))
    configured, wanted = dense(), []
    configured.compile_from_config(ours.get_compile_config())
    found = {
        "compile_from_config": configured, "deepcopy": copy.deepcopy(ours),
        "pickle, optimizer": compiled(dense(), pickle.loads(pickle.dumps(ours.optimizer))),
    }  # fmt: skip
    for model in found.values():
        model.train_on_batch(mine(X), mine(Y))
    for _ in range(2):
        plain.train_on_batch(X, Y)
        wanted.append(plain.get_weights())
    return {name: apart(model.get_weights(), wanted[name == "deepcopy"]) for name, model in found.items()}


def kept() -> dict[str, float]:
    """What an optimizer knows beside its configuration: state, and a rate that is a function."""
    gradient = tensor(hvd.rank() * 2.0 / (hvd.size() - 1))
    (ours, plain), first, second = variables([0.0], [0.0]), O.SGD(0.1, momentum=0.9), O.SGD(0.1, momentum=0.9)
    for _ in range(2):
        first.apply([tensor(1.0)], [ours])
        second.apply([tensor(1.0)], [plain])
    hvd.DistributedOptimizer(first).apply([gradient], [ours])
    second.apply([tensor(1.0)], [plain])
    (other,) = variables([0.0])
    hvd.DistributedOptimizer(O.SGD(lambda: 0.5)).apply([gradient], [other])
    return {"built": apart([ours], [plain]), "a function for a rate": apart([other], [[-0.5]])}


def one_more() -> float:
    """Rank 0 makes an optimizer more."""
    if hvd.rank() == 0:
        hvd.DistributedOptimizer(O.SGD(0.1))
    (ours,), optimizer = variables([0.0]), hvd.DistributedOptimizer(O.SGD(1.0))
    optimizer.apply([tensor(hvd.rank() + 1.0)], [ours])
    return apart([ours], [[-(hvd.size() + 1) / 2]])


def callbacks() -> dict[str, Any]:
    """Different weights, broadcast; rates that warm up and fall; no correction of momentum, which is said."""
    rates, model = common.Rates(), dense()
    model.set_weights([w + hvd.rank() for w in model.get_weights()])
    compiled(model, hvd.DistributedOptimizer(O.SGD(0.2, momentum=0.9)))
    schedule = hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.2, multiplier=0.1, start_epoch=3)
    warm = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.2, warmup_epochs=3, steps_per_epoch=SAMPLES // BATCH)
    alone: list[float] = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: alone.append(logs["loss"]))
    metrics = hvd.callbacks.MetricAverageCallback()
    ours = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), note, metrics, warm, schedule, rates]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        averaged = fitted(model, mine(X), mine(Y), BATCH // hvd.size(), ours, 6)["loss"]
    every, losses = (numbers(hvd.allgather(of[None])) for of in (model.get_weights()[0], np.array(alone)))
    told = sum("momentum_correction" in str(one.message) for one in said)
    found = {"rates": rates.seen, "apart": apart([every[0]], [every[-1]]), "told": told}
    return found | {"losses": apart([losses.mean(0)], [averaged]), "losses apart": float(np.ptp(losses, axis=0).min())}


def best_checkpoint(folder: Path) -> list[float]:
    """What rank 0 kept: the weights of the best epoch, which is not the last."""
    model, best = compiled(dense(), O.SGD(0.01)), hvd.callbacks.BestModelCheckpoint(monitor="loss")
    best.filepath = str(folder / "best.keras")
    worse = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 if epoch < 2 else 1e3)
    seen: list[Any] = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(model.get_weights()))
    fitted(model, X, Y, BATCH, [worse, keep, *([best] if hvd.rank() == 0 else [])], 3)
    hvd.allreduce(np.zeros(1), name="kept")
    weights = keras.saving.load_model(best.filepath).get_weights()
    return [apart(weights, one) for one in seen[1:]]


def first_step() -> float:
    """Other weights on each rank before they are broadcast: the first step is rank 0's, from all samples."""
    ours, plain = dense(), dense()
    ours.set_weights([weight + hvd.rank() for weight in ours.get_weights()])
    compiled(ours, hvd.DistributedOptimizer(O.Adam(0.1)))
    compiled(plain, O.Adam(0.1))
    fitted(ours, mine(X), mine(Y), SAMPLES, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    fitted(plain, X, Y, SAMPLES)
    return apart(ours.get_weights(), plain.get_weights())


def elastic() -> dict[str, Any]:
    model = compiled(dense(), O.Adam(0.01))
    model.optimizer.build(model.trainable_variables)
    model.set_weights([w * 0 + 1 + hvd.rank() for w in model.get_weights()])
    state = hvd.elastic.KerasState(model, batch=20 + hvd.rank())
    model.optimizer.iterations.assign(5 + hvd.rank())
    state.sync()
    synced, iterations = float(model.get_weights()[0].max()), int(model.optimizer.iterations.numpy())
    model.set_weights([w * 0 + 7 for w in model.get_weights()])
    state.restore()
    found = {"synced": synced, "restored": float(model.get_weights()[0].max()), "batch": state.batch}
    return found | ({"iterations": iterations} if common.BACKEND == "torch" else {})


def overflow_on_one_rank() -> dict[str, Any]:
    """A float16 policy: all ranks skip the step, and have one scale."""
    keras.config.set_dtype_policy("mixed_float16")
    targets = mine(Y).astype("float32")
    if hvd.rank() == 1:
        targets[3] = 1e30
    model = dense()
    model.compile(hvd.DistributedOptimizer(O.Adam(0.01)), "mse", jit_compile=False)
    fitted(model, mine(X), targets, BATCH // hvd.size())
    found = [model.get_weights()[0], np.float32(model.optimizer.dynamic_scale.numpy())]
    every = [numbers(hvd.allgather(np.asarray(one)[None])) for one in found]
    return {"apart": apart([one[0] for one in every], [one[-1] for one in every]), "scale": float(found[1])}


def report(folder: Path, exact: dict[str, Any], gradients: Callable[..., list[np.ndarray]], **more: Any) -> None:
    """Writes FOLDER/RANK.json, with what both backends are asked."""
    local, saved, seen = local_layer(gradients), loaded(folder), callbacks()
    of_the_best, of_the_last = best_checkpoint(folder)
    differs = {"alone": gap(O.SGD(0.1, momentum=0.9), O.SGD(0.1, momentum=0.9)), "local": local.pop("all averaged")}
    differs |= {"the last": of_the_last, **more.pop("differs", {})}
    exact |= {
        "local": local,
        "loaded": saved.pop("gap"),
        "omitted": omitted(),
        "copies": copies(),
        "first": first_step(),
    }
    exact |= {"one more": one_more(), "callbacks": seen.pop("losses"), "the best": of_the_best}
    fp16 = gap(hvd.DistributedOptimizer(O.SGD(0.1), compression=hvd.Compression.fp16), O.SGD(0.1))
    found = {"exact": flat(exact), "differs": differs, "fp16": fp16, "plain": saved["plain"], "callbacks": seen}
    found |= {"overflow": overflow_on_one_rank(), "elastic": elastic(), **{n: make() for n, make in more.items()}}
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(found))


def flat(gaps: dict[str, Any], place: str = "") -> dict[str, float]:
    found = {}
    for name, value in gaps.items():
        found |= flat(value, f"{place}{name}, ") if isinstance(value, dict) else {place + name: value}
    return found
