"""Facts about an engine on its ranks, seen through the protocol of engines only.

Usage: engines.py OUT ENGINE [CASE ...]. Rank 0 writes OUT, JSON: a list, by rank, of what each case found.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hvdtrain
from hvdtrain.torch.engines.base import Pass, TorchEngine, Transport
from hvdtrain.torch.engines.sync_batchnorm import convert, is_synchronized, sync_batchnorm_mode
from hvdtrain.torch.values.clock import CLOCK

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


def collectives(engine: TorchEngine, dtype: torch.dtype) -> Any:
    found: dict[str, Any] = {}
    for name in DTYPES:
        values = torch.tensor([engine.rank + 1, 3], dtype=getattr(torch, name))
        summed = engine.sum_(values.clone()).tolist()
        found[name] = [summed, engine.broadcast_(values.clone(), engine.size - 1).tolist()]
    found["bool"] = engine.sum_(torch.tensor([engine.rank == 1, False])).tolist()
    found["scalar"] = engine.sum_(torch.tensor(2.0)).item()
    found["empty"] = engine.sum_(torch.zeros(0)).tolist()
    found["bytes"] = [part.decode() for part in engine.allgather_bytes(b"x" * engine.rank)]
    found["root"] = engine.broadcast_bytes(b"from 1" if engine.rank == 1 else None, 1).decode()
    return found


def branches(engine: TorchEngine, dtype: torch.dtype) -> Any:
    """Layers that take part on some ranks, in some micro-batches, or nowhere; twice, and extras."""
    module = Branches(dtype)
    bound = engine.bind(module, torch.optim.SGD(module.parameters(), lr=0.0), Transport())
    x = torch.ones(2, 3, dtype=dtype)
    found = []
    for _ in range(2):
        module.zero_grad()
        bound.backward(bound.call(x, "ab" if engine.rank == 1 else "a"), Pass(reduce=False))
        extras = torch.tensor([1.0, engine.rank], dtype=torch.float64)
        bound.backward(bound.call(x * 10, "a" if engine.rank == 0 else "ac"), Pass(reduce=True, extras=extras))
        bound.finish()
        found.append([gradients(module), extras.tolist()])
        bound.step()
    bound.close()
    return found


def local(engine: TorchEngine, dtype: torch.dtype) -> Any:
    """The twin: without `reduce` each rank keeps its own."""
    module = Branches(dtype)
    bound = engine.bind(module, torch.optim.SGD(module.parameters(), lr=0.0), Transport())
    bound.backward(bound.call(torch.full((1, 3), engine.rank + 1.0, dtype=dtype), "a"), Pass(reduce=False))
    found = gradients(module)
    bound.close()
    return found


def thaw(engine: TorchEngine, dtype: torch.dtype) -> Any:
    """A layer frozen when the model was bound, trained later; then another one frozen."""
    module = Branches(dtype)
    module.b.requires_grad_(False)
    bound = engine.bind(module, torch.optim.SGD(module.parameters(), lr=0.0), Transport())
    x = torch.full((1, 3), engine.rank + 1.0, dtype=dtype)
    found = []
    for frozen, thawed in ((None, None), (None, module.b), (module.a, None)):
        if frozen is not None:
            frozen.requires_grad_(False)
        if thawed is not None:
            thawed.requires_grad_(True)
        module.zero_grad()
        bound.backward(bound.call(x, "ab"), Pass(reduce=True))
        bound.finish()
        found.append(gradients(module))
    bound.close()
    return found


def forwards(engine: TorchEngine, dtype: torch.dtype) -> Any:
    """Forward passes that no backward pass follows, and several before one: evaluation, losses of two passes."""
    module = Branches(dtype)
    bound = engine.bind(module, torch.optim.SGD(module.parameters(), lr=0.0), Transport())
    x = torch.ones(1, 3, dtype=dtype)
    bound.call(x, "ab")
    with torch.no_grad():
        bound.call(x, "abcd")
    bound.backward(bound.call(x, "a") + bound.call(x, "c"), Pass(reduce=True))
    bound.finish()
    found = gradients(module)
    bound.close()
    return found


def training(engine: TorchEngine, dtype: torch.dtype) -> Any:
    """Five updates, uneven batches, large gradients, against one process with all samples; the largest difference."""
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(4, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 3, dtype=dtype))
    alone = copy.deepcopy(module)
    sizes = [3 + rank for rank in range(engine.size)]
    make = lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9, weight_decay=0.01)  # noqa: E731
    optimizer, alone_optimizer = make(module), make(alone)
    bound = engine.bind(module, optimizer, Transport(bucket_bytes=64))
    for _ in range(5):
        x, y = torch.randn(sum(sizes), 4, dtype=dtype), 100 * torch.randn(sum(sizes), 3, dtype=dtype)
        alone_optimizer.zero_grad()
        nn.functional.mse_loss(alone(x), y).backward()
        alone_optimizer.step()
        mine = slice(sum(sizes[: engine.rank]), sum(sizes[: engine.rank + 1]))
        module.zero_grad()
        loss = nn.functional.mse_loss(bound.call(x[mine]), y[mine])
        bound.backward(loss * (sizes[engine.rank] / sum(sizes)), Pass(reduce=True))
        bound.finish()
        bound.step()
    bound.close()
    pairs = zip(module.parameters(), alone.parameters(), strict=True)
    gap = float(torch.stack([(a - b).detach().abs().max() for a, b in pairs]).max())  # NaN shows
    momenta = [float(state["momentum_buffer"].abs().max()) for state in optimizer.state_dict()["state"].values()]
    return {"gap": gap, "momentum": max(momenta), "sum": float(module[0].weight.detach().sum())}


def compressed(engine: TorchEngine, dtype: torch.dtype) -> Any:
    """Gradients of 1 + 2^-9 on every rank: bfloat16 drops the second term, float16 keeps it."""
    found = {}
    for kind in (None, "fp16", "bf16"):
        module = Branches(dtype)
        bound = engine.bind(module, torch.optim.SGD(module.parameters(), lr=0.0), Transport(compression=kind))
        bound.backward(bound.call(torch.full((1, 3), 1 + 2**-9, dtype=dtype), "a"), Pass(reduce=True))
        bound.finish()
        found[str(kind)] = gradients(module)["a"]
        bound.close()
    return found


def closed(engine: TorchEngine, dtype: torch.dtype) -> Any:
    """After `close` the model is as before: plain training on one rank only disturbs nobody, no hooks are left. What is
    still referred to, by a traceback say, has no group, which would end too late."""
    module = Branches(dtype)
    bound = engine.bind(module, torch.optim.SGD(module.parameters(), lr=0.0), Transport())
    bound.backward(bound.call(torch.ones(1, 3, dtype=dtype), "a"), Pass(reduce=True))
    bound.finish()
    held = list(vars(bound).values())
    bound.close()
    module.zero_grad()
    if engine.rank == 0:
        module(torch.ones(1, 3, dtype=dtype), "a").backward()
    hooks = [*module._forward_hooks, *module._forward_pre_hooks]
    hooks += [hook for p in module.parameters() for hook in (p._post_accumulate_grad_hooks or ())]
    groups = sum("process_group" in getattr(one, "__dict__", ()) for one in held)
    return {"grad": gradients(module)["a"], "hooks": len(hooks), "groups": groups}


def batchnorm(engine: TorchEngine, dtype: torch.dtype) -> Any:
    """Batch norm over uneven batches against one process: all counted, or not the last rank's; twins that are local."""
    found: dict[str, Any] = {}
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
            found |= batchnorm_afterwards(module, whole, x)
    return found


