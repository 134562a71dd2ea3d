"""`hvdtrain bench input --framework keras`: images a second that reach `fit`, by how a PyDataset reads them.

The same folder of JPEGs through `keras.utils.PyDataset` with 0, 2, 4, 8 workers, as threads and as processes, and with
a shorter and a longer queue where most is gained; and the pictures in memory, by `fit(x, y)` and by `hvk.loader`. Each
variant is a fit of a model that does nothing with its batches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from hvdtrain.core.launchers import detect
from hvdtrain.record import stats
from hvdtrain.world import startup

if TYPE_CHECKING:
    import numpy as np

    from hvdtrain.datasets.folder import Folder
    from hvdtrain.world.world import World

QUEUE, SHORT, LONG = 10, 2, 50  # Keras' own, and what is tried besides
QUEUE_OF = ", max_queue_size="
GOOD_ENOUGH = 0.95  # of the best rate: fewer workers for nearly the same
# a variant: what fit is given
Data = Callable[[], dict[str, Any]]


def begin(backend: str | None) -> str:
    """Imports Keras on a backend; returns its name."""
    chosen = os.environ["KERAS_BACKEND"] = backend or os.environ.get("KERAS_BACKEND") or "tensorflow"
    startup.import_modules(startup.keras_modules(chosen, detect(os.environ)))
    return chosen


def in_memory(args: argparse.Namespace, world: World, x: np.ndarray, y: np.ndarray) -> dict[str, list[float]]:
    """Images a second from arrays, of both ways to give them to a fit."""
    import hvdtrain.keras as hvk

    batch = args.per_rank_batch
    variants: dict[str, Data] = {
        "fit(x, y)": lambda: {"x": x, "y": y, "batch_size": batch},
        "hvdtrain.keras.loader": lambda: {"x": hvk.loader((x, y), batch)},
    }
    return _rounds(variants, args, batch)


def files(args: argparse.Namespace, world: World, train: Folder) -> dict[str, Any]:
    """Images a second from files, by workers, then by queues; and which variant is best."""
    batch = max(1, args.per_rank_batch // 4)
    found = _rounds(_files(train, args, batch), args, batch)
    found |= _rounds(_queues(train, args, batch, found), args, batch)
    return {"images_per_s": found, "recommended": recommend(found)[0]}


def recommend(images_per_s: Mapping[str, list[float]]) -> tuple[str, float]:
    """The variant with the fewest workers that reaches nearly the best rate, "" where that is without any; its rate.

    Queues are compared among themselves, as they were measured: in turns. The shortest that is nearly the best.
    """
    medians = {name: statistics.median(its) for name, its in images_per_s.items()}
    found = least({name: rate for name, rate in medians.items() if not _queue(name)}, _workers)
    queues = {name: rate for name, rate in medians.items() if name.startswith(f"{found}{QUEUE_OF}")}
    if queues:
        found = least(queues, _queue)
    return (found if _workers(found) else ""), medians[found]


def least(medians: Mapping[stats.Name, float], cost: Callable[[stats.Name], int]) -> stats.Name:
    """Returns what costs least of what is nearly the best."""
    best = max(medians.values())
    return min((name for name in medians if medians[name] >= GOOD_ENOUGH * best), key=cost)


def _queue(name: str) -> int:
    """Returns the queue size in a variant's name; 0 if it has none."""
    return int(name.rpartition(QUEUE_OF)[2]) if QUEUE_OF in name else 0


def _workers(name: str) -> int:
    return int(name.split()[1]) if name.split()[1].isdigit() else 0


# ---- what is measured


def _rounds(variants: Mapping[str, Data], args: argparse.Namespace, batch: int) -> dict[str, list[float]]:
    return stats.in_turns({name: partial(_rate, its, args, batch) for name, its in variants.items()}, args.rounds)


def _rate(data: Data, args: argparse.Namespace, batch: int) -> float:
    """Images a second that a fit gets; what was read ahead while its first batches were taken does not count."""
    import keras

    class Nothing(keras.Model):
        def train_step(self, *_: Any) -> dict[str, Any]:
            return {"loss": keras.ops.zeros(())}

    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())
            warm = min(len(self.ends) // 2, 2 * max(args.workers) + 2)
            if self.ends[-1] - self.ends[warm] >= args.seconds:
                self.model.stop_training = True

    model, clock = Nothing(), Clock()
    model.compile(jit_compile=False)
    model.built = True
    given = data()
    model.fit(**given, epochs=1000, verbose=0, callbacks=[clock])
    if hasattr(given["x"], "on_epoch_end"):
        given["x"].on_epoch_end()  # of a fit that was stopped workers go on: the next block has the cores for itself
    warm = min(len(clock.ends) // 2, 2 * max(args.workers) + 2)
    return (len(clock.ends) - 1 - warm) * batch / (clock.ends[-1] - clock.ends[warm])


def _files(train: Any, args: argparse.Namespace, batch: int) -> dict[str, Data]:
    variants = {"PyDataset, no workers": _dataset(train, args, batch, 0, False, QUEUE)}
    for workers in filter(None, args.workers):
        for kind in ("threads", "processes"):
            name = f"PyDataset, {workers} {kind}"
            variants[name] = _dataset(train, args, batch, workers, kind == "processes", QUEUE)
    return variants


def _queues(train: Any, args: argparse.Namespace, batch: int, rates: Mapping[str, list[float]]) -> dict[str, Data]:
    """A shorter and a longer queue than Keras' own, for the best of the variants that have one."""
    queued = {name: rate for name, rate in rates.items() if _workers(name)}
    if not queued:
        return {}
    best = recommend(queued)[0]
    workers, processes = _workers(best), best.endswith("processes")
    return {
        f"{best}{QUEUE_OF}{queue}": _dataset(train, args, batch, workers, processes, queue)
        for queue in (SHORT, QUEUE, LONG)
    }


def _dataset(train: Any, args: argparse.Namespace, batch: int, workers: int, processes: bool, queue: int) -> Data:
    from hvdtrain.bench.keras_files import JpegBatches
    from hvdtrain.private.keras import PyDatasetAdapter

    settings = {"workers": workers, "use_multiprocessing": processes, "max_queue_size": queue}
    # the adapter that `fit` would make, at hand so that its workers can be ended
    return lambda: {"x": PyDatasetAdapter(JpegBatches(train, batch, args.image_size, **settings), shuffle=True)}
