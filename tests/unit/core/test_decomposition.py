"""The one judge of losses: a batch against its pieces, by numbers alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hvdtrain.core.decomposition import Kind, LossGradients, bound, compared, judge

X = np.random.default_rng(0).normal(size=(6, 3))
PIECES = (X[:4], X[4:])
SHARES = (4 / 6, 2 / 6)
LIMIT = 1e-12


def mean(x: np.ndarray) -> LossGradients:
    """A loss of squares, by weights that are 1."""
    return LossGradients(float((x**2).sum(1).mean()), {"w": 2 * (x**2).mean(0)})


def total(x: np.ndarray) -> LossGradients:
    its = mean(x)
    return LossGradients(its.loss * len(x), {"w": its.gradients["w"] * len(x)})


def root(x: np.ndarray) -> LossGradients:
    its = mean(x)
    return LossGradients(math.sqrt(its.loss), {"w": its.gradients["w"] / 2 / math.sqrt(its.loss)})


def kind_of(loss: Callable[[np.ndarray], LossGradients], shares: Sequence[float], best: Sequence[float]) -> Kind:
    whole, parts = loss(X), [loss(piece) for piece in PIECES]
    gaps, nearest = compared(whole, parts, shares), compared(whole, parts, best)
    return judge(gaps, gradient=LIMIT * gaps.largest, loss=LIMIT * whole.loss, best=nearest, shares=best)


@pytest.mark.parametrize(
    ("loss", "shares", "best", "wanted"),
    [
        (mean, SHARES, SHARES, "holds"),
        (mean, (0.5, 0.5), SHARES, "is weighed otherwise"),
        (total, SHARES, (1.0, 1.0), "is a sum"),
        (root, SHARES, (0.6, 0.4), "samples meet"),
    ],
)
def test_what_a_batch_is_to_its_pieces(
    loss: Callable[[np.ndarray], LossGradients], shares: Sequence[float], best: Sequence[float], wanted: Kind
) -> None:
    assert kind_of(loss, shares, best) == wanted


def test_a_piece_that_counts_nothing_need_not_be_a_number() -> None:
    empty = LossGradients(math.nan, {"w": np.full(3, math.nan)})
    gaps = compared(mean(X), [mean(X), empty], (1.0, 0.0))
    assert gaps.loss == gaps.gradient == 0.0
    assert compared(mean(X), [mean(X), empty], (0.9, 0.1)).gradient == math.inf


def test_a_gradient_that_only_one_side_has_is_a_difference() -> None:
    nothing = LossGradients(mean(X).loss, {})
    assert compared(nothing, [mean(X)], (1.0,)).gradient == compared(mean(X), [nothing], (1.0,)).gradient > 1


def test_the_coarsest_precision_counts() -> None:
    single = bound("model", ["float64", "float32"])
    assert bound("model", ["float64"]) < single < bound("model", ["float32", "bfloat16"]) == bound("model", ["float8"])
