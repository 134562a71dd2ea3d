"""Losses and layers on ranks and in micro-batches, against one process of plain PyTorch in float64.

usage: losses.py ENGINE OUT.json [all]    "all": in micro-batches too, and each loss in every way

A loss is "exact" as it is, "weighted" (refused with the weight to give, exact with it), or "refused".
"""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from cases import plainly, report
from torch import Tensor, nn

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import HvdtrainError

UPDATE, SAMPLES, WIDTH, KINDS, LONG = 24, 29, 6, 3, 5  # the last update has 5 samples
CLASSES = torch.tensor([1.0, 5.0, 0.5], dtype=torch.float64)
MADE = torch.Generator().manual_seed(3)
X = torch.randn(SAMPLES, WIDTH, generator=MADE, dtype=torch.float64)
Y = torch.randint(0, KINDS, (SAMPLES,), generator=MADE)
HOLES = torch.where(torch.rand(SAMPLES, generator=MADE) < 0.4, -100, Y)
HOLES[:9] = -100  # micro-batches, and ranks, of which no label counts
TOKENS = torch.randint(0, KINDS, (SAMPLES, LONG), generator=MADE)
TOKENS[torch.arange(LONG)[None] >= torch.randint(0, LONG + 1, (SAMPLES, 1), generator=MADE)] = -100
TOKENS[:3] = -100
REAL = torch.randn(SAMPLES, KINDS, generator=MADE, dtype=torch.float64)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, KINDS))


def sequence() -> nn.Module:
    """[n, WIDTH] to [n, LONG, KINDS]."""
    return nn.Sequential(nn.Linear(WIDTH, 4 * LONG), nn.Tanh(), nn.Unflatten(1, (LONG, 4)), nn.Linear(4, KINDS))


def flat_tokens() -> nn.Module:
    """[n, WIDTH] to [n LONG, 12]: as many kinds as a rank of two has samples."""
    return nn.Sequential(nn.Linear(WIDTH, LONG * 12), nn.Unflatten(1, (LONG, 12)), nn.Flatten(0, 1))


def wide() -> nn.Module:
    """[n, WIDTH] to [n, 12]: as wide as a rank of two has samples."""
    return nn.Linear(WIDTH, 12)


def nodes_of_samples(x: Tensor) -> Tensor:
    """Whose each node is [nodes]: one sample in two has one, the other three, so that as a rule there are two each."""
    places = (X[:, 0] == x[:, :1]).double().argmax(1)
    return torch.arange(len(x)).repeat_interleave(1 + 2 * (places % 2))


class Nodes(nn.Module):
    """[n, WIDTH] to [nodes, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        sample = nodes_of_samples(x)
        return torch.tanh(self.only(x[sample]))


class NodesBesideOthers(Nodes):
    def forward(self, x: Tensor) -> Any:
        return (nodes := super().forward(x)), nodes.repeat(12, 1).exp(), nodes[: len(x)].exp()


class Unsure(nn.Module):
    """Two heads, whose losses are weighed by learned numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.doubt = plain(), nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Comparing(nn.Module):
    """Gives nothing but its loss, in which samples meet; before that, they meet in a batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, KINDS))

    def forward(self, x: Tensor) -> Tensor:
        return contrastive(self.body(x))


class SequenceFirst(nn.Module):
    """[n, WIDTH] to [4, n, KINDS]: as long as a micro-batch is wide, where there are 6 of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(4, KINDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).view(len(x), 4, 4)).transpose(0, 1)


# -- losses: (outputs, targets, model, inputs) -> scalar ---------------------------------------------------------------
Loss = Callable[[Tensor, Any, nn.Module, Tensor], Tensor]


def masked(outputs: Tensor, y: Tensor, *_: Any) -> Tensor:
    mask = (y != -100).double()
    return (F.cross_entropy(outputs, y.clamp_min(0), reduction="none") * mask).sum() / mask.sum()


def selected(outputs: Tensor, y: Tensor, *_: Any) -> Tensor:
    return F.cross_entropy(outputs, y.clamp_min(0), reduction="none")[y != -100].mean()


