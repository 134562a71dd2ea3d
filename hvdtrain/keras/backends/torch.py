"""The PyTorch backend of Keras: everything the adapter does with torch tensors and Horovod's torch operations.

Twin of `tensorflow.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
import torch

from hvdtrain.comm.engines import losses_in
from hvdtrain.keras.backends.session import LiveBatch, map_leaves
from hvdtrain.private.keras import BackendEpochIterator


class TorchBackend:
    """Tensor and collective operations for `KERAS_BACKEND=torch`; what they do: see `TensorFlowBackend`."""

    name = "torch"
    epoch_iterator = BackendEpochIterator  # of Keras' `fit`

    @property
    def hvd(self) -> Any:
        import horovod.torch as hvd

        return hvd

    # ---------------------------------------------------------------- host side
    def host_allreduce(self, array: np.ndarray, op: str, name: str) -> np.ndarray:
        operation = {"sum": self.hvd.Sum, "min": self.hvd.Min, "max": self.hvd.Max}[op]
        with self.rank_losses():
            return self.hvd.allreduce(torch.tensor(array, device="cpu"), op=operation, name=name).numpy()

    def host_broadcast(self, array: np.ndarray, root: int, name: str) -> np.ndarray:
        with self.rank_losses():
            return self.hvd.broadcast(torch.tensor(array, device="cpu"), root, name=name).numpy()

    def host_allgather(self, array: np.ndarray, name: str) -> np.ndarray:
        with self.rank_losses():
            return self.hvd.allgather(torch.tensor(array, device="cpu"), name=name).numpy()

    def rank_losses(self) -> AbstractContextManager[None]:
        from horovod.common.exceptions import HorovodInternalError

        return losses_in(HorovodInternalError)

    def eager(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def to_numpy(self, variable: Any) -> np.ndarray:
        value = variable.value.detach()
        if not value.is_cpu or value.dtype == torch.bfloat16:
            return np.asarray(keras.ops.convert_to_numpy(value))
        array = value.numpy()
        array.flags.writeable = False
        return array

    def copies(self, variables: Sequence[Any]) -> list[Any]:
        return [variable.value.detach().clone() for variable in variables]

    def make_copies(self, variables: Sequence[Any]) -> Callable[[], list[Any]]:
        return lambda: self.copies(variables)

    def number(self, value: float) -> Any:
        return Number(value)

    def put_back(self, variables: Sequence[Any], copies: Sequence[Any]) -> None:
        with torch.no_grad():
            for variable, copy in zip(variables, copies, strict=True):
                variable.value.copy_(copy)

    # ---------------------------------------------------------------- inside a step
    def split_dead(self, x: Any, sample_weight: Any) -> tuple[float, Any]:
        first = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
        weights = [torch.as_tensor(w) for w in keras.tree.flatten(sample_weight) if w is not None]
        single = bool(weights) and all(w.shape[0] == 1 for w in weights)  # else no step waits for a GPU here
        if weights and weights[0].dtype == torch.bool:
            return 0.0 if single and not bool(weights[0]) else float(first.shape[0]), None
        if not single or not all(bool(w.isnan().all()) for w in weights):
            return float(first.shape[0]), sample_weight
        return 0.0, map_leaves(torch.zeros_like, sample_weight)

    def notes(self) -> TorchNotes:
        return TorchNotes(self)

    def given_of(self, batches: Any) -> Any:
        return [next(batches)]

    def no_gradient(self) -> AbstractContextManager[Any]:
        return torch.no_grad()

    def total(self, values: Any) -> Any:
        return torch.as_tensor(values).detach().sum(dtype=torch.float64)

    def elements(self, values: Any) -> float:
        return float(values.numel())

    def by_samples(self, values: Any, data: Any) -> bool:
        first = next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
        return tuple(values.shape) == (first.shape[0],)

    def unless_zero(self, value: Any, samples: float) -> Any:
        return value if samples else value * 0.0

    def times(self, tensor: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        below = c * d
        if torch.is_tensor(below):
            ratio = torch.where(below == 0, torch.zeros_like(below), a * b / below)
            return tensor * ratio.to(tensor.dtype)
        return tensor * (a * b / below if below else 0.0)

    def start_sum(self, value: Any, name: str, words: Sequence[float] = (), receive: Any = None) -> Any:
        """Starts the sum of a number over ranks; `receive` gets the sums of `words`."""
        is_tensor = torch.is_tensor(value)
        row = value.reshape(1) if is_tensor else torch.tensor([value, *words], dtype=torch.float64)
        return self.hvd.allreduce_async(row, op=self.hvd.Sum, name=name), is_tensor, receive

    def finish_sum(self, started: Any) -> Any:
        handle, stays, receive = started
        sums = self.hvd.synchronize(handle)
        if receive is not None:
            receive(*sums[1:].tolist())
        return sums[0] if stays else float(sums[0])

    def number_of_call(self, live: Any) -> int:
        """Numbers what is called again within a step; sums come one after the other where no step of ours runs."""
        return 0 if live is None else next(live.calls)

    def differentiable_sum(self, values: Any, samples: float, name: str) -> Any:
        return _Sum.apply(values, samples, name, self.hvd)

    def gather_rows(self, tensors: list[Any], samples: float, total: float, rank: int, name: str) -> list[Any]:
        rows = torch.tensor([tensor.shape[0] if samples else 0 for tensor in tensors])
        with self.rank_losses():
            every = self.hvd.allgather(rows, name=f"{name}.rows").reshape(-1, len(tensors))
        starts = every[:rank].sum(0).tolist()
        factor = total / samples if samples else 0.0
        found = []
        for number, (tensor, start) in enumerate(zip(tensors, starts, strict=True)):
            sent = tensor.detach()[: int(rows[number])].contiguous()
            joined = self._joined(sent, f"{name}.{number}")
            found.append(_Rows.apply(tensor, joined, start, int(rows[number]), factor))
        return found

    def _joined(self, sent: torch.Tensor, name: str) -> torch.Tensor:
        size = math.prod(sent.shape[1:]) * sent.element_size()  # of a row; bytes, for Horovod does not take all types
        as_bytes = sent.reshape(-1).view(torch.uint8).reshape(len(sent), size)
        with self.rank_losses():
            received = self.hvd.allgather(as_bytes, name=name)
        return received.reshape(-1).view(sent.dtype).reshape(-1, *sent.shape[1:])

    def usable_here(self, tensor: Any) -> bool:
        del tensor
        return True

    def weigh(self, tensors: list[Any], samples: float, total: float, size: int) -> list[Any]:
        if samples * size == total:
            return tensors
        if samples == 0:
            return [torch.zeros_like(tensor) for tensor in tensors]
        factor = samples * size / total
        return [tensor * factor for tensor in tensors]

    @contextmanager
    def unmoved_if_dead(self, samples: float, variables: Sequence[Any]) -> Iterator[None]:
        before = self.copies(variables) if samples == 0 else []
        yield
        if samples == 0:
            self.put_back(variables, before)

    def reduce(self, tensors: list[Any], op: str, name: str) -> list[Any]:
        operation = {"average": self.hvd.Average, "sum": self.hvd.Sum, "max": self.hvd.Max}[op]
        # Horovod wants contiguous memory; it reduces in place, in `variable.grad` as a rule
        sent = [tensor.detach().contiguous() for tensor in tensors]
        return list(self.hvd.grouped_allreduce_(sent, op=operation, name=name))

    def gather_sparse(self, slices: Any, name: str, size: int) -> Any:
        raise NotImplementedError("Keras on PyTorch computes dense gradients only")

    def is_sparse(self, gradient: Any) -> bool:
        return bool(getattr(gradient, "is_sparse", False))

    def with_values(self, slices: Any, values: Any) -> Any:
        raise NotImplementedError("Keras on PyTorch computes dense gradients only")

    def densify(self, gradient: Any) -> Any:
        return gradient.to_dense()

    def agree_finite(self, finite: Any, name: str) -> Any:
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


class TorchNotes:
    """See `TensorFlowNotes`."""

    waited = 0.0  # Keras has the batch before it begins a step

    def __init__(self, backend: TorchBackend) -> None:
        self._backend = backend
        self.preempted = Number(0.0)
        self.kept_batch: Any = None
        self._wants_batch = False
        self._loss: Any = float("nan")

    def note_loss(self, loss: Any, live: LiveBatch, name: str) -> None:
        self.loss()
        self._loss = self._backend.start_sum(loss.detach().double(), name), live.total()

    def loss(self) -> float:
        if isinstance(self._loss, tuple):
            started, samples = self._loss
            self._loss = float(self._backend.finish_sum(started)) / samples
        return float(self._loss)

    def want_batch(self) -> None:
        self.kept_batch, self._wants_batch = None, True

    def keep_batch(self, data: Any) -> None:
        if self._wants_batch:
            self.kept_batch, self._wants_batch = data, False

    def timed_input(self) -> AbstractContextManager[None]:
        return nullcontext()


class Number:
    """A number that changes."""

    def __init__(self, value: float) -> None:
        self._value = value

    def assign(self, value: float) -> None:
        self._value = value

    def read_value(self) -> float:
        return self._value


class _Sum(torch.autograd.Function):
    """See `TorchBackend.differentiable_sum`."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, samples: float, name: str, hvd: Any) -> torch.Tensor:
        ctx.samples, ctx.name, ctx.hvd = samples, name, hvd
        sent = values.detach().clone() if samples else torch.zeros_like(values)
        return hvd.allreduce_(sent, op=hvd.Sum, name=name)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # the gradient of a rank that does not count must not count either, not even as 0 x NaN
        weighed = upstream * ctx.samples if ctx.samples else torch.zeros_like(upstream)
        back = _Sum.apply(weighed, ctx.samples, f"{ctx.name}.gradient", ctx.hvd)
        return back / ctx.samples if ctx.samples else torch.zeros_like(back), None, None, None


class _Rows(torch.autograd.Function):
    """See `TorchBackend.gather_rows`."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, joined: torch.Tensor, start: int, rows: int, factor: float
    ) -> torch.Tensor:
        ctx.shape, ctx.start, ctx.rows, ctx.factor = tensor.shape, start, rows, factor
        return joined.to(tensor.device)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not ctx.rows:
            return upstream.new_zeros(ctx.shape), None, None, None, None
        return upstream[ctx.start : ctx.start + ctx.rows] * ctx.factor, None, None, None, None
