"""`hvdtrain bench comm`, really run: what every link carried, exact sums and the file; no timing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
RULE = {"ring": lambda ranks: 2 * (ranks - 1) / ranks, "server": lambda ranks: ranks - 1}
RULE["servers"] = RULE["ring"]


def bench(out: Path, *flags: object) -> tuple[str, dict[str, Any]]:
    its = ["-m", "hvdtrain", "bench", "comm", "--rounds=1", "--largest=4", f"--out={out}"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "0"}  # as in a shell that says nothing: the bench tells mpirun itself
    done = run_ranks([*its, *map(str, flags)], 1, launcher="none", env=root, timeout_s=240).check()
    return done.out, json.loads(out.read_text())


def test_on_this_machine(tmp_path: Path) -> None:
    out, result = bench(tmp_path / "comm.json", "-np", 3, "--smallest=128")
    for ranks, part in result["ranks"].items():
        assert part["inexact"] == [] and len(part["seconds"]["ring"]) == 6
        assert set(part["seconds"]) == {"horovod, mpirun", "horovod, horovodrun", "mpi", "ring", "server", "servers"}
        for way, rule in RULE.items():
            for size, its in part["links"][way].items():
                # 3 ranks do not divide a power of two: the largest part counts
                assert its["one way"] == pytest.approx(rule(int(ranks)), rel=8 / int(size)), (way, size)
    for part in ("3 ranks: a sum of", "busiest link, one way", "every sum is numpy's", "one slow rank"):
        assert part in out, out
