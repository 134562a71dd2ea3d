"""Versions, the GPU, and what Horovod was built with."""

from __future__ import annotations

import argparse
import importlib.util
import os

from hvdtrain.bench.gpu.found import Goal, say
from hvdtrain.record import stats


def check(args: argparse.Namespace) -> None:
    import torch

    figures = stats.versions("torch", "torchvision", "keras", "horovod", "hvdtrain", "deepspeed", "mpi4py")
    figures["cores"] = str(len(os.sched_getaffinity(0)))
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        figures["GPU"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        figures["CUDA"] = f"{torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    if importlib.util.find_spec("horovod"):
        import horovod.torch as hvd

        figures["Horovod with"] = " ".join(name for name in ("nccl", "gloo", "mpi") if getattr(hvd, f"{name}_built")())
    missing = args.device == "cuda" and not torch.cuda.is_available()
    say([Goal("GPUs missing", float(missing), 0.0)], **figures)
