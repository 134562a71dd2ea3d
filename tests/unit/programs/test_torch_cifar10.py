"""The small CIFAR-10 example: it runs, it learns, it goes on, and it stays short enough to be read."""

from __future__ import annotations

from harness import REPOSITORY


def test_it_stays_an_example() -> None:
    lines = (REPOSITORY / "hvdtrain" / "torch_cifar10.py").read_text().splitlines()
    assert len(lines) <= 110
    assert 15 <= sum("# +" in line for line in lines) <= 25  # what a reader has to add to a script of his own
