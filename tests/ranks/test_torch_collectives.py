"""Tensors of all ranks, on each engine that carries them and alone."""

from __future__ import annotations

import pytest
from harness import PROGRAMS, run_ranks


@pytest.mark.parametrize(
    "launcher, ranks",
    [("horovodrun", 2), ("torchrun", 2), ("none", 1), pytest.param("mpirun", 3, marks=pytest.mark.thorough)],
)
def test_reduce_gather_broadcast(launcher: str, ranks: int) -> None:
    result = run_ranks([PROGRAMS / "torch" / "collectives.py"], ranks, launcher=launcher, timeout_s=120).check()
    assert result.out.count("right") == 1
