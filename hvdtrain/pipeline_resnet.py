"""A ResNet (or any of torchvision's classifiers) cut over the devices of this machine: how fast, and cut how finely.

Read it from top to bottom: what is done; the model and its random batches; the flags. What is measured, and how, is in
`hvdtrain.vision.trials`. It trains on random pictures, for time only: on real ones `hvdtrain.torch_resnet --pipeline`
trains.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hvdtrain.core import flags
from hvdtrain.core.errors import ConfigError, install_command
from hvdtrain.core.launchers import Detected
from hvdtrain.pipeline.plan.schedule import REMATS, SCHEDULES
from hvdtrain.record import folder, stats
from hvdtrain.vision.trials import SplitJob, TrialSettings, compare, sweep, tune
from hvdtrain.world import startup

PROGRAM = "hvdtrain.pipeline_resnet"
BUSY = 0.5  # load a core, from which a note says so
SIZES = [1, 3, 5, 8, 10, 12, 20, 40, 60]
TUTORIAL = TrialSettings(120, 128, 1000, 3, 10, "mse", micro_batches=6)  # split size 20
ON_GPU = replace(TUTORIAL, micro_batches=None)
ON_CPU = replace(ON_GPU, batch=32, batches=1, repeats=5)  # a few minutes on 2 cores


def explore(args: argparse.Namespace) -> None:
    """Cuts the model, then does what the flags ask for."""
    devices = devices_of(args.devices)
    out = folder.choose_run_dir(args.out, "pipeline_resnet", resume=False, data_sha256="")
    folder.check_run_dir(out, resume=False)
    machine = stats.machine()
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    print(
        f"{machine['processor']}, {machine['cores_usable']} cores, load {machine['load_1min']}; {versions}", flush=True
    )
    if machine["load_1min"] > BUSY * machine["cores_usable"]:
        print("note: other programs use this machine's cores: these measurements are unreliable", flush=True)
    job = prepare(args, settings_of(args, devices), devices, out, machine)
    best: int | None = None
    if args.sweep is not None:
        best = sweep(job, args.sweep or SIZES)
        job.save()
    if args.tune:
        best = tune(job)
        job.save()
    if args.compare or (args.sweep is None and not args.tune):
        compare(job, job.settings.micro_batches or best or job.pipe.micro_batches)
    job.result["load_after"] = round(os.getloadavg()[0], 2)
    job.save()
    print(f"every number: {job.out / 'result.json'}", flush=True)


def prepare(
    args: argparse.Namespace, its: TrialSettings, devices: Sequence[str], out: Path, machine: dict[str, Any]
) -> SplitJob:
    """The model, cut, and random batches."""
    job = SplitJob.made(
        args.model, its, devices, micro_batches=its.micro_batches or "auto", balance=args.balance,
        schedule=args.schedule, remat=args.remat, batch_norm=args.batch_norm,
    )  # fmt: skip
    pipe = job.pipe
    what = f"{args.model}, batch {its.batch} of {its.image_size}x{its.image_size}, {its.classes} classes, {its.loss}"
    print(f"\n{what}; {pipe.schedule}, remat {pipe.remat}, {pipe.micro_batches} micro-batches")
    stages = [
        {"name": stage.name, "device": str(stage.device), "segments": len(stage.segments),
         "parameters": sum(p.numel() for p in stage.parameters())}
        for stage in pipe.stages
    ]  # fmt: skip
    rows = [("stage", "device", "segments", "parameters")]
    rows += [(f"{s['name']}", f"{s['device']}", f"{s['segments']}", f"{s['parameters']:,}") for s in stages]
    print(stats.table(rows), flush=True)
    given = {name: value for name, value in vars(args).items() if isinstance(value, (str, int, float, list))}
    result = {"format": 1, "program": PROGRAM, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "flags": given,
              "settings": asdict(its), "machine": machine, "stages": stages}  # fmt: skip
    return replace(job, out=out, machine=machine["processor"], result=result)


def settings_of(args: argparse.Namespace, devices: Sequence[str]) -> TrialSettings:
    """The flags; those not given from the preset, else as the devices suggest."""
    base = TUTORIAL if args.preset == "tutorial" else ON_CPU if "cpu" in devices else ON_GPU
    given = {name: getattr(args, name, None) for name in asdict(base)}
    return replace(base, **{name: value for name, value in given.items() if value is not None})


def devices_of(text: str) -> list[str]:
    """The devices that --devices names; auto: all GPUs, if there are two or more, else two stages on the CPU."""
    import torch

    if text != "auto":
        return [part.strip() for part in text.split(",")]
    gpus = torch.cuda.device_count()
    return [f"cuda:{index}" for index in range(gpus)] if gpus > 1 else ["cpu", "cpu"]


# ---- the flags, and what happens before a framework is imported

EXAMPLES = """\
examples:
  python -m hvdtrain.pipeline_resnet --devices cpu,cpu --compare --sweep --tune     two stages, a core each
  python -m hvdtrain.pipeline_resnet --devices cuda:0,cuda:1 --preset tutorial --compare --sweep
  python -m hvdtrain.pipeline_resnet --model vgg16 --batch 64 --tune                find the split size, or do not split
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = flags.Parser(PROGRAM, description=(__doc__ or "").split("\n", 1)[0], epilog=EXAMPLES)
    count = flags.whole(1)
    # fmt: off
    add = p.add_argument_group("what to do (default: --compare)").add_argument
    add("--compare", action="store_true", help="compare one device, the naive split and the pipeline, as bars")
    add("--sweep", type=count, nargs="*", metavar="SIZE",
        help=f"draw the time over the split size (default: {' '.join(map(str, SIZES))}, up to the batch)")
    add("--tune", action="store_true", help="find the best split size; after --sweep, print both")
    add = p.add_argument_group("the model, and how it is cut").add_argument
    add("--model", default="resnet50", metavar="NAME", help="any classifier of torchvision (default: %(default)s)")
    add("--devices", default="auto", metavar="LIST",
        help="devices of the stages: cpu,cpu or cuda:0,cuda:1 (default: all GPUs, else cpu,cpu)")
    add("--balance", type=balance, default="time", metavar="time|memory|N,N",
        help="what the stages share evenly, or the number of segments of each (default: %(default)s)")
    add("--micro-batches", type=count, metavar="N", help="micro-batches of a batch (default: the best that is found)")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="schedule of the pipeline (default: %(default)s)")
    add("--remat", choices=REMATS, default="never", help="recompute activations (default: %(default)s)")
    add("--batch-norm", choices=["batch", "micro"], default="batch",
        help="what the running statistics follow (default: %(default)s)")
    add = p.add_argument_group("what is trained, for time only").add_argument
    add("--preset", choices=["tutorial"], help="PyTorch's tutorial: batch 120 of 128x128, 1000 classes, 3"
        " batches, 10 repeats, MSE, split size 20")
    add("--batch", type=count, metavar="N",
        help=f"pictures in a batch (default: {ON_CPU.batch}, on GPUs {ON_GPU.batch})")
    add("--image-size", type=flags.whole(8), metavar="N",
        help=f"side of a picture in pixels (default: {ON_CPU.image_size}, on GPUs {ON_GPU.image_size})")
    add("--classes", type=flags.whole(2), metavar="N", help=f"number of classes (default: {ON_CPU.classes})")
    add("--loss", choices=["mse", "cross-entropy"], help=f"loss, on one-hot targets (default: {ON_CPU.loss})")
    add("--batches", type=count, metavar="N",
        help=f"batches in a repeat (default: {ON_CPU.batches}, on GPUs {ON_GPU.batches})")
    add("--repeats", type=count, metavar="N",
        help=f"repeats of each variant, in turns (default: {ON_CPU.repeats}, on GPUs {ON_GPU.repeats})")
    add("--out", type=Path, metavar="DIR",
        help="folder for pictures and JSON (default: the next runs/pipeline_resnet-N)")
    # fmt: on
    return p


def balance(text: str) -> str | list[int]:
    """A type for flags: "time", "memory", or segments of each stage."""
    parts = text.split(",")
    if text in ("time", "memory"):
        return text
    if all(part.isdigit() and int(part) for part in parts):
        return [int(part) for part in parts]
    raise argparse.ArgumentTypeError(f'must be "time", "memory" or the segments of each stage, not {text!r}')


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code (2: something was refused; one message explains it)."""

    def work(detected: Detected) -> None:
        args = parser().parse_args(argv)
        if detected.launcher != "none":
            raise ConfigError(
                "pipeline_resnet must run in one process, over the devices of that process",
                f"started by {detected.launcher}",
                "start it without a launcher; several ranks train with hvdtrain.torch_resnet --pipeline",
                shared=True,
            )
        needed = startup.torch_modules("solo", detected)
        needed["matplotlib"] = install_command("plot")
        startup.find_modules(needed)
        startup.share_cores(detected)
        startup.import_modules(needed)
        explore(args)

    return startup.run_program(PROGRAM, work)


if __name__ == "__main__":
    sys.exit(main())