def clamped(outputs: Tensor, y: Tensor, *_: Any) -> Tensor:
    mask = (y != -100).double()
    return (F.cross_entropy(outputs, y.clamp_min(0), reduction="none") * mask).sum() / mask.sum().clamp(min=1)


def selected_or_nothing(outputs: Tensor, y: Tensor, model: nn.Module, x: Tensor) -> Tensor:
    """With a penalty on weights, so that the loss is not 0 where no label counts."""
    data = selected(outputs, y) if (y != -100).any() else outputs.sum() * 0
    return data + 0.01 * sum((p**2).sum() for p in model.parameters())


def mean_by_sample(outputs: Tensor, y: Tensor, *_: Any) -> Tensor:
    shares = (y[:, 0] + 3).abs()
    return (((outputs - y) ** 2).mean(1) * shares).sum() / shares.sum()


def focal(outputs: Tensor, y: Tensor, *_: Any) -> Tensor:
    hot = F.one_hot(y, KINDS).double()
    chance = torch.sigmoid(outputs)
    distance = (hot - chance).abs()
    return (distance**2 * F.binary_cross_entropy_with_logits(outputs, hot, reduction="none")).sum() / (y + 1).sum()


def dice(outputs: Tensor, y: Tensor, *_: Any) -> Tensor:
    chance, hot = outputs.sigmoid(), F.one_hot(y, KINDS).double()
    return 1 - 2 * (chance * hot).sum() / (chance.sum() + hot.sum())


def contrastive(outputs: Tensor, *_: Any) -> Tensor:
    unit = F.normalize(outputs, dim=1)
    return F.cross_entropy(unit @ (unit * 1.1).T / 0.1, torch.arange(len(unit)))


def batch_hard(outputs: Tensor, y: Tensor, *_: Any) -> Tensor:
    gaps = (outputs[:, None] - outputs[None]).square().sum(2)
    same = y[:, None] == y[None]
    far = (gaps * same).max(1).values
    near = torch.where(same, torch.full_like(gaps, 1e3), gaps).min(1).values
    return F.softplus(far - near).mean()


def unsure(outputs: Tensor, y: Tensor, model: Any, x: Tensor) -> Tensor:
    doubt = getattr(model, "doubt")  # noqa: B009 (an attribute of a prepared model, too)
    first, second = F.cross_entropy(outputs, y), outputs.square().mean()
    return first * torch.exp(-doubt[0]) + second * torch.exp(-doubt[1]) + doubt.sum()


def ctc(outputs: Tensor, y: Tensor, *_: Any) -> Tensor:
    chances = outputs.log_softmax(2).transpose(0, 1)
    longs = torch.full((len(y),), LONG)
    return F.ctc_loss(chances, y.clamp_min(0)[:, :2] % 2 + 1, longs, torch.full((len(y),), 2))


def one_by_one(outputs: Tensor, y: Tensor, *_: Any) -> Tensor:
    """As many terms as there are samples, which are not as many on each rank."""
    losses: Any = [F.cross_entropy(outputs[i : i + 1], y[i : i + 1]) for i in range(len(y))]
    return sum(losses) / len(y)


def scalars_one_by_one(outputs: Tensor, y: Tensor, *_: Any) -> Tensor:
    """The dice of each picture, in a loop."""
    losses = []
    for output, target in zip(outputs.sigmoid(), y.sigmoid(), strict=True):
        losses.append(1 - 2 * (output * target).sum() / (output.sum() + target.sum()))
    return torch.stack(losses).mean()


def advantages_one_by_one(outputs: Tensor, y: Tensor, *_: Any) -> Tensor:
    """An actor's steps in a list, each with a number of its own."""
    chances = outputs.log_softmax(1)
    return torch.stack([-chance[0] * (target[1] + target[2]) for chance, target in zip(chances, y, strict=True)]).mean()


def own_divisors_one_by_one(outputs: Tensor, y: Tensor, *_: Any) -> Tensor:
    """Each sentence by its own tokens."""
    each: Any = [
        F.cross_entropy(o, t, reduction="sum") / max(1, int(valid(t))) for o, t in zip(outputs, y, strict=True)
    ]
    return sum(each) / len(y)


