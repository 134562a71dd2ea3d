"""One rank of `hvdtrain bench train`: trains in one of the ways (`ARMS`), and measures blocks of steps, turn by turn.

Every way trains the same model on the same batch with the same optimizer, and is written as its own documentation
writes it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import hvdtrain
from hvdtrain.bench.turns.turns import launched, pin
from hvdtrain.comm.turns import orders
from hvdtrain.core.launchers import Detected, detect
from hvdtrain.datasets import load_mnist
from hvdtrain.world import startup

PROGRAM = "hvdtrain.bench.turns.train_job"
Step = Callable[[], Any]
Block = Callable[[], tuple[float, float]]  # wall and CPU seconds of a step, mean over a block
CLASSES, TOY, MNIST = 1000, "toy", "mnist"
WARMUP_STEPS = 3  # before the first turn: buffers are allocated, DDP rebuilds its buckets, Horovod fills its cache
SKIPPED_STEPS = 3  # of each block of Keras: the input queue fills, and fit makes its checks
# models that both frameworks have: by torchvision's name, Keras' own
APPLICATIONS = {
    "resnet50": "ResNet50", "mobilenet_v2": "MobileNetV2", "vgg16": "VGG16", "densenet121": "DenseNet121", TOY: "",
}  # fmt: skip


def command(
    arm: str,
    ranks: int,
    *,
    model: str,
    per_rank_batch: int,
    steps: int,
    pixels: int = 64,
    device: str = "cpu",
    devices: int = 1,
    backend: str = "",
    launcher: str = "horovodrun",
) -> list[str]:
    """Returns the command of an arm, with its launcher. A process with several `devices` takes the batches of all."""
    on_horovod = arm in ("hvdtrain", "horovod") or backend
    settings = {
        "arm": arm, "model": model, "device": device, "per_rank_batch": per_rank_batch * devices, "pixels": pixels,
        "steps": steps, "devices": devices, "backend": backend,
    }  # fmt: skip
    start = launched(ranks, launcher if on_horovod else "torchrun")
    return [*start, sys.executable, "-m", PROGRAM, json.dumps(settings)]


def main() -> int:
    """Pins this rank to cores of its own, builds the way, answers orders until the bench ends."""
    args = argparse.Namespace(**json.loads(sys.argv[1]))

    def work(detected: Detected) -> None:
        args.local_rank = detected.local_rank
        if args.device == "cpu":
            pin(args.local_rank, args.devices)
        rank, block = (_of_keras if args.backend else _of_torch)(args)
        for _, connection in orders(rank):
            wall_s, cpu_s = block()
            found = {"wall": wall_s, "cpu": cpu_s, "memory": peak_memory()}
            connection.send(found | ({"batch": args.drawn} if "drawn" in args else {}))

    return startup.run_program(PROGRAM, work)


def peak_memory() -> float:
    """The most bytes in use so far: of the GPU that PyTorch used most of, else of this process."""
    torch: Any = sys.modules.get("torch")  # not imported for this alone
    if torch and torch.cuda.is_initialized():
        return float(max(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


# ---- PyTorch


def _of_torch(args: argparse.Namespace) -> tuple[int, Block]:
    import torch

    rank, device, step = ARMS[args.arm](args)
    wait: Step = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def block() -> tuple[float, float]:
        step()  # not counted: the ranks have just been woken
        wait()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(args.steps):
            step()
        wait()
        return (time.perf_counter() - wall) / args.steps, (time.process_time() - cpu) / args.steps

    for _ in range(WARMUP_STEPS):
        step()
    wait()
    return rank, block


def _parts(args: argparse.Namespace, device: Any = "cpu") -> tuple[Any, Any, Any, Any, Any]:
    """Model, optimizer, loss, and one batch of random pictures."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(args.devices)
    model = network(args.model).to(device)
    optimizer = torch_sgd(model.parameters())
    torch.manual_seed(args.local_rank)  # hvdtrain refuses ranks that train on the same batches
    x = torch.randn(args.per_rank_batch, 3, args.pixels, args.pixels, device=device)
    y = torch.randint(0, CLASSES, (args.per_rank_batch,), device=device)
    args.drawn = float(x.double().sum())  # a rank's own number, if its batch is its own
    return model, optimizer, torch.nn.CrossEntropyLoss(), x, y


def network(name: str) -> Any:
    """Returns a network of torchvision's, or a toy of one convolution, to check in a minute that all ways work here."""
    from torch import nn

    if name != TOY:
        import torchvision

        return torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    )


def torch_sgd(parameters: Any) -> Any:
    """The optimizer of every arm."""
    import torch

    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _device(args: argparse.Namespace, local_rank: int) -> Any:
    import torch

    if args.device == "cuda":
        torch.cuda.set_device(local_rank)
    return torch.device(args.device)


