"""Compares the loss of some samples together with that of each: gradients by the outputs show each part's weight."""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.core.decomposition import Kind, LossGradients, bound, compared, judge
from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.trace.restore import preserved_state
from hvdtrain.pipeline.values.microbatch import Weight, is_differentiable, pieces_of, shares
from hvdtrain.pipeline.values.threads import OwnMode
from hvdtrain.private.torch import TorchDispatchMode, pytree
from hvdtrain.values.nested import map_tensors, tensors_of

_TF32 = 2e-2  # what GPUs round products of float32 to, unless they are told not to
_LARGE = 1_000_000  # numbers of a loss with a network in it, which is not copied


def inner_loss(loss: Any) -> Any:
    """The user's own function; what is around it may keep count of its calls."""
    while hasattr(loss, "__wrapped__"):
        loss = loss.__wrapped__
    return loss


def tolerance_of(*tensors: Tensor) -> float:
    """Returns a tolerance, relative to the largest number."""
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        return bound("outputs", ["bfloat16"])
    limit = bound("outputs", map(_name, filter(is_differentiable, tensors)))
    return max(limit, _TF32) if any(tensor.is_cuda and tensor.dtype == torch.float32 for tensor in tensors) else limit


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype.to_real()).removeprefix("torch.")


class Precision(OwnMode, TorchDispatchMode):
    """Notes the coarsest type of numbers that a loss computes in: one that goes over to float32 rounds as float32."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._types = set[str]()

    @property
    def tolerance(self) -> float:
        """The tolerance, relative to the largest gradient."""
        return bound("same outputs", self._types)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and is_differentiable(tensor):
                self._types.add(_name(tensor))
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: `torch._dynamo` is not imported for it, which takes a second."""
        return False


