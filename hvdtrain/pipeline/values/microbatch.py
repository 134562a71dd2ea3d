"""A batch cut into micro-batches, how much each counts, and gradients of its inputs; values may be nested."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.sharding import weight_number
from hvdtrain.private.torch import pytree
from hvdtrain.values.nested import map_tensors, tensors_of

# leaves of nested values besides tensors
SIMPLE = (int, float, bool, complex, str, torch.dtype, torch.device, type(None))
Chunk = Sequence[Any] | Mapping[str, Any] | None
Weight = float | Tensor | Callable[[Any], float | Tensor] | None
_EXAMPLES = (
    "weight=lambda y: (y != -100).sum() for ignore_index, weight=lambda y: class_weights[y].sum() for class weights"
)


class Whole:
    """An argument that goes to every micro-batch as it is; no walk through nested values sees what is in it."""

    def __init__(self, value: Any) -> None:
        self.value = value


def flat(x: Any, kwargs: Mapping[str, Any] | None, names: Sequence[str]) -> tuple[Any, ...]:
    """Returns positional and keyword arguments as one tuple, the latter in the order of `names`, those of the example;
    raises `ConfigError` for other names. `x`: the only argument, or a tuple of arguments."""
    given = kwargs or {}
    if set(given) != set(names):
        raise ConfigError(
            "keyword arguments of a pipeline must be those that it was split with",
            f"{', '.join(given) or 'none'}; split with {', '.join(names) or 'none'}",
            "kwargs={...} of step(), or pipe(..., name=value), as in split(model, example, devices, kwargs={...})",
        )
    return (*(x if type(x) is tuple else (x,)), *(given[name] for name in names))


def marked(arguments: tuple[Any, ...], chunk: Chunk, names: Sequence[str] = ()) -> tuple[Any, ...]:
    """Returns the arguments, those without samples as `Whole` (`chunk`: as of `split`); or raises `ConfigError`."""
    if chunk is None:
        return arguments
    keys = [*map(str, range(len(arguments) - len(names))), *names]
    by_name = isinstance(chunk, Mapping)
    marks = {str(key): one for key, one in (chunk.items() if isinstance(chunk, Mapping) else enumerate(chunk))}
    try:
        if set(marks) - set(keys) if by_name else len(marks) != len(arguments):
            raise ValueError
        ones = [marks.get(key, 0) for key in keys] if by_name else list(marks.values())
        return tuple(_marked(value, one) for value, one in zip(arguments, ones, strict=True))
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            "chunk=[...] must hold 0 (samples along dimension 0) or None (no samples) for each argument",
            f"chunk={dict(chunk) if isinstance(chunk, Mapping) else list(chunk)} for {len(arguments)} argument(s):"
            f" {', '.join(keys)}",
            "chunk={name: ...} for some arguments; [...] or {...} for the parts of a nested argument;\n"
            "for a model that takes [sequence, batch, ...], split one that takes [batch, sequence, ...]\n"
            "and transposes it",
        ) from None


def _marked(value: Any, one: Any) -> Any:
    if one is None:
        return Whole(value)
    if isinstance(one, Mapping):
        if set(one) - set(value):
            raise ValueError
        return type(value)({key: _marked(part, one.get(key, 0)) for key, part in value.items()})
    if isinstance(one, (list, tuple)):
        return type(value)(_marked(part, each) for part, each in zip(value, one, strict=True))
    if one is not False and one != 0:
        raise ValueError
    return value


def unmarked(values: Any) -> Any:
    """Returns the values without `Whole`."""
    return pytree.tree_map_only(Whole, lambda whole: whole.value, values)


def is_named(value: dict[Any, Any]) -> bool:
    """Returns True if a dict of a class of its own (ModelOutput) can be made from its items, given by name."""
    if not all(isinstance(key, str) and key.isidentifier() for key in value):
        return False
    try:
        same = type(value)(**value)
    except Exception:
        return False
    return list(same) == list(value) and all(dict.__getitem__(same, key) is value[key] for key in value)


def known_to_pytree(kind: type[dict[Any, Any]]) -> None:
    """Lets PyTorch's nested values go into a dict of a class of its own, as its library would have it registered."""
    if kind not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            kind,
            lambda value: ([dict.__getitem__(value, key) for key in value], list(value)),
            lambda parts, keys: kind(**dict(zip(keys, parts, strict=True))),
        )


