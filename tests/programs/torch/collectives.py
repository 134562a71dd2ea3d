"""hvt.reduce, gather and broadcast of tensors that every rank knows all of."""

import math

import torch

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain import ConfigError, ReplicaError


def refused(call, kind, *words):
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError("not refused")


with hvdtrain.init("torch") as world:

    def of(rank):
        return torch.tensor([[1.5, -2.0], [rank, 10.0**rank]], dtype=torch.float64)

    ranks, mine = range(world.size), of(world.rank)
    every = [of(rank) for rank in ranks]
    before = mine.clone()
    for op, wanted in (
        ("mean", sum(every) / world.size),
        ("sum", sum(every)),
        ("min", torch.stack(every).amin(0)),
        ("max", torch.stack(every).amax(0)),
    ):
        assert torch.equal(hvt.reduce(mine, op), wanted), op
    assert torch.equal(mine, before)
    whole = hvt.reduce(torch.tensor(world.rank + 1))
    assert whole.item() == math.floor(sum(rank + 1 for rank in ranks) / world.size) and whole.dtype == torch.int64
    assert torch.equal(hvt.reduce(mine.t()), (sum(every) / world.size).t())
    assert hvt.reduce(torch.tensor(1.0 + world.rank, dtype=torch.bfloat16), "sum").item() == sum(1 + r for r in ranks)

    rows = torch.full((world.rank, 2), world.rank)  # none of rank 0
    assert hvt.gather(rows).tolist() == [[rank, rank] for rank in ranks for _ in range(rank)]
    assert torch.equal(hvt.broadcast(mine, world.size - 1), every[-1]) and torch.equal(mine, before)

    needs = torch.ones(2, requires_grad=True)
    for call in (hvt.reduce, hvt.gather, hvt.broadcast):
        refused(lambda call=call: call(needs * 2), ConfigError, "has no gradient")
        with torch.no_grad():
            assert not call(needs).requires_grad
        assert not call(needs.detach()).requires_grad
    refused(lambda: hvt.reduce(mine, "median"), ConfigError, "op must be one of mean, sum, min, max")
    refused(lambda: hvt.gather(torch.tensor(1.0)), ConfigError, "reshape(1)")
    if world.size > 1:
        refused(lambda: hvt.reduce(torch.ones(2 + world.rank)), ReplicaError, "(2,)", "(3,)")
        refused(lambda: hvt.broadcast(torch.ones(2 + world.rank)), ReplicaError, "(2,)", "(3,)")
    world.on_main(print, "right")
