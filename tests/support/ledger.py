"""The ledger of samples: random histories of a training that is killed, resumed and resized, and what judges them.

A history is drawn from its number. Programs (`programs/ledger`) live it on real ranks, each of which notes the ids of
every update's samples. What is in the weights in the end must be each sample once an epoch, at the rate of the samples
before it, and the weights those that numpy computes from the same global batches. Nothing of hvdtrain is used here.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

KINDS = {
    "torch": ("arrays", "dataset", "pictures", "records", "iterable", "shards", "sampler", "batches"),
    "keras-torch": ("arrays", "dataset", "in_order", "dealt", "own_order", "begun_order", "generator", "dataloader",
                    "iterable"),
    "keras-tensorflow": ("arrays", "in_order", "dealt", "own_order", "begun_order", "generator", "tfdata"),
}  # fmt: skip
IN_BATCHES = ("in_order", "dealt", "own_order", "begun_order", "generator", "dataloader", "tfdata")  # for Keras
BASE, REFERENCE = 0.01, 4
MOMENTUM, SECOND, EPSILON = 0.875, 0.96875, 2.0**-20  # Keras rounds them to float32, which changes none of these
EXACT = 1e-10
# where a life is killed: within an update, after one, after the save that follows one, at the first batch of an epoch,
# after the last of an epoch; "left": it saves, and ends by itself
ENDS = ("gathered", "updated", "saved", "began", "ended", "left")


@dataclass(frozen=True)
class Life:
    """One job of a history.

    Attributes:
        size: ranks.
        batch: samples of a rank in a step.
        every: updates from checkpoint to checkpoint.
        end: one of `ENDS`, or "": it trains to the end.
        at: of which update, or epoch, of this life.
        first: the rank that is killed, before the others; -1: all at once.
        writes: checkpoints are written beside the training.
        with_writer: what writes them is killed, too.
        engine: "horovod", or another of PyTorch's.
    """

    size: int
    batch: int
    every: int
    end: str
    at: int
    first: int
    writes: bool
    with_writer: bool
    engine: str


@dataclass(frozen=True)
class History:
    """One training.

    Attributes:
        kind: of data.
        samples, epochs: of the whole.
        tail, optimizer: as the adapters name them.
        accumulate: steps of an update.
        decays: the rate follows a cosine after the warm-up.
        resized: its lives have different sizes or batches.
        lives: jobs, one after the other.
    """

    adapter: str
    number: int
    kind: str
    samples: int
    epochs: int
    tail: str
    optimizer: str
    accumulate: int
    decays: bool
    resized: bool
    lives: tuple[Life, ...]


# what went wrong once, by hand: kind, samples, tail, and of each life ranks, samples of a rank, its end and when
BY_HAND: dict[str, tuple[tuple[str, int, str, tuple[tuple[int, int, str, int], ...]], ...]] = {
    "torch": (("records", 10, "drop", ((1, 4, "saved", 1), (2, 4, "", 0))),
              # within what is a batch of the sampler on more ranks
              ("batches", 20, "weighted", ((1, 3, "saved", 2), (2, 2, "", 0)))),
    # a rank has no sample in the last step from this place on, and in no other
    "keras": (("arrays", 4, "weighted", ((1, 1, "saved", 1), (2, 1, "", 0))),
              # what is left of the epoch fills no step of more ranks
              ("arrays", 10, "drop", ((1, 4, "saved", 1), (2, 4, "", 0))),
              ("generator", 10, "drop", ((1, 2, "saved", 13), (2, 2, "", 0))),
              # the order is what it is when each epoch was begun
              ("begun_order", 8, "weighted", ((1, 2, "saved", 6), (1, 2, "", 0)))),
}  # fmt: skip


def by_hand(adapter: str) -> list[int]:
    """Returns the numbers of the histories that are written by hand."""
    return [-1 - at for at in range(len(BY_HAND[adapter.partition("-")[0]]))]


def history(adapter: str, number: int) -> History:
    """Returns history `number`; the kinds of data take turns."""
    if number < 0:
        kind, samples, tail, told = BY_HAND[adapter.partition("-")[0]][-1 - number]
        engine = "ddp" if adapter == "torch" else "horovod"
        by_hand = tuple(Life(size, batch, 1, end, at, -1, False, False, engine) for size, batch, end, at in told)
        return History(adapter, number, kind, samples, 3, tail, "sgd", 1, False, True, by_hand)
    draw = random.Random(f"{adapter} {number}")
    kind = KINDS[adapter][number % len(KINDS[adapter])]
    epochs, samples = draw.randint(2, 4), draw.randint(3, 30)
    tail = "drop" if draw.random() < 0.25 and kind != "batches" else "weighted"
    resized = draw.random() < 0.75
    size, batch, rows = draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 4)
    keeps_global = draw.random() < 0.3
    global_batch = draw.choice((4, 6, 12))
    engine = "horovod"
    lives: list[Life] = []
    for left in range(draw.randint(2, 4), -1, -1):
        if resized:
            size, batch = draw.randint(1, 4), draw.randint(1, 4)
            if keeps_global:
                size = draw.choice([n for n in range(1, 5) if global_batch % n == 0])
                batch = global_batch // size
        if adapter == "torch" and (resized or not lives):
            engine = draw.choice(("horovod", "ddp", "ddp", "ddp"))
        if kind in IN_BATCHES:
            batch = rows
        end = draw.choice(ENDS) if left else ""
        at = draw.randint(1, 2) if end in ("began", "ended") else draw.randint(1, 7)
        first = draw.randrange(-1, size)
        writes, with_writer = draw.random() < 0.3, draw.random() < 0.3
        lives.append(Life(size, batch, draw.randint(1, 4), end, at, first, writes, with_writer, engine))
    if tail == "drop":  # an epoch has a step
        samples = max(samples, max(life.size * life.batch for life in lives))
    return History(
        adapter, number, kind, samples, epochs, tail, draw.choice(("sgd", "adam")), draw.choice((1, 1, 2, 3)),
        draw.random() < 0.5, resized, tuple(lives),
    )  # fmt: skip


# ---- the data: a sample is made of its id


def rows_of(ids: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs, whose first column is the id (which no model looks at), and targets; float64 [n, 4], [n, 1]."""
    ids = np.asarray(ids, np.float64)
    return np.column_stack([ids, np.sin(np.outer(ids + 1, [1.0, 2.3, 3.1]))]), 2 * np.cos(ids + 1)[:, None]


