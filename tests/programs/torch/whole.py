"""Losses in which samples meet, on ranks and over batches of an update, against one process with the global batch.

usage: whole.py ENGINE ACCUMULATE OUT.json LOSS ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import HvdtrainError

UPDATE, SAMPLES, WIDTH, KINDS = 18, 43, 5, 3  # the last update has 7 samples: with 3 ranks some have none
MADE = torch.Generator().manual_seed(5)
X = torch.randn(SAMPLES, WIDTH, generator=MADE, dtype=torch.float64)
KIND = torch.randint(0, KINDS, (SAMPLES,), generator=MADE)
MASK = (torch.rand(SAMPLES, 4, generator=MADE) < 0.3).double()
MASK[5:13] = 0  # ranks and batches in which nothing is marked
REAL = torch.randn(SAMPLES, generator=MADE, dtype=torch.float64)
Out = dict[str, Tensor]
Loss = Callable[[Any, Out, Out], Tensor]
LOSSES: dict[str, Loss] = {}


class Model(nn.Module):
    """[n, WIDTH] to two views [n, 4], logits [n, KINDS], marks [n, 4], one number [n]; two of its parameters are for
    the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh())
        self.heads = nn.ModuleDict({
            "a": nn.Linear(8, 4), "b": nn.Linear(8, 4), "logits": nn.Linear(8, KINDS), "marks": nn.Linear(8, 4),
            "number": nn.Linear(8, 1),
        })  # fmt: skip
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.proxies = nn.Parameter(torch.randn(KINDS, 4))

    def forward(self, x: Tensor) -> Out:
        hidden = self.body(x)
        out = {name: head(hidden) for name, head in self.heads.items()}
        out["number"] = out["number"].squeeze(1)
        return out


def loss(function: Loss) -> Loss:
    LOSSES[function.__name__] = function
    return function


def unit(values: Tensor) -> Tensor:
    return F.normalize(values, dim=1)


def others(n: int) -> Tensor:
    return ~torch.eye(n, dtype=torch.bool)


# -- views against views -----------------------------------------------------------------------------------------------


@loss
def clip(model: Any, out: Out, y: Out) -> Tensor:
    logits, own = model.scale.exp() * unit(out["a"]) @ unit(out["b"]).T, torch.arange(len(out["a"]))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


@loss
def supervised_contrastive(model: Any, out: Out, y: Out) -> Tensor:
    z = unit(out["a"])
    logits = (z @ z.T / 0.3).masked_fill(~others(len(z)), -1e9)
    same = ((y["kind"][:, None] == y["kind"]) & others(len(z))).double()
    each = -(same * F.log_softmax(logits, 1)).sum(1) / same.sum(1).clamp(min=1)
    return each.mean()


@loss
def barlow_twins(model: Any, out: Out, y: Out) -> Tensor:
    a, b = ((v - v.mean(0)) / (v.std(0) + 1e-3) for v in (out["a"], out["b"]))
    c = a.T @ b / len(a)
    return ((c.diagonal() - 1) ** 2).sum() + 0.01 * (c[others(4)] ** 2).sum()


@loss
def whitening(model: Any, out: Out, y: Out) -> Tensor:
    def white(v: Tensor) -> Tensor:
        centred = v - v.mean(0)
        root = torch.linalg.cholesky(centred.T @ centred / len(v) + 0.1 * torch.eye(4))
        return torch.linalg.solve_triangular(root, centred.T, upper=False).T

    return F.mse_loss(white(out["a"]), white(out["b"]))


@loss
def optimal_transport(model: Any, out: Out, y: Out) -> Tensor:
    cost = torch.cdist(out["a"], out["b"] + 0.5) ** 2
    plan = torch.exp(-cost / 2)
    for _ in range(4):
        plan = plan / plan.sum(1, keepdim=True)
        plan = plan / plan.sum(0, keepdim=True)
    return (plan * cost).sum() / len(cost)


@loss
def swapped_clusters(model: Any, out: Out, y: Out) -> Tensor:
    scores = unit(out["a"]) @ unit(model.proxies).T, unit(out["b"]) @ unit(model.proxies).T
    codes = []
    for score in scores:
        with torch.no_grad():
            q = torch.exp(score / 0.2)
            for _ in range(3):
                q = q / q.sum(0, keepdim=True)
                q = q / q.sum(1, keepdim=True)
        codes.append(q)
    return -sum((q * F.log_softmax(s / 0.3, 1)).sum(1).mean() for q, s in zip(codes, reversed(scores), strict=True))


