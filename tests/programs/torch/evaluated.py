"""What `hvt.evaluate` takes beside functions of (outputs, targets): cases of data_ranks.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics import classification, regression, wrappers

import hvdtrain.torch as hvt
from hvdtrain.core.errors import HvdtrainError
from hvdtrain.world.world import World

SENTENCES, LENGTH, CLASSES = 23, 6, 4


def sentences() -> list[dict[str, Tensor]]:
    """Tokens, and labels of which some do not count, as a collator of transformers makes them."""
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 9, (SENTENCES, LENGTH), generator=draw)
    labels = torch.randint(0, CLASSES, (SENTENCES, LENGTH), generator=draw)
    labels[torch.arange(LENGTH) > torch.arange(SENTENCES)[:, None] % LENGTH] = -100
    return [{"input_ids": ids, "labels": its} for ids, its in zip(tokens, labels, strict=True)]


@dataclass
class Output:
    """As models of transformers return it."""

    loss: Tensor
    logits: Tensor


class Tagger(nn.Module):
    """Is called with its arguments by name, labels among them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.scores = nn.Embedding(9, CLASSES).double()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        logits = self.scores(input_ids)
        return Output(nn.functional.cross_entropy(logits.mT, labels), logits)


class F1(torchmetrics.Metric):
    """Of each class, from counts."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("right", "said", "there"):
            self.add_state(name, torch.zeros(CLASSES, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.right += torch.bincount(targets[predictions == targets], minlength=CLASSES)
        self.said += torch.bincount(predictions, minlength=CLASSES)
        self.there += torch.bincount(targets, minlength=CLASSES)

    def compute(self) -> Tensor:
        return 2 * self.right.double() / (self.said + self.there)


class Spread(torchmetrics.Metric):
    """From all predictions, and the largest: a concatenation, a maximum, and a list that nothing reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("all", [], dist_reduce_fx="cat")
        self.add_state("most", torch.tensor(-1), dist_reduce_fx="max")
        self.add_state("batches", [], dist_reduce_fx=None)

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.all.append(predictions)
        self.most = torch.maximum(self.most, predictions.max())
        self.batches.append(torch.tensor(len(predictions)))

    def compute(self) -> dict[str, Tensor]:
        every = torchmetrics.utilities.dim_zero_cat(self.all).double()
        return {"variance": every.var(), "most": self.most, "count": torch.stack(list(self.batches)).sum()}


