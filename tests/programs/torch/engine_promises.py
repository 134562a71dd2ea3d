"""Each promise of the README to a PyTorch loop, on any engine: against one process of plain PyTorch, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from cases import plainly, quietly, refused, train, windows
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.torch.update import session
from hvdtrain.torch.update.nonfinite import NonFiniteError

SAMPLES = 25  # three updates of 8, and one sample: on two ranks one has none


def points(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 4, generator=made)
    return x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long()


def plain() -> nn.Module:
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def prepared(world: hvdtrain.World, model: nn.Module, data: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    each = 8 // world.size // options.get("accumulate", 1)
    train = hvt.loader(points() if data is None else data, each, world=world, shuffle=False, workers=0)
    return *quietly(model, sgd(model), train, world=world, **options), train


def updates(model: nn.Module, loss_of: Callable[..., Tensor], data: Any = None, clip: float = 0.0) -> list[float]:
    """One process of plain PyTorch; returns the losses."""
    return plainly(model, sgd(model), windows(8, *(points() if data is None else data)), loss_of, clip)


def ce(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)


def same(model: nn.Module, other: nn.Module) -> None:
    exact = next(other.parameters()).dtype == torch.float64
    for ours, theirs in zip(hvt.unwrap(model).state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10 if exact else 1e-5)


def at_last(world: hvdtrain.World) -> bool:
    return world.rank == world.size - 1


# -- the same answer --------------------------------------------------------------------------------------------------
def case_uneven_tails_accumulation_clipping_and_the_loss(world: hvdtrain.World) -> None:
    for accumulate in (1, 2, 4):
        whole, model = plain(), plain()
        wanted = updates(whole, ce, clip=0.3)
        model, optimizer, batches = prepared(world, model, accumulate=accumulate, clip=0.3)
        losses = train(model, optimizer, batches, ce)
        same(model, whole)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=0, atol=1e-5)


def parts_of(world: hvdtrain.World, batches: Iterable[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Yields this rank's part of each batch, which is cut by hand."""
    for batch in batches:
        yield tuple(part.tensor_split(world.size)[world.rank] for part in batch)


def case_accumulation_without_a_loader_is_a_mean(world: hvdtrain.World) -> None:
    x, y = points(24)
    whole, model = plain(), plain()
    updates(whole, ce, (x, y))
    model, optimizer = quietly(model, sgd(model), world=world, accumulate=2)
    train(model, optimizer, parts_of(world, windows(4, x, y)), ce)
    same(model, whole)


def case_weights_of_the_losss_own(world: hvdtrain.World) -> None:
    x, y = points()
    y = torch.where(torch.arange(SAMPLES) % 3 == 0, -100, y)
    y[:4] = -100  # one rank, or two micro-batches, without a label that counts; the last sample is another
    for accumulate in (1, 2):
        whole, model = plain(), plain()
        wanted = updates(whole, ce, (x[:24], y[:24]))
        model, optimizer, batches = prepared(world, model, (x[:24], y[:24]), accumulate=accumulate)
        losses = train(model, optimizer, batches, ce, lambda y: (y != -100).sum())
        same(model, whole)
        torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)
    model, optimizer, batches = prepared(world, plain(), (x, y), accumulate=2)
    with refused("weight=(y != -100).sum()", kind=ConfigError):
        train(model, optimizer, batches, ce)


def case_gradient_hooks_see_what_one_process_sees(world: hvdtrain.World) -> None:
    """A clamp of each micro-batch's own gradient: with equal batches it is the same for any size of the world."""
    x, y = points(8)[0][:4].repeat(2, 1), points(8)[1][:4].repeat(2)
    seen: list[float] = []

    def train_one(model: Any) -> nn.Module:
        hvt.unwrap(model)[0].weight.register_hook(lambda g: seen.append(float(g.abs().max())))
        return model

    whole = train_one(plain())
    ce(whole, x, y).backward()
    alone = seen.pop()
    model, optimizer, batches = prepared(world, plain(), (x, y))
    train_one(model)
    train(model, optimizer, batches, ce)
    pieces = getattr(world.comm, "pieces", 1)
    seen[:] = [sum(seen)] if pieces > 1 else seen
    assert len(seen) == 1 and abs(seen[0] * world.size - alone) < 1e-5, (seen, alone)


