"""The toy training of `hvdtrain verify`: its numbers, and the same training by one process, written out in numpy.

A linear map with squared error and plain SGD, so that the reference is a few lines that share nothing with hvdtrain,
the frameworks, or Horovod. Each rank has its own samples, and begins with its own weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy import ndarray as Array

INPUTS, OUTPUTS, BATCH, STEPS, RATE = 5, 3, 8, 10, 0.25


@dataclass
class Measured:
    """What one rank saw.

    Attributes:
        card: who it is: rank, size, local_rank, local_size, host, pid, devices.
        own_start: the weights that it had itself, of shape (INPUTS + 1, OUTPUTS): the last row is the bias.
        start: the weights that it began to train with.
        first, last: after the first and after the last step.
        skipped: after a first step of the same model by an optimizer that does not average.
        proof: what hvdtrain's own proof says.
        versions: of what was used.
    """

    card: dict[str, Any]
    own_start: Array
    start: Array
    first: Array
    last: Array
    skipped: Array
    proof: str
    versions: dict[str, str] = field(default_factory=dict)


def samples(rank: int) -> tuple[Array, Array]:
    """Return a rank's inputs (STEPS x BATCH, INPUTS) and targets (STEPS x BATCH, OUTPUTS), float32."""
    import numpy as np

    random = np.random.default_rng([20170201, rank])
    x = random.normal(size=(STEPS * BATCH, INPUTS))
    # one map for all ranks, so that the loss can fall; an offset for each, so that their gradients differ
    truth = np.random.default_rng(20170201).normal(size=(INPUTS, OUTPUTS))
    y = x @ truth + (rank + 1) + 0.1 * random.normal(size=(STEPS * BATCH, OUTPUTS))
    return x.astype(np.float32), y.astype(np.float32)


def own_start(rank: int) -> Array:
    """Return the weights that a rank has before it hears of the others, float32."""
    import numpy as np

    return np.random.default_rng([42, rank]).normal(size=(INPUTS + 1, OUTPUTS)).astype(np.float32)


def batch_of(step: int) -> slice:
    """Return the rows of a step's batch."""
    return slice(step * BATCH, (step + 1) * BATCH)


def one_process(start: Array, ranks: Sequence[int], steps: int) -> Array:
    """Return the weights after `steps` steps of one process, float64, whose batch is those of all `ranks` together."""
    import numpy as np

    weights = start.astype(np.float64)
    data = [samples(rank) for rank in ranks]
    for step in range(steps):
        x = np.concatenate([x[batch_of(step)] for x, _ in data]).astype(np.float64)
        y = np.concatenate([y[batch_of(step)] for _, y in data]).astype(np.float64)
        x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        # of the mean over samples and outputs of the squared error
        weights -= RATE * 2 * x.T @ (x @ weights - y) / y.size
    return weights


def squared_error(weights: Array, ranks: Sequence[int]) -> float:
    """Return the mean squared error over all ranks' samples."""
    import numpy as np

    errors = [np.square(x @ weights[:-1] + weights[-1] - y) for x, y in map(samples, ranks)]
    return float(np.mean(errors))


def train_torch(card: dict[str, Any]) -> Measured:
    """Train with hvdtrain.torch, as one rank; collective."""
    import torch
    from torch import nn

    import hvdtrain.torch as hvt

    rank = card["rank"]
    model: nn.Module = _torch_model(own_start(rank))
    model, optimizer = hvt.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    proof = str(hvt.verify(model, optimizer))
    device = next(model.parameters()).device
    x, y = (torch.from_numpy(part).to(device) for part in samples(rank))
    start, loss_of, first = _torch_weights(model), nn.MSELoss(), None
    for step in range(STEPS):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model(x[batch_of(step)]), y[batch_of(step)]))
        optimizer.step()
        first = _torch_weights(model) if first is None else first
    alone = _torch_model(start).to(device)
    plain = torch.optim.SGD(alone.parameters(), lr=RATE)
    loss_of(alone(x[batch_of(0)]), y[batch_of(0)]).backward()
    plain.step()
    assert first is not None
    return Measured(
        card, own_start(rank), start, first, _torch_weights(model), _torch_weights(alone), proof,
        {"torch": torch.__version__},
    )  # fmt: skip


def _torch_model(weights: Array) -> Any:
    import torch

    model = torch.nn.Linear(INPUTS, OUTPUTS)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(weights[:-1].T.copy()))
        model.bias.copy_(torch.from_numpy(weights[-1].copy()))
    return model


def _torch_weights(model: Any) -> Array:
    import numpy as np

    weight, bias = (parameter.detach().cpu().numpy() for parameter in model.parameters())
    return np.concatenate([weight.T, bias[None]]).copy()


def train_keras(card: dict[str, Any]) -> Measured:
    """Train with hvdtrain.keras, as one rank; collective."""
    import keras

    import hvdtrain.keras as hvk

    rank = card["rank"]
    x, y = samples(rank)
    model = hvk.prepare(_keras_model(own_start(rank)))
    seen = _recorder()
    settings: dict[str, Any] = {"batch_size": BATCH, "epochs": 1, "shuffle": False, "verbose": 0}
    model.fit(x, y, callbacks=[*hvk.callbacks(model), seen], **settings)
    proof = str(hvk.verify(model))
    alone = _keras_model(seen.weights[0])
    alone.train_on_batch(x[batch_of(0)], y[batch_of(0)])
    versions = {"keras": keras.__version__, "backend": keras.backend.backend()}
    return Measured(
        card, own_start(rank), seen.weights[0], seen.weights[1], seen.weights[-1], _keras_weights(alone), proof,
        versions,
    )  # fmt: skip


def _keras_model(weights: Array) -> Any:
    import keras

    model = keras.Sequential([keras.Input((INPUTS,)), keras.layers.Dense(OUTPUTS)])
    model.set_weights([weights[:-1], weights[-1]])
    model.compile(optimizer=keras.optimizers.SGD(RATE), loss="mse")
    return model


def _keras_weights(model: Any) -> Array:
    import numpy as np

    weight, bias = model.get_weights()
    return np.concatenate([weight, bias[None]])


def _recorder() -> Any:
    """A callback that keeps the weights before the first and after each step."""
    import keras

    class Recorder(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.weights: list[Array] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if not self.weights:
                self.weights.append(_keras_weights(self.model))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.weights.append(_keras_weights(self.model))

    return Recorder()


TRAIN = {"torch": train_torch, "keras": train_keras}
