"""Models of examples/, as pipelines of one to four stages by every schedule, against the model alone; float64.

Usage: examples.py: a line of JSON for each model. What a model is called with is what the plain script calls it with
first; the reference goes through the micro-batches one by one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
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


def alone(model: nn.Module, given: tuple[Any, Any], y: Tensor, count: int) -> float:
    """The loss of the model over micro-batches, one after the other."""
    total = 0.0
    for at in range(count):
        args, kwargs, target = piece((*given, y), count, at)
        part = loss_of(model(*args, **kwargs), target) * (len(target) / len(y))
        part.backward()
        total += part.item()
    return total


def split_up(model: nn.Module, given: tuple[Any, Any], y: Tensor, stages: int, **options: Any) -> float:
    args, kwargs = given
    pipe = hvdtrain.pipeline.split(model, args, ["cpu"] * stages, kwargs=kwargs, **options)
    loss = pipe.step(args, y, loss_of, kwargs=kwargs).item()
    pipe.close()
    return loss


def compare(model: nn.Module, *given: Any) -> dict[str, Any]:
    samples = len(next(leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)))
    y = torch.randn(samples)
    start = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def outcome(run: Callable[..., float], *how: Any, **options: Any) -> dict[str, Tensor]:
        model.zero_grad()
        for buffer, value in start:
            buffer.data.copy_(value)
        return {"loss": torch.tensor(run(model, given, y, *how, **options)), **left(model)}

    differences, largest, refused = [], 0.0, ""
    for schedule, stages, count in PASSES:
        options = {"schedule": schedule, "micro_batches": count, "balance": "memory", "batch_norm": "micro"}
        options["stages_per_device"] = 1 + (schedule == "interleaved")
        wanted = outcome(alone, count)
        largest = max(largest, *(float(value.abs().max()) for name, value in wanted.items() if "gradient" in name))
        try:
            found = outcome(split_up, stages, **options)
        except HvdtrainError as error:
            refused = str(error).splitlines()[0]
            continue
        assert set(found) == set(wanted)
        differences.append(max(float((found[name] - value).abs().max()) for name, value in wanted.items()))
    return {"difference": max(differences), "largest": largest, "runs": len(differences), "refused": refused}


def refusal(model: nn.Module, args: tuple[Any, ...]) -> str:
    try:
        hvdtrain.pipeline.split(model, args, ["cpu"] * 2)
    except HvdtrainError as error:
        return str(error)
    return ""


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    for name in sys.argv[1:] or NAMES:
        for key, model, args, kwargs in first_calls(name):
            if name == "moe":
                print(json.dumps({"by numbers": refusal(model, args)}), flush=True)
                model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), Layer(model), nn.Linear(10, 10))
            if name == "gpt2":
                model.config.use_cache = False
                kwargs = {part: value for part, value in kwargs.items() if part != "labels"}
            torch.manual_seed(1)
            print(json.dumps({"model": f"{name}.{key}", **compare(model.train(), args, kwargs)}), flush=True)


if __name__ == "__main__":
    main()
