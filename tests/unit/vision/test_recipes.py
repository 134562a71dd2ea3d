"""What the flags, the data and the number of ranks make of a recipe."""

from __future__ import annotations

import argparse

import pytest

from hvdtrain.vision.recipes import RECIPES, Settings

IMAGENET = 1_281_167
FLAGS = {
    "epochs": None, "per_rank_batch": None, "accumulate": 1, "optimizer": None, "lr": None, "schedule": None,
    "warmup_epochs": None, "weight_decay": None,
}  # fmt: skip


def settings(data: str = "imagenet", ranks: int = 1, samples: int = IMAGENET, **flags: object) -> Settings:
    return Settings.of(argparse.Namespace(**{**FLAGS, **flags}), ranks, RECIPES[data], samples=samples)


def test_imagenet_in_an_hour() -> None:
    """The paper's own job: 256 GPUs x 32, rate 0.1 -> 3.2 in 5 epochs, a tenth after 30, 60 and 80 epochs."""
    plan = settings(ranks=256)
    assert (plan.global_batch, plan.epochs, plan.optimizer, plan.weight_decay) == (8192, 90, "sgd", 1e-4)

    def rate(epoch: float) -> float:
        return plan.lr.at(round(epoch * IMAGENET), plan.global_batch)

    assert rate(0) == pytest.approx(0.1)
    assert rate(2.5) == pytest.approx((0.1 + 3.2) / 2, rel=1e-5)
    assert rate(5) == rate(29.99) == pytest.approx(3.2)
    assert [rate(epoch) for epoch in (30, 59.99, 60, 79.99, 80, 89.99)] == pytest.approx(
        [0.32, 0.32, 0.032, 0.032, 0.0032, 0.0032]
    )


@pytest.mark.parametrize(
    ("ranks", "per_rank_batch", "accumulate"), [(1, 256, 1), (8, 32, 1), (2, 32, 4), (4, 16, 4), (1, 64, 4)]
)
def test_the_same_update_has_the_same_rate(ranks: int, per_rank_batch: int, accumulate: int) -> None:
    plan = settings(ranks=ranks, per_rank_batch=per_rank_batch, accumulate=accumulate)
    assert plan.global_batch == 256 and plan.lr.peak(plan.global_batch) == pytest.approx(0.1)


@pytest.mark.parametrize("epochs", [1, 2, 3, 18, 90])
@pytest.mark.parametrize("schedule", ["step", "cosine"])
@pytest.mark.parametrize("data", sorted(RECIPES))
def test_any_number_of_epochs_is_a_whole_schedule(data: str, schedule: str, epochs: int) -> None:
    """Shorter trainings shrink with their milestones and warm-up; at the end the rate is small."""
    samples = 1437
    plan = settings(data, ranks=4, samples=samples, epochs=epochs, schedule=schedule)
    assert plan.total_samples == epochs * samples
    peak = plan.lr.peak(plan.global_batch)
    assert plan.lr.at(plan.total_samples - 1, plan.global_batch) <= 0.0011 * peak
    assert plan.lr.at(plan.total_samples // 4 + 1, plan.global_batch) == pytest.approx(peak, rel=0.2)
    assert plan.lr.warmup_samples <= plan.total_samples / 4 + 1


def test_a_batch_in_parts_is_the_same_update() -> None:
    plan = settings("digits", ranks=2, samples=100, per_rank_batch=32, accumulate=2)
    parts = plan.in_parts(4)
    assert (parts.per_rank_batch, parts.accumulate) == (8, 8) and parts.global_batch == plan.global_batch == 128
    assert parts.lr == plan.lr and plan.in_parts(1) == plan
