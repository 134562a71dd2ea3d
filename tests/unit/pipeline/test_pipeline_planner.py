"""Plans: ranked by their numbers, refused for memory only where an allocator refuses too; the command around them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pipeline_plan import real_peaks

from hvdtrain import __main__
from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.plan.costs import Curve, Device, Link, Pool, SegmentCost, all_reduce_seconds, stage_costs
from hvdtrain.pipeline.plan.schedule import Schedule, micro_batch_sizes
from hvdtrain.pipeline.plan.search import Cluster, ParallelPlan, coarsened, plans
from hvdtrain.pipeline.plan.simulate import simulate
from hvdtrain.pipeline.tuning.planner import Speed, as_json, described


def segment(seconds: float = 0.01, *, weights: int = 1000, kept: float = 10.0, out: float = 1.0, name: str = "s"):
    """Seconds a sample, a third of it forward; twice the weights for gradients and momentum."""
    return SegmentCost(
        name, Curve.per_sample(seconds / 3), Curve.per_sample(2 * seconds / 3), weights, weights, weights, 0,
        Curve.per_sample(kept), Curve.per_sample(out),
    )  # fmt: skip


def node(devices: int = 2, memory: float | None = None, pool: str = "") -> tuple[Device, ...]:
    return tuple(Device(f"cuda:{n}", memory_bytes=memory, pool=pool) for n in range(devices))


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


def test_with_a_slow_network_one_node_is_enough():
    """An all-reduce of 8 KB takes more than a minute over it; with slow links as well, only the pipeline needs none."""
    slow = Cluster(node(4), 2, network=Link(0, 200.0))
    best = plans(CHAIN, batch=64, cluster=slow)[0]
    assert (best.stages, best.replicas) == (1, 4)
    best = plans(CHAIN, batch=64, cluster=replace(slow, links=Link(0, 200.0)))[0]
    assert (best.stages, best.replicas) == (4, 1)


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


def test_a_batch_that_is_too_large_is_taken_in_passes():
    found = plans(CHAIN, batch=64, cluster=Cluster(node(1, 24_000 + 1_500)))
    best = found[0]
    assert best.accumulate > 1 and max(best.memory_bytes) <= 25_500 and best.part * best.accumulate >= 64
    assert found[1].reason and found[1].accumulate == 1  # in one pass
    assert str(best) == f"one device, batch {best.part}, {best.accumulate} passes"


def test_memory_is_saved_by_recomputing():
    costs = [segment(kept=1000.0) for _ in range(8)]
    found = plans(costs, batch=16, cluster=Cluster(node(2)), stages=(2,))
    assert {plan.remat for plan in found} == {"never", "except_last"}
    never, again = sorted(found, key=lambda plan: plan.remat != "never")
    assert never.step_s < again.step_s
    tight = Cluster(node(2, min(max(again.memory_bytes), max(never.memory_bytes))))
    assert plans(costs, batch=16, cluster=tight, stages=(2,))[0].reason == ""


def test_replicas_on_shared_cores_slow_each_other_down():
    shared = Cluster(node(2, pool="cpu"), pools={"cpu": Pool((1.0, 0.5))})
    found = plans(CHAIN, batch=16, cluster=shared)
    assert found[0].step_s == pytest.approx(16 * 0.08)  # one core's work, however it is shared out
    free = plans(CHAIN, batch=16, cluster=replace(shared, pools={}))
    assert free[0].step_s == pytest.approx(8 * 0.08)


def test_all_reduce_by_hand():
    assert all_reduce_seconds(100, 1, Link(1, 1)) == 0
    assert all_reduce_seconds(100, 2, Link(0, 10)) == pytest.approx(10)  # 2 x 1/2 of the bytes
    assert all_reduce_seconds(100, 4, Link(0.5, 10)) == pytest.approx(6 * 0.5 + 15)


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
    found = plans(costs, batch=batch, cluster=Cluster(node(2, limit)), schedules=["gpipe", "1f1b"])
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
        stages = stage_costs(costs, plan.sizes, node(2)[: plan.stages] * plan.chunks)
        sizes = micro_batch_sizes(plan.part, plan.micro_batches)
        step = simulate(
            stages, sizes=sizes, schedule=plan.schedule, remat=plan.remat, links=Link(0.01, 100.0), chunks=plan.chunks
        )
        assert plan.step_s == pytest.approx(plan.accumulate * step.step_s)
        assert plan.bubble == pytest.approx(step.bubble)


def test_long_chains_are_looked_at_in_groups():
    costs = [segment(0.001 * (1 + n % 5), name=str(n)) for n in range(400)]
    groups = list(coarsened(costs, 64))
    assert [cost for group in groups for cost in group] == costs and 50 <= len(groups) <= 64
    for plan in plans(costs, batch=16, cluster=Cluster(node(3)), replicas=(1,)):
        assert sum(plan.sizes) == 400 and len(plan.sizes) == plan.stages * plan.chunks
    assert list(coarsened(costs, 400)) == [[cost] for cost in costs]


@pytest.mark.parametrize(("batch", "cluster"), [(0, Cluster(node())), (4, Cluster(())), (4, Cluster(node(), nodes=0))])
def test_nothing_to_plan_is_refused(batch, cluster):
    with pytest.raises(ConfigError, match="at least one sample, one device and one node"):
        plans(CHAIN, batch=batch, cluster=cluster)


# ---- words and numbers


def test_plans_in_words():
    plan = ParallelPlan(1, 1, 1, 1, "1f1b", "never", 32)
    assert str(plan) == "one device, batch 32"
    assert str(replace(plan, replicas=4, accumulate=2)) == "data parallel on 4 devices, batch 4, 2 passes"
    assert str(replace(plan, stages=2, micro_batches=4)) == "pipeline of 2 stages, 4 micro-batches of 8, 1f1b"
    both = replace(plan, stages=2, replicas=2, micro_batches=4, remat="except_last", schedule="gpipe")
    assert str(both) == "2 x pipeline of 2 stages, 4 micro-batches of 4, gpipe, recomputing"


def test_a_plan_as_json():
    told = as_json(plans(CHAIN, batch=8, cluster=Cluster(node(1, 10)))[0])
    assert json.loads(json.dumps(told, allow_nan=False))["step_s"] is None and "needs" in told["reason"]


def test_all_schedules_are_chosen_among():
    """Where passes are long and links fast, what waits least: two stages a device, or backward passes in two."""
    fast = Cluster(node(4))
    each: list[list[Schedule]] = [["1f1b"], ["interleaved"], ["zb-h1"]]
    best = {
        plan.schedule: plan for schedules in each
        for plan in plans(CHAIN, batch=4, cluster=fast, stages=(4,), schedules=schedules) if plan.remat == "never"
    }  # fmt: skip
    assert best["interleaved"].step_s < best["1f1b"].step_s and best["zb-h1"].step_s < best["1f1b"].step_s
    assert best["interleaved"].sizes == (1,) * 8 and len(best["interleaved"].memory_bytes) == 4
    assert "interleaved (2 stages a device)" in str(best["interleaved"])
    chosen = plans(CHAIN, batch=4, cluster=fast, stages=(4,))[0]
    assert chosen.schedule != "1f1b" and chosen.step_s < best["1f1b"].step_s


def test_devices_in_words():
    assert described("cuda:0,cuda:1") is None and described("cpu,cpu") is None and described("cpu") is None
    four = described("4x24GiB", reserve_bytes=2**30)
    assert four is not None and [one.memory_bytes for one in four] == [23 * 2**30] * 4
    unequal = described("1x24GB, 80gib@2.5")
    assert unequal is not None and [(one.name, one.speed, one.memory_bytes) for one in unequal] == [
        ("device 0", 1.0, 24e9), ("device 1", 2.5, 80 * 2**30),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4",
        "4x",
        "x24GiB",
        "4x24",
        "0x24GiB",
        "4x0GiB",
        "4x1GiB@0",
        "cuda:0,24GiB",
        "gpu",
        "99999999x24GiB",
        "100x1GiB,29x1GiB",
    ],
)
def test_devices_that_are_none(text):
    with pytest.raises(ConfigError):
        described(text, reserve_bytes=0.0)


def test_speed_makes_costs_of_another_device():
    costs = [segment(0.3), segment(0.6)]
    speed = Speed.of(costs, sample_s=0.009, samples=2, launch_s=1e-3)
    assert speed.factor == pytest.approx(100)
    first, second = speed.costs(costs)
    assert first.forward_s(10) == pytest.approx(0.01 + 1e-3) and first.backward_s(10) == pytest.approx(0.02 + 2e-3)
    assert second.forward_s(0) == pytest.approx(1e-3) and second.parameter_bytes == 1000


# ---- the command, and the choice for a program


def test_the_command_refuses_before_it_imports(capsys):
    assert __main__.main(["plan", "--devices", "4xGiB"]) == 2
    assert "4x24GiB" in capsys.readouterr().err
