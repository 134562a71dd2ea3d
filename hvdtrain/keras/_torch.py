"""The PyTorch backend of Keras: everything the adapter does with torch tensors and Horovod's torch
operations.

Twin of ``_tensorflow.py``; both implement the protocol in ``_backend.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
import torch

from hvdtrain.replicas import PRIME

REDUCIBLE = frozenset({torch.float16, torch.float32, torch.float64})
_INTEGER_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchBackend:
    """Tensor and collective operations for ``KERAS_BACKEND=torch``."""

    name = "torch"

    @property
    def hvd(self) -> Any:
        """``horovod.torch``, imported when the first collective needs it (one process needs none)."""
        import horovod.torch as hvd

        return hvd

    # ---------------------------------------------------------------- host side
    def host_allreduce(self, array: np.ndarray, op: str, name: str) -> np.ndarray:
        """Reduces a host array over ranks. ``op``: ``sum`` | ``min`` | ``max``."""
        operation = {"sum": self.hvd.Sum, "min": self.hvd.Min, "max": self.hvd.Max}[op]
        return self.hvd.allreduce(_host(array), op=operation, name=name).numpy()

    def host_broadcast(self, array: np.ndarray, root: int, name: str) -> np.ndarray:
        return self.hvd.broadcast(_host(array), root, name=name).numpy()

    def host_allgather(self, array: np.ndarray, name: str) -> np.ndarray:
        """Concatenates the ranks' arrays along axis 0 (lengths may differ)."""
        return self.hvd.allgather(_host(array), name=name).numpy()

    def eager(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def to_numpy(self, variable: Any) -> np.ndarray:
        return np.asarray(keras.ops.convert_to_numpy(variable.value))

    def copies(self, variables: Sequence[Any]) -> list[Any]:
        """Device-side copies of the variables' values, for ``put_back``."""
        return [variable.value.detach().clone() for variable in variables]

    def put_back(self, variables: Sequence[Any], copies: Sequence[Any]) -> None:
        with torch.no_grad():
            for variable, copy in zip(variables, copies, strict=True):
                variable.value.copy_(copy)

    def checksums(self, variables: Sequence[Any]) -> np.ndarray:
        """One int64 per variable, of its bits and their order."""
        return torch.stack([_checksum(variable.value) for variable in variables]).cpu().numpy()

    def make_checksums(self, variables: Sequence[Any]) -> Callable[[], np.ndarray]:
        """``checksums`` as a function to be called often."""
        return lambda: self.checksums(variables)

    # ---------------------------------------------------------------- inside a step
    def live(self, x: Any, sample_weight: Any, *, by_weight: bool) -> float:
        """What this rank's batch weighs: its samples, or the sum of its sample weights; 0 if those are all 0."""
        first = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
        weights = [w for w in keras.tree.flatten(sample_weight) if w is not None]
        if weights and by_weight:
            return sum(float(torch.as_tensor(weight).sum(dtype=torch.float64)) for weight in weights)
        if weights and not any(bool((torch.as_tensor(weight) != 0).any()) for weight in weights):
            return 0.0
        return float(first.shape[0])

    def start_sum(self, samples: float, name: str) -> Any:
        """Starts the sum of a number over ranks; it travels while the forward pass runs."""
        return self.hvd.allreduce_async(torch.tensor([samples], dtype=torch.float64), op=self.hvd.Sum, name=name)

    def finish_sum(self, started: Any) -> float:
        return float(self.hvd.synchronize(started)[0])

    def usable_here(self, tensor: Any) -> bool:
        del tensor
        return True

    def weigh(self, tensors: list[Any], samples: float, total: float, size: int) -> list[Any]:
        """Multiplies tensors by ``samples * size / total``; equal shares return them untouched, bit for
        bit.
        """
        if samples * size == total:
            return tensors
        factor = samples * size / total if total else 0.0
        return [tensor * factor for tensor in tensors]

    def unless_live(self, samples: float, variables: Sequence[Any], copies: Sequence[Any]) -> None:
        """Puts the copies back if this rank's batch held no live sample."""
        if samples == 0:
            self.put_back(variables, copies)

    def reduce(self, tensors: list[Any], op: str, name: str, *, half: bool, size: int) -> list[Any]:
        """All-reduces dense tensors of one dtype as one group. ``op``: ``average`` | ``max``."""
        dtype = tensors[0].dtype
        tensors = [tensor.detach() for tensor in tensors]
        if half and op == "average" and dtype.itemsize > 2:
            # divided before the cast: a sum of N values then fits wherever one value does
            sent = [(tensor / size).to(torch.float16).contiguous() for tensor in tensors]
            operation = self.hvd.Sum
        else:
            # Horovod wants contiguous memory; it reduces in place, in `variable.grad` as a rule
            sent = [tensor.contiguous() if dtype in REDUCIBLE else tensor.to(torch.float32) for tensor in tensors]
            operation = self.hvd.Average if op == "average" else self.hvd.Max
        came = self.hvd.grouped_allreduce_(sent, op=operation, name=name)
        return [value if value.dtype == dtype else value.to(dtype) for value in came]

    def gather_sparse(self, slices: Any, name: str, size: int) -> Any:
        raise NotImplementedError("Keras on PyTorch computes dense gradients only")

    def is_sparse(self, gradient: Any) -> bool:
        return bool(getattr(gradient, "is_sparse", False))

    def with_values(self, slices: Any, values: Any) -> Any:
        raise NotImplementedError("Keras on PyTorch computes dense gradients only")

    def densify(self, gradient: Any) -> Any:
        return gradient.to_dense()

    def agree_finite(self, finite: Any, name: str) -> Any:
        """True only if ``finite`` is true on every rank."""
        flag = torch.as_tensor(finite).to("cpu", torch.int32).reshape(1)
        return bool(self.hvd.allreduce(flag, op=self.hvd.Min, name=name)[0])

    def in_branch(self) -> bool:
        return False

    # ---------------------------------------------------------------- devices and random state
    def visible_gpus(self) -> int:
        return torch.cuda.device_count()

    def pin(self, devices: Sequence[int], *, cpu_only: bool) -> None:
        """Makes this rank's first GPU the current one, or keeps Keras on the CPU."""
        if cpu_only or not devices:
            # for the rest of the process, as KERAS_TORCH_DEVICE does when set before Keras is imported
            keras.device("cpu").__enter__()
        else:
            torch.cuda.set_device(devices[0])

    def random_state(self) -> dict[str, np.ndarray]:
        """The state of torch's own generators (dropout layers without a seed draw from them)."""
        state = {"torch_cpu": torch.get_rng_state().numpy()}
        if torch.cuda.is_available():
            state["torch_cuda"] = torch.cuda.get_rng_state().numpy()
        return state

    def set_random_state(self, state: dict[str, np.ndarray]) -> None:
        if "torch_cpu" in state:
            torch.set_rng_state(torch.from_numpy(np.array(state["torch_cpu"])))
        if "torch_cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.from_numpy(np.array(state["torch_cuda"])))

    def reseed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def tracing(self) -> bool:
        return False

    def hidden_random(self) -> list[str]:
        return []


def _host(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array, copy=True))


def _checksum(value: torch.Tensor) -> torch.Tensor:
    """The elements' bits as integers, each times an odd number that belongs to its place, modulo 2**64."""
    value = value.detach().reshape(-1)
    bits = value.to(torch.int8) if value.dtype == torch.bool else value.view(_INTEGER_OF_WIDTH[value.element_size()])
    places = torch.arange(1, len(bits) + 1, device=bits.device) * PRIME
    return (bits * ((places ^ (places >> 29)) * PRIME | 1)).sum()
