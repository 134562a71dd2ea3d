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
from cases import main, refused
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


def shown(world: hvdtrain.World, row: str, text: object) -> None:
    if world.is_main:
        print(f"shown {row} {' '.join(str(text).split())}", flush=True)


@contextlib.contextmanager
def shared_folder(world: hvdtrain.World) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as own:
        yield Path(world.broadcast(own))
        world.barrier()


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, KINDS))


def dealt(world: hvdtrain.World, y: Tensor, pieces: int = 1) -> Any:
    return hvt.loader((X, y), UPDATE // world.size // pieces, shuffle=False)


def prepared(model: Any, data: Any, **options: Any) -> tuple[Any, Any]:
    return hvt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, **options)


def train(model: Any, optimizer: Any, data: Any, loss_of: Loss, weight: Callable[[Tensor], Any] | None = None) -> None:
    for x, y in data:
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, x, y), **({} if weight is None else {"weight": weight(y)}))
        optimizer.step()


def one_process(model: nn.Module, y: Tensor, loss_of: Loss) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for at in range(0, SAMPLES, UPDATE):
        optimizer.zero_grad()
        loss_of(model, X[at : at + UPDATE], y[at : at + UPDATE]).backward()
        optimizer.step()
    return model


def gap(found: Any, wanted: nn.Module) -> float:
    pairs = zip(hvt.unwrap(found).state_dict().values(), wanted.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def said(world: hvdtrain.World, row: str, error: HvdtrainError) -> None:
    shown(world, row, error)
    raise error


# -- losses --------------------------------------------------------------------------------------------------------
def detection(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return of_all_anchors(model(x), y)


def of_all_anchors(out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out, y, reduction="sum") / y.sum().clamp(min=1)


def case_a_whole_batch_divided_by_a_ranks_own_samples(world: hvdtrain.World) -> None:
    lines = {}
    for own in (True, False):
        model = net()
        data = dealt(world, Y)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            model, optimizer = prepared(model, data)
            for x, y in data:
                optimizer.zero_grad()
                outputs, targets = hvt.whole(model(x), y)
                total = CE(outputs, targets, reduction="sum")
                optimizer.backward(total / len(x if own else outputs))
                optimizer.step()
        lines[own] = [line for line in out.getvalue().splitlines() if "whole batch" in line]
    assert not lines[False] and len(lines[True]) == world.is_main, lines
    shown(world, "T38c", "one line reports it")


def case_a_loss_that_is_not_0_where_nothing_counts(world: hvdtrain.World) -> None:
    data = dealt(world, FOUND)
    model, optimizer = prepared(net(), data)
    with refused("with weight=0, which would not count", "hvt.whole(model(x), y)", kind=ConfigError):
        try:
            train(model, optimizer, data, detection, torch.sum)
        except ConfigError as error:
            said(world, "T21a", error)
    data = dealt(world, FOUND)
    model, optimizer = prepared(net(), data)
    train(model, optimizer, data, lambda model, x, y: of_all_anchors(*hvt.whole(model(x), y)))
    shown(world, "T21b", gap(model, one_process(net(), FOUND, detection)))


def case_the_first_advice_names_the_whole_batch(world: hvdtrain.World) -> None:
    data = dealt(world, FOUND)
    model, optimizer = prepared(net(), data)
    with refused("the number that divides it", "hvt.whole(model(x), y)", kind=ConfigError):
        train(model, optimizer, data, detection)


def case_two_divisors_get_the_advice_for_two(world: hvdtrain.World) -> None:
    def two(model: Any, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        return CE(out, y.argmax(1)) + (out.abs() * y).sum() / y.sum().clamp(min=1)

    data = dealt(world, FOUND)
    model, optimizer = prepared(net(), data)
    with refused("optimizer.backward([(mean, divisor), ...])", kind=ConfigError):
        train(model, optimizer, data, two)


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

    data = dealt(world, HOLES)
    model, optimizer = prepared(torch.compile(WithLoss(), backend="aot_eager"), data)
    with refused("weigh 0, by the labels that are not -100", kind=ConfigError):
        try:
            train(model, optimizer, data, its_loss)
        except ConfigError as error:
            said(world, "T22a", error)
    data = dealt(world, HOLES)
    model, optimizer = prepared(torch.compile(WithLoss(), backend="aot_eager"), data)
    train(model, optimizer, data, its_loss, lambda y: (y != -100).sum())
    shown(world, "T22b", gap(model, one_process(WithLoss(), HOLES, its_loss)))


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
    data = dealt(world, wanted)
    model, optimizer = prepared(plain, data)
    for _ in data.epochs(3):
        train(model, optimizer, data, lambda model, x, y: model(x, y))
    shown(world, "T22c", "it trains on")


def case_a_refused_update_tried_again(world: hvdtrain.World) -> None:
    def contrast(model: Any, x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(model(x), dim=1)
        return CE(z @ z.T / 0.5, torch.arange(len(z)))

    tries: dict[str, Callable[[Any, Tensor, Tensor], None]] = {
        "backward": lambda model, x, y: optimizer.backward(contrast(model, x, y)),
        "again": lambda model, x, y: optimizer.backward(contrast(model, x, y), again=True),
        "step": lambda *_: None,  # of what was refused
    }
    data = dealt(world, Y)
    model, optimizer = prepared(net(), data)
    texts = []
    for _ in data.epochs(2):
        for x, y in data:
            for name in ("backward", "step", "backward", "again", "backward"):
                try:
                    tries[name](model, x, y)
                    optimizer.step()
                except HvdtrainError as error:
                    texts.append(f"{name}: {error.rule}")
    assert len(texts) == 20 and gap(model, net()) == 0.0, texts
    shown(world, "T23", f"{texts[0]}; {texts[1]}")
    with refused("the update was refused", kind=ConfigError):
        optimizer.step()
    train(model, optimizer, data, plain_loss)  # the next right one passes
    assert gap(model, net()) > 0.0


def case_a_loss_divided_by_the_batches_of_an_update(world: hvdtrain.World) -> None:
    data = dealt(world, Y, pieces=2)
    model, optimizer = prepared(net(), data, accumulate=2)
    with refused("accumulate", kind=ConfigError):
        try:
            train(model, optimizer, data, lambda model, x, y: CE(model(x), y) / 2)
        except ConfigError as error:
            said(world, "T28", error)
    for factor in (1.0, 0.5):  # a weight of the loss, as in 0.5 * mse

        def loss(model: Any, x: Tensor, y: Tensor, factor: float = factor) -> Tensor:
            return factor * CE(model(x), y)

        data = dealt(world, Y, pieces=2)
        model, optimizer = prepared(net(), data, accumulate=2)
        train(model, optimizer, data, loss)
        assert gap(model, one_process(net(), Y, loss)) < 1e-12


# -- replicas ------------------------------------------------------------------------------------------------------
def normed() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDE, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, KINDS))


def plain_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return CE(model(x), y)


def case_pytorchs_sync_batchnorm_left_in(world: hvdtrain.World) -> None:
    data = dealt(world, Y)
    model, optimizer = prepared(nn.SyncBatchNorm.convert_sync_batchnorm(normed()), data)
    train(model, optimizer, data, plain_loss)
    wanted = one_process(normed(), Y, plain_loss)
    shown(world, "T24", gap(model, wanted))
    data = dealt(world, Y)
    model, optimizer = prepared(normed(), data)
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
        data = dealt(world, Y)
        model, optimizer = prepared(net(), data)
        train(model, optimizer, data, plain_loss)
        then(model, optimizer, data)
        with torch.no_grad():
            hvt.unwrap(model)[0].weight[3] = torch.randn(WIDE, generator=torch.Generator().manual_seed(world.rank))
        with refused("the replicas must be equal", "0.weight", kind=ReplicaError):
            try:
                then(model, optimizer, data)
            except ReplicaError as error:
                said(world, row, error)


def case_no_loader_and_the_same_batches_on_all_ranks(world: hvdtrain.World) -> None:
    model, optimizer = prepared(net(), None)
    plain = [(X[at : at + 4], Y[at : at + 4]) for at in range(0, SAMPLES, 4)]
    with refused("on all 2 ranks", "hvdtrain.torch.loader", kind=ConfigError):
        try:
            train(model, optimizer, plain, plain_loss)
        except ConfigError as error:
            said(world, "T27", error)
    model, optimizer = prepared(net(), None)
    train(model, optimizer, plain[world.rank :: world.size], plain_loss)


# -- optimizers ----------------------------------------------------------------------------------------------------
def case_the_loss_of_a_closure_is_that_of_its_first_call(world: hvdtrain.World) -> None:
    data, plain = dealt(world, Y), net()
    model, found = net(), []
    model, optimizer = hvt.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=4), data)
    for x, y in data:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = plain_loss(model, x, y)
            optimizer.backward(loss)
            return loss

        found.append(float(optimizer.step(closure)))
    alone, wanted = torch.optim.LBFGS(plain.parameters(), max_iter=4), []
    for at in range(0, SAMPLES, UPDATE):

        def its(at: int = at) -> Tensor:
            alone.zero_grad()
            loss = plain_loss(plain, X[at : at + UPDATE], Y[at : at + UPDATE])
            loss.backward()
            return loss

        wanted.append(float(alone.step(its).detach()))
    shown(world, "T32a", max(abs(a - b) for a, b in zip(found, wanted, strict=True)))
    assert gap(model, plain) < 1e-9
    copied = copy.deepcopy(optimizer)
    assert type(copied) is torch.optim.LBFGS and len(copied.param_groups) == 1
    shown(world, "T32b", "a plain LBFGS")


