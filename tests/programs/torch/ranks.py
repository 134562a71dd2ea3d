"""The adapter on several ranks: what must differ on one rank only to be seen by all. usage: ranks.py ENGINE"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from cases import main, quietly, refused, train
from small import data, mlp, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.torch.engines import buffers as _buffers
from hvdtrain.torch.engines.base import Pass
from hvdtrain.torch.update import start
from hvdtrain.torch.update.nonfinite import NonFiniteError


def prepared(model: nn.Module | None = None, samples: int = 32, **options: Any) -> tuple[Any, Any, Any]:
    model = model if model is not None else mlp()
    train = hvt.loader(data(samples), 4)
    return *quietly(model, sgd(model), train, **options), train


def update(model: nn.Module, optimizer: Any, batch: Any) -> None:
    train(model, optimizer, [batch], lambda model, x, y: cross_entropy(model(x), y))


def at_last(world: hvdtrain.World) -> bool:
    return world.rank == world.size - 1


# -- the start ----------------------------------------------------------------------------------------------------
def case_every_rank_starts_from_rank_0(world: hvdtrain.World) -> None:
    model = mlp(norm=True)  # each rank's own values, buffers too
    model[1].running_mean.fill_(world.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if world.is_main:  # and only rank 0 has any optimizer state yet
        cross_entropy(model(data()[0]), data()[1]).backward()
        optimizer.step()
    model, wrapped = hvt.prepare(model, optimizer, verify=False)
    assert len(set(world.gather(hvt.fingerprint(model)))) == 1
    states = world.gather([{k: v.tolist() for k, v in s.items()} for s in wrapped.state.values()])
    assert len(states[0]) == 6 and all(state == states[0] for state in states)


def case_what_rank_0_alone_has_loaded_goes_to_all(world: hvdtrain.World) -> None:
    """Weights, the optimizer's state, and its settings, whose order in a loaded group is another one."""
    plain = mlp()
    before = torch.optim.AdamW(plain.parameters(), lr=0.03)
    cross_entropy(plain(data()[0]), data()[1]).backward()
    before.step()
    saved = copy.deepcopy(before.state_dict())
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if world.is_main:
        model.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(saved)
    model, optimizer = quietly(model, optimizer, hvt.loader(data(), 4))
    found = world.gather((optimizer.param_groups[0]["lr"], [float(s["step"]) for s in optimizer.state.values()]))
    assert found == [(0.03, [1.0] * 4)] * world.size, found
    other = mlp()
    differs = torch.optim.AdamW(other.parameters(), lr=0.1 if world.is_main else 0.2)  # the twin: no rank has loaded
    with refused("optimizer group 0: lr differs", kind=ReplicaError):
        hvt.prepare(other, differs, hvt.loader(data(), 4))


def case_a_forgotten_broadcast_is_caught(world: hvdtrain.World) -> None:
    """The negative twin of the one above."""
    model = mlp()
    with (
        mock.patch.object(start, "broadcast_state", lambda *_: None),
        refused("replicas must be equal", "0.weight of rank(s) ", kind=ReplicaError),
    ):
        hvt.prepare(model, sgd(model))


def case_ranks_that_train_differently_are_refused(world: hvdtrain.World) -> None:
    last = at_last(world)
    model = mlp()
    for options, part in (
        ({"lr": 0.1 * (world.rank + 1)}, "optimizer group 0: lr differs"),
        ({"momentum": 0.9 if last else 0.5}, "momentum"),
    ):
        with refused(part, "rank 0: ", "rank 1: ", kind=ReplicaError):
            hvt.prepare(model, sgd(model, **options))
    with refused("prepare(..., accumulate=)", "rank 1: ", kind=ReplicaError):
        hvt.prepare(model, sgd(model), accumulate=2 if last else 1)
    wide = nn.Linear(4, 3 if last else 5)
    with refused("parameter weight", "(5, 4)", "(3, 4)", kind=ReplicaError):
        hvt.prepare(wide, sgd(wide))
    frozen = mlp()
    frozen[0].requires_grad_(not last)
    with refused("parameter 0.weight", "trained: False", kind=ReplicaError):
        hvt.prepare(frozen, sgd(frozen))


def case_horovods_own_optimizer_is_refused(world: hvdtrain.World) -> None:
    if world.engine != "horovod":
        return
    import horovod.torch as hvd

    model = mlp()
    with refused("Horovod's DistributedOptimizer", kind=ConfigError):
        hvt.prepare(model, hvd.DistributedOptimizer(sgd(model), model.named_parameters()))


