"""Which cores a rank has for itself, and how many workers that makes."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from hvdtrain.world import resources
from hvdtrain.world.resources import Allowance, cgroup_quota, own_allowance, share_of, usable_cores, workers_for
from hvdtrain.world.world import World


def ranks(*cores: tuple[int, ...], host: str = "a", quota: float = math.inf) -> list[Allowance]:
    return [Allowance(host, frozenset(its), quota) for its in cores]


@pytest.mark.parametrize(
    ("world", "shares"),
    [
        (ranks((0, 1, 2, 3)), [4]),
        (ranks((0, 1, 2, 3), (0, 1, 2, 3)), [2, 2]),  # both may run anywhere
        (ranks((0, 1), (2, 3)), [2, 2]),  # bound apart: each keeps its own
        (ranks((0, 1, 2), (2,)), [2.5, 0.5]),
        (ranks((0, 1, 2, 3), (0, 1, 2, 3), quota=2), [1, 1]),  # a container's limit
        (ranks((0, 1), host="a") + ranks((0, 1), host="b"), [2, 2]),  # another host's cores are others
    ],
)
def test_shares(world: list[Allowance], shares: list[float]) -> None:
    assert [share_of(rank, world) for rank in range(len(world))] == shares


def test_quota(tmp_path: Path) -> None:
    assert cgroup_quota(tmp_path) == math.inf
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cgroup_quota(tmp_path) == math.inf
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cgroup_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_quota(tmp_path) == math.inf
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("400000\n")
    assert cgroup_quota(tmp_path) == 4


def test_this_process() -> None:
    assert own_allowance().cores == os.sched_getaffinity(0)
    assert 0 < usable_cores(World.solo()) <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("cores", "on_gpu", "workers"),
    [(1, False, 0), (1.9, False, 0), (2, False, 1), (8, False, 2), (200, False, 16),
     (0.5, True, 1), (1, True, 1), (4, True, 3), (6.5, True, 5), (200, True, 16)],
)  # fmt: skip
def test_workers(cores: float, on_gpu: bool, workers: int) -> None:
    assert workers_for(cores, on_gpu=on_gpu) == workers


def test_idle_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(os.cpu_count() or 1)))
    monkeypatch.setattr(resources, "cgroup_quota", lambda: math.inf)
    stat = tmp_path / "stat"
    readings = []
    for line in ("cpu  100 0 50 800 40 0 10 0 0 0", "cpu  160 0 60 820 40 0 20 0 7 0"):
        stat.write_text(f"{line}\ncpu0 1 2 3\n")
        readings.append(resources.core_seconds(stat))
    assert resources.idle_share(*readings) == 0.2  # 20 of 100 ticks
    assert resources.idle_share(readings[0], readings[0]) is resources.idle_share(None, readings[1]) is None
    stat.write_text("no such line")
    assert resources.core_seconds(stat) is None is resources.core_seconds(tmp_path / "none")
    monkeypatch.setattr(resources, "cgroup_quota", lambda: 0.5)
    stat.write_text("cpu  100 0 50 800 40 0 10 0 0 0\n")
    assert resources.core_seconds(stat) is None, "a container that may use a part of the node"