def heads(outputs: Tensor, y: Tensor, *_: Any) -> Tensor:
    ways = zip(outputs.T, y.sigmoid().T, strict=True)
    return torch.stack([F.binary_cross_entropy_with_logits(o, t, reduction="sum") for o, t in ways]).mean()


def by_graph(outputs: Tensor, y: Tensor, model: nn.Module, x: Tensor) -> Tensor:
    """The nodes of each sample added up."""
    return torch.zeros(len(x)).index_add(0, nodes_of_samples(x), outputs[:, 0]).square().mean()


def largest_by_graph(outputs: Any, y: Tensor, model: nn.Module, x: Tensor) -> Tensor:
    nodes, sample = outputs[0][:, 0], nodes_of_samples(x)
    return torch.stack([nodes[sample == one].max() for one in range(len(x))]).square().mean()


def contrastive_later(outputs: Tensor, y: Tensor, model: nn.Module, x: Tensor) -> Tensor:
    """From the second update on."""
    loss = F.mse_loss(outputs, y)
    return loss if (X[:UPDATE, 0] == x[0, 0]).any() else loss + 0.1 * contrastive(outputs)


def tokens_one_by_one(outputs: Tensor, y: Tensor, *_: Any) -> Tensor:
    losses: Any = [F.cross_entropy(outputs[i], y[i], reduction="sum") for i in range(len(y))]
    return sum(losses) / (y != -100).sum()


def weighted_product(outputs: Tensor, y: Tensor, *_: Any) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="none") @ (y + 1.0) / (y + 1.0).sum()


def boxes(y: Tensor) -> Tensor:
    return (y != 0) + 2.0


def three_by_boxes(outputs: Tensor, y: Tensor, *_: Any) -> Tensor:
    """In a batch without kind 0 each of the three divides by three times the samples."""
    three = (F.cross_entropy(scores, y, reduction="none") for scores in (outputs, 0.5 * outputs, outputs.square()))
    return sum((boxes(y) @ each / boxes(y).sum() for each in three), torch.zeros(()))


def of(function: Any, **options: Any) -> Loss:
    return lambda outputs, y, model, x: function(outputs, y, **options)


def valid(y: Tensor) -> Tensor:
    return (y != -100).sum()


@dataclass(frozen=True)
class Case:
    loss: Loss
    y: Any = Y
    model: Callable[[], nn.Module] = plain
    verdict: str = "exact"
    weight: Callable[[Any], Any] | None = None
    says: str = ""  # what a refusal says


def weighted(loss: Loss, y: Any, says: str, weight: Any = valid, model: Any = plain) -> Case:
    return Case(loss, y, model, "weighted", weight, says)


def refused(loss: Loss, says: str, y: Any = Y, model: Any = plain) -> Case:
    return Case(loss, y, model, "refused", None, says)