class Methods(nn.Module):
    """Trained through a method and through its parts, never through forward."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 3)
        self.types: list[torch.dtype] = []

    def training_step(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.head(self.backbone(x))
        self.types.append(out.dtype)
        return cross_entropy(out.float() if out.dtype == torch.bfloat16 else out, y)


def parts(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model.head(model.backbone(x)), y)


def case_methods_and_parts_leave_no_trace_of_an_empty_batch(world: hvdtrain.World) -> None:
    for way in ("method", "parts"):
        model, optimizer, train = prepared(world, Methods())
        for x, y in train:
            few = train.step.global_samples < 8
            before = model.backbone[1].running_mean.clone()
            if few and not train.step.padding:
                model.eval()  # one sample has no statistics of its own
            optimizer.backward(model.training_step(x, y) if way == "method" else parts(model, x, y))
            optimizer.step()
            model.train()
            assert torch.equal(model.backbone[1].running_mean, before) == few, way
        assert world.size == 1 or any(world.gather(train.step.padding)), "nobody had an empty batch"


def case_a_whole_batch_of_parts_lacks_what_an_empty_rank_was_given(world: hvdtrain.World) -> None:
    def root(outputs: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(outputs, y).sqrt()

    if getattr(world.comm, "pieces", 1) > 1:
        return  # one process has the whole batch
    whole = plain()
    updates(whole, lambda model, x, y: root(model(x), y))
    model, optimizer, batches = prepared(world, plain())
    train(model, optimizer, batches, lambda model, x, y: root(*hvt.whole(model[2](model[1](model[0](x))), y)))
    same(model, whole)


def case_a_loop_that_trains_on_nothing_leaves_no_recording(world: hvdtrain.World) -> None:
    model, _, train = prepared(world, plain(), points(16), accumulate=2)
    for x, _ in train:
        model(x)
    assert not _get_current_dispatch_mode_stack()


def case_synchronised_statistics_through_a_method_with_an_empty_rank(world: hvdtrain.World) -> None:
    """9 samples, 8 a step on 4 in the last: on two ranks the second has none of the last 2."""
    if getattr(world.comm, "pieces", 1) > 1:
        return  # refused: batch norm of pieces is their own
    data = points(8 if world.size == 1 else 8 + world.size)
    torch.manual_seed(4)
    whole, model = Methods(), Methods()
    model.load_state_dict(whole.state_dict())
    updates(whole, Methods.training_step, data)
    model, optimizer, batches = prepared(world, model, data, sync_batchnorm=True)
    train(model, optimizer, batches, lambda model, x, y: model.training_step(x, y))
    same(model, whole)


def case_a_loss_of_the_whole_batch_is_no_term(world: hvdtrain.World) -> None:
    if world.size == 1:
        return  # the whole batch is the rank's own
    model, optimizer, train = prepared(world, nn.Linear(4, 3).double(), points(8))
    for x, y in train:
        outputs, targets = hvt.whole(model(x), y)
        with refused("must be this rank's own", "optimizer.backward(loss)"):
            optimizer.backward([(cross_entropy(outputs, targets), len(y))])
        optimizer.backward(cross_entropy(outputs, targets))
        optimizer.step()


def case_mixed_precision_reaches_methods(world: hvdtrain.World) -> None:
    model, optimizer, batches = prepared(world, Methods().float(), (points(8)[0].float(), points(8)[1]), amp="bf16")
    train(model, optimizer, batches, lambda model, x, y: model.training_step(x, y))
    assert set(model.types) == {torch.bfloat16}
    model, optimizer, batches = prepared(world, Methods().float(), (points(8)[0].float(), points(8)[1]), amp="bf16")
    for x, y in batches:
        with refused("only parts of the model were called", kind=ConfigError):
            optimizer.backward(parts(model, x, y))


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.rare, self.never = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.always(x) + (self.rare(x) if (x[:, 0] > 1.5).any() else 0.0)


def case_a_parameter_without_a_gradient_here_or_anywhere(world: hvdtrain.World) -> None:
    torch.manual_seed(2)
    model, optimizer, train = prepared(world, Sometimes())
    for x, y in train:
        optimizer.backward(ce(model, x, y))
        assert model.never.weight.grad is None
        optimizer.step()
    assert len(set(world.gather(hvt.fingerprint(model)))) == 1


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x.to(torch.complex128) @ self.first).abs().to(x.dtype))


def case_complex_parameters(world: hvdtrain.World) -> None:
    torch.manual_seed(1)
    whole, model = Waves(), Waves()
    model.load_state_dict(whole.state_dict())
    if world.engine == "deepspeed":
        with refused("with engine='deepspeed'", "complex128", kind=ConfigError):
            prepared(world, model)
        return
    updates(whole, ce)
    model, optimizer, batches = prepared(world, model)
    train(model, optimizer, batches, ce)
    same(model, whole)


class Again(nn.Module):
    """One layer, twice, each recomputed in a backward pass of its own: two gradients come for it."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.last, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(lambda v: torch.tanh(self.layer(v)), x, use_reentrant=self.reentrant)
        return self.last(x)


