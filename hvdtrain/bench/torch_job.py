"""One rank of `hvdtrain bench train --framework torch`: one of the arms, measured turn by turn.

Every arm trains the same torchvision model on the same batch with the same optimizer, and is written as its own
documentation writes it.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from hvdtrain.bench.turns.turns import pin
from hvdtrain.comm.turns import orders

Step = Callable[[], Any]
CLASSES, TOY = 1000, "toy"
WARMUP_STEPS = 3  # before the first turn: buffers are allocated, DDP rebuilds its buckets, Horovod fills its cache


def main() -> int:
    """Pins this rank to a core of its own, builds the arm, answers orders until the bench ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arm", choices=sorted(ARMS))
    for flag in ("--model", "--device"):
        parser.add_argument(flag, required=True)
    for flag in ("--per-rank-batch", "--pixels"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--devices", type=int, default=1, help="of one process; its batch is for all of them")
    args = parser.parse_args()
    if args.device == "cpu":
        pin(_local_rank(), args.devices)
    import torch

    rank, device, step = ARMS[args.arm](args)
    wait: Step = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(WARMUP_STEPS):
        step()
    wait()
    for order, connection in orders(rank):
        connection.send(measure(step, wait, order["steps"]))
    return 0


def measure(step: Step, wait: Step, steps: int) -> dict[str, float]:
    """Wall and CPU seconds of a step, mean over some; the first is not counted: the ranks have just been woken.

    With them the most memory that was in use so far: of the process, or of the GPU that has most; in bytes.
    """
    step()
    wait()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    wait()
    wall, cpu = (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps
    return {"wall": wall, "cpu": cpu, "memory": peak_memory()}


def peak_memory() -> float:
    """Bytes: of the GPU that PyTorch used most of, else of this process."""
    torch: Any = sys.modules.get("torch")  # not imported for this alone
    if torch and torch.cuda.is_initialized():
        return float(max(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _local_rank() -> int:
    from hvdtrain.core.launchers import detect

    return detect(os.environ).local_rank


def _parts(args: argparse.Namespace, device: Any = "cpu") -> tuple[Any, Any, Any, Any, Any]:
    """Model, optimizer, loss, and one batch of random pictures."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(args.devices)
    model = network(args.model).to(device)
    optimizer = torch_sgd(model.parameters())
    torch.manual_seed(_local_rank())  # hvdtrain refuses ranks that train on the same batches
    x = torch.randn(args.per_rank_batch, 3, args.pixels, args.pixels, device=device)
    y = torch.randint(0, CLASSES, (args.per_rank_batch,), device=device)
    return model, optimizer, torch.nn.CrossEntropyLoss(), x, y


def network(name: str) -> Any:
    """One of torchvision's, or a toy of one convolution, to see in a minute that all ways work here."""
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


def _device_of(world: Any) -> Any:
    from hvdtrain.torch.engines.engine import device_of

    return device_of(world)


def _loop(model: Any, optimizer: Any, loss_of: Any, x: Any, y: Any, backward: Any = None) -> Step:
    """A step as every arm's documentation has it; `backward`: who differentiates, if not the loss itself."""

    def step() -> None:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        backward(loss) if backward else loss.backward()
        optimizer.step()

    return step


# ---- the arms


def hvdtrain_arm(args: argparse.Namespace) -> tuple[int, Any, Step]:
    """hvdtrain on Horovod (alone: one process)."""
    import hvdtrain
    import hvdtrain.torch as hvt

    world = hvdtrain.init("torch", device=args.device)
    device = _device_of(world)
    model, optimizer, loss_of, x, y = _parts(args, device)
    model, optimizer = hvt.prepare(model, optimizer)
    return world.rank, device, _loop(model, optimizer, loss_of, x, y, optimizer.backward)


def alone_arm(args: argparse.Namespace) -> tuple[int, Any, Step]:
    """Plain PyTorch, one process; of several, none knows of the others."""
    device = _device(args, _local_rank())
    model, optimizer, loss_of, x, y = _parts(args, device)
    return _local_rank(), device, _loop(model, optimizer, loss_of, x, y)


def apart_arm(args: argparse.Namespace) -> tuple[int, Any, Step]:
    """hvdtrain in processes of which none knows of the others: what ranks could reach that had nothing to send."""
    rank = _local_rank()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # of torchrun's
    return rank, *hvdtrain_arm(args)[1:]


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

    device = _device(args, _local_rank())
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
    """One process that cuts each batch over its devices: torch.nn.DataParallel, mended (`engine="dataparallel"`)."""
    import hvdtrain
    import hvdtrain.torch as hvt

    world = hvdtrain.init("torch", engine="dataparallel", device=args.device, gpus_per_rank=args.devices)
    device = _device_of(world)
    model, optimizer, loss_of, x, y = _parts(args, device)
    model, optimizer = hvt.prepare(model, optimizer)
    return 0, device, _loop(model, optimizer, loss_of, x, y, optimizer.backward)


def deepspeed_arm(args: argparse.Namespace) -> tuple[int, Any, Step]:
    """DeepSpeed as its getting-started page writes it."""
    os.environ["DS_ACCELERATOR"] = args.device
    import deepspeed

    device = _device(args, _local_rank())
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
    """One process, the model cut over its devices."""
    import hvdtrain
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


ARMS: dict[str, Callable[[argparse.Namespace], tuple[int, Any, Step]]] = {
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
}
NEEDS = {"accelerate": "accelerate", "fabric": "lightning_fabric", "deepspeed": "deepspeed"}


if __name__ == "__main__":
    sys.exit(main())
