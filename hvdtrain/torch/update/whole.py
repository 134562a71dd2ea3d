"""The outputs and targets of the global batch, for losses in which samples meet.

Every rank computes the same loss of all ranks' outputs and differentiates it down to them. It keeps its own rows and
takes them through its own model; the sum over ranks is the gradient of one process (GradCache over micro-batches, arXiv
2101.06983). Every rank has the whole gradient of parameters that the loss itself reads, and counts its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from hvdtrain.comm.lines import user_line
from hvdtrain.core.errors import ConfigError, RanksLost
from hvdtrain.core.sharding import Step
from hvdtrain.torch.engines.engine import engine_of
from hvdtrain.torch.losses.loss_graph import leaves_of, nodes_of
from hvdtrain.torch.update.regroup import go_on_without
from hvdtrain.torch.update.session import Session, at_hand
from hvdtrain.values.nested import made_of, parts_of, tensors_of
from hvdtrain.world.world import World, given_or_current

_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)
_ALIGNED = 16  # any type of number may begin at such a byte
_ITEMS = (str, bytes, bool, int, float)  # in a tuple: one for each sample
_lists: WeakKeyDictionary[Session, dict[str, bool]] = WeakKeyDictionary()  # are parts of a value


@dataclass(frozen=True)
class _Own:
    """What a leaf of a loss stands for; it has the values of one rank's piece of a batch."""

    output: Tensor | None  # what this rank's model gave, with its graph; None: another rank's piece
    shared: bool = False  # one number that is the same on every rank
    absent: Sequence[Tensor] = ()  # outputs of this rank for batches without samples, which get gradients of 0


_owns: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by leaf


def whole(*values: Any, world: World | None = None) -> Any:
    """Returns values of the global batch, all ranks' joined in the order of the data; collective.

    For losses that need all samples at once (contrastive losses, dice of a batch, a common divisor). The loss is the
    same on every rank, and its gradient is that of one process with the global batch.

    Example:
        outputs, targets = hvt.whole(model(x), y)
        loss = loss_fn(outputs, targets)  # any loss
        optimizer.backward(loss)

    Args:
        values: outputs and targets, nested in tuples, lists, mappings and data classes. Tensors and arrays [n, ...] are
            joined along their first dimension; n may differ between ranks. So are lists (and tuples of texts and
            numbers) with one item per sample. Other lists and tuples are parts of a value. Scalars and other plain
            values must be the same on every rank.
        world: the ranks; default: those of `hvdtrain.init`.

    Returns:
        One value if one was given, else a tuple. Outputs have a gradient if the ranks' own have one.

    Raises:
        ConfigError: on every rank; values of another kind or form, rows of other shapes, or scalars that differ.
    """
    world = given_or_current(world, "torch")
    found = values if len(values) != 1 else values[0]
    session = at_hand()
    if world.size == 1 or (session is not None and session.batches.are_dealt_anew):
        return found
    try:
        data = None if session is None else session.batches.data
        return joined([found], [None if data is None else data.step], world, session)
    except RanksLost as lost:
        if session is None:
            raise
        go_on_without(session, lost)  # the batch at hand comes again
        return found


def joined(own: Sequence[Any], steps: Sequence[Step | None], world: World, session: Session | None) -> Any:
    """Returns the values of all ranks and micro-batches, in the order of the data; collective. `own` and `steps`: of
    each micro-batch of this rank, as many on every rank."""
    mine: list[tuple[_Node, list[Tensor]]] = []
    problem = ""
    absent = [step is not None and step.padding for step in steps]
    try:
        for values, step, is_absent in zip(own, steps, absent, strict=True):
            tensors: list[Tensor] = []
            samples = None if step is None or is_absent else step.samples
            mine.append((_described(values, "", samples, tensors), tensors))
    except ConfigError as error:
        problem = error.received
    reports: list[_Report] = world.gather((problem, absent, [node for node, _ in mine]))
    problems = [f"rank {rank}: {its}" for rank, (its, _, _) in enumerate(reports) if its]
    if problems:
        raise _refused("\n".join(problems))
    pieces = _of_all([tensors for _, tensors in mine], reports, world)
    joiner = _Joiner(pieces, {} if session is None else _lists.setdefault(session, {}))
    return joiner.value([piece.node for piece in joiner.pieces], own[0])


