"""Data for ``fit`` and ``evaluate``: each rank its own samples, every sample exactly once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from hvdtrain.core import same_data
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.sharding import Plan
from hvdtrain.core.world import World
from hvdtrain.keras import averaging, metric_states
from hvdtrain.keras.backends.chosen import BACKEND
from hvdtrain.keras.checks import replicas
from hvdtrain.keras.session import KEY, NO_SAMPLE, Session, world_or_current


class _Clock:
    """The epoch that ``fit`` is in, as told by our callbacks; Keras does not tell a PyDataset."""

    epoch: int | None = None


CLOCK = _Clock()


class Batches(keras.utils.PyDataset, DataAdapter):
    """One rank's batches of in-memory arrays; made by ``batches``.

    It is its own data adapter, which ``fit`` takes as it is: the adapter that Keras makes for a ``PyDataset``
    shuffles the batches once more (``fit(shuffle=True)`` is the default) with Python's generator, on every
    rank in another order; ranks would not work on the same global batch, and a resumed epoch not on the
    samples that are left. Weights are given to ``batches``: ``fit`` refuses its own beside it.

    Attributes:
        plan: the ``hvdtrain.Plan`` that deals the samples.
        epoch: the epoch whose order is being read; set by our callbacks, else counted.
    """

    def __init__(
        self, x: Any, y: Any, plan: Plan, *, rank: int, epoch: int = 0, consumed: int = 0, weights: Any = None
    ) -> None:
        super().__init__(workers=1)
        self.plan = plan
        self.rank = rank
        self._x, self._y, self._weights = x, y, weights
        self._first = epoch
        self._consumed = consumed
        self._begun = False
        self._adapter = PyDatasetAdapter(self, shuffle=False)
        # one step without a sample makes Keras expect weights in every batch, on every rank
        tail = plan.samples % plan.global_batch if plan.tail == "weighted" else 0
        self._weighted = weights is not None or 0 < tail < plan.size
        self._read(epoch)

    def _read(self, epoch: int) -> None:
        consumed = self._consumed if epoch == self._first else 0
        self._steps = self.plan.step_slices(epoch, consumed, rank=self.rank)
        self.epoch = epoch

    def done(self, epoch: int) -> int:
        """Samples of an epoch that are left out, because an earlier run has done them."""
        return self._consumed if epoch == self._first else 0

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        step = self._steps[index]
        live = not step.padding
        # no sample left for this rank: any sample keeps the shapes, and the step in step; its weight says it is none
        chosen = step.indices if live else np.zeros(1, np.int64)
        batch = (_take(self._x, chosen), _take(self._y, chosen))
        if not self._weighted:
            return batch[:1] if self._y is None else batch
        if self._weights is None:
            return (*batch, np.full(len(chosen), live))
        weights = keras.tree.map_structure(lambda w: w[chosen] if live else w[chosen] * NO_SAMPLE, self._weights)
        return (*batch, weights)

    def get_numpy_iterator(self) -> Any:
        return self._adapter.get_numpy_iterator()

    def get_tf_dataset(self) -> Any:
        if self._y is None and self._weighted:  # Keras' adapter asks for an Optional here, and yields the None
            import tensorflow as tf

            read = self._adapter._get_iterator
            nothing = tf.experimental.Optional.empty(None)
            self._adapter._get_iterator = lambda: ((x, nothing, weight) for x, _, weight in read())
        return self._adapter.get_tf_dataset()

    def get_torch_dataloader(self) -> Any:
        return self._adapter.get_torch_dataloader()

    @property
    def samples(self) -> int:
        """This rank's samples in the epoch."""
        return sum(step.samples for step in self._steps)

    @property
    def batch_size(self) -> int | None:
        return None  # a tail batch has another size

    def on_epoch_begin(self) -> None:
        """Turns to the next epoch's order (Keras calls it before it reads the epoch)."""
        counted = self.epoch + 1 if self._begun else self._first
        epoch = counted if CLOCK.epoch is None else CLOCK.epoch
        self._begun = True
        if self._consumed and epoch != self._first:
            raise ConfigError(
                "batches with consumed samples cover the rest of one epoch",
                f"epoch {epoch} after the partial epoch {self._first} ({self._consumed} samples consumed)",
                "fit the partial epoch on its own (epochs=initial_epoch + 1), then go on with consumed=0",
            )
        if epoch != self.epoch:
            self._read(epoch)


