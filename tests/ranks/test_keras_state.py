"""What a Keras checkpoint holds, and what replicas share: cases that all run in one launch of two ranks."""

from __future__ import annotations

import re

import pytest
from harness import PROGRAMS, Result, run_ranks
from keras_cases import BACKENDS, Outcomes, passed, ran
from limits import Limit

PROGRAM = PROGRAMS / "keras" / "state.py"
CASES = re.findall(r"^def (case_\w+)", PROGRAM.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module", params=BACKENDS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Outcomes]:
    return ran(PROGRAM, request, tmp_path_factory, request.param)


@pytest.mark.parametrize("case", CASES)
def test_case(case: str, found: tuple[Result, Outcomes]) -> None:
    passed(found[1], case)


def test_limits(found: tuple[Result, Outcomes], limit: Limit) -> None:
    ended, _ = found
    refusal = "weights that are not finite are not saved: training has diverged"
    assert ended.out.count(f"no checkpoint after step 6: {refusal}") == 1, "told by rank 0"
    limit("K9", "divergence deletes every good checkpoint", refused=refusal)
    limit("K11a", "save_every=10 with steps_per_execution=4 saves at 20", mended="at 12, 20, 32, 40: the first chance")
    limit(
        "K16a", "an unrelated warning while a checkpoint loads ends the resume", mended="only Keras' own, of what it"
        " did not load, does",
    )  # fmt: skip
    limit(
        "K17a", "each epoch sends every frozen weight as float64", mended="what is equal on all ranks does not travel"
    )


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_nothing_prepared_is_left(backend: str) -> None:
    program = PROGRAM.with_name("leaks.py")
    run_ranks([program], 2, env={"KERAS_BACKEND": backend}, timeout_s=400).check()
