"""DeepSpeed, as the carrier of gradients and the one who steps: the data, the schedule and the files are hvdtrain's.

ZeRO stage 0: every rank holds the whole optimizer state, so checkpoints are those of the other engines.
Written against DeepSpeed 0.19.8, whose `engine.py` is the reference for what is said about it here.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvdtrain.core.errors import ConfigError, LauncherError, install_command
from hvdtrain.core.launchers import Detected
from hvdtrain.torch.engines.base import HALVES, Settings
from hvdtrain.torch.engines.group import GroupEngine, join, rank_losses
from hvdtrain.torch.shell import trainable

_REDUCIBLE = (torch.float32, torch.bfloat16, torch.float16)
_BUCKET_BYTES = 100 << 20
_NEVER = 2**62  # steps between DeepSpeed's own progress lines


def attach(detected: Detected, *, device: str, gpus_per_rank: int) -> GroupEngine:
    """Joins the ranks of torch.distributed and hands the group to DeepSpeed.

    Raises:
        LauncherError: DeepSpeed is missing, or cannot be loaded.
    """
    # read when it is imported; without it DeepSpeed takes a GPU that was not asked for
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device == "cpu" or not torch.cuda.is_available() else "cuda")
    deepspeed = _import()
    engine = join("deepspeed", DeepSpeedModel, detected, device=device, gpus_per_rank=gpus_per_rank)
    # on CPUs it would compile an extension of its own for small messages, on every machine, at the first start
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False, auto_mpi_discovery=False, verbose=False)
    return engine


def _import() -> Any:
    """Imports DeepSpeed, quietly: a module of PyTorch's that it takes in warns where there is no GPU."""
    notes = logging.getLogger("torch.utils.cpp_extension")
    level = notes.level
    notes.setLevel(logging.ERROR)
    try:
        return importlib.import_module("deepspeed")
    except Exception as error:  # it probes compilers and drivers while it is imported
        raise LauncherError(
            "the deepspeed engine needs DeepSpeed", f"{type(error).__name__}: {error}", install_command("deepspeed")
        ) from error
    finally:
        notes.setLevel(level)


class DeepSpeedModel:
    """A model and its optimizer in DeepSpeed's hands.

    DeepSpeed reduces gradients after the backward pass, not during it, so that is what `finish` does.
    """

    def __init__(
        self, engine: GroupEngine, module: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings
    ) -> None:
        self.call: Callable[..., Any] = module
        self._module = module
        self._device = engine.device
        _check_types(module)
        self._bucket_elements = (settings.bucket_bytes or _BUCKET_BYTES) // 4
        self._engine = _initialize(module, optimizer, engine)
        self._engine.communication_data_type = _wire_type(module, settings)
        self._extras: Tensor | None = None

    def backward(self, loss: Tensor, *, reduce: bool, extras: Tensor | None = None) -> None:
        """See `EngineModel.backward`."""
        with self._engine.no_sync():
            self._engine.backward(loss)
        self._extras = extras if reduce else None

    def finish(self) -> None:
        """See `EngineModel.finish`."""
        parameters = trainable(self._module)
        used = torch.tensor([float(p.grad is not None) for p in parameters], dtype=torch.float64)
        used = used.to(self._device)
        tail = used if self._extras is None else torch.cat([used, self._extras])
        with rank_losses():
            work = dist.all_reduce(tail, async_op=True)
            self._engine.allreduce_gradients(bucket_size=self._bucket_elements)
            work.wait()
        if self._extras is not None:
            self._extras.copy_(tail[len(parameters) :])
            self._extras = None
        for parameter, uses in zip(parameters, tail.tolist(), strict=False):
            if not uses:  # DeepSpeed made zeros: an optimizer would decay these weights and move their momentum
                parameter.grad = None

    def step(self) -> None:
        self._engine.step()

    def close(self) -> None:
        """Takes DeepSpeed's hooks off the model."""
        self._engine.module_forward_pre_hook.remove()
        self._engine.module_forward_post_hook.remove()
        self._engine.destroy()


def _check_types(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in _REDUCIBLE:
            raise ConfigError(
                "DeepSpeed reduces gradients of float32, bfloat16 and float16",
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}",
                'convert the model, or use engine="ddp" or "horovod"',
            )


def _wire_type(module: nn.Module, settings: Settings) -> torch.dtype:
    """Returns the type gradients travel in: the parameters' own where they share one, or float32."""
    if settings.compression:
        return HALVES[settings.compression]
    own = {parameter.dtype for parameter in trainable(module)}
    return own.pop() if len(own) == 1 else torch.float32


def _initialize(module: nn.Module, optimizer: torch.optim.Optimizer, engine: GroupEngine) -> Any:
    """Returns DeepSpeed's engine: no precision, clipping, accumulation or schedule of its own; sums, not means."""
    deepspeed = importlib.import_module("deepspeed")  # not `import`: this module has the same name
    config = {
        "train_micro_batch_size_per_gpu": 1,  # only its own throughput figures would use it
        "gradient_accumulation_steps": 1,
        "gradient_allreduce_op": "sum",
        "gradient_clipping": 0.0,  # left out, it would clip at 1
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
    ):
        started, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    return started