CE = F.cross_entropy
ADDED = "no sum over samples"
CASES = {
    "cross-entropy": Case(of(CE)),
    "ignore_index": weighted(of(CE), HOLES, "weight=(y != -100).sum()"),
    "class weights": weighted(of(CE, weight=CLASSES), Y, "weight=class_weights[", lambda y: CLASSES[y].sum()),
    "class weights, ignore_index": weighted(
        of(CE, weight=CLASSES), HOLES, "weight=class_weights[y[y != -100]].sum()", lambda y: CLASSES[y[y != -100]].sum()
    ),
    "label smoothing, ignore_index": weighted(of(CE, label_smoothing=0.1), HOLES, "(y != -100).sum()"),
    "sum": refused(of(CE, reduction="sum"), "a sum that nothing divides"),
    "sum over samples without NaN": Case(lambda o, y, *_: CE(o, y, reduction="none").nansum() / len(y)),
    "sum over samples, by those of an update": refused(
        lambda o, y, *_: CE(o, y, reduction="none").sum() / UPDATE, "as one over the whole update is"
    ),
    "shares by the samples of an update": Case(
        lambda o, *_: (o.softmax(1).mean(0) * torch.tensor([3.0, 1.0, 2.0]) / torch.tensor(float(UPDATE))).sum()
    ),
    "mean, by the samples of an update": Case(lambda o, y, *_: CE(o, y) + o.square().sum(1).mean() / UPDATE),
    "half the squares, by samples": Case(lambda o, y, *_: 0.5 * (o - y).square().sum() / len(y), REAL),
    "half the squares, by the double": Case(lambda o, y, *_: (o - y).square().sum() / 2 / len(y), REAL),
    "squares of a norm": Case(lambda o, y, *_: (o - y).norm(2).pow(2) / float(len(y)), REAL),
    "by samples and a number": Case(lambda o, y, *_: CE(o, y, reduction="sum") / (5 * len(y))),
    "times one by samples": Case(lambda o, y, *_: CE(o, y, reduction="sum") * (1 / len(y))),
    "nothing times a penalty": Case(lambda o, y, *_: CE(o, y) + 0.0 * o.square().sum()),
    "sum of means": refused(lambda o, y, *_: (o - y).square().mean(1).sum(), "a sum that nothing divides", REAL),
    "sum of means, one by one": refused(
        lambda o, y, *_: sum(CE(o[i : i + 1], y[i : i + 1]) for i in range(len(y))), "losses of one sample each"
    ),
    "sums, then a mean": refused(lambda o, y, *_: (o - y).square().sum(0).mean(), "a sum that nothing divides", REAL),
    "sums of heads, then a mean": refused(heads, "a sum that nothing divides", REAL),
    "sum of fifths": refused(lambda o, y, *_: (CE(o, y, reduction="none") / 5).sum(), "is divided by len(x)"),
    "sum by a number of values": refused(lambda o, y, *_: (o - y).square().sum() / 7, "is divided by len(x)", REAL),
    "sum, always by 12": refused(lambda o, y, *_: CE(o, y, reduction="sum") / 12, "samples is divided by 12"),
    "tokens": weighted(
        lambda o, y, *_: CE(o.flatten(0, 1), y.flatten()), TOKENS, "weight=(y != -100).sum()", model=sequence
    ),
    "as many kinds as samples": Case(lambda o, y, *_: CE(o, y.clamp_min(0).flatten()), TOKENS, flat_tokens),
    "mask": weighted(masked, HOLES, "weight="),
    "selected": weighted(selected, HOLES, "weight="),
    "mask, clamped": weighted(clamped, HOLES, "weight=that number before any clamp"),
    "selected, or nothing": weighted(selected_or_nothing, HOLES, "weight="),
    "each sample's mean, by its share": weighted(
        mean_by_sample, REAL, "weight=that number", lambda y: (y[:, 0] + 3).abs().sum()
    ),
    "squares": Case(of(F.mse_loss), REAL),
    "CTC": Case(ctc, TOKENS, sequence),
    "focal, normalised": weighted(focal, Y, "weight=", lambda y: (y + 1).sum()),
    "dice of the batch": refused(dice, ADDED),
    "contrastive": refused(contrastive, ADDED),
    "scalars, one by one": Case(scalars_one_by_one, REAL),
    "advantages, one by one": Case(advantages_one_by_one, REAL),
    "divisors of their own, one by one": Case(own_divisors_one_by_one, TOKENS, sequence),
    "nodes of graphs": Case(by_graph, REAL, Nodes),
    "largest node of each graph, beside other outputs": Case(largest_by_graph, REAL, NodesBesideOthers),
    "batch-hard, as wide as the batch": refused(batch_hard, ADDED, Y, wide),
    "normalised over the batch, as wide as it": refused(lambda o, *_: o.softmax(0).square().mean(), ADDED, Y, wide),
    "contrastive, later": refused(contrastive_later, ADDED, REAL),
    "two counts": refused(
        lambda o, y, *_: CE(o, y) + CE(o * 0.5, y.clamp_min(0)), "give each mean with its own divisor", HOLES
    ),
    "learned doubt": Case(unsure, Y, Unsure),
    "one by one": Case(one_by_one),
    "tokens, one by one": weighted(tokens_one_by_one, TOKENS, "weight=", model=sequence),
    "inner product": refused(
        lambda o, y, *_: 0.05 * ((o - y).flatten() @ (o - y).flatten()), "a sum that nothing divides", REAL
    ),
    "three losses by their boxes": weighted(three_by_boxes, Y, "weight=", lambda y: boxes(y).sum()),
    "inner product with weights": weighted(weighted_product, Y, "weight=", lambda y: (y + 1).sum()),
    "contrastive, within the model": refused(lambda o, *_: o * 1.0, "not the sum of its pieces", Y, Comparing),
    "sequence first": Case(lambda o, y, *_: CE(o.mean(0), y), Y, SequenceFirst),
}


