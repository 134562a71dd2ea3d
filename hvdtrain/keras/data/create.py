"""Makes a loader of the user's data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import keras

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.keywords import refuses_other_keywords
from hvdtrain.core.sharding import Plan
from hvdtrain.keras.backends.engine import world_of
from hvdtrain.keras.data.loader import KerasLoader
from hvdtrain.keras.data.sources import Arrays, BatchSource, DatasetBatches, Items, batch_of, rows_of, stacked
from hvdtrain.keras.data.streams import Walk, WalkedLoader
from hvdtrain.private.keras import is_tf_dataset, is_torch_dataloader
from hvdtrain.world import same_data
from hvdtrain.world.records import check_heads, stream_of
from hvdtrain.world.streams import StreamPlan
from hvdtrain.world.world import World


@refuses_other_keywords(batch_size="per_rank_batch=, the samples that each rank takes in a step")
def loader(
    data: Any,
    per_rank_batch: int | None = None,
    *,
    world: World | None = None,
    shuffle: bool = True,
    tail: Literal["weighted", "drop"] = "weighted",
    seed: int | None = None,
    class_weight: Mapping[int, float] | None = None,
) -> KerasLoader:
    """Returns this rank's loader of training batches, for `prepare` and `fit`; collective.

    Each sample comes once an epoch over all ranks, in an order that does not depend on the number of ranks. `fit` also
    needs `callbacks`, which set the loader's epoch.

    Example:
        data = hvk.loader((x_train, y_train), per_rank_batch=32)
        model.fit(data, epochs=3, callbacks=hvk.callbacks(model))

    Args:
        data: the same on every rank: arrays or tensors of all samples (or nested structures of them), first axis
            samples, as a tuple `(x, y)` or `(x, y, sample_weight)`; or `x` alone, for a model without targets. Or a
            PyTorch `Dataset` of such samples. Or data in batches, one for each rank in a step: a
            `keras.utils.PyDataset` (a rank reads only its own), a `tf.data.Dataset`, a PyTorch `DataLoader`, or a
            function (of the epoch, or of nothing) that returns a generator or one of these. Every rank reads all of
            these; their length may be unknown.
        per_rank_batch: samples of a rank in a full step; not given for data in batches.
        world: the ranks; default: those of `hvdtrain.init`.
        shuffle: False keeps the data's order; data that every rank reads has its own order.
        tail: samples that fill no global step are dealt and weighed exactly ("weighted"), or skipped ("drop").
        seed: the seed of the order; default: the world's.
        class_weight: class to weight, as `fit` takes it: for one output, whose `y` are class numbers or one-hot.

    Raises:
        ConfigError: arrays of different lengths, data of another kind, an argument out of range, both kinds of weights.
        ReplicaError: the ranks' data or its order differ.
    """
    world = world_of(world)
    seed = world.seed if seed is None else seed
    if per_rank_batch is None and not comes_in_batches(data):
        raise ConfigError(
            "loader() needs per_rank_batch=, the samples of a rank in a step",
            f"per_rank_batch was not given, and a {type(data).__name__} does not come in batches",
            "loader((x, y), per_rank_batch=32)",
            code=10,
        )
    walked = _walk_of(data, class_weight, seed)
    if walked is not None:
        return _walking(walked, per_rank_batch, world, tail, seed, in_batches=comes_in_batches(data))
    source: BatchSource
    if isinstance(data, keras.utils.PyDataset):
        source = DatasetBatches(data, class_weight, seed)
    elif _is_torch(data, "Dataset"):
        source = Items(data, class_weight)
    else:
        source = Arrays(data, class_weight)
    same_data.check(world, source.digest())
    plan = Plan(source.units, world.size, per_rank_batch or 1, seed=seed, shuffle=shuffle, tail=tail)
    world.agree("plan of loader() (seed, per_rank_batch, shuffle, tail)", plan)
    # a new rank of an elastic job that began with one is beyond its plan, until it joins
    return KerasLoader(source, plan, rank=min(world.rank, plan.size - 1))


def comes_in_batches(data: Any) -> bool:
    """Returns True if the data itself defines what a batch is."""
    return isinstance(data, keras.utils.PyDataset) or (_is_walked(data) and not _is_torch(data, "IterableDataset"))


def _is_walked(data: Any) -> bool:
    if is_tf_dataset(data) or is_torch_dataloader(data) or _is_torch(data, "IterableDataset"):
        return True
    if hasattr(data, "shape") or hasattr(data, "dtypes") or isinstance(data, (str, bytes, type, Mapping, tuple, list)):
        return False
    by_index = isinstance(data, keras.utils.PyDataset) or hasattr(data, "__getitem__") or keras.ops.is_tensor(data)
    return callable(data) or (isinstance(data, Iterable) and not by_index)


def _is_torch(data: Any, name: str) -> bool:
    """Returns True for a data set of `torch.utils.data`, which need not be installed."""
    kinds = [kind for kind in type(data).__mro__ if kind.__module__.startswith("torch.utils.data")]
    return any(kind.__name__ == name for kind in kinds)


def _walk_of(data: Any, class_weight: Mapping[int, float] | None, seed: int) -> Walk | None:
    if not _is_walked(data):
        return None
    if not comes_in_batches(data):
        return Walk(stream_of(data), lambda records: stacked(records, class_weight), seed)

    def of_one(records: list[Any]) -> Any:
        return batch_of(records[0], class_weight)

    if is_tf_dataset(data):
        _check_tf_dataset(data)
    return Walk(stream_of(data), of_one, seed, by_tensorflow=is_tf_dataset(data))


def _check_tf_dataset(data: Any) -> None:
    """Raises `ConfigError` for a set of single samples, one without an end, and sparse tensors."""
    import tensorflow as tf

    specs = tf.nest.flatten(data.element_spec)
    if any(isinstance(spec, tf.SparseTensorSpec) for spec in specs):
        raise ConfigError(
            "hvdtrain.keras.loader cannot deal sparse tensors",
            f"a tf.data set of {data.element_spec}",
            "dataset.map(lambda x, y: (tf.sparse.to_dense(x), y))",
        )
    shapes = [spec.shape for spec in specs if getattr(spec, "shape", None) is not None and spec.shape.rank is not None]
    lengths = {shape[0] for shape in shapes if shape.rank} - {None}
    if any(not shape.rank for shape in shapes) or len(lengths) > 1:
        raise ConfigError(
            "a tf.data set must come in batches, one for each rank in a step",
            f"elements of shapes {', '.join(map(str, shapes))}",
            "dataset.batch(32)",
            code=15,
        )
    if data.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ConfigError(
            "an epoch of a tf.data set must end",
            "a set that repeats itself without end",
            "remove .repeat(): each epoch reads the set from its beginning; or .take(batches)",
            code=16,
        )


def _walking(
    walked: Walk,
    per_rank_batch: int | None,
    world: World,
    tail: Literal["weighted", "drop"],
    seed: int,
    *,
    in_batches: bool,
) -> WalkedLoader:
    begins = walked.peek()
    check_heads(world, begins)
    if not walked.peeked:
        raise ConfigError("an epoch needs samples", "the data has no batch", "give more data")
    rows = rows_of(walked.peeked[0])
    if in_batches and per_rank_batch not in (None, rows):
        raise ConfigError(
            "per_rank_batch= must be the batch size of data that comes in batches",
            f"batches of {rows}, per_rank_batch={per_rank_batch}",
            "remove per_rank_batch=, or make the data's batches that large",
            shared=True,
        )
    batch = 1 if in_batches else per_rank_batch or 1
    plan = StreamPlan(0, world.size, batch, seed=seed, shuffle=False, tail=tail)
    world.agree("plan of loader() (seed, per_rank_batch, tail)", plan)
    return WalkedLoader(walked, plan, rank=world.rank, unit=rows if in_batches else 1)
