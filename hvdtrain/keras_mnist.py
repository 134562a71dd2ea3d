"""Keras MNIST on any number of ranks: Horovod's classic example, for Keras 3, with proof of what it does.

Read it from top to bottom: the recipe, the network, the training; then the flags, and what has to happen
before a framework is imported.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hvdtrain
from hvdtrain.core import flags
from hvdtrain.core.launchers import Detected
from hvdtrain.datasets import load_mnist
from hvdtrain.record import folder
from hvdtrain.world import startup
from hvdtrain.world.world import World

PROGRAM = "hvdtrain.keras_mnist"


# ---- the recipe


# the example's own: 12 epochs of 469 updates of 128, with a rate of 1. 1,437 digits make only 12 updates of 128 an
# epoch: 0.967 of the test pictures are right in the end. Updates of 16 take about the same time and reach 0.98.
EPOCHS, LR = 12, 1.0
PER_RANK_BATCH = {"mnist": 128, "digits": 16}  # by data set; on one rank the rate belongs to it
# The example multiplies Adadelta's rate by the number of ranks. That is SGD's rule (arXiv 1706.02677); for
# optimizers that divide by a running size of the gradients it is the square root (arXiv 2205.10287), and it
# shows: with the digits and the batch of 16 ranks it gives 0.98, the example's rule 0.92 or, warmed up, 0.1.
LR_SCALE = "sqrt"
WARMUP_EPOCHS = 1


def network() -> Any:
    """The example's network. It takes raw pictures (0..255), so that its users need not know how to scale them. It
    returns logits: with the softmax in the loss no probability is rounded to 0."""
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input((28, 28, 1)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Dropout(0.25),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(10),
        ],
        name="mnist",
    )


# ---- the training


def train(args: argparse.Namespace, world: World) -> None:
    """Trains, tests and reports. Every rank runs all of it; rank 0 prints and writes."""
    import keras

    import hvdtrain.keras as hvk

    started = time.perf_counter()
    images = load_mnist(args.data, world=world)
    x_train, x_test = images.x_train[..., None], images.x_test[..., None]
    plan = MnistSettings.of(args, world.size, images.name, samples=len(x_train))
    sha256 = images.fingerprint()
    run_dir, args.resume = world.on_main(
        folder.choose_run, args.run_dir, "keras_mnist", resume=args.resume, data_sha256=sha256
    )
    config = {**vars(args), **vars(plan), "data": images.note, "data_sha256": sha256}
    with hvdtrain.RunLog(run_dir, world, config=config, resume=args.resume) as run:
        if world.is_main:
            print(f"data: {images.note}\nranks: {world.size} ({world.launcher}, {world.engine})", flush=True)
            print(f"{plan}\nrun directory: {run_dir}", flush=True)
        model = network()
        model.compile(
            optimizer=keras.optimizers.Adadelta(learning_rate=plan.lr.base),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        compression = None if args.compression == "none" else args.compression
        data = hvk.loader((x_train, images.y_train), plan.per_rank_batch)
        held_out = hvk.loader((x_test, images.y_test), plan.per_rank_batch, shuffle=False)
        hvk.prepare(model, data, lr=plan.lr, compression=compression, watch_every=args.watch_every)
        checkpoints = hvdtrain.Checkpointer(run.path("checkpoints"), best=None)
        progress = checkpoints.restore(hvk.model_state(model)) if args.resume else None
        if world.is_main and progress:
            print(f"resuming after epoch {progress.epoch} of {plan.passes}", flush=True)
        model.fit(
            data,
            epochs=plan.passes,
            initial_epoch=progress.epoch if progress else 0,
            validation_data=held_out,
            callbacks=hvk.callbacks(model, run=run, checkpointer=checkpoints),
            verbose=0,
        )
        test = hvk.evaluate(model, (x_test, images.y_test), per_rank_batch=128)
        weights = hvk.fingerprint(model)
        world.agree("the final weights (SHA-256)", weights)
        seconds = time.perf_counter() - started
        run.result(loss=test["loss"], top1=test["accuracy"], weights_sha256=weights, seconds=seconds)
        if world.is_main:
            print(f"weights: bit-equal on {plural(world.size)}, sha256 {weights[:16]}")
            latest = checkpoints.latest()
            saved = latest.path / "model.keras" if latest else None
            print(f"checkpoint: {saved}; plain Keras loads it: keras.saving.load_model({str(saved)!r})")
            right = f"{round(test['accuracy'] * len(x_test))} of {len(x_test)} right"
            scores = f"test loss {test['loss']:.4f}, test accuracy {test['accuracy']:.4f} ({right})"
            print(f"{scores}, {seconds:.1f} s", flush=True)


@dataclass(frozen=True)
class MnistSettings:
    """The settings that follow from the flags, the data and the number of ranks; `str()` describes them."""

    epochs: int
    epochs_each: int
    passes: int
    per_rank_batch: int
    global_batch: int
    lr: hvdtrain.LR
    total_samples: int

    @classmethod
    def of(cls, args: argparse.Namespace, ranks: int, data: str, *, samples: int) -> MnistSettings:
        """`data`: which data set; `samples`: in its training set."""
        epochs = args.epochs or EPOCHS
        each = math.ceil(epochs / ranks) if args.epochs_divided else epochs
        # In the example each rank goes through all the data `each` times, in an order of its own. Here the
        # ranks share every pass, so that no update has a picture twice: the same work is each x ranks passes.
        passes = each * ranks
        per_rank_batch = args.per_rank_batch or PER_RANK_BATCH[data]
        warmup = 0 if args.lr_scale == "none" else WARMUP_EPOCHS * samples
        lr = hvdtrain.LR(args.lr or LR, PER_RANK_BATCH[data], args.lr_scale, warmup_samples=warmup)
        return cls(epochs, each, passes, per_rank_batch, per_rank_batch * ranks, lr, passes * samples)

    def __str__(self) -> str:
        lr, ranks = self.lr, self.global_batch // self.per_rank_batch
        scaled = f" ({lr.base:g} at batch {lr.reference_batch}, scaled by {lr.scale} in the first epoch)"
        shared = f" = {self.passes} passes over the data, shared by the ranks"
        return (
            f"batch: {self.per_rank_batch} per rank, effective {self.global_batch}\n"
            f"learning rate: {lr.peak(self.global_batch):.4g}{scaled * (lr.factor(self.global_batch) != 1)}\n"
            f"epochs: {self.epochs} over {plural(ranks)}: {self.epochs_each} each{shared * (ranks > 1)}"
        )


def plural(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"


# ---- the flags, and what happens before a framework is imported

EXAMPLES = """\
examples:
  python -m hvdtrain.keras_mnist                          one process; needs no Horovod
  horovodrun -np 2 python -m hvdtrain.keras_mnist         two ranks on this machine
  horovodrun -np 16 -H server1:4,server2:4,server3:4,server4:4 python -m hvdtrain.keras_mnist --data mnist
  mpirun -np 2 python -m hvdtrain.keras_mnist --backend torch
  python -m hvdtrain.keras_mnist --resume --epochs 24     the newest run continues
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = flags.Parser(PROGRAM, description=(__doc__ or "").split("\n", 1)[0], epilog=EXAMPLES)
    count = flags.whole(1)
    # fmt: off
    add = p.add_argument_group("training").add_argument
    add("--epochs", type=count, metavar="N", help="epochs over all ranks (default: 12)")
    add("--epochs-divided", action=argparse.BooleanOptionalAction, default=True,
        help="divide --epochs by the ranks, rounded up: more ranks, less time (default); with --no-epochs-divided "
        "every rank does all of them")
    add("--per-rank-batch", type=count, metavar="N",
        help="pictures of a rank in a step (default: MNIST 128, digits 16)")
    add("--lr", type=flags.positive, metavar="RATE", help="learning rate of Adadelta on one rank (default: 1.0)")
    add("--lr-scale", choices=["sqrt", "linear", "none"], default=LR_SCALE,
        help="how the learning rate grows with the global batch (default: %(default)s)")
    add("--seed", type=flags.whole(0), default=0, metavar="N", help="seed of all random numbers (default: 0)")
    add = p.add_argument_group("data and files").add_argument
    add("--data", default="auto", metavar="auto|digits|mnist|PATH",
        help="auto: MNIST if it is in the Keras cache, else the digits; digits: 1,797 real ones, built in; mnist: "
        "from the cache, or downloaded; PATH: mnist.npz or its folder (default: auto)")
    add("--run-dir", type=Path, metavar="DIR",
        help="folder for log and checkpoints (default: the next runs/keras_mnist-N)")
    add("--resume", action="store_true", help="resume the run in --run-dir (default: the newest)")
    add = p.add_argument_group("machine").add_argument
    add("--backend", choices=["tensorflow", "torch"], help="backend of Keras (default: KERAS_BACKEND, else tensorflow)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto",
        help="device to train on (default: GPUs if there are any)")
    add("--compression", choices=["none", "fp16"], default="none",
        help="compression of gradients on their way (default: none)")
    add("--watch-every", type=flags.whole(0), default=100, metavar="N",
        help="steps between comparisons of the replicas; 0: never (default: %(default)s)")
    # fmt: on
    return p


def check_early(args: argparse.Namespace, detected: Detected) -> None:
    """Refuses bad data and run directories before the seconds that a framework takes: one rank of each node looks."""
    if detected.local_rank == 0:
        load_mnist(args.data)
    if detected.rank == 0 and args.run_dir is not None:
        folder.check_run_dir(args.run_dir, resume=args.resume)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code (2: something was refused; one message explains it)."""

    def work(detected: Detected) -> None:
        args = parser().parse_args(argv)
        args.backend = args.backend or os.environ.get("KERAS_BACKEND") or "tensorflow"
        os.environ["KERAS_BACKEND"] = args.backend  # read once, when keras is imported
        needed = startup.keras_modules(args.backend, detected)
        startup.find_modules(needed)
        check_early(args, detected)
        startup.share_cores(detected)
        startup.import_modules(needed)
        with hvdtrain.init("keras", device=args.device, seed=args.seed) as world:
            train(args, world)

    return startup.run_program(PROGRAM, work)


if __name__ == "__main__":
    sys.exit(main())