def case_recomputed_layers_are_exact(world: hvdtrain.World) -> None:
    torch.manual_seed(1)
    start = Again(reentrant=False)
    whole = copy.deepcopy(start)
    updates(whole, ce, points(8))
    for reentrant in (False, True):
        model = Again(reentrant=reentrant)
        model.load_state_dict(start.state_dict())
        model, optimizer, train = prepared(world, model, points(8))
        x, y = next(iter(train))
        optimizer.backward(ce(model, x, y))
        optimizer.step()
        same(model, whole)


# -- or refused -------------------------------------------------------------------------------------------------------
def case_a_bare_backward_is_refused(world: hvdtrain.World) -> None:
    for after in (False, True):
        model, optimizer, train = prepared(world, plain())
        x, y = next(iter(train))
        if after:
            optimizer.backward(ce(model, x, y))
        with refused("optimizer.backward(loss)", "loss.backward() was called", kind=ConfigError):
            ce(model, x, y).backward()


def case_a_backward_pass_that_failed_is_not_tried_again_by_one_of_several(world: hvdtrain.World) -> None:
    """Gradients of its last layer are on their way when it fails; in one process it is as in plain PyTorch."""
    fails = iter([True])

    def hook(gradient: Tensor) -> Tensor:
        if next(fails, False):
            raise RuntimeError("out of luck")
        return gradient

    model, optimizer, train = prepared(world, plain())
    model[0].bias.register_hook(hook)
    for x, y in train:
        try:
            optimizer.backward(ce(model, x, y))
        except RuntimeError as error:
            assert "out of luck" in str(error)
            optimizer.zero_grad()
            if world.size > 1:
                with refused("a failed backward() cannot be retried", "RuntimeError: out of luck", "checkpoint"):
                    optimizer.backward(ce(model, x, y))
                return
            optimizer.backward(ce(model, x, y))
        optimizer.step()
    other = plain()
    updates(other, ce)
    same(model, other)


def case_new_layers_that_each_rank_has_drawn_for_itself_are_refused(world: hvdtrain.World) -> None:
    model, optimizer, train = prepared(world, plain())
    for number, (x, y) in enumerate(train):
        if number == 1:
            model.module.append(nn.Linear(3, 3))
            optimizer.add_param_group({"params": list(model[3].parameters())})
        optimizer.backward(ce(model, x, y))
        if number == 1 and world.size > 1:
            with refused("the replicas must be equal", "3.weight", kind=ReplicaError):
                optimizer.step()
            return
        optimizer.step()


def case_a_layer_frozen_within_an_update_is_refused(world: hvdtrain.World) -> None:
    model, optimizer, train = prepared(world, plain(), accumulate=2)
    batches = iter(train)
    x, y = next(batches)
    optimizer.backward(ce(model, x, y))
    optimizer.step()
    model[0].requires_grad_(False)
    x, y = next(batches)
    with refused("frozen between micro-batches", kind=ConfigError):
        optimizer.backward(ce(model, x, y))


def case_replicas_are_compared_after_the_first_update(world: hvdtrain.World) -> None:
    model, optimizer, train = prepared(world, plain())
    x, y = next(iter(train))
    optimizer.backward(ce(model, x, y))
    if at_last(world):
        model[2].bias.data[0] += 1e-3
    if world.size == 1:
        optimizer.step()
        return
    with refused("after update 1", "2.bias", kind=ReplicaError):
        optimizer.step()


def case_a_nan_stops_all_ranks_at_its_step(world: hvdtrain.World) -> None:
    model, optimizer, train = prepared(world, plain())
    for number, (x, y) in enumerate(train):
        if number == 1:
            with refused("nan at step 2", f"rank {world.size - 1}: nan", kind=NonFiniteError):
                optimizer.backward(ce(model, x * float("nan") if at_last(world) else x, y))
            return
        optimizer.backward(ce(model, x, y))
        optimizer.step()


def case_an_overflow_on_one_rank_skips_the_step_on_all(world: hvdtrain.World) -> None:
    x, y = points(24)
    model, optimizer, train = prepared(world, plain().float(), (x.float(), y), amp="fp16")
    for number, (a, b) in enumerate(train):
        before = hvt.fingerprint(model)
        hook = model[2].bias.register_hook(lambda g: g * float("inf")) if number == 1 and at_last(world) else None
        optimizer.backward(ce(model, a, b))
        optimizer.step()
        assert (hvt.fingerprint(model) == before) == (number == 1)
        if hook is not None:
            hook.remove()
    assert optimizer.skipped_steps == 1 and len(set(world.gather(hvt.fingerprint(model)))) == 1


# -- two models that meet ---------------------------------------------------------------------------------------------
def critic() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def maker() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def adversary(judge: Any, make: Any, x: Tensor) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    made, fake, true = make(x), 0.0, 1.0
    real = binary_cross_entropy_with_logits(judge(x)[:, 0], torch.full((len(x),), true))
    not_real = binary_cross_entropy_with_logits(judge(made.detach())[:, 0], torch.full((len(x),), fake))
    return real, not_real, lambda: binary_cross_entropy_with_logits(judge(made)[:, 0], torch.full((len(x),), true))


