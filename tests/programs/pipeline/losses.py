"""Losses that divide by something, in a pipeline and in plain PyTorch, float64: one line of JSON for each.

The reference is the unsplit model, one forward and one backward pass of the whole batch; it uses nothing of hvdtrain.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from outcome import outcome
from torch import Tensor, nn
from torch.nn import functional as F

import hvdtrain.pipeline

BATCH, TOKENS, CLASSES, WIDTH, WORDS = 7, 5, 3, 6, 5
CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64)
Loss = Callable[[Any, Any], Tensor]

torch.manual_seed(0)
X = torch.randn(BATCH, TOKENS, 6, dtype=torch.float64)
LABELS = torch.randint(CLASSES, (BATCH, TOKENS))
IGNORED = LABELS.clone()
IGNORED[0, 1:] = IGNORED[3, 2:] = -100
IGNORED[5:] = -100  # with 3 micro-batches of 3, 2, 2 samples: nothing of the last one counts
REAL = torch.randn(BATCH, TOKENS, CLASSES, dtype=torch.float64)
MASK = (torch.rand(BATCH, TOKENS) < 0.6).double()
MASK[5:] = 0
HOT = F.one_hot(LABELS, CLASSES).double()


def tokens(**options: Any) -> Loss:
    return lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten(), **options)


def valid(y: Tensor) -> Tensor:
    return (y != -100).sum()


def by_class(y: Tensor) -> Tensor:
    return CLASS_WEIGHTS[y].sum()


def masked(out: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
    return ((out - y[0]).square().mean(-1) * y[1]).sum() / y[1].sum()


def both(out: Tensor, y: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y["labels"].flatten()) + 0.5 * F.mse_loss(out, y["values"])


@dataclass(frozen=True)
class Case:
    """A loss, its targets, and what its mean divides by."""

    loss: Loss
    y: Any
    weight: Any = None


CASES = {
    "cross_entropy": Case(tokens(), LABELS),
    "ignore_index": Case(tokens(), IGNORED, valid),
    "ignore_index_smoothed": Case(tokens(label_smoothing=0.1), IGNORED, valid),
    "class_weights": Case(tokens(weight=CLASS_WEIGHTS), LABELS, by_class),
    "class_weights_ignored": Case(
        tokens(weight=CLASS_WEIGHTS), IGNORED, lambda y: by_class(y.clamp(min=0).where(y >= 0, 0)[y >= 0])
    ),
    "nll": Case(lambda out, y: F.nll_loss(out.log_softmax(-1).flatten(0, 1), y.flatten()), IGNORED, valid),
    "mse": Case(F.mse_loss, REAL),
    "masked_mse": Case(masked, (REAL, MASK), lambda y: y[1].sum()),
    "bce_with_logits": Case(F.binary_cross_entropy_with_logits, HOT),
    "kl_batchmean": Case(
        lambda out, y: F.kl_div(out.log_softmax(-1), y.softmax(-1), reduction="batchmean"), REAL
    ),
    "two_terms": Case(both, {"labels": LABELS, "values": REAL}),
    "sum_over_samples": Case(lambda out, y: F.mse_loss(out, y, reduction="sum") / len(y), REAL),
}  # fmt: skip


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def plain(case: Case) -> tuple[float, list[Tensor]]:
    """The unsplit model's loss and gradients."""
    model = net()
    loss = case.loss(model(X), case.y)
    loss.backward()
    return float(loss.detach()), [p.grad for p in model.parameters()]


def off(case: Case, micro_batches: int, schedule: Any, weight: Any = "its own", remat: Any = "never") -> float:
    """How far loss and gradients of a pipeline are from the unsplit model's, relative to the largest."""
    pipe = hvdtrain.pipeline.split(
        net(), X, ["cpu"] * 2, balance=[1, 2], micro_batches=micro_batches, schedule=schedule, remat=remat
    )
    loss = pipe.step(X, case.y, case.loss, weight=case.weight if weight == "its own" else weight)
    wanted, gradients = plain(case)
    largest = max(float(g.abs().max()) for g in gradients)
    gap = max(float((p.grad - g).abs().max()) for p, g in zip(pipe.parameters(), gradients, strict=True)) / largest
    return max(gap, abs(float(loss) - wanted) / abs(wanted))


def one_number() -> dict[str, Any]:
    """A number as the weight: right for one micro-batch, whatever it is; refused for several."""
    case = CASES["ignore_index"]
    pipe = hvdtrain.pipeline.split(net(), X, ["cpu"] * 2, balance=[1, 2], micro_batches=3)
    return {
        "off": max(off(case, 1, "1f1b", weight=number) for number in (15, 0.5, torch.tensor(15))),
        "several": outcome(lambda: pipe.step(X, case.y, case.loss, weight=15)),
        "negative": outcome(lambda: pipe.step(X, case.y, case.loss, weight=lambda y: -1)),
        "shape": outcome(lambda: pipe.step(X, case.y, case.loss, weight=lambda y: y != -100)),
    }


