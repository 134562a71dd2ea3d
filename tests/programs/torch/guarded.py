"""Right and wrong programs as users write them, in micro-batches: the guard lets all the first train, none of the
second. Each right one is compared with plain PyTorch on the whole batch; usage: guarded.py OUT.json
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from cases import plainly
from torch import Tensor, nn

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import HvdtrainError

SAMPLES, PIECE, PIECES, WIDE, KINDS = 48, 4, 2, 6, 4
UPDATE = PIECE * PIECES
torch.set_default_dtype(torch.float64)
MADE = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES, WIDE, generator=MADE)
Y = torch.randint(0, KINDS, (SAMPLES,), generator=MADE)
REAL = torch.randn(SAMPLES, KINDS, generator=MADE)
HOLES = torch.where(torch.rand(SAMPLES, generator=MADE) < 0.4, -100, Y)
HOLES[4:8] = -100  # a micro-batch of which no label counts
NODES = [torch.randn(2 + at % 4, WIDE, generator=MADE) for at in range(SAMPLES)]
CLASSES = torch.tensor([1.0, 3.0, 0.5, 2.0])
MASK = (torch.rand(SAMPLES, KINDS, generator=MADE) < 0.7).double()
NOISE = torch.randn(SAMPLES, KINDS, generator=MADE)
Batch = Any
Answer = Any  # loss; (loss, weight); a list of (mean, divisor); or `InTurn`


class InTurn(NamedTuple):
    """Losses of one batch, each with a backward pass of its own."""

    losses: list[Tensor]


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {
            "x": X[at], "y": Y[at], "real": REAL[at], "holes": HOLES[at], "nodes": NODES[at], "mask": MASK[at],
            "noise": NOISE[at], "place": torch.tensor(at),
        }  # fmt: skip


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Stacks what has one length, and puts the nodes of all graphs one after the other."""
    batch = {name: torch.stack([s[name] for s in samples]) for name in samples[0] if name != "nodes"}
    batch["nodes"] = torch.cat([s["nodes"] for s in samples])
    batch["graph"] = torch.repeat_interleave(
        torch.arange(len(samples)), torch.tensor([len(s["nodes"]) for s in samples])
    )
    batch["of"] = torch.tensor(len(samples))
    return batch


def without_some(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    kept = [s for s in samples if len(s["nodes"]) != 3]
    return {name: torch.stack([s[name] for s in kept]) for name in ("x", "y", "real")}


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, KINDS))


@dataclasses.dataclass
class Out:
    scores: Tensor
    inner: Tensor


class Several(nn.Module):
    """Gives a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDE, 8), nn.Linear(8, KINDS)

    def forward(self, x: Tensor) -> Out:
        inner = torch.tanh(self.body(x))
        return Out(self.head(inner), inner)


class Keeps(nn.Module):
    """Keeps what it computed within, for the loss."""

    inner: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDE, PIECE), nn.Linear(PIECE, KINDS)

    def forward(self, x: Tensor) -> Tensor:
        self.inner = torch.tanh(self.body(x))
        self.weights = self.head.weight * 1.0  # as many rows as a piece has samples
        return self.head(self.inner)


class WithLoss(nn.Module):
    """Gives its loss, as models of transformers do with labels=."""

    def __init__(self, how: str = "mean") -> None:
        super().__init__()
        self.net, self.how = plain(), how

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.net(x)
        if self.how == "contrast":
            return F.cross_entropy(scores @ scores.T, torch.arange(len(scores)))
        return F.cross_entropy(scores, y)


class Scaled(torch.autograd.Function):
    """Has a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


CE = F.cross_entropy


def attention(rows: Tensor) -> Tensor:
    """Lets the rows attend to each other; [batch, rows, wide]."""
    return F.scaled_dot_product_attention(rows, rows, rows)