def _loop(model: Any, optimizer: Any, loss_of: Any, x: Any, y: Any, backward: Any = None) -> Step:
    """A step as every arm's documentation has it; `backward`: who differentiates, if not the loss itself."""

    def step() -> None:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        backward(loss) if backward else loss.backward()
        optimizer.step()

    return step


# ---- its arms


def hvdtrain_arm(args: argparse.Namespace) -> tuple[int, Any, Step]:
    """hvdtrain on Horovod (alone: one process)."""
    import hvdtrain.torch as hvt
    from hvdtrain.torch.engines.engine import device_of

    world = hvdtrain.init("torch", device=args.device)
    device = device_of(world)
    model, optimizer, loss_of, x, y = _parts(args, device)
    model, optimizer = hvt.prepare(model, optimizer)
    return world.rank, device, _loop(model, optimizer, loss_of, x, y, optimizer.backward)


def alone_arm(args: argparse.Namespace) -> tuple[int, Any, Step]:
    """Plain PyTorch, one process; of several, none knows of the others."""
    device = _device(args, args.local_rank)
    model, optimizer, loss_of, x, y = _parts(args, device)
    return args.local_rank, device, _loop(model, optimizer, loss_of, x, y)


def apart_arm(args: argparse.Namespace) -> tuple[int, Any, Step]:
    """Prepares hvdtrain in separate processes: the speed that ranks could reach that had nothing to send."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # of torchrun's
    return args.local_rank, *hvdtrain_arm(args)[1:]


def horovod_arm(args: argparse.Namespace) -> tuple[int, Any, Step]:
    """Horovod as its README writes it."""
    import horovod.torch as hvd

    hvd.init()
    device = _device(args, hvd.local_rank())
    model, optimizer, loss_of, x, y = _parts(args, device)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return hvd.rank(), device, _loop(model, wrapped, loss_of, x, y)


def ddp_arm(args: argparse.Namespace) -> tuple[int, Any, Step]:
    """DistributedDataParallel as PyTorch's tutorial writes it."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    device = _device(args, args.local_rank)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model, optimizer, loss_of, x, y = _parts(args, device)
    wrapped = DistributedDataParallel(model)
    return dist.get_rank(), device, _loop(wrapped, optimizer, loss_of, x, y)


def accelerate_arm(args: argparse.Namespace) -> tuple[int, Any, Step]:
    """Hugging Face Accelerate as its quick tour writes it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=args.device == "cpu")
    model, optimizer, loss_of, x, y = _parts(args, accelerator.device)
    wrapped, prepared = accelerator.prepare(model, optimizer)
    step = _loop(wrapped, prepared, loss_of, x, y, accelerator.backward)
    return accelerator.process_index, accelerator.device, step


def fabric_arm(args: argparse.Namespace) -> tuple[int, Any, Step]:
    """Lightning Fabric as its documentation writes it."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator=args.device, devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    model, optimizer, loss_of, x, y = _parts(args, fabric.device)
    wrapped, prepared = fabric.setup(model, optimizer)
    return fabric.global_rank, fabric.device, _loop(wrapped, prepared, loss_of, x, y, fabric.backward)


def dataparallel_arm(args: argparse.Namespace) -> tuple[int, Any, Step]:
    """Prepares one process that cuts each batch over its devices: DataParallel, fixed (`engine="dataparallel"`)."""
    import hvdtrain.torch as hvt
    from hvdtrain.torch.engines.engine import device_of

    world = hvdtrain.init("torch", engine="dataparallel", device=args.device, gpus_per_rank=args.devices)
    device = device_of(world)
    model, optimizer, loss_of, x, y = _parts(args, device)
    model, optimizer = hvt.prepare(model, optimizer)
    return 0, device, _loop(model, optimizer, loss_of, x, y, optimizer.backward)


