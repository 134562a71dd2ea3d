"""What is made of measured sums: fits, crossings, predictions, tables. No timing."""

from __future__ import annotations

import math

import pytest

from hvdtrain.bench.comm import model, narrow
from hvdtrain.bench.comm.report import readable
from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.plan.scaling import BucketTiming

SIZES = [1 << power for power in range(10, 29)]


def two_protocols(size: float) -> float:
    """Small messages: 20 us and 1 GB/s; from 64 KiB on 80 us and 4 GB/s."""
    return 20e-6 + size * 1e-9 if size < 1 << 16 else 80e-6 + size * 0.25e-9


class TestFit:
    def test_finds_the_latency_and_the_bandwidth_that_made_the_seconds(self) -> None:
        (one,) = model.fit({size: 50e-6 + size * 0.5e-9 for size in SIZES})
        assert one.latency_s == pytest.approx(50e-6) and one.s_per_byte == pytest.approx(0.5e-9)
        assert (one.first, one.last) == (SIZES[0], SIZES[-1])

    def test_two_protocols_are_two_regimes_and_sizes_between_are_predicted(self) -> None:
        found = model.fit({size: two_protocols(size) for size in SIZES[::2]})
        assert len(found) == 2
        assert found[0].s_per_byte == pytest.approx(1e-9) and found[1].s_per_byte == pytest.approx(0.25e-9)
        assert model.error(found, {size: two_protocols(size) for size in SIZES[1::2]}) < 0.01

    def test_neither_latency_nor_slope_is_negative(self) -> None:
        for seconds in ({1024: 1e-6, 2048: 4e-6}, {1024: 4e-6, 2048: 1e-6}):
            (one,) = model.fit(seconds)
            assert one.latency_s >= 0 and one.s_per_byte >= 0

    def test_the_error_of_two_sizes_is_between_theirs(self) -> None:
        assert model.error([model.Regime(1, 100, 1.0, 0.0)], {1: 1 / 1.05, 2: 1 / 1.6}) == pytest.approx(0.325)

    def test_a_link_without_latency_is_fitted_by_its_bandwidth_alone(self) -> None:
        """Where the best line begins below 0; the slope was kept from that line."""
        seconds = {3: {1 << 18: 0.003, 1 << 19: 0.008, 1 << 20: 0.02}}
        volumes = [2 * size / its for size, its in seconds[3].items()]
        cost = model.link_cost("server", seconds)
        assert cost.latency_s == 0 and cost.s_per_byte == pytest.approx(sum(volumes) / sum(v * v for v in volumes))

    def test_the_error_is_that_of_the_sizes_asked_about(self) -> None:
        found = model.fit({size: 1e-3 for size in SIZES})
        assert model.error(found, {1 << 12: 2e-3}) == pytest.approx(0.5)


class TestOtherNumbersOfRanks:
    def test_a_link_is_found_from_what_the_ways_send(self) -> None:
        link = model.LinkCost(30e-6, 1e-9)
        for way in model.COUNTS:
            seconds = {ranks: {size: link.seconds(way, ranks, size) for size in SIZES} for ranks in (2, 4)}
            found = model.link_cost(way, seconds)
            assert (found.latency_s, found.s_per_byte) == pytest.approx((30e-6, 1e-9))

    def test_the_servers_link_grows_with_the_ranks_and_the_rings_does_not(self) -> None:
        link = model.LinkCost(0.0, 1e-9)
        ring, server = ([link.seconds(way, ranks, 1e9) for ranks in (2, 4, 64)] for way in ("ring", "server"))
        assert ring == pytest.approx([1.0, 1.5, 2 * 63 / 64]) and server == pytest.approx([1.0, 3.0, 63.0])
        assert link.seconds("ring", 1, 1e9) == 0

    def test_steps_on_more_ranks(self) -> None:
        buckets = [BucketTiming(25 << 20, share / 4) for share in range(1, 5)]
        free = model.steps(buckets, 0.3, {"ring": model.LinkCost(0.0, 0.0)})["ring"]
        assert all(
            its["step_s"] == pytest.approx(0.3) and its["efficiency"] == pytest.approx(1.0) for its in free.values()
        )
        costs = {way: model.LinkCost(1e-5, 1e-9) for way in ("ring", "server")}
        steps = model.steps(buckets, 0.3, costs)
        assert steps["server"][64]["step_s"] > 10 * steps["ring"][64]["step_s"]
        assert steps["ring"][2]["sum_s"] == pytest.approx(4 * ((25 << 20) * 1e-9 + 2e-5))


def test_crossings_lie_where_both_take_equally_long() -> None:
    ring, server = {size: 4e-4 for size in SIZES}, {size: size * 1e-9 for size in SIZES}
    (place,) = model.crossings(ring, server)
    assert place == pytest.approx(4e5, rel=1e-6)
    assert model.crossings(ring, {size: 1e-4 for size in SIZES}) == []


def test_bytes_in_words() -> None:
    assert [readable(size) for size in (100, 1 << 10, 3 << 19, 1 << 28, 1 << 30)] == [
        "100 B", "1 KiB", "1.5 MiB", "256 MiB", "1 GiB",
    ]  # fmt: skip


def test_a_rate_is_divided() -> None:
    assert narrow.slower("200mbit", 4) == "50mbit" and narrow.slower("1Gbit", 4) == "0.25gbit"
    with pytest.raises(ConfigError, match="--rate is a number"):
        narrow.slower("fast", 4)


def test_fit_needs_no_more_than_two_sizes() -> None:
    assert math.isclose(model.predict(model.fit({1024: 1e-3, 4096: 2e-3}), 4096), 2e-3)
