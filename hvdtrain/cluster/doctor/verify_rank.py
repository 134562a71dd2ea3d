"""A rank of `hvdtrain verify`: trains the toy in one framework, compares all ranks' numbers, prints the findings.

    python -m hvdtrain.cluster.doctor.verify_rank torch|keras LIMIT_S [EXPECTED_SIZE]

Rank 0 prints the findings as a line of JSON. Exit code 1: a check failed. After LIMIT_S seconds the rank ends itself
with exit code 124, because it waits in vain.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import hvdtrain
from hvdtrain.core.launchers import Detected
from hvdtrain.horovod_build import prove_rank
from hvdtrain.record import stats
from hvdtrain.world import startup
from hvdtrain.world.world import World

if TYPE_CHECKING:
    from numpy import ndarray as Array

INPUTS, OUTPUTS, BATCH, STEPS, RATE = 5, 3, 8, 10, 0.25
# of the largest change of a weight: float32 is off by 1e-6, GPUs that compute with 10 bits (TF32) by 1e-3; ranks that
# do not average are off by 0.1 and more
TOLERANCE = 5e-3


@dataclass
class Measured:
    """The measurements of one rank."""

    card: dict[str, Any]  # rank, size, local_rank, local_size, host, pid, devices
    own_start: Array  # weights before the broadcast, of shape (INPUTS + 1, OUTPUTS): the last row is the bias
    start: Array  # weights that the training began with
    first: Array  # after the first step
    last: Array  # after the last step
    skipped: Array  # after a first step of the same model by an optimizer that does not average
    proof: str  # hvdtrain's own proof
    versions: dict[str, str] = field(default_factory=dict)


def samples(rank: int) -> tuple[Array, Array]:
    """Returns a rank's inputs (STEPS x BATCH, INPUTS) and targets (STEPS x BATCH, OUTPUTS), float32."""
    import numpy as np

    random = np.random.default_rng([20170201, rank])
    x = random.normal(size=(STEPS * BATCH, INPUTS))
    # one map for all ranks, so that the loss can fall; an offset for each, so that their gradients differ
    truth = np.random.default_rng(20170201).normal(size=(INPUTS, OUTPUTS))
    y = x @ truth + (rank + 1) + 0.1 * random.normal(size=(STEPS * BATCH, OUTPUTS))
    return x.astype(np.float32), y.astype(np.float32)


def own_start(rank: int) -> Array:
    """Returns a rank's own weights before the broadcast, float32."""
    import numpy as np

    return np.random.default_rng([42, rank]).normal(size=(INPUTS + 1, OUTPUTS)).astype(np.float32)


def batch_of(step: int) -> slice:
    """Returns the rows of a step's batch."""
    return slice(step * BATCH, (step + 1) * BATCH)


def one_process(start: Array, ranks: Sequence[int], steps: int) -> Array:
    """Returns the weights after `steps` steps of one process, float64, whose batch is those of all `ranks` together."""
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


def train_torch(card: dict[str, Any]) -> Measured:
    """Trains with hvdtrain.torch, as one rank; collective."""
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
    last, once = _torch_weights(model), _torch_weights(alone)
    return Measured(card, own_start(rank), start, first, last, once, proof, {"torch": torch.__version__})


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
    """Trains with hvdtrain.keras, as one rank; collective."""
    import keras

    import hvdtrain.keras as hvk

    rank = card["rank"]
    x, y = samples(rank)
    model = hvk.prepare(_keras_model(own_start(rank)))
    seen: list[Array] = []  # before the first step, and after each
    recorder = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: seen.extend([] if seen else [_keras_weights(model)]),
        on_train_batch_end=lambda batch, logs: seen.append(_keras_weights(model)),
    )
    settings: dict[str, Any] = {"batch_size": BATCH, "epochs": 1, "shuffle": False, "verbose": 0}
    model.fit(x, y, callbacks=[*hvk.callbacks(model), recorder], **settings)
    proof = str(hvk.verify(model))
    alone = _keras_model(seen[0])
    alone.train_on_batch(x[batch_of(0)], y[batch_of(0)])
    versions = {"keras": keras.__version__, "backend": keras.backend.backend()}
    return Measured(card, own_start(rank), seen[0], seen[1], seen[-1], _keras_weights(alone), proof, versions)


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


TRAIN = {"torch": train_torch, "keras": train_keras}


