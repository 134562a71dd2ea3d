"""Tuning split models: a JSON line a case."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
from ending_threads import threads_left
from torch import nn

import hvdtrain.pipeline
from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.tuning import predict
from hvdtrain.pipeline.tuning.search_size import tune

PASS_S, SAMPLE_S = 0.002, 0.002  # of a forward pass, and besides for each sample; backward twice


class Sleep(torch.autograd.Function):
    """The work of a device that nobody else needs: it takes its time, however busy the cores are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    def __init__(self, pass_s: float, sample_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.pass_s, self.sample_s = pass_s, sample_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x * self.weight, self.pass_s + self.sample_s * len(x))


def sleepers(
    batch: int, *, pass_s: float = PASS_S, sample_s: float = SAMPLE_S
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    x = torch.randn(batch, 4)
    model = nn.Sequential(Sleeper(pass_s, sample_s), Sleeper(pass_s, sample_s))
    pipe = hvdtrain.pipeline.split(model, x, "cpu,cpu", micro_batches=1, balance=[1, 1], modules=["0", "1"])
    return pipe, x, torch.randn(batch, 4)


def norms(batch: int, pixels: int = 1) -> tuple[Any, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.3), nn.Conv2d(4, 3, 1), nn.Flatten())
    x = torch.randn(batch, 2, pixels, pixels)
    segments = len(hvdtrain.pipeline.split(model, x, "cpu", micro_batches=1, balance="memory").segments)
    pipe = hvdtrain.pipeline.split(model, x, "cpu,cpu", micro_batches=2, balance=[2, segments - 2])
    return pipe, x, torch.randn(batch, 3 * pixels * pixels)


mse = nn.functional.mse_loss


def does_not_pay() -> dict[str, Any]:
    """So many micro-batches cost more than the overlap brings."""
    pipe, x, y = sleepers(8, pass_s=0.005, sample_s=0.0)
    tuning = tune(pipe, x, y, mse, candidates=[8])
    return {"verdict": tuning.verdict, "pays": tuning.split_pays, "one_is_faster": tuning.one_is_faster}


def state(pipe: Any) -> list[torch.Tensor]:
    grads = [p.grad for p in pipe.parameters()]
    return [t.clone() for t in (*pipe.state_dict().values(), *grads, torch.get_rng_state())]


def left_alone() -> dict[str, Any]:
    pipe, x, y = norms(8, pixels=4)
    pipe.schedule = "gpipe"
    pipe.step(x, y, mse)
    before, same_objects = state(pipe), [p.grad for p in pipe.parameters()]
    tune(pipe, x, y, mse, budget_s=0.01)
    after = state(pipe)
    found = {
        "equal": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "objects": all(p.grad is g for p, g in zip(pipe.parameters(), same_objects, strict=True)),
        "settings": [pipe.proofs, pipe.schedule],
    }
    pipe.step(x, y, mse)
    found["a step changes it"] = sum(not torch.equal(a, b) for a, b in zip(before, state(pipe), strict=True))
    return found


def too_few_samples() -> dict[str, Any]:
    """Batch-norm over a single value cannot be trained."""
    pipe, x, y = norms(6)
    tuning = tune(pipe, x, y, mse, candidates=[3, 6])
    failed = {str(count): why for count, why in tuning.failed.items()}
    return {"best": tuning.best.micro_batches, "set": pipe.micro_batches, "failed": failed}


def nothing_runs() -> dict[str, Any]:
    pipe, x, y = sleepers(4)

    def broken(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ValueError("this loss is broken")

    try:
        tune(pipe, x, y, broken)
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "micro_batches": pipe.micro_batches}
    return {}


def does_not_fit() -> dict[str, Any]:
    """As if no device had the memory for a whole model."""
    pipe, x, y = sleepers(6)

    class Full(nn.Module):
        def __deepcopy__(self, memo: Any) -> Any:
            raise torch.OutOfMemoryError("no memory for a copy")

    vars(pipe.module)["full"] = Full()  # past nn.Module: no part of it
    tuning = tune(pipe, x, y, mse, candidates=[2])
    return {"verdict": tuning.verdict, "pays": tuning.split_pays, "single_s": tuning.single_s}


def refusals() -> dict[str, Any]:
    pipe, x, y = sleepers(4)
    try:
        tune(pipe, x, y, mse, candidates=[5])
    except ConfigError as error:
        return {"candidates": str(error)}
    return {}


CASES: list[Callable[[], dict[str, Any]]] = [
    does_not_pay, left_alone, too_few_samples, nothing_runs, does_not_fit, refusals,
]  # fmt: skip

if __name__ == "__main__":
    predict.ROUNDS = 1  # stages that sleep take as long every time
    for case in CASES:
        found = {"case": case.__name__, **case()}
        print(json.dumps(found | {"threads": threads_left()}), flush=True)
