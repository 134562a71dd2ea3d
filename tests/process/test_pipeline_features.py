"""Keyword arguments, outputs, whole losses, copies, gradients of inputs, models of other libraries."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks
from limits import Limit

TOLERANCE = 1e-10
Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found() -> Found:
    program = PROGRAMS / "pipeline" / "features.py"
    result = run_ranks([program], 1, timeout_s=240).check()
    lines = [json.loads(line) for line in result.out.splitlines() if line.startswith("{")]
    return {line.pop("check"): line for line in lines}


def test_models_of_transformers(found: Found, limit: Limit) -> None:
    """As they are: losses, gradients, outputs of their own class; cut at their layers."""
    models = found["models"]["models"]
    worst = max(its["difference"] for its in models.values())
    assert len(models) == 4 and worst <= TOLERANCE, models
    assert min(its["segments"] for its in models.values()) >= 16, models
    limit("P9f", "transformers' GPT-2, Llama, ViT and T5, by keyword, with masks", exact=worst)
    assert "use_cache=False in kwargs=" in found["models"]["cached"]


def test_decisions_by_forms_are_fixed_and_others_are_not(found: Found) -> None:
    """A module that asks for numbers, or how many samples there are, is called as a whole."""
    opened = found["decisions"]
    assert {by: is_open for by, is_open in opened.items() if isinstance(is_open, bool)} == {
        "form": True, "length": True, "numbers": False, "list": False, "count": False, "samples": False,
        "len": False, "numpy": False, "drawn": False,
    }  # fmt: skip
    assert "decided by shapes, types or settings" in opened["otherwise"]
    for how in ("looped over", "counted", "unpacked"):
        difference, longer, shorter = opened[how]
        assert difference <= TOLERANCE
        assert "3 instead of 2" in longer and "1 instead of 2" in shorter, how


def test_keyword_arguments_and_what_of_them_is_cut(found: Found) -> None:
    received = found["keywords"]
    assert max(received["by_name"], received["in_order"]) <= TOLERANCE
    assert received["tuned"][0] in (1, 2) and received["tuned"][1] > 0, "the unsplit model takes them as well"
    assert "chunk=" in received["blind"] and "kwargs={...}" in received["other_names"]
    assert "argument 4 (how): 'add' instead of 'none'" in received["other_value"]
    assert "argument 1 (mask): a tensor [" in received["given_later"] and "instead of None" in received["given_later"]
    for name, part in (("later", "1 (mask)"), ("called", "1 (mask)"), ("within", "2 (extra)['mask']")):
        assert f"argument {part}: None instead of a value" in received[f"none_{name}"], received
    for name, part in (("bad_chunk", "masc"), ("bad_part", "tables"), ("bad_dimension", "'mask': 1")):
        assert received[name].startswith("chunk=[...] must hold 0") and part in received[name]


def test_a_loss_that_sees_the_whole_batch(found: Found) -> None:
    """What it computes: test_pipeline_whole.py."""
    received = found["whole_losses"]
    assert "whole=True" in received["parts"] and "weight= cannot be combined with whole=True" in received["weight"]


def test_gradients_of_inputs(found: Found, limit: Limit) -> None:
    limit("P9c", "gradients of the inputs", exact=found["input_gradients"]["difference"])


def test_copies(found: Found, limit: Limit) -> None:
    received = found["copies"]
    assert received["average"] <= TOLERANCE and received["runs"] == 0 and received["same_class"] and received["own"]
    limit("P8b", "deepcopy and AveragedModel of a pipeline", mended="copies the unsplit model")
