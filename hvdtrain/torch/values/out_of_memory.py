"""Errors of a pass that come of the batch's size, with the numbers that matter and what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hvdtrain.core.errors import ConfigError, HvdtrainError, is_out_of_memory

_REMEDY = (
    "halve per_rank_batch and double accumulate: the same updates in half the memory;"
    ' or amp="bf16", smaller images, a smaller model, more ranks with a smaller per_rank_batch each'
)


@contextmanager
def explained(where: str, sizes: Callable[[], str], remedy: str = _REMEDY) -> Iterator[None]:
    """Turns running out of memory, and batch norm of one value, into an `HvdtrainError` or `ConfigError` that names
    the pass (`where`), the batch (`sizes`, called only when needed) and the remedy; any other error passes as it is."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ConfigError(
            "batch norm in training needs two values per channel, on each rank and in each micro-batch",
            f"{sizes()}\n{error}",
            'loader(..., tail="drop") drops a short last batch;\n'
            "or prepare(..., sync_batchnorm=True), which normalises over all ranks",
            code=51,
        ) from error
    except (RuntimeError, MemoryError) as error:
        if not _to_be_explained(error):
            raise
        text = f"{error.rule}: {error.received}" if isinstance(error, HvdtrainError) else str(error).strip()
        raise HvdtrainError(
            f"training cannot continue: out of memory in the {where}",
            f"{sizes()}\n{text.splitlines()[0][:300] if text else type(error).__name__}",
            remedy,
            code=38,
        ) from error


def _to_be_explained(error: BaseException) -> bool:
    if isinstance(error, HvdtrainError):  # a stage's, which names the stage; or what has been explained already
        explained_already = "out of memory in the " in error.rule
        return not explained_already and error.__cause__ is not None and _to_be_explained(error.__cause__)
    return is_out_of_memory(error)
