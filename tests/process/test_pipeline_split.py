"""A model as a chain of segments and stages: the same numbers as the model, or a refusal that says why."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks

FOLDER = PROGRAMS / "pipeline"
pytestmark = pytest.mark.slow

Lines = dict[str, dict[str, Any]]


def lines(program: str) -> Lines:
    """What a program prints, by case."""
    ended = run_ranks([FOLDER / program], 1, timeout_s=240).check()
    found = [json.loads(line) for line in ended.out.splitlines() if line.startswith('{"case"')]
    return {one.pop("case"): one for one in found}


# -- models that are hard to cut -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def hard() -> Lines:
    return lines("split_cases.py")


SEGMENTS = {
    "TwoCross": 4, "Tied": 4, "UsedTwice": 4, "SharedNorm": 4, "Constants": 8, "Made": 4, "InPlace": 4, "View": 3,
    "Frozen": 4, "OwnBackward": 2, "Checkpointed": 3, "ModeBelow": 5, "Leaves": 7, "OrderedOut": 3,
    "FixedArguments": 2, "Draws": 4, "Transformer": 8, "Hooked": 2, "AsksForTypes": 5,
}  # fmt: skip


@pytest.mark.parametrize("name", SEGMENTS)
def test_a_hard_model_computes_what_it_did(name: str, hard: Lines) -> None:
    found = hard[name]
    assert "error" not in found, found
    for run in ("parts training", "one training", "parts evaluation", "one evaluation"):
        assert found[run] <= 1e-12, (run, found)
    assert found["left_alone"] and found["state_dict"]
    assert found["segments"] == SEGMENTS[name], found["names"]


def test_every_hard_model_is_looked_at(hard: Lines) -> None:
    assert set(hard) == set(SEGMENTS)


def test_what_a_trace_would_get_wrong_is_called_instead(hard: Lines) -> None:
    leaves = hard["Leaves"]["leaves"]
    assert leaves.keys() == {"data", "python", "counts", "remembers"}
    assert "control flow" in leaves["data"]
    assert "random numbers" in leaves["python"]
    assert "'calls'" in leaves["counts"] and "'seen'" in leaves["remembers"]
    assert hard["ModeBelow"]["leaves"].keys() == {"only", "wire"}
    assert hard["Checkpointed"]["leaves"].keys() == {"middle"}
    assert hard["AsksForTypes"]["leaves"].keys() == {"typed"}
    assert "other results" in hard["AsksForTypes"]["leaves"]["typed"]


def test_parameters_of_several_stages_have_proxies(hard: Lines) -> None:
    assert hard["Tied"]["proxies"] == 2
    assert hard["UsedTwice"]["proxies"] == 12
    assert hard["SharedNorm"]["proxies"] == 0
    assert hard["TwoCross"]["proxies"] == 0


def test_buffers_that_training_changes_are_known(hard: Lines) -> None:
    assert hard["SharedNorm"]["buffers"] == [3, 3]
    assert hard["Constants"]["buffers"] == [2, 0]  # the other one is a constant


def test_segments_that_draw_are_known(hard: Lines) -> None:
    assert hard["Draws"]["draws"] == [0, 2]
    assert all(hard[name]["draws"] == [] for name in SEGMENTS if name != "Draws")


def test_names_say_what_is_in_a_segment(hard: Lines) -> None:
    assert hard["Tied"]["names"] == ["first .. tanh", "middle", "matmul .. tanh", "last"]
    assert hard["Transformer"]["names"][1] == "encoder.layers.1"


# -- what split() refuses, and can be told ---------------------------------------------------------------------------
@pytest.fixture(scope="module")
def options() -> Lines:
    return lines("split_options.py")


REFUSALS = {
    "more stages than segments": ("5 stages for 4 segment(s)", "at most 4 device(s)"),
    "no such GPU": ("cuda:3", "this machine has", "cpu"),
    "no such device": ("'tpu:0'",),
    "a balance that does not sum up": ("[1, 2]", "4 segments", "sum to 4"),
    "an unknown balance": ("'speed'", "time, memory"),
    "more micro-batches than samples": ("a batch of 6 in 7", "micro_batches=6"),
    "another forward in training": ("ModeAtRoot.forward", "different things in training and evaluation", "modules=["),
    "a model on the meta device": ("0.weight is on the meta device", "to_empty"),
    "control flow that depends on the data": ("DataAtRoot.forward", "if x.sum() > 0:", "modules=[...]"),
    "autocast in the forward": ("AutocastAtRoot.forward", "autocast", "modules=[...]"),
    "another result each time": ("its forward changes 'times' of its own",),
    "an example that the model does not take": ("6x3 and 8x8", "an example like"),
    "a hook on the model": ("Sequential has forward or backward hooks", "on a submodule"),
    "a model in DataParallel": ("DataParallel", "split the model inside"),
    "parts that are not the model's": ("part 0 has parameters of its own",),
    "parts that are not there": ("9", "the model has 0, 1, 2, 3"),
    "parts in another order": ("other results", "in the order"),
    "batch norm in two stages by hand": ("stages 1 and 2 share one", "another balance"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_what_came_and_what_to_do(name: str, options: Lines) -> None:
    found = options[name]
    for part in ("received: ", *REFUSALS[name]):
        assert part in found["error"], found
    assert found["untouched"], "before anything is moved"


def test_a_model_that_cannot_be_traced_is_cut_by_hand(options: Lines) -> None:
    found = options["by hand"]
    assert found["difference"] <= 1e-12
    assert found["mutates"] == [False, True, False, False, False]
    assert found["names"] == ["a", "relu", "b", "c", "d"]


def test_arguments_that_are_no_tensors_are_fixed(options: Lines) -> None:
    found = options["arguments in a tuple, fixed ones checked"]
    assert found["same"] == 0
    assert "argument 1 (double): False instead of True" in found["error"]


def test_a_part_that_is_called_takes_its_attributes_along(options: Lines) -> None:
    assert options["attributes on a device"] == {
        "measured": ["meta", "meta"], "before": [["cpu", "cpu"]] * 3, "is_twin": True,
        "after": [["cpu", "cpu"], ["meta", "meta"], ["cpu", "cpu"]], "twin": ["meta", "meta"],
    }  # fmt: skip


def test_balance_by_time_by_memory_and_by_hand(options: Lines) -> None:
    assert options["time"] | {"micro_batches": 0} == {
        "sizes": [1, 5], "micro_batches": 0, "finite": True, "names": True, "segments": 6,
    }  # fmt: skip
    assert 1 <= options["time"]["micro_batches"] <= 512
    assert options["memory"] == {"sizes": [7, 1]}
    assert options["by the number of segments"] == {"sizes": [1, 3], "micro_batches": 3}
    assert options["one device"] == {"sizes": [4], "micro_batches": 1}
