"""Plans: ranked by their numbers, refused for memory only where an allocator refuses too; the command around them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pipeline_plan import real_peaks

from hvdtrain import __main__
from hvdtrain.pipeline.plan.costs import Curve, Device, Link, SegmentCost, ring_link, stage_costs
from hvdtrain.pipeline.plan.schedule import micro_batch_sizes
from hvdtrain.pipeline.plan.search import Cluster, plans
from hvdtrain.pipeline.plan.simulate import simulate
from hvdtrain.pipeline.tuning.planner import described


def segment(seconds: float = 0.01, *, weights: int = 1000, kept: float = 10.0, out: float = 1.0, name: str = "s"):
    """Seconds a sample, a third of it forward; twice the weights for gradients and momentum."""
    return SegmentCost(
        name, Curve.per_sample(seconds / 3), Curve.per_sample(2 * seconds / 3), 3 * weights, weights,
        Curve.per_sample(kept), Curve.per_sample(out),
    )  # fmt: skip


def node(devices: int = 2, memory: float | None = None) -> tuple[Device, ...]:
    return tuple(Device(f"cuda:{n}", memory_bytes=memory) for n in range(devices))


CHAIN = [segment(name=f"s{n}") for n in range(8)]

# ---- the ranking


def test_with_fast_links_and_much_memory_data_parallel_wins():
    found = plans(CHAIN, batch=64, cluster=Cluster(node(4), 2))
    best = found[0]
    assert (best.stages, best.replicas, best.accumulate) == (1, 8, 1)
    assert best.predicted_samples_per_s == pytest.approx(8 / 0.08)  # eight devices, 0.08 s a sample
    alone = next(plan for plan in found if plan.stages == plan.replicas == plan.accumulate == 1)
    assert alone.predicted_samples_per_s == pytest.approx(1 / 0.08)
    assert [plan.step_s for plan in found] == sorted(plan.step_s for plan in found)
    assert {(plan.stages, plan.replicas) for plan in found} == {
        (1, 1), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (3, 1), (3, 2), (4, 1), (4, 2),
    }  # fmt: skip


def test_unequal_devices():
    """Replicas wait for the slowest, and are as large as the smallest allows; one alone is on the best."""
    unequal = (Device("old", 1.0, 25_000), Device("new", 3.0, 50_000))
    found = {
        (plan.stages, plan.replicas): plan
        for plan in plans(CHAIN, batch=16, cluster=Cluster(unequal), schedules=["1f1b"])
        if plan.accumulate == 1 and plan.remat == "never"
    }
    assert found[1, 1].step_s == pytest.approx(16 * 0.08 / 3) and found[1, 1].limit_bytes == (50_000,)
    assert found[1, 2].step_s == pytest.approx(8 * 0.08) and found[1, 2].limit_bytes == (25_000,)
    assert found[2, 1].sizes == (2, 6) and found[2, 1].limit_bytes == (25_000, 50_000)


def test_what_does_not_fit_comes_last_and_says_why():
    """3,000 bytes a segment, 24,000 in all: no device holds the model, two hold half each."""
    found = plans(CHAIN, batch=8, cluster=Cluster(node(2, 12_500)))
    fits = [plan for plan in found if not plan.reason]
    assert fits and all(plan.stages == 2 and max(plan.memory_bytes) <= 12_500 for plan in fits)
    assert found[: len(fits)] == fits
    assert all("cuda:0 needs" in plan.reason and "12.21 KiB" in plan.reason for plan in found[len(fits) :])
    assert all(math.isinf(plan.step_s) and not plan.predicted_samples_per_s for plan in found[len(fits) :])


def test_what_the_backward_pass_hides_is_not_counted():
    """A backward pass of 8 samples takes 0.43 s. Over a fast link the gradients go meanwhile, but for the last bucket;
    over a slow one the rest is waited for."""
    costs = [replace(cost, gradient_bytes=2**20) for cost in CHAIN]
    fast, slow = (
        plans(costs, batch=16, cluster=Cluster(node(2), links=Link(0, rate)), stages=(1,), replicas=(2,))[0]
        for rate in (2.0**26, 2.0**22)
    )
    assert fast.all_reduce_s == pytest.approx(2**20 / 2**26)
    assert slow.all_reduce_s == pytest.approx(2**23 / 2**22 - 8 * 0.08 * 2 / 3)
    assert slow.step_s == pytest.approx(8 * 0.08 + slow.all_reduce_s)


def test_a_ring_within_a_host_uses_only_its_links():
    inside, between = Link(5e-6, 12.5e9), Link(30e-6, 1.25e9)
    assert ring_link(8, 8, inside, between) == inside and ring_link(8, 1, inside, between) == between
    mixed = ring_link(8, 4, inside, between)  # two of eight hops are between hosts
    assert mixed.latency_s == pytest.approx((2 * 30e-6 + 6 * 5e-6) / 8) and mixed.bytes_per_s == 1.25e9


# ---- against the simulator and the allocator


chains = st.lists(
    st.builds(
        segment, st.integers(1, 9).map(lambda n: n / 100), weights=st.integers(0, 40),
        kept=st.integers(0, 20).map(float), out=st.integers(0, 9).map(float),
    ),
    min_size=2, max_size=6,
)  # fmt: skip


@settings(max_examples=30)
@given(costs=chains, batch=st.sampled_from([4, 8, 16]), limit=st.integers(50, 500))
def test_refused_for_memory_means_out_of_memory(costs, batch, limit):
    """Each plan's allocations, in order, on devices of that capacity."""
    found = plans(costs, batch=batch, cluster=Cluster(node(2, limit)))
    for plan in found:
        sizes = micro_batch_sizes(plan.part, plan.micro_batches)
        run = (costs, plan.sizes, sizes, plan.schedule, plan.remat)
        if not plan.reason:
            taken = real_peaks(*run, [limit] * plan.stages)
            assert all(a <= b + 1e-6 for a, b in zip(taken, plan.memory_bytes, strict=True))
        elif len(set(sizes)) == 1:  # else the promise may be a sample's gradients too high
            with pytest.raises(MemoryError):
                real_peaks(*run, [limit] * plan.stages)
        # negative twin: with room for what it says it needs, it runs
        real_peaks(*run, plan.memory_bytes)


