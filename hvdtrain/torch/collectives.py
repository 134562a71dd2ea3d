"""Tensors of all ranks, for what a script computes beside its training: metrics, predictions, flags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hvdtrain.comm import elastic
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.sharding import Step
from hvdtrain.torch.engines.buffers import broadcast_
from hvdtrain.torch.engines.engine import engine_of
from hvdtrain.values.nested import made_of, map_tensors, parts_of
from hvdtrain.world.world import World, given_or_current

_OPS = ("mean", "sum", "min", "max")
_NUMBERS = (bool, int, float, complex, np.generic)


@elastic.repeated
def reduce(tensor: Tensor, op: Literal["mean", "sum", "min", "max"] = "mean", *, world: World | None = None) -> Tensor:
    """Returns the mean, sum, smallest or largest of a tensor over ranks, element by element; collective.

    It is for metrics and has no gradient: `Optimizer.backward` already averages a loss over ranks.

    Example:
        right = hvt.reduce((outputs.argmax(1) == y).sum(), "sum")

    Args:
        tensor: of one shape and dtype on every rank; detached, or under `no_grad`. A mean of integers is rounded down.
        op: "mean", "sum", "min" or "max".
        world: the ranks; default: those of `hvdtrain.init`.

    Returns:
        A new tensor on the same device, the same on every rank.

    Raises:
        ConfigError: another op, or a tensor that needs a gradient.
        ReplicaError: on every rank, if shapes or dtypes differ.
    """
    if op not in _OPS:
        raise ConfigError(f"op must be one of {', '.join(_OPS)}", f"op={op!r}")
    world = _entered("reduce", tensor, world)
    if world.size == 1:
        return tensor.detach().clone()
    with world.in_step(f"hvt.reduce(op={op!r})", f"{tuple(tensor.shape)} {tensor.dtype}"):
        if op in ("mean", "sum"):
            total = engine_of(world).sum_(tensor.detach().clone(memory_format=torch.contiguous_format))
            if op == "sum":
                return total
            return total / world.size if total.is_floating_point() or total.is_complex() else total // world.size
    every = torch.stack(_of_all(tensor, world))
    return every.amin(0) if op == "min" else every.amax(0)


@elastic.repeated
def gather(tensor: Tensor, *, world: World | None = None) -> Tensor:
    """Returns the ranks' tensors, joined along their first dimension in rank order; collective.

    Example:
        distances = hvt.gather(distances)  # [n, ...] of each rank to [sum of n, ...]

    Args:
        tensor: [n, ...]; n may differ between ranks. Detached, or under `no_grad`.
        world: the ranks; default: those of `hvdtrain.init`.

    Raises:
        ConfigError: a tensor without dimensions, or one that needs a gradient.
    """
    if not tensor.dim():
        raise ConfigError("tensors must have a dimension to join", "a tensor of no dimension", "tensor.reshape(1)")
    world = _entered("gather", tensor, world)
    return torch.cat(_of_all(tensor, world))


@elastic.repeated
def broadcast(tensor: Tensor, root: int = 0, *, world: World | None = None) -> Tensor:
    """Returns rank `root`'s tensor, on this rank's device; collective.

    Example:
        centers = hvt.broadcast(centers if world.is_main else torch.empty_like(centers))

    Raises:
        ConfigError: a tensor that needs a gradient.
        ReplicaError: on every rank, if shapes or dtypes differ.
    """
    world = _entered("broadcast", tensor, world)
    found = tensor.detach().clone(memory_format=torch.contiguous_format)
    if world.size > 1:
        with world.in_step("hvt.broadcast", f"{root} {tuple(tensor.shape)} {tensor.dtype}"):
            broadcast_([found], world, root)
    return found


def _entered(what: str, tensor: Tensor, world: World | None) -> World:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ConfigError(
            f"hvt.{what} has no gradient: it is for metrics",
            f"a tensor of shape {tuple(tensor.shape)} that requires a gradient",
            f"in a metric: hvt.{what}(x.detach())\n"
            "for a loss: pass this rank's own to optimizer.backward(), which averages it over ranks",
        )
    return given_or_current(world, "torch")


def _of_all(tensor: Tensor, world: World) -> list[Tensor]:
    return [one.to(tensor.device) for one in world.gather(tensor.detach().cpu())]


# ---- what was kept of each sample, in the order of the data


def gather_in_order(batches: Iterable[tuple[Step | None, Any]], *, world: World | None = None) -> Any:
    """Returns the values that ranks kept from their batches, joined; the same on every rank; collective.

    Each sample comes once, in the loader's order: the data's order with `shuffle=False`.

    Example:
        with torch.no_grad():
            kept = [(validation.step, (model(x), y)) for x, y in validation]
        outputs, targets = hvt.gather_in_order(kept)

    Args:
        batches: for each batch the loader's `step` and its values: tensors and arrays [samples, ...] or lists with one
            item per sample, also within tuples, mappings and data classes. A number for a batch stands for each of its
            samples. Padding batches are skipped.
        world: the ranks; default: those of `hvdtrain.init`.

    Returns:
        The values of all samples, nested as for one batch; tensors are on the CPU.

    Raises:
        ConfigError: on every rank, if there are no samples or no step, if values and samples differ in number, if a
            batch comes twice, or if shapes cannot be joined.
    """
    world = given_or_current(world, "torch")
    mine: list[tuple[tuple[int, int], Any]] = []
    problem, is_clear = "", False
    for step, values in batches:
        problem = problem or _problem(step, values)
        if not problem and step is not None and not step.padding:
            mine.append(((step.epoch, step.first), _kept(values, step.samples)))
            is_clear |= not _may_be_parts(values, step.samples)
    reports = world.gather((problem, is_clear, mine))
    problem = next(filter(None, (its_problem for its_problem, *_ in reports)), "")
    pieces = sorted((piece for *_, its_pieces in reports for piece in its_pieces), key=lambda piece: piece[0])
    if pieces and not problem and not any(is_clear for _, is_clear, _ in reports):
        problem = "a list of n tensors, each [n, ...], in every batch of n samples: n samples, or n parts of a value"
    places = [place for place, _ in pieces]
    if not problem and len(set(places)) < len(places):
        problem = "a batch twice: from two ranks, or from two loops over one epoch"
        if elastic.ranks().may_change:
            problem += ",\nor a batch was repeated when ranks changed (values of the lost ranks are then also missing)"
    if problem or not pieces:
        raise ConfigError(
            "gather_in_order() needs (step, values) of each batch once, with a value for each sample",
            problem or "no batch on any rank",
            "kept.append((validation.step, values)), a new list in each loop;\nput several values (a model's heads)"
            " into a tuple or a dict,\nand samples of one shape into a tensor: torch.stack(items)",
            shared=True,
        )
    return _joined([values for _, values in pieces])


def _kept(values: Any, samples: int) -> Any:
    """Returns values on the CPU; repeats one number for a batch (its loss) for each of its samples."""
    if isinstance(values, Tensor) and values.ndim or isinstance(values, list):  # of a list each item is a sample's
        return map_tensors(lambda tensor: tensor.detach().cpu(), values)
    if isinstance(values, (Tensor, *_NUMBERS)):
        return torch.as_tensor(values).detach().cpu().expand(samples)
    parts = parts_of(values)
    return values if parts is None else made_of({name: _kept(part, samples) for name, part in parts.items()}, values)


def _problem(step: Any, values: Any) -> str:
    """Returns what is wrong with a batch; "" if nothing is."""
    if not isinstance(step, Step):
        return f"a {type(step).__name__} in place of a loader's step"
    return "" if step.padding else wrong_length(values, step.samples)


def wrong_length(values: Any, samples: int) -> str:
    """Returns what has not one value for each sample, "" if all has."""
    wrong = [length for length in lengths(values) if length not in ("", f"{samples} values")]
    return f"{wrong[0]}, for {samples} samples" if wrong else ""


def _may_be_parts(values: Any, samples: int) -> bool:
    """Returns True if a list of items may as well be one of parts, each with a row for each sample."""
    if isinstance(values, list):
        rows = [len(item) if isinstance(item, Tensor) and item.ndim else None for item in values]
        return rows == [samples] * samples
    return any(_may_be_parts(part, samples) for part in (parts_of(values) or {}).values())


def _is_rows(values: Any) -> bool:
    return isinstance(values, (Tensor, np.ndarray, list))


def lengths(values: Any) -> list[str]:
    """Returns the lengths of all values inside; "" for a value that needs no length: None, one number for a batch."""
    if values is None or isinstance(values, _NUMBERS) or isinstance(values, Tensor) and not values.ndim:
        return [""]
    if _is_rows(values):
        return [f"{len(values)} values"] if isinstance(values, list) or values.ndim else ["an array of one number"]
    parts = parts_of(values)
    if parts is None:
        return [f"a {type(values).__name__}"]
    return [length for part in parts.values() for length in lengths(part)]


def _joined(pieces: Sequence[Any]) -> Any:
    first, parts = pieces[0], [parts_of(piece) for piece in pieces]
    forms = {f"{type(piece).__name__}{'' if _is_rows(piece) else sorted(map(str, part or ()))}": None
             for piece, part in zip(pieces, parts, strict=True)}  # fmt: skip
    if len(forms) > 1:
        raise ConfigError(
            "values must have the same structure in every batch",
            " and ".join(list(forms)[:3]),
            "return the same parts in each batch; a part can be None only in all of them",
            shared=True,
        )
    if first is None:
        return None
    if isinstance(first, list):
        return [item for piece in pieces for item in piece]
    if _is_rows(first):
        if any(piece.shape[1:] != first.shape[1:] for piece in pieces):
            shapes = sorted({str(tuple(piece.shape[1:])) for piece in pieces})
            raise ConfigError(
                "values must have the same shape for every sample",
                f"{' and '.join(shapes[:3])} for a sample",
                "list(tensor): in a list the values of samples can have different shapes",
                shared=True,
            )
        return torch.cat(list(pieces)) if isinstance(first, Tensor) else np.concatenate(pieces)
    return made_of({name: _joined([part[name] for part in parts if part]) for name in parts[0] or {}}, first)


def reordered(values: Any, order: np.ndarray) -> Any:
    """Returns values [samples, ...] in another order."""
    if isinstance(values, list):
        return [values[place] for place in order]
    if _is_rows(values):
        return values[torch.from_numpy(order) if isinstance(values, Tensor) else order]
    parts = parts_of(values)
    return values if parts is None else made_of({name: reordered(its, order) for name, its in parts.items()}, values)
