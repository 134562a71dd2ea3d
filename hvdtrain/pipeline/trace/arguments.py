"""What a trace takes for granted of a model's arguments, and is asked of those of each step."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.values.microbatch import unmarked


def name_of(model: nn.Module, names: Sequence[str], count: int, index: int) -> str:
    """What one of `count` arguments is called, the last of which have names."""
    first = count - len(names)
    known = [*[*inspect.signature(model.forward).parameters][:first], *names]
    return f"argument {index}" + (f" ({known[index]})" if len(known) == count else "")


def places_given(example: tuple[Any, ...]) -> frozenset[Any]:
    """Where in the arguments, which may be nested, there is something, and not None."""
    leaves, _ = pytree.tree_flatten_with_path(unmarked(example))
    return frozenset(path for path, value in leaves if value is not None)


def check_given(model: nn.Module, names: Sequence[str], given: frozenset[Any], arguments: tuple[Any, ...]) -> None:
    """Refuses None where the example had something: a stand-in is never None, whatever the model asks.

    Args:
        model: that was traced.
        names: of the last arguments.
        given: of the example; see `places_given`.
        arguments: of a step.

    Raises:
        ConfigError: there is None.
    """
    if not given or not any(value is None for value in pytree.tree_leaves(arguments)):
        return
    for path, value in pytree.tree_flatten_with_path(arguments)[0]:
        if value is None and path in given:
            at: Any = path[0]
            raise ConfigError(
                "whether an argument is None is fixed when a model is split: the model may ask",
                f"{name_of(model, names, len(arguments), at.idx)}{pytree.keystr(path[1:])}: None instead of a value",
                "one that changes nothing (a mask that leaves nothing out); or None in split() and in each step",
            )


def check_fixed(value: Any, fixed: Any, name: str) -> None:
    """Refuses another value of None, a word, or True and False, which decide what is traced.

    Raises:
        ConfigError: it is another one.
    """
    if isinstance(value, Tensor) or (value is not fixed and value != fixed):
        received = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ConfigError(
            "arguments that are no tensors keep the value that they had when the model was split",
            f"{name}: {received} instead of {fixed!r}",
            "split the model with an example that has such a value, and give one in each step",
        )