def batches(
    x: Any,
    y: Any,
    per_rank_batch: int,
    *,
    world: World | None = None,
    seed: int | None = None,
    shuffle: bool = True,
    tail: str = "weighted",
    epoch: int = 0,
    consumed: int = 0,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
) -> Batches:
    """Returns this rank's training batches: each sample once an epoch over all ranks, the same order at any
    world size.

    Args:
        x, y: arrays or tensors (or nested structures of them) of all samples, the same on every rank; first axis
            samples. ``y`` may be ``None``.
        per_rank_batch: samples a rank takes in a full step.
        world: the ranks; by default those of ``hvdtrain.init``.
        seed: of the order; by default the world's.
        shuffle: False keeps the order of ``x``.
        tail: what happens to samples that do not fill a global step: ``weighted`` (dealt out, weighed
            exactly) or ``drop``.
        epoch: the epoch to begin with (a resumed run's).
        consumed: samples of that epoch that are done; then fit that one epoch, and the others after it (with
            ``use_ema`` the next ``fit`` goes on with the weights themselves, as one fit would).
        sample_weight: array of all samples' weights (or a structure of arrays, one an output), as ``fit`` takes it.
        class_weight: class to weight, as ``fit`` takes it: for one output, whose ``y`` are class numbers or one-hot.

    Returns:
        A ``keras.utils.PyDataset`` with ``.plan``; give ``fit`` also ``hvdtrain.keras.callbacks``, which tell
        it the epoch.

    Raises:
        ConfigError: arrays of different lengths, data of another kind, an argument out of range, both kinds of weights.
        ReplicaError: the ranks' data or its order differ (this call is collective).
    """
    world = world_or_current(world)
    x, y = arrays(x, "x"), arrays(y, "y")
    weights = _weights(y, sample_weight, class_weight)
    samples = _count(x, y, weights)
    same_data.check(world, same_data.of_arrays((x, y, weights)), what="the data given to batches()")
    plan = Plan(
        samples, world.size, per_rank_batch, seed=world.seed if seed is None else seed, shuffle=shuffle,
        tail=tail,  # type: ignore[arg-type]
    )  # fmt: skip
    world.agree("plan of batches() (seed, per_rank_batch, shuffle, tail), epoch and consumed", (plan, epoch, consumed))
    if plan.samples == 0 or plan.steps(consumed) == 0:
        raise ConfigError("an epoch needs samples", f"{plan.samples} samples, {consumed} consumed", "give more data")
    return Batches(x, y, plan, rank=world.rank, epoch=epoch, consumed=consumed, weights=weights)


def evaluate(model: keras.Model, x: Any, y: Any, batch_size: int, *, world: World | None = None) -> dict[str, float]:
    """Evaluates on all ranks together, every sample exactly once; collective.

    Args:
        model: compiled; equal on all ranks (they are, after ``fit`` with our callbacks).
        x, y: arrays of all samples, the same on every rank.
        batch_size: samples in a batch of one rank.
        world: the ranks; by default those of ``hvdtrain.init``.

    Returns:
        Loss and metrics of all samples, the same numbers on every rank.

    Raises:
        ConfigError: arrays of different lengths, or data of another kind.
        ReplicaError: replicas, data or sets of metrics that differ.
    """
    world = world_or_current(world)
    x, y = arrays(x, "x"), arrays(y, "y")
    plan = Plan(_count(x, y), world.size, batch_size, seed=0, shuffle=False)
    same_data.check(world, same_data.of_arrays((x, y)), what="the data given to evaluate()")
    data: Any = Batches(x, y, plan, rank=world.rank)
    if world.size == 1:
        return dict(model.evaluate(data, verbose=0, return_dict=True))
    weights = model.trainable_weights
    replicas.check_equal(weights, world, lambda: BACKEND.checksums(weights), when="when they are evaluated")
    vars(model).setdefault(KEY, Session(world))
    averaging.hook_test_step(model)
    with averaging.together(model, even=True):
        model.evaluate(data, verbose=0, return_dict=True)
    return metric_states.results(model, metric_states.states(model), world, float(data.samples))


