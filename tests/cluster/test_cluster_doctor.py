"""`hvdtrain doctor` on clusters that are really broken, one way each: named, with its fix, in under 10 s.

Everything else must be left unsaid: a test compares all that was found, not only what it looks for.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from cluster_breakages import BROKEN, CORES, HOSTS, shared
from cluster_hosts import Cluster, cluster
from harness import REPOSITORY

LIMIT_S = 10.0


@dataclass(frozen=True)
class Report:
    """What the doctor said: `found` is {id: hosts} of everything but notes."""

    code: int
    data: dict
    seconds: float

    @property
    def found(self) -> dict[str, list[str]]:
        return {item["id"]: item["hosts"] for item in self.data["findings"] if item["severity"] != "note"}

    def of(self, id_: str) -> dict:
        return next(item for item in self.data["findings"] if item["id"] == id_)


def examine(c: Cluster, *flags: str | Path, hosts: str = HOSTS, cwd: Path = REPOSITORY) -> Report:
    """Run the doctor on host1."""
    command = [sys.executable, "-m", "hvdtrain", "doctor", "-H", hosts, "--json", *flags]
    done = c.run("host1", command, cwd=cwd)
    assert done.returncode in (0, 1, 2) and done.out.startswith("{"), done.text
    return Report(done.returncode, json.loads(done.out), done.seconds)


@pytest.fixture(scope="module")
def c() -> Iterator[Cluster]:
    with cluster(3) as made:
        shared(made).mkdir(parents=True)
        (made.folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (made.folder / "python").chmod(0o755)
        yield made
        assert made.left_after(5) == []


def test_healthy(c: Cluster) -> None:
    """Everything asked: nothing to say."""
    fast = examine(c, "--fast")
    assert (fast.found, fast.code) == ({}, 0)
    assert fast.data["seconds"] < 5, "what hvdtrain launch waits for at every start"
    report = examine(c, hosts="host1:1,host2:1")
    assert report.data["findings"] == [] and report.code == 0
    network = report.data["network"]
    assert all(flow["bytes"] > 0 and flow["seconds"] > 0 for flow in network["flows"]) and network["flows"]
    assert sum(len(replies) for replies in network["reach"].values()) == 2
    assert report.seconds < LIMIT_S / 2


@pytest.mark.thorough
def test_this_machine(c: Cluster) -> None:
    """Without -H there is no ssh, and nothing but this machine."""
    with c.sshd("host1", "stop"):
        done = c.run("host1", [sys.executable, "-m", "hvdtrain", "doctor"]).check()
    assert "nothing found: 1 host(s), 1 rank(s)" in done.out


# those that spoil nothing for one another are examined at once
ALONE = [
    "no_route", "older_python", "no_python", "same_machine_twice", "run_dir_read_only",
    "run_dir_not_shared", "full_disk", "no_such_folder", "no_common_network", "slow_link",
]  # fmt: skip
SAME_PLACE = (
    "no_route",
    "slow_link",
    "run_dir_read_only",
    "no_such_folder",
    "older_python",
    "same_machine_twice",
)  # as others find
TOGETHER = [
    ["sshd_stopped", "unknown_host_key"],
    ["link_cut", "changed_host_key"],
    ["no_key", "no_horovod", "no_hvdtrain"],
    ["other_torch", "mpi_library_missing", "other_sources", "duplicate_names"],
    ["closed_port", "horovod_without_mpi", "small_shared_memory"],
]


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(ways, id="+".join(ways), marks=[pytest.mark.thorough] if ways[0] in SAME_PLACE else [])
        for ways in [*([way] for way in ALONE), *TOGETHER]
    ],
)
def test_broken(c: Cluster, ways: list[str]) -> None:
    broken = [BROKEN[way] for way in ways]
    one = broken[0]
    places = {"folder": str(c.folder), "shared": str(shared(c))}
    with ExitStack() as stack:
        for each in broken:
            assert (each.flags, each.hosts, each.cwd) == (one.flags, one.hosts, one.cwd)
            stack.enter_context(each.what(c))
        flags = [flag.format(**places) for flag in one.flags]
        report = examine(c, *flags, hosts=one.hosts, cwd=Path(one.cwd.format(**places)))
    found = {id_: hosts for each in broken for id_, hosts in each.found.items()}
    assert report.found == found, json.dumps(report.data["findings"], indent=1)
    assert report.code == max(each.code for each in broken)
    for each in broken:
        finding = report.of(next(iter(each.found)))
        assert each.fix in finding["fix"] and finding["what"] and finding["why"]
    assert report.seconds < LIMIT_S


def test_every_way_to_break_is_tried() -> None:
    assert sorted([*ALONE, *sum(TOGETHER, [])]) == sorted(BROKEN)


def test_one_other_host(c: Cluster) -> None:
    """A network of one host is none."""
    report = examine(c, hosts="host2:1")
    assert report.found == {} and report.data["network"]["reach"] == {}


def test_ctrl_c_ends_it_everywhere(c: Cluster) -> None:
    with c.sshd("host3", "hang"):
        command = [sys.executable, "-m", "hvdtrain", "doctor", "-H", HOSTS, "--timeout", "60"]
        process = c.popen("host1", command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 20
            while not c.pids("host2"):  # until the probe is there
                assert time.monotonic() < deadline, c.running()
            process.send_signal(signal.SIGINT)
            started = time.monotonic()
            assert process.wait(20) == 130
            assert time.monotonic() - started < 5, "it waited for a host that hangs"
        finally:
            process.kill()
            process.wait()
        assert psutil.wait_procs(c.pids("host2"), timeout=5)[1] == []


def test_several_things_at_once(c: Cluster) -> None:
    """Each is told, in one go; a host that hangs costs a time-out, not more; the report is one for people."""
    with c.sshd("host3", "hang"):
        hosts = f"host1:1,host2:{CORES + 1},host3:1,nowhere:1"
        done = c.run("host1", [sys.executable, "-m", "hvdtrain", "doctor", "-H", hosts])
    assert done.returncode == 2 and done.seconds < LIMIT_S
    heads = [line.split() for line in done.out.splitlines() if line.startswith(("ERROR", "WARNING"))]
    assert [severity for severity, *_ in heads] == ["ERROR"] * 2 + ["WARNING"], "the worst come first"
    assert {id_.rstrip(":") for _, id_, *_ in heads} == {"ssh-timeout", "ssh-unknown-name", "slots-over-cores"}
    assert done.out.splitlines()[-1].startswith("2 error(s), 1 warning(s): 4 host(s)")
    assert done.out.count("  fix:") == 3
    assert not c.left_after(5)
