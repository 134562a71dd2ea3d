"""Split models against the unsplit ones, float64: gradients, loss, buffers, outputs, generators.

Usage: parity.py [--device DEVICE] [MODEL ...]: a line of JSON for each model.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from models import BATCH, CLASSES, MODELS
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.pipeline.plan.schedule import micro_batch_sizes
from hvdtrain.pipeline.run.runtime import Pipeline
from hvdtrain.pipeline.run.stage import build_stages
from hvdtrain.pipeline.trace.segments import Segment, segments

LOSS = nn.CrossEntropyLoss()


@dataclass(frozen=True)
class Combination:
    stages: int
    micro_batches: int
    schedule: Any
    remat: Any
    batch_norm: Any


# every stage count, micro-batch count, schedule and recomputation occurs, the demanding ones first
CHOICE = (
    Combination(2, 3, "1f1b", "all", "micro"),
    Combination(3, 7, "gpipe", "except_last", "batch"),
    Combination(4, 5, "1f1b", "never", "batch"),
    Combination(1, 7, "1f1b", "except_last", "batch"),
    Combination(2, 1, "gpipe", "all", "batch"),
    Combination(4, 2, "gpipe", "never", "micro"),
)
# those that take longest
FEWER = {"densenet121": 3, "resnet18": 3}


@dataclass(frozen=True)
class Outcome:
    loss: float
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def unsplit(model: nn.Module, x: tuple[Tensor, ...], y: Tensor, micro_batches: int) -> tuple[Outcome, Outcome]:
    """The model alone, one micro-batch after the other. Returns what it leaves behind: as it is, and with running
    statistics as one look at the whole batch moves them, found from the inputs of its batch-norm layers."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    looked: dict[str, list[Tensor]] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, name=name: looked.setdefault(name, []).append(args[0].detach()))
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm)
    ]
    momenta = {name: layer.momentum for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
    sizes = micro_batch_sizes(BATCH, micro_batches)
    total = 0.0
    for *xs, target in zip(*(argument.split(sizes) for argument in (*x, y)), strict=True):
        loss = LOSS(model(*xs), target) * (len(target) / BATCH)
        loss.backward()
        total += float(loss.detach())
    for hook in hooks:
        hook.remove()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    micro = {name: buffer.clone() for name, buffer in model.named_buffers()}
    whole = dict(micro)
    for name, seen in looked.items():
        values = torch.cat(seen).transpose(0, 1).flatten(1)
        for buffer, value in (("running_mean", values.mean(1)), ("running_var", values.var(1))):
            whole[f"{name}.{buffer}"] = before[f"{name}.{buffer}"].lerp(value, momenta[name])
        whole[f"{name}.num_batches_tracked"] = before[f"{name}.num_batches_tracked"] + 1
    model.zero_grad()
    return Outcome(total, gradients, micro), Outcome(total, gradients, whole)


def split_evenly(count: int, stages: int) -> list[int]:
    ends = [count * k // stages for k in range(stages + 1)]
    return [b - a for a, b in itertools.pairwise(ends)]


def device() -> torch.device:
    return torch.device(sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu")


def pipeline(model: nn.Module, parts: Sequence[Segment], combination: Combination) -> Pipeline:
    sizes = split_evenly(len(parts), combination.stages)
    stages = build_stages(model, parts, sizes, [device()] * combination.stages)
    return Pipeline(
        model, stages, segments=parts, micro_batches=combination.micro_batches, schedule=combination.schedule,
        remat=combination.remat, batch_norm=combination.batch_norm,
    )  # fmt: skip


def gap(received: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference, relative to the tensor's largest value where that is above 1."""
    if set(received) != set(wanted):
        return float("inf")
    return max(
        (
            float(((received[n] - w).abs().max() / max(1.0, float(w.abs().max()))))
            for n, w in wanted.items()
            if w.numel()
        ),
        default=0.0,
    )


class Subject:
    """One model with its references."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        make, inputs = MODELS[name]
        self.model = make().double().to(device()).train()
        self.x = tuple((t.double() if t.is_floating_point() else t).to(device()) for t in inputs())
        self.y = torch.randint(CLASSES, (BATCH,)).to(device())
        self.start = [(buffer, buffer.clone()) for buffer in self.model.buffers()]  # parameters do not change
        self.parts = segments(self.model, self.x)
        self.references: dict[int, tuple[Outcome, Outcome]] = {}

    def reference(self, combination: Combination) -> Outcome:
        m = combination.micro_batches
        if m not in self.references:
            self.reset()
            self.references[m] = unsplit(self.model, self.x, self.y, m)
        return self.references[m][combination.batch_norm == "batch"]

    def reset(self) -> None:
        for buffer, value in self.start:
            buffer.copy_(value)
        self.model.zero_grad()

    def difference(self, combination: Combination) -> tuple[float, float, float]:
        """Of loss, gradients and buffers; infinite where the generator was touched."""
        wanted = self.reference(combination)
        self.reset()
        pipe = pipeline(self.model, self.parts, combination)
        state = torch.get_rng_state()
        loss = float(pipe.step(self.x, self.y, LOSS))
        gradients = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
        off = gap(gradients, wanted.gradients)
        if not torch.equal(state, torch.get_rng_state()):
            off = float("inf")
        return abs(loss - wanted.loss), off, gap(dict(pipe.named_buffers()), wanted.buffers)

    def outputs(self) -> float:
        """The pipelined forward pass in evaluation, against the unsplit one."""
        self.reset()
        pipe = pipeline(self.model, self.parts, Combination(3, 7, "gpipe", "never", "batch")).eval()
        with torch.no_grad():
            wanted = self.model(*self.x)
            off = float((pipe(*self.x) - wanted).abs().max() / wanted.abs().max())
        pipe.train()
        return off


def main() -> None:
    names = [name for name in sys.argv[1:] if name in MODELS] or list(MODELS)
    for name in names:
        subject = Subject(name)
        combinations = CHOICE[: FEWER.get(name)]
        worst = [0.0, 0.0, 0.0]
        for combination in combinations:
            found = subject.difference(combination)
            if max(found) > 1e-10:
                print(json.dumps({"model": name, "bad": str(combination), "found": found}), flush=True)
            worst = [max(pair) for pair in zip(worst, found, strict=True)]
        line = {
            "model": name, "segments": len(subject.parts), "combinations": len(combinations), "loss": worst[0],
            "gradients": worst[1], "buffers": worst[2], "outputs": subject.outputs(),
        }  # fmt: skip
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