@settings(max_examples=20)
@given(costs=chains, batch=st.integers(4, 16))
def test_predictions_are_the_simulators(costs, batch):
    for plan in plans(costs, batch=batch, cluster=Cluster(node(2), links=Link(0.01, 100.0)), replicas=(1,)):
        stages = stage_costs(costs, plan.sizes, node(2)[: plan.stages])
        sizes = micro_batch_sizes(plan.part, plan.micro_batches)
        step = simulate(stages, sizes=sizes, schedule=plan.schedule, remat=plan.remat, links=Link(0.01, 100.0))
        assert plan.step_s == pytest.approx(plan.accumulate * step.step_s)
        assert plan.bubble == pytest.approx(step.bubble)


# ---- words and numbers


def test_devices_in_words():
    assert described("cuda:0,cuda:1") is None and described("cpu,cpu") is None and described("cpu") is None
    four = described("4x24GiB", reserve_bytes=2**30)
    assert four is not None and [one.memory_bytes for one in four] == [23 * 2**30] * 4
    unequal = described("1x24GB, 80gib@2.5")
    assert unequal is not None and [(one.name, one.speed, one.memory_bytes) for one in unequal] == [
        ("device 0", 1.0, 24e9), ("device 1", 2.5, 80 * 2**30),
    ]  # fmt: skip


# ---- the command, and the choice for a program


def test_the_command_refuses_before_it_imports(capsys):
    assert __main__.main(["plan", "--devices", "4xGiB"]) == 2
    assert "4x24GiB" in capsys.readouterr().err