MODELS: dict[str, Callable[[], nn.Module]] = {}
COLLATES: dict[str, Callable[[Any], Any]] = {}
RIGHT: dict[str, Callable[[Any, Batch], Answer]] = {}
WRONG: dict[str, Callable[[Any, Batch], Answer]] = {}
TEACHER = plain().requires_grad_(False)


def right(function: Callable[[Any, Batch], Answer]) -> Callable[[Any, Batch], Answer]:
    RIGHT[function.__name__] = function
    return function


def wrong(function: Callable[[Any, Batch], Answer]) -> Callable[[Any, Batch], Answer]:
    WRONG[function.__name__] = function
    return function


def means(**losses: Callable[[Tensor, Batch], Tensor]) -> None:
    """Means over samples, of a model that is called once."""
    for name, loss in losses.items():
        RIGHT[name] = lambda model, b, loss=loss: loss(model(b["x"]), b)


means(
    cross_entropy=lambda o, b: CE(o, b["y"]),
    squares=lambda o, b: F.mse_loss(o, b["real"]),
    sum_over_samples=lambda o, b: (o - b["real"]).square().sum() / len(o),
    each_by_itself=lambda o, b: torch.stack([CE(o[i : i + 1], b["y"][i : i + 1]) for i in range(len(o))]).mean(),
    in_place=lambda o, b: (o * 1).sub_(b["real"]).abs_().mean(),
    in_float32=lambda o, b: CE(o.float(), b["y"]).double(),
    logged_on_the_way=lambda o, b: CE(o, b["y"]) * (1.0 if float(o.detach().sum()) < 1e9 else 2.0),
    own_backward=lambda o, b: CE(Scaled.apply(o), b["y"]),
    mapped=lambda o, b: torch.vmap(lambda one, y: (one - y).square().sum())(o, b["real"]).mean(),
    by_a_sparse_matrix=lambda o, b: torch.sparse.mm(torch.eye(KINDS).to_sparse(), o.T).square().sum() / len(o),
    instance_normalised=lambda o, b: (F.instance_norm(o[:, None])[:, 0] - b["real"]).square().mean(),
    attention_in_a_sample=lambda o, b: CE(attention(o[:, None])[:, 0], b["y"]),
    statistics_logged=lambda o, b: CE(o, b["y"]) + 0 * o.detach().std(),
    pairs_side_by_side=lambda o, b: F.relu(1 + (o[0::2] - o[1::2]).square().sum(1)).mean(),
    a_dataclass=lambda o, b: CE(o.scores, b["y"]) + 0.1 * o.inner.abs().mean(),
    policy=lambda o, b: -torch.min(
        o.softmax(1)[:, 0] * b["real"][:, 0], o.softmax(1)[:, 0].clamp(0.2, 0.6) * b["real"][:, 0]
    ).mean(),
)  # fmt: skip


@right
def labels_left_out(model: Any, b: Batch) -> Answer:
    if not (b["holes"] != -100).any():
        return model(b["x"]).sum() * 0, 0
    return CE(model(b["x"]), b["holes"]), (b["holes"] != -100).sum()


@right
def selected(model: Any, b: Batch) -> Answer:
    there = b["mask"].bool()
    return (model(b["x"])[there] - b["real"][there]).abs().mean(), there.sum()


@right
def pooled_graphs(model: Any, b: Batch) -> Answer:
    out = model(b["nodes"])
    counts = torch.bincount(b["graph"], minlength=len(b["y"]))[:, None]
    return CE(torch.zeros(len(b["y"]), KINDS).index_add(0, b["graph"], out) / counts, b["y"])


COLLATES["left_out_by_collate"] = without_some


@right
def distilled(model: Any, b: Batch) -> Answer:
    with torch.no_grad():
        wanted = (TEACHER(b["x"]) / 2).softmax(1)
    return F.kl_div((model(b["x"]) / 2).log_softmax(1), wanted, reduction="batchmean")


@right
def own_targets(model: Any, b: Batch) -> Answer:
    """Of the sample's other view, without a gradient."""
    with torch.no_grad():
        wanted = F.normalize(model(0.9 * b["x"]), dim=1)
    return (2 - 2 * (F.normalize(model(b["x"]), dim=1) * wanted).sum(1)).mean()


