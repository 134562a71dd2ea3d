"""Nested states as PyTorch's DCP keeps them: flat, with an index that says by which path each value is reached.

DCP cuts dicts into single values, and lists that have tensors or dicts in them. In a path a number is a place in a list
and text is the key of a dict, whatever type the key had; of an empty dict there is nothing. What that loses, `outline`
notes and `like` gives back. (torch/distributed/checkpoint/_traverse.py; what is cut there is not documented.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from hvdtrain.core.errors import ConfigError

_RULE = "what DCP has of an optimizer's state is all of it"
_REMEDY = (
    "keep numbers, text, plain tensors, and lists, tuples and dicts of them there; or export the weights:"
    " --to safetensors"
)


class _Cut(dict[Any, Any]):
    """What DCP cut into single values; a dict that it kept whole is a value."""


def cut(state: dict[str, Any]) -> tuple[dict[str, tuple[str | int, ...]], dict[str, Any]]:
    """Returns paths and values as DCP has them, by its names.

    Raises:
        ConfigError: two values have one name.
    """
    planner = DefaultSavePlanner()
    try:
        planner.set_up_planner(state)
    except ValueError as error:
        raise ConfigError(_RULE, f"as text, keys of two values are the same: {error}", _REMEDY) from error
    return planner.mappings, planner.state_dict


def nested(paths: Mapping[str, tuple[str | int, ...]], values: Mapping[str, Any], at: tuple[str, ...]) -> Any:
    """Returns what a state has at one of its keys.

    Args:
        paths: of DCP's names of the values.
        values: by the same names.
        at: the path of that key, in text.
    """
    root = _Cut()
    for name, path in paths.items():
        if tuple(map(str, path[: len(at)])) == at:
            place = root
            for key in path[len(at) : -1]:
                place = place.setdefault(key, _Cut())
            place[path[-1]] = values[name]
    return _joined(root)


def _joined(value: Any) -> Any:
    if not isinstance(value, _Cut):
        return value
    items = {key: _joined(item) for key, item in value.items()}
    if not all(type(key) is int for key in items):
        return items
    return [items.get(index, {}) for index in range(max(items) + 1)]  # empty dicts alone are left out of a list


def outline(value: Any) -> Any:
    """Returns the keys of dicts, and the types of numbers of numpy, which go to plain scripts as Python's."""
    if isinstance(value, dict):
        return {key: outline(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [outline(item) for item in value]
    return value.dtype.name if isinstance(value, np.generic) else None


def like(found: Any, told: Any) -> Any:
    """Returns what was found as its `outline` has it; what another program has added to it since stays as it is."""
    if isinstance(found, dict) and not found and _nothing(told):
        return told
    if isinstance(told, dict) and isinstance(found, dict):
        rest, items = dict(found), {}
        for key, of_item in told.items():
            name = key if key in rest else str(key)  # a dict in a tuple is kept whole
            if name in rest or _nothing(of_item):
                items[key] = like(rest.pop(name, {}), of_item)
        return items | rest
    if isinstance(told, list) and isinstance(found, (list, tuple)):
        left_out = [of_item for of_item in told[len(found) :] if _nothing(of_item)]
        known = [like(item, of_item) for item, of_item in zip(found, told, strict=False)]
        return type(found)([*known, *found[len(told) :], *left_out])
    if isinstance(told, str):
        kind = np.dtype(told).type
        return kind(found) if type(found) is type(kind().item()) else found
    return found


def _nothing(told: Any) -> bool:
    """Whether DCP writes nothing of what has this outline: empty dicts, and what consists of them."""
    if isinstance(told, dict):
        return all(map(_nothing, told.values()))
    return isinstance(told, list) and bool(told) and all(map(_nothing, told))


def check_kept(was: Any, becomes: Any, where: str) -> None:
    """Refuses a state of which another comes back through DCP.

    Raises:
        ConfigError: it names the first place.
    """
    lost = _lost(was, becomes, where)
    if lost:
        raise ConfigError(_RULE, lost, _REMEDY)


def _lost(was: Any, becomes: Any, where: str) -> str:
    if isinstance(was, np.ndarray):
        return f"{where} is an array of numpy"  # which cannot be read without running code
    if isinstance(was, Tensor) and (type(was) is not Tensor or was.requires_grad):
        return f"{where} is a {type(was).__name__}{' that requires a gradient' if was.requires_grad else ''}"
    if type(was) is not type(becomes):
        return f"{where} is a {type(was).__name__}, and would become a {type(becomes).__name__}"
    if not isinstance(was, (dict, list, tuple)):
        return ""
    items, others = (dict(value if isinstance(value, dict) else enumerate(value)) for value in (was, becomes))
    if list(items) != list(others):
        return f"{where} has {list(items)}, and would have {list(others)}"
    return next(filter(None, (_lost(items[key], others[key], f"{where}[{key!r}]") for key in items)), "")
