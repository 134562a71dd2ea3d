"""`hvdtrain bench comm`, really run: what every link carried, exact sums and the file; no timing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness import run_ranks

pytestmark = pytest.mark.slow
RULE = {"ring": lambda ranks: 2 * (ranks - 1) / ranks, "server": lambda ranks: ranks - 1}
RULE["servers"] = RULE["ring"]


def bench(out: Path, *flags: object) -> tuple[str, dict[str, Any]]:
    its = ["-m", "hvdtrain", "bench", "comm", "--rounds=1", "--largest=4", "--step-ms=100", f"--out={out}"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "0"}  # as in a shell that says nothing: the bench tells mpirun itself
    done = run_ranks([*its, *map(str, flags)], 1, launcher="none", env=root, timeout_s=240).check()
    return done.out, json.loads(out.read_text())


def test_on_this_machine(tmp_path: Path) -> None:
    out, result = bench(tmp_path / "comm.json", "-np", 2, 3, "--smallest=128")
    for ranks, part in result["ranks"].items():
        assert part["inexact"] == [] and len(part["seconds"]["ring"]) == 6
        assert set(part["seconds"]) == {"horovod, mpirun", "horovod, horovodrun", "mpi", "ring", "server", "servers"}
        for way, rule in RULE.items():
            for size, its in part["links"][way].items():
                # 3 ranks do not divide a power of two: the largest part counts
                assert its["counted"]["one way"] == pytest.approx(rule(int(ranks)), rel=8 / int(size)), (way, size)
                if ranks == "2":
                    assert its["counted"]["one way"] == rule(2)
    assert {"ring", "server", "servers"} == set(result["links"])
    assert set(result["training"]["steps"]["ring"]) == {"2", "4", "8", "16", "32", "64"}
    for part in (
        "3 ranks: a sum of",
        "busiest cable, one way",
        "every sum is numpy's",
        "one slow rank",
        "efficiency on ranks",
    ):
        assert part in out, out


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="network namespaces need root, and tc")
def test_on_cables_of_a_rate_the_kernel_counts_the_same(tmp_path: Path) -> None:
    _, result = bench(tmp_path / "comm.json", "-np", 3, "--rate=500mbit", "--smallest=1024")
    part = result["ranks"]["3"]
    assert part["inexact"] == []
    for way in ("ring", "server", "horovod, horovodrun"):
        kernel = part["links"][way][str(4 << 20)]["kernel"]["one way"]
        rule = RULE.get(way, RULE["ring"])(3)
        assert rule <= kernel < 1.2 * rule, f"{way}: headers and acknowledgements are a few percent: {kernel}, {rule}"
    assert "a cable of 1/4" in part["slow"]["ring"]
    assert not any("switch" in line for line in Path("/proc/net/dev").read_text().splitlines())
