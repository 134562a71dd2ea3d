"""What is made of the weights that two scripts came to."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.core.errors import HvdtrainError
from hvdtrain.migrate import prove
from hvdtrain.migrate.prove import NotProvenError, ScriptRun, compare


def run_of(*values: float, updates: int = 20, dtype: str = "float32") -> ScriptRun:
    """Two ranks' weights: each value is one of a tensor of two."""
    tensors = [{f"w{i}": np.array([2.0, value], dtype) for i, value in enumerate(values)} for _ in range(2)]
    eps = [dict.fromkeys(tensors[0], float(np.finfo(dtype).eps)) for _ in range(2)]
    return ScriptRun([updates, updates], eps, tensors)


def test_the_tensor_that_differs_most_is_named() -> None:
    old, new = run_of(1, 1, 1), run_of(1, 1, 1)
    new.tensors[1]["w1"][1] += 0.5
    proof = compare(old, new)
    assert (proof.name, proof.rank, proof.difference, proof.holds) == ("w1", 1, 0.25, False)
    assert str(proof).startswith("NOT PROVEN: after 20 updates on 2 ranks the 3 tensors") and "'w1' on rank 1" in str(
        proof
    )


@pytest.mark.parametrize(
    "dtype, off, holds", [("float32", 1e-5, True), ("float32", 1e-4, False), ("float64", 1e-13, False)]
)
def test_the_tolerance_is_the_types(dtype: str, off: float, holds: bool) -> None:
    assert compare(run_of(1, dtype=dtype), run_of(1 + off, dtype=dtype)).holds is holds


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_not_proven(value: float) -> None:
    proof = compare(run_of(1, 1), run_of(1, value))
    assert not proof.holds and proof.name == "w1"
    assert not compare(run_of(value), run_of(1)).holds


def test_other_shapes_models_or_updates_are_told() -> None:
    other = run_of(1)
    other.tensors[0]["w0"] = np.ones((1, 2), "float32")
    assert not compare(run_of(1), other).holds
    with pytest.raises(NotProvenError, match="only in one: w1"):
        compare(run_of(1), run_of(1, 1))
    with pytest.raises(NotProvenError, match=r"the old one \[20, 20\], the new one \[19, 19\]"):
        compare(run_of(1), run_of(1, updates=19))


@pytest.mark.parametrize("whole", [True, False])
def test_what_was_not_compared_is_reported(whole: bool) -> None:
    proof = compare(run_of(1), replace(run_of(1), whole=whole))
    assert proof.holds and "not compared: what does not run with these arguments, here, on 2 ranks" in str(proof)
    assert ("nor what the script does after these updates" in str(proof)) is not whole


def test_weights_that_hardly_move_prove_nothing() -> None:
    """A warm-up: whatever the new script does otherwise is hidden by rounding."""
    still = replace(run_of(1), moved=1e-6)
    with pytest.raises(HvdtrainError, match="hardly moves its weights") as caught:
        compare(still, run_of(1))
    assert "--updates 1000" in caught.value.remedy and not isinstance(caught.value, NotProvenError)
    assert compare(replace(run_of(1), moved=0.1), run_of(1)).holds
    assert not compare(still, run_of(1.1)).holds  # seen, however small


def test_a_script_of_this_folder_runs_in_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it writes beside `__file__` is written there."""
    here, folder, elsewhere = tmp_path / "here", tmp_path / "proof", tmp_path / "other" / "train.py"
    here.mkdir()
    monkeypatch.chdir(here)
    assert prove._in_copy(Path("sub/train.py"), folder) == folder / "work" / "sub" / "train.py"
    assert prove._in_copy(elsewhere, folder) == elsewhere
