"""Equal replicas: checksums that cost a few reductions on the device, and the SHA-256 of a model."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hvdtrain.core.errors import ReplicaError
from hvdtrain.torch.engines import unprepared
from hvdtrain.torch.engines.shell import unwrap
from hvdtrain.world.same_data import PRIME
from hvdtrain.world.world import World

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20  # elements at a time: their products, and the factors, take 8 bytes each


def fingerprint(model: nn.Module) -> str:
    """Returns the SHA-256 (hex) of names, types, shapes and bits of the model's parameters and buffers; local.

    In training, running statistics differ between ranks; `evaluate` and `Checkpointer.save` make them equal.

    Example:
        world.agree("model", hvt.fingerprint(model))
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(unwrap(model).state_dict().items()):
        if not isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor!r}".encode())
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns a checksum of each tensor's bits and their order; one transfer from each device."""
    sums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    found: dict[str, int] = {}
    for device in dict.fromkeys(value.device for value in sums.values()):
        names = [name for name, value in sums.items() if value.device == device]
        found |= zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True)
    return {name: found[name] for name in tensors}


def _checksum(tensor: Tensor) -> Tensor:
    """The elements' bits as integers, each times an odd number that belongs to its place, modulo 2**64."""
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj())
    flat = flat.reshape(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    total, factors = torch.zeros((), dtype=torch.int64, device=flat.device), _factors(flat.device)
    for piece in flat.view(_INTEGERS[flat.element_size()]).split(_PIECE):
        total = total * PRIME + (piece * factors[: len(piece)]).sum()
    return total


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """int64 [_PIECE], odd, as good as random."""
    with torch.inference_mode(False):
        places = torch.arange(1, _PIECE + 1, device=device) * PRIME
        return (places ^ (places >> 29)) * PRIME | 1


def check_equal(module: nn.Module, world: World, when: str) -> None:
    """Raises `ReplicaError` on every rank if parameters differ, with the first one and its ranks; collective."""
    if world.size == 1:
        return
    mine = checksums(dict(module.named_parameters()))
    digest = hashlib.sha256(repr(sorted(mine.items())).encode()).hexdigest()
    if len(set(world.gather(digest))) == 1:
        return
    reports = world.gather(mine)
    differing = [name for name in reports[0] if any(report.get(name) != reports[0][name] for report in reports)]
    first = differing[0] if differing else "the set of parameters"
    others = [rank for rank, report in enumerate(reports) if report.get(first) != reports[0].get(first)]
    raise ReplicaError(
        f"the replicas must be equal ({when})",
        f"{first} of rank(s) {', '.join(map(str, others))} differs from rank 0's"
        + (f"; {len(differing)} of {len(reports[0])} parameters differ" if len(differing) > 1 else ""),
        (f"prepare each optimizer that steps: {unprepared.PREPARE}\n" if unprepared.reported else "")
        + "change parameters on every rank alike, only through optimizer.step();\n"
        "load weights before prepare(), or with Checkpointer.restore",
        shared=True,
        code=45,
    )