@loss
def mean_discrepancy(model: Any, out: Out, y: Out) -> Tensor:
    def kernel(p: Tensor, q: Tensor) -> Tensor:
        return torch.exp(-(torch.cdist(p, q + 1e-3) ** 2)).mean()

    a, b = out["a"], out["b"]
    return kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)


# -- samples against samples -------------------------------------------------------------------------------------------
@loss
def batch_hard_triplet(model: Any, out: Out, y: Out) -> Tensor:
    apart = torch.cdist(out["a"], out["a"] + 1e-3)
    same = y["kind"][:, None] == y["kind"]
    far = apart.masked_fill(~same, -torch.inf).amax(1)
    near = apart.masked_fill(same, 1e3).amin(1)
    return F.relu(far - near + 0.5).mean()


@loss
def multi_similarity(model: Any, out: Out, y: Out) -> Tensor:
    s, same = unit(out["a"]) @ unit(out["a"]).T, y["kind"][:, None] == y["kind"]
    pulled = torch.log1p((torch.exp(-2 * (s - 0.5)) * (same & others(len(s)))).sum(1)) / 2
    return (pulled + torch.log1p((torch.exp(10 * (s - 0.5)) * ~same).sum(1)) / 10).mean()


@loss
def proxy_anchor(model: Any, out: Out, y: Out) -> Tensor:
    s, own = unit(out["a"]) @ unit(model.proxies).T, F.one_hot(y["kind"], KINDS).double()
    used = (own.sum(0) > 0).sum()
    near = torch.log1p((torch.exp(-4 * (s - 0.1)) * own).sum(0)).sum() / used
    return near + torch.log1p((torch.exp(4 * (s + 0.1)) * (1 - own)).sum(0)).sum() / KINDS


@loss
def centre(model: Any, out: Out, y: Out) -> Tensor:
    own = F.one_hot(y["kind"], KINDS).double()
    centres = own.T @ out["a"] / own.sum(0).clamp(min=1)[:, None]
    return ((out["a"] - centres[y["kind"]]) ** 2).sum(1).mean()


# -- order -------------------------------------------------------------------------------------------------------------
@loss
def pairwise_ranking(model: Any, out: Out, y: Out) -> Tensor:
    larger = y["real"][:, None] > y["real"]
    return F.softplus(out["number"] - out["number"][:, None])[larger].mean()


@loss
def smooth_average_precision(model: Any, out: Out, y: Out) -> Tensor:
    positive = (y["real"] > 0).double()
    above = torch.sigmoid((out["number"] - out["number"][:, None]) / 0.2) * others(len(positive))
    precision = (1 + (above * positive).sum(1)) / (1 + above.sum(1))
    return 1 - (precision * positive).sum() / positive.sum().clamp(min=1)


@loss
def area_under_the_curve(model: Any, out: Out, y: Out) -> Tensor:
    positive = y["real"] > 0
    return F.softplus(out["number"][~positive][:, None] - out["number"][positive]).mean()


@loss
def survival(model: Any, out: Out, y: Out) -> Tensor:
    order = torch.argsort(y["real"], descending=True)
    risk, seen = out["number"][order], (y["kind"][order] > 0).double()
    return -((risk - torch.logcumsumexp(risk, 0)) * seen).sum() / seen.sum().clamp(min=1)


