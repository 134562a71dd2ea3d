"""Programs as users write them, on two ranks: the weights of one process, or a refusal that names the line to write."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cases import gap, main, plainly, refused, shown, train, windows
from torch import Tensor, nn

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import ConfigError, HvdtrainError, ReplicaError

torch.set_default_dtype(torch.float64)
SAMPLES, UPDATE, WIDE, KINDS = 16, 8, 6, 4
MADE = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES, WIDE, generator=MADE)
Y = torch.randint(0, KINDS, (SAMPLES,), generator=MADE)
HOLES = torch.where(torch.arange(SAMPLES) % 7 < 3, -100, Y)
FOUND = torch.zeros(SAMPLES, KINDS)
FOUND[[0, 1, 5, 8, 9], [0, 1, 2, 3, 0]] = 1  # the last rank finds nothing in the second update
CE = F.cross_entropy
Loss = Callable[[Any, Tensor, Tensor], Tensor]


@contextlib.contextmanager
def shared_folder(world: hvdtrain.World) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as own:
        yield Path(world.broadcast(own))
        world.barrier()


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, KINDS))


def normed() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDE, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, KINDS))


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def ready(world: hvdtrain.World, y: Tensor, model: Any, pieces: int = 1, **options: Any) -> tuple[Any, Any, Any]:
    data = hvt.loader((X, y), UPDATE // world.size // pieces, shuffle=False)
    return *hvt.prepare(model, sgd(model), data, **options), data


def one_process(model: nn.Module, y: Tensor, loss_of: Loss) -> nn.Module:
    plainly(model, sgd(model), windows(UPDATE, X, y), loss_of)
    return model


def plain_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return CE(model(x), y)


def exact(
    world: hvdtrain.World, row: str, y: Tensor, loss_of: Loss, *, make: Any = net, plain: Any = None,
    weight: Any = None, **options: Any,
) -> None:  # fmt: skip
    """Shows how far a model that was trained on ranks is from one that was trained in one process, by `plain`."""
    model, optimizer, data = ready(world, y, make(), **options)
    train(model, optimizer, data, loss_of, weight)
    shown(row, gap(model, one_process(make(), y, plain or loss_of)))


# -- losses --------------------------------------------------------------------------------------------------------
def detection(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return of_all_anchors(model(x), y)


def of_all_anchors(out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out, y, reduction="sum") / y.sum().clamp(min=1)


def case_a_whole_batch_divided_by_a_ranks_own_samples(world: hvdtrain.World) -> None:
    lines = {}
    for own in (True, False):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            model, optimizer, data = ready(world, Y, net())
            for x, y in data:
                optimizer.zero_grad()
                outputs, targets = hvt.whole(model(x), y)
                total = CE(outputs, targets, reduction="sum")
                optimizer.backward(total / len(x if own else outputs))
                optimizer.step()
        lines[own] = [line for line in out.getvalue().splitlines() if "whole batch" in line]
    assert not lines[False] and len(lines[True]) == world.is_main, lines
    shown("T38c", "one line reports it")


def case_batch_norm_of_a_ranks_own_batch_is_reported(world: hvdtrain.World) -> None:
    for options in ({}, {"sync_batchnorm": True}):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            ready(world, Y, normed(), **options)
        own = "1 batch-norm layer(s) use each rank's own batch" in out.getvalue()
        assert own is (world.is_main and not options), out.getvalue()


def case_a_scaler_beside_amp_fp16(world: hvdtrain.World) -> None:
    model, optimizer, data = ready(world, Y, net(), amp="fp16")
    scaler = torch.amp.GradScaler("cpu")
    for x, y in data:
        optimizer.zero_grad()
        optimizer.backward(scaler.scale(CE(model(x), y)))
        with refused("cannot be used with amp='fp16'", "remove the GradScaler", kind=ConfigError):
            scaler.step(optimizer)
        break


def case_prepare_whose_result_is_not_assigned(world: hvdtrain.World) -> None:
    """The plain optimizer's calls are refused until an update was made by a prepared one, and not afterwards."""
    model = net()
    optimizer = sgd(model)
    data = hvt.loader((X, Y), UPDATE // world.size, shuffle=False)
    hvt.prepare(model, optimizer, data)
    for x, y in data:
        CE(model(x), y).backward()
        with refused("step() must be called on the optimizer that prepare() returned", kind=ConfigError):
            optimizer.step()
        with refused("backward() must be called on the optimizer", kind=ConfigError):
            optimizer.backward(CE(model(x), y))  # type: ignore[attr-defined]
    with refused("prepare() returns two values, which need two names", kind=ConfigError):
        hvt.prepare(model, optimizer, data)(X)  # type: ignore[operator]
    prepared, own = hvt.prepare(model, optimizer, data)
    train(prepared, own, data, plain_loss)
    del prepared, own
    optimizer.step()


def case_a_loss_of_the_last_batch_of_a_long_epoch(world: hvdtrain.World) -> None:
    """It compares samples, and comes first after all losses that are recorded; then once an epoch.

    Of a short epoch, only its form shows that it must be tried: losses 3 and 6 are not due.
    """
    for steps in (3, 41):  # of an epoch, the last of which has half of the samples
        data = hvt.loader((X.repeat(steps, 1)[: UPDATE * steps - 4],), UPDATE // world.size, shuffle=False)
        model = net()
        model, optimizer = hvt.prepare(model, sgd(model), data)
        with refused("samples are compared with each other", kind=ConfigError):
            for _ in data.epochs(2):
                for (x,) in data:
                    optimizer.zero_grad()
                    each = model(x).square().mean(1)
                    short = len(x) < UPDATE // world.size
                    share = each.detach() / each.detach().mean()
                    optimizer.backward((each * share).mean() if short else each.mean())
                    optimizer.step()


def case_a_loss_that_is_not_0_where_nothing_counts(world: hvdtrain.World) -> None:
    model, optimizer, data = ready(world, FOUND, net())
    with refused("with weight=0, which would not count", "hvt.whole(model(x), y)", kind=ConfigError, row="T21a"):
        train(model, optimizer, data, detection, torch.sum)
    exact(world, "T21b", FOUND, lambda model, x, y: of_all_anchors(*hvt.whole(model(x), y)), plain=detection)


def case_the_first_advice_names_the_whole_batch(world: hvdtrain.World) -> None:
    model, optimizer, data = ready(world, FOUND, net())
    with refused("a number of its own", "hvt.whole(model(x), y)", kind=ConfigError):
        train(model, optimizer, data, detection)


def case_two_divisors_get_the_advice_for_two(world: hvdtrain.World) -> None:
    def two(model: Any, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        return CE(out, y.argmax(1)) + (out.abs() * y).sum() / y.sum().clamp(min=1)

    model, optimizer, data = ready(world, FOUND, net())
    with refused("optimizer.backward([(mean, divisor), ...])", kind=ConfigError):
        train(model, optimizer, data, two)


def case_a_factor_that_changes_within_an_update(world: hvdtrain.World) -> None:
    def trained(loss_of: Callable[[Tensor, Tensor, float], Any]) -> Any:
        model, optimizer, data = ready(world, Y, net(), 2, accumulate=2)
        for count, (x, y) in enumerate(data, 1):
            optimizer.zero_grad()
            optimizer.backward(loss_of(model(x), y, count / 10))
            optimizer.step()
        return model

    wanted = net()
    optimizer = sgd(wanted)
    for count, (x, y) in enumerate(windows(UPDATE // 2, X, Y), 1):
        ((CE(out := wanted(x), y) + count / 10 * out.abs().mean()) / 2).backward()
        if count % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert gap(trained(lambda out, y, beta: [(CE(out, y), len(y)), (out.abs().mean(), len(y), beta)]), wanted) < 1e-12
    of_none = trained(lambda out, y, _: [(CE(out, y), len(y)), (CE(out, y * 0 - 100), 0)])  # NaN, of no label
    assert gap(of_none, trained(lambda out, y, _: [(CE(out, y), len(y))])) < 1e-12
    with refused("(mean, divisor, factor) in that list", kind=ConfigError):
        trained(lambda out, y, beta: CE(out, y) + beta * out.abs().mean())
    with refused("its factor differs between ranks", kind=ConfigError):
        trained(lambda out, y, beta: [(CE(out, y), len(y), beta + world.rank)])
    with refused("with a number as factor", "Tensor, int, Tensor", kind=ConfigError):
        trained(lambda out, y, beta: [(CE(out, y), len(y), out.mean())])


class WithLoss(nn.Module):
    """Gives its loss, as models of transformers do with labels=."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return CE(self.net(x), y)


def case_a_compiled_model_that_gives_its_loss(world: hvdtrain.World) -> None:
    def its_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return model(x, y)  # type: ignore[no-any-return]

    def compiled() -> Any:
        return torch.compile(WithLoss(), backend="aot_eager")

    model, optimizer, data = ready(world, HOLES, compiled())
    with refused("weigh 0, by the labels that are not -100", kind=ConfigError, row="T22a"):
        train(model, optimizer, data, its_loss)
    model, optimizer, data = ready(world, HOLES, compiled())
    train(model, optimizer, data, its_loss, lambda y: (y != -100).sum())
    shown("T22b", gap(model, one_process(WithLoss(), HOLES, its_loss)))


class Fitted(nn.Module):
    """Gives its loss, a mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(WIDE, 8), nn.Linear(8, KINDS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.first(x)), y)


def case_a_loss_within_the_model_that_is_next_to_nothing(world: hvdtrain.World) -> None:
    """Rounding is all that is left of it: pieces of the batch have another rounding."""
    plain = Fitted()
    with torch.no_grad():
        wanted = X @ (plain.last.weight @ plain.first.weight).T + plain.last(plain.first.bias)
        assert 0 < float(plain(X, wanted)) < 1e-28
    model, optimizer, data = ready(world, wanted, plain)
    for _ in data.epochs(3):
        train(model, optimizer, data, lambda model, x, y: model(x, y))
    shown("T22c", "it trains on")


def case_a_refused_update_tried_again(world: hvdtrain.World) -> None:
    def contrast(model: Any, x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(model(x), dim=1)
        return CE(z @ z.T / 0.5, torch.arange(len(z)))

    tries: dict[str, Callable[[Any, Tensor, Tensor], None]] = {
        "backward": lambda model, x, y: optimizer.backward(contrast(model, x, y)),
        "again": lambda model, x, y: optimizer.backward(contrast(model, x, y), again=True),
        "step": lambda *_: None,  # of what was refused
    }
    model, optimizer, data = ready(world, Y, net())
    texts = []
    for _ in data.epochs(2):
        for x, y in data:
            for name in ("backward", "step", "backward", "again", "backward"):
                try:
                    tries[name](model, x, y)
                    optimizer.step()
                except HvdtrainError as error:
                    texts.append(f"{name}: {error}")
    assert len(texts) == 20 and gap(model, net()) == 0.0, texts
    shown("T23", f"{texts[0]}; {texts[1]}")
    with refused("the update was refused", kind=ConfigError):
        optimizer.step()
    train(model, optimizer, data, plain_loss)  # the next right one passes
    assert gap(model, net()) > 0.0


def case_a_loss_divided_by_the_batches_of_an_update(world: hvdtrain.World) -> None:
    model, optimizer, data = ready(world, Y, net(), pieces=2, accumulate=2)
    with refused("accumulate", kind=ConfigError, row="T28"):
        train(model, optimizer, data, lambda model, x, y: CE(model(x), y) / 2)
    for factor in (1.0, 0.5):  # a weight of the loss, as in 0.5 * mse

        def loss(model: Any, x: Tensor, y: Tensor, factor: float = factor) -> Tensor:
            return factor * CE(model(x), y)

        model, optimizer, data = ready(world, Y, net(), pieces=2, accumulate=2)
        train(model, optimizer, data, loss)
        assert gap(model, one_process(net(), Y, loss)) < 1e-12


# -- replicas ------------------------------------------------------------------------------------------------------
def case_pytorchs_sync_batchnorm_left_in(world: hvdtrain.World) -> None:
    model, optimizer, data = ready(world, Y, nn.SyncBatchNorm.convert_sync_batchnorm(normed()))
    train(model, optimizer, data, plain_loss)
    wanted = one_process(normed(), Y, plain_loss)
    shown("T24", gap(model, wanted))
    model, optimizer, data = ready(world, Y, normed())
    train(model, optimizer, data, plain_loss)
    assert gap(model, wanted) > 1e-3  # the twin: plain batch normalisation is of a rank's own samples


def case_weights_drawn_anew_on_each_rank(world: hvdtrain.World) -> None:
    def evaluated(model: Any, optimizer: Any, data: Any) -> None:
        hvt.evaluate(model, (X, Y), hvt.classification(top=(1,)), per_rank_batch=4)

    def saved(model: Any, optimizer: Any, data: Any) -> None:
        with shared_folder(world) as folder:
            checkpoints = hvdtrain.Checkpointer(folder, best=None)
            checkpoints.save(hvt.model_state(model, optimizer), progress=optimizer.progress)
            checkpoints.wait()

    def trained_on(model: Any, optimizer: Any, data: Any) -> None:
        train(model, optimizer, data, plain_loss)

    for row, then in (("T25a", evaluated), ("T25b", saved), ("T25c", trained_on)):
        model, optimizer, data = ready(world, Y, net())
        train(model, optimizer, data, plain_loss)
        then(model, optimizer, data)
        with torch.no_grad():
            hvt.unwrap(model)[0].weight[3] = torch.randn(WIDE, generator=torch.Generator().manual_seed(world.rank))
        with refused("the replicas must be equal", "0.weight", kind=ReplicaError, row=row):
            then(model, optimizer, data)


def case_no_loader_and_the_same_batches_on_all_ranks(world: hvdtrain.World) -> None:
    model, optimizer = hvt.prepare(model := net(), sgd(model))
    plain = [(X[at : at + 4], Y[at : at + 4]) for at in range(0, SAMPLES, 4)]
    with refused("on all 2 ranks", "hvdtrain.torch.loader", kind=ConfigError, row="T27"):
        train(model, optimizer, plain, plain_loss)
    model, optimizer = hvt.prepare(model := net(), sgd(model))
    train(model, optimizer, plain[world.rank :: world.size], plain_loss)


def case_a_loader_that_prepare_was_not_given(world: hvdtrain.World) -> None:
    model, optimizer = hvt.prepare(model := net(), sgd(model))
    with refused("must be given the loader", "prepare(model, optimizer, train)", kind=ConfigError, row="T27b"):
        train(model, optimizer, hvt.loader((X, Y), 4), plain_loss)


def case_outputs_of_one_column_against_labels_without_it(world: hvdtrain.World) -> None:
    model, optimizer, data = ready(world, Y.double(), nn.Linear(WIDE, 1))
    with refused("outputs [4, 1] meet a tensor [4]", "outputs.squeeze(1)", kind=ConfigError, row="T41"):
        train(model, optimizer, data, lambda model, x, y: ((model(x) - y) ** 2).mean())


# -- optimizers ----------------------------------------------------------------------------------------------------
def stepped(model: Any, optimizer: Any, batches: Any, backward: Callable[[Tensor], None]) -> list[float]:
    losses = []
    for x, y in batches:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = plain_loss(model, x, y)
            backward(loss)
            return loss

        losses.append(float(optimizer.step(closure)))
    return losses


def case_the_loss_of_a_closure_is_that_of_its_first_call(world: hvdtrain.World) -> None:
    plain, model = net(), net()
    alone, own = (torch.optim.LBFGS(one.parameters(), max_iter=4) for one in (plain, model))
    data = hvt.loader((X, Y), UPDATE // world.size, shuffle=False)
    model, optimizer = hvt.prepare(model, own, data)
    found = stepped(model, optimizer, data, optimizer.backward)
    wanted = stepped(plain, alone, windows(UPDATE, X, Y), Tensor.backward)
    shown("T32a", max(abs(a - b) for a, b in zip(found, wanted, strict=True)))
    assert gap(model, plain) < 1e-9
    copied = copy.deepcopy(optimizer)
    assert type(copied) is torch.optim.LBFGS and len(copied.param_groups) == 1
    shown("T32b", "a plain LBFGS")


def case_a_sum_divided_by_the_double(world: hvdtrain.World) -> None:
    """On two ranks twice a rank's samples are those of all: which is meant shows how it is written."""

    def summed(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return CE(model(x), y, reduction="sum")

    model, optimizer, data = ready(world, Y, net())
    with refused("write / 2 / len(x) if you mean it", kind=ConfigError, row="T32c"):
        train(model, optimizer, data, lambda model, x, y: summed(model, x, y) / (2 * len(x)))
    exact(world, "T32d", Y, lambda model, x, y: summed(model, x, y) / 2 / len(x))


def case_a_check_leaves_rows_that_a_forward_pass_scales(world: hvdtrain.World) -> None:
    model = nn.Sequential(nn.Embedding(10, 6, max_norm=0.5), nn.Flatten(), nn.Linear(12, KINDS))
    words = torch.arange(16).reshape(8, 2) % 10
    before = copy.deepcopy(model)
    assert hvt.check(lambda batch: CE(model(batch[0]), batch[1]), (words, Y[:8])).exact
    assert gap(model, before) == 0.0
    CE(model(words), Y[:8])
    assert gap(model, before) > 0.0
    shown("T32e", "the weights stay as they were")


def case_a_gradient_scaler_of_ones_own_with_accumulation(world: hvdtrain.World) -> None:
    model, optimizer, data = ready(world, Y, net(), pieces=2, accumulate=2)
    scaler = torch.amp.GradScaler("cpu")
    with refused('amp="fp16"', "completes no update", kind=ConfigError, row="T33a"):
        for x, y in data:
            optimizer.backward(scaler.scale(plain_loss(model, x, y)))
            scaler.step(optimizer)
            scaler.update()


def case_a_mask_that_is_empty_on_a_rank(world: hvdtrain.World) -> None:
    def masked(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return (model(x).abs() * y).sum() / y.sum()

    model, optimizer, data = ready(world, FOUND, net())
    with refused("= 0; weighed by 4", kind=ConfigError, row="T33b"):
        for batch in list(data)[1:]:
            train(model, optimizer, [batch], masked)
    exact(world, "T33c", FOUND, masked, weight=torch.sum)


def case_a_mean_over_the_entries_of_two_losses(world: hvdtrain.World) -> None:
    def joined(model: Any, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        return torch.cat([CE(out, y, reduction="none"), out[y == 1, 1:].square().sum(1)]).mean()  # y: once, or never

    exact(world, "T33d", Y, joined, weight=lambda y: len(y) + (y == 1).sum())


# -- weights of 0 ----------------------------------------------------------------------------------------------------
def every_other(y: Tensor) -> Tensor:
    """Returns the labels with those of the first rank's samples left out."""
    return torch.where(torch.arange(len(y)) % UPDATE < UPDATE // 2, -100, y)


def without_labels(world: hvdtrain.World, way: str, **options: Any) -> float:
    y = every_other(Y)
    model, optimizer, data = ready(world, y, normed(), sync_batchnorm=True, **options)
    for x, labels in data:
        optimizer.zero_grad()
        loss, count = CE(model(x), labels), (labels != -100).sum()
        if way == "list":
            optimizer.backward([(loss, count)])
        else:
            optimizer.backward(loss, weight=count)
        optimizer.step()
    return gap(model, one_process(normed(), y, plain_loss))


def case_a_rank_without_labels_is_in_the_statistics(world: hvdtrain.World) -> None:
    """Its samples have a part in the mean and the variance of all: what others' labels give goes through them."""
    found = [
        without_labels(world, "weight"),
        without_labels(world, "list"),
        without_labels(world, "weight", verify=False),
    ]
    shown("T36a", max(found))


def case_means_that_other_ranks_lack_meet_in_the_statistics(world: hvdtrain.World) -> None:
    """Each mean of a list has a backward pass of its own with accumulate=, on ranks where it counts nothing, too."""

    def means(out: Tensor, which: Tensor) -> list[tuple[Tensor, Tensor]]:
        parts = [(which % UPDATE < UPDATE // 4).double(), (which % UPDATE == UPDATE - 1).double()]
        return [
            ((out - at).square().sum(1) @ part / part.sum().clamp(min=1), part.sum()) for at, part in enumerate(parts)
        ]

    trained = []
    for accumulate in (1, 2):
        data = hvt.loader((X, torch.arange(SAMPLES)), UPDATE // 2, shuffle=False)
        model, optimizer = hvt.prepare(model := normed(), sgd(model), data, sync_batchnorm=True, accumulate=accumulate)
        train(model, optimizer, data, lambda model, x, which: means(model(x), which))
        trained.append(model)
        optimizer.close()
    once, both = normed(), normed()
    steps, outputs = sgd(both), []

    def of_one(model: Any, x: Tensor, which: Tensor) -> Tensor:
        outputs.append(both(x))
        return sum((mean for mean, _ in means(model(x), which)), torch.zeros(()))

    plainly(once, sgd(once), windows(UPDATE, X, torch.arange(SAMPLES)), of_one)
    sum(mean for mean, _ in means(torch.cat(outputs), torch.arange(SAMPLES))).backward()
    steps.step()
    shown("T36b", max(map(gap, trained, (once, both))))


def case_a_gradient_penalty_goes_through_the_statistics(world: hvdtrain.World) -> None:
    def penalised(model: Any, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return CE(out, y) + (slope.norm(dim=1) - 1).square().mean()

    exact(world, "T36c", Y, penalised, make=normed, sync_batchnorm=True)


def case_a_learned_weight_of_a_mean_that_a_rank_lacks(world: hvdtrain.World) -> None:
    """exp(-s) x mean + s is s where the mean counts nothing: no output has a part in it."""

    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.log = net(), nn.Parameter(torch.full((2,), 0.3))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.net(x)
            return found

    def means(model: Any, x: Tensor, y: Tensor) -> list[tuple[Tensor, Any]]:
        out, log, some = model(x), hvt.unwrap(model).log, (y != -100).double()
        masked = out.square().sum(1) @ some / some.sum().clamp(min=1)
        return [((-log[0]).exp() * out.abs().mean() + log[0], len(x)), ((-log[1]).exp() * masked + log[1], some.sum())]

    exact(
        world, "T36d", every_other(Y), means, make=Weighed,
        plain=lambda model, x, y: sum(mean for mean, _ in means(model, x, y)),
    )  # fmt: skip


# -- parameters past the prepared model ------------------------------------------------------------------------------
class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = net(), nn.Linear(KINDS, KINDS)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.net(x))
        return found


def case_a_head_with_an_optimizer_of_its_own(world: hvdtrain.World) -> None:
    head = nn.Linear(KINDS, KINDS)
    model, optimizer, data = ready(world, Y, net())
    own = torch.optim.SGD(head.parameters(), lr=0.5)
    with refused("must belong to the prepared model", "whose groups have separate rates", kind=ConfigError, row="T37a"):
        for x, y in data:
            optimizer.backward(CE(head(model(x)), y))
            optimizer.step()
            own.step()
    optimizer.close()
    torch.manual_seed(3)
    both = WithHead()
    alone = copy.deepcopy(both)

    def grouped(model: WithHead) -> Any:
        groups = [{"params": model.net.parameters(), "lr": 0.1}, {"params": model.head.parameters(), "lr": 0.5}]
        return torch.optim.SGD(groups)

    data = hvt.loader((X, Y), UPDATE // world.size, shuffle=False)
    model, optimizer = hvt.prepare(both, grouped(both), data)
    train(model, optimizer, data, plain_loss)
    plainly(alone, grouped(alone), windows(UPDATE, X, Y), plain_loss)
    shown("T37b", gap(model, alone))


def case_an_optimizer_that_the_loss_does_not_reach(world: hvdtrain.World) -> None:
    """A teacher that has gradients and is not stepped is right; another model's plain training is reported."""
    teacher, other = net(), net()
    model, optimizer, data = ready(world, Y, net())
    own = torch.optim.RMSprop(other.parameters(), lr=0.1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for x, y in data:
            optimizer.zero_grad()
            optimizer.backward(CE(model(x), y) + (model(x) - teacher(x)).square().mean())
            optimizer.step()
            own.zero_grad()
            CE(other(x), y).backward()
            own.step()
    assert printed.getvalue().count("RMSprop.step() on 2 ranks of an optimizer that is not prepared") == world.is_main
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        for x, y in hvt.loader((X, Y), 4):  # without prepare()
            own.zero_grad()
            CE(other(x), y).backward()
            own.step()
    assert "read rank 0's part" not in printed.getvalue(), "the advice would be that of an evaluation"
    shown("T37c", "one line reports it")


def case_an_optimizer_made_after_prepare(world: hvdtrain.World) -> None:
    """It takes the name of the prepared one, which is deleted: what it trains is reported."""
    model, optimizer, data = ready(world, Y, net())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for x, y in data:
            optimizer.zero_grad()
            CE(model(x), y).backward()
            optimizer.step()
    assert printed.getvalue().count("Adagrad.step() on 2 ranks of an optimizer that is not prepared") == world.is_main
    shown("T37d", "one line reports it")


# -- the whole batch beside a part of it -----------------------------------------------------------------------------
def case_a_loss_of_the_whole_and_of_a_part(world: hvdtrain.World) -> None:
    model, optimizer, data = ready(world, Y, net())
    with refused("computed only from what hvt.whole() returned", kind=ConfigError, row="T38a"):
        for x, y in data:
            out = model(x)
            every, labels = hvt.whole(out, y)
            optimizer.backward(CE(every, labels) + out.square().mean())
    optimizer.close()

    def both(out: Tensor, y: Tensor) -> Tensor:
        return CE(out, y) + out.square().mean().sqrt()

    exact(
        world, "T38b", Y, lambda model, x, y: both(*hvt.whole(model(x), y)),
        plain=lambda model, x, y: both(model(x), y),
    )  # fmt: skip


class Tempered(nn.Module):
    """Gives a learned number beside its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log = net(), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), self.log.exp()


def case_a_number_of_the_model_where_a_rank_has_no_sample(world: hvdtrain.World) -> None:
    """The last update has one sample: the rank without any has its part in the number's gradient, too."""

    def scaled(out: Tensor, number: Tensor, y: Tensor) -> Tensor:
        return CE(out * number, y)

    x, y = X[:9], Y[:9]
    data = hvt.loader((x, y), UPDATE // world.size, shuffle=False)
    model, optimizer = hvt.prepare(model := Tempered(), sgd(model), data)
    train(model, optimizer, data, lambda model, x, y: scaled(*hvt.whole(*model(x), y)))
    plainly(plain := Tempered(), sgd(plain), windows(UPDATE, x, y), lambda model, x, y: scaled(*model(x), y))
    assert gap(model, plain) < 1e-12, gap(model, plain)


class Heads(nn.Module):
    """Gives a list: a number a sample for each head, or two rows for each sample."""

    def __init__(self, of_samples: bool) -> None:
        super().__init__()
        self.body, self.of_samples = net(), of_samples

    def forward(self, x: Tensor) -> list[Tensor]:
        out = self.body(x)
        return [torch.stack([row, -row]) for row in out] if self.of_samples else list(out.T)


def case_a_list_of_outputs_is_of_samples_or_of_parts(world: hvdtrain.World) -> None:
    """Of as many heads as a rank has samples, in the first batch; and in the tail, after batches that are clear."""
    model, optimizer, data = ready(world, Y, Heads(of_samples=False))
    with refused("it may be n samples, or n parts", kind=ConfigError, row="T40a"):
        for x, _ in data:
            hvt.whole(model(x))
    optimizer.close()
    data = hvt.loader((X, Y), 3, shuffle=False)
    model, optimizer = hvt.prepare(model := Heads(of_samples=True), sgd(model), data)
    sizes = []
    for x, _ in data:
        every = hvt.whole(model(x))
        sizes.append((len(every), *every[0].shape))
        optimizer.backward(torch.cat(every).square().mean())
        optimizer.step()
    assert [one for one, *_ in sizes] == [6, 6, 4] and {tuple(rest) for _, *rest in sizes} == {(2, KINDS)}, sizes


class Two(nn.Module):
    """Gives two outputs, alike in shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = net(), net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(-x)


def case_two_outputs_of_a_batch_in_halves(world: hvdtrain.World) -> None:
    """Each half gives both: of one that has samples of each half, the other seemed to have the rest of the batch."""

    def halves(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        parts = [model(x[: len(x) // 2]), model(x[len(x) // 2 :])]
        first, second = (torch.cat(each) for each in zip(*parts, strict=True))
        return CE(first, y) + CE(second, y), second

    def centred(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss, second = halves(model, x, y)
        return loss + (second - second.mean(0)).square().mean()

    def right(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return halves(model, x, y)[0]

    model, optimizer, data = ready(world, Y, Two())
    train(model, optimizer, data, right)
    assert gap(model, one_process(Two(), Y, right)) <= 1e-10
    model, optimizer, data = ready(world, Y, Two())
    with refused("must be the weighted mean of the losses of its pieces", kind=ConfigError):
        train(model, optimizer, data, centred)


def case_a_buffer_that_parts_is_reported(world: hvdtrain.World) -> None:
    model = normed()
    model.register_buffer("factor", torch.ones(()))
    model, optimizer, data = ready(world, Y, model)
    train(model, optimizer, data, plain_loss)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        for _ in range(2):
            hvt.unwrap(model).factor.fill_(1.0 + world.rank)
            hvt.evaluate(model, data, lambda outputs, targets: {"right": outputs.argmax(1) == targets})
    assert text.getvalue().count("buffers differ between ranks: factor") == world.is_main, text.getvalue()
    assert hvt.unwrap(model).factor == 1
    shown("T40b", "one line names it; all ranks have that of rank 0")


if __name__ == "__main__":
    main(globals().copy())