def arrays(data: Any, name: str) -> Any:
    """Returns nested data with tensors as numpy arrays; ``None`` stays.

    Raises:
        ConfigError: what is no array: a list of numbers, a file's data set, a data frame.
    """

    def one(leaf: Any) -> Any:
        kind = str(getattr(leaf, "dtype", "")).lower()
        if (
            kind == "object"
            or kind.startswith(("|s", "|v", "[", "<u", ">u", "datetime", "timedelta"))
            or "string" in kind
        ):
            raise ConfigError(
                f"{name} must hold numbers: text and Python objects are not dealt",
                f"{type(leaf).__module__}.{type(leaf).__qualname__} of {kind}",
                "turn text into numbers first (keras.layers.TextVectorization or StringLookup on the whole data), rows"
                " of other lengths into one array (keras.utils.pad_sequences); or fit a tf.data.Dataset of each rank's"
                " own samples",
            )
        if leaf is None or isinstance(leaf, np.ndarray) and leaf.ndim:
            return leaf
        if keras.ops.is_tensor(leaf) and len(leaf.shape):
            return keras.ops.convert_to_numpy(leaf)
        raise ConfigError(
            f"{name} must be a numpy array or a tensor, or nested dicts, lists and tuples of them, first axis samples",
            f"{type(leaf).__module__}.{type(leaf).__qualname__}"
            + (f" in {type(data).__name__}" if leaf is not data else ""),
            f"give np.asarray({name}); what does not fit into memory is fitted from a tf.data.Dataset or a"
            " keras.utils.PyDataset of each rank's own samples",
        )

    return keras.tree.map_structure(one, data)


def _take(data: Any, where: Any) -> Any:
    cut: Callable[[Any], Any] = lambda array: None if array is None else array[where]  # noqa: E731
    return keras.tree.map_structure(cut, data)


def _count(x: Any, y: Any, weights: Any = None) -> int:
    lengths = [len(leaf) for leaf in keras.tree.flatten((x, y, weights)) if leaf is not None]
    if not lengths or len(set(lengths)) != 1:
        raise ConfigError(
            "x, y and sample weights need the same number of samples",
            f"lengths {lengths}",
            "check how the data was cut",
        )
    return lengths[0]


def _weights(y: Any, sample_weight: Any, class_weight: Mapping[int, float] | None) -> Any:
    """Returns the samples' weights as arrays, of weights or of classes."""
    if class_weight is None:
        return keras.tree.map_structure(
            lambda w: None if w is None else np.asarray(w, keras.backend.floatx()), sample_weight
        )
    labels = None if keras.tree.is_nested(y) else np.asarray(y)
    if sample_weight is not None or labels is None:
        raise ConfigError(
            "class_weight= weighs the samples of one output, by their class",
            "sample_weight= beside it" if sample_weight is not None else "several outputs",
            "multiply the class weights into sample_weight=",
        )
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] > 1 else labels[..., 0]
    table = {int(label): float(weight) for label, weight in class_weight.items()}
    classes, where = np.unique(labels, return_inverse=True)
    each = np.array([table.get(int(label), 1.0) for label in classes], keras.backend.floatx())
    return each[where].reshape(labels.shape)