def order_of(samples: int, epoch: int) -> list[int]:
    """Returns the ids in the order of an epoch, of data that shuffles itself."""
    return [int(number) for number in np.random.Generator(np.random.PCG64(epoch)).permutation(samples)]


def cut(order: Any, rows: int) -> list[list[int]]:
    return [[int(i) for i in order[at : at + rows]] for at in range(0, len(order), rows)]


def uneven(order: list[int], rows: int) -> list[list[int]]:
    """Batches of `rows`, and of half of that, in turns."""
    batches: list[list[int]] = []
    while order:
        count = rows if len(batches) % 2 == 0 else -(-rows // 2)
        batches.append(order[:count])
        order = order[count:]
    return batches


def first_weights() -> list[np.ndarray]:
    """Returns those of a hidden layer of 4 and an output: float64 [3, 4], [4], [4, 1], [1]."""
    draw = np.random.Generator(np.random.PCG64(7))
    return [draw.normal(size=shape) / 2 for shape in ((3, 4), (4,), (4, 1), (1,))]


# ---- the judge


def judged(history: History, folder: Path) -> tuple[list[str], float]:
    """Returns what is wrong with a history that was lived in `folder` (nothing: it is as if nothing had happened), and
    how far its weights are from those of the same global batches."""
    failure = folder / "failed.txt"
    if failure.exists():
        return [failure.read_text()], float("nan")
    updates = _surviving(folder)
    if isinstance(updates, str):
        return [updates], float("nan")
    found = json.loads((folder / "weights.json").read_text())
    wrong, gap = verdict(history, updates, found)
    unbroken = folder / "unbroken" / "weights.json"
    if unbroken.exists() and json.loads(unbroken.read_text()) != found:
        wrong.append("at the same size, the weights are not those of the run that was not broken, bit for bit")
    return wrong, gap


def verdict(history: History, updates: list[dict[str, Any]], weights: list[Any]) -> tuple[list[str], float]:
    """Returns what is wrong with the updates that are in these weights, and how far those are from numpy's."""
    wrong = _samples(history, updates) + _rates(history, updates)
    gap = max(float(np.abs(np.array(a) - b).max()) for a, b in zip(weights, replayed(history, updates), strict=True))
    if not gap <= EXACT:
        wrong.append(f"the weights are {gap:.1e} off those of the same global batches")
    return wrong, gap


def _surviving(folder: Path) -> list[dict[str, Any]] | str:
    """Returns the updates that are in the weights, in order; what is wrong with the ledger, where that is all."""
    kept: dict[int, dict[str, Any]] = {}
    for life in sorted(folder.glob("life*")):
        began = json.loads((life / "began.json").read_text())
        kept = {number: its for number, its in kept.items() if number <= began["step"]}
        if sorted(kept) != list(range(1, began["step"] + 1)):
            return f"{life.name} goes on after update {began['step']}, of {sorted(kept)}"
        ranks = [
            {line["update"]: line for line in map(json.loads, (life / f"rank{rank}.jsonl").read_text().splitlines())}
            for rank in range(began["size"])
        ]
        for number in set.intersection(*(set(lines) for lines in ranks)):
            its = [lines[number] for lines in ranks]
            same = {json.dumps([line["epoch"], line["lr"], len(line["batches"])]) for line in its}
            if len(same) != 1:
                return f"{life.name}, update {number}: ranks differ in epoch, rate or steps: {same}"
            steps = [
                [i for ids in batches for i in ids] for batches in zip(*(line["batches"] for line in its), strict=True)
            ]
            live = sum(bool(ids) for line in its for ids in line["batches"])
            kept[number] = {**its[0], "steps": steps, "live": live, **began}
    if sorted(kept) != list(range(1, len(kept) + 1)):
        return f"in the end the weights have updates {sorted(kept)}"
    return [kept[number] for number in sorted(kept)]


def miscounted(history: History, updates: list[dict[str, Any]]) -> dict[int, tuple[list[int], list[int]]]:
    """Returns the samples that were repeated, and skipped, in each epoch."""
    whole = Counter(range(history.samples))
    seen = [
        Counter(i for its in updates if its["epoch"] == epoch for ids in its["steps"] for i in ids)
        for epoch in range(history.epochs)
    ]
    return {at: (sorted((its - whole).elements()), sorted((whole - its).elements())) for at, its in enumerate(seen)}


def _samples(history: History, updates: list[dict[str, Any]]) -> list[str]:
    wrong = []
    for epoch, (repeated, skipped) in miscounted(history, updates).items():
        most = max(life.size * life.batch for life in history.lives) - 1 if history.tail == "drop" else 0
        if repeated or len(skipped) > most:
            wrong.append(f"epoch {epoch} of {history.samples} samples: {repeated} repeated, {skipped} skipped")
    if any(its["epoch"] not in range(history.epochs) for its in updates):
        wrong.append(f"epochs {sorted({its['epoch'] for its in updates})} of {history.epochs}")
    return wrong


def rate_at(history: History, seen: int, batch: int) -> float:
    """Returns the learning rate after `seen` samples at `batch` samples an update, as docs/learning-rate.md has it."""
    peak = BASE * (batch / REFERENCE) ** 0.5
    warm, total = history.samples // 2, history.samples * history.epochs
    if seen < warm:
        low = min(BASE, peak)
        return low + (peak - low) * seen / warm
    if not history.decays:
        return peak
    return float(peak * 0.5 * (1 + np.cos(np.pi * min((seen - warm) / (total - warm), 1.0))))


def _rates(history: History, updates: list[dict[str, Any]]) -> list[str]:
    seen = 0
    for its in updates:
        # data in batches is counted by full batches
        count = its["live"] * its["unit"] if its["unit"] else sum(map(len, its["steps"]))
        expected = rate_at(history, seen, its["global"] * history.accumulate)
        if not abs(its["lr"] - expected) <= 1e-6 * BASE:
            return [f"update {its['update']}: rate {its['lr']} after {seen} samples, not {expected}"]
        seen += count
    return []


def replayed(history: History, updates: list[dict[str, Any]]) -> list[np.ndarray]:
    """Returns the weights after these global batches, by hand."""
    weights = first_weights()
    slots = [[np.zeros_like(w), np.zeros_like(w)] for w in weights]
    keras = history.adapter != "torch"
    gathered = [np.zeros_like(w) for w in weights]
    applied = 0
    for number, its in enumerate(updates, 1):
        gradients = _gradients(weights, [i for ids in its["steps"] for i in ids])
        if keras:  # an update of the ledger is a step: Keras' mean over steps, its own count of them
            gathered = [a + g / history.accumulate for a, g in zip(gathered, gradients, strict=True)]
            if number % history.accumulate:
                continue
            gradients, gathered = gathered, [np.zeros_like(w) for w in weights]
        applied += 1
        for at, gradient in enumerate(gradients):
            weights[at] = _stepped(weights[at], gradient, slots[at], its["lr"], applied, history.optimizer, keras)
    return weights


def _gradients(weights: list[np.ndarray], ids: list[int]) -> list[np.ndarray]:
    """Of the mean squared error of a global batch."""
    w, b, v, c = weights
    x, y = rows_of(ids)
    x = x[:, 1:]
    hidden = np.tanh(x @ w + b)
    off = 2 * (hidden @ v + c - y) / len(ids)
    back = off @ v.T * (1 - hidden**2)
    return [x.T @ back, back.sum(0), hidden.T @ off, off.sum(0)]


def _stepped(
    w: np.ndarray, g: np.ndarray, slots: list[np.ndarray], lr: float, count: int, optimizer: str, keras: bool
) -> np.ndarray:
    """One step of SGD with momentum, or of Adam, as PyTorch and Keras have them, each in its own way."""
    if optimizer == "sgd":
        slots[0] = MOMENTUM * slots[0] + (-lr * g if keras else g)
        return w + slots[0] if keras else w - lr * slots[0]
    slots[0], slots[1] = MOMENTUM * slots[0] + (1 - MOMENTUM) * g, SECOND * slots[1] + (1 - SECOND) * g**2
    first, second = 1 - MOMENTUM**count, 1 - SECOND**count
    if keras:
        return w - lr * np.sqrt(second) / first * slots[0] / (np.sqrt(slots[1]) + EPSILON)
    return w - lr / first * slots[0] / (np.sqrt(slots[1] / second) + EPSILON)