@right
def penalty_and_holes(model: Any, b: Batch) -> Answer:
    counted = (b["holes"] != -100).sum()
    data = CE(model(b["x"]), b["holes"]) if counted else model(b["x"]).sum() * 0
    return data + 0.01 * sum(p.square().sum() for p in model.parameters()), counted


@right
def gradient_penalty(model: Any, b: Batch) -> Answer:
    x = b["x"].clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return CE(out, b["y"]) + (gradient.norm(dim=1) - 1).square().mean()


@right
def two_means(model: Any, b: Batch) -> Answer:
    out = model(b["x"])
    counted = b["holes"] != -100
    found = out.sum() * 0 if not counted.any() else CE(out, b["holes"])
    return [(found, counted.sum()), (F.mse_loss(out, b["real"]), len(out))]


@right
def encoder_and_prior(model: Any, b: Batch) -> Answer:
    out = model(b["x"])
    mean, spread = out[:, :2], out[:, 2:]
    drawn = mean + (spread / 2).exp() * b["noise"][:, :2]
    prior = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1)
    return ((drawn - b["real"][:, :2]).square().sum(1) + prior).mean()


@right
def real_and_fake(model: Any, b: Batch) -> Answer:
    real, fake = model(b["x"])[:, 0], model(b["noise"].repeat(1, 2)[:, :WIDE])[:, 0]
    ones, zeros = torch.ones_like(real), torch.zeros_like(real)
    return F.binary_cross_entropy_with_logits(real, ones) + F.binary_cross_entropy_with_logits(fake, zeros)


@right
def within_the_model_weighed(model: Any, b: Batch) -> Answer:
    if not (b["holes"] != -100).any():
        return model(b["x"], b["y"]) * 0, 0
    return model(b["x"], b["holes"]), (b["holes"] != -100).sum()


@right
def labels_moved_in_place(model: Any, b: Batch) -> Answer:
    y = b["y"].clone().add_(1)
    y %= KINDS
    return CE(model(b["x"]), y)


@right
def written_one_after_the_other(model: Any, b: Batch) -> Answer:
    """PyTorch's CTC takes the targets of all samples in one row: with another sample's they are longer."""
    logits = torch.stack([model(b["x"]), model(-b["x"]), model(b["x"] * 2)]).log_softmax(2)
    lengths = 1 + b["place"] % 2
    words = torch.cat([1 + b["y"][at].clamp(max=2).repeat(int(n)) for at, n in enumerate(lengths)])
    return F.ctc_loss(logits, words, torch.full((len(lengths),), 3), lengths, reduction="sum") / len(lengths)


@right
def chosen_by_targets(model: Any, b: Batch) -> Answer:
    """What is kept of a sample depends on its target; with another sample's the index is another shape."""
    out = model(b["x"])
    marked = torch.nonzero(b["mask"][:, 0] > 0).flatten().tolist()
    each = CE(out, b["y"], reduction="none")
    return (each.sum() + out[torch.tensor(marked, dtype=torch.long), 0].square().sum()) / len(out)


def active(model: Any, b: Batch) -> tuple[Tensor, Tensor]:
    each = F.relu((model(b["x"]) - b["real"]).square().mean(1) - 1.0)
    return each.sum() / (each > 0).sum().clamp(min=1), (each > 0).sum()


@right
def over_active_samples_in_a_list(model: Any, b: Batch) -> Answer:
    out = model(b["x"])
    return [active(lambda x: out, b), (out.square().mean(), len(out))]


@right
def clamped_and_counted(model: Any, b: Batch) -> Answer:
    count = (b["holes"] != -100).sum()
    return CE(model(b["x"]), b["holes"], reduction="sum") / count.clamp(min=1), count