@dataclass(frozen=True)
class _Node:
    """A rank's value at one place; a list may be read `as_items`, one per sample, or `as_parts` of a value."""

    kind: str  # "rows", "scalar" (a tensor without dimensions), "array", "items", "parts", "plain"
    path: str  # for messages
    place: int  # of its first tensor among the rank's
    content: Any = None  # of an array or a plain value
    form: tuple[Any, ...] = ()  # shape and dtype of a tensor, what a container's must be on every rank
    tracked: bool = False  # it has a gradient
    names: tuple[Any, ...] = ()  # of the parts
    parts: tuple[_Node, ...] = ()  # of it
    as_items: bool = False
    as_parts: bool = True
    likely: bool = False  # as parts, if both are possible: it has not as many items as rows


def _described(value: Any, path: str, samples: int | None, tensors: list[Tensor]) -> _Node:
    place = len(tensors)
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise _refused(f"{path or 'a value'} is a tensor of layout {value.layout}")
        tensors.append(value)
        form = (tuple(value.shape), value.dtype)
        tracked = value.requires_grad and torch.is_grad_enabled()
        return _Node("rows" if value.dim() else "scalar", path, place, form=form, tracked=tracked)
    if isinstance(value, np.ndarray) and value.ndim:
        return _Node("array", path, place, value)
    if isinstance(value, (*_PLAIN, np.ndarray)):
        return _Node("plain", path, place, value)
    parts = parts_of(value)
    if parts is None:
        raise _refused(f"{path or 'a value'} is of type {type(value).__name__}")
    described = tuple(
        _described(part, f"{path}.{name}" if path else str(name), samples, tensors) for name, part in parts.items()
    )
    node = _Node(
        "parts", path, place, names=tuple(parts), parts=described, tracked=any(one.tracked for one in described)
    )
    if isinstance(value, tuple) and value and all(isinstance(item, _ITEMS) for item in value):
        return replace(node, kind="list", form=(len(value),), as_items=True, as_parts=False)
    if isinstance(value, list):
        its = tensors[place:]
        rows = {len(tensor) if tensor.dim() else None for tensor in its}
        # what has a row for each sample may be a part of a value; what is no tensor is a sample's
        as_parts = bool(value) and all(tensors_of(item) for item in value) and len(rows) == 1 and None not in rows
        return replace(
            node, kind="list", form=(len(value),), as_items=not samples or len(value) == samples,
            as_parts=as_parts and (not samples or rows == {samples}), likely=as_parts and rows != {len(value)},
        )  # fmt: skip
    return replace(node, form=(type(value).__name__ if not isinstance(value, Mapping) else "", *parts))


_Report = tuple[str, list[bool], list[_Node]]  # what is wrong; of each micro-batch: no samples, the values


@dataclass(frozen=True)
class _Piece:
    """A rank's values of one micro-batch."""

    rank: int
    absent: bool  # the rank has no samples in it; what it has only shows the form
    node: _Node
    tensors: list[Tensor]  # in the order of `_Node.place`, on this rank's device
    own: list[Tensor] | None  # this rank's, with their graph; None: another rank's piece