def is_differentiable(tensor: Tensor) -> bool:
    """Returns True if the type can have a gradient; integers and booleans cannot."""
    return tensor.is_floating_point() or tensor.is_complex()


def samples_of(arguments: tuple[Any, ...]) -> int:
    """Returns the samples in a batch: the length of the first tensor; raises `ConfigError` if there is none."""
    for tensor in tensors_of(arguments):
        if tensor.dim():
            return len(tensor)
    received = ", ".join(type(value).__name__ for value in arguments) or "nothing"
    raise ConfigError("a batch needs a tensor whose dimension 0 counts the samples", received)


def pieces_of(values: Any, sizes: Sequence[int], *, every: str | None = None) -> list[Any]:
    """Cuts every tensor that is as long as the batch; others (a mask for all samples, a number) go to all.

    Raises `ConfigError` for objects; with `every`, the name of the values, also for a tensor that is not as long.
    """
    batch = sum(sizes)
    leaves, spec = pytree.tree_flatten(values)
    pieces: list[Sequence[Any]] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == batch:
            pieces.append(leaf.split(list(sizes)))
            continue
        if isinstance(leaf, Whole):
            leaf = leaf.value
        elif not isinstance(leaf, (Tensor, *SIMPLE)) or (every is not None and isinstance(leaf, str)):
            raise ConfigError(
                f"{every or 'inputs'} must be tensors and numbers, in tuples, lists and dicts",
                f"a {type(leaf).__name__}, which cannot be cut into micro-batches",
                "dict(batch), or a tuple of its tensors; inputs without samples: split(..., chunk=[0, None])",
            )
        if every is not None and isinstance(leaf, Tensor) and leaf.dim():
            raise ConfigError(
                f"{every} must have one entry for each sample", f"shape {tuple(leaf.shape)} for a batch of {batch}"
            )
        pieces.append([leaf] * len(sizes))
    return [pytree.tree_unflatten(list(group), spec) for group in zip(*pieces, strict=True)]


def not_joined(received: str, sizes: Sequence[int]) -> ConfigError:
    """Returns the error for outputs of micro-batches that cannot be joined; see `nested.join`."""
    return ConfigError(
        "outputs of a pipeline must be tensors with one entry for each sample, in tuples, lists and dicts",
        f"{received}, for {list(sizes)} samples",
        "micro_batches=1, or a model that returns values by sample; of an object its tensors: .logits",
    )


# ---- how much each counts: by what its mean loss divides by