def case_a_sum_divided_by_the_double(world: hvdtrain.World) -> None:
    """On two ranks twice a rank's samples are those of all: which is meant shows how it is written."""

    def summed(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return CE(model(x), y, reduction="sum")

    data = dealt(world, Y)
    model, optimizer = prepared(net(), data)
    with refused("write / 2 / len(x) if you mean it", kind=ConfigError):
        try:
            train(model, optimizer, data, lambda model, x, y: summed(model, x, y) / (2 * len(x)))
        except ConfigError as error:
            said(world, "T32c", error)
    data = dealt(world, Y)
    model, optimizer = prepared(net(), data)
    train(model, optimizer, data, lambda model, x, y: summed(model, x, y) / 2 / len(x))
    shown(world, "T32d", gap(model, one_process(net(), Y, lambda model, x, y: summed(model, x, y) / 2 / len(x))))


def case_a_check_leaves_rows_that_a_forward_pass_scales(world: hvdtrain.World) -> None:
    model = nn.Sequential(nn.Embedding(10, 6, max_norm=0.5), nn.Flatten(), nn.Linear(12, KINDS))
    words = torch.arange(16).reshape(8, 2) % 10
    before = copy.deepcopy(model)
    assert hvt.check(lambda batch: CE(model(batch[0]), batch[1]), (words, Y[:8])).exact
    assert gap(model, before) == 0.0
    CE(model(words), Y[:8])
    assert gap(model, before) > 0.0
    shown(world, "T32e", "the weights stay as they were")


def case_a_gradient_scaler_of_ones_own_with_accumulation(world: hvdtrain.World) -> None:
    data = dealt(world, Y, pieces=2)
    model, optimizer = prepared(net(), data, accumulate=2)
    scaler = torch.amp.GradScaler("cpu")
    with refused('amp="fp16"', "completes no update", kind=ConfigError):
        try:
            for x, y in data:
                optimizer.backward(scaler.scale(plain_loss(model, x, y)))
                scaler.step(optimizer)
                scaler.update()
        except ConfigError as error:
            said(world, "T33a", error)


def case_a_mask_that_is_empty_on_a_rank(world: hvdtrain.World) -> None:
    def masked(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return (model(x).abs() * y).sum() / y.sum()

    data = dealt(world, FOUND)
    model, optimizer = prepared(net(), data)
    with refused("= 0; weighed by 4", kind=ConfigError):
        try:
            for batch in list(data)[1:]:
                train(model, optimizer, [batch], masked)
        except ConfigError as error:
            said(world, "T33b", error)
    data = dealt(world, FOUND)
    model, optimizer = prepared(net(), data)
    train(model, optimizer, data, masked, torch.sum)
    shown(world, "T33c", gap(model, one_process(net(), FOUND, masked)))


# -- weights of 0 ----------------------------------------------------------------------------------------------------
def every_other(y: Tensor) -> Tensor:
    """Returns the labels with those of the first rank's samples left out."""
    return torch.where(torch.arange(len(y)) % UPDATE < UPDATE // 2, -100, y)


def without_labels(world: hvdtrain.World, way: str, **options: Any) -> float:
    y = every_other(Y)
    data = dealt(world, y)
    model, optimizer = prepared(normed(), data, sync_batchnorm=True, **options)
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
    shown(world, "T36a", max(found))


def case_means_that_other_ranks_lack_meet_in_the_statistics(world: hvdtrain.World) -> None:
    """Each mean of a list has a backward pass of its own with accumulate=, on ranks where it counts nothing, too."""

    def means(out: Tensor, which: Tensor) -> list[tuple[Tensor, Tensor]]:
        parts = [(which % UPDATE < UPDATE // 4).double(), (which % UPDATE == UPDATE - 1).double()]
        return [
            ((out - at).square().sum(1) @ part / part.sum().clamp(min=1), part.sum()) for at, part in enumerate(parts)
        ]

    data = hvt.loader((X, torch.arange(SAMPLES)), UPDATE // 2, shuffle=False)
    model, optimizer = prepared(normed(), data, sync_batchnorm=True, accumulate=1)
    for x, which in data:
        optimizer.backward(means(model(x), which))
        optimizer.step()
    optimizer.close()
    data = hvt.loader((X, torch.arange(SAMPLES)), UPDATE // 2, shuffle=False)
    several, optimizer = prepared(normed(), data, sync_batchnorm=True, accumulate=2)
    for x, which in data:
        optimizer.backward(means(several(x), which))
        optimizer.step()
    once, both = normed(), normed()
    step, steps = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (once, both))
    outputs = []
    for at in range(0, SAMPLES, UPDATE):
        which = torch.arange(at, at + UPDATE)
        step.zero_grad()
        sum(mean for mean, _ in means(once(X[which]), which)).backward()
        step.step()
        outputs.append(both(X[which]))
    sum(mean for mean, _ in means(torch.cat(outputs), torch.arange(SAMPLES))).backward()
    steps.step()
    shown(world, "T36b", max(gap(model, once), gap(several, both)))


def case_a_gradient_penalty_goes_through_the_statistics(world: hvdtrain.World) -> None:
    def penalised(model: Any, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return CE(out, y) + (slope.norm(dim=1) - 1).square().mean()

    data = dealt(world, Y)
    model, optimizer = prepared(normed(), data, sync_batchnorm=True)
    train(model, optimizer, data, penalised)
    shown(world, "T36c", gap(model, one_process(normed(), Y, penalised)))


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

    y, data = every_other(Y), dealt(world, every_other(Y))
    model, optimizer = prepared(Weighed(), data)
    for x, labels in data:
        optimizer.zero_grad()
        optimizer.backward(means(model, x, labels))
        optimizer.step()
    plain = one_process(Weighed(), y, lambda model, x, y: sum(mean for mean, _ in means(model, x, y)))
    shown(world, "T36d", gap(model, plain))


# -- parameters past the prepared model ------------------------------------------------------------------------------
class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = net(), nn.Linear(KINDS, KINDS)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.net(x))
        return found


def case_a_head_with_an_optimizer_of_its_own(world: hvdtrain.World) -> None:
    data, head = dealt(world, Y), nn.Linear(KINDS, KINDS)
    model, optimizer = prepared(net(), data)
    own = torch.optim.SGD(head.parameters(), lr=0.5)
    with refused("must be those of the prepared model", "whose groups have rates", kind=ConfigError):
        try:
            for x, y in data:
                optimizer.backward(CE(head(model(x)), y))
                optimizer.step()
                own.step()
        except ConfigError as error:
            said(world, "T37a", error)
    optimizer.close()
    torch.manual_seed(3)
    both, data = WithHead(), dealt(world, Y)
    alone = copy.deepcopy(both)

    def grouped(model: WithHead) -> Any:
        groups = [{"params": model.net.parameters(), "lr": 0.1}, {"params": model.head.parameters(), "lr": 0.5}]
        return torch.optim.SGD(groups)

    model, optimizer = hvt.prepare(both, grouped(both), data)
    train(model, optimizer, data, plain_loss)
    step = grouped(alone)
    for at in range(0, SAMPLES, UPDATE):
        step.zero_grad()
        plain_loss(alone, X[at : at + UPDATE], Y[at : at + UPDATE]).backward()
        step.step()
    shown(world, "T37b", gap(model, alone))


def case_an_optimizer_that_the_loss_does_not_reach(world: hvdtrain.World) -> None:
    """A teacher that has gradients and is not stepped is right; another model's plain training is reported."""
    data, teacher, other = dealt(world, Y), net(), net()
    model, optimizer = prepared(net(), data)
    own = torch.optim.RMSprop(other.parameters(), lr=0.1)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for x, y in data:
            optimizer.zero_grad()
            optimizer.backward(CE(model(x), y) + (model(x) - teacher(x)).square().mean())
            optimizer.step()
            own.zero_grad()
            CE(other(x), y).backward()
            own.step()
    assert said.getvalue().count("RMSprop.step() of an optimizer that is not prepared") == world.is_main
    shown(world, "T37c", "one line reports it")


# -- the whole batch beside a part of it -----------------------------------------------------------------------------
def case_a_loss_of_the_whole_and_of_a_part(world: hvdtrain.World) -> None:
    data = dealt(world, Y)
    model, optimizer = prepared(net(), data)
    with refused("computed of what hvt.whole() returned", kind=ConfigError):
        try:
            for x, y in data:
                out = model(x)
                every, labels = hvt.whole(out, y)
                optimizer.backward(CE(every, labels) + out.square().mean())
        except ConfigError as error:
            said(world, "T38a", error)
    optimizer.close()
    data = dealt(world, Y)
    model, optimizer = prepared(net(), data)

    def both(out: Tensor, y: Tensor) -> Tensor:
        return CE(out, y) + out.square().mean().sqrt()

    train(model, optimizer, data, lambda model, x, y: both(*hvt.whole(model(x), y)))
    shown(world, "T38b", gap(model, one_process(net(), Y, lambda model, x, y: both(model(x), y))))


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
    data = dealt(world, Y)
    model, optimizer = prepared(Heads(of_samples=False), data)
    with refused("it may be n samples, or n parts", kind=ConfigError):
        try:
            for x, _ in data:
                hvt.whole(model(x))
        except ConfigError as error:
            said(world, "T40a", error)
    optimizer.close()
    data = hvt.loader((X, Y), 3, shuffle=False)
    model, optimizer = prepared(Heads(of_samples=True), data)
    sizes = []
    for x, _ in data:
        every = hvt.whole(model(x))
        sizes.append((len(every), *every[0].shape))
        optimizer.backward(torch.cat(every).square().mean())
        optimizer.step()
    assert [one for one, *_ in sizes] == [6, 6, 4] and {tuple(rest) for _, *rest in sizes} == {(2, KINDS)}, sizes


def case_a_buffer_that_parts_is_reported(world: hvdtrain.World) -> None:
    data, model = dealt(world, Y), normed()
    model.register_buffer("factor", torch.ones(()))
    model, optimizer = prepared(model, data)
    train(model, optimizer, data, plain_loss)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        for _ in range(2):
            hvt.unwrap(model).factor.fill_(1.0 + world.rank)
            hvt.evaluate(model, data, lambda outputs, targets: {"right": outputs.argmax(1) == targets})
    assert text.getvalue().count("buffers differ between ranks: factor") == world.is_main, text.getvalue()
    assert hvt.unwrap(model).factor == 1
    shown(world, "T40b", "one line names it; all ranks have that of rank 0")


if __name__ == "__main__":
    main(globals().copy())
