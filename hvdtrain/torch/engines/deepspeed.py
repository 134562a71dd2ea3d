"""DeepSpeed, which carries the gradients and steps the optimizer; the data, the schedule and the files are hvdtrain's.

Its own ZeRO is off (stage 0); `zero` shares out the optimizer's state. Checkpoints are those of the other engines.
Written against DeepSpeed 0.19.8: its `engine.py` is the reference for the comments here.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvdtrain.core.errors import ConfigError, LauncherError, install_command
from hvdtrain.core.launchers import Detected
from hvdtrain.torch.engines.base import HALVES, Pass, Transport
from hvdtrain.torch.engines.group import GroupEngine, join, rank_losses
from hvdtrain.torch.engines.shell import trainable

_REDUCIBLE = (torch.float32, torch.bfloat16, torch.float16)
_BUCKET_BYTES = 100 << 20
_TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_NEVER = 2**62  # steps between DeepSpeed's own progress lines


def attach(detected: Detected, *, device: str, gpus_per_rank: int) -> GroupEngine:
    """Joins the ranks of torch.distributed and hands the group to DeepSpeed; raises `LauncherError` if it cannot be
    loaded."""
    # read when it is imported; without it DeepSpeed takes a GPU that was not asked for
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device == "cpu" or not torch.cuda.is_available() else "cuda")
    deepspeed = _import()
    engine = join("deepspeed", DeepSpeedModel, detected, device=device, gpus_per_rank=gpus_per_rank)
    # on CPUs it would compile an extension of its own for small messages, on every machine, at the first start
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False, auto_mpi_discovery=False, verbose=False)
    return engine


# what `destroy` imports: the garbage collector may call it within another import, whose lock it would break then
# (CPython issue 91351: a KeyError in importlib)
_AT_THE_END = ("module_inject.auto_ep_comm", "utils.pin_memory")


def _import() -> Any:
    """Imports DeepSpeed, quietly: a module of PyTorch's that it takes in warns where there is no GPU."""
    with _quiet("torch.utils.cpp_extension"):
        try:
            deepspeed = importlib.import_module("deepspeed")
            for name in _AT_THE_END:
                importlib.import_module(f"deepspeed.{name}")
            return deepspeed
        except Exception as error:  # it probes compilers and drivers while it is imported
            raise LauncherError(
                "the deepspeed engine needs DeepSpeed", f"{type(error).__name__}: {error}", install_command("deepspeed")
            ) from error


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Limits that logger to errors while the context is open."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class DeepSpeedModel:
    """A model and its optimizer in DeepSpeed's hands, which reduces gradients after the backward pass: in `finish`."""

    def __init__(
        self, engine: GroupEngine, module: nn.Module, optimizer: torch.optim.Optimizer, settings: Transport
    ) -> None:
        self.call: Callable[..., Any] = module
        self._module = module
        self._device = engine.device
        _check_types(module)
        self._bucket_elements = (settings.bucket_bytes or _BUCKET_BYTES) // 4
        self._engine = _initialize(module, optimizer, engine, settings, _wire_type(module, settings))
        self._extras: Tensor | None = None
        self._used: list[bool] | None = None  # where the pass tells no more

    def backward(self, loss: Tensor, sent: Pass) -> None:
        self._used = None if sent.counts else [p.grad is not None for p in trainable(self._module)]
        with self._engine.no_sync():
            self._engine.backward(loss, retain_graph=sent.retain_graph)
        self._extras = sent.extras if sent.reduce else None

    def finish(self) -> None:
        parameters = trainable(self._module)
        used = self._used or [p.grad is not None for p in parameters]
        tail = torch.tensor(used, dtype=torch.float64).to(self._device)
        if self._extras is not None:
            tail = torch.cat([tail, self._extras])
        with rank_losses():
            work = dist.all_reduce(tail, async_op=True)
            self._engine.buffered_allreduce_fallback(elements_per_buffer=self._bucket_elements)
            work.wait()
        if self._extras is not None:
            self._extras.copy_(tail[len(used) :])
            self._extras = None
        for parameter, ranks in zip(parameters, tail.tolist(), strict=False):
            if not ranks:  # DeepSpeed made zeros: an optimizer would decay these weights and move their momentum
                parameter.grad = None

    def step(self, closure: Callable[[], object] | None = None) -> None:
        if closure is not None:
            raise ConfigError(
                "step(closure) is not supported with engine='deepspeed'",
                "step(closure)",
                'optimizer.backward(loss) and step(), or engine="ddp" or "horovod"',
            )
        self._engine.step()

    def close(self) -> None:
        self._engine.module_forward_pre_hook.remove()
        self._engine.module_forward_post_hook.remove()
        self._engine.destroy()


def _check_types(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in _REDUCIBLE:
            raise ConfigError(
                "trainable parameters must be float32, bfloat16 or float16 with engine='deepspeed'",
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}",
                'convert the model, or use engine="ddp" or "horovod"',
            )


def _wire_type(module: nn.Module, settings: Transport) -> torch.dtype:
    """Returns the type gradients travel in: the parameters' own where they share one, or float32."""
    if settings.compression:
        return HALVES[settings.compression]
    own = {parameter.dtype for parameter in trainable(module)}
    return own.pop() if len(own) == 1 else torch.float32


def _initialize(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    engine: GroupEngine,
    settings: Transport,
    wire_type: torch.dtype,
) -> Any:
    """Returns DeepSpeed's engine: no precision, clipping, accumulation or schedule of its own; sums, not means."""
    deepspeed = importlib.import_module("deepspeed")  # not `import`: this module has the same name
    config = {
        "train_micro_batch_size_per_gpu": 1,  # only its own throughput figures would use it
        "gradient_accumulation_steps": 1,
        "gradient_allreduce_op": "sum",
        "gradient_clipping": 0.0,  # by default it would clip at 1
        "communication_data_type": _TYPE_NAMES[wire_type],
        "zero_optimization": {"stage": 0},
        "steps_per_print": _NEVER,
        "wall_clock_breakdown": False,
    }
    # it wants LOCAL_RANK, which not every launcher sets, and takes it for the index of the GPU to use
    local_rank = str(engine.devices[0] if engine.devices else engine.local_rank)
    with (
        mock.patch.dict(os.environ, {"LOCAL_RANK": local_rank}),
        # parameters are the same already, and it views them as bytes, which channels-last ones and scalars do not allow
        mock.patch.object(deepspeed.DeepSpeedEngine, "_broadcast_model", lambda self: None),
        _quiet("DeepSpeed"),  # it warns of optimizers it has not tried
    ):
        started, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    return started