@right
def a_number_of_the_batch_that_is_only_shown(model: Any, b: Batch) -> Answer:
    loss = CE(out := model(b["x"]), b["y"])
    assert (out.argmax(1) == b["y"]).double().mean().item() <= 1 and loss.item() > 0
    return loss + 0.5 * (out.square().mean())


RIGHT |= {
    "class_weights": lambda model, b: (CE(model(b["x"]), b["y"], weight=CLASSES), CLASSES[b["y"]].sum()),
    "masked": lambda model, b: (
        ((model(b["x"]) - b["real"]).square() * b["mask"]).sum() / b["mask"].sum(), b["mask"].sum()
    ),
    "nodes": lambda model, b: (CE(model(b["nodes"]), b["y"][b["graph"]]), len(b["nodes"])),
    "left_out_by_collate": lambda model, b: (CE(model(b["x"]), b["y"]), len(b["y"])),
    "crops": lambda model, b: CE(model(torch.cat([b["x"], 0.5 * b["x"]])), b["y"].repeat(2)),  # batch after batch
    "crops_side_by_side": lambda model, b: CE(model(b["x"].repeat_interleave(2, 0)), b["y"].repeat_interleave(2)),
    "penalised": lambda model, b: CE(model(b["x"]), b["y"]) + 0.01 * sum(p.square().sum() for p in model.parameters()),
    "called_for_each": lambda model, b: torch.stack(
        [CE(model(x[None]), y[None]) for x, y in zip(b["x"], b["y"], strict=True)]
    ).mean(),
    "in_two_calls": lambda model, b: CE(torch.cat([model(part) for part in b["x"].tensor_split(2)]), b["y"]),
    "within_the_model": lambda model, b: model(b["x"], b["y"]),
    "over_active_samples": lambda model, b: active(model, b),  # which ones depends on the outputs
    "twins": lambda model, b: F.cosine_embedding_loss(model(b["x"]), model(b["x"].flip(1)), torch.ones(len(b["x"]))),
    "triplets": lambda model, b: F.triplet_margin_loss(model(b["x"]), model(0.9 * b["x"]), model(-b["x"])),
    "weights_of_a_class": lambda model, b: (CLASSES[b["y"]] / 2 * CE(model(b["x"]), b["y"], reduction="none")).mean(),
    "labels_overwritten": lambda model, b: CE(target=b["y"].add_(1).remainder_(KINDS), input=model(b["x"])),
    "over_active_samples_as_a_number": lambda model, b: ((found := active(model, b))[0], int(found[1])),
    "in_turn": lambda model, b: InTurn([F.mse_loss(out := model(b["x"]), b["real"]), 0.1 * out.abs().mean()]),
    "inner_values_of_each_sample": lambda model, b: CE(model(b["x"]), b["y"]) + model.inner.square().sum(1).mean(),
}  # fmt: skip
MODELS |= {"a_dataclass": Several, "within_the_model": WithLoss, "within_the_model_weighed": WithLoss}


# -- samples are mixed at random: no rank's own, and right on average ------------------------------------------------
MIXED: dict[str, Callable[[Any, Batch], Answer]] = {}


def mixed(how: str, kind: str) -> Callable[[Any, Batch], Answer]:
    def program(model: Any, b: Batch) -> Answer:
        n = len(b["x"])
        order = {"flip": torch.arange(n).flip(0), "roll": torch.arange(n).roll(1), "drawn": torch.randperm(n)}[how]
        part = 0.3 + 0.4 * torch.rand(())
        out = model(part * b["x"] + (1 - part) * b["x"][order])
        if kind == "soft":
            soft = F.one_hot(b["y"], KINDS).double()
            return CE(out, part * soft + (1 - part) * soft[order])
        losses: dict[str, Callable[[Tensor], Tensor]] = {
            "classes": lambda y: CE(out, y),
            "numbers": lambda y: F.mse_loss(out[:, 0], y),
            "marks": lambda y: F.binary_cross_entropy_with_logits(out[:, 0], y),
        }
        target = {"classes": b["y"], "numbers": b["real"][:, 0], "marks": b["mask"][:, 0]}[kind]
        return part * losses[kind](target) + (1 - part) * losses[kind](target[order])

    return program


