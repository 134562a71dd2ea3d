"""An engine on two ranks, seen through the protocol of engines only.

Usage: engines.py OUT ENGINE [CASE ...]. Rank 0 writes OUT, JSON: a list, by rank, of what the world is.
"""

from __future__ import annotations

import copy
import sys
import threading
import time
from typing import Any

import torch
from cases import gap, plainly, report, run_cases
from torch import Tensor, nn

import hvdtrain
from hvdtrain.torch.engines import unprepared
from hvdtrain.torch.engines.base import Pass, Transport
from hvdtrain.torch.engines.sync_batchnorm import convert, is_synchronized, sync_batchnorm_mode
from hvdtrain.torch.values.clock import CLOCK
from hvdtrain.world.world import World

DTYPE = torch.float32 if sys.argv[2] == "deepspeed" else torch.float64
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64")


class Branches(nn.Module):
    """Four layers; a forward pass names the ones that take part."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name in "abcd":
            setattr(self, name, nn.Linear(3, 2, bias=False, dtype=dtype))
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=dtype))  # of no dimension

    def forward(self, x: Tensor, which: str) -> Tensor:
        return sum(getattr(self, name)(x).sum() for name in which) * self.scale


def gradients(module: nn.Module) -> dict[str, float | None]:
    """The first number of each weight's gradient."""
    named = ((name.split(".")[0], p.grad) for name, p in module.named_parameters() if "." in name)
    return {name: None if grad is None else float(grad.flatten()[0]) for name, grad in named}


def bound_to(world: World, module: nn.Module, **transport: Any) -> Any:
    return world.comm.bind(module, torch.optim.SGD(module.parameters(), lr=0.0), Transport(**transport))


def summed(bound: Any, loss: Tensor, **sent: Any) -> None:
    bound.backward(loss, Pass(reduce=True, **sent))
    bound.finish()


def case_collectives_take_every_type(world: World) -> None:
    engine = world.comm
    for name in DTYPES:
        values = torch.tensor([engine.rank + 1, 3], dtype=getattr(torch, name))
        assert engine.sum_(values.clone()).tolist() == [3, 6], name
        assert engine.broadcast_(values.clone(), 1).tolist() == [2, 3], name
    assert engine.sum_(torch.tensor([engine.rank == 1, False])).tolist() == [True, False]
    assert engine.sum_(torch.tensor(2.0)).item() == 4.0 and engine.sum_(torch.zeros(0)).tolist() == []
    assert engine.allgather_bytes(b"x" * engine.rank) == [b"", b"x"]
    assert engine.broadcast_bytes(b"from 1" if engine.rank == 1 else None, 1) == b"from 1"


def case_layers_that_take_part_here_and_there(world: World) -> None:
    """a: everywhere; b: one rank, first micro-batch; c: one rank, last; d: nowhere, so None and not zero. Each weight
    is sent alone, in one order on both ranks."""
    module = Branches(DTYPE)
    bound = bound_to(world, module, bucket_bytes=48)
    x = torch.ones(2, 3, dtype=DTYPE)
    for _ in range(2):
        module.zero_grad()
        bound.backward(bound.call(x, "ab" if world.rank == 1 else "a"), Pass(reduce=False))
        extras = torch.tensor([1.0, world.rank], dtype=torch.float64)
        summed(bound, bound.call(x * 10, "a" if world.rank == 0 else "ac"), extras=extras)
        assert gradients(module) == {"a": 44.0, "b": 2.0, "c": 20.0, "d": None} and extras.tolist() == [2.0, 1.0]
        bound.step()
    bound.close()


def case_layers_frozen_and_thawed(world: World) -> None:
    """A layer frozen when the model was bound, trained later; then another one frozen."""
    module = Branches(DTYPE)
    module.b.requires_grad_(False)
    bound = bound_to(world, module)
    x = torch.full((1, 3), world.rank + 1.0, dtype=DTYPE)
    for trained, wanted in (("ac", (3.0, None)), ("abc", (3.0, 3.0)), ("bc", (None, 3.0))):
        module.a.requires_grad_("a" in trained)
        module.b.requires_grad_("b" in trained)
        module.zero_grad()
        summed(bound, bound.call(x, "ab"))
        found = gradients(module)
        assert (found["a"], found["b"]) == wanted
    bound.close()


def case_training_equals_one_process(world: World) -> None:
    """Five updates, uneven batches, large gradients, against one process with all samples; the largest difference."""
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(4, 8, dtype=DTYPE), nn.Tanh(), nn.Linear(8, 3, dtype=DTYPE))
    alone = copy.deepcopy(module)
    sizes = [3 + rank for rank in range(world.size)]
    optimizer, alone_optimizer = (
        torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9, weight_decay=0.01) for m in (module, alone)
    )
    bound = world.comm.bind(module, optimizer, Transport(bucket_bytes=64))
    for _ in range(5):
        x, y = torch.randn(sum(sizes), 4, dtype=DTYPE), 100 * torch.randn(sum(sizes), 3, dtype=DTYPE)
        plainly(alone, alone_optimizer, [(x, y)], lambda model, x, y: nn.functional.mse_loss(model(x), y))
        mine = slice(sum(sizes[: world.rank]), sum(sizes[: world.rank + 1]))
        module.zero_grad()
        loss = nn.functional.mse_loss(bound.call(x[mine]), y[mine])
        summed(bound, loss * (sizes[world.rank] / sum(sizes)))
        bound.step()
    bound.close()
    assert gap(module, alone) <= (1e-6 if world.engine == "deepspeed" else 1e-10)
    momenta = [float(state["momentum_buffer"].abs().max()) for state in optimizer.state_dict()["state"].values()]
    assert max(momenta) > 10, "gradients large enough that clipping at 1 would show"
    assert len(set(world.gather(float(module[0].weight.detach().sum())))) == 1, "replicas differ"


