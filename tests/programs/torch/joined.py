"""What `hvt.whole` makes of values of every form on three ranks, of which rank r has r + 1 samples; nobody counts them.

usage: joined.py OUT.json
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, NamedTuple

import numpy as np
import torch
from cases import report

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import HvdtrainError


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Held:
    first: Any
    second: Any


def values(rank: int) -> dict[str, Any]:
    """Rows of rank r have the number r."""
    n = rank + 1
    rows = torch.full((n, 2), float(rank))
    boxes = [{"boxes": torch.full((k + 1, 4), 10.0 * rank + k), "name": f"{rank}-{k}"} for k in range(n)]
    return {
        "rows": rows, "bfloat16": rows.bfloat16(), "bool": rows > 0, "int8": rows.to(torch.int8),
        "complex": torch.complex(rows, rows), "array": np.full((n, 3), rank), "texts": [f"{rank}{k}" for k in range(n)],
        "tuple of texts": tuple(f"{rank}{k}" for k in range(n)), "numbers": [10 * rank + k for k in range(n)],
        "boxes": boxes, "uneven": [torch.full((k + 2,), float(rank)) for k in range(n)],
        "parts": {"pair": (rows, rows + 1), "maps": [rows, 2 * rows], "none": None},
        "named": Pair(rows, rows), "held": Held(rows, rows), "one number": torch.tensor(2.5), "text": "same",
        "empty on rank 0": torch.zeros(2 * rank, 3), "no items": [],
    }  # fmt: skip


def refused(rank: int) -> dict[str, Any]:
    rows = torch.zeros(rank + 1, 2)
    return {
        "shapes": torch.zeros(rank + 1, 2 + rank), "types": rows.double() if rank else rows,
        "numbers": torch.tensor(float(rank)), "sparse": torch.eye(3).to_sparse(), "object": object(),
        "kinds": rows if rank else None, "plain": rank, "names": {"a" if rank else "b": rows}, "set": {1, 2},
    }  # fmt: skip


def shown(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = torch.view_as_real(value) if value.is_complex() else value
        return [str(value.dtype), value.float().tolist()]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (Pair, Held)):
        return [type(value).__name__, shown(value.first), shown(value.second)]
    if isinstance(value, dict):
        return {name: shown(part) for name, part in value.items()}
    return [type(value).__name__, *map(shown, value)] if isinstance(value, (list, tuple)) else value


def main() -> None:
    with hvdtrain.init("torch") as world:
        found = {name: shown(hvt.whole(value)) for name, value in values(world.rank).items()}
        errors = {}
        for name, value in refused(world.rank).items():
            try:
                errors[name] = shown(hvt.whole(value))
            except HvdtrainError as error:
                errors[name] = f"{type(error).__name__}: {error.received}"
        report(world, (found, errors), sys.argv[1])


if __name__ == "__main__":
    main()
