"""What is made of measured sums: a link, crossings, predictions, tables. No timing."""

from __future__ import annotations

import pytest

from hvdtrain.bench.comm import model
from hvdtrain.bench.comm.report import readable
from hvdtrain.pipeline.plan.scaling import BucketTiming

SIZES = [1 << power for power in range(10, 29)]


class TestOtherNumbersOfRanks:
    def test_a_link_is_found_from_what_the_ways_send(self) -> None:
        link = model.LinkCost(30e-6, 1e-9)
        for way in model.COUNTS:
            seconds = {ranks: {size: link.seconds(way, ranks, size) for size in SIZES} for ranks in (2, 4)}
            found = model.link_cost(way, seconds)
            assert (found.latency_s, found.s_per_byte) == pytest.approx((30e-6, 1e-9))

    def test_a_link_without_latency_is_fitted_by_its_bandwidth_alone(self) -> None:
        """Where the best line begins below 0; the slope was kept from that line."""
        seconds = {3: {1 << 18: 0.003, 1 << 19: 0.008, 1 << 20: 0.02}}
        volumes = [2 * size / its for size, its in seconds[3].items()]
        cost = model.link_cost("server", seconds)
        assert cost.latency_s == 0 and cost.s_per_byte == pytest.approx(sum(volumes) / sum(v * v for v in volumes))

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
