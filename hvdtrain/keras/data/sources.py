"""What a loader reads by index: arrays, samples of a data set, or the batches of a `keras.utils.PyDataset`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.generators import OwnRandom, of_imported
from hvdtrain.keras.backends.session import map_leaves
from hvdtrain.world import same_data
from hvdtrain.world.streams import epoch_seed

_NO_NUMBERS = (np.object_, np.str_, np.bytes_, np.void, np.datetime64, np.timedelta64)
Batch = tuple[Any, Any, Any]  # x, y and sample weights; None is what is not there
_TENSORS = {("torch", "Tensor"), ("tensorflow", "EagerTensor"), ("tensorflow", "Tensor")}  # also of the other backend


class BatchSource:
    """The data of a loader.

    Attributes:
        units: how many samples there are, or batches where these are dealt.
        unit: samples of one unit.
        workers: threads that read; None: it is in memory.
        weighted: batches have sample weights.
    """

    units: int
    unit = 1
    workers: int | None = 1
    weighted = False

    def take(self, indices: np.ndarray) -> Batch:
        """Returns the samples (or the one batch) of these indices."""
        raise NotImplementedError

    def begin(self, epoch: int) -> None:
        """Prepares to read an epoch; called before each."""

    def digest(self) -> same_data.Digest:
        """Returns what ranks compare before anything is dealt."""
        raise NotImplementedError


class Arrays(BatchSource):
    """Arrays in memory."""

    workers = None

    def __init__(self, data: Any, class_weight: Mapping[int, float] | None) -> None:
        x, y, weights = unpacked(data)
        x, y = arrays(x, "x"), arrays(y, "y")
        # as Keras' fit does: a tf.data.Dataset has no lists
        self._data = keras.tree.lists_to_tuples((x, y, weights_of(y, weights, class_weight)))
        self.units = _count(self._data)
        self.weighted = self._data[2] is not None

    def take(self, indices: np.ndarray) -> Batch:
        x, y, weights = map_leaves(lambda array: array[indices], self._data)
        return x, y, weights

    def digest(self) -> same_data.Digest:
        return same_data.of_arrays(self._data)


class Items(BatchSource):
    """Samples that are read one by one: `len(dataset)`, `dataset[i]`."""

    def __init__(self, dataset: Any, class_weight: Mapping[int, float] | None) -> None:
        self._dataset, self._class_weight = dataset, class_weight
        self.units = len(dataset)
        self.weighted = self.units > 0 and self.take(np.zeros(1, np.int64))[2] is not None

    def take(self, indices: np.ndarray) -> Batch:
        return stacked([self._dataset[index] for index in indices.tolist()], self._class_weight)

    def digest(self) -> same_data.Digest:
        return same_data.of_items(self._dataset)


class DatasetBatches(BatchSource):
    """The batches of a `keras.utils.PyDataset`: each rank reads its own only, in threads.

    What it shuffles between epochs with Python's or numpy's generators is the same on all ranks: these are seeded by
    the epoch. A run that resumes at a later epoch first calls the data set's hooks of those before.
    """

    def __init__(self, dataset: Any, class_weight: Mapping[int, float] | None, seed: int) -> None:
        self._dataset, self._class_weight, self._seed = dataset, class_weight, seed
        self._shuffled = -1
        self.workers = dataset.workers
        count = dataset.num_batches
        if count is None:
            raise ConfigError(
                "a PyDataset must have a number of batches: its batches are dealt by index",
                f"{type(dataset).__name__} without __len__ (or with num_batches=None)",
                "define __len__; or give a function that returns a generator of its batches:\n"
                "hvdtrain.keras.loader(lambda: generator(), ...)",
            )
        self.units = int(count)
        first = self.take(np.zeros(1, np.int64)) if self.units else (None, None, None)
        self.unit = rows_of(first) if self.units else 1
        self.weighted = first[2] is not None

    def take(self, indices: np.ndarray) -> Batch:
        (index,) = indices.tolist()
        return batch_of(self._dataset[index], self._class_weight)

    def begin(self, epoch: int) -> None:
        if epoch <= self._shuffled:  # for example evaluated between two epochs: the shuffle is not undone
            return
        for past in range(self._shuffled, epoch):
            if past >= 0:
                with OwnRandom(of_imported(), epoch_seed(self._seed, past)).in_place():
                    self._dataset.on_epoch_end()
            with OwnRandom(of_imported(), epoch_seed(self._seed, past + 1)).in_place():
                self._dataset.on_epoch_begin()
        self._shuffled = epoch

    def digest(self) -> same_data.Digest:
        return same_data.of_items(self._dataset, self.units)


def rows_of(batch: tuple[Any, ...]) -> int:
    """Returns the samples of a batch."""
    return len(next(leaf for leaf in keras.tree.flatten(batch[0]) if leaf is not None))


def batch_of(data: Any, class_weight: Mapping[int, float] | None) -> Batch:
    """Returns a source's batch as arrays: x alone, or a tuple (x, y) or (x, y, sample_weight)."""
    x, y, weights = unpacked(tuple(data) if isinstance(data, list) and 1 <= len(data) <= 3 else data)
    x, y = arrays(x, "x"), arrays(y, "y")
    weights = weights_of(y, arrays(weights, "sample_weight"), class_weight)
    batch: Batch = keras.tree.lists_to_tuples((x, y, weights))
    _count(batch)
    return batch


