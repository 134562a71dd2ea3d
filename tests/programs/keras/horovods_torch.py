"""Horovod's own Keras wrapper, as the recipe's wheel has it, on Keras 3's PyTorch backend against plain Keras of one
process, in float64, as where TensorFlow is not installed.

usage: horovods_torch.py FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import horovods as both
import keras
import numpy as np
import torch
from horovods import BATCH, SAMPLES, WORDS, Mse, O, X, Y, apart, dense, gap, hvd, mine, numbers, refused, tensor

import horovod.torch as hvd_torch  # isort: skip  # once TensorFlow is blocked


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
    ours, clipped = hvd.DistributedOptimizer, {"global_clipnorm": 0.5}
    twice = {"gradient_accumulation_steps": 2}

    def groups(model: Any) -> Any:
        return ours(O.SGD(0.1), groups=[layer.trainable_weights for layer in model.layers[:1]])

    return {
        "Adam, clipped": gap(ours(O.Adam(0.01, **clipped)), O.Adam(0.01, **clipped)),
        "accumulated": gap(ours(O.SGD(0.1, **twice)), O.SGD(0.1, **twice)),
        "sum": gap(ours(O.SGD(0.1), op=hvd.Sum), O.SGD(0.1 * hvd.size())),
        "predivided": gap(ours(O.SGD(0.1), gradient_predivide_factor=2.0), O.SGD(0.1)),
        "groups of variables": gap(groups, O.SGD(0.1), both.biased),
        "words": gap(ours(O.SGD(0.1)), O.SGD(0.1), both.words, WORDS),
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


def head_gradients(step: int, rank: int) -> list[torch.Tensor | None]:
    """All ranks have the first, even ranks the second, odd ones the third (the other way round in the next step), rank
    0 alone the fourth, none the last."""
    even = (rank + step) % 2 == 0
    there = [True, even, not even, rank == 0, False]
    return [tensor(n + 1, rank + 2) if one else None for n, one in enumerate(there)]


def none_on_some(**settings: Any) -> float:
    ours, wanted = both.variables(*[[1.0, 2.0]] * 5), both.variables(*[[1.0, 2.0]] * 5)
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


def kept() -> dict[str, float]:
    """Gradients stay as given, and the wrapped optimizer is another object."""
    value = hvd.rank() * 2.0 / (hvd.size() - 1)
    (ours,), optimizer, gradient = both.variables([0.0]), O.SGD(0.1, momentum=0.9), tensor(value)
    wrapped = hvd.DistributedOptimizer(optimizer)
    wrapped.apply([gradient], [ours])
    return both.kept() | {"the gradient": apart([gradient], [[value]]), "the same": float(wrapped is not optimizer)}


def bfloat16() -> float:
    """No type of Horovod's operations; and two types in a group."""
    half, whole = keras.Variable([0.0], dtype="bfloat16"), keras.Variable([0.0], dtype="float64")
    optimizer = hvd.DistributedOptimizer(O.SGD(1.0), groups=1)
    optimizer.apply([tensor(2.0 * hvd.rank()).bfloat16(), tensor(2.0 * hvd.rank())], [half, whole])
    return apart([half.value.double(), whole], [[1.0 - hvd.size()]] * 2)


def local_variable() -> float:
    """A variable that is local keeps each rank's value."""
    model, local = dense(), hvd.callbacks.BroadcastGlobalVariablesCallback
    model.compile(hvd.DistributedOptimizer(O.SGD(0.0)), Mse())
    for weight in model.trainable_variables:
        weight.assign(keras.ops.zeros_like(weight) + hvd.rank())
    both.fitted(model, mine(X), mine(Y), SAMPLES, [local(0, local_variables=model.trainable_variables[1])], 1)
    wanted = [hvd.rank() if n == 1 else 0 for n in range(2)]
    return apart([weight.mean() for weight in model.get_weights()], wanted)


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
        (hvd.allreduce(both.variables([1.0 * rank])[0], op=hvd.Sum), [mean * size]),
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
    ours, (one,) = hvd.DistributedOptimizer, both.variables([0.0])
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
    both.common.in_float64()
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    hvd.init()
    nones = {"each": none_on_some(), "groups": none_on_some(groups=2), "of variables": none_on_some(groups=None)}
    exact = {
        "fits": fits(), "None": nones, "sets": in_sets(), "kept": kept(), "bfloat16": bfloat16(), "values": values(),
        "broadcasts": broadcasts(), "local variable": local_variable(),
    }  # fmt: skip
    both.report(folder, exact, gradients, refused=refusals, imported=imported)


def imported() -> list[str]:
    return sorted(name for name in sys.modules if name.startswith(("tensorflow", "horovod.tensorflow")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