class Tokens(nn.CrossEntropyLoss):
    """With the classes last."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return super().forward(out.flatten(0, 1), y.flatten())


def contrastive(out: Tensor, y: Tensor) -> Tensor:
    features = out.flatten(1)
    return F.cross_entropy(features @ features.T, torch.arange(len(out)))


UNWEIGHTED = {
    "ignore_index": (Tokens(), IGNORED),
    "pad_id": (Tokens(ignore_index=0), LABELS),
    "class_weights": (Tokens(weight=CLASS_WEIGHTS), LABELS),
    "in_a_function": (CASES["class_weights"].loss, LABELS),
    "mask": (masked, (REAL, MASK)),
    "sum": (nn.MSELoss(reduction="sum"), REAL),
    "samples_together": (contrastive, REAL),
    "batch_std": (lambda out, y: F.mse_loss(out, y) / y.std(), REAL),
}


def refused() -> dict[str, Any]:
    """Losses whose mean is not over samples, without a weight; and how far off they were."""
    found: dict[str, Any] = {}
    for name, (loss, y) in UNWEIGHTED.items():
        pipe = hvdtrain.pipeline.split(net(), X, ["cpu"] * 2, balance=[1, 2], micro_batches=3)
        state, before = torch.get_rng_state(), repr(loss)
        text = outcome(lambda pipe=pipe, y=y, loss=loss: pipe.step(X, y, loss))
        kept = torch.equal(state, torch.get_rng_state()) and all(p.grad is None for p in pipe.parameters())
        found[name] = [text, kept and repr(loss) == before and pipe.training]
    pipe = hvdtrain.pipeline.split(net(), X, ["cpu"] * 2, balance=[1, 2], micro_batches=3)
    loss = Tokens()
    found["later"] = [outcome(lambda y=y: pipe.step(X, y, loss)) for y in (LABELS, IGNORED)]
    wrong = outcome(lambda: pipe.step(X, IGNORED, loss, weight=lambda y: (y != 0).sum()))
    calls, bce = [], F.binary_cross_entropy_with_logits
    for made in ([nn.BCEWithLogitsLoss()] * 7, [nn.BCEWithLogitsLoss() for _ in range(7)]):  # once; in each step
        pipe = hvdtrain.pipeline.split(net(), X, ["cpu"] * 2, balance=[1, 2], micro_batches=3)
        with patch.object(F, "binary_cross_entropy_with_logits", wraps=bce) as counted:
            for each in made:
                pipe.step(X, REAL, each)
        calls.append(counted.call_count)
    return found | {"wrong": wrong, "calls": calls}


def rare() -> dict[str, str]:
    """What makes the mean another one is in few samples of a larger batch, or comes in the third step."""
    x, labels = torch.randn(40, TOKENS, 6).double(), torch.randint(1, CLASSES, (40, TOKENS))
    values = torch.randn(40, TOKENS, CLASSES).double()
    padded, gaps, mask = labels.clone(), values.clone(), torch.ones(40, TOKENS).double()
    padded[3, 2:] = padded[27, 4:] = 0
    gaps[13, 1:] = math.nan
    mask[27, 1:] = 0
    some, fewer = labels.clone(), labels.clone()  # left out: two of each sample, and all but two of one
    turned = torch.stack([(torch.arange(TOKENS) / 7 + 0.3).roll(sample) for sample in range(40)]).double()
    less = turned.clone()
    less[13].clamp_(max=0.8)  # within what the others have: its sum alone tells
    some[:, :2] = fewer[:, :2] = fewer[31, :3] = -100

    def present(out: Tensor, y: Tensor) -> Tensor:
        return (out - y)[~y.isnan()].square().mean()

    pad = Tokens(ignore_index=0)
    changed, (reweighed, replaced) = Tokens(), (Tokens(weight=torch.ones_like(CLASS_WEIGHTS)) for _ in range(2))
    third: dict[Any, Callable[[], Any]] = {  # what is done before the third step
        changed: lambda: setattr(changed, "reduction", "sum"),
        reweighed: lambda: reweighed.weight.copy_(CLASS_WEIGHTS),
        replaced: lambda: setattr(replaced, "weight", CLASS_WEIGHTS),
    }
    steps: dict[str, list[tuple[Any, Any]]] = {
        "pad": [(pad, padded)],
        "nan": [(present, gaps)],
        "mask": [(masked, (values, mask))],
        "pad_later": [(pad, labels), (pad, labels), (pad, padded)],
        "weights_later": [(masked, (values, one)) for one in (mask * 0 + 1, mask * 0 + 2, mask * 0.5 + 0.5)],
        "weights_turned_later": [(masked, (values, one)) for one in (turned, turned, less)],
        "count_later": [(tokens(), one) for one in (some, some, fewer)],
        "setting_later": [(changed, labels)] * 3,
        "class_weights_later": [(reweighed, labels)] * 3,
        "other_class_weights_later": [(replaced, labels)] * 3,
    }
    found = {}
    for name, those in steps.items():
        pipe = hvdtrain.pipeline.split(net(), x, ["cpu"] * 2, balance=[1, 2], micro_batches=3)
        for number, (loss, y) in enumerate(those, 1):
            if number == 3 and loss in third:
                third[loss]()
            found[name] = f"step {number}: " + outcome(lambda pipe=pipe, y=y, loss=loss: pipe.step(x, y, loss))
    return found


def nothing_counts() -> dict[str, Any]:
    """A batch of weight 0, and NaN in the inputs and outputs of micro-batches of weight 0, change nothing."""
    found: dict[str, Any] = {}
    for remat in ("never", "all"):
        pipe = hvdtrain.pipeline.split(net(), X, ["cpu"] * 2, balance=[1, 2], micro_batches=3, remat=remat)
        loss = pipe.step(X, torch.full_like(LABELS, -100), tokens(), weight=valid)
        found[f"loss_{remat}"] = float(loss)
        found[f"gradients_{remat}"] = sum(p.grad is not None and bool(p.grad.any()) for p in pipe.parameters())
        spoilt = X.clone()
        spoilt[5:] = float("nan")
        pipe.step(spoilt, IGNORED, tokens(), weight=valid)
        wanted = plain(CASES["ignore_index"])[1]
        found[f"off_{remat}"] = max(
            float((p.grad - g).abs().max()) for p, g in zip(pipe.parameters(), wanted, strict=True)
        )
    return found


# -- unusual numbers and losses --------------------------------------------------------------------------------------
class Waves(nn.Module):
    """Complex numbers cross the cuts."""

    def __init__(self, *, real: bool) -> None:
        super().__init__()
        self.real = real
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fft.fft(self.first(x))
        for scale in self.scale:
            x = x * scale
        x = x * self.scale[0]
        return self.last(x.real) if self.real else x


class Rows(nn.Module):
    """Words [batch, steps]: rows [batch * steps, words]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x).tanh()).view(-1, WORDS)


