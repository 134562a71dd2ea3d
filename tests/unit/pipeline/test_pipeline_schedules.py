"""Interleaved 1F1B and ZB-H1: every pass once, in order, never waiting for itself; times as the papers say."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from stub_pipelines import stage

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.plan.costs import Curve, Device, Link, StageCost
from hvdtrain.pipeline.plan.schedule import Action, Schedule, actions, of_stage, stage_orders
from hvdtrain.pipeline.plan.simulate import simulate

# of the rows of devices: which passes there are, by (device, action)
Rows = Sequence[Sequence[Action]]


def broken_rules(rows: Rows, micro_batches: int, chunks: int, *, weights: bool) -> list[str]:
    """Runs the rows, a pass a tick: what is missing, twice, or waits for ever."""
    kinds = ["forward", "backward", *["weight"] * weights]
    wanted = {(k, i, c) for k in kinds for i in range(micro_batches) for c in range(chunks)}
    wrong = [
        f"device {at} does not do each pass once" for at, row in enumerate(rows)
        if len(row) != len(wanted) or {(a.kind, a.micro, a.chunk) for a in row} != wanted
    ]  # fmt: skip
    devices, last = len(rows), len(rows) * chunks - 1
    done: set[tuple[str, int, int]] = set()  # kind, micro-batch, stage
    position = [0] * devices

    def is_ready(device: int, action: Action) -> bool:
        at = action.chunk * devices + device
        if action.kind == "forward":
            return at == 0 or ("forward", action.micro, at - 1) in done
        if action.kind == "weight":
            return ("backward", action.micro, at) in done
        return ("forward", action.micro, at) in done and (at == last or ("backward", action.micro, at + 1) in done)

    while any(at < len(row) for at, row in zip(position, rows, strict=True)):
        tick = [
            (device, row[at]) for device, (at, row) in enumerate(zip(position, rows, strict=True))
            if at < len(row) and is_ready(device, row[at])
        ]  # fmt: skip
        if not tick:
            return [*wrong, "waits for itself"]
        for device, action in tick:
            done.add((action.kind, action.micro, action.chunk * devices + device))
            position[device] += 1
    return wrong


def test_every_interleaved_row_is_a_schedule() -> None:
    both: tuple[Schedule, ...] = ("interleaved", "gpipe")
    for schedule, devices, chunks, m in itertools.product(both, range(1, 6), range(1, 4), range(1, 14)):
        rows = [actions(schedule, at, devices, m, chunks) for at in range(devices)]
        assert broken_rules(rows, m, chunks, weights=False) == [], (schedule, devices, chunks, m)
        stages = [of_stage(rows[k % devices], k // devices) for k in range(devices * chunks)]
        assert stages == stage_orders(schedule, devices, m, chunks)


def test_every_zero_bubble_row_is_a_schedule() -> None:
    for devices, m in itertools.product(range(1, 7), range(1, 14)):
        rows = [actions("zb-h1", at, devices, m) for at in range(devices)]
        assert broken_rules(rows, m, 1, weights=True) == [], (devices, m)


def test_by_hand() -> None:
    """Narayanan et al., figure 4, for 2 devices, 2 chunks, 4 micro-batches; Qi et al., figure 3, for 2 devices."""
    named = [f"{a.kind[0]}{a.micro}{'ab'[a.chunk]}" for a in actions("interleaved", 1, 2, 4, 2)]
    assert " ".join(named) == "f0a f1a f0b b0b f1b b1b f2a b0a f3a b1a f2b b2b f3b b3b b2a b3a"
    named = [f"{a.kind[0]}{a.micro}" for a in actions("zb-h1", 0, 2, 3)]
    assert " ".join(named) == "f0 f1 b0 w0 f2 b1 w1 b2 w2"
    named = [f"{a.kind[0]}{a.micro}" for a in actions("zb-h1", 1, 2, 3)]
    assert " ".join(named) == "f0 b0 f1 b1 w0 f2 b2 w1 w2"


@given(
    devices=st.integers(1, 5), chunks=st.integers(1, 4), rounds=st.integers(1, 4),
    forward=st.integers(1, 4), backward=st.integers(1, 8),
)  # fmt: skip
def test_the_bubble_of_interleaved_1f1b(devices: int, chunks: int, rounds: int, forward: int, backward: int) -> None:
    """Narayanan et al., section 2.2: (s - 1) (f + b) / v of waiting, beside m (f + b): (s - 1) / (v m + s - 1)."""
    m = devices * rounds  # the paper's own condition
    alike = [stage(forward / chunks, backward / chunks)] * (devices * chunks)
    found = simulate(alike, sizes=[1] * m, schedule="interleaved", chunks=chunks)
    assert found.step_s == pytest.approx((forward + backward) * (m + (devices - 1) / chunks))
    assert found.bubble == pytest.approx((devices - 1) / (chunks * m + devices - 1))


@given(devices=st.integers(1, 5), more=st.integers(0, 8), forward=st.integers(1, 4), half=st.integers(1, 4))
def test_the_bubble_of_zb_h1(devices: int, more: int, forward: int, half: int) -> None:
    """Qi et al., table 2: (s - 1) (f + b - w) of waiting, where 1F1B has (s - 1) (f + b + w); for w of f at most."""
    assume(half <= forward)
    m = devices + more
    found = simulate([stage(forward, 2 * half)] * devices, sizes=[1] * m, schedule="zb-h1")
    assert found.step_s == pytest.approx(m * (forward + 2 * half) + (devices - 1) * forward)
    plain = simulate([stage(forward, 2 * half)] * devices, sizes=[1] * m, schedule="1f1b")
    assert found.step_s <= plain.step_s and (devices == 1 or found.step_s < plain.step_s)


def test_what_interleaved_holds() -> None:
    """(v - 1) s + 2 (s - 1) + 1 small stages' activations on the first device (Narayanan et al.: 1 + (s - 1) / (s v)
    of what 1F1B holds)."""
    once = Curve.per_sample(1)
    small = StageCost(Device("d"), once, once, fixed_bytes=100, activation_bytes=Curve.per_sample(10))
    found = simulate([small] * 8, sizes=[1] * 8, schedule="interleaved", chunks=2).peak_bytes
    assert found == tuple(200 + 10 * (4 + 2 * (3 - at) + 1) for at in range(4))
    again = simulate([small] * 8, sizes=[1] * 8, schedule="interleaved", chunks=2, remat="all").peak_bytes
    assert again == (210,) * 4


def test_transfers_go_round() -> None:
    """From the last device back to the first, over the slowest link; from chunk to chunk of one device over none."""
    found = simulate([stage(1, 1, 2)] * 4, sizes=[1], schedule="interleaved", chunks=2, links=[Link(0, 2.0)])
    assert found.step_s == 8 + 6
    alone = simulate([stage(1, 1, 2)] * 3, sizes=[1], schedule="interleaved", chunks=3)
    assert alone.step_s == 6
    with pytest.raises(ConfigError, match="every two neighbouring stages need a link"):
        simulate([stage(1, 1)] * 4, sizes=[1], schedule="interleaved", chunks=2, links=[Link()] * 3)
