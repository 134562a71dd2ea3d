"""Proves or refuses that a batch in micro-batches gives what the whole batch gives.

Two conditions must hold. They are tested on real batches, without changing the model:

* an output belongs to one sample: the outputs of the whole batch are those of its parts. This finds a model that looks
  at other samples, and an input that was cut because it is as long as the batch by chance;
* the loss of the whole is the weighted mean of the losses of its parts: the gradients by the outputs show this, and
  the weight of each part.

Batch-norm in training is the known exception; here it is in evaluation mode.
"""

from __future__ import annotations

import types
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as _NORM

from hvdtrain.core.errors import ConfigError, is_out_of_memory
from hvdtrain.pipeline.plan.schedule import micro_batch_sizes
from hvdtrain.pipeline.run.batchnorm import without_batch_statistics
from hvdtrain.pipeline.run.comparison import Comparison, agrees, inner_loss, tolerance_of
from hvdtrain.pipeline.run.worker import StageError
from hvdtrain.pipeline.trace.restore import all_training, preserved_state
from hvdtrain.pipeline.values.microbatch import Weight, is_differentiable, pieces_of, samples_of
from hvdtrain.private.torch import pytree
from hvdtrain.values.coupled import refuse_coupled_layers
from hvdtrain.values.generators import differ, of_devices
from hvdtrain.values.nested import map_tensors, tensors_of

SAMPLES = 12  # that a loss is tried with
_SPREAD = 5  # of them wherever they are, if there is room; the others by their targets
_SHUT, _OPEN = 1e-6, 0.5  # values of a gate, and what it is tried with
_LABELS = 64  # classes that are tried one by one
Pipe = Any  # `runtime.Pipeline`, which makes these


class CutProof:
    """Counts the steps of each kind of batch and of each loss, and tries the 1st, 2nd, 4th, 8th ...

    A gate that is 0 at the start hides what is behind it, so the model is tried again as it trains. A loss is also
    tried with each label that it was not tried with: not every batch has something to ignore, or a rare class.
    """

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._models = Counter[Hashable]()  # calls, by the layout of the arguments
        self._steps: dict[Hashable, int] = {}
        self._tried: dict[Hashable, dict[int, set[int]]] = {}  # labels, by the place in the targets

    def of_model(self, arguments: tuple[Any, ...]) -> None:
        """Compares outputs of the whole batch with those of two halves, in evaluation mode; in training mode also, if
        the model draws nothing, and keeps nothing from pass to pass. Raises `ConfigError` if they differ."""
        pipe, batch, key = self._pipe, samples_of(arguments), layout(arguments)
        calls = self._models[key] + 1
        if batch < 2 or (pipe.micro_batches == 1 and not pipe.batch_is_part):  # then nothing is cut
            return
        if calls == 1:
            refuse_coupled_layers(pipe.module)
        if calls & (calls - 1):
            self._models[key] = calls
            return
        kinds = {type(module) for module in pipe.module.modules()}
        moves = (
            bool(pipe.counts) or any(True for _ in pipe.module.buffers()) or any(issubclass(k, _NORM) for k in kinds)
        )
        for training in (False,) if moves or pipe.batch_norm == "micro" else (False, True):
            if not self._of_mode(arguments, batch, training):
                break
        self._models[key] = calls  # a batch that was refused is tried until one passes

    def _of_mode(self, arguments: tuple[Any, ...], batch: int, training: bool) -> bool:
        """Returns False where nothing can be compared."""
        try:
            with _open_gates(self._pipe):
                whole, parts, drew = self._outputs(arguments, micro_batch_sizes(batch, 2), training)
        except StageError as error:
            if error.__cause__ is None or not is_out_of_memory(error.__cause__):
                raise
            warnings.warn(f"not shown that samples do not depend on each other: out of memory ({error})", stacklevel=4)
            return False
        if drew:  # no two results are the same
            return False
        agree = isinstance(parts, list) and all(
            map(agrees, tensors_of((whole,)), zip(*(tensors_of((part,)) for part in parts), strict=True))
        )
        if not agree:
            where = " in training mode" * training
            counts = "".join(f"; each pass changes {name}" for name, _ in self._pipe.counts)
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors_of(arguments) if t.dim() and len(t) == batch)
            raise ConfigError(
                "dimension 0 of inputs must be the samples, and outputs must not depend on other samples",
                f"two halves of a batch of {batch} give other outputs than the whole batch{where};\ncut inputs: shape"
                f" {shapes}{'' if isinstance(parts, list) else f'; {parts.received.splitlines()[0]}'}{counts}",
                "an input that is as long as the batch by chance (a mask): split(..., chunk=[0, None]), 0 or None for\n"
                "each argument; inputs [sequence, batch, ...]: a model that takes [batch, sequence, ...]; samples\n"
                f"that depend on each other: micro_batches=1{', accumulate=1 and one rank' * self._pipe.batch_is_part}",
            )
        return True

    def of_loss(self, arguments: tuple[Any, ...], y: Any, loss: Callable[[Any, Any], Tensor], weight: Weight) -> None:
        """Compares the loss of some samples with their mean by these weights; raises `ConfigError` with right ones."""
        batch = samples_of(arguments)
        key = (_settings(loss), _settings(weight), layout((arguments, y), batch), _kinds(y))
        step = self._steps.get(key, 0) + 1
        tried = self._tried.setdefault(key, {})
        new = {
            place: labels - tried.get(place, set())
            for place, labels in _labels(y).items()
            if len(labels | tried.get(place, set())) <= _LABELS
        }
        if (step & (step - 1) and not any(new.values())) or batch < 2:
            self._steps[key] = step
            return
        chosen = _chosen(batch, y, new)
        some = _taken(arguments, chosen, batch)
        targets = _taken(y, chosen, batch)
        sizes = (1,) * len(chosen)
        try:
            whole, parts, drew = self._outputs(some, sizes)
        except StageError:
            return  # the step itself will say what there is to say
        # the same outputs both times, where they can be cut: two forward passes differ by their rounding
        rows = all(tensor.dim() and len(tensor) == len(chosen) for tensor in tensors_of((whole,)))
        if rows or drew or not isinstance(parts, list):  # or it wants more than one sample
            parts = pieces_of(whole, sizes)
        device = self._pipe.devices[-1]
        targets = map_tensors(lambda tensor: tensor.to(device), targets)
        rounding = 0.0 if rows else tolerance_of(*tensors_of((whole,)))
        Comparison(loss, weight, whole, parts, targets, sizes, rounding).check()
        self._steps[key] = step  # one that was refused is tried as long as none passes
        for place, labels in _labels(targets).items():
            tried[place] = tried.get(place, set()) | labels

    def _outputs(
        self, arguments: tuple[Any, ...], sizes: Sequence[int], training: bool = False
    ) -> tuple[Any, list[Any] | StageError, bool]:
        """Returns the outputs of the whole batch and of its parts (or their error); True if it drew random numbers."""
        pipe = self._pipe
        generators = of_devices(pipe.devices[-1])

        def run(sizes: Sequence[int]) -> tuple[list[Any], bool]:
            """Runs each time from the same state, because what a first pass sets depends on its samples."""
            bare = without_batch_statistics(module for stage in pipe.stages for module in stage.modules())
            with preserved_state(pipe.module, *pipe.devices), all_training(pipe.module, training), bare:
                before = generators.everything()
                outputs = pipe._outputs(pieces_of(arguments, sizes))
                return outputs, differ(before, generators.everything())

        (whole,), drew = run((sum(sizes),))
        try:
            return whole, run(sizes)[0], drew
        except StageError as error:
            return whole, error, drew


