"""Names that a caller mistyped, or knows from another library: the one to write instead."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from hvdtrain.core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def nearest(word: str, names: Iterable[str]) -> str:
    """Returns "; did you mean NAME?" if one of `names` is spelled nearly like `word`, else an empty text."""
    found = difflib.get_close_matches(word, list(names), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def refuses_other_keywords(**instead: str) -> Callable[[F], F]:
    """Has a function raise `ConfigError` for a keyword that it does not take.

    Args:
        instead: a keyword of other libraries, and what to type here: `batch_size="per_rank_batch=, ..."`.
    """

    def decorate(function: F) -> F:
        taken = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name not in taken:
                    hint = "" if name in instead else nearest(name, taken)
                    rule = f"{function.__name__}() does not take {name}={hint}"
                    remedy = instead.get(name) or f"one of {', '.join(f'{one}=' for one in taken)}"
                    raise ConfigError(rule, f"{function.__name__}(..., {name}={kwargs[name]!r})"[:100], remedy)
            return function(*args, **kwargs)

        return cast(F, call)

    return decorate
