"""What happens once, when a model is prepared: ranks agree on what they train, and start from rank 0's state."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain.comm.elastic import repeated
from hvdtrain.core.lr import LR
from hvdtrain.torch.engines import buffers
from hvdtrain.torch.engines.base import Staged
from hvdtrain.torch.update import staged as stages
from hvdtrain.torch.update.session import Options
from hvdtrain.torch.update.several import kind_of, members_of
from hvdtrain.values.nested import map_tensors
from hvdtrain.world.world import World


def signature(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: Options,
    lr: LR | None,
    data: Any,
    staged: Staged | None = None,
    *,
    restored: bool = False,
) -> dict[str, str]:
    """Returns what must be the same on every rank, as text; the most telling first. `restored`: the optimizer's
    settings will be those that rank 0 has loaded."""
    found = {f"lr ({type(lr).__name__})": repr(lr)}
    found |= {f"prepare(..., {name}=)": repr(value) for name, value in asdict(options).items()}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found["optimizer"] = kind_of(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        for key, value in sorted(group.items()):  # a group that was loaded has another order
            if restored and key != "params":
                continue
            members = [names[id(p)] for p in value] if key == "params" else None
            shown = float(value) if isinstance(value, Tensor) else value
            found[f"optimizer group {index}: {key}"] = repr(shown) if members is None else ", ".join(members)
    for name, parameter in module.named_parameters():
        found[f"parameter {name}"] = f"{tuple(parameter.shape)} {parameter.dtype}, trained: {parameter.requires_grad}"
    for name, buffer in module.named_buffers():
        found[f"buffer {name}"] = f"{tuple(buffer.shape)} {buffer.dtype}"
    if staged is not None:
        found |= stages.signature(staged)
    found["loader"] = "none" if data is None else f"{data.plan.samples} samples, per_rank_batch {data.per_rank_batch}"
    found["torch"] = torch.__version__
    return found


def is_restored_on_main(optimizer: torch.optim.Optimizer, world: World) -> bool:
    """Returns True if rank 0's optimizer has a state and another rank's has none: rank 0 alone has loaded a checkpoint,
    and its settings are sent to all with its state; collective."""
    if world.size == 1:
        return False
    has_state = world.gather(bool(optimizer.state))
    return has_state[0] and not all(has_state)


_REMEDY = "give all ranks the same flags, data and code path"
_REMEDIES = {
    ": lr": "scale the learning rate by the number of ranks, not by the rank; hvdtrain.LR does it for you",
    "of the pipeline": "each rank has timed the segments for itself: split on every rank again, with rank 0's cut, as"
    " balance=world.broadcast([len(stage.segments) for stage in pipe.stages])",
    "micro_batches": "each rank has tuned for itself: pipe.micro_batches = world.broadcast(pipe.micro_batches)",
}


def check_agreement(mine: Mapping[str, str], world: World) -> None:
    """Compares the ranks' signatures; raises `ReplicaError`, on every rank, with the first thing that differs, and
    each rank's value; collective."""
    world.agree_all(
        mine,
        "every rank must train the same: {} differs",
        lambda name: next((remedy for end, remedy in _REMEDIES.items() if name.endswith(end)), _REMEDY),
    )


@repeated
def broadcast_state(module: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Gives every rank rank 0's parameters, buffers and optimizer state; collective."""
    if world.size == 1:
        return
    with torch.no_grad():
        buffers.broadcast_([*module.parameters(), *module.buffers()], world)
        _broadcast_optimizer(optimizer, world)


def _broadcast_optimizer(optimizer: torch.optim.Optimizer, world: World) -> None:
    """The structure as bytes, then the tensors: ranks need not have any state of their own yet."""
    tensors: list[Tensor] = []

    def slot(tensor: Tensor) -> _Slot:
        tensors.append(tensor)
        return _Slot(len(tensors) - 1)

    skeleton = map_tensors(slot, optimizer.state_dict()) if world.is_main else None
    shapes = [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors]
    skeleton, shapes = world.broadcast((skeleton, shapes))
    if not shapes:
        if not world.is_main:
            for member in members_of(optimizer):
                member.state.clear()
        return
    if not world.is_main:
        device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
        tensors = [torch.empty(s, dtype=t, device="cpu" if d == "cpu" else device) for s, t, d in shapes]
    buffers.broadcast_(tensors, world)
    if not world.is_main:
        optimizer.load_state_dict(map_tensors(tensors.__getitem__, skeleton, _Slot))


class _Slot(int):
    """The place of a tensor, by its number."""


def split_streams(world: World, *words: object) -> None:
    """Gives each of several ranks random numbers of its own, derived from the seed, the rank, and words: PyTorch's
    (dropout, noise, the workers of a `DataLoader`), Python's and numpy's. One process keeps those it has, unless
    there are words."""
    if world.size == 1 and not words:
        return
    text = ":".join(map(str, (world.seed, world.rank, *words)))
    seeds = hashlib.sha256(text.encode()).digest()
    torch.manual_seed(int.from_bytes(seeds[:8], "little") >> 1)
    random.seed(seeds[8:16])
    np.random.seed(int.from_bytes(seeds[16:20], "little"))
