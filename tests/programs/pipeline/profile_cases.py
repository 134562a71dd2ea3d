"""What profile() measures, on models whose costs are known; prints a JSON line a case."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from split_cases import state_of
from torch import Tensor, nn

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline import Profile, profile
from hvdtrain.pipeline.trace.segments import segments
from hvdtrain.pipeline.tuning import measure
from hvdtrain.pipeline.tuning.measure import SegmentBench

CASES: dict[str, Callable[[], Any]] = {}


class InTurn:
    """A lock that is given in the order it was asked for: `threading.Lock` may give one thread all its naps first."""

    def __init__(self) -> None:
        self._changed, self._asked, self._served = threading.Condition(), 0, 0

    def __enter__(self) -> None:
        with self._changed:
            ticket, self._asked = self._asked, self._asked + 1
            self._changed.wait_for(lambda: self._served == ticket)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._served += 1
            self._changed.notify_all()


LOCK = InTurn()


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


class Nap(torch.autograd.Function):
    """Takes its time on no core; backward three times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, lock: Any) -> Tensor:
        ctx.seconds, ctx.lock = seconds, lock
        nap(seconds, lock)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        nap(3 * ctx.seconds, ctx.lock)
        return gradient, None, None


def nap(seconds: float, lock: Any) -> None:
    if lock is None:
        time.sleep(seconds)
        return
    with lock:
        time.sleep(seconds)


