"""Is training right: engines of PyTorch, and Keras, on one or more ranks, against a plain reference in this process.

17 samples in steps of 8: the last step has one sample, and a second rank none.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.bench.gpu.check import Found, Goal, NotHere, apart
from hvdtrain.record import stats
from hvdtrain.torch.engines.engine import device_of

SAMPLES, GLOBAL_BATCH, EPOCHS, KERAS_EPOCHS = 17, 8, 3, 2
EXACT, ROUNDING = 1e-10, 1e-5
KERAS_ROUNDING = 1e-4  # Keras on PyTorch computes losses and batch-norm in float32


def machine(args: argparse.Namespace) -> Found:
    """Versions, the GPU, and what Horovod was built with."""
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
    return [Goal("GPUs missing", float(missing), 0.0)], figures


# ---- an engine


def net(engine: str) -> nn.Module:
    """Returns a network of the data type and with the normalisation that an engine supports."""
    torch.manual_seed(3)
    norm = nn.GroupNorm(2, 8) if engine == "dataparallel" else nn.BatchNorm2d(8)
    layers = [nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 5)]
    return nn.Sequential(*layers).to(type_of(engine))


def type_of(engine: str) -> torch.dtype:
    return torch.float32 if engine == "deepspeed" else torch.float64


def data(engine: str) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(SAMPLES, 3, 8, 8, generator=draw, dtype=torch.float64)
    return x.to(type_of(engine)), torch.randint(0, 5, (SAMPLES,), generator=draw)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def plain(engine: str, device: torch.device) -> tuple[dict[str, Any], float]:
    """The reference: one process, whole batches, nothing of hvdtrain."""
    model = net(engine).to(device)
    optimizer = sgd(model)
    x, y = (part.to(device) for part in data(engine))
    for _ in range(EPOCHS):
        for begin in range(0, SAMPLES, GLOBAL_BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[begin : begin + 8]), y[begin : begin + 8]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return model.state_dict(), float(nn.functional.cross_entropy(model(x), y))


def engine(args: argparse.Namespace) -> Found:
    """Weights, statistics and losses of one engine (DeepSpeed: in float32, TF32 off)."""
    if args.engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise NotHere("DeepSpeed is not installed")
    if args.shared:
        through_main_memory(args.engine)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with hvdtrain.init("torch", engine=args.engine, device=args.device, seed=5) as world:
        train = hvt.loader(data(args.engine), GLOBAL_BATCH // world.size, shuffle=False)
        module = net(args.engine)
        model, optimizer = hvt.prepare(module, sgd(module), train, sync_batchnorm=world.size > 1)
        for _ in train.epochs(EPOCHS):
            for x, y in train:
                optimizer.zero_grad()
                optimizer.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
        found = hvt.evaluate(model, data(args.engine), hvt.classification(top=(1,)), per_rank_batch=3)
        state, device = hvt.unwrap(model).state_dict(), device_of(world)
        expected, loss = plain(args.engine, device)
        off = max(world.gather(apart(state, expected)))
        exact = EXACT if type_of(args.engine) == torch.float64 else ROUNDING
        goals = [Goal("weights off by", off, exact), Goal("loss off by", abs(found["loss"] - loss), exact)]
        if args.device == "cuda":
            goals.append(Goal("not on the GPU", float(device.type != "cuda"), 0.0))
        return goals, {"engine": world.engine, "ranks": world.size, "device": str(device)}


# ---- Keras


def keras_fit(args: argparse.Namespace) -> Found:
    """Keras on PyTorch: a fit with tails and batch-norm over all ranks, against plain Keras."""
    if importlib.util.find_spec("keras") is None:
        raise NotHere("Keras is not installed")
    if args.shared:
        through_main_memory("horovod")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with hvdtrain.init("keras", device=args.device, seed=5) as world:
        import keras

        import hvdtrain.keras as hvk

        draw = np.random.default_rng(4)
        x, y = draw.normal(size=(SAMPLES, 8, 8, 3)).astype("float32"), draw.integers(0, 5, SAMPLES)

        def net() -> Any:
            keras.utils.set_random_seed(3)
            layers = keras.layers
            parts = [layers.Conv2D(8, 3), layers.BatchNormalization(), layers.ReLU(), layers.Flatten(), layers.Dense(5)]
            model = keras.Sequential([layers.Input((8, 8, 3)), *parts])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, jit_compile=False)
            return model

        model, plain = net(), net()
        data = hvk.loader((x, y), GLOBAL_BATCH // world.size, shuffle=False)
        hvk.prepare(model, data, sync_batchnorm=True)
        model.fit(data, epochs=KERAS_EPOCHS, verbose=0, callbacks=hvk.callbacks(model))
        found = hvk.evaluate(model, (x, y), per_rank_batch=4)["loss"]
        plain.fit(x, y, batch_size=GLOBAL_BATCH, shuffle=False, epochs=KERAS_EPOCHS, verbose=0)
        expected = plain.evaluate(x, y, verbose=0)
        pairs = zip(model.weights, plain.weights, strict=True)
        off = max(float(np.abs(_numpy(mine) - _numpy(its)).max()) for mine, its in pairs)
        off = max(world.gather(off))
        where = model.trainable_variables[0].value.device
        goals = [
            Goal("weights off by", off, KERAS_ROUNDING),
            Goal("loss off by", abs(found - expected), KERAS_ROUNDING),
        ]
        goals.append(Goal("not on the device", float(where.type != args.device), 0.0))
        return goals, {"engine": world.engine, "ranks": world.size, "device": str(where)}


def _numpy(variable: Any) -> np.ndarray:
    import keras

    return np.asarray(keras.ops.convert_to_numpy(variable))


# ---- ranks that share a GPU: NCCL refuses two of them, so what they send travels in main memory, over Gloo
# torch.distributed's Gloo takes CUDA tensors; Horovod chooses by where a tensor lies, so its operations get copies

IN_PLACE = ("allreduce_async_", "grouped_allreduce_async_", "broadcast_async_")
NEW = ("allreduce_async", "allgather_async")


def through_main_memory(engine: str) -> None:
    """Makes an engine of this process do so; before it starts."""
    if engine == "ddp":
        dist.is_nccl_available = lambda: False
        return
    import horovod.torch as hvd
    from horovod.torch import mpi_ops

    pending: dict[int, list[Tensor]] = {}
    changed = {name: _staged(getattr(mpi_ops, name), pending) for name in (*IN_PLACE, *NEW)}
    changed["synchronize"] = _returned(mpi_ops.synchronize, pending)
    for module in (hvd, mpi_ops):  # what it exports, and what its own functions call
        for name, function in changed.items():
            setattr(module, name, function)


def _staged(start: Callable[..., int], pending: dict[int, list[Tensor]]) -> Callable[..., int]:
    """The operation on copies in main memory; `pending`: by handle, the tensors that were given."""

    @functools.wraps(start)
    def on_copies(tensors: Any, *args: Any, **options: Any) -> int:
        given = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        copies = [tensor.detach().to("cpu", copy=True) for tensor in given]
        handle = start(copies if isinstance(tensors, (list, tuple)) else copies[0], *args, **options)
        pending[handle] = given if start.__name__ in IN_PLACE else [tensor.new_empty(0) for tensor in given]
        return handle

    return on_copies


def _returned(finish: Callable[[int], Any], pending: dict[int, list[Tensor]]) -> Callable[[int], Any]:
    @functools.wraps(finish)
    def synchronize(handle: int) -> Any:
        result, given = finish(handle), pending.pop(handle, None)
        if given is None:
            return result
        several = isinstance(result, (list, tuple))
        pairs = zip(given, result if several else [result], strict=True)
        back = [_back(tensor, copy) for tensor, copy in pairs]
        return back if several else back[0]

    return synchronize


def _back(tensor: Tensor, copy: Tensor) -> Tensor:
    """The result where it belongs: in the tensor that was given, or (an empty one) beside it."""
    with torch.no_grad():
        return tensor.copy_(copy) if tensor.shape == copy.shape else copy.to(tensor.device)
