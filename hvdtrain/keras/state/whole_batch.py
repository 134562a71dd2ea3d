"""The outputs and targets of the global batch, for losses in which samples meet: twin of `hvdtrain.torch.whole`.

Every rank computes the same loss of what all ranks' models gave. The gradient of the joined outputs goes to each rank's
own rows, times (samples of all ranks / samples here): the weight of the samples, by which gradients are averaged
(`reduce.weigh`), is taken away again. What the loss takes from variables themselves every rank has in full, and the
average is that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras

from hvdtrain.core.errors import ConfigError
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.backends.session import KEY, KerasSession, hook
from hvdtrain.keras.state import units

_steps: list[KerasSession] = []  # whose train or test step runs


@contextmanager
def of_step(session: KerasSession, *, trains: bool = True) -> Iterator[None]:
    """Notes that a step runs; raises ConfigError if one with `whole=True` computed its loss by itself."""
    _steps.append(session)
    try:
        yield
    finally:
        _steps.pop()
    if session.prepared.whole and trains and session.live is not None and not session.live.joined:
        raise ConfigError(
            "with whole=True the loss is that of compute_loss, which sees the global batch",
            "a train_step that called neither self.compute_loss(...) nor hvdtrain.keras.whole(...)",
            "loss = self.compute_loss(y=y, y_pred=y_pred); or y, y_pred = hvdtrain.keras.whole(y, y_pred)",
            shared=True,
        )


def whole(*values: Any) -> Any:
    """Returns values of the global batch: what all ranks have of them, joined in the order of the data; collective.

    For a `train_step` of one's own that computes its loss itself; `prepare(model, data, whole=True)` does it for
    `compute_loss`. Metrics may be given what it returns: each sample counts once. Outside of a prepared model's step,
    and in one process, values are returned as they are.

    Args:
        values: outputs and targets, nested; tensors [n, ...] whose other dimensions are those of all ranks.

    Returns:
        One value where one was given, else a tuple. Outputs have a gradient.
    """
    found = values if len(values) != 1 else values[0]
    session = _steps[-1] if _steps else None
    if session is None or session.prepared.alone or session.live is None:
        return found
    prepared, live = session.prepared, session.live
    units.refuse_where_ranks_part(
        live, "the whole batch is gathered by all ranks in every step", "call it in train_step itself"
    )
    leaves = [(at, leaf) for at, leaf in enumerate(keras.tree.flatten(found)) if leaf is not None]
    number = BACKEND.number_of_call(live)
    tensors = [keras.ops.convert_to_tensor(leaf) for _, leaf in leaves]
    masks = [keras.src.backend.get_keras_mask(leaf) for _, leaf in leaves]
    masked = [at for at, mask in enumerate(masks) if mask is not None]
    sent = [*tensors, *(masks[at] for at in masked)]
    name = f"{prepared.name}.whole.{number}"
    joined = BACKEND.gather_rows(sent, live.samples, live.total(), prepared.world.rank, name)
    for at, mask in zip(masked, joined[len(tensors) :], strict=True):
        keras.src.backend.set_keras_mask(joined[at], mask)
    live.own.update({id(of_all): (own, of_all) for own, of_all in zip(tensors, joined, strict=False)})
    every = iter(joined)
    return keras.tree.map_structure(lambda leaf: None if leaf is None else next(every), found)


def hook_loss(model: keras.Model) -> None:
    """Makes `model.compute_loss` see the global batch within the steps of a prepared model."""
    if hook(model, "compute_loss", partial(_compute_loss, model)):
        model.train_function = model.test_function = None


def _compute_loss(model: keras.Model, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    session: KerasSession = vars(model)[KEY]
    if not _steps or _steps[-1] is not session or session.live is None or session.prepared.alone:
        return original(*args, **kwargs)
    bound = inspect.signature(original).bind(*args, **kwargs)
    given = bound.arguments
    own = type(model).compute_loss is not keras.Model.compute_loss
    names = [name for name in ("x", "y", "y_pred", "sample_weight") if name in given and (own or name != "x")]
    given.update(zip(names, whole(tuple(given[name] for name in names)), strict=True))
    with units.as_it_is(session.live):
        return original(*bound.args, **bound.kwargs)