@contextmanager
def _open_gates(pipe: Pipe) -> Iterator[None]:
    """Replaces what is 0 in parameters: a gate that starts there (ReZero) hides what it will let through."""
    # `data`: a change for as long as this lasts is none for autograd
    tensors = [p.data for p in pipe.module.parameters() if p.is_floating_point()]
    closed = [(values, shut, values[shut]) for values in tensors if (shut := values.abs() < _SHUT).any()]
    try:
        for values, shut, _ in closed:
            values[shut] = _OPEN
        yield
    finally:
        for values, shut, before in closed:
            values[shut] = before


def layout(values: Any, batch: int | None = None) -> Hashable:
    """Returns what decides how values are cut: which tensors are as long as the batch."""
    samples = samples_of(values) if batch is None else batch
    leaves, spec = pytree.tree_flatten(values)

    def of(leaf: Any) -> Hashable:
        if not isinstance(leaf, Tensor):
            return type(leaf).__name__
        return leaf.dim(), leaf.dtype, leaf.dim() > 0 and len(leaf) == samples

    return str(spec), tuple(map(of, leaves))


def _kinds(y: Any) -> Hashable:
    """Returns which numbers that a loss may divide by there are, and if all samples have as many; not on a GPU."""
    return tuple(
        tuple((bool(numbers.any()), _alike(numbers)) for numbers in _counted(t))
        for t in tensors_of((y,))
        if not t.is_cuda and not t.is_complex() and t.dim()
    )


