"""Ranks come and go: `elastic.py OUT DATA ACCUMULATE EPOCHS UPDATES_PER_S [FORMATION.RANK:UPDATE:SPOT[:loop] ...]`.

In that formation that rank kills itself (SIGKILL), or loops for ever, when so many updates are done, at a spot: at a
barrier with a "batch" at hand, before "backward", "in" it (half of the gradients are there), before "step", "after"
it, or in "evaluate", "gather", "save" or "head" (what is collective before the first batch of an epoch); at "leave" it
asks all ranks to meet anew after this update, as the launcher does where a new one waits. Each process leaves a ledger
in OUT: what it took part in, and what was applied; rank 0 of the end leaves the weights.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.comm import elastic

SLOW_S = 0.2
SAMPLES, CLASSES, FEATURES, PER_RANK, BASE, GAMMA, DECAY = 150, 3, 6, 4, 0.05, 0.995, 0.9


def samples() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, labels and numbers."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    y = (x @ torch.randn(FEATURES, CLASSES, generator=generator, dtype=torch.float64)).argmax(1)
    return x, y, torch.arange(SAMPLES)


def build() -> tuple[nn.Sequential, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=BASE)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)


class Average:
    """Of the weights, taken after each update."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def update(self, model: nn.Module) -> None:
        for name, tensor in model.state_dict().items():
            self.values[name] = DECAY * self.values[name] + (1 - DECAY) * tensor

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = {name: tensor.clone() for name, tensor in state.items()}


class Numbered(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return zip(*samples(), strict=True)


class Killed:
    """When this process kills itself."""

    def __init__(self, todo: list[str], world: hvdtrain.World) -> None:
        parts = [one.split(":") for one in todo]
        self._todo, self._world = {tuple(its[:3]): its[3:] for its in parts}, world
        self.updates = 0

    def at(self, spot: str) -> None:
        line = elastic.line()
        place = f"{line.formation if line is not None else 0}.{self._world.rank}"
        if (what := self._todo.get((place, str(self.updates), spot))) is not None:
            while what:
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        if line is not None and spot == "backward" and (place, str(self.updates), "leave") in self._todo:
            line.asked_to_leave = line.formation


class Counted(nn.Module):
    """Passes on, and calls back when half of the backward pass is done."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self._then = then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: self._then())
        return x


def main() -> None:
    out, data, accumulate, epochs, rate, *todo = sys.argv[1:]
    with ExitStack() as stack, hvdtrain.init("torch", device="cpu") as world:
        killed = Killed(todo, world)
        size = world.size
        plain, optimizer, scheduler = build()
        plain = nn.Sequential(*plain[:2], Counted(lambda: killed.at("in")), *plain[2:])
        x, y, _ = samples()
        given: Any = Numbered() if "stream" in data else samples()
        train = hvt.loader(given, PER_RANK, workers=1 if "workers" in data else 0)
        second = hvt.loader((torch.arange(SAMPLES),), 7, seed=9)  # its order is another one each epoch, on every rank
        model, trained = hvt.prepare(plain, optimizer, train, accumulate=int(accumulate))
        average = Average(plain)
        extra: dict[str, Any] = {"average": average, "scheduler": scheduler, "updates": 0}
        checkpoints = hvdtrain.Checkpointer(f"{out}/checkpoints", keep=2)
        state = hvt.model_state(model, trained, extra=extra)
        checkpoints.on_preemption(state)
        log = stack.enter_context(hvdtrain.RunLog(f"{out}/run", world, config={}, tensorboard=False))
        world.on_main(Path(out, "once").write_text, str(os.getpid()))
        ledger = stack.enter_context(Path(out, f"ledger.{os.getpid()}").open("w", buffering=1))

        def note(kind: str, epoch: int, step: int, ids: list[int]) -> None:
            line = elastic.line()
            print(json.dumps([kind, epoch, step, line.formation if line else 0, ids, time.time()]), file=ledger)

        for epoch in train.epochs(int(epochs)):
            killed.at("head")
            world.barrier()
            for features, labels, ids in train:
                before = killed.updates = trained.progress.step
                mine = ids.tolist() if not train.step.padding else []
                note("took", epoch, before + 1, mine)
                if any(one.endswith(":batch") for one in todo):
                    killed.at("batch")
                    world.barrier()
                time.sleep(1 / float(rate) if world.size == size else SLOW_S)  # a new process takes seconds
                loss = nn.functional.cross_entropy(model(features), labels)
                killed.at("backward")
                trained.backward(loss)
                killed.at("step")
                trained.step()
                if trained.progress.step != before:
                    note("applied", epoch, trained.progress.step, [])
                if accumulate == "1" or trained.progress.step != before:  # as users write it
                    scheduler.step()
                    average.update(plain)
                    extra["updates"] += 1
                log.step(**trained.record())
                killed.at("after")
            killed.updates = trained.progress.step
            note("second", epoch, 0, [number for (numbers,) in second for number in numbers.tolist()])

            def right(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
                killed.at("evaluate")
                return {"right": (outputs.argmax(1) == targets).double()}

            metrics = hvt.evaluate(model, (x, y), right, per_rank_batch=8)
            killed.at("gather")
            ranks = world.gather(os.getpid())
            assert len(set(ranks)) == world.size, ranks
            killed.at("save")
            checkpoints.save(state, progress=trained.progress, metrics=metrics)
            if world.is_main and epoch % 10 == 0:
                print(f"epoch {epoch} right {metrics['right']:.4f} size {world.size}", flush=True)
        if world.is_main:
            weights = {name.replace("3.", "2."): tensor for name, tensor in plain.state_dict().items()}
            averages = {name.replace("3.", "2."): tensor for name, tensor in average.values.items()}
            torch.save({"weights": weights, "average": averages, "updates": extra["updates"]}, f"{out}/final.pt")


if __name__ == "__main__":
    main()
