"""The Keras MNIST program, really run: every launch form, both backends, resume, and what plain Keras makes of it."""

from __future__ import annotations

import pytest

from hvdtrain import keras_mnist

# ---- what follows from flags and ranks


def settings(ranks: int, data: str = "mnist", *flags: str) -> keras_mnist.MnistSettings:
    return keras_mnist.MnistSettings.of(keras_mnist.parser().parse_args(flags), ranks, data, samples=60_000)


@pytest.mark.parametrize(
    ("ranks", "flags", "each", "passes"),
    [
        (1, (), 12, 12),
        (2, (), 6, 12),
        (5, (), 3, 15),
        (16, (), 1, 16),
        (2, ("--no-epochs-divided",), 12, 24),
        (4, ("--epochs", "5"), 2, 8),
        (4, ("--epochs", "5", "--no-epochs-divided"), 5, 20),
    ],
)
def test_epochs_are_divided_over_ranks(ranks: int, flags: tuple[str, ...], each: int, passes: int) -> None:
    plan = settings(ranks, "mnist", *flags)
    assert (plan.epochs_each, plan.passes) == (each, passes)
    assert f"over {keras_mnist.plural(ranks)}: {each} each" in str(plan)


def test_learning_rate_contract() -> None:
    assert settings(1).lr.peak(settings(1).global_batch) == 1.0
    assert settings(4).lr.peak(settings(4).global_batch) == 2.0
    assert settings(4, "mnist", "--lr-scale", "linear").lr.peak(512) == 4.0  # the example's own rule
    assert settings(4, "mnist", "--lr-scale", "none").lr.peak(512) == 1.0
    assert settings(4, "mnist", "--lr", "0.5").lr.base == 0.5
    # half the batch on twice the ranks is the same training
    half = settings(4, "mnist", "--per-rank-batch", "64")
    assert half.lr.peak(half.global_batch) == settings(2).lr.peak(settings(2).global_batch)
