"""ZeRO stage 1 against plain PyTorch in one process. usage: torchrun zero.py deepspeed|ddp"""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from cases import main, plainly, quietly, refused
from cases import train as train_on
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import ConfigError

SAMPLES, GLOBAL_BATCH, EPOCHS = 52, 8, 3  # 7 batches an epoch, the last of 4: 21 updates
Make = Callable[[nn.Module], torch.optim.Optimizer]


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.LayerNorm(13), nn.Linear(13, 3))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.05},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.02},
    ]


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda m: torch.optim.AdamW(groups(m), lr=0.01),
    "nesterov": lambda m: torch.optim.SGD(groups(m), lr=0.05, momentum=0.9, nesterov=True),
    "amsgrad": lambda m: torch.optim.Adam(groups(m), lr=0.01, amsgrad=True),
    "adagrad": lambda m: torch.optim.Adagrad(groups(m), lr=0.03),  # has a state before its first step
}


def data() -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 7, generator=made)
    return torch.arange(SAMPLES), x, torch.randint(0, 3, (SAMPLES,), generator=made)


def prepared(
    world: hvdtrain.World, model: nn.Module, make: Make, zero: int, **options: Any
) -> tuple[hvt.Model, hvt.Optimizer, hvt.Loader]:
    loader = hvt.loader(data(), GLOBAL_BATCH // world.size, world=world, seed=3)
    return *quietly(model, make(model), loader, zero=zero, **options), loader


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)


def side_by_side(
    world: hvdtrain.World, ours: tuple[Any, Any, Any], alone: nn.Module, plain: Any, after: Any = lambda: None
) -> None:
    """Trains an epoch with ZeRO and the same in one process without; calls `after` each update."""
    wrapped, optimizer, loader = ours
    _, every_x, every_y = data()
    for batch, ids in global_batches(world, loader, 1):
        train_on(wrapped, optimizer, [batch], loss_of)
        plainly(alone, plain, [(every_x[ids], every_y[ids])], loss_of)
        after()
    close(list(hvt.unwrap(wrapped).parameters()), list(alone.parameters()))


def global_batches(world: hvdtrain.World, loader: hvt.Loader, epochs: int) -> Iterator[tuple[Any, Tensor]]:
    """This rank's batch, and the samples that all ranks have."""
    for _ in loader.epochs(epochs):
        for ids, x, y in loader:
            mine = [] if loader.step.padding else ids.tolist()
            yield (x, y), torch.tensor([i for its in world.gather(mine) for i in its])


def train(world: hvdtrain.World, make: Make, *, clip: float | None = None, accumulate: int = 1) -> None:
    """Trains with ZeRO and, in one process, without; raises AssertionError where they differ."""
    alone, model = net(), net()
    plain = make(alone)
    wrapped, optimizer, loader = prepared(world, model, make, 1, clip=clip, accumulate=accumulate)
    _, every_x, every_y = data()
    updates, gathered = 0, []
    for (x, y), ids in global_batches(world, loader, EPOCHS):
        optimizer.zero_grad()
        optimizer.backward(cross_entropy(wrapped(x), y))
        gathered += [ids]
        if optimizer.session.gradients.state == "ready":
            its = torch.cat(gathered)
            plain.zero_grad()
            cross_entropy(alone(every_x[its]), every_y[its]).backward()
            if clip is None:
                close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(alone.parameters(), clip)
            plain.step()
            updates, gathered = updates + 1, []
        optimizer.step()
    assert updates >= 20 // accumulate, updates
    close(list(model.parameters()), list(alone.parameters()))
    same_state(optimizer.state_dict(), plain.state_dict())
    parts = sum(v.numel() for s in optimizer.wrapped.state.values() for v in s.values() if v is not None)
    whole = sum(v.numel() for s in plain.state_dict()["state"].values() for v in s.values() if v is not None)
    assert sum(world.gather(parts)) == whole and parts < whole * 0.8, (parts, whole)
    optimizer.close()
    same_state(optimizer.wrapped.state_dict(), plain.state_dict())


