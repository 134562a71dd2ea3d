"""`hvdtrain plan`, and what it chooses, in one process."""

from __future__ import annotations

import json

import pytest
from harness import PROGRAMS, run_ranks

PROGRAM = PROGRAMS / "pipeline" / "planner.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict:
    """What one process said: several commands, a choice, a count of operations."""
    folder = tmp_path_factory.mktemp("plan")
    done = run_ranks([PROGRAM, folder], 1, timeout_s=120).check()
    return {"folder": folder} | {line["case"]: line for line in map(json.loads, done.out.splitlines())}


@pytest.mark.slow
def test_the_command_ranks(told):
    data = json.loads(told["json"]["out"])
    fitting = [plan for plan in data["plans"] if not plan["reason"]]
    best = [plan["step_s"] for plan in fitting]
    assert best == sorted(best) and data["plans"][0]["samples_per_s"] == pytest.approx(64 / best[0])
    assert any(plan["plan"].startswith("2 x pipeline of 2 stages") for plan in fitting)
    assert data["settings"]["model"] == "resnet18" and "bytes, and each part's share" in data["measured"][0]
    assert "10 TFLOP/s on one device" in data["assumed"][0] and "10 Gbit/s between nodes" in data["assumed"]


@pytest.mark.slow
def test_the_command_lists_what_does_not_fit(told):
    text = told["tight"]["out"]
    assert "resnet18, 32 x 32, batch 64, sgd, on 2x140MiB: predicted, not measured" in text
    assert "samples/s" in text and "of best" in text
    assert "does not fit:" in text and "device 0 needs" in text
    assert "given: 500 samples/s on one device" in text and "costs: read from" in told["tight"]["err"]


@pytest.mark.slow
def test_the_command_on_the_devices_here(told):
    text = told["here"]["out"]
    assert "times and bytes of" in text and "on cpu,cpu" in text and "none" in text


@pytest.mark.slow
def test_the_command_refuses(told):
    for case, said in (("model", "did you mean"), ("device", "cuda:7"), ("other", "image_size 32, not 64")):
        assert told[case]["code"] == 2 and said in told[case]["err"] and "Traceback" not in told[case]["err"]


@pytest.mark.slow
def test_the_choice_can_be_obeyed(told):
    one = told["choice"]
    assert one["stages"] in (1, 2) and sum(one["sizes"]) == one["segments"] and len(one["sizes"]) == one["stages"]
    assert one["predicted_samples_per_s"] > 0 and one["reason"] == "" and one["state_is_untouched"]
    assert one["loss"] == pytest.approx(one["expected_loss"], rel=1e-5)
    assert "does not fit" not in one["told"] and one["nothing_fits"].startswith("some plan must fit")


@pytest.mark.slow
def test_operations_are_counted(told):
    assert told["flops"]["count"] == 2 * 5 * 3 * 7  # a product of [5, 3] and [3, 7]
