"""Models of examples/, as pipelines of one to four stages by every schedule, against the model alone; float64.

Usage: examples.py: a line of JSON for each model. What a model is called with is what the plain script calls it with
first; the reference goes through the micro-batches one by one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hvdtrain.pipeline
from hvdtrain.core.errors import HvdtrainError

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from run import EXAMPLES, plain

NAMES = ("dcgan", "wgan_gp", "sam", "ppo", "moco", "ema", "moe", "seq2seq", "gpt2", "unet")
PASSES = (
    ("1f1b", 1, 3), ("1f1b", 2, 3), ("gpipe", 3, 2), ("zb-h1", 2, 4), ("zb-h1", 4, 3), ("interleaved", 2, 4),
    ("1f1b", 4, 5), ("gpipe", 2, 5), ("zb-h1", 3, 2), ("interleaved", 1, 2),
)  # fmt: skip


class Enough(BaseException):
    """All models of a script were called."""


def first_calls(name: str) -> Iterator[tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Runs a plain script until each of its models was called once; yields names, models, and what they were given."""
    space: dict[str, Any] = {"__name__": "__main__"}
    seen: dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}
    call = nn.Module.__call__

    def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        models = {key: value for key, value in space.items() if isinstance(value, nn.Module) and key != "average"}
        if any("optimizer" in key for key in space):  # all models are there
            seen.update({key: (module, args, kwargs) for key, value in models.items() if value is module})
            if set(seen) == set(models):
                raise Enough
        return call(module, *args, **kwargs)

    with mock.patch.object(nn.Module, "__call__", noted), suppress(Enough):
        exec(compile(plain((EXAMPLES / f"{name}.py").read_text(encoding="utf-8")), name, "exec"), space)
    yield from ((key, *values) for key, values in seen.items())


class Layer(nn.Module):
    """A model that decides by numbers is one layer of another."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        return self.mixture(x)[0]


def loss_of(out: Any, y: Tensor) -> Tensor:
    rows = [
        leaf.reshape(len(leaf), -1).sin().mean(1)
        for leaf in pytree.tree_leaves(dict(out) if isinstance(out, dict) else out)
    ]
    return ((sum(rows) - y) ** 2).mean()


def piece(values: Any, count: int, at: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.tensor_split(count)[at], values)


def left(model: nn.Module) -> dict[str, Tensor]:
    """Gradients and buffers."""
    found = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: buffer.double().clone() for name, buffer in model.named_buffers()}


def compare(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    samples = len(next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)))
    y = torch.randn(samples)
    start = [(buffer, buffer.clone()) for buffer in model.buffers()]
    worst, off, refused, runs = 0.0, 0.0, "", 0
    for schedule, stages, count in PASSES:
        two = {"stages_per_device": 2} if schedule == "interleaved" else {}
        options = {"schedule": schedule, "micro_batches": count, "balance": "memory", "batch_norm": "micro", **two}
        found = []
        for split in (False, True):
            model.zero_grad()
            for buffer, value in start:
                buffer.data.copy_(value)
            if not split:
                loss = 0.0
                for at in range(count):
                    x, named, target = piece((args, kwargs, y), count, at)
                    part = loss_of(model(*x, **named), target) * (len(target) / samples)
                    part.backward()
                    loss += part.item()
            else:
                try:
                    pipe = hvdtrain.pipeline.split(model, args, ["cpu"] * stages, kwargs=kwargs, **options)
                except HvdtrainError as error:
                    refused = str(error).splitlines()[0]
                    break
                loss = pipe.step(args, y, loss_of, kwargs=kwargs).item()
                pipe.close()
                runs += 1
            found.append(left(model) | {"loss": torch.tensor(loss)})
        if len(found) == 2:
            assert set(found[0]) == set(found[1])
            worst = max(worst, *(float((found[1][name] - value).abs().max()) for name, value in found[0].items()))
            moved = [float(value.abs().max()) for name, value in found[0].items() if name.startswith("gradient")]
            off = max(off, *moved)
    return {"difference": worst, "largest": off, "runs": runs, "refused": refused}


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    for name in sys.argv[1:] or NAMES:
        for key, model, args, kwargs in first_calls(name):
            if name == "moe":
                model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), Layer(model), nn.Linear(10, 10))
            if name == "gpt2":
                model.config.use_cache = False
                kwargs = {part: value for part, value in kwargs.items() if part != "labels"}
            torch.manual_seed(1)
            print(json.dumps({"model": f"{name}.{key}", **compare(model.train(), args, kwargs)}), flush=True)


if __name__ == "__main__":
    main()
