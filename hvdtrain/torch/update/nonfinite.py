"""A loss that is not finite ends training on every rank at the same step, with the layer that it came from.

The sum of all ranks' losses travels with the gradients, so every rank sees it and no further message is needed. On a
GPU it is read some updates later, when it has arrived anyway: reading it at once would make the GPU wait for Python
in every step. By then the parameters are spoilt and the layer cannot be found any more; with the environment variable
HVDTRAIN_CHECK_EVERY_STEP=1 it is read at once.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.core import variables
from hvdtrain.core.errors import NonFiniteError
from hvdtrain.torch.engines.sync_batchnorm import sync_batchnorm_mode
from hvdtrain.values.nested import tensors_of
from hvdtrain.values.preserved import kept_buffers
from hvdtrain.world.same_data import is_statistic
from hvdtrain.world.world import World

_LAG = 2
_SKIPPED_AT_MOST = 10  # in a row: more is no overflow that a smaller scale, or another batch, would end
GO_BACK = "earlier checkpoints are untouched: restore one, here or in a new run"


@dataclass(frozen=True)
class PendingLosses:
    """The losses of one update, on their way to Python."""

    step: int  # counted from 1
    epoch: int  # counted from 0
    every: Tensor  # float64 scalar, summed over ranks
    mine: Tensor | float  # this rank's part of it
    layer: str  # what `first_bad_layer` found, if this rank's loss is known to be bad
    wrong: Tensor | float  # float64 scalar, the same on every rank: not 0 where the update's weights are not right
    explain: Callable[[], Exception]  # makes the error for that; collective
    words: Tensor  # float64 [2]: how many ranks know that the ranks are about to change, and how many must end
    arrived: Any = None  # a CUDA event, where the numbers come from a GPU


class Losses:
    """The mean loss of each update over all ranks' samples."""

    def __init__(self, world: World, device: torch.device, *, skips: bool = False) -> None:
        self._world = world
        self._skips = skips
        self._skipped = 0  # updates one after the other
        self._on_gpu = device.type == "cuda"
        self.at_once = not self._on_gpu or os.environ.get(variables.CHECK_EVERY_STEP, "") not in ("", "0")
        self._under_way: deque[PendingLosses] = deque()
        self.last: float | None = None  # of the newest update whose loss has been read
        self.preempted = self.leaves = False  # of one that has: a rank was preempted; the ranks are about to change

    def add(self, new: PendingLosses) -> None:
        """Notes the losses of an update and reads those that are due; the same call on every rank. Raises
        `NonFiniteError` or `ConfigError` on every rank."""
        if self._on_gpu:
            five = [  # numbers of Python come from a rank without samples
                value if isinstance(value, Tensor) else torch.full_like(new.every, value)
                for value in (new.every, new.mine, new.wrong, *new.words)
            ]
            read = torch.empty(5, dtype=torch.float64, pin_memory=True).copy_(torch.stack(five), non_blocking=True)
            every, mine, wrong = read[:3]
            new = replace(new, every=every, mine=mine, wrong=wrong, words=read[3:], arrived=torch.cuda.Event())
            new.arrived.record()
        self._under_way.append(new)
        self.settle(0 if self.at_once or self.last is None else _LAG)  # the first one shows whether weights are right

    def settle(self, left: int = 0) -> None:
        """Reads all but the newest `left` losses; where one is not finite raises `NonFiniteError` on every rank."""
        while len(self._under_way) > left:
            reading = self._under_way.popleft()
            if reading.arrived is not None:
                reading.arrived.synchronize()
            if float(reading.wrong):
                raise reading.explain()
            leaves, preempted = reading.words.tolist()
            self.preempted, self.leaves = self.preempted or bool(preempted), self.leaves or bool(leaves)
            every, mine = float(reading.every), float(reading.mine)
            if not math.isfinite(every):
                self._skipped += 1
                if self._skips and self._skipped < _SKIPPED_AT_MOST:
                    continue
                self._under_way.clear()
                raise self._error(reading, every, mine)
            self.last, self._skipped = every, 0

    def forget(self) -> None:
        """A checkpoint was restored: what is under way is of updates that are undone."""
        self._under_way.clear()
        self.leaves = False

    def _error(self, reading: PendingLosses, every: float, mine: float) -> NonFiniteError:
        lines = []
        for rank, (loss, layer) in enumerate(self._world.gather((mine, reading.layer))):
            where = layer or f"the layer is named when the run is repeated with {variables.CHECK_EVERY_STEP}=1"
            lines.append(f"rank {rank}: " + ("finite" if math.isfinite(loss) else f"{loss}; {where}"))
        return NonFiniteError(
            f"training cannot continue: the loss is {every} at step {reading.step} (epoch {reading.epoch})",
            "\n".join(lines),
            "if an input batch is not finite: clean the data; else lower the learning rate,\n"
            "or warm it up longer, or clip gradients (clip=1.0);\n"
            f'with amp="fp16" try amp="bf16"; {GO_BACK}',
            shared=True,
            code=37,
        )


