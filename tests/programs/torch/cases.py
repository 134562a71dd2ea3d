"""Runs the functions ``case_...(world)`` of a program on every rank, and says which passed; trainings to compare."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import HvdtrainError


def run_cases(namespace: Mapping[str, Any], world: hvdtrain.World) -> int:
    """Runs all cases, in order; returns how many failed on some rank. A failed one must not leave a rank waiting."""
    failed = 0
    for name, case in list(namespace.items()):
        if not name.startswith("case_"):
            continue
        problem = ""
        try:
            torch.manual_seed(11 + world.rank)
            case(world)
        except Exception:
            problem = traceback.format_exc()
            print(problem, file=sys.stderr, flush=True)  # the others may not come to the gather
        problems = [text for text in world.gather(problem) if text]
        failed += bool(problems)
        if world.is_main:
            print(f"FAILED {name}\n" + "\n".join(problems) if problems else f"passed {name}", flush=True)
    return failed


def write_results(world: hvdtrain.World, cases: Iterable[Callable[[hvdtrain.World], Any]], out: Path) -> None:
    """Writes what rank 0 got from each case; the first that fails ends all ranks."""
    results = {}
    for case in cases:
        try:
            results[case.__name__] = case(world)
        except Exception:
            print(f"rank {world.rank}: {case.__name__}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(3)
    if world.is_main:
        out.write_text(json.dumps(results))


def shown(row: str, text: object) -> None:
    """Rank 0 prints what a row of docs/limits.md shows."""
    if (world := hvdtrain.current()) is not None and world.is_main:
        print(f"shown {row} {' '.join(str(text).split())}", flush=True)


@contextmanager
def refused(*parts: str, kind: type[HvdtrainError] = HvdtrainError, row: str = "") -> Iterator[None]:
    """The block must raise `kind`, with all `parts` in its text, which is then shown as that row's."""
    try:
        yield
    except kind as error:
        missing = [part for part in parts if part not in str(error)]
        assert not missing, f"{missing} not in:\n{error}"
        assert error.rule and (error.remedy or error.received), f"no remedy:\n{error}"
        if row:
            shown(row, error)
    else:
        raise AssertionError(f"not refused: {parts}")


@contextmanager
def folder(world: hvdtrain.World, *, own: bool = False) -> Iterator[Path]:
    """A folder of each rank's `own`, or one of all."""
    made = tempfile.mkdtemp()
    try:
        yield Path(made if own else world.broadcast(made))
    finally:
        world.barrier()
        shutil.rmtree(made, ignore_errors=True)


def quietly(*args: Any, **kwargs: Any) -> Any:
    """`prepare`, without the line of its proof."""
    with contextlib.redirect_stdout(io.StringIO()):
        return hvt.prepare(*args, **kwargs)


def train(
    model: Any, optimizer: Any, batches: Iterable[Any], loss_of: Callable[..., Any], weight: Any = None
) -> list[float]:
    """Runs a user's loop on batches (x, y, ...); returns the losses of its updates."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()  # between micro-batches, too
        optimizer.backward(loss_of(model, *batch), **({} if weight is None else {"weight": weight(batch[-1])}))
        optimizer.step()
        losses += [] if (loss := optimizer.record()["loss"]) is None else [loss]
    return losses


def plainly(
    model: nn.Module, optimizer: Any, batches: Iterable[Any], loss_of: Callable[..., Any], clip: float = 0.0
) -> list[float]:
    """Runs the same loop in one process of plain PyTorch; returns the losses."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def windows(size: int, *parts: Tensor, epochs: int = 1) -> Iterator[tuple[Tensor, ...]]:
    """Yields the batches of an epoch, unshuffled, after one another."""
    for _ in range(epochs):
        for start in range(0, len(parts[0]), size):
            yield tuple(part[start : start + size] for part in parts)


def gap(found: Any, wanted: Any) -> float:
    """Returns the largest difference of parameters and buffers; NaN stays NaN."""
    pairs = zip(hvt.unwrap(found).state_dict().values(), hvt.unwrap(wanted).state_dict().values(), strict=True)
    return float(torch.stack([(a.double() - b.double()).abs().max() for a, b in pairs]).max())


def close(row: str, *pairs: tuple[nn.Module, nn.Module], below: float = 1e-10) -> None:
    """Asserts and shows, as that row, that pairs of models have equal states."""
    largest = max(gap(found, wanted) for found, wanted in pairs)
    assert largest < below, largest
    shown(row, largest)


def apart(found: list[Any], wanted: list[Any]) -> float:
    """Returns the largest difference of as many numbers or tensors."""
    return max(float((torch.as_tensor(f) - w).abs().max()) for f, w in zip(found, wanted, strict=True))


def report(world: hvdtrain.World, found: Any, out: str | Path) -> None:
    """Rank 0 writes what each rank found, by rank."""
    reports = world.gather(found)
    if world.is_main:
        Path(out).write_text(json.dumps(reports))


def main(namespace: Mapping[str, Any], engine: str = "") -> None:
    """usage: program.py [ENGINE [CASE ...]], unless the program names its engine."""
    torch.set_num_threads(1)
    engine = engine or (sys.argv[1] if len(sys.argv) > 1 else "auto")
    chosen = {name: namespace[name] for name in sys.argv[2:] if name.startswith("case_")}
    with hvdtrain.init("torch", engine=engine, device="cpu", seed=5) as world:
        failed = run_cases(chosen or namespace, world)
    sys.exit(3 if failed else 0)
