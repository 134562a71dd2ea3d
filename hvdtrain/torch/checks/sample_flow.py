"""Follows samples through the graph of a loss: where one meets another on the way to the sum, other than in a sum.

Second derivatives (`coupling.couples`) show that, too, but not where a loss is made of straight pieces (sorted
values, absolute differences, margins), which have none. What an operation does to the dimension of samples is known for
the ones that losses are written with; behind any other nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvdtrain.torch.checks.loss_graph import name_of, signed

_STRAIGHT = {"Add", "Sub", "Rsub", "Neg", "Clone", "Alias", "ToCopy", "MaskedFill", "Where"}
_BENT = {
    "Abs", "Relu", "Clamp", "ClampMin", "ClampMax", "Exp", "Expm1", "Log", "Log1P", "Log2", "Sqrt", "Rsqrt", "Pow",
    "Square", "Reciprocal", "Sigmoid", "LogSigmoid", "Tanh", "Softplus", "Gelu", "Silu", "LeakyRelu", "Hardtanh",
    "Threshold", "Maximum", "Minimum", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits", "KlDiv", "SoftMarginLoss",
}  # fmt: skip
_PRODUCTS = {"Mul", "Div"}  # straight in each operand
_RESHAPES = {"View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Expand"}
_ALONG = {"Sort", "Cummax", "Cummin", "Cumsum", "Cumprod", "Logcumsumexp", "Softmax", "LogSoftmax"}
_CHOICES = {"Max", "Min", "Amax", "Amin", "Topk", "Kthvalue", "Median", "Prod", "Std", "Var", "Logsumexp"}
_NORMS = {"Norm", "LinalgVectorNorm"}
_SUMS = {"Sum", "Nansum", "Mean"}
_PAIRS = {"Cdist", "Pdist"}  # of the rows of one, or of two


@dataclass(frozen=True)
class _Place:
    """Where the samples of a tensor lie.

    Attributes:
        dim: in which dimension; None: it is of one sample, or added up over samples.
        part: which of them, and in which order; equal parts hold the same samples at the same places.
        met: several samples were added to, or taken from, one another.
    """

    dim: int | None
    part: tuple[Any, ...] = ()
    met: bool = False


_ADDED_UP = _Place(None, ("all",), True)


class Way(NamedTuple):
    """A way in which samples may lie in an output: along `dim`, of each place the sample's number."""

    dim: int
    samples: Tensor


def layouts(outputs: Sequence[Tensor], samples: int) -> list[tuple[Tensor, list[Way]]]:
    """Returns the outputs that hold samples, each with the ways in which they may lie in it.

    A model that is called once gives outputs whose first dimension is the batch, or another one of that length; a flat
    one may hold samples one after the other, or copies of the batch. One that is called for parts of the batch gives
    rows that come to the batch, or one output for each sample.
    """
    floats = [o for o in outputs if o.is_floating_point() and o.grad_fn is not None and o.dim()]
    if samples < 2:
        return [(output, ways) for output in floats if (ways := list(_ways(output.shape, samples)))]
    parts = [output for output in floats if len(output) < samples]
    called = sum(map(len, parts)) == samples and len(parts) > 1
    whole = [output for output in floats if not called or len(output) >= samples]
    found = [(output, ways) for output in whole if (ways := list(_ways(output.shape, samples)))]
    if called:
        starts = [sum(map(len, parts[:index])) for index in range(len(parts))]
        found += [(o, [Way(0, torch.arange(at, at + len(o)))]) for o, at in zip(parts, starts, strict=True)]
    exact = any(len(way.samples) == samples for _, ways in found for way in ways)
    if floats and not exact and not called and (len(floats) == samples or not (found or len(floats) % samples)):
        return [(o, [Way(0, torch.full((len(o),), index % samples))]) for index, o in enumerate(floats)]
    return found