def agrees(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Returns True if an output of the whole is that of its parts. The loss judges outputs without samples."""
    at = sample_dimension(whole, parts)
    if at is None:
        return whole.dim() == 0 or all(part.shape == whole.shape for part in parts) and whole.shape[0] == 1
    joined = torch.cat(list(parts), at)
    if not is_differentiable(whole):
        return bool((joined == whole).float().mean() > 0.99) if whole.numel() else True
    wide = torch.complex128 if whole.is_complex() else torch.float64
    one, other = joined.to(wide), whole.to(wide)
    largest = float(other.abs().nan_to_num(0, 0, 0).max()) if other.numel() else 0.0
    return bool(one.allclose(other, rtol=0, atol=tolerance_of(whole) * largest, equal_nan=True))


def sample_dimension(whole: Tensor, parts: Sequence[Tensor]) -> int | None:
    for at in range(whole.dim()):
        rest = [(*t.shape[:at], *t.shape[at + 1 :]) for t in (whole, *parts)]
        if sum(part.shape[at] for part in parts if part.dim() > at) == whole.shape[at] and len(set(rest)) == 1:
            return at
    return None


class Comparison:
    """A comparison of one loss: of some samples together, and of each."""

    def __init__(
        self,
        loss: Any,
        weight: Weight,
        whole: Any,
        parts: Sequence[Any],
        targets: Any,
        sizes: Sequence[int],
        rounding: float,
    ) -> None:
        self._loss, self._weight, self._targets, self._sizes = loss, weight, targets, sizes
        self._rounding = rounding
        self._pieces = pieces_of(targets, sizes)
        self._whole, self._parts = whole, parts

    def check(self) -> None:
        for wide in (True, False):
            try:
                found = self._gradients(wide)
            except ConfigError:
                raise
            except Exception:
                continue  # in float64 it does not run, or not with one sample; the step itself runs it as it is
            if found is not None:
                self._judge(*found)
            return

    def _gradients(self, wide: bool) -> tuple[float, list[float], list[Tensor], list[list[Tensor]]] | None:
        """Loss and gradients by the outputs, of the whole and of the parts; None where it draws random numbers."""
        inner = inner_loss(self._loss)
        self._precision = Precision()
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([]))
            stack.enter_context(torch.enable_grad())
            for kind in ("cpu", "cuda"):
                stack.enter_context(torch.autocast(kind, enabled=False))
            if isinstance(inner, nn.Module):
                stack.enter_context(preserved_state(inner))
                if wide and sum(t.numel() for t in (*inner.parameters(), *inner.buffers())) < _LARGE:
                    inner = copy.deepcopy(inner).double()
            stack.enter_context(self._precision)
            state = torch.get_rng_state()
            total, whole = self._one(inner, self._whole, self._targets, wide)
            if not torch.equal(state, torch.get_rng_state()):
                return None
            pairs = [self._one(inner, part, piece, wide) for part, piece in zip(self._parts, self._pieces, strict=True)]
        return total, [value for value, _ in pairs], whole, [gradients for _, gradients in pairs]

    @staticmethod
    def _one(loss: Any, outputs: Any, targets: Any, wide: bool) -> tuple[float, list[Tensor]]:
        def leaf(tensor: Tensor) -> Tensor:
            if not is_differentiable(tensor):
                return tensor
            kind = torch.complex128 if tensor.is_complex() else torch.float64
            return tensor.detach().to(kind if wide else tensor.dtype, copy=True).requires_grad_()

        leaves = map_tensors(leaf, (outputs,))
        given = map_tensors(lambda t: t.double() if wide and t.is_floating_point() else t, (targets,))
        value = loss(leaves[0], given[0])
        asked = [tensor for tensor in tensors_of(leaves) if tensor.requires_grad]
        found = torch.autograd.grad(value.sum(), asked, allow_unused=True)
        pairs = zip(asked, found, strict=True)
        gradients = [torch.zeros_like(tensor) if gradient is None else gradient.detach() for tensor, gradient in pairs]
        return float(value.detach()), [torch.view_as_real(g) if g.is_complex() else g for g in gradients]

    def _judge(self, total: float, values: Sequence[float], whole: list[Tensor], parts: list[list[Tensor]]) -> None:
        if self._weight is None and any(tensor.dim() == 0 and bool(tensor) for tensor in whole):
            raise ConfigError(
                "weight= must equal the denominator of the mean loss (default: the number of samples)",
                "the loss is made of one number that the model returns: its denominator is unknown",
                "step(..., weight=lambda y: (y != -100).sum()) for ignored labels, (y[:, 1:] != -100).sum()\n"
                "where the model shifts them (causal language models), weight=len for a mean over samples; or outputs\n"
                "with an entry for each sample",
                code=35,
            )
        # such numbers have a gradient of 1, whatever they divide by
        kept = [at for at, tensor in enumerate(whole) if tensor.dim()]
        whole, parts = [whole[at] for at in kept], [[part[at] for at in kept] for part in parts]
        if not whole:
            return
        wanted = self._by_part(whole, parts)
        largest = max((float(g.abs().max()) for g in whole if g.numel()), default=0.0)
        if not math.isfinite(total) or not math.isfinite(largest) or largest == 0:
            return  # there is nothing to compare
        tolerance = max(self._rounding, self._precision.tolerance)
        ours = shares(self._weight, self._pieces, self._sizes)
        found = [_ratio(want, part) for want, part in zip(wanted, parts, strict=True)]
        of_whole = LossGradients(total, _numbered(enumerate(wanted)))
        pieces = enumerate(zip(values, parts, strict=True))
        of_parts = [LossGradients(value, _numbered([(at, part)])) for at, (value, part) in pieces]
        kind = judge(
            compared(of_whole, of_parts, ours),
            gradient=tolerance * largest,
            loss=10 * tolerance * max(abs(total), 1.0),
            best=compared(of_whole, of_parts, found),
            shares=found,
        )
        if kind != "holds":
            self._refuse(kind, ours, found)

    def _by_part(self, whole: list[Tensor], parts: list[list[Tensor]]) -> list[list[Tensor]]:
        """The whole's gradients by part."""
        columns = []
        for tensor, its in zip(whole, zip(*parts, strict=True), strict=True):
            at = sample_dimension(tensor, its)
            rows = None if at is None else [part.shape[at] for part in its]  # several rows a sample, too
            columns.append([tensor / len(its)] * len(its) if rows is None else tensor.split(rows, at or 0))
        return [list(row) for row in zip(*columns, strict=True)]

    def _refuse(self, kind: Kind, ours: Sequence[float], found: Sequence[float]) -> None:
        if kind == "samples meet":
            raise ConfigError(
                "the loss of a batch must be the weighted mean of the losses of its micro-batches",
                "a loss whose gradient for one sample depends on the other samples of the batch",
                "step(..., whole=True), which calls it once; or micro_batches=1;\n"
                "or a loss that is a mean over samples, tokens or pixels",
            )
        if kind == "is a sum":
            raise ConfigError(
                "the loss of a batch must be the weighted mean of the losses of its micro-batches",
                "a sum over samples: the batch's loss is the sum of the losses of its micro-batches",
                'reduction="mean"; or divide by the number of samples: lambda out, y: loss(out, y) / len(y)',
            )
        names = [text for text, weights in _candidates(self._loss, self._pieces) if _alike(weights, found)]
        raise ConfigError(
            "weight= must equal the denominator of the mean loss (default: the number of samples)",
            f"this loss gives single samples the shares {_formatted(found)}; weight= gives {_formatted(ours)}",
            f"step(x, y, loss, weight={names[0]}), or another function that equals the loss's denominator"
            if names
            else "weight=: a function of the targets that counts what the mean is over (tokens, pixels, valid labels,\n"
            "class weights)",
            code=35,
        )


def _numbered(columns: Iterable[tuple[int, Sequence[Tensor]]]) -> dict[Hashable, Tensor]:
    """Returns gradients by part and output."""
    return {(part, output): its for part, gradients in columns for output, its in enumerate(gradients)}


def _ratio(wanted: list[Tensor], part: list[Tensor]) -> float:
    """Returns the multiple of the part's gradient that the whole's has there, by least squares."""
    if not any(bool(tensor.any()) for tensor in wanted):
        return 0.0
    products = [(float((a * b).sum()), float((b * b).sum())) for a, b in zip(wanted, part, strict=True)]
    below = sum(square for _, square in products)
    return sum(product for product, _ in products) / below if below else 0.0


def _alike(weights: Sequence[float], found: Sequence[float]) -> bool:
    total, all_found = sum(weights), sum(found)
    if not total or not all_found or abs(all_found - 1) > 1e-3:
        return False
    return all(abs(w / total - f) < 1e-4 for w, f in zip(weights, found, strict=True))


def _formatted(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.3g}" for number in numbers)


def _candidates(loss: Any, pieces: Sequence[Any]) -> Iterator[tuple[str, list[float]]]:
    """Yields what a mean loss often divides by: the text of a function of the targets, and its values for these."""
    inner = inner_loss(loss)
    classes = getattr(inner, "weight", None)
    ignored = dict.fromkeys([getattr(inner, "ignore_index", -100), -100, -1, 0, 255])
    for path, leaf in pytree.tree_flatten_with_path(pieces[0])[0]:
        if not isinstance(leaf, Tensor):
            continue
        name = f"y{pytree.keystr(path)}"
        leaves = [dict(pytree.tree_flatten_with_path(piece)[0])[path] for piece in pieces]
        if leaf.is_floating_point() or leaf.dtype == torch.bool:
            yield f"lambda y: {name}.sum()", [float(one.sum()) for one in leaves]
            continue
        if (
            isinstance(classes, Tensor)
            and int(leaf.min()) >= 0
            and all(int(one.max()) < len(classes) for one in leaves)
        ):
            its = classes.detach().to(leaf.device)
            yield f"lambda y: loss.weight[{name}].sum()", [float(its[one].sum()) for one in leaves]
        for value in ignored:
            yield f"lambda y: ({name} != {value}).sum()", [float((one != value).sum()) for one in leaves]
