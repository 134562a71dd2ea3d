"""Loops that are not backward, step: each against one process of plain PyTorch that trains on the same batches.

Runs the cases of `engine_promises` as well.

usage: loops.py ENGINE CASE ...
"""

from __future__ import annotations

import contextlib
import copy
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import engine_promises
import torch
from cases import main, plainly, quietly, refused, train, windows
from engine_promises import at_last, ce, parts_of, plain, points, same, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import ConfigError, NonFiniteError, ReplicaError
from hvdtrain.torch.update.optimizer import Optimizer

nothing = contextlib.nullcontext
BATCH = 8  # of all ranks together


def batches(samples: int = 25, epochs: int = 1) -> Iterator[tuple[Tensor, ...]]:
    return windows(BATCH, *points(samples), epochs=epochs)


def prepared(
    world: hvdtrain.World, model: nn.Module, optimizer: Any, samples: int = 25, **options: Any
) -> tuple[Any, Any, Any]:
    data = hvt.loader(points(samples), BATCH // world.size, world=world, shuffle=False, workers=0)
    return *quietly(model, optimizer, data, world=world, **options), data


# -- several optimizers -----------------------------------------------------------------------------------------------
def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def case_two_optimizers_step_as_one_and_are_restored(world: hvdtrain.World) -> None:
    def begun() -> tuple[nn.Module, list[torch.optim.Optimizer], dict[str, Any]]:
        model = plain()
        both = muon_and_adamw(model)
        rates = {f"rate {index}": torch.optim.lr_scheduler.StepLR(one, 3, 0.5) for index, one in enumerate(both)}
        return model, both, rates

    whole, both, rates = begun()
    for batch in batches(epochs=2):
        for one in both:
            one.zero_grad()
        ce(whole, *batch).backward()
        for one in (*both, *rates.values()):
            one.step()
    with tempfile.TemporaryDirectory() as folder:
        kept = hvdtrain.Checkpointer(world.broadcast(folder), best=None, world=world)
        for epochs in (1, 2):
            model, ours, rates = begun()
            model, optimizer, data = prepared(world, model, ours)
            if epochs == 2:
                kept.restore(hvt.model_state(model, optimizer, extra=rates))
            for _ in data.epochs(epochs):
                for number, batch in enumerate(data):
                    train(model, optimizer, [batch], ce)
                    for rate in rates.values():
                        rate.step()
                    if (epochs, number) == (1, 1):
                        kept.save(hvt.model_state(model, optimizer, extra=rates), progress=optimizer.progress)
        same(model, whole)
        world.barrier()
    with refused("the optimizer that prepare() returned", kind=ConfigError) if world.size > 1 else nothing():
        ours[1].step()
    with refused("a parameter cannot be in two optimizers", kind=ConfigError):
        prepared(world, model := plain(), [sgd(model), sgd(model)])


# -- closures ---------------------------------------------------------------------------------------------------------
def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, around another optimizer (Foret et al., arXiv 2010.01412, algorithm 1)."""

    def __init__(self, parameters: Any, base: Callable[..., torch.optim.Optimizer], rho: float, **options: Any) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        moves = [p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)) for p in held]
        for p, move in zip(held, moves, strict=True):
            p.add_(move)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, move in zip(held, moves, strict=True):
            p.sub_(move)
        self.base.step()


def sam(model: nn.Module) -> torch.optim.Optimizer:
    return Sam(model.parameters(), torch.optim.SGD, 0.2, lr=0.1, momentum=0.9)


def case_closures_lbfgs_and_sam(world: hvdtrain.World) -> None:
    for make in (lbfgs, sam):
        whole, losses = plain(), []
        theirs = make(whole)
        for x, y in batches():

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                theirs.zero_grad()  # noqa: B023 (called in this turn)
                loss = ce(whole, x, y)  # noqa: B023
                loss.backward()
                return loss

            losses += [float(closure().detach())] if make is sam else []
            found = theirs.step(closure)
            losses += [] if make is sam else [float(found.detach())]
        model = plain()
        model, optimizer, train = prepared(world, model, make(model))
        if world.engine == "deepspeed":
            x, y = next(iter(train))
            with refused("step(closure)", 'engine="ddp"', kind=ConfigError):
                optimizer.step(lambda: optimizer.backward(ce(model, x, y)))  # noqa: B023
            return
        seen = []
        for x, y in train:

            def again(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()  # noqa: B023
                loss = ce(model, x, y)  # noqa: B023
                optimizer.backward(loss)  # noqa: B023
                return loss

            if make is sam:
                again()
                seen.append(optimizer.record()["loss"])
            optimizer.step(again)
            record = optimizer.record()
            assert record["samples"] in (8, 1) and record["loss"] is not None, record
        same(model, whole)
        assert optimizer.progress.step == 4 and optimizer.progress.samples_seen == 25, optimizer.progress
    model = plain()
    model, optimizer, train = prepared(world, model, sam(model))
    x, y = next(iter(train))
    with refused("returned without optimizer.backward(loss)", kind=ConfigError):
        optimizer.backward(ce(model, x, y))
        optimizer.step(lambda: None)
    model = plain()
    model, optimizer, train = prepared(world, model, sgd(model), accumulate=2)
    next(iter(train))
    with refused("accumulate=1", kind=ConfigError):
        optimizer.step(lambda: None)


# -- several updates of a batch, or none ------------------------------------------------------------------------------
def case_several_updates_a_batch(world: hvdtrain.World) -> None:
    for derived in (False, True):
        whole = plain()
        turns = ((x * (1 + turn) if derived else x, y) for x, y in batches() for turn in range(3))
        plainly(whole, sgd(whole), turns, ce)
        model = plain()
        model, optimizer, train = prepared(world, model, sgd(model))
        for x, y in train:
            for turn in range(3):
                optimizer.zero_grad()
                loss = ce(model, x * (1 + turn) if derived else x, y)
                if derived and turn == 1:
                    with refused("again=True", kind=ConfigError):
                        optimizer.backward(loss)
                optimizer.backward(loss, again=derived and turn > 0)
                optimizer.step()
        same(model, whole)
        assert optimizer.progress.step == 12 and optimizer.progress.samples_seen == 25, optimizer.progress
    model = plain()
    model, optimizer, train = prepared(world, model, sgd(model), accumulate=2)
    x, y = next(iter(train))
    optimizer.backward(ce(model, x, y))
    optimizer.step()
    with refused("a batch that is not a whole update", kind=ConfigError):
        optimizer.backward(ce(model, x, y), again=True)


def case_gradients_in_place_of_those_that_are_there(world: hvdtrain.World) -> None:
    """SAM by hand: weights are moved along the gradient of all ranks, and the gradient is taken there."""

    def update(model: nn.Module, backward: Callable[..., None], optimizer: Any, x: Tensor, y: Tensor) -> None:
        backward(ce(model, x, y))
        moves = [0.5 * p.grad.clone() for p in model.parameters()]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        loss = ce(model, x, y)
        if isinstance(optimizer, Optimizer):
            with refused("again=True", kind=ConfigError):
                backward(loss)
            backward(loss, again=True)
        else:
            optimizer.zero_grad()
            backward(loss)
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()

    whole = plain()
    theirs = sgd(whole)
    for x, y in batches():
        theirs.zero_grad()
        update(whole, torch.Tensor.backward, theirs, x, y)
    model = plain()
    model, optimizer, train = prepared(world, model, sgd(model))
    for x, y in train:
        update(model, optimizer.backward, optimizer, x, y)
    same(model, whole)


def case_updates_that_are_skipped(world: hvdtrain.World) -> None:
    def norm(model: nn.Module) -> float:
        return float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))

    whole = plain()
    theirs = sgd(whole)
    norms = []
    for x, y in batches():
        theirs.zero_grad()
        ce(whole, x, y).backward()
        norms.append(norm(whole))
        if len(norms) != 2:
            theirs.step()
    model = plain()
    model, optimizer, train = prepared(world, model, sgd(model))
    found = []
    for number, (x, y) in enumerate(train):
        optimizer.zero_grad()
        optimizer.backward(ce(model, x, y))
        found.append(norm(model))
        if number == 1:
            optimizer.skip()
        else:
            optimizer.step()
    same(model, whole)
    torch.testing.assert_close(found, norms, rtol=1e-5, atol=0)
    assert optimizer.progress.samples_seen == 25
    with refused("no update is complete", kind=ConfigError):
        optimizer.skip()
    model = plain()
    model, optimizer, train = prepared(world, model, sgd(model))
    for number, (x, y) in enumerate(train):
        elsewhere = number == 2 and world.size > 1
        with refused("1 stepped before", "2 stepped before", kind=ReplicaError) if elsewhere else nothing():
            optimizer.backward(ce(model, x, y))
        if elsewhere:
            return
        if number == 1 and at_last(world):
            optimizer.skip()
        else:
            optimizer.step()


def case_a_gradient_scaler_of_ones_own(world: hvdtrain.World) -> None:
    def trained(model: Any, optimizer: Any, backward: Any, data: Any, spoil: Callable[[], bool], zeros: bool) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        plainly: Any = hvt.unwrap(model)
        for number, (x, y) in enumerate(data):
            if zeros:
                optimizer.zero_grad()
            else:
                model.zero_grad()
            bad = number == 1 and spoil()
            hook = plainly[2].bias.register_hook(lambda g: g * float("inf")) if bad else None
            backward(scaler.scale(ce(model, x, y)))
            if hook is not None:
                hook.remove()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    for fused, zeros in ((False, True), (True, True), (False, False)):
        whole = plain().float()
        data = [(x.float(), y) for x, y in batches(24)]
        first = torch.optim.Adam(whole.parameters(), lr=0.05, fused=fused)
        scale = trained(whole, first, torch.Tensor.backward, data, lambda: True, zeros)
        model = plain().float()
        second = torch.optim.Adam(model.parameters(), lr=0.05, fused=fused)
        model, optimizer, train = prepared(world, model, second, 24)
        ours = ((x.float(), y) for x, y in train)
        assert trained(model, optimizer, optimizer.backward, ours, lambda: at_last(world), zeros) == scale
        same(model, whole)


def case_an_overflow_of_the_forward_pass_skips(world: hvdtrain.World) -> None:
    x, y = points(24)
    model = plain().float()
    train = hvt.loader((x.float(), y), BATCH // world.size, world=world, shuffle=False, workers=0)
    model, optimizer = hvt.prepare(model, sgd(model), train, world=world, amp="fp16")
    for _ in train.epochs(2):
        for a, b in train:
            before = hvt.fingerprint(model)
            number = optimizer.progress.step
            loss = ce(model, a * 1e6 if number == 1 and at_last(world) else a, b)
            # a target's logit of -inf: the loss is infinite, its gradient is not
            optimizer.backward(loss + float("inf") if number == 3 and at_last(world) else loss)
            optimizer.step()
            assert (hvt.fingerprint(model) == before) == (number in (1, 3)), number
            assert optimizer.record()["loss"] is not None
    assert optimizer.skipped_steps == 2
    with refused("training cannot continue", kind=NonFiniteError):
        for _ in train.epochs(10):
            for a, b in train:
                optimizer.backward(ce(model, a * float("nan"), b))
                optimizer.step()


def case_half_precision_in_unusual_loops(world: hvdtrain.World) -> None:
    """Updates that are left out, gradients that are taken again, and two optimizers, as without the scale."""
    x, y = points(24)
    found = []
    for amp in ("fp16", None):
        model = plain().float()
        train = hvt.loader((x.float(), y), BATCH // world.size, world=world, shuffle=False, workers=0)
        both = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.2)]
        model, optimizer = quietly(model, both, train, world=world, amp=amp)
        for number, (a, b) in enumerate(train):
            optimizer.backward(ce(model, a, b))
            if number == 1:
                optimizer.backward(ce(model, a, b), again=True)
            if number == 0:
                optimizer.skip()
            else:
                optimizer.step()
        found.append(hvt.unwrap(model).state_dict())
    for half, full in zip(*(one.values() for one in found), strict=True):
        torch.testing.assert_close(half, full, rtol=0, atol=3e-3)
    assert any(not torch.equal(a, b) for a, b in zip(*(one.values() for one in found), strict=True))


# -- what the optimizer holds -----------------------------------------------------------------------------------------
def case_layers_that_join_later(world: hvdtrain.World) -> None:
    def head(model: nn.Module) -> torch.optim.Optimizer:
        model[0].requires_grad_(False)  # type: ignore[index]
        return torch.optim.AdamW(model[2].parameters(), lr=0.01)  # type: ignore[index]

    whole = plain()
    theirs = head(whole)
    for number, (x, y) in enumerate(batches()):
        if number == 2:
            whole[0].requires_grad_(True)  # type: ignore[index]
            theirs.add_param_group({"params": whole[0].parameters(), "lr": 0.002})  # type: ignore[index]
        theirs.zero_grad()
        ce(whole, x, y).backward()
        theirs.step()
    model = plain()
    base = hvdtrain.LR(base=0.01, reference_batch=BATCH)  # no scaling
    model, optimizer, train = prepared(world, model, head(model), lr=base)
    for number, (x, y) in enumerate(train):
        if number == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.002})
        optimizer.backward(ce(model, x, y))
        optimizer.step()
    same(model, whole)
    with refused("must be one of the model's", kind=ConfigError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


class Temperature(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(0.3))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(out * self.log.exp(), y)


def case_a_loss_with_parameters(world: hvdtrain.World) -> None:
    whole, criterion = plain(), Temperature()
    theirs = torch.optim.SGD([*whole.parameters(), *criterion.parameters()], lr=0.1)
    plainly(whole, theirs, batches(), lambda model, x, y: criterion(model(x), y))
    model, own = plain(), Temperature()
    ours = torch.optim.SGD([*model.parameters(), *own.parameters()], lr=0.1)
    with refused("model.criterion = criterion", kind=ConfigError):
        prepared(world, model, ours)
    model.add_module("criterion", own)
    parts = model[:3]  # a Sequential runs what it holds
    del model
    model = nn.Module()
    model.parts, model.criterion = parts, own
    model.forward = lambda x: parts(x)  # type: ignore[method-assign]
    model, optimizer, data = prepared(world, model, ours)
    train(model, optimizer, data, lambda model, x, y: model.criterion(model(x), y))
    same(model.parts, whole)
    same(model.criterion, criterion)


def case_two_losses_of_one_forward_pass(world: hvdtrain.World) -> None:
    def losses(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy(out, y), mse_loss(out.softmax(1)[:, 0], (y == 0).to(out.dtype))

    whole = plain()
    plainly(whole, sgd(whole), batches(), lambda model, x, y: sum(losses(model(x), y)))
    model = plain()
    model, optimizer, train = prepared(world, model, sgd(model))
    for x, y in train:
        first, second = losses(model(x), y)
        optimizer.backward(first, more=True, retain_graph=True)
        optimizer.backward(second)
        optimizer.step()
    same(model, whole)


def of_ones_own() -> nn.Module:
    """Not a container: it has no length, which torch.compile's wrapper asks it for."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = plain()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    return Net()


def case_a_model_that_was_compiled_before(world: hvdtrain.World) -> None:
    for build in (plain, of_ones_own):
        compiled_before(world, build)


def compiled_before(world: hvdtrain.World, build: Callable[[], nn.Module]) -> None:
    whole = build()
    plainly(whole, sgd(whole), batches(), ce)
    model = build()
    names = list(model.state_dict())
    compiled = torch.compile(model, backend="eager")
    if world.engine == "dataparallel":
        with refused("torch.compile is not supported", kind=ConfigError):
            prepared(world, compiled, sgd(compiled))
        return
    model, optimizer, data = prepared(world, compiled, sgd(compiled))
    train(model, optimizer, data, ce)
    same(model, whole)
    assert list(model.state_dict()) == names == list(hvt.unwrap(compiled).state_dict())
    assert list(copy.deepcopy(model).state_dict()) == names


def case_updates_without_a_loader(world: hvdtrain.World) -> None:
    """Rollouts, as of PPO: several passes over minibatches that are cut by hand."""
    whole, model = plain(), plain()
    plainly(whole, sgd(whole), batches(16, epochs=3), ce)
    model, optimizer = quietly(model, sgd(model), world=world)
    train(model, optimizer, parts_of(world, batches(16, epochs=3)), ce)
    same(model, whole)


if __name__ == "__main__":
    if sys.argv[1] != "deepspeed":
        torch.set_default_dtype(torch.float64)
    main({name: case for name, case in {**vars(engine_promises), **globals()}.items() if name in sys.argv[2:]})
