"""DeepSpeed's ZeRO, stages 1 and 2, against plain PyTorch in one process. usage: torchrun zero.py deepspeed"""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from cases import main, plainly, quietly, refused
from cases import train as train_on
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import CheckpointError, ConfigError
from hvdtrain.torch.engines import deepspeed

SAMPLES, GLOBAL_BATCH, EPOCHS = 52, 8, 3  # 7 batches an epoch, the last of 4: 21 updates
Make = Callable[[nn.Module], torch.optim.Optimizer]


def net() -> nn.Module:
    """Of sizes that no number of ranks divides, so that parts begin within a weight."""
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


def train(world: hvdtrain.World, zero: int, make: Make, *, clip: float | None = None, accumulate: int = 1) -> None:
    """Trains with ZeRO and, in one process, without; raises AssertionError where they differ."""
    alone, model = net(), net()
    plain = make(alone)
    wrapped, optimizer, loader = prepared(world, model, make, zero, clip=clip, accumulate=accumulate)
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
            if zero == 1 and clip is None:
                close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(alone.parameters(), clip)
            plain.step()
            updates, gathered = updates + 1, []
        optimizer.step()
    assert updates >= 20 // accumulate, updates
    close(list(model.parameters()), list(alone.parameters()))
    same_state(optimizer.state_dict(), plain.state_dict())
    parts = sum(v.numel() for s in optimizer.session.parted.parts._twin.state.values() for v in s.values())
    whole = sum(v.numel() for s in plain.state_dict()["state"].values() for v in s.values() if v is not None)
    assert parts < whole / world.size + 30, (parts, whole)
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
    model, optimizer, loader = prepared(world, net(), OPTIMIZERS["adamw"], 2)
    train_on(model, optimizer, loader, lambda model, _, x, y: loss_of(model, x, y))
    before = set(sys.modules)
    del model, optimizer, loader
    gc.collect()
    assert set(sys.modules) == before, set(sys.modules) - before


def case_twenty_updates_equal_one_process(world: hvdtrain.World) -> None:
    for zero, name in ((1, "adamw"), (1, "amsgrad"), (2, "nesterov"), (2, "adagrad")):
        train(world, zero, OPTIMIZERS[name])


def case_clipping_and_accumulation(world: hvdtrain.World) -> None:
    for zero in (1, 2):
        train(world, zero, OPTIMIZERS["nesterov"], accumulate=3, clip=0.3)
        with mock.patch.object(deepspeed, "_BUCKET_BYTES", 64):  # many, of a weight or less each
            train(world, zero, OPTIMIZERS["adamw"], accumulate=3)


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
    uses = (["ab", "ca"], ["abc", "cba"])
    for zero in (1, 2):
        torch.manual_seed(2)
        alone, model = Branches(), Branches()
        alone.load_state_dict(model.state_dict())
        plain = torch.optim.AdamW(alone.parameters(), lr=0.01)
        wrapped, optimizer = quietly(model, torch.optim.AdamW(model.parameters(), lr=0.01), zero=zero)
        for update in range(2):
            made = torch.Generator().manual_seed(update)
            xs = torch.randn(world.size, 4, 3, generator=made)
            its = [uses[update][rank % 2] for rank in range(world.size)]
            optimizer.backward(wrapped(xs[world.rank], its[world.rank]).square().mean())
            optimizer.step()
            plain.zero_grad()
            torch.stack([alone(x, use).square().mean() for x, use in zip(xs, its, strict=True)]).mean().backward()
            plain.step()
        close(list(model.parameters()), list(alone.parameters()))
        with refused(
            "every trainable parameter needs a gradient", "no rank has a gradient of c.weight, c.bias", kind=ConfigError
        ):
            optimizer.backward(wrapped(xs[0], "ab").square().mean())


