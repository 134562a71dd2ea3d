"""Logs of runs that tests write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hvdtrain import RunLog, World


def strict(path: Path) -> list[dict[str, Any]]:
    """Parse JSON lines as a strict reader does: NaN and Infinity are not JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def open_log(folder: Path, **kw: Any) -> RunLog:
    options = {"config": {}, "progress": False, "tensorboard": False, **kw}
    return RunLog(folder, World.solo(seed=1), **options)


def one_step(log: RunLog, step: int, loss: float | None = 1.0, **seconds: float) -> None:
    log.step(step=step, epoch=0, samples_seen=32 * step, loss=loss, lr=0.1, samples=32, seconds=seconds)
