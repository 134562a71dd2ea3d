"""Runs examples on PyTorch: see run.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from run import main


def run(space: dict[str, Any], file: Path, code: Any) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    exec(code, space)
    models = {name: value for name, value in space.items() if isinstance(value, torch.nn.Module)}
    weights = {f"{name}.{key}": value for name in sorted(models) for key, value in models[name].state_dict().items()}
    torch.save(weights, file)


if __name__ == "__main__":
    main("torch", run)
