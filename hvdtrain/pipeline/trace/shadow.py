"""What a stand-in would be: looked up in a run of the example's few samples, as far as a decision of Python needs it.

Models of libraries ask for dimensions, types and lengths (`mask.ndim == 4`, `x.dtype != wanted`). Such an answer is the
same for every batch of a kind; it is fixed, and each pass asks again whether it still holds. What depends on numbers
in tensors, or on how many samples there are, is not looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from hvdtrain.pipeline.trace.few import FEW, device_of, resized, to_device
from hvdtrain.pipeline.trace.restore import attributes_of, draw_states, redrawn, restored
from hvdtrain.pipeline.values.microbatch import batch_size

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
    """Runs of a model with few samples, with one more and with one alone, node by node, where they are asked for.

    The caller keeps buffers and random state as they were.

    Attributes:
        running: an operation is being run for it: nothing is to be recorded.
        odd: a decision was another one for one sample alone.
    """

    def __init__(self, model: nn.Module, example: tuple[Any, ...]) -> None:
        self._model, self._example = model, example
        self._runs: dict[int, dict[fx.Node, Any]] = {FEW: {}, FEW + 1: {}, 1: {}}
        self.running = self.odd = False

    def length(self, node: fx.Node, named: Callable[[Any], Any]) -> tuple[int, bool] | None:
        """Items of a node that is a tuple or a list, and whether one sample has as many (as of `decided`).

        None where it is another thing, or as long as the samples.

        Args:
            named: what the target of a node names.
        """
        few, more, one = (self._value(node, samples, named) for samples in self._runs)
        if not isinstance(few, (tuple, list)) or not isinstance(more, (tuple, list)) or len(few) != len(more):
            return None
        return len(few), one is UNKNOWN or (isinstance(one, (tuple, list)) and len(one) == len(few))

    def number(self, node: fx.Node, named: Callable[[Any], Any]) -> tuple[int, bool] | None:
        """The number that a node is, and whether it is so for one sample, too; None as of `decided`."""
        few, more, one = (self._value(node, samples, named) for samples in self._runs)
        if type(few) is not int or few != more:
            return None
        return few, one is UNKNOWN or one == few

    def is_a(self, node: fx.Node, kinds: Any, named: Callable[[Any], Any]) -> bool:
        """Returns `isinstance` of what a node stands for; False where that cannot be looked up."""
        few = self._value(node, FEW, named)
        return few is not UNKNOWN and isinstance(few, kinds)

    def decided(self, node: fx.Node, named: Callable[[Any], Any]) -> tuple[bool, bool] | None:
        """How Python decides by a node's value, and whether it does so for one sample, too (a model may want more: then
        nobody asks it); None where that depends on tensors' numbers, or on the samples."""
        few, more, one = (self._value(node, samples, named) for samples in self._runs)
        if any(value is UNKNOWN or isinstance(value, torch.Tensor) for value in (few, more)) or bool(few) != bool(more):
            return None
        return bool(few), one is UNKNOWN or bool(one) == bool(few)

    def _value(self, node: fx.Node, samples: int, named: Callable[[Any], Any]) -> Any:
        """Of this node and of what it needs, in the order of the graph: without recursion, graphs are deep."""
        run = self._runs[samples]
        if node not in run:
            needed, waiting = set[fx.Node](), [node]
            while waiting:
                one = waiting.pop()
                if one not in run and one not in needed:
                    needed.add(one)
                    waiting += one.all_input_nodes
            before, draws = attributes_of(self._model), draw_states()
            self.running = True
            try:
                example = resized(self._example, samples) if batch_size(self._example) else self._example
                inputs = iter(to_device(example, device_of(self._model)))
                for one in node.graph.nodes:
                    given = next(inputs) if one.op == "placeholder" else None
                    if one in needed:
                        run[one] = given if one.op == "placeholder" else self._run(one, run, named)
            finally:
                self.running = False
                redrawn(draws)
                restored(before)
        return run[node]

    @staticmethod
    def _run(node: fx.Node, run: dict[fx.Node, Any], named: Callable[[Any], Any]) -> Any:
        if node.op == "get_attr":
            return named(node.target)
        if any(run.get(one, UNKNOWN) is UNKNOWN for one in node.all_input_nodes):
            return UNKNOWN
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), run.__getitem__)
        name = str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", ""))
        try:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                if node.op == "call_method":
                    value = getattr(args[0], name)(*args[1:], **kwargs)
                else:
                    called: Any = named(node.target) if node.op == "call_module" else node.target
                    value = called(*args, **kwargs)
        except Exception:  # the pass itself will say what is wrong
            return UNKNOWN
        return UNKNOWN if _by_numbers(name, (args, kwargs), value) else value


def _by_numbers(name: str, given: Any, value: Any) -> bool:
    """Whether what is no tensor in a value, or its shape, may follow from the numbers in tensors."""
    tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    if not tensors or name in _FORM:
        return False
    picks = name in ("getitem", "__getitem__") and any(tensor.dtype == torch.bool for tensor in tensors[1:])
    form = (torch.Tensor, torch.dtype, torch.device, type(None))
    return name in _BY_NUMBERS or picks or not all(isinstance(leaf, form) for leaf in pytree.tree_leaves(value))


def same(value: Any, fixed: int, where: str) -> None:
    """In each pass, in place of a decision (`fixed`: True or False), or of a look at a tuple's length.

    Raises:
        RuntimeError: it would be another one now.
    """
    now = bool(value) if isinstance(fixed, bool) else value if isinstance(value, int) else len(value)
    if now == fixed:
        return
    by, remedy = "Python's loop, index or len() had items by shapes", "pad to one length"
    if isinstance(fixed, bool):
        by = "decided by shapes, types or settings (autocast)"
        remedy = "split it with an example, and under settings, like these"
    raise RuntimeError(
        f"{where}: {by}, and {now} instead of {fixed} when the model was split: {remedy}, or give parts of it, which"
        " are called as they are: split(..., modules=[...])"
    )