def stacked(samples: Sequence[Any], class_weight: Mapping[int, float] | None) -> Batch:
    """Returns the batch of samples, each (x, y), (x, y, sample_weight), or x alone."""
    single = not isinstance(samples[0], (tuple, list))
    samples = [(sample,) if single else tuple(sample) for sample in samples]
    whole = keras.tree.map_structure(lambda *leaves: np.stack([same_data.as_array(leaf) for leaf in leaves]), *samples)
    return batch_of(whole[0] if single else whole, class_weight)


def unpacked(data: Any) -> tuple[Any, Any, Any]:
    """Returns x, y and sample weights; `None` for what is not there."""
    parts = data if isinstance(data, tuple) else (data,)
    if isinstance(data, list) or not 1 <= len(parts) <= 3:
        raise ConfigError(
            "data must be a tuple (x, y) or (x, y, sample_weight), or x alone",
            f"a {type(data).__name__} of {len(data)}",
            "(x, y) instead of [x, y]; several inputs or outputs of a model within it: ((x1, x2), y)",
        )
    x, y, weights = (*parts, None, None)[:3]
    return x, y, weights


def arrays(data: Any, name: str) -> Any:
    """Returns nested data with tensors as numpy arrays, `None` kept; raises ConfigError for what is no array."""

    def one(leaf: Any) -> Any:
        array, kind = _array_of(leaf), f"{type(leaf).__module__}.{type(leaf).__qualname__}"
        if leaf is not None and (array is None or not array.ndim):
            raise ConfigError(
                f"{name} must be arrays or tensors, also in dicts, lists and tuples, with samples along axis 0",
                kind + (f" in {type(data).__name__}" if leaf is not data else ""),
                f"give np.asarray({name}); for data larger than memory a tf.data.Dataset,\n"
                "a keras.utils.PyDataset, or a function that begins a generator of batches",
            )
        if array is not None and issubclass(array.dtype.type, _NO_NUMBERS):
            raise ConfigError(
                f"{name} must hold numbers: text and Python objects are not dealt",
                f"{kind} of {leaf.dtype}",
                "turn text into numbers: keras.layers.TextVectorization or StringLookup on the whole data;\n"
                "turn rows of different lengths into one array: keras.utils.pad_sequences",
            )
        return array

    return keras.tree.map_structure(one, data)


def _array_of(leaf: Any) -> np.ndarray | None:
    """Returns an array or a tensor of any framework as an array; None for anything else."""
    if isinstance(leaf, np.ndarray):
        return leaf
    if keras.ops.is_tensor(leaf):
        return np.asarray(keras.ops.convert_to_numpy(leaf))
    kinds = {(kind.__module__.split(".")[0], kind.__name__) for kind in type(leaf).__mro__}
    return same_data.as_array(leaf) if kinds & _TENSORS else None


def _count(data: Any) -> int:
    lengths = [len(leaf) for leaf in keras.tree.flatten(data) if leaf is not None]
    if not lengths or len(set(lengths)) != 1:
        raise ConfigError(
            "x, y and sample weights need the same number of samples",
            f"lengths {lengths}",
            "check how the data was cut",
            code=17,
        )
    return lengths[0]


def weights_of(y: Any, sample_weight: Any, class_weight: Mapping[int, float] | None) -> Any:
    """Returns the samples' weights as arrays, of weights or of classes."""
    if class_weight is None:
        return map_leaves(lambda weight: np.asarray(weight, keras.backend.floatx()), sample_weight)
    labels = None if keras.tree.is_nested(y) else np.asarray(y)
    if sample_weight is not None or labels is None:
        raise ConfigError(
            "class_weight= needs a single output, and no sample weights",
            "class_weight= and sample weights" if sample_weight is not None else "several outputs",
            "multiply the class weights into the sample weights: loader((x, y, sample_weight), ...)",
        )
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] > 1 else labels[..., 0]
    keys = list(class_weight) if isinstance(class_weight, Mapping) else [None]
    if any(not isinstance(label, (int, float, np.number)) or label % 1 for label in keys):
        raise ConfigError(
            "class_weight= must be a dict from the number of a class, as in y, to its weight",
            f"class_weight={class_weight!r}",
            "class_weight={0: 1.0, 1: 5.0}; from a list: dict(enumerate(...));\n"
            "from text: {int(label): weight for ...}",
        )
    classes, where = np.unique(np.round(labels).astype(np.int64), return_inverse=True)  # 0.9 is class 1, as in Keras
    each = np.array([class_weight.get(label, 1.0) for label in classes.tolist()], keras.backend.floatx())
    return each[where].reshape(labels.shape)