def shares(weight: Weight, targets: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """Returns the part of the batch's gradient that each micro-batch makes; they sum to 1, or are all 0. `weight`: as
    in `Pipeline.step`; raises `ConfigError` for no number >= 0, or a number for several micro-batches."""
    if weight is None:
        weights: list[float] = list(sizes)
    elif callable(weight):
        weights = [weight_number(weight(target), _EXAMPLES) for target in targets]
    else:
        weights = [weight_number(weight, _EXAMPLES)]
        if len(sizes) > 1:
            raise ConfigError(
                "a batch that is cut into micro-batches needs the weight of each of them",
                f"weight={weights[0]:g} for {len(sizes)} micro-batches",
                f"a function of the targets: {_EXAMPLES}",
            )
    total = sum(weights)
    return [one / total if one else 0.0 for one in weights]


class Inputs:
    """The arguments of a batch in `pieces`, and their tensors' `gradients`, filled by the first stage."""

    def __init__(self, arguments: tuple[Any, ...], sizes: Sequence[int]) -> None:
        self._tensors = tensors_of(unmarked(arguments))
        with torch.no_grad():
            self.pieces = pieces_of(arguments, sizes)
        self.gradients: list[list[Tensor | None]] = [[] for _ in sizes]
        self.wanted = any(tensor.requires_grad for tensor in self._tensors)
        if self.wanted:
            self.pieces = [self._leaves(piece) for piece in self.pieces]

    def _leaves(self, piece: Any) -> Any:
        wants = iter([tensor.requires_grad for tensor in self._tensors])
        return map_tensors(lambda tensor: tensor.detach().requires_grad_(next(wants)), piece)

    def return_gradients(self) -> None:
        """Adds the gradients to the arguments' own, or continues the backward pass of what made the arguments."""
        pieces = [tensors_of(piece) for piece in self.pieces] if self.wanted else []
        found: list[tuple[Tensor, Tensor]] = []
        for index, tensor in enumerate(self._tensors):
            parts = [one[index] if one else None for one in self.gradients]
            if not tensor.requires_grad or not any(part is not None for part in parts):
                continue
            parts = [None if part is None else part.to(tensor.device) for part in parts]
            if pieces[0][index].shape == tensor.shape:  # it went to every micro-batch whole
                found.append((tensor, torch.stack([part for part in parts if part is not None]).sum(0)))
                continue
            filled = [
                torch.zeros_like(piece[index], device=tensor.device) if part is None else part
                for part, piece in zip(parts, pieces, strict=True)
            ]
            found.append((tensor, torch.cat(filled)))
        if found:
            torch.autograd.backward([tensor for tensor, _ in found], [gradient for _, gradient in found])


@dataclass(frozen=True)
class FixedArguments:
    """The assumptions of a trace about a model's arguments."""

    values: dict[int, Any]  # None, words, True and False, by the number of the argument: they decide what is traced
    given: frozenset[Any]  # places in the arguments, which may be nested, that held something: a stand-in is never None

    @classmethod
    def of(cls, example: tuple[Any, ...]) -> FixedArguments:
        """Reads them from the example that a model is traced with."""
        plain = unmarked(example)
        values = {i: value for i, value in enumerate(plain) if value is None or isinstance(value, (bool, str))}
        places, _ = pytree.tree_flatten_with_path(plain)
        return cls(values, frozenset(path for path, value in places if value is not None))

    def check(self, model: nn.Module, names: Sequence[str], arguments: tuple[Any, ...]) -> None:
        """Raises `ConfigError` if a step's arguments differ; `names`: of the last ones, which are given by keyword."""
        for index, fixed in self.values.items():
            value = arguments[index]
            if isinstance(value, Tensor) or (value is not fixed and value != fixed):
                received = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
                _refuse_argument(_name_of(model, names, len(arguments), index), received, repr(fixed))
        if self.given and any(value is None for value in pytree.tree_leaves(arguments)):
            for path, value in pytree.tree_flatten_with_path(arguments)[0]:
                if value is None and path in self.given:
                    at: Any = path[0]
                    name = _name_of(model, names, len(arguments), at.idx) + pytree.keystr(path[1:])
                    _refuse_argument(name, "None", "a value")


def _name_of(model: nn.Module, names: Sequence[str], count: int, index: int) -> str:
    """Returns the name of one of `count` arguments, the last of which are keyword arguments."""
    first = count - len(names)
    known = [*[*inspect.signature(model.forward).parameters][:first], *names]
    return f"argument {index}" + (f" ({known[index]})" if len(known) == count else "")


def _refuse_argument(name: str, received: str, fixed: str) -> None:
    raise ConfigError(
        "arguments that are no tensors, and whether one is None, cannot change after a model is split",
        f"{name}: {received} instead of {fixed}",
        "split the model with an example that has such a value, and give one in each step;\n"
        "or, instead of None, give a value that changes nothing (a mask that hides nothing)",
    )
