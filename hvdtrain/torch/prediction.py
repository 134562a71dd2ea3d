"""Prediction on all ranks together: the outputs of every sample, each once, in the data's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from torch import nn

from hvdtrain.comm.elastic import repeated
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.sharding import Step
from hvdtrain.torch.data.source import Augment
from hvdtrain.torch.evaluation import one_pass
from hvdtrain.torch.gathered import gather_in_order, lengths, reordered
from hvdtrain.values.nested import map_tensors, tensors_of
from hvdtrain.world.world import World, given_or_current


@repeated
def predict(
    model: nn.Module,
    data: Any,
    *,
    per_rank_batch: int | None = None,
    world: World | None = None,
    workers: int | Literal["auto"] = "auto",
    augment: Augment | None = None,
    inputs: Callable[[Any], Any] = lambda batch: batch,
    on_main: bool = False,
) -> Any:
    """Returns the model's outputs for all samples, on the CPU, in the data's order, each once; collective.

    Replicas' buffers are made equal first. The model is in evaluation mode while it runs, without gradients.

    Args:
        model: called with a batch; with its parts where it is a tuple or list.
        data: the same on every rank: what `loader` takes, or a `Loader`.
        per_rank_batch: samples a rank takes at a time; not needed with a `Loader`.
        world: the ranks; by default those of `hvdtrain.init`.
        workers: as of `loader`.
        augment: as of `loader`; here for what turns samples into inputs (`normalise`).
        inputs: makes of a batch what the model is called with; of data with targets `lambda batch: batch[0]`.
        on_main: rank 0 alone gets them; None elsewhere.

    Returns:
        What the model returns, with all samples: tensors and arrays along dimension 0, lists with one item a sample, or
        tuples, dicts, dataclasses of them.

    Raises:
        ConfigError: no samples, some that cannot be read, or outputs that have no row for each sample.
    """
    world = given_or_current(world, "torch")
    kept: list[tuple[Step, Any]] = []
    problem = ""
    with one_pass(model, data, per_rank_batch, world, workers, augment) as batches:
        for batch, step in batches.one_pass():
            given = inputs(batch)
            outputs = model(*given) if isinstance(given, (tuple, list)) else model(given)
            problem = problem or _problem(outputs, step.samples)
            # a copy: a view would travel with all that it is a view of
            kept.append((step, map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), outputs)))
        unread = batches.all_skipped()
    reports = world.gather((problem, [(step.first, step.indices) for step, _ in kept]))
    problem = next(filter(None, (its_problem for its_problem, _ in reports)), "")
    if problem:
        raise ConfigError(
            "outputs have a row for each sample",
            problem,
            "return outputs [samples, ...] from the model; several of them (heads) in a tuple or a dict",
            shared=True,
        )
    places = sorted((place for _, its_places in reports for place in its_places), key=lambda place: place[0])
    if unread or not places:
        raise ConfigError(
            "prediction gives the outputs of all samples",
            f"{len(unread)} cannot be read, the first: {unread[0][0]}" if unread else "there is no sample",
            "leave them out of the data" if unread else "give data",
            shared=True,
        )
    found = gather_in_order(kept, world=world)
    order = np.argsort(np.concatenate([samples for _, samples in places]), kind="stable")
    return reordered(found, order) if world.is_main or not on_main else None


def _problem(outputs: Any, samples: int) -> str:
    """What is wrong with a batch's outputs; "" if nothing is."""
    single = [part for part in tensors_of(outputs) if not part.ndim]
    found = lengths(outputs)
    wrong = [length for length in found if length not in ("", f"{samples} values")]
    if not single and not wrong and any(found):
        return ""
    received = wrong[0] if wrong else "one number" if single else f"a {type(outputs).__name__} without values"
    return f"{received}, for {samples} samples"
