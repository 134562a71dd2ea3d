"""Refuses arguments of a step for which the model might have been traced otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.values.microbatch import unmarked


@dataclass(frozen=True)
class FixedArguments:
    """What a trace takes for granted of a model's arguments."""

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
                _refuse(_name_of(model, names, len(arguments), index), received, repr(fixed))
        if self.given and any(value is None for value in pytree.tree_leaves(arguments)):
            for path, value in pytree.tree_flatten_with_path(arguments)[0]:
                if value is None and path in self.given:
                    at: Any = path[0]
                    name = _name_of(model, names, len(arguments), at.idx) + pytree.keystr(path[1:])
                    _refuse(name, "None", "a value")


def _name_of(model: nn.Module, names: Sequence[str], count: int, index: int) -> str:
    """Returns the name of one of `count` arguments, the last of which are keyword arguments."""
    first = count - len(names)
    known = [*[*inspect.signature(model.forward).parameters][:first], *names]
    return f"argument {index}" + (f" ({known[index]})" if len(known) == count else "")


def _refuse(name: str, received: str, fixed: str) -> None:
    raise ConfigError(
        "arguments that are no tensors, and whether one is None, cannot change after a model is split",
        f"{name}: {received} instead of {fixed}",
        "split the model with an example that has such a value, and give one in each step; or, in place of None,\n"
        "a value that changes nothing (a mask that hides nothing)",
    )