class Mean(torchmetrics.Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.value = predictions.double().mean()

    def compute(self) -> Tensor:
        return self.value


class Counting(torchmetrics.Metric):
    """A sum that is a state, and a count that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.count += len(targets)
        self.total += targets.sum()

    def compute(self) -> Tensor:
        return self.total / self.count


class Listed(torchmetrics.Metric):
    """One value a sample, as similarities without a reduction are."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("each", [], dist_reduce_fx="cat")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.each.append(predictions - 2 * targets)

    def compute(self) -> Tensor:
        return torchmetrics.utilities.dim_zero_cat(self.each)


class Smoothed:
    """Of nobody's library; what it gives depends on the order of samples."""

    value = 0.0

    def reset(self) -> None:
        self.value = 0.0

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        for number in predictions.tolist():
            self.value = 0.5 * self.value + number

    def compute(self) -> float:
        return self.value

    clone, modules = copy.deepcopy, lambda self: ()  # as the test asks torchmetrics' own


class Rows(torchmetrics.Metric):
    """Keeps all targets in one tensor, which grows."""

    def __init__(self, joined: str | None) -> None:
        super().__init__()
        self.add_state("rows", torch.zeros(0), dist_reduce_fx=joined)

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.rows = torch.cat([self.rows, targets.float()])

    def compute(self) -> Tensor:
        return self.rows.sort().values[-3:]


def of_labels(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Predictions and labels of the tokens that count."""
    counts = batch["labels"] != -100
    return model(**batch).logits.argmax(-1)[counts], batch["labels"][counts]


def dicts(world: World) -> Any:
    """Batches that are dicts: the mean over tokens, over samples, and metrics with states."""

    def measure(output: Output, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        counts = batch["labels"] != -100
        losses = nn.functional.cross_entropy(output.logits.mT, batch["labels"], reduction="none")
        right = (output.logits.argmax(-1) == batch["labels"]) & counts
        return {"loss": (losses, counts), "first": right[:, 0]}

    model, f1 = Tagger(), F1()
    found = hvt.evaluate(model, sentences(), measure, per_rank_batch=3, workers=0)
    metrics = {"f1": f1, "spread": Spread()}
    found |= hvt.evaluate(model, sentences(), metrics, forward=of_labels, per_rank_batch=3, workers=0)
    assert f1._update_count == 0  # the user's own stays as it is
    few = {"few": Spread()}  # on some ranks none
    return found | hvt.evaluate(model, sentences()[:2], few, forward=of_labels, per_rank_batch=3, workers=0)


def corpus(world: World) -> Any:
    """What needs all predictions at once, beside what does not; on texts of any length."""

    def order(found: Any, targets: Tensor) -> dict[str, float]:
        outputs, loss, nothing = found
        assert loss.shape == (SENTENCES,) and loss.isfinite().all() and nothing is None
        assert [len(text) for text in outputs] == [int((its != -100).sum()) for its in targets]
        flat = np.concatenate([np.array(text) for text in outputs])
        return {"order": float((flat * np.arange(len(flat))).sum()), "texts": len(outputs)}

    def forward(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        output = model(**batch)
        said = output.logits.argmax(-1)
        lengths = (batch["labels"] != -100).sum(1).tolist()
        texts = [row[:n].tolist() for row, n in zip(said, lengths, strict=True)]
        return (texts, output.loss, None), batch["labels"]

    metrics = [hvt.corpus_metrics(order), lambda outputs, targets: {"labels": (targets != -100).double().mean(1)}]
    return hvt.evaluate(Tagger(), sentences(), metrics, forward=forward, per_rank_batch=3, workers=0)


def gathered(world: World) -> Any:
    """Two loops of one's own over a shuffled loader: each sample once, in the loader's order."""
    batches = hvt.loader(sentences(), 12 // world.size, workers=0)
    found = []
    for _ in range(2):
        kept = []
        for batch in batches:
            ids = batch["input_ids"]
            values = {"ids": ids, "sums": ids.sum(1).numpy(), "text": [str(row) for row in ids]}
            values |= {"numbers": list(ids.sum(1)), "of_batch": (float(len(ids)), torch.tensor(len(ids)))}
            kept.append((batches.step, values))
        every = hvt.gather_in_order(kept)
        assert [int(number) for number in every["numbers"]] == every["sums"].tolist()
        assert every["of_batch"][0].tolist() == every["of_batch"][1].tolist() and len(every["of_batch"][0]) == SENTENCES
        assert every["sums"].tolist() == every["ids"].sum(1).tolist()
        assert every["text"] == [str(row) for row in every["ids"]]
        found.append(every["ids"].tolist())
    return found


def plain(world: World) -> Any:
    """What `dicts` and `corpus` must find: all sentences at once, without hvdtrain."""
    rows = sentences()
    ids, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    scores = Tagger().scores(ids)
    said, counts = scores.argmax(-1), labels != -100
    flat, wanted = said[counts].numpy(), labels[counts].numpy()
    f1 = [2.0 * ((flat == c) & (wanted == c)).sum() / ((flat == c).sum() + (wanted == c).sum()) for c in range(CLASSES)]
    return {
        "dicts": {
            "loss": float(-torch.log_softmax(scores.detach(), -1)[counts].gather(1, labels[counts][:, None]).mean()),
            "first": float(((said == labels) & counts)[:, 0].double().mean()),
            **{f"f1_{c}": float(value) for c, value in enumerate(f1)},
            "spread_variance": float(np.var(flat, ddof=1)),
            "spread_most": float(flat.max()),
            "spread_count": float(len(flat)),
            "few_variance": float(np.var(flat[:3], ddof=1)),
            "few_most": float(flat[:3].max()),
            "few_count": 3.0,
        },
        "corpus": {
            "order": float((flat * np.arange(len(flat))).sum()),
            "texts": float(SENTENCES),
            "labels": float(counts.double().mean()),
        },
    }


def right(predictions: Tensor, targets: Tensor) -> dict[str, Any]:
    return {"right": (predictions == targets, torch.ones_like(targets))}


def refused(world: World) -> Any:
    """By every rank alike."""
    data = {"per_rank_batch": 3, "workers": 0, "forward": of_labels}
    batches = hvt.loader(sentences(), 3, workers=0, shuffle=False)
    kept = [(batches.step, batch["input_ids"]) for batch in batches]
    heads = [(step, [ids[:, at] for at in range(len(ids))]) for step, ids in kept if len(ids) == 3]
    ragged = [(step, ids[:, : 1 + place % 2]) for place, (step, ids) in enumerate(kept)]
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("right twice", lambda: hvt.evaluate(Tagger(), sentences(), [right, right], **data)),
        ("the class F1", lambda: hvt.evaluate(Tagger(), sentences(), F1, **data)),
        ("a str", lambda: hvt.evaluate(Tagger(), sentences(), "accuracy", **data)),
        ("(values, weights)", lambda: hvt.evaluate(Tagger(), sentences(), lambda p, t: {"a": p}, **data)),
        ("needs a weight", lambda: hvt.evaluate(Tagger(), sentences(), lambda p, t: {"a": (p, p[:1])}, **data)),
        ("3 samples", lambda: hvt.gather_in_order([(step, ids[:1]) for step, ids in kept])),
        ("in place of a loader's step", lambda: hvt.gather_in_order([(None, ids) for _, ids in kept])),
        ("a str", lambda: hvt.gather_in_order([(step, (ids, "half")) for step, ids in kept])),
        ("a batch twice", lambda: hvt.gather_in_order([*kept, *kept])),
        ("no batch on any rank", lambda: hvt.gather_in_order([])),
        ("n samples, or n parts of a value", lambda: hvt.gather_in_order(heads)),
        ("in a list the values of samples can have different shapes", lambda: hvt.gather_in_order(ragged)),
    ]
    if world.size > 1:
        uneven = Rows("sum")  # of what is not equally long
        cases += [
            ("the same shape on every rank", lambda: hvt.evaluate(Tagger(), sentences(), uneven, **data)),
            ("must be picklable", lambda: world.gather(lambda: None)),
            ('dist_reduce_fx="mean"', lambda: hvt.evaluate(Tagger(), sentences(), Mean(), **data)),
            ("Counting.count (0) changed", lambda: hvt.evaluate(Tagger(), sentences(), Counting(), **data)),
        ]
    for said, attempt in cases:
        try:
            attempt()
        except HvdtrainError as error:
            assert said in str(error), (said, str(error))
        else:
            raise AssertionError(f"not refused: {said}")
    return True


def of_torchmetrics(world: World) -> Any:
    """Its own, of many kinds, as they are: what they are over all samples at once, in one process."""
    draw = torch.Generator().manual_seed(8)
    x, y = torch.randn(SENTENCES, 5, generator=draw), torch.randint(0, 3, (SENTENCES,), generator=draw)
    torch.manual_seed(9)
    model = nn.Linear(5, 3)

    def classes(model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).softmax(-1), batch[1]

    def numbers(model: nn.Module, batch: Any) -> Any:
        return model(batch[0])[:, 0], batch[0][:, 0]

    metrics = {
        classes: [
            classification.MulticlassF1Score(3, average=None), classification.MulticlassAUROC(3),
            classification.MulticlassConfusionMatrix(3), classification.MulticlassCalibrationError(3, n_bins=5),
            wrappers.ClasswiseWrapper(classification.MulticlassRecall(3, average=None)),
            torchmetrics.MetricCollection(
                {"acc": classification.MulticlassAccuracy(3), "pre": classification.MulticlassPrecision(3)}, prefix="v_"
            ),
        ],
        numbers: [
            Rows("cat"), regression.PearsonCorrCoef(), regression.SpearmanCorrCoef(), regression.R2Score(),
            torchmetrics.MeanMetric(), regression.RelativeSquaredError(), Listed(), Smoothed(),
            torchmetrics.image.PeakSignalNoiseRatio(data_range=3.0),
        ],
    }  # fmt: skip
    for forward, kinds in metrics.items():
        for metric in kinds:
            whole = metric.clone()
            for part in whole.modules():  # the reference has all samples already: it sums nothing over ranks
                part.distributed_available_fn = lambda: False
            with torch.no_grad():
                whole.update(*forward(model, (x, y)))
            computed = whole.compute()
            each = computed.values() if isinstance(computed, dict) else [computed]
            wanted = torch.cat([torch.as_tensor(value).flatten() for value in each])
            found = hvt.evaluate(model, (x, y), metric, forward=forward, per_rank_batch=3, workers=0)
            torch.testing.assert_close(torch.tensor([*found.values()]), wanted.float(), rtol=1e-5, atol=1e-6)
    try:
        running = wrappers.Running(torchmetrics.MeanMetric(), window=2)
        hvt.evaluate(model, (x, y), running, forward=numbers, per_rank_batch=3, workers=0)
        assert world.size == 1
    except HvdtrainError as error:
        assert "must not depend on how samples are batched" in str(error)
    return True


def states_that_nothing_joins(world: World) -> Any:
    """Metrics with tensors of dist_reduce_fx=None: those of one process, also where a rank has one sample or none."""
    from torchmetrics import regression

    def numbers(model: nn.Module, batch: Any) -> Any:
        return batch[0][:, 0], batch[0][:, 1]

    kinds = (regression.PearsonCorrCoef, regression.ConcordanceCorrCoef, regression.NormalizedRootMeanSquaredError)
    for samples, per_rank_batch in ((2, 4), (3, 1), (9, 4)):
        x = torch.randn(samples, 2, generator=torch.Generator().manual_seed(8))
        for kind in kinds:
            whole = kind()
            whole.distributed_available_fn = lambda: False
            whole.update(x[:, 0], x[:, 1])
            found = hvt.evaluate(
                nn.Identity(), (x, x), kind(), forward=numbers, per_rank_batch=per_rank_batch, workers=0
            )
            torch.testing.assert_close(torch.tensor([*found.values()]), whole.compute()[None], rtol=1e-4, atol=1e-5)
    return True


CASES = (dicts, corpus, gathered, plain, refused, of_torchmetrics, states_that_nothing_joins)
