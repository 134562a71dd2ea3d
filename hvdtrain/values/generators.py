"""The generators of random numbers that programs on PyTorch draw from."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain.core.generators import Generators
from hvdtrain.private.torch import gpu_index

HOST = Generators([torch.default_generator])  # those of no GPU


def of_devices(*devices: torch.device) -> Generators:
    """Returns the host's generators, and those of the GPUs among these devices."""
    gpus = sorted({gpu_index(d, optional=True) for d in devices if d.type == "cuda"})
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


def random_streams(gpus: Sequence[int]) -> dict[str, Any]:
    """Returns the state of every generator that a training program may draw from, of all GPUs of this rank."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "more_cuda": [torch.cuda.get_rng_state(gpu) for gpu in gpus[1:]],
        "python": [version, list(words), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest],
    }


def restore_streams(saved: Mapping[str, Any], gpus: Sequence[int]) -> None:
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
    for gpu, state in zip(gpus[1:], saved.get("more_cuda", ()), strict=False):  # as far as there are as many
        torch.cuda.set_rng_state(state, gpu)
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