def case_weights_changed_in_place_stay(world: hvdtrain.World) -> None:
    for zero in (1, 2):
        model = net()
        wrapped, optimizer, loader = prepared(world, model, OPTIMIZERS["nesterov"], zero)
        its = iter(loader)

        update(wrapped, optimizer, its)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.0
        update(wrapped, optimizer, its)
        assert all(bool((p == 0.5).all()) for p in model.parameters())
        model[0].weight.data = model[0].weight.data.clone()
        with refused("parameters cannot be moved or replaced", kind=ConfigError):
            update(wrapped, optimizer, its)


def case_gradients_in_parts_cannot_be_misread(world: hvdtrain.World) -> None:
    model = net()
    wrapped, optimizer, loader = prepared(world, model, OPTIMIZERS["adamw"], 2)
    ids, x, y = next(iter(loader))
    optimizer.backward(cross_entropy(wrapped(x), y))
    tries: list[Callable[[], object]] = [
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: model[0].weight.grad.norm(),
        lambda: model[0].weight.grad.mul_(2),
        lambda: model[0].weight.grad + 1,
        lambda: model[0].weight.grad.clone(),
        lambda: float(model[0].weight.grad[0, 0]),
        lambda: model[0].weight.grad.numpy(),
    ]
    for attempt in tries:
        with refused("no rank has a whole gradient", "clip", kind=ConfigError):
            attempt()
    norm = optimizer.clip_grad_norm_(1.0)
    assert norm is not None and len(set(world.gather(float(norm)))) == 1
    optimizer.step()


def case_an_infinity_in_one_part_skips_on_every_rank(world: hvdtrain.World) -> None:
    for zero in (1, 2):
        model = net()
        wrapped, optimizer, loader = prepared(world, model, OPTIMIZERS["nesterov"], zero, amp="fp16")
        before = hvt.fingerprint(model)
        its = iter(loader)
        hook = model[0].weight.register_hook(lambda gradient: gradient * float("inf"))  # the first rank's part
        update(wrapped, optimizer, its)
        assert optimizer.skipped_steps == 1 and hvt.fingerprint(model) == before
        hook.remove()
        update(wrapped, optimizer, its)
        assert optimizer.skipped_steps == 1 and hvt.fingerprint(model) != before
        with refused("the gradient norm is nan", "0.weight", kind=hvdtrain.NonFiniteError):
            other = net()
            wrapped, optimizer, loader = prepared(world, other, OPTIMIZERS["nesterov"], zero, clip=1.0)
            other[0].weight.register_hook(lambda gradient: gradient * float("nan"))
            update(wrapped, optimizer, loader)


def prepared_used_and_dropped(world: hvdtrain.World) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    wrapped, optimizer, loader = prepared(world, model, OPTIMIZERS["adamw"], 1)
    update(wrapped, optimizer, loader)
    plain = optimizer.wrapped
    tries: list[Callable[[], object]] = [
        lambda: optimizer.state.clear(),
        lambda: optimizer.state[model[0].weight],
        lambda: plain.state_dict(),
        lambda: bool(plain.state),
        lambda: plain.state.update({}),
    ]
    for attempt in tries:
        with refused("its state is split over the ranks", "close()", kind=ConfigError):
            attempt()
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = saved["state"][0]["step"] + 3
    before, fingerprint = optimizer.state_dict(), hvt.fingerprint(model)
    with refused("all parameters of a group must have the same optimizer state", "step differs", kind=CheckpointError):
        optimizer.load_state_dict(saved)
    same_state(optimizer.state_dict(), before)
    assert hvt.fingerprint(model) == fingerprint
    pickle.loads(pickle.dumps(model))
    update(wrapped, optimizer, loader)
    return model, plain


def case_the_state_is_nowhere_else(world: hvdtrain.World) -> None:
    """What would find no state, or change none, is refused; a model is pickled as ever."""
    model, plain = prepared_used_and_dropped(world)
    gc.collect()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with refused("its state is split over the ranks", kind=ConfigError):
        plain.step()