def case_compression(world: World) -> None:
    """Gradients of 1 + 2^-9 on every rank: bfloat16 drops the second term, float16 keeps it."""
    for kind, wanted in ((None, 2.00390625), ("fp16", 2.00390625), ("bf16", 2.0)):
        module = Branches(DTYPE)
        bound = bound_to(world, module, compression=kind)
        summed(bound, bound.call(torch.full((1, 3), 1 + 2**-9, dtype=DTYPE), "a"))
        assert gradients(module)["a"] == wanted, kind
        bound.close()


def case_after_close_the_model_is_plain(world: World) -> None:
    """After `close` the model is as before: plain training on one rank only disturbs nobody, no hooks are left. What is
    still referred to, by a traceback say, has no group, which would end too late."""
    module = Branches(DTYPE)
    bound = bound_to(world, module)
    summed(bound, bound.call(torch.ones(1, 3, dtype=DTYPE), "a"))
    held = list(vars(bound).values())
    bound.close()
    module.zero_grad()
    if world.rank == 0:
        module(torch.ones(1, 3, dtype=DTYPE), "a").backward()
    assert gradients(module)["a"] == (1.0 if world.rank == 0 else None)
    assert not module._forward_hooks and not module._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
    assert not any("process_group" in getattr(one, "__dict__", ()) for one in held)


def case_batch_norm_over_all_ranks(world: World) -> None:
    """Batch norm over uneven batches against one process: all counted, or not the last rank's; twins that are local."""
    engine, found = world.comm, {}
    for kind in ("counted", "uncounted", "plain", "alone"):
        torch.manual_seed(6)
        module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4))
        whole = copy.deepcopy(module.double())
        if kind != "plain":
            convert(module, engine)
        counts = [3 + rank for rank in range(engine.size)]
        counts[-1] *= kind != "uncounted"
        x, y = torch.randn(sum(counts), 2, 4, 4).double() + 3, torch.randn(sum(counts), 4).double()
        expected = whole(x)
        (expected * y).sum().backward()
        start, count = sum(counts[: engine.rank]), counts[engine.rank]
        mine = slice(start, start + count) if count else slice(0, 2)
        with sync_batchnorm_mode("alone" if kind == "alone" else "counted" if count else "uncounted"):
            output = module(x[mine])
        # a batch that does not count has no part in the total, even if its loss is NaN
        ((output * y[mine]).sum() if count else output.sum() * float("nan")).backward()
        grads = [p.grad if count else torch.zeros_like(p) for p in module.parameters()]
        pairs = [(output[:count], expected[mine][:count]), *zip(module.buffers(), whole.buffers(), strict=True)]
        pairs += [(engine.sum_(g.clone()), p.grad) for g, p in zip(grads, whole.parameters(), strict=True)]
        # not Python's max, which overlooks NaN
        found[kind] = float(torch.stack([(a - b).detach().abs().max() for a, b in pairs if a.numel()]).max())
        if kind == "counted":
            batchnorm_afterwards(module, whole, x)
    assert found["counted"] <= 1e-10 and found["uncounted"] <= 1e-10
    assert found["plain"] > 1e-2 and found["alone"] > 1e-2, "the twins, whose ranks are on their own"


def batchnorm_afterwards(module: nn.Module, whole: nn.Module, x: Tensor) -> None:
    """Evaluation, copies and names of a converted model."""
    module.eval()
    whole.eval()
    twin = copy.deepcopy(module).train()
    twin(x[:3])  # on its own: a copy talks to nobody
    with torch.no_grad():
        assert float((module(x) - whole(x)).abs().max()) <= 1e-10
    assert list(module.state_dict()) == list(whole.state_dict())
    assert is_synchronized(module[1]) and not is_synchronized(twin[1])


def case_waiting_for_others_is_communication(world: World) -> None:
    """Seconds of a pass that rank 0 waits for: the last rank begins its backward pass half a second late."""
    module = nn.Linear(3, 2, dtype=DTYPE)
    bound = bound_to(world, module)
    loss = bound.call(torch.ones(1, 3, dtype=DTYPE)).sum()
    world.barrier()
    CLOCK.take()
    CLOCK.enter("other")
    if world.rank == world.size - 1:
        time.sleep(0.5)  # what is measured, not a synchronisation
    CLOCK.enter("backward")
    bound.backward(loss, Pass(reduce=True))
    CLOCK.enter("communication")
    bound.finish()
    CLOCK.enter("other")
    found = CLOCK.take()
    bound.close()
    if world.rank == 0:
        assert found["communication"] > 0.4 and found["backward"] < 0.2, found
    else:
        assert found["communication"] < 0.3, found


def main(out: str, engine: str, *cases: str) -> None:
    with hvdtrain.init("torch", engine=engine) as world:
        unprepared.stop()  # these train without prepare()
        failed = run_cases({name: case for name, case in globals().items() if not cases or name in cases}, world)
        its = [world.rank, world.size, world.local_rank, world.local_size, world.node, world.engine, world.launcher]
        report(world, its, out)
    assert threading.active_count() == 1, threading.enumerate()
    print("done")
    sys.exit(3 if failed else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
