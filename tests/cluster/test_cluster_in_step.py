"""Ranks of two hosts that part are named with the line of each, within 10 s, whatever the network looks like."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_hosts import Cluster, cluster
from harness import PROGRAMS
from parted_ranks import ENDING, NAMED_WITHIN_S, RULE

PROGRAM = PROGRAMS / "torch" / "out_of_step.py"
NAMES, SECOND_NETWORK = "host1:1,host2:1", "10.78.0.11:1,10.78.0.12:1"
PASSED = [word for name in ("PATH", "PYTHONPATH", "HVDTRAIN_TEST_BEACON") for word in ("-x", name)]
WAYS = {
    "launch": ["hvdtrain", "launch", "--no-checks", "-H", NAMES],
    "launch, addresses": ["hvdtrain", "launch", "--no-checks", "-H", SECOND_NETWORK],
    "launch, second network": ["hvdtrain", "launch", "--no-checks", "-H", NAMES, "--network", "10.78.0.0/24"],
    "horovodrun": ["horovodrun", "--gloo", "-np", "2", "-H", NAMES],
    "horovodrun, addresses": ["horovodrun", "--gloo", "-np", "2", "-H", SECOND_NETWORK],
    "mpirun": ["mpirun", "-np", "2", "-H", NAMES, *PASSED],
    "mpirun, addresses": ["mpirun", "-np", "2", "-H", SECOND_NETWORK, *PASSED],
}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster(2, networks=2) as c:
        yield c


def check_named(hosts: Cluster, line: list[str], way: str, folder: Path) -> None:
    """Both ranks tell both lines, in time, and nothing is left."""
    if line[0] == "hvdtrain":
        line = [*line, "--log-dir", str(folder / "logs"), "--"]
    env = {"HVDTRAIN_TEST_BEACON": str(folder)}
    done = hosts.run("host1", [*line, sys.executable, PROGRAM, "horovod", way], env=env, timeout_s=150)
    assert done.returncode != 0, done.text
    assert f"rank 0: {RULE}" in done.text and f"rank 1: ended with rank 0: {RULE}" in done.text, done.text
    told = [text for text in done.text.splitlines() if "rank 1: " in text and ENDING[way] in text]
    assert len(told) >= 2, done.text
    parted = max(float(file.read_text()) for file in folder.glob("parted.*"))
    lived = max((folder / str(rank)).stat().st_mtime for rank in range(2)) - parted
    assert lived <= NAMED_WITHIN_S, f"{lived:.1f} s\n{done.text}"
    assert hosts.left_after(10) == []


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["save_on_rank_0", "one_ends_early.atexit"])
@pytest.mark.parametrize("launcher", list(WAYS))
def test_ranks_of_two_hosts_that_part(launcher: str, way: str, hosts: Cluster, tmp_path: Path) -> None:
    check_named(hosts, WAYS[launcher], way, tmp_path)
