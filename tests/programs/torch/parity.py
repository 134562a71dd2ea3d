"""Trains every configuration the adapter supports, a few steps each, in float64, and stores the weights.

usage: parity.py ENGINE OUT.npz [case ...]     one process trains on the whole global batch, N ranks on an N-th each

HVDTRAIN_TEST_DEVICE=cuda computes on GPUs.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hvdtrain
import hvdtrain.torch as hvt

GLOBAL_BATCH = 8
BASE_LR = 0.1


# -- models and data --------------------------------------------------------------------------------------------------
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


class Shared(nn.Module):
    """One weight in two places, as in tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Sometimes(nn.Module):
    """A branch that few samples take, and one that none does: no gradient on some ranks, in some steps on none."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rare, self.never = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.always(x)
        rare = x[:, 0] > 1.3
        if rare.any():
            out = out.index_add(0, rare.nonzero()[:, 0], self.rare(x[rare]))
        return out


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.conv(x)).mean((2, 3)))


def points(samples: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(7)
    return torch.randn(samples, 4, generator=made), torch.randint(0, 3, (samples,), generator=made)


def pictures(samples: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(8)
    return torch.randn(samples, 3, 6, 6, generator=made), torch.randint(0, 3, (samples,), generator=made)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=BASE_LR, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=BASE_LR, weight_decay=0.1)


def groups(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with rates of their own."""
    return torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": BASE_LR / 10}, {"params": model[2].parameters(), "weight_decay": 0.0}],
        lr=BASE_LR, momentum=0.9, weight_decay=0.05,
    )  # fmt: skip


def trainable_only(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=BASE_LR)


# -- loops ------------------------------------------------------------------------------------------------------------
Loop = Callable[[nn.Module, Any, Any], None]


def plain(model: nn.Module, optimizer: Any, batch: Any) -> None:
    x, y = batch
    optimizer.zero_grad()
    optimizer.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()


def forgets_zero_grad(model: nn.Module, optimizer: Any, batch: Any) -> None:
    optimizer.backward(nn.functional.cross_entropy(model(batch[0]), batch[1]))
    optimizer.step()


def zeroes_in_every_form(model: nn.Module, optimizer: Any, batch: Any) -> None:
    forms: list[Callable[[], None]] = [
        optimizer.zero_grad, model.zero_grad, hvt.unwrap(model).zero_grad, optimizer.wrapped.zero_grad,
        lambda: optimizer.zero_grad(set_to_none=False), lambda: model.zero_grad(set_to_none=False),
    ]  # fmt: skip
    forms[optimizer.progress.step % len(forms)]()
    plain(model, optimizer, batch)


def two_losses(model: nn.Module, optimizer: Any, batch: Any) -> None:
    """Half the loss, twice."""
    x, y = batch
    optimizer.backward(nn.functional.cross_entropy(model(x), y) * 0.5, more=True)
    optimizer.backward(nn.functional.cross_entropy(model(x), y) * 0.5)
    optimizer.step()