def case_a_refused_preparation_changes_nothing(world: hvdtrain.World) -> None:
    model = net()
    plain = torch.optim.AdamW(groups(model), lr=0.01)
    for used in (list(model.parameters()), [model[0].weight, model[0].bias]):  # so that steps differ in each group
        for parameter in used:
            parameter.grad = torch.ones_like(parameter)
        plain.step()
        plain.zero_grad()
    before = copy.deepcopy(plain.state_dict())
    with refused("all parameters of a group must have the same optimizer state", kind=CheckpointError):
        hvt.prepare(model, plain, zero=1)
    same_state(plain.state_dict(), before)


def case_prepared_again_at_another_stage(world: hvdtrain.World) -> None:
    """Momentum goes along, in the middle of training."""
    alone, model = net(), net()
    plain, mine = OPTIMIZERS["nesterov"](alone), OPTIMIZERS["nesterov"](model)
    for zero in (0, 1, 2, 0, 2, 1):
        _, optimizer, _ = ours = prepared(world, model, lambda _: mine, zero)
        side_by_side(world, ours, alone, plain)
    same_state(optimizer.state_dict(), plain.state_dict())


def case_two_models_of_a_gan(world: hvdtrain.World) -> None:
    """Each other's loss reaches both; in each stage."""
    for stages in ((2, 2), (1, 2), (0, 2)):
        torch.manual_seed(2)
        first = [nn.Linear(3, 3), nn.Linear(3, 1)]
        second = copy.deepcopy(first)
        plain = [torch.optim.Adam(m.parameters(), lr=0.01) for m in first]
        (g, g_optimizer), (d, d_optimizer) = (
            quietly(m, torch.optim.Adam(m.parameters(), lr=0.01), zero=zero)
            for m, zero in zip(second, stages, strict=True)
        )
        for number in range(3):
            made = torch.Generator().manual_seed(number)
            noise, real = torch.randn(2, 2 * world.size, 3, generator=made)
            mine = slice(2 * world.rank, 2 * world.rank + 2)
            d_optimizer.backward((d(real[mine]) - 1).square().mean() + d(g(noise[mine]).detach()).square().mean())
            d_optimizer.step()
            g_optimizer.backward((d(g(noise[mine])) - 1).square().mean())
            g_optimizer.step()
            plain[1].zero_grad()
            ((first[1](real) - 1).square().mean() + first[1](first[0](noise).detach()).square().mean()).backward()
            plain[1].step()
            plain[0].zero_grad()
            (first[1](first[0](noise)) - 1).square().mean().backward()
            plain[0].step()
        for one, other in zip(second, first, strict=True):
            close(list(one.parameters()), list(other.parameters()))


