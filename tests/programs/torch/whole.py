"""Losses in which samples meet, on ranks and over batches of an update, against one process with the global batch.

usage: whole.py ENGINE ACCUMULATE OUT.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import StackDataset

import hvdtrain
import hvdtrain.torch as hvt

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


# -- how views, samples, orders and ratios meet ------------------------------------------------------------------------
@loss
def clip(model: Any, out: Out, y: Out) -> Tensor:
    logits, own = model.scale.exp() * unit(out["a"]) @ unit(out["b"]).T, torch.arange(len(out["a"]))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


@loss
def whitening(model: Any, out: Out, y: Out) -> Tensor:
    def white(v: Tensor) -> Tensor:
        centred = v - v.mean(0)
        root = torch.linalg.cholesky(centred.T @ centred / len(v) + 0.1 * torch.eye(4))
        return torch.linalg.solve_triangular(root, centred.T, upper=False).T

    return F.mse_loss(white(out["a"]), white(out["b"]))


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
def batch_hard_triplet(model: Any, out: Out, y: Out) -> Tensor:
    apart = torch.cdist(out["a"], out["a"] + 1e-3)
    same = y["kind"][:, None] == y["kind"]
    far = apart.masked_fill(~same, -torch.inf).amax(1)
    near = apart.masked_fill(same, 1e3).amin(1)
    return F.relu(far - near + 0.5).mean()


@loss
def survival(model: Any, out: Out, y: Out) -> Tensor:
    order = torch.argsort(y["real"], descending=True)
    risk, seen = out["number"][order], (y["kind"][order] > 0).double()
    return -((risk - torch.logcumsumexp(risk, 0)) * seen).sum() / seen.sum().clamp(min=1)


@loss
def median_and_spread(model: Any, out: Out, y: Out) -> Tensor:
    away = (out["number"] - y["real"]).abs()
    return away.quantile(0.5) + 0.1 * (away.quantile(0.9) - away.quantile(0.1))


@loss
def dice(model: Any, out: Out, y: Out) -> Tensor:
    p = torch.sigmoid(out["marks"])
    return 1 - (2 * (p * y["mask"]).sum() + 1) / (p.sum() + y["mask"].sum() + 1)


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
def advantages(model: Any, out: Out, y: Out) -> Tensor:
    with torch.no_grad():
        gain = y["real"] - out["number"]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    chosen = F.log_softmax(out["logits"], 1).gather(1, y["kind"][:, None]).squeeze(1)
    return -(chosen * gain).mean() + 0.5 * F.mse_loss(out["number"], y["real"])


@loss
def a_bare_sum(model: Any, out: Out, y: Out) -> Tensor:
    return 0.02 * F.cross_entropy(out["logits"], y["kind"], reduction="sum") + 0.01 * model.proxies.pow(2).sum()


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
            else:
                optimizer.backward(function(model, *hvt.whole(model(x), y)))
            optimizer.step()
            found = optimizer.record()["loss"]
            losses += [] if found is None else [found]
    assert not _get_current_dispatch_mode_stack(), "operations are still recorded after the loop"
    optimizer.close()
    return losses, [parameter.detach() for parameter in plain.parameters()]


def of_a_list(world: hvdtrain.World) -> float:
    """Returns by how much weights are off where `hvt.whole` gets a list with a tensor, a column's part, a sample."""
    torch.manual_seed(1)
    ours, alone = nn.Linear(4, 3), nn.Linear(4, 3)
    alone.load_state_dict(ours.state_dict())
    # in the last update of two ranks the second one has none
    samples = [torch.randn(rows, 4) for rows in (2, 1, 3, 5, 4)]

    def each(items: Any) -> Tensor:
        return torch.stack([torch.logsumexp(item, 0) - item[-1] for item in items]).mean()

    batches = hvt.loader(
        StackDataset(rows=samples), 2, shuffle=False, collate=lambda each: [one["rows"] for one in each]
    )
    model, optimizer = hvt.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1), batches)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for number, mine in enumerate(batches):
        optimizer.zero_grad()
        optimizer.backward(each(hvt.whole([model(rows)[:, 0] for rows in mine])))
        optimizer.step()
        plain.zero_grad()
        each([alone(rows)[:, 0] for rows in samples[2 * world.size * number :][: 2 * world.size]]).backward()
        plain.step()
    optimizer.close()
    return max(float((a - b).abs().max()) for a, b in zip(ours.parameters(), alone.parameters(), strict=True))


def main() -> None:
    from cases import apart, report
    from terms import gaps

    engine, accumulate, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_default_dtype(torch.float64)
    ours: list[Any] = []
    with hvdtrain.init("torch", engine=engine) as world:
        for name, function in LOSSES.items():
            wanted = one_process(function)
            for way in ("loop", "call") if accumulate == 1 else ("call",):
                found = on_ranks(function, way, accumulate, world)
                errors = [apart(its, right) for its, right in zip(found, wanted, strict=True)]
                ours.append({"loss": name, "way": way, "errors": errors})
        report(world, (ours, gaps(world, 3), of_a_list(world)), out)


if __name__ == "__main__":
    main()
