"""`hvdtrain bench input --framework keras`: images a second that reach `fit`, by how a PyDataset reads them.

The same folder of JPEGs through `keras.utils.PyDataset` with 0, 2, 4, 8 workers, as threads and as processes, and with
a shorter and a longer queue where most is gained; and the pictures in memory, by `fit(x, y)` and by `hvk.loader`. Each
variant is a fit of a model that does nothing with its batches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.bench.report import measured_on, progress
from hvdtrain.core import startup, stats
from hvdtrain.core.launchers import detect

QUEUE, SHORT, LONG = 10, 2, 50  # Keras' own, and what is tried besides
GOOD_ENOUGH = 0.95
MEMORY_IMAGES = 10_000
# a variant: what fit is given
Data = Callable[[], dict[str, Any]]


def measure(args: argparse.Namespace, result: dict[str, Any], write_pictures: Callable[[Path], Path]) -> None:
    """Adds the figures of both parts."""
    backend = os.environ["KERAS_BACKEND"] = args.backend or os.environ.get("KERAS_BACKEND") or "tensorflow"
    startup.import_modules(startup.keras_modules(backend, detect(os.environ)))
    import hvdtrain
    from hvdtrain.datasets import load_folder

    result["backend"] = backend
    with hvdtrain.init("keras", engine="solo", device=args.device) as world:
        progress(f"1/2 pictures in memory, {args.rounds} rounds")
        result["memory"] = {"images_per_s": _rounds(_in_memory(args), args, args.per_rank_batch)}
        progress(f"2/2 JPEG files, {args.rounds} rounds")
        with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
            root = args.data or write_pictures(Path(folder))
            train, _ = load_folder(root, world=world)
            batch = max(1, args.per_rank_batch // 4)
            rates = _rounds(_files(train, args, batch), args, batch)
            best, _ = recommend(rates)
            if best:
                rates |= _rounds(_queues(train, args, batch, best), args, batch)
        note = train.note if args.data else f"{len(train)} made-up JPEGs"
        result["files"] = {"images_per_s": rates, "data": note}


def recommend(rates: Mapping[str, list[float]]) -> tuple[str, float]:
    """The variant with the fewest workers that reaches nearly the best rate, "" where that is without any; its rate."""
    medians = {name: statistics.median(its) for name, its in rates.items()}
    best = max(medians.values())
    found = min((name for name in medians if medians[name] >= GOOD_ENOUGH * best), key=_workers)
    return (found if _workers(found) else ""), medians[found]


def _workers(name: str) -> int:
    return int(name.split()[1]) if name.split()[1].isdigit() else 0


def report(result: Mapping[str, Any]) -> str:
    """The tables of a result."""
    tables = [f"{measured_on(result)}; Keras on {result['backend']}"]
    for title, part in (("pictures in memory, 3x32x32", result["memory"]), (result["files"]["data"], result["files"])):
        rates = part["images_per_s"]
        base = statistics.median(next(iter(rates.values())))
        rows = [(title, "images/s", f"x {next(iter(rates))}")]
        for name, its in rates.items():
            rows.append((name, f"{statistics.median(its):,.0f}", f"{statistics.median(its) / base:.2f}"))
        tables.append(stats.table(rows))
    name, rate = recommend(result["files"]["images_per_s"])
    tables.append(
        f"for files like these: {name or 'no workers'}, {rate:,.0f} images/s a rank that has"
        f" {result['machine']['cores_usable']} such cores for itself;\na model that takes more a second is input bound"
    )
    return "\n\n".join(tables)


# ---- what is measured


def _rounds(variants: Mapping[str, Data], args: argparse.Namespace, batch: int) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(args.rounds):
        for name in stats.rotated(variants, turn):
            rates[name].append(_rate(variants[name], args, batch))
    return rates


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
    model.fit(**data(), epochs=1000, verbose=0, callbacks=[clock])
    warm = min(len(clock.ends) // 2, 2 * max(args.workers) + 2)
    return (len(clock.ends) - 1 - warm) * batch / (clock.ends[-1] - clock.ends[warm])


def _in_memory(args: argparse.Namespace) -> dict[str, Data]:
    import hvdtrain.keras as hvk
    from hvdtrain.datasets import synthetic

    images = synthetic(MEMORY_IMAGES * 10 // 9, classes=10, size=32)
    x, y = images.x_train, images.y_train
    return {
        "fit(x, y)": lambda: {"x": x, "y": y, "batch_size": args.per_rank_batch},
        "hvdtrain.keras.loader": lambda: {"x": hvk.loader((x, y), args.per_rank_batch)},
    }


def _files(train: Any, args: argparse.Namespace, batch: int) -> dict[str, Data]:
    variants = {"PyDataset, no workers": _dataset(train, args, batch, 0, False, QUEUE)}
    for workers in args.workers:
        for kind in ("threads", "processes") if workers else ():
            name = f"PyDataset, {workers} {kind}"
            variants[name] = _dataset(train, args, batch, workers, kind == "processes", QUEUE)
    return variants


def _queues(train: Any, args: argparse.Namespace, batch: int, best: str) -> dict[str, Data]:
    workers, processes = _workers(best), best.endswith("processes")
    return {
        f"{best}, queue of {queue}": _dataset(train, args, batch, workers, processes, queue) for queue in (SHORT, LONG)
    }


def _dataset(train: Any, args: argparse.Namespace, batch: int, workers: int, processes: bool, queue: int) -> Data:
    from hvdtrain.bench.keras_files import Files

    settings = {"workers": workers, "use_multiprocessing": processes, "max_queue_size": queue}
    return lambda: {"x": Files(train, batch, args.image_size, **settings)}