def clips_with_torch(model: nn.Module, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    optimizer.backward(nn.functional.cross_entropy(model(batch[0]), batch[1]))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    optimizer.step()


def clips_itself(model: nn.Module, optimizer: Any, batch: Any) -> None:
    optimizer.backward(nn.functional.cross_entropy(model(batch[0]), batch[1]))
    norm = optimizer.clip_grad_norm_(0.2)
    assert (norm is None) == (optimizer.session.gradients.state == "partial")
    optimizer.step()


def nan_in_padding(model: nn.Module, optimizer: Any, batch: Any) -> None:
    """A rank without samples has a loss of NaN: it must not count at all."""
    x, y = batch
    loss = nn.functional.cross_entropy(model(x), y)
    padding = optimizer.session.batches.now().padding
    optimizer.backward(loss * float("nan") if padding else loss)
    optimizer.step()


# -- cases ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module] = mlp
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    data: Callable[[int], tuple[Tensor, Tensor]] = points
    samples: int = 26  # 3 global batches of 8, and 2 samples: two of four ranks have none in the tail
    prepare: dict[str, Any] = field(default_factory=dict)
    loop: Loop = plain
    loader: bool = True
    engines: tuple[str, ...] = ("solo", "horovod", "ddp")


CASES = {
    f"accumulate{accumulate}{'_clip' if clip else ''}": Case(prepare={"accumulate": accumulate, "clip": clip})
    for accumulate in (1, 3)
    for clip in (None, 0.2)
}
WARMUP = hvdtrain.LR(BASE_LR, GLOBAL_BATCH // 2, warmup_samples=30, schedule="cosine", total_samples=52)
CASES |= {
    "adamw": Case(optimizer=adamw, prepare={"accumulate": 3, "clip": 0.2}),
    "shared": Case(model=Shared),
    "shared_accumulate2": Case(model=Shared, prepare={"accumulate": 2}),
    "frozen": Case(model=frozen, optimizer=trainable_only),
    "groups": Case(optimizer=groups, prepare={"clip": 0.2}),
    "groups_lr": Case(optimizer=groups, prepare={"lr": WARMUP}),
    "lr": Case(optimizer=adamw, prepare={"lr": WARMUP, "accumulate": 2}),
    "sometimes": Case(model=Sometimes, optimizer=adamw),
    "sometimes_accumulate3_clip": Case(model=Sometimes, optimizer=sgd, prepare={"accumulate": 3, "clip": 0.2}),
    "forgets_zero_grad": Case(loop=forgets_zero_grad),
    "zeroes_in_every_form": Case(loop=zeroes_in_every_form, prepare={"accumulate": 2}),
    "two_losses": Case(loop=two_losses),
    "clips_with_torch": Case(loop=clips_with_torch, prepare={"accumulate": 2}),
    "clips_itself": Case(loop=clips_itself, prepare={"accumulate": 2}),
    "channels_last": Case(model=Image, data=pictures, prepare={"channels_last": True}),
    "nan_in_padding": Case(loop=nan_in_padding),
    "17_samples": Case(samples=17),
    "fp16": Case(prepare={"compression": "fp16"}),
    "bf16": Case(prepare={"compression": "bf16"}, engines=("solo", "ddp")),
    "sync_batchnorm": Case(model=normalised, prepare={"sync_batchnorm": True}),
    "sync_batchnorm_nan_in_padding": Case(model=normalised, loop=nan_in_padding, prepare={"sync_batchnorm": True}),
    # without a loader every rank's batch counts the same
    "no_loader": Case(samples=24, loader=False),
    "no_loader_accumulate2": Case(samples=24, loader=False, prepare={"accumulate": 2, "clip": 0.2}),
}


def train(case: Case, world: hvdtrain.World) -> tuple[nn.Module, Any, list[float]]:
    torch.manual_seed(100 + world.rank)  # replicas start apart: only the broadcast makes them equal
    model = case.model()
    optimizer: Any = case.optimizer(model)
    x, y = case.data(case.samples)
    each = GLOBAL_BATCH // world.size
    data = hvt.loader((x, y), each, world=world, seed=3) if case.loader else None
    model, optimizer = hvt.prepare(model, optimizer, data, world=world, **case.prepare)
    losses = []
    for _ in range(2):
        for batch in data if data is not None else slices(x, y, world):
            case.loop(model, optimizer, batch)
            noted = optimizer.record()["loss"]
            losses += [] if noted is None else [noted]
    return model, optimizer, losses


def slices(x: Tensor, y: Tensor, world: hvdtrain.World) -> Iterator[tuple[Tensor, Tensor]]:
    each = GLOBAL_BATCH // world.size
    device = world.comm.device  # type: ignore[attr-defined]
    for start in range(0, len(x), GLOBAL_BATCH):
        mine = slice(start + world.rank * each, start + (world.rank + 1) * each)
        yield x[mine].to(device), y[mine].to(device)


def gap_to_the_exact_mean(world: hvdtrain.World) -> float:
    """17 samples over all ranks in one step: p.grad against plain PyTorch's gradient of the mean over the 17."""
    x, y = points(17)
    torch.manual_seed(1)
    model: Any = mlp()
    wanted = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    optimizer: Any = sgd(model)
    data = hvt.loader((x, y), 20 // world.size, world=world)
    model, optimizer = hvt.prepare(model, optimizer, data, world=world, verify=False)
    for inputs, labels in data:
        optimizer.backward(nn.functional.cross_entropy(model(inputs), labels))
        gaps = [(p.grad.cpu() - w).abs().max() for p, w in zip(model.parameters(), wanted, strict=True)]
        optimizer.step()
    return float(max(gaps))


def run(name: str, world: hvdtrain.World) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    model, optimizer, losses = train(CASES[name], world)
    arrays = {f"{name}/{key}": value.cpu().numpy() for key, value in model.state_dict().items()}
    prints = world.gather(hvt.fingerprint(model))
    facts = {
        "equal": len(set(prints)) == 1, "losses": losses, "steps": optimizer.progress.step,
        "samples": optimizer.progress.samples_seen, "lr": optimizer.lr,
    }  # fmt: skip
    optimizer.close()
    return arrays, facts


def main(engine: str, out: str, wanted: list[str]) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    arrays: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {}
    with hvdtrain.init("torch", engine=engine, device=os.environ.get("HVDTRAIN_TEST_DEVICE", "cpu"), seed=5) as world:
        for name in wanted or [name for name, case in CASES.items() if engine in case.engines]:
            try:
                its_arrays, facts[name] = run(name, world)
            except Exception:
                print(f"rank {world.rank}: case {name} failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                os._exit(3)
            arrays |= its_arrays
            if len(facts) == 1:
                gc.freeze()  # engines collect garbage after each model; PyTorch's own million objects are none
        facts["exact mean of 17"] = max(world.gather(gap_to_the_exact_mean(world)))
        if world.is_main:
            np.savez(out, **arrays)
            with open(out + ".json", "w") as file:
                json.dump(facts, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
