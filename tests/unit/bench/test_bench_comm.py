"""What is made of measured sums: what a link costs, tables. No timing."""

from __future__ import annotations

import pytest

from hvdtrain.bench.comm import ways

SIZES = [1 << power for power in range(10, 29)]


def seconds_of(link: ways.LinkCost, way: str, ranks: int, size: float) -> float:
    """Returns what a sum of `size` bytes over that many ranks takes on that link."""
    messages, volume = ways.COUNTS[way]
    return link.latency_s * messages(ranks) + link.s_per_byte * volume(ranks) * size


class TestOtherNumbersOfRanks:
    def test_a_link_is_found_from_what_the_ways_send(self) -> None:
        link = ways.LinkCost(30e-6, 1e-9)
        for way in ways.COUNTS:
            seconds = {ranks: {size: seconds_of(link, way, ranks, size) for size in SIZES} for ranks in (2, 4)}
            found = ways.link_cost(way, seconds)
            assert (found.latency_s, found.s_per_byte) == pytest.approx((30e-6, 1e-9))

    def test_a_link_without_latency_is_fitted_by_its_bandwidth_alone(self) -> None:
        """Where the best line begins below 0; the slope was kept from that line."""
        seconds = {3: {1 << 18: 0.003, 1 << 19: 0.008, 1 << 20: 0.02}}
        volumes = [2 * size / its for size, its in seconds[3].items()]
        cost = ways.link_cost("server", seconds)
        assert cost.latency_s == 0 and cost.s_per_byte == pytest.approx(sum(volumes) / sum(v * v for v in volumes))