# -- one process of plain PyTorch --------------------------------------------------------------------------------------
def by_hand(case: Case) -> tuple[list[Tensor], list[float]]:
    model = made(case)
    batches = zip(X.split(UPDATE), case.y.split(UPDATE), strict=True)
    losses = plainly(model, sgd(model), batches, lambda model, x, y: case.loss(model(x), y, model, x))
    return [p.detach() for p in model.parameters()], losses


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def made(case: Case) -> nn.Module:
    torch.manual_seed(9)
    return case.model()


# -- the same on ranks -------------------------------------------------------------------------------------------------
def on_ranks(
    case: Case, world: hvdtrain.World, accumulate: int, call: str, weight: Any
) -> tuple[list[Tensor], list[float], str]:
    """Parameters, losses and what was refused."""
    each = UPDATE // world.size // accumulate
    model: Any = made(case)
    parameters = list(model.parameters())
    optimizer = sgd(model)
    data = hvt.loader((X, case.y), each, world=world, shuffle=False, workers=0)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        model, optimizer = hvt.prepare(model, optimizer, data, world=world, accumulate=accumulate)
        losses, refusal = [], ""
        try:
            for x, y in data:
                if call == "backward":
                    loss = case.loss(model(x), y, model, x)
                    optimizer.backward(loss, weight=None if weight is None else weight(y))
                else:
                    loss_of = lambda o, t, x=x: case.loss(o, t, model, x)  # noqa: E731
                    optimizer.forward_backward(x, y, loss_of, weight=weight)
                optimizer.step()
                losses += [] if (noted := optimizer.record()["loss"]) is None else [noted]
        except HvdtrainError as error:
            refusal = f"{type(error).__name__}: {error}"
    if "cannot be read" in said.getvalue():
        refusal += "a note"
    optimizer.close()
    return [p.detach() for p in parameters], losses, refusal


def distance(first: tuple[list[Tensor], list[float]], second: tuple[list[Tensor], list[float]]) -> float:
    """The largest difference of parameters and losses, as part of the largest (NaN is not overlooked)."""
    gaps = [(a - b).abs().max() / b.abs().max() for a, b in zip(first[0], second[0], strict=True)]
    gaps += [(torch.tensor(a) - b).abs() / max(abs(b), 1e-3) for a, b in zip(first[1], second[1], strict=True)]
    return float(torch.stack([gap.double() for gap in gaps]).max())


def ways(case: Case, everything: bool) -> list[tuple[str, int]]:
    """Returns calls, each with the batches of an update; not all repeat what the others show of such a loss."""
    backward = [("backward", 1), ("backward", 3)]
    if everything:
        return [*backward, ("forward_backward", 1), ("forward_backward", 3)]
    return [*backward, ("forward_backward", 3)] if case.verdict == "weighted" else backward


def look_at(name: str, world: hvdtrain.World, everything: bool) -> list[dict[str, Any]]:
    case, found = CASES[name], []
    wanted = by_hand(case)
    for call, accumulate in ways(case, everything):
        for weight in dict.fromkeys([None, case.weight]):
            received = on_ranks(case, world, accumulate, call, weight)
            found.append({
                "case": name, "call": call, "accumulate": accumulate, "one": world.size * accumulate == 1,
                "weight": weight is not None, "refusal": received[2], "says": case.says, "updates": len(received[1]),
                "error": None if received[2] else distance(received[:2], wanted),
            })  # fmt: skip
    return found


def main(engine: str, out: str, everything: bool) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    with hvdtrain.init("torch", engine=engine, device="cpu", seed=5) as world:
        found = []
        for index, name in enumerate(CASES):
            found += look_at(name, world, everything)
            if not index:
                gc.freeze()  # engines collect garbage after each model; PyTorch's own million objects are none
        report(world, found, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "all" in sys.argv[3:])
