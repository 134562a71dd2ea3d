"""One process: the adapter works without Horovod, costs nothing it need not, and refuses what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import PROGRAMS, run_ranks
from keras_cases import BACKENDS
from limits import Limit

PROGRAM = PROGRAMS / "keras" / "alone.py"


@pytest.mark.parametrize("backend", ["tensorflow", pytest.param("torch", marks=pytest.mark.thorough)])
def test_one_process_trains_exactly_as_plain_keras_and_without_horovod(backend: str, limit: Limit) -> None:
    ended = run_ranks([PROGRAM], 1, env={"KERAS_BACKEND": backend}).check()
    assert "all of it" in ended.out, ended.text
    if backend == "tensorflow":
        limit("K23b", "the same in one process, of a train_step and a test_step", mended="a step gets x as it is")


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_fit_begins_and_what_it_leaves(backend: str, tmp_path: Path) -> None:
    """After a restore: with and without callbacks, twice, validating on the training data; nothing stays behind."""
    program = PROGRAMS / "keras" / "places.py"
    ended = run_ranks([program, str(tmp_path)], 1, env={"KERAS_BACKEND": backend}).check()
    found = json.loads(ended.out.splitlines()[-1])
    anew = found.pop("another training")
    assert "must resume in the epoch that it" in anew and 'restore({"model.keras": state["model.keras"]})' in anew
    assert "a loader of 8 samples a rank, per_rank_batch=4" in found.pop("evaluate")
    assert found == {
        "validates on its training data": [True, True],
        "fits it again": True,
        "without callbacks": [True, 40],
        "another model": 24,
        "its remedy": 24,
        "validation's order": True,
        "data is let go": True,
        "phases": [True, True],
    }


def test_jax_in_keras_json_is_refused_by_name(tmp_path: Path, limit: Limit) -> None:
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    code = "import hvdtrain; hvdtrain.init('keras')"
    ended = run_ranks(["-c", code], 1, launcher="none", env={"KERAS_BACKEND": "", "KERAS_HOME": str(tmp_path)})
    assert ended.returncode != 0 and "pip install" not in ended.err, ended.text
    said = "hvdtrain.keras needs the tensorflow or torch backend"
    assert said in ended.err and "KERAS_BACKEND=jax (from keras.json)" in ended.err, ended.text
    assert "keras.distribution.DataParallel" in ended.err, ended.text
    limit("K16h", "jax in keras.json", refused=f"{said} of Keras 3; received: KERAS_BACKEND=jax (from keras.json)")
