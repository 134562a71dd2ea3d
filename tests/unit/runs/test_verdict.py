"""The verdict: each cause is found, named with its share and its remedy, and not found where it is not."""

from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.record.bottleneck import BETWEEN, RunFacts, phases_per_rank, verdict

BUSY = {"input": 0.02, "forward": 0.3, "backward": 0.55, "communication": 0.05, "optimizer": 0.08}


def test_input_bound_with_room_for_workers() -> None:
    step = {"input": 0.43, "forward": 0.2, "backward": 0.3, "optimizer": 0.07}
    found = verdict([step], RunFacts(workers=2, free_cores=4))
    assert found.kind == "input"
    assert str(found) == (
        "input bound: 43 % of each step waits for data; 4 more loader workers fit on this node"
        " (--workers 6 for each rank)"
    )


@pytest.mark.parametrize(
    ("facts", "advice"),
    [
        (RunFacts(workers=None, free_cores=8), "in memory"),
        (RunFacts(), "try more workers, or less work for each sample (`hvdtrain bench input`"),
        (RunFacts(workers=0, free_cores=1), "1 more loader worker fits on this node (--workers 1"),
        (RunFacts(workers=1, free_cores=7, local_size=2), "6 more loader workers fit on this node (--workers 4"),
        (RunFacts(workers=4, free_cores=3, local_size=4), "try more workers, or less work"),
    ],
)
def test_advice_for_input_depends_on_the_machine(facts: RunFacts, advice: str) -> None:
    step = {"input": 0.5, "forward": 0.25, "backward": 0.25}
    found = verdict([step] * facts.local_size, facts)
    assert found.kind == "input" and advice in found.text


def test_communication_bound() -> None:
    step = {"input": 0.01, "forward": 0.2, "backward": 0.4, "communication": 0.39}
    found = verdict([step] * 4)
    assert found.kind == "communication" and "39 % of each step waits for gradients" in found.text
    assert "16 bits" not in found.text and "accumulate 2" in found.text, "on one host it costs more than it saves"
    assert "large gradients in 16 bits" in verdict([step] * 4, RunFacts(hosts=2)).text
    compressed = verdict([step] * 4, RunFacts(compression="bf16", accumulate=2, hosts=2))
    assert "16 bits" not in compressed.text and "accumulate 4" in compressed.text


def test_compute_bound_says_what_is_left() -> None:
    found = verdict([BUSY, BUSY])
    assert found.kind == "compute"
    assert found.text == "compute bound: 93 % of each step computes, 2 % waits for data, 5 % for other ranks"
    assert "other ranks" not in verdict([{**BUSY, "communication": 0.0}]).text


KERAS = {"input": 0.02, "train_step": 0.93, "other": 0.05}


def test_a_step_of_one_phase_is_not_called_other_code() -> None:
    """Keras does forward, backward, reduction and update in one call."""
    found = verdict([KERAS, KERAS])
    assert found.kind == "compute"
    assert found.text == (
        "compute or communication bound: 93 % of each step is the model's forward, backward and update, waiting for"
        " other ranks included, 2 % waits for data"
    )
    alone = verdict([KERAS]).text
    assert alone.startswith("compute bound: 93 % of each step is the model's") and "ranks" not in alone
    assert verdict([{"between": 0.1, "step": 0.9}] * 2).kind == "other"  # the negative twin: names it does not know


def test_a_slow_input_of_keras() -> None:
    found = verdict([{**KERAS, "input": 1.02}] * 2)
    assert found.kind == "input" and "51 % of each step waits for data" in found.text


def test_the_rank_whose_input_all_wait_for_in_their_train_step() -> None:
    ranks = [{**KERAS, "train_step": 1.43}, {**KERAS, "input": 0.52}]
    assert verdict(ranks).kind != "uneven", "half a second is noise: no rank is named"
    found = verdict([{name: 2 * its for name, its in phases.items()} for phases in ranks])
    assert found.kind == "uneven"
    assert "33 % of each step is spent waiting for rank 1; it spends 26.0 times as long waiting for data" in found.text
    assert verdict([KERAS, {**KERAS, "input": 0.05}]).kind == "compute"


def test_where_all_wait_for_data_none_is_the_slow_one() -> None:
    """With data that is read ahead, ranks as slow as each other take turns: one waits in its step for the other."""
    late, early = {**KERAS, "input": 2.0, "train_step": 0.2}, {**KERAS, "input": 1.0, "train_step": 1.2}
    assert verdict([early, late]).kind == "input"
    assert verdict([{**early, "input": 0.02, "train_step": 2.18}, late]).kind == "uneven"  # the negative twin


def test_the_rank_that_all_wait_for_is_named_with_its_cause() -> None:
    """The others wait in communication, so that their own share of it must not be called communication bound."""
    slow = {**BUSY, "input": 0.42, "communication": 0.05}
    fast = {**BUSY, "communication": 0.45}
    found = verdict([{name: 10 * its for name, its in rank.items()} for rank in (fast, fast, slow, fast)])
    assert found.kind == "uneven"
    # 0.4 s of 1.4 s
    assert "29 % of each step is spent waiting for rank 2" in found.text
    assert "21.0 times as long waiting for data" in found.text and "disk and loader" in found.text


def test_checkpoints_and_evaluation_lie_between_steps() -> None:
    quiet = verdict([{**BUSY, "checkpoint": 0.02, "evaluation": 0.2}])
    assert quiet.text.count("\n") == 0 and quiet.shares == verdict([BUSY]).shares
    assert "\n" not in verdict([{**BUSY, "checkpoint": 0.25}]).text, "nobody gains by a quarter of a second"
    assert "checkpoint takes 60 %" in verdict([{**BUSY, "checkpoint": 1.5}]).text
    assert "checkpoint takes 30 %" in verdict([{**BUSY, "forward": 8.0, "checkpoint": 3.7}]).text
    loud = verdict([{name: 100 * its for name, its in {**BUSY, "checkpoint": 0.25, "evaluation": 1.25}.items()}])
    assert loud.kind == "compute"
    assert loud.text.splitlines()[1:] == [
        f"checkpoint takes 10 % of the run: {BETWEEN['checkpoint']}",
        f"evaluation takes 50 % of the run: {BETWEEN['evaluation']}",
    ]


def test_phases_come_from_the_events_since_the_last_start() -> None:
    events: list[dict[str, Any]] = [
        {"kind": "start"},
        {"kind": "epoch", "ranks": [{"input": 100.0}, {"input": 100.0}, {"input": 100.0}]},
        {"kind": "resume"},
        {"kind": "step", "seconds": {"input": 7.0}},
        {"kind": "epoch", "ranks": [{"input": 1.0}, {"input": 2.0, "forward": 3.0}]},
        {"kind": "epoch", "ranks": [{"input": 1.0, "backward": 4}, {"forward": 3.0}]},
    ]
    assert phases_per_rank(events) == [{"input": 2.0, "backward": 4.0}, {"input": 2.0, "forward": 6.0}]
    assert phases_per_rank([{"kind": "start"}]) == []
