"""What profile() measures, on models whose costs are known; prints a JSON line a case."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from split_cases import state_of
from torch import Tensor, nn

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline import Profile, profile
from hvdtrain.pipeline.trace.segments import segments
from hvdtrain.pipeline.tuning import measure

torch.set_num_threads(2)
CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


@case
def bytes_of_layers() -> Any:
    """Floats of 4 bytes; one bias without a gradient."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8), nn.BatchNorm1d(8))
    model[0].bias.requires_grad_(False)
    found = profile(model, torch.randn(12, 16), "cpu,cpu", sizes=[4, 8], timed=False, optimizer_copies=2)
    return {
        "names": [c.name for c in found.costs],
        "fixed": [c.fixed_bytes for c in found.costs],
        "gradients": [c.gradient_bytes for c in found.costs],
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
    return {"fixed": [c.fixed_bytes for c in found.costs]}


@case
def left_alone() -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    model[0].weight.grad = torch.ones(8, 8)
    model[1].eval()
    x = torch.randn(16, 8)
    before, kept = state_of(model), x.clone()
    threads, intra_op = set(threading.enumerate()), torch.get_num_threads()
    profile(model, x, "cpu,cpu")
    same = before == state_of(model) and torch.equal(x, kept)
    weight = weakref.ref(model[3].weight)  # the last segment's: a graph that keeps itself would keep it
    del model
    gc.collect()
    return {
        "same": same,
        "freed": weight() is None,
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
    """A model that is not on the device yet: copies of its parts are measured."""
    x = torch.randn(8, 16)
    layers = [nn.Linear(16, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 16)]
    parts = segments(nn.Sequential(*layers), x)
    here = profile(parts, x, "cpu", sizes=[4])
    with mock.patch.object(measure, "device_of", lambda model: torch.device("meta")):
        there = profile(parts, x, "cpu", sizes=[4])
    return {
        "kept": [[c.activation_bytes(4) for c in p.costs] for p in (here, there)],
        "timed": [all(c.forward_s(4) > 0 < c.backward_s(4) for c in p.costs) for p in (here, there)],
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
    """Ctrl-C while it measures, in the middle of a segment."""
    parts = segments(nn.Sequential(nn.Linear(4, 4), Presses(), nn.Linear(4, 4)), torch.randn(4, 4))
    Presses.passes, Presses.at, threads = 0, 4, set(threading.enumerate())
    try:
        profile(parts, torch.randn(4, 4), "cpu,cpu", sizes=[2], repeats=10)
    except KeyboardInterrupt:
        return {"after": Presses.passes - Presses.at, "threads": len(set(threading.enumerate()) - threads)}
    return {}


def main() -> None:
    for name in sys.argv[1:] or CASES:
        try:
            found = CASES[name]()
        except Exception:
            found = {"failed": traceback.format_exc()}
        print(json.dumps({"case": name, **found}), flush=True)


if __name__ == "__main__":
    main()
