"""Buffers over ranks: running statistics follow each rank's own samples, until they are made equal here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hvdtrain.torch.engines.engine import engine_of
from hvdtrain.torch.engines.replicas import checksums
from hvdtrain.torch.engines.shell import unwrap
from hvdtrain.torch.engines.sync_batchnorm import is_synchronized
from hvdtrain.values.preserved import Saved, buffers_of, kept_buffers, put_back
from hvdtrain.world.same_data import is_statistic
from hvdtrain.world.world import World

_CHUNK_BYTES = 1 << 26
_reported: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # buffers that differed between ranks


def synchronize(model: nn.Module, world: World) -> None:
    """Makes the buffers equal on all ranks: the mean of running statistics that differ, rank 0's of others; collective.

    The mean of the ranks' running means is that of all samples. The mean of their variances lacks the variance
    between the ranks' means, which is small if ranks see samples of one distribution (`sync_batchnorm=True`
    keeps it exact). Rank 0 reports once each other buffer that differed.

    Raises:
        ReplicaError: ranks have buffers of different shapes.
    """
    if world.size == 1:
        return
    buffers = dict(unwrap(model).named_buffers())
    kinds = {name: f"{tuple(buffer.shape)} {buffer.dtype}" for name, buffer in buffers.items()}
    remedy = "give buffers a shape that does not depend on the rank's own samples"
    world.agree_all(kinds, "every rank must have the same buffers: {} differs", lambda _: remedy)
    reports = world.gather(checksums(buffers))
    # the mean of equal values can be off by a rounding, so equal buffers are skipped
    differ = [name for name in buffers if any(sums[name] != reports[0][name] for sums in reports)]
    statistics = [name for name in differ if is_statistic(name) and buffers[name].is_floating_point()]
    others = [name for name in differ if name not in statistics]
    with torch.no_grad():
        average_([buffers[name] for name in statistics], world)
        broadcast_([buffers[name] for name in others], world)
    reported = _reported.setdefault(unwrap(model), set())
    if not reported.issuperset(others) and world.is_main:
        names = ", ".join(others[:5]) + ", ..." * (len(others) > 5)
        print(f"hvdtrain: buffers differ between ranks: {names}; all ranks now have those of rank 0", flush=True)
    reported.update(others)


def average_(tensors: Sequence[Tensor], world: World) -> None:
    """Sets floating tensors to their mean over ranks, summed in float64; collective."""
    _exchange(tensors, lambda flat: engine_of(world).sum_(flat.double()) / world.size)


def broadcast_(tensors: Sequence[Tensor], world: World, root: int = 0) -> None:
    """Gives every rank root's tensors, in place; collective. Any dtypes, layouts in memory and devices."""
    _exchange(tensors, lambda flat: engine_of(world).broadcast_(flat, root))


def once(tensor: Tensor) -> Tensor:
    """Returns each element in memory once: an expanded tensor takes no values, what it expands does."""
    for dim, stride in enumerate(tensor.stride()):
        tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim])) if stride == 0 else tensor
    return tensor


def _exchange(tensors: Sequence[Tensor], collective: Callable[[Tensor], Tensor]) -> None:
    for group in _groups([once(tensor) for tensor in tensors]):
        flat = collective(torch.cat([tensor.detach().reshape(-1) for tensor in group]))
        pieces = flat.split([tensor.numel() for tensor in group])
        for tensor, piece in zip(group, pieces, strict=True):
            # through .data: a buffer that a pending backward pass has saved is not in use any more, or unchanged
            tensor.data.copy_(piece.view(tensor.shape))


def _groups(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Splits tensors into groups of one dtype and device that travel as one."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for members in kinds.values():
        group: list[Tensor] = []
        size = 0
        for tensor in members:
            if group and size + tensor.nbytes > _CHUNK_BYTES:
                yield group
                group, size = [], 0
            group.append(tensor)
            size += tensor.nbytes
        yield group


@contextmanager
def unmoved_by_calls(module: nn.Module) -> Iterator[None]:
    """Restores a module's buffers after calls of it or of its parts while the context is open (except those of
    synchronised batch norm, which follow all ranks' samples): a batch that does not count must leave no trace in
    running statistics. Changes by the user between calls (a queue of keys of all ranks) stay."""
    saved: Saved = []
    layers, within = _alone(module), 0

    def enter(*_: object) -> None:
        nonlocal within
        within += 1
        if within == 1:
            saved[:] = buffers_of(layers)

    def leave(*_: object) -> None:
        nonlocal within
        within -= 1
        if not within:
            put_back(saved)

    with ExitStack() as hooks:
        for part in module.modules():
            hooks.callback(part.register_forward_pre_hook(enter, prepend=True).remove)
            hooks.callback(part.register_forward_hook(leave, always_call=True).remove)
        yield


def preserved(module: nn.Module) -> AbstractContextManager[None]:
    """Undoes every change of a buffer; like `unmoved_by_calls`, for compiled code, which calls no hooks."""
    return kept_buffers(_alone(module))


def _alone(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if not is_synchronized(layer)]