@loss
def hardest_third(model: Any, out: Out, y: Out) -> Tensor:
    each = F.cross_entropy(out["logits"], y["kind"], reduction="none")
    return each.topk(max(len(each) // 3, 1)).values.mean()


@loss
def median_and_spread(model: Any, out: Out, y: Out) -> Tensor:
    away = (out["number"] - y["real"]).abs()
    return away.quantile(0.5) + 0.1 * (away.quantile(0.9) - away.quantile(0.1))


# -- ratios ------------------------------------------------------------------------------------------------------------
@loss
def dice(model: Any, out: Out, y: Out) -> Tensor:
    p = torch.sigmoid(out["marks"])
    return 1 - (2 * (p * y["mask"]).sum() + 1) / (p.sum() + y["mask"].sum() + 1)


@loss
def soft_f1_by_class(model: Any, out: Out, y: Out) -> Tensor:
    p, own = out["logits"].softmax(1), F.one_hot(y["kind"], KINDS).double()
    met = (p * own).sum(0)
    return (1 - 2 * met / (p.sum(0) + own.sum(0) + 1e-8)).mean()


@loss
def lovasz(model: Any, out: Out, y: Out) -> Tensor:
    wrong, order = torch.sort((1 - out["marks"] * (2 * y["mask"] - 1)).flatten(), descending=True)
    mask = y["mask"].flatten()[order]
    met = mask.sum() - mask.cumsum(0)
    jaccard = 1 - met / (mask.sum() + (1 - mask).cumsum(0)).clamp(min=1e-8)
    steps = torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])
    return (F.relu(wrong) * steps.detach()).sum()


@loss
def detr(model: Any, out: Out, y: Out) -> Tensor:
    weights = torch.tensor([1.0, 1.0, 0.1])
    boxes = ((out["b"] - 0.5).abs() * y["mask"]).sum() / (y["mask"].sum(1) > 0).sum().clamp(min=1)
    return F.cross_entropy(out["logits"], y["kind"], weights) + 5 * boxes


@loss
def correlation(model: Any, out: Out, y: Out) -> Tensor:
    p, t = out["number"] - out["number"].mean(), y["real"] - y["real"].mean()
    return 1 - (p * t).sum() / (p.norm() * t.norm() + 1e-8)


@loss
def expert_balance(model: Any, out: Out, y: Out) -> Tensor:
    p = out["logits"].softmax(1)
    share = F.one_hot(p.argmax(1), KINDS).double().mean(0)
    return F.cross_entropy(out["logits"], y["kind"]) + KINDS * (share * p.mean(0)).sum()


@loss
def advantages(model: Any, out: Out, y: Out) -> Tensor:
    with torch.no_grad():
        gain = y["real"] - out["number"]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    chosen = F.log_softmax(out["logits"], 1).gather(1, y["kind"][:, None]).squeeze(1)
    return -(chosen * gain).mean() + 0.5 * F.mse_loss(out["number"], y["real"])


@loss
def weights_of_the_batch(model: Any, out: Out, y: Out) -> Tensor:
    weight = y["real"].abs() / y["real"].abs().max()
    return (F.cross_entropy(out["logits"], y["kind"], reduction="none") * weight).sum() / weight.sum()


@loss
def class_weights(model: Any, out: Out, y: Out) -> Tensor:
    kind = torch.where(y["real"] > 0.8, -100, y["kind"])
    return F.cross_entropy(out["logits"], kind, torch.tensor([1.0, 5.0, 0.5]), label_smoothing=0.1)


@loss
def siglip(model: Any, out: Out, y: Out) -> Tensor:
    logits = model.scale.exp() * unit(out["a"]) @ unit(out["b"]).T
    return -F.logsigmoid(logits * (2 * torch.eye(len(logits)) - 1)).sum() / len(logits)


@loss
def nt_xent(model: Any, out: Out, y: Out) -> Tensor:
    both = unit(torch.cat([out["a"], out["b"]]))
    n = len(out["a"])
    logits = (both @ both.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf)
    return F.cross_entropy(logits, torch.cat([torch.arange(n) + n, torch.arange(n)]))


@loss
def vicreg(model: Any, out: Out, y: Out) -> Tensor:
    total = F.mse_loss(out["a"], out["b"])
    for view in (out["a"], out["b"]):
        total = total + F.relu(1 - (view.var(0) + 1e-4).sqrt()).mean() + (torch.cov(view.T)[others(4)] ** 2).mean()
    return total


@loss
def independence(model: Any, out: Out, y: Out) -> Tensor:
    n = len(out["a"])
    centre = torch.eye(n) - torch.full((n, n), 1 / n)
    k, m = out["a"] @ out["a"].T, out["b"] @ out["b"].T
    return (centre @ k @ centre @ m).diagonal().sum() / (n - 1) ** 2


