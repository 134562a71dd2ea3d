"""Runs the functions ``case_...(world)`` of a program on every rank, and says which passed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

import hvdtrain
from hvdtrain.core.errors import HvdtrainError


def run_cases(namespace: Mapping[str, Any], world: hvdtrain.World) -> int:
    """Runs all cases, in order; returns how many failed on some rank. A failed one must not leave a rank waiting."""
    failed = 0
    for name, case in list(namespace.items()):
        if not name.startswith("case_"):
            continue
        problem = ""
        try:
            torch.manual_seed(11 + world.rank)
            case(world)
        except Exception:
            problem = traceback.format_exc()
            print(problem, file=sys.stderr, flush=True)  # the others may not come to the gather
        problems = [text for text in world.gather(problem) if text]
        failed += bool(problems)
        if world.is_main:
            print(f"FAILED {name}\n" + "\n".join(problems) if problems else f"passed {name}", flush=True)
    return failed


@contextmanager
def refused(*parts: str, kind: type[HvdtrainError] = HvdtrainError) -> Iterator[None]:
    """The block must raise `kind`, with all `parts` in its text."""
    try:
        yield
    except kind as error:
        missing = [part for part in parts if part not in str(error)]
        assert not missing, f"{missing} not in:\n{error}"
        assert error.rule and (error.remedy or error.received), f"no remedy:\n{error}"
    else:
        raise AssertionError(f"not refused: {parts}")


def main(namespace: Mapping[str, Any]) -> None:
    """usage: program.py [ENGINE]"""
    torch.set_num_threads(1)
    with hvdtrain.init("torch", engine=sys.argv[1] if len(sys.argv) > 1 else "auto", device="cpu", seed=5) as world:
        failed = run_cases(namespace, world)
    sys.exit(3 if failed else 0)