class _Joiner:
    """Puts pieces together. `lists`: True if a list was parts before, by line and path."""

    def __init__(self, pieces: Sequence[_Piece], lists: dict[str, bool]) -> None:
        self._lists = lists
        present = [piece for piece in pieces if not piece.absent]
        self.pieces = present or pieces  # the samples of all ranks are none
        self._absent = [piece for piece in pieces if piece.absent] if present else []

    def value(self, nodes: Sequence[_Node], example: Any) -> Any:
        """Returns the joined value of these nodes; `example` is one of this rank's own."""
        kinds = {node.kind for node in nodes}
        if len(kinds) > 1:
            raise self._differ(nodes, lambda node: f"a value of kind {node.kind}")
        (kind,) = kinds
        if kind == "rows":
            return self._rows(nodes)
        if kind == "scalar":
            return self._scalar(nodes)
        if kind == "plain":
            first = nodes[0].content
            if any(node.content != first and node.content == node.content for node in nodes):  # NaN is not itself
                raise self._differ(nodes, lambda node: repr(node.content))
            return first
        if kind == "array":
            if len({(node.content.shape[1:], node.content.dtype) for node in nodes}) > 1:
                raise self._differ(nodes, lambda node: f"{node.content.shape} {node.content.dtype}")
            return np.concatenate([node.content for node in nodes])
        return self._list(nodes, example) if kind == "list" else self._parts(nodes, example)

    def _list(self, nodes: Sequence[_Node], example: Any) -> Any:
        if self._are_parts(nodes):
            return self._parts(nodes, example)
        if not all(node.as_items for node in nodes):
            raise self._differ(nodes, lambda node: f"{node.form[0]} items")
        one = example[0] if len(example) else None
        absent = self._absent_below(nodes[0].path)
        items = [
            self._item(item, piece, one, absent)
            for piece, node in zip(self.pieces, nodes, strict=True)
            for item in node.parts
        ]
        return tuple(items) if isinstance(example, tuple) else items

    def _are_parts(self, nodes: Sequence[_Node]) -> bool:
        """Returns True if a list is made of parts of a value, False if it has one item a sample."""
        as_parts = all(node.as_parts for node in nodes) and len({node.form for node in nodes}) == 1
        as_items = all(node.as_items for node in nodes)
        place = f"{user_line()} {nodes[0].path}"
        if not (as_parts and as_items) or any(node.likely for node in nodes):
            self._lists[place] = as_parts
        elif not any(node.tracked for node in nodes) or any(p.kind == "parts" for node in nodes for p in node.parts):
            return False
        elif place not in self._lists:
            raise ConfigError(
                "a list of n outputs, each [n, ...], is not clear: it may be n samples, or n parts of a value",
                f"{nodes[0].path or 'a value'} is a list of {nodes[0].form[0]} tensors with as many rows",
                "give parts of a value in a tuple or a dict; samples of one shape in a tensor: torch.stack(items)",
                shared=True,
            )
        return self._lists[place]

    def _item(self, node: _Node, piece: _Piece, example: Any, absent: Sequence[Tensor]) -> Any:
        """Returns the value of one sample, in the form of one of this rank's own."""
        if node.kind in ("rows", "scalar"):
            tensor = self._leaf(piece, node, absent=absent)
            return tensor.clone() if node.tracked else tensor  # which a loss may change in place
        if node.kind in ("array", "plain"):
            return node.content
        shown = parts_of(example) or {}
        its = {
            name: self._item(part, piece, shown.get(name, next(iter(shown.values()), None)), absent)
            for name, part in zip(node.names, node.parts, strict=True)
        }
        if node.kind == "list":
            return list(its.values())
        return made_of(its, example) if shown and tuple(shown) == node.names else its

    def _parts(self, nodes: Sequence[_Node], example: Any) -> Any:
        if len({node.form for node in nodes}) > 1:
            raise self._differ(nodes, lambda node: f"parts {', '.join(map(str, node.names))}")
        shown = parts_of(example) or {}
        its = {
            name: self.value([node.parts[at] for node in nodes], shown.get(name))
            for at, name in enumerate(nodes[0].names)
        }
        return made_of(its, example) if tuple(shown) == nodes[0].names else its

    def _rows(self, nodes: Sequence[_Node]) -> Tensor:
        if len({(node.form[0][1:], node.form[1]) for node in nodes}) > 1:
            raise self._differ(nodes, lambda node: f"{tuple(node.form[0])} {node.form[1]}")
        absent = self._absent_below(nodes[0].path)
        pairs = zip(self.pieces, nodes, strict=True)
        return torch.cat([self._leaf(piece, node, absent=absent) for piece, node in pairs])

    def _absent_at(self, path: str) -> list[tuple[_Piece, _Node]]:
        """Returns the tensors at a place, or in a list there, in values of ranks that have no samples."""
        pairs = ((piece, node) for piece in self._absent for node in _tensors_of(piece.node))
        return [(piece, node) for piece, node in pairs if f"{node.path}.".startswith(f"{path}." if path else "")]

    def _absent_below(self, path: str) -> list[Tensor]:
        """Returns this rank's own outputs there, if it has no samples."""
        its = (piece.own[node.place] for piece, node in self._absent_at(path) if piece.own is not None)
        return [output for output in its if output.requires_grad]

    def _scalar(self, nodes: Sequence[_Node]) -> Tensor:
        """Returns a number that all ranks share, such as a temperature; raises ConfigError if they differ."""
        numbers = [piece.tensors[node.place] for piece, node in zip(self.pieces, nodes, strict=True)]
        if not all(torch.allclose(number, numbers[0], rtol=1e-5, atol=0, equal_nan=True) for number in numbers):
            lines = zip(self.pieces, numbers, strict=True)
            shown = "\n".join(f"rank {piece.rank}: {number.item():g}" for piece, number in lines)
            raise ConfigError(
                "a single number in hvt.whole() must be the same on every rank",
                f"{nodes[0].path or 'a value'} is\n{shown}",
                "give hvt.whole() the values of each sample, one row per sample; compute the number from its result",
                shared=True,
            )
        pairs = [*zip(self.pieces, nodes, strict=True), *self._absent_at(nodes[0].path)]
        piece, node = next((pair for pair in pairs if pair[0].own is not None), pairs[0])
        return self._leaf(piece, node, shared=True).clone()

    def _leaf(self, piece: _Piece, node: _Node, *, shared: bool = False, absent: Sequence[Tensor] = ()) -> Tensor:
        """Returns a tensor of a piece; where it has a gradient as a leaf."""
        tensor = piece.tensors[node.place]
        if node.tracked:
            tensor = tensor.detach().requires_grad_()
            _owns[tensor] = _Own(None if piece.own is None else piece.own[node.place], shared, absent)
        return tensor

    def _differ(self, nodes: Sequence[_Node], shown: Callable[[_Node], str]) -> ConfigError:
        lines = zip(self.pieces, nodes, strict=True)
        text = "\n".join(f"rank {piece.rank}: {shown(node)}" for piece, node in lines)
        return _refused(f"{nodes[0].path or 'a value'} differs between ranks\n{text}")


