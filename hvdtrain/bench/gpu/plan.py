"""What is checked, in which order, and by which command."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class GpuCheck:
    """One program.

    Attributes:
        name, what: of it, in a word and in a line.
        job: module of this folder.
        engine: that it takes.
        limit_s: when it is ended.
        ranks: started by `hvdtrain launch` or torchrun; 0: the program itself.
        timed: has the machine for itself.
        shares: its ranks share a GPU, which NCCL does not allow: their sums go over Gloo.
    """

    name: str
    what: str
    job: str
    engine: str = ""
    limit_s: int = 100  # the first programs find a cold file system
    ranks: int = 0
    timed: bool = False
    shares: bool = False


CHECKS = (
    GpuCheck("machine", "versions, the GPU, what Horovod was built with", "machine"),
    GpuCheck("solo", "one process against plain PyTorch", "parity", "solo"),
    GpuCheck("dataparallel", "one process that cuts its batches, on one device", "parity", "dataparallel"),
    GpuCheck("horovod", "Horovod, one rank (NCCL)", "parity", "horovod", ranks=1),
    GpuCheck("horovod-shared", "Horovod, two ranks on one device (Gloo)", "parity", "horovod", ranks=2, shares=True),
    GpuCheck("ddp", "DistributedDataParallel, one rank (NCCL)", "parity", "ddp", ranks=1),
    GpuCheck("ddp-shared", "the same, two ranks on one device (Gloo)", "parity", "ddp", ranks=2, shares=True),
    GpuCheck("deepspeed", "DeepSpeed, if it is there, one rank", "parity", "deepspeed", ranks=1),
    GpuCheck("keras", "Keras on PyTorch against plain Keras, one process", "keras_fit"),
    GpuCheck("keras-horovod", "Keras on PyTorch over Horovod, one rank (NCCL)", "keras_fit", ranks=1),
    GpuCheck("keras-shared", "the same, two ranks on one device (Gloo)", "keras_fit", ranks=2, shares=True),
    GpuCheck("resources", "memory, threads, files and streams over 200 steps", "resources"),
    GpuCheck("pipeline", "two stages on one device against the unsplit model", "stages", timed=True),
    GpuCheck("speed", "ResNet-50, bf16: images/s, and against the bare loop", "speed", "solo", 120, timed=True),
    GpuCheck("speed-horovod", "the same over Horovod, one rank (NCCL)", "speed", "horovod", 120, 1, timed=True),
    GpuCheck("input", "does the loader keep up: pictures in memory, JPEG files", "feed", "", 150, timed=True),
)


def command(check: GpuCheck, args: argparse.Namespace) -> list[str]:
    """The check's command line."""
    program = [sys.executable, "-m", "hvdtrain.bench.gpu.check", check.job, *filter(None, [check.engine])]
    program += [f"--device={args.device}"] + ["--tiny"] * args.tiny + ["--shared"] * check.shares
    if not check.ranks:
        return program
    if check.engine in ("ddp", "deepspeed"):  # which need no Horovod
        ranks = ["--standalone", f"--nproc-per-node={check.ranks}", "--no-python"]
        return [sys.executable, "-m", "torch.distributed.run", *ranks, *program]
    hosts = ["-np", str(check.ranks), "-H", f"localhost:{check.ranks}", "--no-checks", "--quiet"]
    return [sys.executable, "-m", "hvdtrain", "launch", *hosts, "--", *program]


def environment() -> dict[str, str]:
    """The environment of the checks, which run in folders of their own."""
    paths = [str(Path(__file__).resolve().parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "KERAS_BACKEND": "torch", "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths),
    }  # fmt: skip