def deepspeed_arm(args: argparse.Namespace) -> tuple[int, Any, Step]:
    """DeepSpeed as its getting-started page writes it."""
    os.environ["DS_ACCELERATOR"] = args.device
    import deepspeed

    device = _device(args, args.local_rank)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled here first
    model, optimizer, loss_of, x, y = _parts(args, device)
    config = {"train_micro_batch_size_per_gpu": args.per_rank_batch, "zero_optimization": {"stage": 0}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step() -> None:
        loss = loss_of(engine(x), y)
        engine.backward(loss)
        engine.step()

    return engine.global_rank, device, step


def pipeline_arm(args: argparse.Namespace) -> tuple[int, Any, Step]:
    """Prepares one process with the model cut over its devices."""
    import hvdtrain.pipeline

    hvdtrain.init("torch", engine="solo", device=args.device)
    model, _, loss_of, x, y = _parts(args)
    devices = [f"cuda:{index}" if args.device == "cuda" else "cpu" for index in range(args.devices)]
    pipe = hvdtrain.pipeline.split(model, x, devices)
    optimizer = torch_sgd(pipe.parameters())

    def step() -> None:
        optimizer.zero_grad()
        pipe.step(x, y, loss_of)
        optimizer.step()

    return 0, pipe.devices[0], step


# ---- Keras


def _of_keras(args: argparse.Namespace) -> tuple[int, Block]:
    os.environ["KERAS_BACKEND"] = args.backend
    needed = startup.keras_modules(args.backend, detect(os.environ))
    startup.find_modules(needed)
    startup.import_modules(needed)
    rank = hvdtrain.init("keras", device="cpu").rank
    return rank, ARMS[args.arm](args, *_pictures(args))


def _pictures(args: argparse.Namespace) -> tuple[Any, Any]:
    """Returns a block's pictures and labels: of all ranks if they are dealt out, else a rank's own."""
    import numpy as np

    count = (args.steps + SKIPPED_STEPS) * args.per_rank_batch
    if args.arm == "prepared":
        count *= hvdtrain.current().size  # type: ignore[union-attr]
    if args.model != MNIST:
        draw = np.random.Generator(np.random.PCG64(0))
        shape = (count, args.pixels, args.pixels, 3)
        return draw.standard_normal(shape, np.float32), draw.integers(0, CLASSES, count)
    images = load_mnist("digits")
    wanted = np.arange(count)
    return images.x_train[..., None].take(wanted, axis=0, mode="wrap"), images.y_train.take(wanted, mode="wrap")


def _compiled(args: argparse.Namespace) -> Any:
    """The network of the Keras MNIST program, with its optimizer and loss; or one of Keras' own."""
    import keras

    from hvdtrain import keras_mnist

    if args.model != MNIST:
        model = _application(args.model, (args.pixels, args.pixels, 3))
        model.compile(optimizer=keras.optimizers.SGD(0.01, momentum=0.9), loss="sparse_categorical_crossentropy")
        return model
    model = keras_mnist.network()
    model.compile(
        optimizer=keras.optimizers.Adadelta(learning_rate=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def _application(name: str, shape: tuple[int, int, int]) -> Any:
    import keras

    if name != TOY:
        return getattr(keras.applications, APPLICATIONS[name])(weights=None, input_shape=shape, classes=CLASSES)
    its = keras.layers
    return keras.Sequential([
        its.Input(shape), its.Conv2D(8, 3), its.BatchNormalization(), its.ReLU(), its.GlobalAveragePooling2D(),
        its.Dense(CLASSES, "softmax"),
    ])  # fmt: skip


def _timer() -> Any:
    """A callback that records the end of each step; both ways have one."""
    import keras

    class Timer(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.ends: list[tuple[float, float]] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append((time.perf_counter(), time.process_time()))

        def seconds_per_step(self) -> tuple[float, float]:
            """Wall and CPU seconds of a step, mean over the block."""
            first, last = self.ends[SKIPPED_STEPS - 1], self.ends[-1]
            steps = len(self.ends) - SKIPPED_STEPS
            return (last[0] - first[0]) / steps, (last[1] - first[1]) / steps

    return Timer()


def plain_arm(args: argparse.Namespace, x: Any, y: Any) -> Block:
    """A block of plain Keras, as its documentation writes it."""
    model, timer = _compiled(args), _timer()

    def block() -> tuple[float, float]:
        model.fit(x, y, batch_size=args.per_rank_batch, epochs=1, callbacks=[timer], verbose=0)
        return timer.seconds_per_step()

    return block


def prepared_arm(args: argparse.Namespace, x: Any, y: Any) -> Block:
    """A block of Keras with hvdtrain, as its README writes it."""
    import hvdtrain.keras as hvk

    model, timer = _compiled(args), _timer()
    data = hvk.loader((x, y), args.per_rank_batch)
    hvk.prepare(model, data)

    def block() -> tuple[float, float]:
        model.fit(data, epochs=1, callbacks=[*hvk.callbacks(model), timer], verbose=0)
        return timer.seconds_per_step()

    return block


ARMS: dict[str, Callable[..., Any]] = {  # of PyTorch: a rank, its device, a step; of Keras: a block
    "hvdtrain": hvdtrain_arm,
    "alone": alone_arm,
    "apart": apart_arm,
    "horovod": horovod_arm,
    "ddp": ddp_arm,
    "accelerate": accelerate_arm,
    "dataparallel": dataparallel_arm,
    "deepspeed": deepspeed_arm,
    "pipeline": pipeline_arm,
    "fabric": fabric_arm,
    "plain": plain_arm,
    "prepared": prepared_arm,
}


if __name__ == "__main__":
    sys.exit(main())
