"""A restored training that counts its own epochs is told which epoch it is in; the rate is that of a real batch."""

from __future__ import annotations

from pathlib import Path

from harness import PROGRAMS, run_ranks

PROGRAM = PROGRAMS / "torch" / "restored_range.py"


def test_a_range_after_a_restore_is_reported(tmp_path: Path) -> None:
    def run(way: str) -> tuple[str, str]:
        done = run_ranks([PROGRAM, tmp_path, way], 1).check()
        return done.out.splitlines()[-1], done.err

    # the largest update has 24 samples, not 512: twice the rate of 12
    assert run("first")[0] == "restored False epoch 2 rate 0.2"
    out, error = run("epochs")
    assert out == "restored True epoch 4 rate 0.2" and "restored:" not in error
    out, error = run("range")
    assert out == "restored True epoch 6 rate 0.2"
    assert error.count("restored: this loop over the loader is epoch 4") == 1 and "range(progress.epoch, n)" in error