def gradient_error(bad: Sequence[str], norm: float, step: int) -> NonFiniteError:
    """Returns the error for a gradient norm that is not finite, with the parameters whose gradients are bad; the
    same on every rank, since gradients are averaged."""
    return NonFiniteError(
        f"training cannot continue: the gradient norm is {norm} at step {step}",
        f"the loss is finite; gradients that are not: {', '.join(bad[:3])}{' ...' if len(bad) > 3 else ''}"
        if bad
        else "every gradient is finite, but their norm overflows",
        "lower the learning rate or warm it up longer;\nlook for a square root, a logarithm or a division at 0 after"
        f" the layer named; {GO_BACK}",
        shared=True,
    )


def check_weights(module: nn.Module, world: World) -> None:
    """Raises `NonFiniteError`, on every rank, if a trained parameter or a running statistic is not finite;
    collective."""
    watched: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
    watched |= {
        name: buffer for name, buffer in module.named_buffers() if is_statistic(name) and buffer.is_floating_point()
    }
    reports = world.gather([name for name, tensor in watched.items() if not _all_finite(tensor.detach())])
    if any(reports):
        raise NonFiniteError(
            "weights that are not finite are not saved: training has diverged",
            "\n".join(
                f"rank {rank}: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
                for rank, names in enumerate(reports)
                if names
            ),
            f"clip gradients (clip=1.0: a gradient that is not finite then ends training at once); {GO_BACK}",
            shared=True,
            code=42,
        )


def _all_finite(values: Tensor) -> bool:
    """Returns `isfinite(values).all()`, 20 times as fast: a sum is not finite if a value is not, seldom otherwise."""
    total = values.sum(dtype=torch.float32 if values.element_size() < 4 else None)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(values).all())


def first_bad_layer(
    module: nn.Module, args: Iterable[Any], kwargs: Mapping[str, Any], call: Callable[..., Any] | None = None
) -> str:
    """Runs the module, or `call`, which runs its layers, on the batch again; returns where the first value that is
    not finite appears."""
    args = tuple(args)
    if not _finite((args, dict(kwargs))):
        return "the input batch itself is not finite"
    found: list[str] = []
    names = {id(child): name or "the model" for name, child in module.named_modules()}

    def look(child: nn.Module, inputs: Any, options: Any, outputs: Any) -> None:
        if found or _finite(outputs):
            return
        name = f"{names[id(child)]} ({type(child).__name__})"
        if not _finite((inputs, options)):
            found.append(f"first bad value: an operation before {name}, whose input is not finite already")
            return
        own = [n for n, p in child.named_parameters() if not torch.isfinite(p).all()]
        found.append(
            f"first bad layer: {name}"
            + (f", whose {own[0]} is not finite" if own else ", its input and weights are finite")
        )

    hooks = [child.register_forward_hook(look, with_kwargs=True) for child in module.modules()]
    try:
        # the other ranks do not take part in this
        with torch.no_grad(), sync_batchnorm_mode("alone"), kept_buffers(module.modules()):
            (module if call is None else call)(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else "the model's outputs are finite: look at the loss function and the labels"


def _finite(value: Any) -> bool:
    tensors = [tensor for tensor in tensors_of(value) if tensor.is_floating_point() or tensor.is_complex()]
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