def case_the_standard_loop_of_a_gan(world: hvdtrain.World) -> None:
    """Two losses for the critic, then one through the critic for the generator."""
    x = points(24)[0]
    judge, make = critic(), maker()
    first, second = sgd(judge), sgd(make)
    for start in range(0, 24, 8):
        real, not_real, fooled = adversary(judge, make, x[start : start + 8])
        judge.zero_grad()
        real.backward()
        not_real.backward()
        first.step()
        make.zero_grad()
        fooled().backward()
        second.step()
    judged, ours, train = prepared(world, critic(), (x, points(24)[1]))
    made, theirs = quietly(maker_model := maker(), sgd(maker_model), train, world=world)
    for a, _ in train:
        real, not_real, fooled = adversary(judged, made, a)
        ours.backward(real, more=True)
        ours.backward(not_real)
        ours.step()
        theirs.backward(fooled())
        theirs.step()
    same(judged, judge)
    same(made, make)


# -- `check` ----------------------------------------------------------------------------------------------------------
def case_check_changes_nothing_and_names_what_differs(world: hvdtrain.World) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))
    model, optimizer, _ = prepared(world, model)
    x, y = points(9)
    state = hvt.fingerprint(model), torch.get_rng_state(), [layer.training for layer in model.modules()]

    def contrast(batch: Any) -> Tensor:
        out = torch.nn.functional.normalize(model(batch[0]), dim=1)
        return cross_entropy(out @ out.T / 0.1, torch.arange(len(out)))

    found = hvt.check(lambda batch: ce(model, *batch), (x, y))
    assert found.exact and found.draws and any("batch normalisation" in note for note in found.notes), found
    bad = hvt.check(contrast, (x, y))
    assert not bad.exact and bad.gradient > 0.01 and bad.parameter, bad
    holes = torch.where(torch.arange(9) < 3, -100, y)
    read = hvt.check(lambda batch: ce(model, *batch), (x, holes))
    assert read.exact and "give weight=(y != -100).sum()" in str(read), read
    given = hvt.check(lambda batch: ce(model, *batch), (x, holes), weight=lambda batch: (batch[1] != -100).sum())
    assert given.exact, given
    one_sided = torch.where(torch.arange(9) > 3, -100, y)  # the other piece alone is the whole, whatever the loss
    with refused("two pieces of a batch with weights above 0", kind=ConfigError):
        hvt.check(lambda batch: ce(model, *batch), (x, one_sided))
    with refused("two pieces of a batch with weights above 0", kind=ConfigError):
        hvt.check(lambda b: ce(model, *b) ** 2, (x, one_sided), weight=lambda batch: (batch[1] != -100).sum())
    named = hvt.check(lambda batch: ce(model, *batch[:2]) * float(len(batch[0]) == len(batch[2])), (x, y, ["a"] * 9))
    assert named.exact and named.loss == named.loss, named
    with refused("one number", kind=ConfigError):
        hvt.check(lambda batch: None, (x, y))
    with refused("a PackedSequence", kind=ConfigError):  # as of graphs: both pieces would be the whole
        packed = torch.nn.utils.rnn.pack_sequence([x[:5], x[5:]])
        hvt.check(lambda batch: model(batch[0].data).mean(), (packed, y))
    with refused("a function of the batch", kind=ConfigError):
        hvt.check(lambda batch: ce(model, *batch), (x, y), weight=9)
    with refused("a weight must be a number", kind=ConfigError):
        hvt.check(lambda batch: ce(model, *batch), (x, y), weight=lambda batch: None)

    def times(factors: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
        """A loss whose factors depend on the whole batch, where autograd does not see it."""

        def step(batch: Any) -> Tensor:
            out = model(batch[0])
            return (factors(out.detach()) * cross_entropy(out, batch[1], reduction="none")).mean()

        return step

    assert hvt.check(times(lambda out: out[:, 0]), (x, y)).exact, "a sample's own"
    by_their_mean = times(lambda out: out.exp()[:, 0] / out.exp()[:, 0].mean())
    normalised = times(lambda out: (out[:, 0] - out[:, 0].mean()) / out[:, 0].std())
    for step in (by_their_mean, normalised):
        unseen = hvt.check(step, (x, y))
        assert not unseen.exact and unseen.gradient > 0.01 and unseen.parameter, unseen
    assert state[0] == hvt.fingerprint(model) and torch.equal(state[1], torch.get_rng_state())
    assert state[2] == [layer.training for layer in model.modules()]
    assert all(p.grad is None for p in model.parameters()) and isinstance(optimizer.session, session.Session)