for how in ("flip", "roll", "drawn"):
    for kind in ("soft", "classes", "numbers", "marks"):
        MIXED[f"{kind}, {how}"] = mixed(how, kind)


# -- wrong, as a rank's or a micro-batch's own -----------------------------------------------------------------------
def late(first: int, loss: Callable[[Tensor, Batch], Tensor]) -> Callable[[Any, Batch], Answer]:
    """Becomes wrong with a certain sample."""

    def changing(model: Any, b: Batch) -> Answer:
        out = model(b["x"])
        return CE(out, b["y"]) + (loss(out, b) if int(b["place"][0]) >= first else 0)

    return changing


def contrast(o: Tensor, b: Batch) -> Tensor:
    z = F.normalize(o, dim=1)
    return CE(z @ z.T / 0.5, torch.arange(len(o)))


def standardised(o: Tensor, b: Batch) -> Tensor:
    with torch.no_grad():
        weight = (CE(o, b["y"], reduction="none") - CE(o, b["y"])) / o.std()
    return (o[:, 0] * weight).mean()


def dice(o: Tensor, b: Batch) -> Tensor:
    p = o.softmax(1)
    return 1 - 2 * (p * b["mask"]).sum() / (p.sum() + b["mask"].sum())


def balanced(y: Tensor) -> Tensor:
    """Each class counts as much as another, in the batch."""
    return (len(y) / (KINDS * torch.bincount(y, minlength=KINDS).clamp(min=1)))[y]


