"""The generators of random numbers that programs on PyTorch draw from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hvdtrain.core.generators import Generators

HOST = Generators([torch.default_generator])  # those of no GPU


def of_devices(*devices: torch.device) -> Generators:
    """Returns the host's generators, and those of the GPUs among these devices."""
    gpus = sorted({torch.cuda._utils._get_device_index(d, optional=True) for d in devices if d.type == "cuda"})
    if gpus:
        torch.cuda.init()
    return Generators([torch.default_generator, *(torch.cuda.default_generators[gpu] for gpu in gpus)])


def of_all_gpus() -> Generators:
    """Returns the host's generators, and those of every GPU that this process sees."""
    return of_devices(*(torch.device("cuda", gpu) for gpu in range(torch.cuda.device_count())))


def differ(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Compares two states of `Generators.everything`, or their first parts, which are PyTorch's."""
    if not all(map(torch.equal, one[0], other[0])):
        return True
    if len(one) == 1:
        return False
    (_, python, numpy), (_, their_python, their_numpy) = one, other
    return python != their_python or numpy[2:] != their_numpy[2:] or not np.array_equal(numpy[1], their_numpy[1])
