"""What a pipeline on GPUs would do, with recorded streams, and what lasts from step to step: a line of JSON a check."""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import threading
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from ending_threads import threads_left
from recorded_streams import CPU, Recorder, gpu
from torch import Tensor, nn

import hvdtrain.pipeline
from hvdtrain.pipeline.plan.schedule import REMATS, SCHEDULES
from hvdtrain.pipeline.run.runtime import Pipeline
from hvdtrain.pipeline.run.worker import StageCall
from hvdtrain.pipeline.values.places import Places

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # for so little work more would only wait for each other
WIDTH, BATCH = 4, 8
MSE = nn.MSELoss()


class Block(nn.Module):
    """Two values cross each cut, one of them unchanged; something is drawn, something moves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, early = both
        return self.drop(torch.tanh(self.norm(self.linear(x)))) + early, early


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        both = self.first(x), shift
        for block in self.blocks:
            both = block(both)
        return both[0]


def split(stages: int, blocks: int = 4, micro_batches: int = 3) -> Pipeline:
    torch.manual_seed(1)
    pipe = hvdtrain.pipeline.split(
        Model(blocks).train(), example(), ["cpu"] * stages, balance="memory", micro_batches=micro_batches,
        schedule="gpipe",
    )  # fmt: skip
    pipe.proofs = False
    return pipe


def on(pipe: Pipeline, *devices: torch.device) -> Pipeline:
    """Works there from now on."""
    pipe.close()
    pipe._places = Places(devices)
    return pipe


def example() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


RUN = StageCall.run


def step(pipe: Pipeline, recorder: Recorder, data: torch.device, *, watch: bool = True) -> None:
    """Inputs, targets and factor have just been made on other devices than those that need them.

    Args:
        watch: record every operation, not only streams and copies.
    """

    def recorded(call: StageCall) -> Any:
        with recorder if watch else nullcontext():
            return RUN(call)

    with recorder.patched(), mock.patch.object(StageCall, "run", recorded):
        x, shift = example()
        x, shift = recorder.put(x, data, "x"), recorder.put(shift, CPU, "shift")
        y = recorder.put(torch.ones(BATCH, WIDTH), data, "y")
        factor = recorder.put(torch.tensor(0.5), data, "the factor")
        pipe.step((x, shift), y, MSE, factor=factor)


def order() -> dict[str, Any]:
    """For every layout and schedule: the streams are in order, and the gradients those of the CPU."""
    problems: dict[str, list[str]] = {}
    worst, cases = 0.0, 0
    others = itertools.cycle(itertools.product(REMATS, (CPU, gpu(5), gpu(1))))
    for gpus in ((0,), (1, 0), (0, 0, 1), (0, 1, 2, 3)):
        pipe, recorder = split(len(gpus)), Recorder()
        for schedule in SCHEDULES:
            (pipe.remat, data), pipe.schedule = next(others), schedule
            gradients = []
            for places in ([CPU] * len(gpus), [gpu(index) for index in gpus]):
                on(pipe, *places)
                pipe.zero_grad()
                torch.manual_seed(3)
                if places[0] == CPU:
                    pipe.step(example(), torch.ones(BATCH, WIDTH), MSE, factor=0.5)
                else:
                    step(pipe, recorder, data)
                gradients.append([p.grad for p in pipe.parameters()])
            worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True)))
            cases += 1
            if recorder.problems:
                problems[f"{gpus} {schedule} {pipe.remat} {data}"] = recorder.problems[:3]
                recorder.problems.clear()
    return {"cases": cases, "problems": problems, "difference": worst}


def lasting() -> dict[str, Any]:
    """200 steps: threads, streams and memory stay as they are after a few."""
    recorder, gpus, cpus = Recorder(), on(split(2, 1, 2), gpu(0), gpu(1)), split(2, 1, 2)

    def now() -> list[Any]:
        gc.collect()
        tensors = sum(issubclass(type(one), Tensor) for one in gc.get_objects())
        names = sorted(thread.native_id or 0 for thread in threading.enumerate())
        return [names, len(recorder.streams), tensors, len(recorder.memory)]

    seen = []
    for steps in (10, 200):
        for _ in range(steps):
            cpus.step(example(), torch.ones(BATCH, WIDTH), MSE)
            step(gpus, recorder, gpu(5), watch=False)
        recorder.look_at_what_is_gone()
        seen.append(now())
    before = threading.active_count()
    cpus.close()
    return {
        "same": seen[0] == seen[1], "threads": before, "streams": seen[0][1], "left": threading.active_count(),
        "problems": recorder.problems[:3], "waits": recorder.waits > 0,
    }  # fmt: skip


def ends() -> dict[str, Any]:
    """Threads end with the pipeline, which a child process by fork does not have."""
    pipe = split(2)

    def once(pipe: Pipeline = pipe) -> float:
        pipe.zero_grad()
        return float(pipe.step(example(), torch.ones(BATCH, WIDTH), MSE))

    once()
    alive = threading.active_count()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        os.write(writing, f"{once() > 0} {threading.active_count()}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    received = os.read(reading, 100).decode()
    again = once() > 0 and threading.active_count() == alive
    pipe.close()
    closed = threading.active_count()
    once()
    once.__defaults__ = None
    circle: list[Any] = [pipe]
    circle.append(circle)
    del pipe, circle
    with mock.patch("threading.Thread.join") as waited:  # the collector may have interrupted code that holds any lock
        gc.collect()
    return {
        "alive": alive, "child": received, "again": again, "closed": closed, "waited": waited.called,
        "gone": threads_left(),
    }  # fmt: skip


if __name__ == "__main__":
    for check in (order, lasting, ends):
        if len(sys.argv) == 1 or check.__name__ in sys.argv:
            print(json.dumps({"check": check.__name__, **check()}), flush=True)
