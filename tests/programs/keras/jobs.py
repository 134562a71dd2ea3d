"""The ranks of the refusal tests, and the small jobs that their cases are made of."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import keras
from common import cnn, images, loss, report

import hvdtrain

world = hvdtrain.init("keras", seed=5)
import hvdtrain.keras as hvk  # noqa: E402  (the adapter joins the ranks first)

RANK, SIZE = world.rank, world.size
O = keras.optimizers  # noqa: E741
CASES: list[Callable[[], object]] = []
T = TypeVar("T", bound=Callable[[], object])


def case(function: T) -> T:
    """Registers a case: it returns what it found out, or raises what it was refused with."""
    CASES.append(function)
    return function


def cases(**jobs: Callable[[], object]) -> None:
    """Registers cases of a line each, by their names."""
    for name, job in jobs.items():
        job.__name__ = name
        CASES.append(job)


@contextmanager
def shared_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as own:
        yield Path(world.broadcast(own))
        world.barrier()


def compiled(optimizer: Any = None, *, seed: int = 0, traced: bool = False, **arguments: Any) -> keras.Model:
    """On TensorFlow tracing takes longer than these steps: few cases need it."""
    keras.utils.set_random_seed(seed)
    model = cnn()
    arguments["run_eagerly"] = not traced
    model.compile(optimizer or O.SGD(0.1), arguments.pop("loss", None) or loss(), **arguments)
    return model


def data(batch: int = 8, samples: int = 32) -> Any:
    x, y = images(samples)
    return hvk.loader((x.astype("float32"), y), batch)


def fit(model: keras.Model, callbacks: list[Any] | None = None, epochs: int = 1, batches: Any = None) -> Any:
    return model.fit(batches or data(), epochs=epochs, verbose=0, callbacks=callbacks)


def fitted(model: keras.Model, *data: Any, **options: Any) -> keras.Model:
    """Fits it with our callbacks, before those of `more`; returns it."""
    callbacks = [*hvk.callbacks(model), *options.pop("more", [])]
    model.fit(*data, verbose=0, callbacks=callbacks, **options)
    return model


def state(model: keras.Model) -> list[Any]:
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return [*model.variables, *model.optimizer.variables]


def run_cases(name: str) -> None:
    """Runs all cases, or those named after FOLDER; writes FOLDER/NAME.rankR.json: case -> outcome."""
    outcomes: dict[str, str] = {}
    wanted = sys.argv[2:]
    for job in CASES:
        if wanted and job.__name__ not in wanted:
            continue
        try:
            outcomes[job.__name__] = f"passed {job()}"
        except hvdtrain.HvdtrainError as error:
            outcomes[job.__name__] = f"{type(error).__name__}: {error}"
        except Exception:
            print(f"rank {RANK}: case {job.__name__}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            report(sys.argv[1], name, RANK, outcomes)
            os._exit(3)
        keras.backend.clear_session()
    report(sys.argv[1], name, RANK, outcomes)
    world.__exit__(None)