def _ways(shape: Sequence[int], samples: int) -> Iterator[Way]:
    exact = [dim for dim, size in enumerate(shape) if size == samples]
    for dim in exact[:1] if len(shape) <= 2 and exact[:1] == [0] else exact:  # as many classes as samples
        yield Way(dim, torch.arange(samples))
    copies, rest = divmod(shape[0], samples) if samples else (0, 0)
    if copies > 1 and not rest:
        places = torch.arange(shape[0])
        yield Way(0, places % samples)
        yield Way(0, places // copies)


def meetings(loss: Tensor, outputs: Sequence[Tensor], samples: int) -> tuple[str, ...]:
    """Names of the operations in which one sample meets another, so that the loss is no sum over samples.

    Args:
        loss: a scalar, whose graph is kept.
        outputs: of the model; one whose samples may lie in several dimensions, or in none, is left out.
        samples: in the batch.
    """
    if samples < 2 or loss.grad_fn is None:
        return ()
    places: dict[tuple[Any, int], _Place | None] = {}
    for output, ways in layouts(outputs, samples):
        if len(ways) == 1:
            dim, own = ways[0]
            part = () if len(own) == samples else ("call", int(own[0]))
            places[output.grad_fn, output.output_nr] = _Place(dim if own[0] != own[-1] else None, part)
    if not places:
        return ()
    found: list[str] = []
    todo: list[tuple[Any, int]] = [(loss.grad_fn, loss.output_nr)]
    while todo:
        edge = todo[-1]
        children = [child for child in edge[0].next_functions if child[0] is not None]
        new = [] if edge in places else [child for child in children if child not in places]
        if new:
            todo += new
            continue
        todo.pop()
        if edge not in places:
            tagged = [(child, place) for child in children if (place := places[child]) is not None]
            places[edge] = _Step(*edge, samples, found).place(tagged) if tagged else None
    return tuple(dict.fromkeys(found))


class _Step:
    """One operation: what it makes of the places of its operands."""

    def __init__(self, node: Any, nr: int, samples: int, found: list[str]) -> None:
        self.node, self.samples, self._found = node, samples, found
        self.name = name_of(node)
        self._nr, self.shape = nr, node._input_metadata[nr].shape

    def place(self, operands: list[tuple[tuple[Any, int], _Place]]) -> _Place | None:
        if self.name in _STRAIGHT | _BENT | _PRODUCTS:
            return self._by_element(operands)
        if self.name in _PAIRS:
            return self._paired(operands)
        if len(operands) != 1:
            return self._joined(operands)
        (node, nr), place = operands[0]
        before = node._input_metadata[nr].shape
        dims = list(self._dims(len(before)))
        if self.name == "NativeBatchNorm":
            return place  # samples meet in it, as they may
        if place.dim is None:
            return place if self.name in _SUMS | _RESHAPES else None
        if self.name in _RESHAPES:
            return _reshaped(place, before, self.shape)
        if self.name in ("Permute", "Transpose"):
            order = list(self.node._saved_dims) if self.name == "Permute" else _swapped(len(before), dims)
            return replace(place, dim=[dim % len(before) for dim in order].index(place.dim))
        if self.name in _ALONG | {"Flip", "Roll", "Gather"}:
            return self._along(place, dims)
        if self.name in _SUMS | _CHOICES | _NORMS | {"NllLoss", "NllLoss2D"}:
            return self._reduced(place, dims, len(before))
        return self._selected(place, dims)

    def _by_element(self, operands: list[tuple[tuple[Any, int], _Place]]) -> _Place | None:
        aligned = []
        for (node, nr), place in operands:
            short = len(self.shape) - len(node._input_metadata[nr].shape)
            aligned.append(place if place.dim is None else replace(place, dim=place.dim + short))
        apart = len({(place.dim, place.part) for place in aligned}) > 1
        met = apart or any(place.met for place in aligned)
        if met and (self.name in _BENT or (self.name in _PRODUCTS and len(aligned) > 1)):
            self._found.append(self.name)
            return None
        first = next((place for place in aligned if place.dim is not None), aligned[0])
        if self.name.endswith("Loss") and not self.shape:
            return _ADDED_UP
        return replace(first, met=met)

    def _paired(self, operands: list[tuple[tuple[Any, int], _Place]]) -> _Place | None:
        rows = max(len(self.shape) - 2, 0)  # the dimension; of more, each has its own pairs
        if (self.name == "Pdist" or len(operands) > 1) and any(place.dim == rows for _, place in operands):
            self._found.append(self.name)
            return None
        edge, place = operands[0]
        return place if edge == self.node.next_functions[0] else None

    def _joined(self, operands: list[tuple[tuple[Any, int], _Place]]) -> _Place | None:
        """Of a stack or cat, along another dimension than that of samples."""
        first = operands[0][1]
        if self.name not in ("Stack", "Cat") or any(place != first for _, place in operands) or first.dim is None:
            return None
        dim = next(self._dims(len(self.shape)))
        if self.name == "Stack":
            return replace(first, dim=first.dim + (dim <= first.dim))
        return first if dim != first.dim else None

    def _along(self, place: _Place, dims: list[int]) -> _Place | None:
        if place.dim not in dims:
            return place
        if self.name in _ALONG:
            self._found.append(self.name)
            return None
        moved = getattr(self.node, "_saved_shifts", None) or getattr(self.node, "_saved_index", None)
        return replace(place, part=(*place.part, self.name, _content(moved)))

    def _reduced(self, place: _Place, dims: list[int], before: int) -> _Place | None:
        assert place.dim is not None
        if self.name.startswith("Nll"):
            return _ADDED_UP if not self.shape else replace(place, dim=0)
        within = dims and place.dim not in dims  # each sample
        if self.name in _CHOICES and not within or self.name in _CHOICES | _NORMS and place.met:
            self._found.append(self.name)
            return None
        if within:
            gone = sum(dim < place.dim for dim in dims) if len(self.shape) < before else 0
            return replace(place, dim=place.dim - gone)
        return _ADDED_UP if self.name in _SUMS else None

    def _selected(self, place: _Place, dims: list[int]) -> _Place | None:
        assert place.dim is not None
        if self.name == "Index":
            return self._indexed(place)
        if self.name not in ("Slice", "Select", "Split", "Unbind", "IndexSelect"):
            return None
        if place.dim not in dims:
            gone = self.name in ("Select", "Unbind") and dims[0] < place.dim
            return replace(place, dim=place.dim - gone)
        if self.name in ("Select", "Unbind"):
            return _Place(None, (*place.part, getattr(self.node, "_saved_index", self._nr)), place.met)
        if self.name == "Slice":
            if self.node._saved_step != 1:
                return None  # pairs that lie side by side are on one rank
            whole = self.shape[place.dim] == self.node._saved_self_sym_sizes[place.dim]
            part: Any = () if whole else (self.node._saved_start,)
        elif self.name == "Split":
            part = (self._nr * self.node._saved_split_size,)
        else:
            part = ("index", _content(self.node._saved_index))
        return replace(place, part=(*place.part, *part))

    def _indexed(self, place: _Place) -> _Place | None:
        indices = self.node._saved_indices
        index = indices[place.dim] if place.dim is not None and place.dim < len(indices) else None
        if not isinstance(index, Tensor) or index.dim() != 1 or any(i is not None for i in indices[: place.dim]):
            return None
        straight = index.tolist() == list(range(self.samples)) and not place.part  # each sample's own class
        return place if straight else replace(place, part=(*place.part, "index", _content(index)))

    def _dims(self, count: int) -> Iterator[int]:
        """The dimensions that the operation was told, counted from 0."""
        for name in ("dim", "dims", "dim0", "dim1"):
            value = getattr(self.node, f"_saved_{name}", None)
            for dim in value if isinstance(value, tuple) else (value,):
                if dim is not None and count:
                    yield signed(dim) % count


def _reshaped(place: _Place, before: Sequence[int], after: Sequence[int]) -> _Place | None:
    """The dimension with as many places before it, and as long."""
    assert place.dim is not None
    ahead = math.prod(before[: place.dim])
    fitting = [
        dim for dim, size in enumerate(after) if size == before[place.dim] and math.prod(after[:dim]) == ahead
    ] if math.prod(before) == math.prod(after) else [place.dim] * (len(before) == len(after))  # fmt: skip
    return replace(place, dim=fitting[-1]) if fitting else None


def _swapped(count: int, dims: list[int]) -> list[int]:
    order = list(range(count))
    order[dims[0]], order[dims[1]] = order[dims[1]], order[dims[0]]
    return order


def _content(value: Any) -> Any:
    return tuple(value.flatten().tolist()) if isinstance(value, Tensor) else value
