"""The learning-rate contract."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain import LR, ConfigError

IMAGENET = 1_281_167
GOYAL = LR(
    0.1, 256, warmup_samples=5 * IMAGENET, schedule="step",
    milestones=(30 * IMAGENET, 60 * IMAGENET, 80 * IMAGENET),
)  # fmt: skip


def test_imagenet_in_one_hour() -> None:
    """The recipe of arXiv 1706.02677: 0.1 per 256 samples, batch 8192, 5 epochs of warm-up, steps at
    30/60/80."""
    batch = 8192
    assert GOYAL.at(0, batch) == 0.1
    assert GOYAL.at(5 * IMAGENET, batch) == pytest.approx(3.2)
    assert GOYAL.at(5 * IMAGENET // 2, batch) == pytest.approx((0.1 + 3.2) / 2, rel=1e-6)
    assert GOYAL.at(30 * IMAGENET - 1, batch) == pytest.approx(3.2)
    assert GOYAL.at(30 * IMAGENET, batch) == pytest.approx(0.32)
    assert GOYAL.at(60 * IMAGENET, batch) == pytest.approx(0.032)
    assert GOYAL.at(89 * IMAGENET, batch) == pytest.approx(0.0032)


@pytest.mark.parametrize(("scale", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_scales(scale: str, factor: float) -> None:
    rate = LR(0.1, 64, scale=scale)  # type: ignore[arg-type]
    assert rate.factor(256) == factor
    assert rate.peak(256) == rate.at(0, 256) == rate.at(10**9, 256) == pytest.approx(0.1 * factor)
    assert rate.peak(64) == pytest.approx(0.1)


def test_cosine_ends_at_final_and_stays() -> None:
    rate = LR(0.1, 100, schedule="cosine", warmup_samples=1000, total_samples=11_000, final=0.01)
    assert rate.at(1000, 200) == pytest.approx(0.2)
    assert rate.at(6000, 200) == pytest.approx(0.2 * (0.01 + 0.99 / 2))
    assert rate.at(11_000, 200) == rate.at(50_000, 200) == pytest.approx(0.002)


def test_a_batch_under_the_reference_needs_no_warm_up() -> None:
    """From base down to the peak would begin with a rate that is too high for the batch."""
    rate = LR(0.1, 256, warmup_samples=1000)
    assert rate.at(0, 64) == rate.at(500, 64) == rate.at(2000, 64) == pytest.approx(0.025)


schedules: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {"schedule": st.just("step"), "milestones": st.just((600, 900)), "gamma": st.floats(0.01, 1)}
    ),
    st.fixed_dictionaries({"schedule": st.just("cosine"), "total_samples": st.just(2000), "final": st.floats(0, 1)}),
)  # fmt: skip
scaled = st.sampled_from(["linear", "sqrt"])


@given(
    schedules, scaled, st.integers(0, 500), st.integers(1, 4), st.integers(1, 8), st.integers(1, 4),
    st.integers(0, 3000),
)  # fmt: skip
def test_the_same_at_any_world_size_and_accumulation(
    schedule: dict, scale: str, warmup: int, size: int, per_rank: int, accumulate: int, seen: int
) -> None:
    """Every way to make up one global batch gives one rate, step by step, bit by bit; and so does a resumed
    job."""
    rate = LR(0.3, 7, scale=scale, warmup_samples=warmup, **schedule)  # type: ignore[arg-type]
    batch = size * per_rank * accumulate
    ways = [(n, b, batch // (n * b)) for n in range(1, batch + 1) for b in range(1, batch + 1) if batch % (n * b) == 0]
    steps = range(0, seen + 1, batch)
    reference = [rate.at(samples, batch) for samples in steps]
    for n, b, a in ways[:: max(1, len(ways) // 5)]:
        assert [rate.at(step * n * b * a, n * b * a) for step in range(len(steps))] == reference
    # negative twin: a schedule by steps is not the same at another batch
    other = LR(0.3, 7, scale=scale, warmup_samples=500)  # type: ignore[arg-type]
    assert other.at(10, 14) != other.at(20, 28)


@given(schedules, scaled, st.integers(1, 500), st.integers(7, 100))
def test_warm_up_rises_from_base_to_peak_without_a_jump(schedule: dict, scale: str, warmup: int, batch: int) -> None:
    rate = LR(0.3, 7, scale=scale, warmup_samples=warmup, **schedule)  # type: ignore[arg-type]
    rates = [rate.at(seen, batch) for seen in range(warmup + 1)]
    assert rates[0] == pytest.approx(0.3)
    assert rates[-1] == pytest.approx(rate.peak(batch))
    rise = (rate.peak(batch) - 0.3) / warmup
    assert all(b - a == pytest.approx(rise, abs=1e-9) for a, b in itertools.pairwise(rates))


class TestOptimizer:
    rate = LR(0.1, 32)

    def test_scaled_by_hand_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="scaled twice") as caught:
            self.rate.check_optimizer(0.4, 128)
        assert "0.1 x 4" in caught.value.received and "0.1" in caught.value.remedy


@pytest.mark.parametrize(
    "arguments",
    [
        {"base": 0.0}, {"base": -1.0}, {"base": math.nan}, {"base": math.inf}, {"base": "0.1"}, {"base": True},
        {"reference_batch": 0}, {"reference_batch": 1.5}, {"reference_batch": True},
        {"scale": "square"}, {"warmup_samples": -1}, {"warmup_samples": 10, "scale": "none"},
        {"schedule": "linear"},
        {"schedule": "step"}, {"schedule": "step", "milestones": (5, 5)}, {"schedule": "step", "milestones": (9, 5)},
        {"schedule": "step", "milestones": (5,), "warmup_samples": 6},
        {"schedule": "step", "milestones": (5,), "gamma": 0},
        {"milestones": (5,)},
        {"schedule": "cosine"}, {"schedule": "cosine", "total_samples": 5, "warmup_samples": 5},
        {"schedule": "cosine", "total_samples": 5, "final": 1.5},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_that_mean_nothing(arguments: dict) -> None:
    with pytest.raises(ConfigError) as caught:
        LR(**{"base": 0.1, "reference_batch": 32, **arguments})
    assert "=" in caught.value.received  # names what came