def close(mine: Any, wanted: Any) -> None:
    for a, b in zip(mine, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def same_state(mine: Any, wanted: Any) -> None:
    assert mine["param_groups"] == wanted["param_groups"], mine["param_groups"]
    assert mine["state"].keys() == wanted["state"].keys()
    for number, state in wanted["state"].items():
        assert mine["state"][number].keys() == state.keys()
        close(mine["state"][number].values(), state.values())


def update(wrapped: nn.Module, optimizer: hvt.Optimizer, batches: Any) -> None:
    train_on(wrapped, optimizer, [next(iter(batches))], lambda model, _, x, y: loss_of(model, x, y))


def case_what_is_dropped_imports_nothing(world: hvdtrain.World) -> None:
    """The garbage collector may drop it within another import, whose lock it would break (CPython issue 91351)."""
    model, optimizer, loader = prepared(world, net(), OPTIMIZERS["adamw"], 1)
    train_on(model, optimizer, loader, lambda model, _, x, y: loss_of(model, x, y))
    before = set(sys.modules)
    del model, optimizer, loader
    gc.collect()
    assert set(sys.modules) == before, set(sys.modules) - before


def case_twenty_updates_equal_one_process(world: hvdtrain.World) -> None:
    for name in OPTIMIZERS:
        train(world, OPTIMIZERS[name])


def case_clipping_and_accumulation(world: hvdtrain.World) -> None:
    train(world, OPTIMIZERS["nesterov"], accumulate=3, clip=0.3)


class Branches(nn.Module):
    """Layers that ranks use in another order, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in "abc")

    def forward(self, x: Tensor, which: str) -> Tensor:
        for name in which:
            x = getattr(self, name)(x)
        return x


def case_ranks_that_use_other_layers(world: hvdtrain.World) -> None:
    """In the last update no rank uses the third: its weights do not decay."""
    uses = (["ab", "ca"], ["abc", "cba"], ["ab", "ba"])
    torch.manual_seed(2)
    alone, model = Branches(), Branches()
    alone.load_state_dict(model.state_dict())
    plain = torch.optim.AdamW(alone.parameters(), lr=0.01)
    wrapped, optimizer = quietly(model, torch.optim.AdamW(model.parameters(), lr=0.01), zero=1)
    for number, used in enumerate(uses):
        xs = torch.randn(world.size, 4, 3, generator=torch.Generator().manual_seed(number))
        its = [used[rank % 2] for rank in range(world.size)]
        optimizer.zero_grad()
        optimizer.backward(wrapped(xs[world.rank], its[world.rank]).square().mean())
        optimizer.step()
        plain.zero_grad()
        torch.stack([alone(x, use).square().mean() for x, use in zip(xs, its, strict=True)]).mean().backward()
        plain.step()
    close(model.parameters(), alone.parameters())


def case_an_infinity_skips_on_every_rank(world: hvdtrain.World) -> None:
    model = net()
    wrapped, optimizer, loader = prepared(world, model, OPTIMIZERS["nesterov"], 1, amp="fp16")
    before = hvt.fingerprint(model)
    its = iter(loader)
    hook = model[0].weight.register_hook(lambda gradient: gradient * float("inf"))
    update(wrapped, optimizer, its)
    assert optimizer.skipped_steps == 1 and hvt.fingerprint(model) == before
    hook.remove()
    update(wrapped, optimizer, its)
    assert optimizer.skipped_steps == 1 and hvt.fingerprint(model) != before


def prepared_used_and_dropped(world: hvdtrain.World) -> torch.optim.Optimizer:
    model = net()
    wrapped, optimizer, loader = prepared(world, model, OPTIMIZERS["adamw"], 1)
    update(wrapped, optimizer, loader)
    plain = optimizer.wrapped
    with refused("its state is split over the ranks", "close()", kind=ConfigError):
        plain.state_dict()
    pickle.loads(pickle.dumps(model))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    same_state(optimizer.state_dict(), saved)
    update(wrapped, optimizer, loader)
    return plain


def case_the_state_is_nowhere_else(world: hvdtrain.World) -> None:
    """Also once the prepared optimizer is gone."""
    plain = prepared_used_and_dropped(world)
    gc.collect()
    with refused("its state is split over the ranks", kind=ConfigError):
        plain.step()


def case_prepared_again_at_another_stage(world: hvdtrain.World) -> None:
    """Momentum goes along, in the middle of training; also that of a group which was added."""
    alone, model = net(), net()
    both = [torch.optim.SGD(list(m.parameters())[:4], lr=0.05, momentum=0.9) for m in (alone, model)]
    for m in (alone, model):
        m[3].requires_grad_(False)
    for zero in (0, 1, 1, 0, 1):
        _, optimizer, _ = ours = prepared(world, model, lambda _: both[1], zero)
        side_by_side(world, ours, alone, both[0])
    for m, its in ((alone, both[0]), (model, optimizer)):
        m[3].requires_grad_(True)
        its.add_param_group({"params": m[3].parameters(), "lr": 0.01})
    side_by_side(world, ours, alone, both[0])
    same_state(optimizer.state_dict(), both[0].state_dict())


def case_hooks_schedulers_and_frozen_layers(world: hvdtrain.World) -> None:
    """A hook before the step may change every gradient and rate, as of any optimizer."""
    alone, model = net(), net()
    for its in (alone, model):
        its[2].requires_grad_(False)
    both = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (alone, model)]
    calls: list[str] = []

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None if p.grad is None else p.grad.clamp(-0.01, 0.01)

    for its in both:
        its.register_step_pre_hook(before)
    both[1].register_step_post_hook(lambda *_: calls.append("after"))
    _, optimizer, _ = ours = prepared(world, model, lambda _: both[1], 1)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(its, 0.9) for its in (both[0], optimizer)]
    side_by_side(world, ours, alone, both[0], lambda: [its.step() for its in schedules])
    assert calls == ["after"] * optimizer.progress.step, calls


class Scaled(torch.optim.SGD):
    """As LARS: a step in proportion to the norm of the weights."""


def case_what_cannot_be_shared_out_is_refused(world: hvdtrain.World) -> None:
    model = net()
    with refused("must update each parameter from its own gradient", "Scaled", "zero=0", kind=ConfigError):
        hvt.prepare(model, Scaled(model.parameters(), lr=0.01), zero=1)
    with refused("zero must be 0 or 1", kind=ConfigError):
        hvt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=2)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(globals().copy())
