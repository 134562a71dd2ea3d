"""Tensors of all ranks, on each engine that carries them and alone."""

from __future__ import annotations

import pytest
from harness import PROGRAMS, run_ranks

OTHERS = (("torchrun", 2), ("mpirun", 3))


@pytest.mark.parametrize(
    "launcher, ranks",
    [("forked", 2), ("forked", 1), *(pytest.param(*one, marks=pytest.mark.thorough) for one in OTHERS)],
)
def test_reduce_gather_broadcast(launcher: str, ranks: int) -> None:
    result = run_ranks([PROGRAMS / "torch" / "collectives.py"], ranks, launcher=launcher, timeout_s=120).check()
    assert result.out.count("right") == 1
