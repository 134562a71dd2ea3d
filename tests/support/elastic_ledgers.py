"""What the processes of an elastic training have noted: each in a file of its own, FOLDER/ledger.PID."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

Updates = dict[int, tuple[int, list[int]]]


def trained_in(folder: Path) -> tuple[Updates, list[float]]:
    """Return of each update its epoch and the samples of all that took part in it; and when each was done, by each.

    A line is [kind, epoch, update, formation, samples, seconds]; an update that was "applied" is made of what those had
    "took" part in that were in the same formation.
    """
    times_s: list[float] = []
    took: dict[tuple[int, int], list[int]] = defaultdict(list)  # by update and formation
    applied: dict[int, tuple[int, int]] = {}
    for file in folder.glob("ledger.*"):
        formation = {}
        for line in file.read_text().splitlines():
            kind, epoch, step, now, ids, at_s = json.loads(line)
            if kind == "took":
                formation[step] = now
                took[step, now] += ids
            elif step in formation:
                times_s.append(at_s)
                applied[step] = epoch, formation[step]
    updates = {step: (epoch, took[step, formation]) for step, (epoch, formation) in sorted(applied.items())}
    return updates, times_s


def noted_in(folder: Path, kind: str, epoch: int) -> list[int]:
    """Return the samples of all lines of that kind and epoch."""
    lines = [json.loads(line) for file in folder.glob("ledger.*") for line in file.read_text().splitlines()]
    return [number for its, of, _, _, ids, _ in lines if (its, of) == (kind, epoch) for number in ids]