def _refused(received: str) -> ConfigError:
    return ConfigError(
        "values in hvt.whole() must have a row or list item per sample, and the same form on all ranks",
        received,
        "give hvt.whole() what the loss reads, padded to one shape; parts of a value in a tuple or a dict",
        shared=True,
    )


def _of_all(own: Sequence[list[Tensor]], reports: Sequence[_Report], world: World) -> list[_Piece]:
    """Returns all ranks' pieces, first those of the first micro-batch."""
    engine = engine_of(world)
    forms = [[[leaf.form for leaf in _tensors_of(node)] for node in nodes] for _, _, nodes in reports]
    counts = [sum(_padded(_bytes(form)) for its in ranks for form in its) or _ALIGNED for ranks in forms]
    sent = torch.zeros(counts[world.rank], dtype=torch.uint8, device=engine.device)
    at = 0
    for tensor in (tensor for tensors in own for tensor in tensors):
        flat = tensor.detach().reshape(-1)  # a single element may have any stride
        sent[at : at + flat.nbytes].view(flat.dtype).copy_(flat)
        at += _padded(flat.nbytes)
    received = engine.gather(sent, counts)
    pieces: list[list[_Piece]] = []
    at = 0
    for rank, ((_, absent, nodes), its_forms, count) in enumerate(zip(reports, forms, counts, strict=True)):
        place, its = at, []
        for number, (is_absent, node, micro_batch) in enumerate(zip(absent, nodes, its_forms, strict=True)):
            tensors = []
            for shape, dtype in micro_batch:
                size = _bytes((shape, dtype))
                tensors.append(received[place : place + size].view(dtype).reshape(shape))
                place += _padded(size)
            its.append(_Piece(rank, is_absent, node, tensors, own[number] if rank == world.rank else None))
        pieces.append(its)
        at += count
    return [piece for micro_batch in zip(*pieces, strict=True) for piece in micro_batch]


