"""The models of the ResNet program: stems, starts, groups of parameters, and names that do not exist."""

from __future__ import annotations

from harness import PROGRAMS, run_ranks

PROGRAM = PROGRAMS / "torch" / "models.py"
CASES = (
    "the_stem_sets_the_size_of_the_feature_maps", "residual_blocks_start_as_the_identity",
    "no_decay_on_batch_norm_and_biases", "other_families_of_models", "refusals",
)  # fmt: skip


def test_models() -> None:
    ended = run_ranks([PROGRAM], 1).check()
    assert [line.split()[1] for line in ended.out.splitlines() if line.startswith("passed ")] == list(CASES)
