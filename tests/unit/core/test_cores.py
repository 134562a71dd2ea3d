"""Which cores a rank has for itself, and how many workers that makes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hvdtrain.world.resources import Allowance, cgroup_quota, share_of, workers_for


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


@pytest.mark.parametrize(
    ("cores", "on_gpu", "workers"),
    [(1, False, 0), (1.9, False, 0), (2, False, 1), (8, False, 2), (200, False, 16),
     (0.5, True, 1), (1, True, 1), (4, True, 3), (6.5, True, 5), (200, True, 16)],
)  # fmt: skip
def test_workers(cores: float, on_gpu: bool, workers: int) -> None:
    assert workers_for(cores, on_gpu=on_gpu) == workers
