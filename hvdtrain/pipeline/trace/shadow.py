"""What a stand-in would be: looked up in a run of the example's few samples, as far as a decision of Python needs it.

Models of libraries ask for dimensions, types and lengths (`mask.ndim == 4`, `x.dtype != wanted`). Such an answer is the
same for every batch of a kind; it is fixed, and each pass asks again whether it still holds. What depends on numbers
in tensors, or on how many samples there are, is not looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from hvdtrain.pipeline.trace.restore import FEW, attributes_of, device_of, resized, restored, to_device
from hvdtrain.pipeline.values.microbatch import samples_of
from hvdtrain.private.torch import DisableTorchFunction, pytree
from hvdtrain.values.generators import HOST

UNKNOWN: Any = object()
# what asks a tensor for its form, not for its numbers
_FORM = frozenset((
    "shape", "ndim", "dtype", "device", "layout", "is_cuda", "is_sparse", "is_quantized", "requires_grad", "size",
    "dim", "ndimension", "numel", "nelement", "element_size", "stride", "is_floating_point", "is_complex",
    "is_contiguous", "is_tensor", "isinstance", "getattr", "len",
))  # fmt: skip
# what gives a tensor a shape that follows from numbers
_BY_NUMBERS = frozenset((
    "nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount", "repeat_interleave",
))  # fmt: skip


class Shadow:
    """Runs of a model with few samples, with one more and with one alone, of the nodes that are asked for."""

    def __init__(self, model: nn.Module, example: tuple[Any, ...]) -> None:
        self._model, self._example = model, example
        self._runs: dict[int, dict[fx.Node, Any]] = {FEW: {}, FEW + 1: {}, 1: {}}
        self.running = self.odd = False

    def ask(
        self, node: fx.Node, named: Callable[[Any], Any], read: Callable[[Any], int | None]
    ) -> tuple[int, bool] | None:
        """Returns what `read` gives for a node's value, and whether one sample gives the same (a model may want more:
        then nothing asks it); None if there is nothing to read, or numbers in tensors or of samples decide it."""
        values = [self._value(node, samples, named) for samples in self._runs]
        few, more, one = (None if value is UNKNOWN else read(value) for value in values)
        return None if few is None or few != more else (few, values[-1] is UNKNOWN or one == few)

    def is_a(self, node: fx.Node, kinds: Any, named: Callable[[Any], Any]) -> bool:
        """Returns `isinstance` of what a node stands for; False where that cannot be looked up."""
        few = self._value(node, FEW, named)
        return few is not UNKNOWN and isinstance(few, kinds)

    def _value(self, node: fx.Node, samples: int, named: Callable[[Any], Any]) -> Any:
        """Returns a node's value; runs what it needs in the graph's order: without recursion, as graphs are deep."""
        run = self._runs[samples]
        if node not in run:
            needed, waiting = set[fx.Node](), [node]
            while waiting:
                one = waiting.pop()
                if one not in run and one not in needed:
                    needed.add(one)
                    waiting += one.all_input_nodes
            before, draws = attributes_of(self._model), HOST.everything()
            self.running = True
            try:
                example = resized(self._example, samples) if samples_of(self._example) else self._example
                inputs = iter(to_device(example, device_of(self._model)))
                for one in node.graph.nodes:
                    given = next(inputs) if one.op == "placeholder" else None
                    if one in needed:
                        run[one] = given if one.op == "placeholder" else self._run(one, run, named)
            finally:
                self.running = False
                HOST.restore(draws)
                restored(before)
        return run[node]

    @staticmethod
    def _run(node: fx.Node, run: dict[fx.Node, Any], named: Callable[[Any], Any]) -> Any:
        if any(run.get(one, UNKNOWN) is UNKNOWN for one in node.all_input_nodes):
            return UNKNOWN
        name = str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", ""))
        try:
            with DisableTorchFunction():
                value = executed(node, run, named)
        except Exception:  # the pass itself will say what is wrong
            return UNKNOWN
        given: list[Any] = []
        fx.node.map_arg((node.args, node.kwargs), lambda one: given.append(run[one]))
        return UNKNOWN if node.op != "get_attr" and _by_numbers(name, given, value) else value


def executed(node: fx.Node, values: Mapping[fx.Node, Any], named: Callable[[Any], Any]) -> Any:
    """Returns the value of a node, given those of the nodes it uses; `named`: what the target of a node names."""
    if node.op == "get_attr":
        return named(node.target)
    args, kwargs = (_plain(value) for value in fx.node.map_arg((node.args, node.kwargs), values.__getitem__))
    with torch.no_grad():
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        called: Any = named(node.target) if node.op == "call_module" else node.target
        return called(*args, **kwargs)


def _plain(value: Any) -> Any:
    """Returns fx's immutable lists and dicts as ordinary ones."""
    if isinstance(value, fx.immutable_collections.immutable_list):
        return [_plain(item) for item in value]
    if isinstance(value, fx.immutable_collections.immutable_dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    if type(value) is tuple:
        return tuple(_plain(item) for item in value)
    return value


def truth(value: Any) -> bool | None:
    """Returns how Python decides by a value; by a tensor's numbers it may not."""
    return None if isinstance(value, torch.Tensor) else bool(value)


def length(value: Any) -> int | None:
    """Returns how many items a shape or another tuple has."""
    return len(value) if isinstance(value, (tuple, list)) else None


def number(value: Any) -> int | None:
    """Returns a number that a shape has, for Python's own `range` and lists."""
    return value if type(value) is int else None


def _by_numbers(name: str, given: Any, value: Any) -> bool:
    """Returns True if a value's parts other than tensors, or its shape, may follow from the numbers in tensors."""
    tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    if not tensors or name in _FORM:
        return False
    picks = name in ("getitem", "__getitem__") and any(tensor.dtype == torch.bool for tensor in tensors[1:])
    form = (torch.Tensor, torch.dtype, torch.device, type(None))
    return name in _BY_NUMBERS or picks or not all(isinstance(leaf, form) for leaf in pytree.tree_leaves(value))


def same(value: Any, fixed: int, where: str) -> None:
    """Stands in each pass for a decision or a look at a length; raises `RuntimeError` if it differs now."""
    now = bool(value) if isinstance(fixed, bool) else value if isinstance(value, int) else len(value)
    if now == fixed:
        return
    by, remedy = "Python's loop, index or len() had items by shapes", "pad to one length"
    if isinstance(fixed, bool):
        by = "decided by shapes, types or settings (autocast, gradients)"
        remedy = "split it with an example, and under settings, like these"
    raise RuntimeError(
        f"{where}: {by}, and {now} instead of {fixed} when the model was split: {remedy}, or give parts of it, which"
        " are called as they are: split(..., modules=[...])"
    )