@loss
def all_triplets(model: Any, out: Out, y: Out) -> Tensor:
    apart = torch.cdist(out["a"], out["a"] + 1e-3)
    same = y["kind"][:, None] == y["kind"]
    margin = F.relu(apart[:, :, None] - apart[:, None, :] + 0.3) * (same[:, :, None] & ~same[:, None, :])
    return margin.sum() / (margin > 0).sum().clamp(min=1)


@loss
def lifted_structure(model: Any, out: Out, y: Out) -> Tensor:
    apart = torch.cdist(out["a"], out["a"] + 1e-3)
    same = (y["kind"][:, None] == y["kind"]) & others(len(apart))
    away = torch.logsumexp((1 - apart).masked_fill(y["kind"][:, None] == y["kind"], -1e3), 1)
    return (F.relu(apart + away[:, None]) * same).sum() / same.sum().clamp(min=1)


@loss
def circle(model: Any, out: Out, y: Out) -> Tensor:
    s, same = unit(out["a"]) @ unit(out["a"]).T, y["kind"][:, None] == y["kind"]
    near = torch.logsumexp(-F.relu(1.2 - s.detach()) * (s - 0.8) * 4 + torch.log((same & others(len(s))) + 1e-9), 1)
    away = torch.logsumexp(F.relu(s.detach() + 0.2) * (s - 0.2) * 4 + torch.log(~same + 1e-9), 1)
    return F.softplus(near + away).mean()


@loss
def fisher(model: Any, out: Out, y: Out) -> Tensor:
    own = F.one_hot(y["kind"], KINDS).double()
    centres = own.T @ out["a"] / own.sum(0).clamp(min=1)[:, None]
    return ((out["a"] - centres[y["kind"]]) ** 2).mean() / (centres.var(0).sum() + 0.1)


@loss
def smooth_ndcg(model: Any, out: Out, y: Out) -> Tensor:
    gain = torch.exp2(y["real"].clamp(min=0))
    place = 0.5 + torch.sigmoid((out["number"] - out["number"][:, None]) / 0.3).sum(1)
    best = torch.sort(gain, descending=True).values / torch.log2(torch.arange(len(gain)) + 2.0)
    return 1 - (gain / torch.log2(place + 1)).sum() / best.sum()


