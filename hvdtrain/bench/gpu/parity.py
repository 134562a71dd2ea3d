"""One engine, one or more ranks: weights, statistics and losses against plain PyTorch in this process, in float64
(DeepSpeed: in float32, TF32 off).

17 samples in steps of 8: the last step has one sample, and a second rank none.
"""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.bench.gpu.found import Goal, apart, not_here, say
from hvdtrain.bench.gpu.shared import through_main_memory
from hvdtrain.torch.engines.engine import device_of

SAMPLES, GLOBAL_BATCH, EPOCHS = 17, 8, 3
EXACT, ROUNDING = 1e-10, 1e-5


def net(engine: str) -> nn.Module:
    """Of the type and with the normalisation that an engine knows."""
    torch.manual_seed(3)
    norm = nn.GroupNorm(2, 8) if engine == "dataparallel" else nn.BatchNorm2d(8)
    layers = [nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 5)]
    return nn.Sequential(*layers).to(type_of(engine))


def type_of(engine: str) -> torch.dtype:
    return torch.float32 if engine == "deepspeed" else torch.float64


def data(engine: str) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(SAMPLES, 3, 8, 8, generator=draw, dtype=torch.float64)
    return x.to(type_of(engine)), torch.randint(0, 5, (SAMPLES,), generator=draw)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def plain(engine: str, device: torch.device) -> tuple[dict[str, Any], float]:
    """The reference: one process, whole batches, nothing of hvdtrain."""
    model = net(engine).to(device)
    optimizer = sgd(model)
    x, y = (part.to(device) for part in data(engine))
    for _ in range(EPOCHS):
        for begin in range(0, SAMPLES, GLOBAL_BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[begin : begin + 8]), y[begin : begin + 8]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return model.state_dict(), float(nn.functional.cross_entropy(model(x), y))


def check(args: argparse.Namespace) -> int:
    if args.engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        return not_here("DeepSpeed is not installed")
    if args.shared:
        through_main_memory(args.engine)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with hvdtrain.init("torch", engine=args.engine, device=args.device, seed=5) as world:
        train = hvt.loader(data(args.engine), GLOBAL_BATCH // world.size, shuffle=False)
        module = net(args.engine)
        model, optimizer = hvt.prepare(module, sgd(module), train, sync_batchnorm=world.size > 1)
        for _ in train.epochs(EPOCHS):
            for x, y in train:
                optimizer.zero_grad()
                optimizer.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
        found = hvt.evaluate(model, data(args.engine), hvt.classification(top=(1,)), per_rank_batch=3)
        state, device = hvt.unwrap(model).state_dict(), device_of(world)
        expected, loss = plain(args.engine, device)
        off = max(world.gather(apart(state, expected)))
        exact = EXACT if type_of(args.engine) == torch.float64 else ROUNDING
        goals = [Goal("weights off by", off, exact), Goal("loss off by", abs(found["loss"] - loss), exact)]
        if args.device == "cuda":
            goals.append(Goal("not on the GPU", float(device.type != "cuda"), 0.0))
        if world.is_main:
            say(goals, engine=world.engine, ranks=world.size, device=str(device))
    return 0