@dataclass(frozen=True)
class ToyCheck:
    """The verdict of one check."""

    name: str
    ok: bool  # it holds, and the check would have seen it if it did not
    message: str


def checks(ranks: Sequence[Measured], expected_size: int | None = None) -> list[ToyCheck]:
    """Returns all checks of one framework; `ranks` in rank order, `expected_size` as the user asked for."""
    return [distinct(ranks, expected_size), broadcast(ranks), averaging(ranks), training(ranks), replicas(ranks)]


def distinct(ranks: Sequence[Measured], expected_size: int | None = None) -> ToyCheck:
    """Checks that every rank is a separate process, knows its place, and shares no device on its host."""
    cards = [rank.card for rank in ranks]
    size = len(cards) if expected_size is None else expected_size
    wrong = [f"rank {card['rank']} reports {card['size']} ranks" for card in cards if card["size"] != size]
    numbers = [card["rank"] for card in cards]
    wrong += [f"the ranks are {numbers}"] * (numbers != list(range(size)))
    processes = {(card["host"], card["pid"]) for card in cards}
    wrong += [f"{len(processes)} processes"] * (len(processes) != size)
    hosts = defaultdict(list)
    for card in cards:
        hosts[card["host"]].append(card)
    for host, its in hosts.items():
        local = [card["local_rank"] for card in its]
        if sorted(local) != list(range(len(its))) or any(card["local_size"] != len(its) for card in its):
            wrong.append(f"on {host} the local ranks are {local} of {[card['local_size'] for card in its]}")
        devices = [device for card in its for device in card["devices"]]
        if len(set(devices)) != len(devices):
            wrong.append(f"on {host} ranks share GPUs: {devices}")
    places = ", ".join(f"{host}: {len(its)}" for host, its in hosts.items())
    shown = f"{len(cards)} on {len(hosts)} host(s) ({places}), each a process of its own"
    return ToyCheck("ranks", not wrong, "; ".join(wrong) or shown)


def broadcast(ranks: Sequence[Measured]) -> ToyCheck:
    """Checks that all ranks begin with rank 0's weights, although each had different ones."""
    import numpy as np

    root = ranks[0].own_start
    wrong = [str(rank) for rank, its in enumerate(ranks) if not np.array_equal(its.start, root)]
    seen = sum(not np.array_equal(its.own_start, root) for its in ranks)
    if wrong:
        return ToyCheck("broadcast", False, f"rank(s) {', '.join(wrong)} did not begin with rank 0's weights")
    if seen != len(ranks) - 1:
        return ToyCheck("broadcast", False, "ranks had the same weights before: nothing could be seen")
    return ToyCheck("broadcast", True, f"{seen} rank(s) had other weights, and began with rank 0's, bit for bit")


def averaging(ranks: Sequence[Measured]) -> ToyCheck:
    """The first step uses the mean of all ranks' gradients; a step that does not would be seen."""
    root = ranks[0].own_start
    mean = one_process(root, range(len(ranks)), 1)
    off = [_off(its.first, mean, root) for its in ranks]
    skipped = [_off(its.skipped, mean, root) for its in ranks]
    shown = f"off by {max(off):.1g} of the mean of the ranks' gradients, computed apart"
    if len(ranks) == 1:
        return ToyCheck("averaging", off[0] <= TOLERANCE, f"{shown}; one rank: nothing to average")
    if not all(value <= TOLERANCE for value in off):  # NaN is not <=
        each = ", ".join(f"rank {rank}: {value:.2g}" for rank, value in enumerate(off))
        own = all(_off(its.first, its.skipped, root) <= TOLERANCE for its in ranks)
        return ToyCheck("averaging", False, f"off the mean by {each}" + "; every rank used its own gradient" * own)
    if not all(value > TOLERANCE for value in skipped):
        return ToyCheck("averaging", False, f"a step without averaging is off by {min(skipped):.1g} only: not seen")
    return ToyCheck("averaging", True, f"{shown}; a step that skips the averaging is off by {min(skipped):.2g}: seen")


def training(ranks: Sequence[Measured]) -> ToyCheck:
    """The whole training is that of one process with the batches of all ranks together; and the loss falls."""
    import numpy as np

    root, data = ranks[0].own_start, [samples(rank) for rank in range(len(ranks))]
    wanted = one_process(root, range(len(ranks)), STEPS)
    off = [_off(its.last, wanted, root) for its in ranks]
    first, last = (
        np.mean([np.square(x @ weights[:-1] + weights[-1] - y) for x, y in data]) for weights in (root, ranks[0].last)
    )
    shown = f"{STEPS} steps, off by {max(off):.1g} of one process with the whole batch; loss {first:.2f} -> {last:.2f}"
    return ToyCheck("training", all(value <= TOLERANCE for value in off) and bool(last < first / 2), shown)