class Judge(Rows):
    """Takes its loss itself, of labels that may be left out."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x), labels.flatten())


def distance(model: nn.Module, x: Tensor, y: Tensor, loss: Loss, **more: Any) -> float:
    """The largest difference of gradients from the unsplit model's."""
    kwargs: Mapping[str, Any] = more.pop("kwargs", {})
    model = model.double()
    loss(model(x, **kwargs), y).backward()
    wanted, worst = [p.grad for p in model.parameters()], 0.0
    for schedule, remat in (("gpipe", "except_last"), ("1f1b", "all")):
        model.zero_grad()
        options: Any = {"schedule": schedule, "remat": remat, "micro_batches": 3, "balance": "memory"}
        pipe = hvdtrain.pipeline.split(model, x, ["cpu"] * 2, kwargs=kwargs, **options)
        for _ in range(2):  # the second without what the first step is looked at for
            pipe.step(x, y, loss, kwargs=kwargs, **more)
        pairs = [(p.grad, g) for p, g in zip(model.parameters(), wanted, strict=True) if g is not None]
        worst = max(worst, *(float((found / 2 - gradient).abs().max()) for found, gradient in pairs))
    return worst


def unusual() -> dict[str, Any]:
    """Complex numbers, lists of parameters, several rows a sample, losses that a model takes itself."""
    x, y = (torch.randn(10, WIDTH, dtype=torch.float64) for _ in range(2))
    words, labels = (torch.randint(WORDS, (10, 4)) for _ in range(2))
    labels[:, 1:][torch.rand(10, 3) < 0.5] = -100
    own: dict[str, Any] = {"kwargs": {"labels": labels}}
    return {
        "complex within": distance(Waves(real=True), x, y, F.mse_loss),
        "complex outputs": distance(Waves(real=False), x, y, lambda out, y: (out - y).abs().square().mean()),
        "rows": distance(Rows(), words, labels, lambda out, y: F.cross_entropy(out, y.flatten()), weight=valid),
        "loss of the model": distance(Judge(), words, labels, lambda loss, _: loss, weight=valid, **own),
        "refused": outcome(lambda: distance(Judge(), words, labels, lambda loss, _: loss, **own)),
    }


def main() -> None:
    for name, case in CASES.items():
        errors = [off(case, 1, "gpipe"), off(case, 3, "1f1b")]
        print(json.dumps({"loss": name, "off": max(errors), "weighted": case.weight is not None}), flush=True)
    print(json.dumps({"loss": "one number", **one_number()}), flush=True)
    print(json.dumps({"loss": "refused", **refused()}), flush=True)
    print(json.dumps({"loss": "rare", **rare()}), flush=True)
    print(json.dumps({"loss": "nothing counts", **nothing_counts()}), flush=True)
    print(json.dumps({"loss": "unusual", **unusual()}), flush=True)


if __name__ == "__main__":
    main()
