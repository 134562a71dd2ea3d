"""One process, several devices: each batch is cut into pieces, one a device, and the outputs are put together again.

Like `torch.nn.DataParallel`, without its pitfalls. Scalars (a mean loss computed inside the model) are refused; torch
makes a mean of means of them. A batch that the devices do not divide, or that is smaller than their number, is cut
unevenly. Checkpoints carry no `module.` prefix. If the first device holds more memory than the others, a report names
what balances it. On a CPU the pieces run one after another, so that tests there run the code that GPUs run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import parallel_apply, replicate

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.launchers import Detected
from hvdtrain.torch.engines.base import Transport, pick_devices
from hvdtrain.torch.engines.shell import is_compiled
from hvdtrain.torch.engines.solo import Solo, SoloModel
from hvdtrain.values.nested import batch_size, cut, join, to_device

UNEVEN = 1.1  # times what the others hold


def attach(detected: Detected, *, device: str, gpus_per_rank: int) -> DataParallelEngine:
    """Returns the engine of one process on all GPUs it sees, or on `gpus_per_rank` of them, if that is more than 1.
    Without GPUs a batch is cut into `gpus_per_rank` pieces, at least 2. Raises `ConfigError` for a GPU that is not
    there."""
    visible = 0 if device == "cpu" else torch.cuda.device_count()
    devices = pick_devices(detected, device, gpus_per_rank if gpus_per_rank > 1 else max(visible, 1))
    pieces = len(devices) or max(gpus_per_rank, 2)
    return DataParallelEngine(name="dataparallel", devices=devices, pieces=pieces)


@dataclass(frozen=True)
class DataParallelEngine(Solo):
    """`TorchEngine` of one process on several devices; `pieces` is into how many a batch is cut."""

    runs_stages = False
    pieces: int = 1

    def bind(self, module: nn.Module, optimizer: torch.optim.Optimizer, settings: Transport) -> SoloModel:
        if _compiled(module):
            raise ConfigError(
                "torch.compile is not supported with engine='dataparallel'",
                "all copies of the model would run the code that was compiled for the first copy",
                'remove torch.compile, or use engine="ddp"',
            )
        devices = [torch.device("cuda", index) for index in self.devices] or [self.device] * self.pieces
        return PiecesModel(module, optimizer, devices)


def _compiled(module: nn.Module) -> bool:
    """Returns True if `torch.compile` has made a part of the module, what it holds, or compiled it in place."""
    held = (value for part in module.modules() for value in (part, *vars(part).values()))
    in_place = (part._compiled_call_impl is not None for part in module.modules())
    return any(map(is_compiled, held)) or any(in_place)


class PiecesModel(SoloModel):
    """A model whose batches are cut; after the first update it prints how much memory each GPU has needed."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, devices: Sequence[torch.device]) -> None:
        super().__init__(module, optimizer)
        self.call = Pieces(module, devices)
        self._untold = [device for device in devices if device.type == "cuda"]

    def step(self, closure: Callable[[], object] | None = None) -> None:
        super().step(closure)
        if len(self._untold) > 1:  # the optimizer's state is there by now
            print(memory_told({str(device): torch.cuda.max_memory_allocated(device) for device in self._untold}))
        self._untold = []


def memory_told(peaks: Mapping[str, int]) -> str:
    """Returns what each device held at most, in bytes by device, and, where the first needs clearly more, what
    balances them."""
    text = "hvdtrain: most memory up to the first update: "
    text += ", ".join(f"{device} {peak / 2**30:.2f} GiB" for device, peak in peaks.items())
    first, *others = peaks.values()
    if first <= UNEVEN * max(others):
        return text
    return (
        f"{text}\n  the first holds more: all outputs are gathered there, for the loss; and it alone has gradients and"
        " the optimizer's state. A loss inside the model leaves outputs where they are: forward(x, y) returns that of"
        " each sample. The rest is shared evenly under ddp (torchrun)"
    )


class Pieces:
    """Calls a module piecewise: `__call__` takes what the module takes, with samples along dimension 0. The first
    piece has the module's own buffers, the others copies, as in `torch.nn.DataParallel`. Gradients add up by
    themselves: the copies' parameters are the module's (on GPUs: copied from them under autograd)."""

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self._module = module
        self._devices = list(devices)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        samples = batch_size((args, kwargs))
        if samples < 2 or len(self._devices) < 2:
            return self._module(*args, **kwargs)
        sizes = piece_sizes(samples, len(self._devices))
        devices = self._devices[: len(sizes)]
        starts = itertools.accumulate(sizes, initial=0)
        pieces = [
            to_device(cut((args, kwargs), samples, start, start + size), device)
            for start, size, device in zip(starts, sizes, devices, strict=False)
        ]
        if devices[0].type == "cuda":
            replicas = replicate(self._module, devices, detach=not torch.is_grad_enabled())
            outputs = parallel_apply(replicas, [args for args, _ in pieces], [kwargs for _, kwargs in pieces], devices)
        else:
            # Not in threads: each operation uses all cores already, and threads would draw their dropout from the one
            # random stream of the CPU in an order that no two runs share.
            replicas = [self._module, *(replica_of(self._module) for _ in pieces[1:])]
            outputs = [replica(*args, **kwargs) for replica, (args, kwargs) in zip(replicas, pieces, strict=True)]
        return join(outputs, sizes, _not_joined, devices[0])


def piece_sizes(samples: int, pieces: int) -> list[int]:
    """Returns the samples of each piece: as even as possible, the larger first, none empty."""
    least, more = divmod(samples, pieces)
    return [size for size in ([least + 1] * more + [least] * (pieces - more)) if size]


def _not_joined(received: str, sizes: Sequence[int]) -> ConfigError:
    return ConfigError(
        "a model's outputs must have one row per sample with engine='dataparallel'",
        f"{received}, from pieces of {list(sizes)} samples",
        "return tensors, tuples, lists or dicts; for a loss inside the model return one value per sample\n"
        "(reduction='none') and take the mean outside; or use engine=\"ddp\", which does not cut batches",
    )


def replica_of(module: nn.Module) -> nn.Module:
    """Returns a copy of a module that shares its parameters and has its own buffers, as
    `torch.nn.parallel.replicate` does for GPUs; it refuses CPUs."""
    buffers = {id(buffer): buffer.clone() for buffer in module.buffers()}
    copies: dict[int, nn.Module] = {}

    def copy_of(original: nn.Module) -> nn.Module:
        if id(original) not in copies:
            replica = original._replicate_for_data_parallel()  # shallow, with dicts of its own
            copies[id(original)] = replica
            # in replicas parameters are no leaves, so `parameters()` would not list them; these stay leaves
            replica._parameters = dict(original._parameters)
            replica._buffers = {n: b if b is None else buffers[id(b)] for n, b in original._buffers.items()}
            replica._modules = {n: m if m is None else copy_of(m) for n, m in original._modules.items()}
        return copies[id(original)]

    return copy_of(module)