def replicas(ranks: Sequence[Measured]) -> ToyCheck:
    """Checks that all ranks end with the same weights, bit for bit, and that the check detects one changed bit."""
    last = [its.last for its in ranks]
    wrong = unequal(last)
    if wrong:
        return ToyCheck("replicas", False, f"rank(s) {', '.join(map(str, wrong))} ended with other weights than rank 0")
    changed = last[-1].copy()
    changed.view("uint8").flat[0] ^= 1
    if unequal([last[0], changed]) != [1]:
        return ToyCheck("replicas", False, "one changed bit was not seen")
    return ToyCheck("replicas", True, f"equal on {len(ranks)} rank(s), bit for bit; one changed bit is seen")


def unequal(weights: Sequence[Array]) -> list[int]:
    """Returns the ranks whose weights differ from rank 0's, in any bit."""
    return [rank for rank, its in enumerate(weights) if its.tobytes() != weights[0].tobytes()]


def _off(weights: Array, wanted: Array, start: Array) -> float:
    """Largest difference from `wanted`, as part of the largest change that it makes to a weight."""
    import numpy as np

    change = float(np.abs(wanted.astype(np.float64) - start).max())
    gap = np.abs(weights.astype(np.float64) - wanted)
    return float(gap.max()) / change if np.isfinite(gap).all() and change else float("nan")


PROGRAM = "hvdtrain.cluster.doctor.verify_rank"
MARK = "HVDTRAIN-VERIFY "
FAILED = 1


def main() -> int:
    expected_size = int(sys.argv[3]) if len(sys.argv) > 3 else None

    def report(found: dict[str, Any]) -> None:
        print(MARK + json.dumps(found), flush=True)

    return 0 if train(sys.argv[1], float(sys.argv[2]), report, expected_size) else FAILED


def train(
    framework: str, limit_s: float, report: Callable[[dict[str, Any]], None], expected_size: int | None = None
) -> bool:
    """Trains as one rank; `report` gets what was found on rank 0. Returns True if all checks hold; collective."""
    prove_rank.end_after(limit_s)
    found: list[ToyCheck] = []

    def work(detected: Detected) -> None:
        needed = _modules(framework, detected)
        startup.find_modules(needed)
        startup.share_cores(detected)
        startup.import_modules(needed)
        with hvdtrain.init(framework) as world:  # type: ignore[arg-type]
            started = time.perf_counter()
            ranks = world.gather(TRAIN[framework](card(world)))
            found.extend(checks(ranks, expected_size))
            if world.is_main:
                report({
                    "framework": framework,
                    "versions": ranks[0].versions | stats.versions("hvdtrain", "horovod"),
                    "launcher": world.launcher,
                    "engine": world.engine,
                    "ranks": [its.card for its in ranks],
                    "checks": [asdict(check) for check in found],
                    "proof": ranks[0].proof,
                    "ok": all(check.ok for check in found),
                    "training_seconds": round(time.perf_counter() - started, 3),
                })  # fmt: skip
            world.barrier()  # a launcher ends all ranks with the first that fails: none before rank 0 has spoken

    startup.run_program(PROGRAM, work)
    return all(check.ok for check in found)


def card(world: World) -> dict[str, Any]:
    """Returns this rank's identity. A GPU is an index and CUDA_VISIBLE_DEVICES, which may differ from rank to rank."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    return {
        "rank": world.rank, "size": world.size, "local_rank": world.local_rank, "local_size": world.local_size,
        "host": socket.gethostname(), "pid": os.getpid(), "devices": [f"{index} of {seen}" for index in world.devices],
    }  # fmt: skip


def _modules(framework: str, detected: Detected) -> dict[str, str]:
    if framework == "torch":
        return startup.torch_modules("auto", detected, torchvision=False)
    if not os.environ.get("KERAS_BACKEND"):
        os.environ["KERAS_BACKEND"] = "tensorflow" if importlib.util.find_spec("tensorflow") else "torch"
    return startup.keras_modules(os.environ["KERAS_BACKEND"], detected)


if __name__ == "__main__":
    sys.exit(main())