# -- the proof ----------------------------------------------------------------------------------------------------
def case_the_proof_leaves_no_trace(world: hvdtrain.World) -> None:
    model, optimizer, train = prepared(mlp(norm=True))
    update(model, optimizer, next(iter(train)))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    weights = [p.detach().clone() for p in model.parameters()]
    with refused("replicas", kind=ReplicaError) if world.size < 2 else contextlib.nullcontext():
        _buffers.synchronize(model, world)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        proof = hvt.verify(model, optimizer)
    assert proof.ranks == world.size and proof.largest_difference < 1e-6 and "averaging proven" in str(proof)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    with refused("prepare() returned together", kind=ConfigError):
        hvt.verify(hvt.unwrap(model), optimizer.wrapped)


@contextmanager
def spoiled_bound(optimizer: Any, how: str) -> Iterator[None]:
    """An engine that does something else than summing gradients."""
    bound, parameters = optimizer.session.engine_model, optimizer.session.gradients.parameters()
    real_backward, real_finish = bound.backward, bound.finish
    own: list[Tensor] = []

    def backward(loss: Tensor, sent: Pass) -> None:
        own[:] = torch.autograd.grad(loss, parameters, retain_graph=True)
        real_backward(loss * (0.5 if how == "averages twice" else 1.0), sent)

    def finish() -> None:
        real_finish()
        if how == "keeps its own":
            for parameter, gradient in zip(parameters, own, strict=True):
                parameter.grad = gradient
        if how == "leaves one out":
            parameters[-1].grad = None

    with mock.patch.object(bound, "backward", backward), mock.patch.object(bound, "finish", finish):
        yield


def case_the_proof_catches_engines_that_do_not_average(world: hvdtrain.World) -> None:
    """The negative twins of the proof."""
    for how, part in (
        ("keeps its own", "every rank kept its own gradient"), ("averages twice", "off by 0.5"),
        ("leaves one out", "off by inf"),
    ):  # fmt: skip
        model, optimizer, _ = prepared()
        with spoiled_bound(optimizer, how), refused("weighted mean", part, kind=ReplicaError):
            hvt.verify(model, optimizer)


# -- the watch ----------------------------------------------------------------------------------------------------
def case_the_watch_names_what_differs(world: hvdtrain.World) -> None:
    model, optimizer, train = prepared(watch_every=2)
    batches = iter(train)
    update(model, optimizer, next(batches))
    if at_last(world):
        model[2].bias.data[0] += 1e-7
    optimizer.backward(cross_entropy(model((batch := next(batches))[0]), batch[1]))
    others = ", ".join(map(str, [world.size - 1]))
    with refused("after update 2", f"2.bias of rank(s) {others} differs", kind=ReplicaError):
        optimizer.step()


def case_a_step_past_the_adapter_is_refused(world: hvdtrain.World) -> None:
    _, optimizer, _ = prepared()
    with refused("the optimizer that prepare() returned", kind=ConfigError):
        optimizer.wrapped.step()


def case_a_restored_learning_rate_is_no_other_hand(world: hvdtrain.World) -> None:
    """A checkpoint sets the rates; the contract sets them anew."""
    model, optimizer, train = prepared(lr=hvdtrain.LR(0.1, 4 * world.size, warmup_samples=16 * world.size))
    batches = iter(train)
    saved = copy.deepcopy(optimizer.state_dict())
    update(model, optimizer, next(batches))
    optimizer.load_state_dict(saved)
    update(model, optimizer, next(batches))
    optimizer.wrapped.param_groups[0]["lr"] = 3.0
    with refused("the learning rate cannot be set elsewhere with lr=", kind=ConfigError):
        update(model, optimizer, next(batches))


# -- NaN ----------------------------------------------------------------------------------------------------------
class Breaks(nn.Module):
    def __init__(self, here: bool) -> None:
        super().__init__()
        self.here = here

    def forward(self, x: Tensor) -> Tensor:
        return x * float("nan") if self.here else x


def case_synchronised_batch_norm_does_not_hang_the_search(world: hvdtrain.World) -> None:
    model = nn.Sequential(nn.Linear(4, 8), Breaks(at_last(world)), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model, optimizer, train = prepared(model, sync_batchnorm=True)
    with refused("first bad layer: 1 (Breaks)", kind=NonFiniteError):
        update(model, optimizer, next(iter(train)))


if __name__ == "__main__":
    main(globals().copy())
