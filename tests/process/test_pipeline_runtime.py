"""A pipeline at work, in one child process: draws, errors, Ctrl-C, inference, mixed precision, memory, hooks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks

PROGRAM = PROGRAMS / "pipeline" / "runtime.py"


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """What each check of the program found."""
    result = run_ranks([PROGRAM], 1, timeout_s=180).check()
    lines = [json.loads(line) for line in result.out.splitlines() if line.startswith("{")]
    return {line.pop("check"): line for line in lines}


pytestmark = pytest.mark.slow


def test_draws_do_not_depend_on_the_cut(found: dict[str, Any]) -> None:
    received = found["draws"]
    assert received["several"] and received["alone"] and received["another_seed_differs"]


def test_a_stage_that_raises(found: dict[str, Any]) -> None:
    received = found["raising"]
    for part in (
        "stage 2 of 3 (2 .. 3, cpu)",
        "forward of micro-batch 2 of 3",
        "ValueError: spoilt on purpose",
        "fix: ",
    ):
        assert part in received["text"]
    assert "runtime.py:" in received["text"] and received["cause"] == "ValueError"
    assert received["threads"] == 1 and received["gradients"] and received["next_step"]
    assert received["looked_at"] == 4 and received["alive"] == 0, "activations must be freed although the error is kept"


def test_a_backward_pass_that_raises(found: dict[str, Any]) -> None:
    received = found["backward_raising"]
    assert "stage 1 of 2 (0 .. 2, cpu) failed in the backward of micro-batch 1 of 4" in received["text"]
    assert received["threads"] == 1 and received["gradients"] == 0


@pytest.mark.parametrize("stages", [1, 2])
def test_interrupted(found: dict[str, Any], stages: int) -> None:
    assert found["interrupted"][f"stages_{stages}"] == ["KeyboardInterrupt", 1, 0]
    assert found["interrupted"]["split"] > 2, "after the trace, in which PyTorch's own functions are replaced"


REFUSED = {
    "empty": ("every micro-batch needs a sample", "batch of 0 in 1"),
    "targets": ("targets must have one entry for each sample", "(5, 4) for a batch of 12"),
    "loss": ("must return one differentiable number", "shape (3, 4)"),
    "closed": ("that is at work cannot be closed", "in its own loss"),
    "nested": ("cannot work inside of another one", "give the loss its result"),
    "detached": ("one differentiable number", "requires_grad=False"),
    "no_tensor": ("a batch needs a tensor", "str"),
    "forward": ("trained by step()", "pipe.step(x, y, loss_fn)"),
    "no_grad": ("step() needs gradients", "pipe(x)"),
    "moved": ("cannot change its devices", "before hvdtrain.pipeline.split"),
    "part": ("cannot be added after split()", "head = Linear"),
    "micro_batches": ("whole number >= 1", "micro_batches=0"),
    "schedule": ("one of gpipe, 1f1b", "'fifo'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(found: dict[str, Any], case: str) -> None:
    text = found["refusals"][case]
    assert text.startswith("ConfigError: ")
    for part in REFUSED[case]:
        assert part in text


def test_inference(found: dict[str, Any]) -> None:
    received = found["inference"]
    assert received["no_grad"] and received["inference_mode"] and received["grad"] and received["empty"]
    assert (
        "one entry for each sample" in received["rank_2_scalar"]
        and "shapes [(), ()], for [6, 6] samples" in received["rank_2_scalar"]
    )


def test_mixed_precision_reaches_the_stages(found: dict[str, Any]) -> None:
    # twice: the forward pass and its repetition
    assert found["autocast"] == {"True": ["torch.bfloat16", 2, True, True], "False": ["torch.float32", 2, True, True]}


def test_micro_batches_held(found: dict[str, Any]) -> None:
    """1F1B holds no more than there are stages to come; recomputation holds inputs, no graphs."""
    assert found["memory"] == {
        "gpipe never": [[6, 6, 6], [6, 6, 6]],
        "gpipe all": [[6, 6, 6], [0, 0, 0]],
        "1f1b never": [[3, 2, 1], [3, 2, 1]],
        "1f1b all": [[3, 2, 1], [0, 0, 0]],
    }


def test_the_schedule_is_what_is_done(found: dict[str, Any]) -> None:
    assert found["order"]["rows"]


def test_looks_like_the_unsplit_model(found: dict[str, Any]) -> None:
    received = found["like_the_model"]
    assert received["names"] and received["same_objects"] and received["factor_and_sum"] and received["loaded"]
    assert received["modes"] == [False, False, True, True] and received["attribute"] == ["mine", True]