class Napper(nn.Module):
    def __init__(self, seconds: float, lock: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seconds, self.lock = seconds, lock

    def forward(self, x: Tensor) -> Tensor:
        # of a lock torch.fx knows nothing, so this module is called, not opened
        return Nap.apply(x * self.weight, self.seconds * len(x.tolist()), self.lock)


@case
def seconds() -> Any:
    """9 ms and 3 ms a sample."""
    found = profile(nn.Sequential(Napper(0.009), Napper(0.003)), torch.randn(8, 4), "cpu", sizes=[1, 2])
    return {
        "forward": [[c.forward_s(n) for n in (1, 2, 4)] for c in found.costs],
        "backward": [[c.backward_s(n) for n in (1, 2, 4)] for c in found.costs],
        "samples": found.samples,
    }


@case
def bytes_of_layers() -> Any:
    """Floats of 4 bytes; one bias without a gradient."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8), nn.BatchNorm1d(8))
    model[0].bias.requires_grad_(False)
    found = profile(model, torch.randn(12, 16), "cpu,cpu", sizes=[4, 8], timed=False, optimizer_copies=2)
    return {
        "names": [c.name for c in found.costs],
        "parameters": [c.parameter_bytes for c in found.costs],
        "gradients": [c.gradient_bytes for c in found.costs],
        "optimizer": [c.optimizer_bytes for c in found.costs],
        "buffers": [c.buffer_bytes for c in found.costs],
        "kept": [c.activation_bytes(4) for c in found.costs],
        "output": [c.output_bytes(4) for c in found.costs],
        "at 12": found.costs[1].activation_bytes(12),
        "seconds": [c.forward_s(4) + c.backward_s(4) for c in found.costs],
    }


@case
def shared_counts_once() -> Any:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    found = profile(model, torch.randn(4, 8), "cpu", timed=False)
    return {"parameters": [c.parameter_bytes for c in found.costs]}


@case
def left_alone() -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    model[0].weight.grad = torch.ones(8, 8)
    model[1].eval()
    x = torch.randn(16, 8)
    before, kept = state_of(model), x.clone()
    threads, intra_op = set(threading.enumerate()), torch.get_num_threads()
    profile(model, x, "cpu,cpu")
    return {
        "same": before == state_of(model) and torch.equal(x, kept),
        "threads": [t.name for t in threading.enumerate() if t not in threads],
        "intra_op": torch.get_num_threads() == intra_op,
    }


@case
def sizes_that_fail() -> Any:
    """Batch norm over one value is refused by PyTorch."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    found = profile(model, torch.randn(8, 8), "cpu", sizes=[1, 2])
    try:
        profile(model, torch.randn(8, 8), "cpu", sizes=[1])
    except ConfigError as error:
        return {"samples": found.samples, "error": str(error)}
    return {"samples": found.samples, "error": ""}


@case
def contention() -> Any:
    """Naps do not disturb each other; those that hold one lock do."""
    free, locked = (
        profile(nn.Sequential(Napper(0.004, lock), Napper(0.004, lock)), torch.randn(2, 4), "cpu,cpu", sizes=[2])
        for lock in (None, LOCK)
    )
    return {"free": free.pools["cpu"].speeds, "locked": locked.pools["cpu"].speeds, "devices": len(free.devices)}


@case
def weights_made_in_each_pass() -> Any:
    """The weight that a pass has computed lies in the layer, where another thread's pass would replace it."""
    layers = [nn.utils.weight_norm(nn.Linear(8, 8)) for _ in range(4)]
    found = profile(nn.Sequential(*layers), torch.randn(8, 8), "cpu,cpu", sizes=[2])
    return {"speeds": found.pools["cpu"].speeds}


class Tied(nn.Module):
    """Has one table at both ends, which each pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(20, 8, max_norm=1.0), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.second(torch.relu(self.first(self.table(x).mean(1)))))
        return nn.functional.linear(inner, self.table.weight)


@case
def weights_that_two_stages_share() -> Any:
    found = profile(Tied(), torch.randint(0, 20, (32, 5)), "cpu,cpu", sizes=[8])
    return {"speeds": found.pools["cpu"].speeds}


@case
def on_disk() -> Any:
    found = profile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(8, 8), "cpu,cpu")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        found.save(path)
        same = Profile.load(path) == found
        path.write_text(path.read_text()[:-20])
        try:
            Profile.load(path)
        except ConfigError as error:
            return {"same": same, "error": str(error)}
    return {"same": same, "error": ""}


@case
def copies() -> Any:
    """A model that is not on the device yet: copies are measured, all at once, or one after the other."""
    x = torch.randn(8, 16)
    layers = [nn.Linear(16, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 16)]
    parts = segments(nn.Sequential(*layers), x)
    here = profile(parts, x, "cpu", sizes=[4])
    original, whole = measure.device_of, SegmentBench.whole
    wholes: list[int] = []

    def too_large(self: Any, samples: int) -> tuple[float, float]:
        wholes.append(samples)
        raise torch.OutOfMemoryError("CUDA out of memory")

    measure.device_of = lambda model: torch.device("meta")
    try:
        at_once = profile(parts, x, "cpu", sizes=[4])
        SegmentBench.whole = too_large  # type: ignore[method-assign]
        in_turn = profile(parts, x, "cpu", sizes=[4])
    finally:
        measure.device_of, SegmentBench.whole = original, whole  # type: ignore[method-assign]
    return {
        "kept": [[c.activation_bytes(4) for c in p.costs] for p in (here, at_once, in_turn)],
        "timed": [all(c.forward_s(4) > 0 < c.backward_s(4) for c in p.costs) for p in (here, at_once, in_turn)],
        "wholes": len(wholes),
    }


class Presses(nn.Module):
    """Ctrl-C in its `at`-th pass."""

    passes, at = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.005 * (len(x.tolist()) > 0))
        Presses.passes += 1  # of the class: what is set on a module is undone
        if Presses.passes == Presses.at:
            os.kill(os.getpid(), signal.SIGINT)
        return x * 1


@case
def interrupted() -> Any:
    """Ctrl-C while it measures; once in the middle of a segment, once while two stages are watched together."""
    told = []
    for at in (4, 40):
        parts = segments(nn.Sequential(nn.Linear(4, 4), Presses(), nn.Linear(4, 4)), torch.randn(4, 4))
        Presses.passes, Presses.at, threads = 0, at, set(threading.enumerate())
        try:
            profile(parts, torch.randn(4, 4), "cpu,cpu", sizes=[2], repeats=10)
        except KeyboardInterrupt:
            told.append({"after": Presses.passes - at, "threads": len(set(threading.enumerate()) - threads)})
        Presses.at = 0
    return {"told": told}


def main() -> None:
    for name in sys.argv[1:] or CASES:
        try:
            found = CASES[name]()
        except Exception:
            found = {"failed": traceback.format_exc()}
        print(json.dumps({"case": name, **found}), flush=True)


if __name__ == "__main__":
    main()