def batchnorm_afterwards(module: nn.Module, whole: nn.Module, x: Tensor) -> dict[str, Any]:
    """Evaluation, copies and names of a converted model."""
    module.eval()
    whole.eval()
    twin = copy.deepcopy(module).train()
    twin(x[:3])  # on its own: a copy talks to nobody
    with torch.no_grad():
        gap = float((module(x) - whole(x)).abs().max())
    return {
        "evaluation": gap,
        "same names": list(module.state_dict()) == list(whole.state_dict()),
        "synchronized": [is_synchronized(layer) for layer in (module[1], twin[1])],
    }


def phases(engine: TorchEngine, dtype: torch.dtype) -> Any:
    """Seconds of a pass that rank 0 waits for: the last rank begins its backward pass half a second late."""
    module = nn.Linear(3, 2, dtype=dtype)
    bound = engine.bind(module, torch.optim.SGD(module.parameters(), lr=0.0), Transport())
    loss = bound.call(torch.ones(1, 3, dtype=dtype)).sum()
    engine.barrier()
    CLOCK.take()
    CLOCK.enter("other")
    if engine.rank == engine.size - 1:
        time.sleep(0.5)  # what is measured, not a synchronisation
    CLOCK.enter("backward")
    bound.backward(loss, Pass(reduce=True))
    CLOCK.enter("communication")
    bound.finish()
    CLOCK.enter("other")
    found = CLOCK.take()
    bound.close()
    return found


CASES = (collectives, branches, local, thaw, forwards, training, compressed, closed, batchnorm, phases)


def main(out: str, name: str, *cases: str) -> None:
    dtype = torch.float32 if name == "deepspeed" else torch.float64
    with hvdtrain.init("torch", engine=name) as world:
        chosen = [case for case in CASES if not cases or case.__name__ in cases]
        found: dict[str, Any] = {case.__name__: case(world.comm, dtype) for case in chosen}
        found["world"] = [world.rank, world.size, world.local_rank, world.local_size, world.node, world.engine]
        found["world"].append(world.launcher)
        everything = world.gather(found)
        if world.is_main:
            Path(out).write_text(json.dumps(everything))
    assert threading.active_count() == 1, threading.enumerate()
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