METHODS = {
    "contrastive": contrast,
    "advantages": standardised,
    "dice": dice,
    "hardest": lambda o, b: CE(o, b["y"], reduction="none").topk(max(1, len(o) // 2)).values.mean(),
    "median": lambda o, b: F.relu((one := CE(o, b["y"], reduction="none")) - one.median().detach()).mean(),
    "attention": lambda o, b: CE(attention(o[None])[0], b["y"]),
    "larger_mean": lambda o, b: torch.maximum(CE(o, b["y"]), 2 * o.square().mean()),
    "root": lambda o, b: F.mse_loss(o, b["real"]).sqrt(),
    "softmax_over_samples": lambda o, b: -(o[:, 0].softmax(0) * b["real"][:, 0]).sum(),
    "rolled": lambda o, b: (o - o.roll(1, 0)).abs().mean(),
    "labels_left_out": lambda o, b: CE(o, b["holes"]) if (b["holes"] != -100).any() else o.sum() * 0,
    "masked": lambda o, b: ((o - b["real"]).square() * b["mask"]).sum() / b["mask"].sum(),
    "class_weights": lambda o, b: CE(o, b["y"], weight=CLASSES),
    "balanced_classes": lambda o, b: (CE(o, b["y"], reduction="none") * balanced(b["y"])).mean(),
    "over_their_mean": lambda o, b: (CE(o, b["y"], reduction="none") * CLASSES[b["y"]] / CLASSES[b["y"]].mean()).mean(),
    "positives_against_negatives": lambda o, b: F.binary_cross_entropy_with_logits(
        o, b["mask"], pos_weight=(b["mask"] == 0).sum() / b["mask"].sum()
    ),
    "bare_sum": lambda o, b: (o - b["real"]).square().sum(),
}  # fmt: skip
for name, method in METHODS.items():
    WRONG[name] = lambda model, b, method=method: method(model(b["x"]), b)
for name in ("contrastive", "advantages", "root", "masked", "over_their_mean", "bare_sum"):
    for first in (8, 36):
        WRONG[f"{name}, from sample {first} on"] = late(first, METHODS[name])


def chosen_by_halves(model: Any, b: Batch) -> Answer:
    """Compares halves of the batch late, by the same operations as before."""
    out, gate = model(b["x"]), (b["place"].min() >= 36).double()
    first, second = out.detach().chunk(2)
    return torch.where(gate * (first.mean() - second.mean()) <= 0, CE(out, b["y"]), 2 * F.mse_loss(out, b["real"]))


WRONG["chosen by halves, from sample 36 on"] = chosen_by_halves


@right
def weights_that_are_orthogonal(model: Any, b: Batch) -> Answer:
    loss = CE(model(b["x"]), b["y"])
    return loss + 0.1 * (model.weights @ model.weights.T - torch.eye(KINDS)).square().sum()


@wrong
def mean_of_each_class(model: Any, b: Batch) -> Answer:
    """Macro-averaged, over as many classes as no piece has samples: one of them never comes."""
    each, classes = CE(model(b["x"]), b["y"], reduction="none"), KINDS + 1
    return (torch.zeros(classes).index_add(0, b["y"], each) / torch.bincount(b["y"], minlength=classes).clamp(1)).mean()


@wrong
def over_the_mean_before_the_model(model: Any, b: Batch) -> Answer:
    weight = b["real"][:, 1].exp()
    weight = weight / weight.mean()
    return ((model(b["x"])[:, 0] - b["real"][:, 0]).square() * weight).mean()


@wrong
def labels_counted_as_samples_in_a_list(model: Any, b: Batch) -> Answer:
    out = model(b["x"])
    return [(out.square().mean(), len(out)), (CE(out, b["real"].argmax(1)), 1 + (b["holes"] != -100).sum())]


@wrong
def first_in_turn_over_labels(model: Any, b: Batch) -> Answer:
    holes = torch.where(b["place"] % 4 == 3, b["y"], b["holes"])
    return InTurn([CE(out := model(b["x"]), holes), out.square().mean()])


@wrong
def weighed_by_a_clamped_number(model: Any, b: Batch) -> Answer:
    count = (b["holes"] != -100).sum().clamp(min=1)
    return CE(model(b["x"]), b["holes"], reduction="sum") / count, count


@wrong
def weighed_by_a_clamped_number_of_python(model: Any, b: Batch) -> Answer:
    count = max(1, int((b["holes"] != -100).sum()))
    return CE(model(b["x"]), b["holes"], reduction="sum") / count, count


@right
def hinges_that_are_met(model: Any, b: Batch) -> Answer:
    """The loss is 0 in the update in which one target counts."""
    count = (b["place"] == 5).sum() + (b["place"] == 9).sum()
    each = F.relu(model(b["x"])[:, 0] - 50) * ((b["place"] == 5) | (b["place"] == 9))
    return each.sum() / count.clamp(min=1), count


@wrong
def a_clamped_divisor_in_a_list(model: Any, b: Batch) -> Answer:
    count = (b["holes"] != -100).sum().clamp(min=1)
    return [(CE(model(b["x"]), b["holes"], reduction="sum") / count, count)]


@wrong
def weighed_by_weights_of_the_batch(model: Any, b: Batch) -> Answer:
    weight = balanced(b["y"])
    return (CE(model(b["x"]), b["y"], reduction="none") * weight).sum() / weight.sum(), weight.sum()


@wrong
def above_a_number_of_the_outputs(model: Any, b: Batch) -> Answer:
    each = CE(model(b["x"]), b["y"], reduction="none")
    return F.relu(each - float(each.detach().mean())).mean()


WRONG |= {
    "whole_counts_given": lambda model, b: (model(b["x"]) - b["real"]).square().sum() / UPDATE,
    "inner_values_on_average": lambda model, b: CE(model(b["x"]), b["y"]) + model.inner.mean(0).square().mean(),
    "balanced_before_the_model": lambda model, b: (
        balanced(b["y"]) * CE(model(b["x"]), b["y"], reduction="none")
    ).mean(),
    "contrast_in_a_list": lambda model, b: [
        (CE(out := model(b["x"]), b["y"]), len(out)), (contrast(out, b), len(out)),
    ],
    "a_root_in_a_list": lambda model, b: [(F.mse_loss(model(b["x"]), b["real"]).sqrt(), len(b["x"]))],
    "a_sum_in_a_list": lambda model, b: [(CE(model(b["x"]), b["y"], reduction="sum"), len(b["x"]))],
    "a_contrast_last_in_turn": lambda model, b: InTurn([CE(out := model(b["x"]), b["y"]), contrast(out, b)]),
    "cooled_by_a_number_of_the_batch": lambda model, b: CE(model(b["x"]) / b["real"].exp().mean().item(), b["y"]),
    "contrast_within_the_model": lambda model, b: model(b["x"], b["y"]),
    "holes_within_the_model": lambda model, b: model(b["x"], torch.where(b["place"] % 4 == 3, b["y"], b["holes"])),
}  # fmt: skip
MODELS |= dict.fromkeys(
    ("inner_values_of_each_sample", "weights_that_are_orthogonal", "inner_values_on_average"), Keeps
)
MODELS |= {"contrast_within_the_model": lambda: WithLoss("contrast"), "holes_within_the_model": WithLoss}


def plain_loss(answer: Answer) -> Tensor:
    if isinstance(answer, InTurn):
        return sum(answer.losses, torch.zeros(()))
    if isinstance(answer, list):
        return sum((mean for mean, _ in answer), torch.zeros(()))
    return answer[0] if isinstance(answer, tuple) else answer


def trained(name: str, program: Callable[[Any, Batch], Answer]) -> tuple[str, int, list[Tensor], list[str]]:
    """Returns why it was refused ("" if it was not), after how many batches, the weights, and notes."""
    torch.manual_seed(1)
    model = MODELS.get(name, plain)()
    data = hvt.loader(Rows(), PIECE, shuffle=False, workers=0, collate=COLLATES.get(name, collate))
    said, refused, batches = io.StringIO(), "", 0
    with contextlib.redirect_stdout(said):
        prepared, optimizer = hvt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), data, accumulate=PIECES)
        try:
            for _ in data.epochs(2):
                for batch in data:
                    optimizer.zero_grad()
                    answer = program(prepared, batch)
                    if isinstance(answer, InTurn):
                        *earlier, last = answer.losses
                        for loss in earlier:
                            optimizer.backward(loss, more=True, retain_graph=True)
                        optimizer.backward(last)
                    elif isinstance(answer, tuple):
                        optimizer.backward(answer[0], weight=answer[1])
                    else:
                        optimizer.backward(answer)
                    optimizer.step()
                    batches += 1
        except HvdtrainError as error:
            refused = f"{error.rule}: {error.received}"
        optimizer.close()
    notes = [line for line in said.getvalue().splitlines() if "cannot be" in line]
    return refused, batches, [p.detach() for p in model.parameters()], notes


def one_process(name: str, program: Callable[[Any, Batch], Answer]) -> list[Tensor]:
    torch.manual_seed(1)
    model, rows, places = MODELS.get(name, plain)(), Rows(), list(range(SAMPLES)) * 2
    updates = [[rows[i] for i in places[at : at + UPDATE]] for at in range(0, len(places), UPDATE)]
    batches = [(COLLATES.get(name, collate)(update),) for update in updates]
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    plainly(model, sgd, batches, lambda model, batch: plain_loss(program(model, copy.deepcopy(batch))))
    return [p.detach() for p in model.parameters()]


def main() -> None:
    found: dict[str, dict[str, Any]] = {"right": {}, "wrong": {}, "mixed": {}}
    with hvdtrain.init("torch", engine="solo", device="cpu"):
        for kind, programs in (("right", RIGHT), ("wrong", WRONG), ("mixed", MIXED)):
            for name, program in programs.items():
                refused, batches, weights, notes = trained(name, program)
                wanted = one_process(name, program) if kind == "right" else weights
                error = max(float((a - b).abs().max()) for a, b in zip(weights, wanted, strict=True))
                found[kind][name] = {"refused": refused, "batches": batches, "error": error, "notes": notes}
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