class Scalars(nn.Module):
    """Two weights of no dimension: with two ranks one's part is padding alone, or a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(-0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a + self.b


def case_weights_of_no_dimension(world: hvdtrain.World) -> None:
    for zero in (1, 2):
        for kind in (torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adam):
            alone, model = Scalars(), Scalars()
            plain = kind(alone.parameters(), lr=0.01)
            amp = "fp16" if kind is torch.optim.Adam else None
            wrapped, optimizer = quietly(model, kind(model.parameters(), lr=0.01), zero=zero, amp=amp)
            for _ in range(3):
                optimizer.backward((wrapped(torch.tensor([2.0 + world.rank])) - 3).square().mean())
                optimizer.step()
                optimizer.load_state_dict(optimizer.state_dict())
                plain.zero_grad()
                (alone(torch.arange(2.0, 2.0 + world.size)) - 3).square().mean().backward()
                plain.step()
            for a, b in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-3 if kind is torch.optim.Adam else 2e-6)


def case_hooks_and_gradients_of_ones_own(world: hvdtrain.World) -> None:
    """A hook before the step may change gradients and rates, as of any optimizer; taking gradients away is refused."""
    alone, model = net(), net()
    both = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (alone, model)]

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
            for p in group["params"]:
                p.grad = p.grad.clamp(-0.01, 0.01)

    for its in both:
        its.register_step_pre_hook(before)
    side_by_side(world, prepared(world, model, lambda _: both[1], 1), alone, both[0])
    for zero, gradient in ((1, None), (2, None), (2, torch.zeros(3))):
        model = net()
        wrapped, optimizer, loader = prepared(world, model, OPTIMIZERS["adamw"], zero)
        _, x, y = next(iter(loader))
        optimizer.backward(cross_entropy(wrapped(x), y))
        model[3].bias.grad = gradient
        with refused("p.grad of 3.bias was set between", kind=ConfigError):
            optimizer.step()


def case_every_norm(world: hvdtrain.World) -> None:
    for norm in (1.0, 2.0, 3.0, float("inf")):
        norms = []
        for zero in (0, 2):
            model = net()
            wrapped, optimizer, loader = prepared(world, model, OPTIMIZERS["nesterov"], zero)
            _, x, y = next(iter(loader))
            optimizer.backward(cross_entropy(wrapped(x), y))
            norms.append(optimizer.clip_grad_norm_(0.1, norm))
        torch.testing.assert_close(norms[0], norms[1])
    _, x, y = next(iter(loader))
    with refused("norm_type must be > 0", kind=ConfigError):  # torch's 0 counts parameters, which are cut here
        optimizer.clip_grad_norm_(0.1, 0.0)


class Scaled(torch.optim.SGD):
    """As LARS: a step in proportion to the norm of the weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] * p.norm())


def case_what_flat_parts_cannot_do_is_refused(world: hvdtrain.World) -> None:
    makes: list[tuple[str, Make]] = [
        ("Adafactor", lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01)),
        ("Scaled", lambda m: Scaled(m.parameters(), lr=0.01)),
        ("Muon", lambda m: torch.optim.Muon(m.parameters(), lr=0.01)),
    ]
    for name, make in makes:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        with refused("must update each element from its own gradient", name, "zero=0", kind=ConfigError):
            hvt.prepare(model, make(model), zero=1)
    model = net().double()
    with refused("float32", "0.weight is float64", kind=ConfigError):
        hvt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=2)
    model = net()
    with refused("zero must be 0, 1 or 2", kind=ConfigError):
        hvt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=3)  # type: ignore[arg-type]
    with refused("channels_last= is not supported with zero=", kind=ConfigError):
        hvt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=1, channels_last=True)
    wrapped, optimizer, loader = prepared(world, model, OPTIMIZERS["adamw"], 1)
    _, x, y = next(iter(loader))
    model[0].weight.requires_grad_(False)
    with refused("layers were frozen or unfrozen", kind=ConfigError):
        optimizer.backward(cross_entropy(wrapped(x), y))


def case_frozen_layers_and_schedulers(world: hvdtrain.World) -> None:
    """A group that is frozen whole, torch's scheduler, and step hooks of the user's own optimizer."""
    for zero in (1, 2):
        alone, model = net(), net()
        for its in (alone, model):
            its[2].requires_grad_(False)
        lists = [(m[2].parameters(), nn.ModuleList([m[0], m[3]]).parameters()) for m in (alone, model)]
        makes = [torch.optim.AdamW([{"params": its} for its in both], lr=0.01) for both in lists]
        calls: list[str] = []
        makes[1].register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        makes[1].register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        _, optimizer, _ = ours = prepared(world, model, lambda _, makes=makes: makes[1], zero)
        both = [torch.optim.lr_scheduler.ExponentialLR(its, 0.9) for its in (makes[0], optimizer)]
        side_by_side(world, ours, alone, makes[0], lambda both=both: [its.step() for its in both])
        assert calls == ["before", "after"] * optimizer.progress.step, calls


if __name__ == "__main__":
    main(globals().copy())
