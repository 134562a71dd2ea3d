"""Mixed precision: the forward pass under autocast, and for fp16 the loss scaled so that small gradients survive.

The order is average, unscale, clip, step: gradients are reduced while scaled, so every rank sees the same infinities
and all skip the same update, without asking each other (Micikevicius et al., arXiv 1710.03740; PyTorch's AMP recipe).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from hvdtrain.torch.engines.base import HALVES
from hvdtrain.values.nested import map_tensors


class MixedPrecision:
    """The numeric type of one prepared model's passes: its own types, "bf16" or "fp16". Given weights are divided by
    `unit` before gradients are summed, so that tokens by the thousand do not overflow float16. `unit` is a power of
    two near the weight of a planned sample in the last update; it changes no digit."""

    def __init__(self, amp: Literal["bf16", "fp16"] | None, device: torch.device) -> None:
        self.amp = amp
        self._device_type = device.type
        self._scaler = torch.amp.GradScaler(device.type) if amp == "fp16" else None
        self.skipped_steps = 0
        self.unit: float | Tensor = 1.0

    def note_weights(self, per_planned: Tensor) -> None:
        """Sets `unit`; a scalar, of any device, not read."""
        unit = torch.where(per_planned > 0, torch.exp2(torch.log2(per_planned).round()), torch.ones_like(per_planned))
        self.unit = float(unit) if unit.device.type == "cpu" else unit

    def autocast(self) -> AbstractContextManager[Any]:
        if self.amp is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=HALVES[self.amp])

    def outputs(self, out: Any) -> Any:
        """Gives the outputs of the model in float32: a loss is computed outside of autocast."""
        return out if self.amp is None else map_tensors(widened, out)

    def scale(self, loss: Tensor) -> Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def factor(self, weight: float | Tensor, device: torch.device) -> float | Tensor:
        """Returns what gradients are multiplied with where the loss is not at hand: `weight`, times the scale if
        there is one."""
        return weight if self._scaler is None else self._scaler.scale(torch.as_tensor(weight, device=device))

    def unscale(self, stepper: ScalerAdapter) -> None:
        """Divides the (averaged) gradients by the scale, and looks for infinities."""
        if self._scaler is not None and stepper.has_gradients():
            self._scaler.unscale_(stepper)  # type: ignore[arg-type]

    def forget(self) -> None:
        """The gradients that were unscaled are not stepped with; the scale stays."""
        if self._scaler is not None:
            self._scaler.update(self._scaler.get_scale())

    def step(self, stepper: ScalerAdapter) -> None:
        """Steps, unless the scaler found an infinity; adapts the scale."""
        if self._scaler is None or not stepper.has_gradients():
            stepper.step()
            return
        stepper.stepped = False
        self._scaler.step(stepper)  # type: ignore[arg-type]
        self._scaler.update()
        self.skipped_steps += not stepper.stepped

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a checkpoint keeps, as plain numbers."""
        scaler = dict(self._scaler.state_dict()) if self._scaler is not None else {}
        return {"scaler": scaler, "skipped_steps": self.skipped_steps, "unit": float(self.unit)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave; a checkpoint of a run without scaler leaves a new scaler as it is."""
        self.skipped_steps = int(state["skipped_steps"])
        self.unit = float(state.get("unit", 1.0))
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])


class ScalerAdapter:
    """The optimizer that the gradient scaler sees: the real one's parameters, and the engine's step."""

    def __init__(self, optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._step = step
        self.stepped = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def has_gradients(self) -> bool:
        return any(p.grad is not None for group in self._optimizer.param_groups for p in group["params"])

    def step(self) -> None:
        self.stepped = True
        self._step()


def widened(tensor: Tensor) -> Tensor:
    """Returns what is of 16 bits in float32, and anything else as it is."""
    return tensor.float() if tensor.dtype in HALVES.values() else tensor