def _bytes(form: tuple[tuple[int, ...], torch.dtype]) -> int:
    return math.prod(form[0]) * form[1].itemsize


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _tensors_of(node: _Node) -> Iterator[_Node]:
    if node.kind in ("rows", "scalar"):
        yield node
    for part in node.parts:
        yield from _tensors_of(part)


class _Given(torch.autograd.Function):
    """A scalar whose gradient by each tensor is known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        return None, None, *(gradient * factor.to(gradient.device, gradient.dtype) for gradient in ctx.gradients)


def gradients_of(
    loss: Tensor, module: nn.Module, size: int, retain_graph: bool
) -> tuple[list[Tensor], list[Tensor]] | None:
    """Returns where a loss of the whole batch enters this rank's graph, and its gradients there, also by the module's
    parameters; None for another loss. They will be averaged over `size` ranks. `retain_graph`: above the outputs."""
    if not len(_owns):
        return None
    reached = leaves_of(loss)
    joins = [tensor for tensor in reached if tensor in _owns]
    if not joins:
        return None
    trained = {id(parameter) for parameter in module.parameters()}
    direct = [tensor for tensor in reached if id(tensor) in trained]
    owns: list[_Own] = [_owns[tensor] for tensor in joins]
    local = {output.grad_fn for own in owns for output in (own.output, *own.absent) if output is not None} - {None}
    if not local.isdisjoint(nodes_of(loss, ())):
        raise ConfigError(
            "a loss of the whole batch must be computed only from what hvt.whole() returned",
            "a sum of such a loss and of a loss on this rank's own outputs",
            "give hvt.whole(...) all outputs and targets that the loss reads; compute both parts from its result",
            shared=True,
        )
    found = torch.autograd.grad(loss, [*joins, *direct], retain_graph=retain_graph, allow_unused=True)
    outputs: list[Tensor] = []
    gradients: list[Tensor] = []
    absent: dict[int, Tensor] = {}
    for own, gradient in zip(owns, found, strict=False):
        if gradient is None:
            continue
        absent |= {id(output): output for output in own.absent}
        if own.output is not None:
            outputs.append(own.output)
            gradients.append(gradient if own.shared else gradient * size)
    outputs += absent.values()
    gradients += map(torch.zeros_like, absent.values())
    for parameter, gradient in zip(direct, found[len(joins) :], strict=True):
        if gradient is not None:
            outputs.append(parameter)
            gradients.append(gradient)
    return outputs, gradients


def is_whole(loss: Tensor) -> bool:
    """Returns True if a loss is computed of what `whole` returned."""
    return bool(len(_owns)) and any(tensor in _owns for tensor in leaves_of(loss))


def given_gradients(loss: Tensor, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Returns the loss as a scalar whose gradient by each of the outputs is known."""
    scalar: Tensor = _Given.apply(loss.detach(), gradients, *outputs)
    return scalar
