"""The small CIFAR-10 example: it runs, it learns, it goes on, and it stays short enough to be read."""

from __future__ import annotations

from harness import REPOSITORY

from hvdtrain import torch_cifar10


def test_it_stays_an_example() -> None:
    lines = (REPOSITORY / "hvdtrain" / "torch_cifar10.py").read_text().splitlines()
    assert len(lines) <= 110
    assert 15 <= sum("# +" in line for line in lines) <= 25  # what a reader has to add to a script of his own


def test_flags_are_few() -> None:
    flags = {flag for action in torch_cifar10.parser()._actions for flag in action.option_strings}
    assert flags == {
        "-h", "--help", "--data", "--epochs", "--per-rank-batch", "--lr", "--amp", "--engine", "--run-dir", "--resume",
    }  # fmt: skip