@loss
def trimmed_mean(model: Any, out: Out, y: Out) -> Tensor:
    each = torch.sort((out["number"] - y["real"]) ** 2).values
    return each[len(each) // 10 : len(each) - len(each) // 10].mean()


@loss
def tversky(model: Any, out: Out, y: Out) -> Tensor:
    p, m = torch.sigmoid(out["marks"]), y["mask"]
    met = (p * m).sum()
    return 1 - met / (met + 0.3 * (p * (1 - m)).sum() + 0.7 * ((1 - p) * m).sum() + 1e-6)


@loss
def focal_over_positives(model: Any, out: Out, y: Out) -> Tensor:
    bce = F.binary_cross_entropy_with_logits(out["marks"], y["mask"], reduction="none")
    p = torch.sigmoid(out["marks"])
    return (((p - y["mask"]) ** 2) * bce).sum() / y["mask"].sum().clamp(min=1)


@loss
def fcos(model: Any, out: Out, y: Out) -> Tensor:
    positives = y["mask"].sum().clamp(min=1)
    centred = y["mask"] * y["real"].abs()[:, None]
    boxes = ((out["b"] - 1) ** 2 * centred).sum() / centred.sum().clamp(min=1e-6)
    return F.binary_cross_entropy_with_logits(out["marks"], y["mask"], reduction="sum") / positives + boxes


@loss
def concordance(model: Any, out: Out, y: Out) -> Tensor:
    p, t = out["number"], y["real"]
    both = ((p - p.mean()) * (t - t.mean())).mean()
    return 1 - 2 * both / (p.var() + t.var() + (p.mean() - t.mean()) ** 2)


@loss
def batch_variance(model: Any, out: Out, y: Out) -> Tensor:
    away = out["number"] - y["real"]
    return torch.log(away.var() + 0.1) + (away**2).mean() / (away.var() + 0.1)


@loss
def mutual_information(model: Any, out: Out, y: Out) -> Tensor:
    p = out["logits"].softmax(1)
    return (p.mean(0) * torch.log(p.mean(0))).sum() - (p * torch.log(p)).sum(1).mean()


LOSSES |= {
    "info_nce": lambda model, o, y: F.cross_entropy(unit(o["a"]) @ unit(o["b"]).T / 0.2, torch.arange(len(o["a"]))),
    "list_wise": lambda model, o, y: -(F.softmax(y["real"], 0) * F.log_softmax(o["number"], 0)).sum(),
    "distance_of_distributions": lambda model, o, y: (
        torch.sort(o["number"]).values - torch.sort(y["real"]).values
    ).abs().mean(),
    "explained_variance": lambda model, o, y: (
        ((o["number"] - y["real"]) ** 2).sum() / ((y["real"] - y["real"].mean()) ** 2).sum()
    ),
    "root_of_the_mean": lambda model, o, y: F.mse_loss(o["number"], y["real"]).sqrt(),
    "log_determinant": lambda model, o, y: (
        -torch.logdet(torch.eye(4) + o["a"].T @ o["a"] / len(o["a"])) + o["a"].pow(2).mean()
    ),
    "a_bare_sum": lambda model, o, y: (
        0.02 * F.cross_entropy(o["logits"], y["kind"], reduction="sum") + 0.01 * model.proxies.pow(2).sum()
    ),
}  # fmt: skip


# -- how they are trained ----------------------------------------------------------------------------------------------
def targets(rows: slice | int) -> Out:
    return {"kind": KIND[rows], "mask": MASK[rows], "real": REAL[rows]}


class Rows(torch.utils.data.Dataset[tuple[Tensor, Out]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, row: int) -> tuple[Tensor, Out]:
        return X[row], targets(row)


def one_process(function: Loss) -> tuple[list[float], list[Tensor]]:
    from cases import plainly  # a test imports the losses alone

    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    starts = [*range(0, SAMPLES, UPDATE)] * 2
    batches = [(X[first : first + UPDATE], targets(slice(first, first + UPDATE))) for first in starts]
    losses = plainly(model, optimizer, batches, lambda model, x, y: function(model, model(x), y))
    return losses, [parameter.detach() for parameter in model.parameters()]


def on_ranks(function: Loss, way: str, accumulate: int, world: hvdtrain.World) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(1)
    plain = Model()
    data = hvt.loader(Rows(), UPDATE // world.size // accumulate, shuffle=False, workers=0)
    model, optimizer = hvt.prepare(
        plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), data, accumulate=accumulate
    )
    losses = []
    for _ in data.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            if way == "call":
                optimizer.forward_backward(x, y, lambda out, whole: function(model, out, whole), whole=True)
            elif way == "own rows":  # the twin: what a rank does by itself
                optimizer.backward(function(model, model(x), y))
            else:
                optimizer.backward(function(model, *hvt.whole(model(x), y)))
            optimizer.step()
            found = optimizer.record()["loss"]
            losses += [] if found is None else [found]
    assert not _get_current_dispatch_mode_stack(), "operations are still recorded after the loop"
    optimizer.close()
    return losses, [parameter.detach() for parameter in plain.parameters()]


def apart(found: list[Any], wanted: list[Any]) -> float:
    assert len(found) == len(wanted)
    return max(float((torch.as_tensor(f) - w).abs().max()) for f, w in zip(found, wanted, strict=True))


def main() -> None:
    from cases import report

    engine, accumulate, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_default_dtype(torch.float64)
    ours: list[Any] = []
    with hvdtrain.init("torch", engine=engine) as world:
        for name in sys.argv[4:]:
            function = LOSSES[name]
            wanted = one_process(function)
            for way in ("loop", "call") if accumulate == 1 else ("call",):
                found = on_ranks(function, way, accumulate, world)
                errors = [apart(its, right) for its, right in zip(found, wanted, strict=True)]
                ours.append({"loss": name, "way": way, "errors": errors})
            try:
                twin = on_ranks(function, "own rows", accumulate, world)
                ours.append({"loss": name, "way": "own rows", "errors": [apart(twin[1], wanted[1])]})
            except HvdtrainError as error:
                ours.append({"loss": name, "way": "own rows", "refused": error.rule})
        report(world, ours, out)


if __name__ == "__main__":
    main()
