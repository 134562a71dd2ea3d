"""Names that a caller mistyped, or knows from another library: the one to write instead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from hvdtrain.core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def nearest(word: str, names: Iterable[str]) -> str:
    """Returns "; did you mean NAME?" if one of `names` is spelled nearly like `word`, else an empty text."""
    import difflib  # not for each `hvdtrain --help`

    found = difflib.get_close_matches(word, list(names), n=1, cutoff=0.7)
    return f"; did you mean {found[0]}?" if found else ""


def refuses_other_keywords(**instead: str) -> Callable[[F], F]:
    """Has a function or class raise `ConfigError` for a keyword that it does not take, and for one that is missing.

    Args:
        instead: a keyword of other libraries, or a missing one, and what to type: `batch_size="per_rank_batch=, ..."`.
    """

    def decorate(function: F) -> F:
        if isinstance(function, type):
            called = cast(Any, function)
            called.__init__ = _checked(called.__init__, function.__name__, instead)
            return function
        return cast(F, _checked(function, function.__name__, instead))

    return decorate


def _checked(function: Callable[..., Any], name: str, instead: Mapping[str, str]) -> Callable[..., Any]:
    import inspect

    signature = inspect.signature(function)
    taken = [parameter for parameter in signature.parameters if parameter != "self"]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for key in kwargs:
            if key not in taken:
                hint = "" if key in instead else nearest(key, taken)
                rule = f"{name}() does not take {key}={hint}"
                remedy = instead.get(key) or f"one of {', '.join(f'{one}=' for one in taken)}"
                raise ConfigError(rule, f"{name}(..., {key}={kwargs[key]!r})"[:100], remedy)
        try:
            bound = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:  # too many values
            form = ", ".join(taken[: list(taken).index("data") + 1]) if "data" in taken else ""
            remedy = f"{name}({form.replace('data', '(x, y)')}, ...): two arrays are one value, a tuple"
            remedy = remedy if form else f"{name}{signature}"
            kinds = ", ".join([type(its).__name__ for its in args] + [f"{key}=" for key in kwargs])
            raise ConfigError(f"{name}() cannot take these arguments", f"{name}({kinds})", remedy) from None
        for key in instead:
            if key in taken and key not in bound:
                raise ConfigError(f"{name}() needs {key}=", f"{name}() without it", instead[key])
        return function(*args, **kwargs)

    return call