def _counted(tensor: Tensor) -> Iterator[Tensor]:
    """Yields, of each sample [batch], how many labels are negative or values NaN, how many are 0, and their sum."""
    rows = tensor.detach().reshape(len(tensor), -1) if tensor.numel() else tensor.new_zeros(len(tensor), 1)
    for left_out in (rows.isnan() if is_differentiable(rows) else rows < 0, rows == 0):
        yield left_out.sum(1) if left_out.any() else torch.zeros(1, device=rows.device)  # most often there is none
    sums = rows.sum(1, dtype=torch.promote_types(rows.dtype, torch.float32) if rows.is_floating_point() else None)
    if rows.is_floating_point() and _alike(sums, 1e-4):
        sums = rows.sum(1, dtype=torch.float64)  # slower; rounding is no difference
    yield sums


def _alike(numbers: Tensor, tolerance: float = 1e-9) -> bool:
    low, high = map(float, numbers.aminmax())
    return high - low <= tolerance * max(abs(low), abs(high))


def _labels(y: Any) -> dict[int, set[int]]:
    """Places in the targets -> which labels there are, where these are few."""
    found = {}
    for place, labels in enumerate(tensors_of((y,))):
        if labels.is_cuda or is_differentiable(labels) or not labels.numel():
            continue
        flat = labels.detach().reshape(-1).long()
        low, high = int(flat.min()), int(flat.max())
        if high - low < 1024:  # no sorting: there may be a label a pixel
            there = torch.zeros(high - low + 1, dtype=torch.bool)
            there[flat - low] = True
            found[place] = {low + at for at in there.nonzero().reshape(-1).tolist()}
    return found


def loss_key(loss: Any) -> Hashable:
    """Returns a key that stays the same for a function that each step defines again, and for a loss of PyTorch's."""
    loss = inner_loss(loss)
    if type(loss).__module__ == nn.MSELoss.__module__ and not [*loss.buffers(), *loss.children()]:
        return type(loss), repr(sorted((name, value) for name, value in vars(loss).items() if name[0] != "_"))
    if hasattr(loss, "func") and hasattr(loss, "keywords"):  # functools.partial
        return loss_key(loss.func), repr(loss.keywords)
    code = getattr(getattr(loss, "__func__", loss), "__code__", None)
    return loss if code is None else code


def _settings(function: Any, depth: int = 3) -> Hashable:
    """Returns `loss_key`, and what else identifies the loss: what a closure holds, the settings of a module."""
    inner, key = inner_loss(function), loss_key(function)
    if isinstance(inner, nn.Module):
        plain = {name: value for name, value in vars(inner).items() if isinstance(value, (str, bool, type(None)))}
        # class weights, replaced or changed in place (held: an id comes again); other buffers may change in every step
        fixed = isinstance(inner, nn.modules.loss._Loss)
        its = [(name, buffer) for name, buffer in inner._buffers.items() if buffer is not None]
        buffers = tuple((name, (buffer, buffer._version) if fixed else 0) for name, buffer in its)
        return key, repr(sorted(plain.items())), buffers
    held: list[Hashable] = []
    for cell in getattr(inner, "__closure__", None) or () if depth else ():
        try:
            value = cell.cell_contents
        except ValueError:  # empty
            continue
        for one in value.values() if type(value) is dict else (value,):
            if isinstance(one, (str, bool, type(None))):
                held.append(one)
        if isinstance(value, (nn.Module, types.FunctionType)):
            held.append(_settings(value, depth - 1))
    return key, tuple(held)


def _chosen(batch: int, y: Any, new: dict[int, set[int]]) -> list[int]:
    """Returns samples to try: extreme ones, those with labels that it was not tried with, and some others."""
    extreme: list[int] = []
    rare: list[int] = []
    for place, labels in enumerate(tensors_of((y,))):
        if not labels.dim() or len(labels) != batch or not labels.numel() or labels.is_complex():
            continue
        rows = labels.detach().reshape(batch, -1)
        uneven = [numbers.nan_to_num() for numbers in _counted(rows) if len(numbers) == batch]
        extreme += [int(at) for numbers in uneven for at in (numbers.argmax(), numbers.argmin())]
        if not is_differentiable(rows):
            rows = rows.long()
            lowest = (rows == rows.min()).sum(1)
            extreme += [int(lowest.argmax()), int(lowest.argmin()), int((rows == rows.max()).sum(1).argmax())]
            rare += [int((rows == label).sum(1).argmax()) for label in sorted(new.get(place, ()))[:SAMPLES]]
        else:
            values = rows.nan_to_num()
            extreme += [int(values.amin(1).argmin()), int(values.amax(1).argmax())]
    spread = [int(at) for at in torch.linspace(0, batch - 1, min(batch, _SPREAD)).round()]
    return list(dict.fromkeys([*extreme, *rare, *spread]))[:SAMPLES]


def _taken(values: Any, samples: list[int], batch: int) -> Any:
    return map_tensors(lambda leaf: leaf[samples] if leaf.dim() and len(leaf) == batch else leaf, values)
