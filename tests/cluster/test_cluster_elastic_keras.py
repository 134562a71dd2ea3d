"""Elastic training with Keras: ranks are killed wherever they are, new ones come; it is the unbroken training."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from harness import PROGRAMS
from test_cluster_elastic import Trained, attempt, read
from test_cluster_launch import launched

PROGRAM = PROGRAMS / "keras/elastic.py"
# as the program has them, which imports Keras
SAMPLES, CLASSES, FEATURES, KINDS, HIDDEN, BASE, DECAY = 150, 3, 6, 5, 8, 0.05, 0.97
BETAS, EPSILON, MIN_DELTA = (0.875, 0.9375), 2.0**-20, 0.02
SPOTS = {  # and how many updates are done there, of 13 in an epoch
    "before": (0, 5, 12, 13, 38), "in": (0, 5, 12, 13, 38), "after": (1, 5, 13, 39), "validate": (13, 39),
    "end": (13, 39), "head": (0, 13),
}  # fmt: skip
EXACT = {"tensorflow": 1e-10, "torch": 1e-6}  # Keras on PyTorch casts to float32 on the way
GOES_ON_WITHIN_S = 5.0
ENV = {"OMP_NUM_THREADS": "1"}


def train(
    folder: Path, *todo: str, np: int = 3, epochs: int = 3, rate: float = 30, flags: tuple[str, ...] = ("--min-np=1",),
    backend: str = "tensorflow",
) -> Trained:  # fmt: skip
    arguments = [str(folder), str(epochs), str(rate), *todo]
    env = ENV | {"KERAS_BACKEND": backend}
    with launched(folder, *flags, *arguments, np=np, program=PROGRAM, env=env) as started:
        ended = started.end(240)
    return read(folder, ended)


class Plain:
    """The same model and its training, by hand; `sparse`: as on TensorFlow, where an embedding's gradient is."""

    def __init__(self, sparse: bool) -> None:
        self.sparse = sparse
        draw = np.random.RandomState(1)
        self.x = draw.randn(SAMPLES, FEATURES)
        self.y = (self.x @ draw.randn(FEATURES, CLASSES)).argmax(1)
        draw = np.random.RandomState(2)
        shapes = [(KINDS, FEATURES), (FEATURES, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)]
        self.weights = [0.5 * draw.randn(*shape) for shape in shapes]
        self.means = [np.zeros(shape) for shape in shapes]
        self.squares = [np.zeros(shape) for shape in shapes]
        self.updates = 0

    def _forward(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        kinds, first, bias, last, offset = self.weights
        x = self.x[numbers] + kinds[numbers % KINDS]
        hidden = np.tanh(x @ first + bias)
        logits = hidden @ last + offset
        shifted = np.exp(logits - logits.max(1, keepdims=True))
        return x, hidden, shifted / shifted.sum(1, keepdims=True)

    def update(self, drawn: list[int], rate: float) -> None:
        numbers = np.array(drawn)
        x, hidden, chances = self._forward(numbers)
        chances[np.arange(len(x)), self.y[numbers]] -= 1
        of_logits = chances / len(x)
        of_hidden = (of_logits @ self.weights[3].T) * (1 - hidden**2)
        rows = of_hidden @ self.weights[1].T
        of_kinds, squared = np.zeros((KINDS, FEATURES)), np.zeros((KINDS, FEATURES))
        np.add.at(of_kinds, numbers % KINDS, rows)
        np.add.at(squared, numbers % KINDS, rows**2)  # of a sparse gradient Keras' Adam squares each row by itself
        gradients = [of_kinds, x.T @ of_hidden, of_hidden.sum(0), hidden.T @ of_logits, of_logits.sum(0)]
        self.updates += 1
        rate *= np.sqrt(1 - BETAS[1] ** self.updates) / (1 - BETAS[0] ** self.updates)
        for i, gradient in enumerate(gradients):  # Adam
            self.means[i] += (gradient - self.means[i]) * (1 - BETAS[0])
            square = squared if i == 0 and self.sparse else gradient**2
            self.squares[i] += (square - self.squares[i]) * (1 - BETAS[1])
            self.weights[i] = self.weights[i] - self.means[i] * rate / (np.sqrt(self.squares[i]) + EPSILON)

    def metrics(self) -> tuple[float, float]:
        *_, chances = self._forward(np.arange(SAMPLES))
        loss = -np.log(chances[np.arange(SAMPLES), self.y]).mean()
        return float(loss), float((chances.argmax(1) == self.y).mean())


def check(done: Trained, *, epochs: int = 3, batch: int, backend: str = "tensorflow") -> None:
    """Each sample once an epoch, in updates of the unbroken run's size; weights and metrics as by hand."""
    exact = EXACT[backend]
    per_epoch = -(-SAMPLES // batch)
    assert list(done.updates) == list(range(1, epochs * per_epoch + 1))
    plain, validated = Plain(backend == "tensorflow"), []
    for epoch in range(epochs):
        updates = [numbers for its, numbers in done.updates.values() if its == epoch]
        assert Counter(number for numbers in updates for number in numbers) == Counter(range(SAMPLES)), epoch
        for numbers in updates:
            plain.update(numbers, BASE * DECAY**epoch)
        validated.append(plain.metrics())
    with np.load(done.folder / "final.npz") as file:
        gap = max(np.abs(file[name] - right).max() for name, right in zip(file.files, plain.weights, strict=True))
    assert gap < exact, f"{gap:.2e}\n{done.ended.text}"
    left = json.loads((done.folder / "final.json").read_text())
    assert np.allclose(left["validated"], [loss for loss, _ in validated], rtol=10 * exact), (left, validated)
    assert np.allclose(left["accuracy"], [right for _, right in validated]), (left, validated)
    assert np.isclose(left["loss"], validated[-1][0], rtol=10 * exact) and left["epochs"] == list(range(epochs))
    assert left["updates"] == len(done.updates) and left["begun"] == epochs
    best, waited = float("inf"), 0
    for loss, _ in validated:
        best, waited = (loss, 0) if loss + MIN_DELTA < best else (best, waited + 1)
    assert left["waited"] == waited
    assert done.recorded("epoch", "epoch")[-1] == epochs - 1
    formations = [set(workers) for workers in done.formations]
    assert all(one != next_one for one, next_one in pairwise(formations)), "as at the program's end"


@pytest.mark.parametrize("backend", ["tensorflow", pytest.param("torch", marks=pytest.mark.thorough)])
def test_a_fit_goes_on_as_if_nobody_had_been_lost(tmp_path, backend):
    """Killed in an update, and in validation; rank 0, too; replaced."""
    done = train(tmp_path, "1.1:5:in", "*.0:13:validate", epochs=7, flags=("--max-np=3",), backend=backend)
    check(done, epochs=7, batch=12, backend=backend)
    assert [its["worker"] for its in attempt(tmp_path)["lost"]] == [1, 0]
    assert done.sizes[0] == 2 and done.sizes[-1] > 1, done.sizes


@pytest.mark.thorough
@pytest.mark.parametrize(("spot", "update"), [(spot, update) for spot in SPOTS for update in SPOTS[spot]])
@pytest.mark.parametrize("rank", [0, 2])
def test_killed_at_every_spot(tmp_path, rank, spot, update):
    check(train(tmp_path, f"1.{rank}:{update}:{spot}"), batch=12)
