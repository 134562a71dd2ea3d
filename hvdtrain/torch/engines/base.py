"""What an engine gives the adapter: collectives on tensors, and `bind`, which ties one model to it.

Everything else (weights of samples, accumulation, mixed precision, clipping, checkpoints, telemetry) is written once,
above this protocol, and so is the same on every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain.comm.engines import Engine, HostCollectives, gpus_of_rank
from hvdtrain.core.launchers import Detected

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Staged(Protocol):
    """A model that runs its own passes: cut into stages, each on a device of its own (`hvdtrain.pipeline.Pipeline`).

    It is called like the module it holds, without gradients; training goes through `step`.

    Attributes:
        module: the user's own, not cut; its parameters are those of the stages.
        devices: of the stages, in order.
        micro_batches: pieces that `step` cuts a batch into; it can be set.
        batch_is_part: a batch is one of several of an update; it can be set.
    """

    module: nn.Module
    devices: Sequence[torch.device]
    micro_batches: int
    batch_is_part: bool

    def step(
        self,
        x: Any,
        y: Any,
        loss: Callable[[Any, Any], Tensor],
        *,
        kwargs: Mapping[str, Any],
        weight: Any = None,
        factor: float | Tensor = 1.0,
        outputs: bool = False,
        whole: bool = False,
    ) -> Any:
        """Runs forward and backward; adds `factor` times the gradient of the mean loss to `p.grad`. Returns the mean
        loss, detached; with `outputs` a tuple of it and the model's outputs.

        Args:
            weight: what the mean loss divides by: None (samples), a function of the targets that adds up over
                micro-batches, or a number for a batch in one piece. Of weight 0 in all: no gradient, a loss of 0.
        """

    def owned_parameters(self) -> Sequence[Sequence[nn.Parameter]]:
        """Returns the parameters by stage; those that several stages use are in a list of their own."""

    def finishing(self, group: int) -> bool:
        """Returns True if this is the pass that completes the gradients of a list of `owned_parameters`; called in a
        gradient's hook, inside `step`."""


def staged_or_none(model: object) -> Staged | None:
    """Returns the model if it runs its own passes (`Staged`); None for any other."""
    methods = ("step", "owned_parameters", "finishing")
    return cast(Staged, model) if all(callable(getattr(model, name, None)) for name in methods) else None


def step_of(optimizer: torch.optim.Optimizer, closure: Callable[[], object] | None) -> None:
    """The plain optimizer's step; some of the users' own take no closure."""
    optimizer.step() if closure is None else optimizer.step(closure)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Transport:
    """The transport of gradients. A compression ("fp16", "bf16") casts them for sending, and they are summed in that
    type. Buckets have about `bucket_bytes`; the default suits the device."""

    compression: Literal["fp16", "bf16"] | None = None
    bucket_bytes: int | None = None
    staged: Staged | None = None  # the model, where it runs its own passes (see `StagedEngineModel`)


@dataclass(frozen=True)
class Pass:
    """The data that a backward pass sends, and the way it is sent.

    Attributes:
        extras: float64 [k] on the engine's device, with `reduce`: summed over ranks in place; ready after `finish`.
        afterwards: True if a parameter may get its gradient in parts: none is sent before the pass has ended. None:
            unknown (of a proof).
    """

    reduce: bool  # the update's last pass: start to sum the gradients. Else they add up in `p.grad`, locally
    extras: Tensor | None = None
    retain_graph: bool = False  # as torch's
    afterwards: bool | None = None
    counts: bool = True  # False: this rank has no sample. What its stand-in reaches in this pass is not used by that


class EngineModel(Protocol):
    """A model and its optimizer on an engine.

    The module and the optimizer given to `bind` stay the ones that are saved, loaded and read; the forward pass
    goes through `call`.
    """

    call: Callable[..., Any]

    def backward(self, loss: Tensor, sent: Pass) -> None:
        """Runs the backward pass of a scalar loss, which is weighted so that gradients are to be summed over ranks."""

    def finish(self) -> None:
        """Waits for the sums. Then `p.grad` is the sum over ranks; None, on every rank, where no rank had one."""

    def step(self, closure: Callable[[], object] | None = None) -> None:
        """Takes the optimizer's step; raises `ConfigError` for a closure, where the engine takes none."""

    def close(self) -> None:
        """Takes hooks off the model."""


class StagedEngineModel(EngineModel, Protocol):
    """A model that may run its own passes, on an engine that `runs_stages`."""

    def run(self, passes: Callable[[], None], sent: Pass) -> None:
        """Runs `passes` as `backward` runs autograd's own: `passes` runs `Staged.step`, and sets
        `sent.extras`."""


@runtime_checkable
class TorchEngine(Engine, Protocol):
    """`hvdtrain.comm.engines.Engine`, plus tensors; `runs_stages`: takes models that run their own passes
    (`Staged`). Collective methods are called in the same order on every rank."""

    runs_stages: bool

    @property
    def device(self) -> torch.device: ...

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sums a contiguous tensor over ranks, in place, and returns it."""

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Gives every rank root's contiguous tensor, in place, and returns it."""

    def gather(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        """Returns the ranks' uint8 tensors [n] end to end; rank r's has `counts[r]` elements, at least one."""

    def bind(self, module: nn.Module, optimizer: torch.optim.Optimizer, settings: Transport) -> EngineModel: ...


class TensorCollectives(HostCollectives):
    """The collectives of ranks that exchange tensors, by `sum_`, `broadcast_` and `gather`; engines add `bind`."""

    @property
    def device(self) -> torch.device:
        return device_of(self.devices)

    def sum_(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Tensor:
        raise NotImplementedError

    def host_sum(self, array: np.ndarray) -> np.ndarray:
        return self.sum_(torch.from_numpy(array)).numpy()

    def host_broadcast(self, array: np.ndarray, root: int) -> np.ndarray:
        return self.broadcast_(torch.from_numpy(array), root).numpy()

    def gather(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        raise NotImplementedError

    def host_gather(self, array: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        return self.gather(torch.from_numpy(array), counts).numpy()


def pick_devices(detected: Detected, device: str, gpus_per_rank: int) -> tuple[int, ...]:
    """Chooses this rank's GPUs, makes the first one current, and returns them; raises as `gpus_of_rank`."""
    framework = f"torch {torch.__version__}"
    devices = gpus_of_rank(detected, device, torch.cuda.device_count, framework, gpus_per_rank)
    if devices:
        torch.cuda.set_device(devices[0])
    return devices


def device_of(devices: Sequence[int]) -> torch.device:
    """The device a rank computes on: its first GPU, or the CPU."""
    return torch.device("cuda", devices[0]) if devices else torch.device("cpu")
