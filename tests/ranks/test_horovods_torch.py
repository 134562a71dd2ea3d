"""Horovod for PyTorch, as the recipe's wheel has it: what its patches mend that one process alone cannot show."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks

EXACT = 1e-10


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Each rank's, after 20 starts."""
    folder = tmp_path_factory.mktemp("torch")
    run_ranks([PROGRAMS / "horovod" / "torch_state.py", folder], 2, timeout_s=200).check()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_an_optimizers_broadcast_is_no_step(found: list[dict[str, Any]]) -> None:
    """Adam's first step was its second, and weights shrank on ranks that had no state yet."""
    for one in found:
        gaps = {name: gap for name, gap in one.items() if name not in ("not sent", "forgotten")}
        assert len(gaps) == 6 and max(gaps.values()) <= EXACT, one


def test_without_the_broadcast_it_differs(found: list[dict[str, Any]]) -> None:
    assert max(one["not sent"] for one in found) > 1e-5


def test_the_rendezvous_forgets_each_group_when_all_of_it_have_met(found: list[dict[str, Any]]) -> None:
    """Else who starts again reads old addresses: connections are refused, or never answered."""
    assert all(one["forgotten"] == [200, 404, 404] for one in found)
