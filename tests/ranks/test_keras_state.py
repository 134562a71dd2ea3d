"""What a Keras checkpoint holds, and what replicas share: cases that all run in one launch of two ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks
from keras_cases import Ran, each, passed
from limits import Limit

PROGRAM = PROGRAMS / "keras" / "state.py"
CASES = re.findall(r"^def (case_\w+)", PROGRAM.read_text(encoding="utf-8"), re.MULTILINE)


K9 = "weights that are not finite are not saved: training has diverged"
ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "case_k9_divergence_keeps_the_good_checkpoints": (
        "K9", "divergence deletes every good checkpoint", {"refused": K9},
    ),
    "case_k11_save_every_is_kept_with_several_steps_an_execution": (
        "K11a", "save_every=10 with steps_per_execution=4 saves at 20",
        {"mended": "at 12, 20, 32, 40: the first chance"},
    ),
    "case_k16_other_warnings_do_not_end_a_restore": (
        "K16a", "an unrelated warning while a checkpoint loads ends the resume",
        {"mended": "only Keras' own, of what it did not load, does"},
    ),
    "case_k17_frozen_weights_do_not_travel": (
        "K17a", "each epoch sends every frozen weight as float64",
        {"mended": "what is equal on all ranks does not travel"},
    ),
}  # fmt: skip
# several steps an execution, the host's copies of variables, and the streams of random numbers
ON_TENSORFLOW = {
    "case_k11_save_every_is_kept_with_several_steps_an_execution", "case_t8_checksums_see_the_order",
    "case_m_ranks_seeded_alike_draw_other_masks", "case_what_another_process_writes_is_what_keras_does",
}  # fmt: skip


@each(CASES, ON_TENSORFLOW)
def test_case(case: str, backend: str, ran: Ran, limit: Limit) -> None:
    passed(ran(backend), case)
    if case in ROWS:
        row, attack, verdict = ROWS[case]
        limit(row, attack, **verdict)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_nothing_prepared_is_left(backend: str) -> None:
    program = PROGRAM.with_name("leaks.py")
    run_ranks([program], 2, env={"KERAS_BACKEND": backend}, timeout_s=400).check()
