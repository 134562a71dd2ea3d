"""Data for `fit` and `evaluate`: each rank its own samples, every sample exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import keras
import numpy as np
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from hvdtrain.core import same_data
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.sharding import Dealt, Plan, check_evaluation
from hvdtrain.core.world import World, given_or_current
from hvdtrain.keras import averaging, metric_states
from hvdtrain.keras.checks import replicas
from hvdtrain.keras.session import KEY, NO_SAMPLE, Session, map_leaves


class Loader(Dealt, keras.utils.PyDataset, DataAdapter):
    """One rank's batches of in-memory arrays; made by `loader`.

    It is its own data adapter, which `fit` takes as it is: the adapter that Keras makes for a `PyDataset`
    shuffles the batches once more (`fit(shuffle=True)` is the default) with Python's generator, on every
    rank in another order; ranks would not work on the same global batch, and a resumed epoch not on the
    samples that are left. Weights are given to `loader`: `fit` refuses its own beside it.

    Attributes:
        plan: the `hvdtrain.Plan` that deals the samples.
        epoch: the epoch whose order is being read.
        next_epoch: the one to turn to, as our callbacks tell it (Keras does not); `None`: the one that follows.
    """

    def __init__(self, data: tuple[Any, Any, Any], plan: Plan, *, rank: int) -> None:
        super().__init__(workers=1)
        self.plan = plan
        self.rank = rank
        self._x, self._y, self._weights = data
        self._adapter = PyDatasetAdapter(self, shuffle=False)
        # one step without a sample makes Keras expect weights in every batch, on every rank
        tail = plan.samples % plan.global_batch if plan.tail == "weighted" else 0
        self._weighted = self._weights is not None or 0 < tail < plan.size
        self.next_epoch: int | None = None
        self.go_on(0, 0)

    def go_on(self, epoch: int, samples_in_epoch: int) -> None:
        """Makes the next `fit` begin there; a restored checkpoint does so by itself.

        The rest of an epoch is a `fit` of its own (`epochs=initial_epoch + 1`), and the epochs after it another
        (with `use_ema` that goes on with the weights themselves, as one fit would).

        Raises:
            ConfigError: no such place in this data.
        """
        if self.plan.samples == 0 or self.plan.steps(samples_in_epoch) == 0:
            received = f"{self.plan.samples} samples, {samples_in_epoch} done"
            raise ConfigError("an epoch needs samples", received, "give more data")
        self.first_epoch, self._done, self._begun = epoch, samples_in_epoch, False
        self._read(epoch)

    def _read(self, epoch: int) -> None:
        self._steps = self.plan.step_slices(epoch, self.done(epoch), rank=self.rank)
        self.epoch = epoch

    def leave_nothing_out(self) -> None:
        """The rest of an epoch was fitted: the next `fit` of it begins at its beginning."""
        if self._done:
            self.go_on(self.first_epoch, 0)

    def done(self, epoch: int) -> int:
        """Samples of an epoch that are left out, because an earlier run has done them."""
        return self._done if epoch == self.first_epoch else 0

    def apart(self) -> Loader:
        """Returns a loader of the same data at its beginning: what reads that leaves this one where it is."""
        return Loader((self._x, self._y, self._weights), self.plan, rank=self.rank)

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        step = self._steps[index]
        live = not step.padding
        # no sample left for this rank: any sample keeps the shapes, and the step in step; its weight says it is none
        chosen = step.indices if live else np.zeros(1, np.int64)
        batch = map_leaves(lambda array: array[chosen], (self._x, self._y))
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
    def batch_size(self) -> int | None:
        return None  # a tail batch has another size

    def on_epoch_begin(self) -> None:
        """Turns to the next epoch's order (Keras calls it before it reads the epoch)."""
        counted = self.epoch + 1 if self._begun else self.first_epoch
        epoch = counted if self.next_epoch is None else self.next_epoch
        self._begun, self.next_epoch = True, None
        if self._done and epoch != self.first_epoch:
            raise ConfigError(
                "a fit that goes on within an epoch covers the rest of one epoch",
                f"epoch {epoch} after the partial epoch {self.first_epoch} ({self._done} samples were done)",
                "fit the partial epoch on its own (epochs=initial_epoch + 1), then fit() the others with the same data",
            )
        if epoch != self.epoch:
            self._read(epoch)


def loader(
    data: Any,
    per_rank_batch: int,
    *,
    world: World | None = None,
    shuffle: bool = True,
    tail: Literal["weighted", "drop"] = "weighted",
    seed: int | None = None,
    class_weight: Mapping[int, float] | None = None,
) -> Loader:
    """Returns this rank's training batches: each sample once an epoch over all ranks, in an order that does not depend
    on how many ranks there are; collective.

    Args:
        data: the same on every rank: arrays or tensors of all samples (or nested structures of them), first axis
            samples, as a tuple `(x, y)` or `(x, y, sample_weight)`; or `x` alone, for a model without targets.
        per_rank_batch: samples a rank takes in a full step.
        world: the ranks; by default those of `hvdtrain.init`.
        shuffle: False keeps the data's order.
        tail: samples that do not fill a global step are dealt out and weighed exactly, or left out ("drop").
        seed: of the order; by default the world's.
        class_weight: class to weight, as `fit` takes it: for one output, whose `y` are class numbers or one-hot.

    Returns:
        A `keras.utils.PyDataset` with `.plan`, to be given to `prepare` and `fit`; give `fit` also
        `hvdtrain.keras.callbacks`, which tell it the epoch.

    Raises:
        ConfigError: arrays of different lengths, data of another kind, an argument out of range, both kinds of weights.
        ReplicaError: the ranks' data or its order differ.
    """
    world = given_or_current(world, "keras")
    x, y, weights = _unpacked(data)
    x, y = arrays(x, "x"), arrays(y, "y")
    weights = _weights(y, weights, class_weight)
    x, y, weights = keras.tree.lists_to_tuples((x, y, weights))  # as Keras' fit does: a tf.data.Dataset has no lists
    samples = _count((x, y, weights))
    same_data.check(world, same_data.of_arrays((x, y, weights)))
    seed = world.seed if seed is None else seed
    plan = Plan(samples, world.size, per_rank_batch, seed=seed, shuffle=shuffle, tail=tail)
    world.agree("plan of loader() (seed, per_rank_batch, shuffle, tail)", plan)
    return Loader((x, y, weights), plan, rank=world.rank)


def evaluate(
    model: keras.Model, data: Any, *, per_rank_batch: int | None = None, world: World | None = None
) -> dict[str, float]:
    """Evaluates on all ranks together, every sample exactly once; collective.

    Args:
        model: compiled; equal on all ranks (they are, after `fit` with our callbacks).
        data: the same on every rank: what `loader` takes, or a `Loader`.
        per_rank_batch: samples a rank takes at a time; not needed with a `Loader`.
        world: the ranks; by default those of `hvdtrain.init`.

    Returns:
        Loss and metrics of all samples, the same numbers on every rank.

    Raises:
        ConfigError: arrays of different lengths, data of another kind, or no batch size.
        ReplicaError: replicas, data or sets of metrics that differ.
    """
    world = given_or_current(world, "keras")
    check_evaluation(data, per_rank_batch)
    if not isinstance(data, Loader):
        assert per_rank_batch is not None  # checked
        data = loader(data, per_rank_batch, world=world, shuffle=False)
    data = data.apart()
    if world.size == 1:
        return dict(model.evaluate(data, verbose=0, return_dict=True))
    replicas.check_equal(model.trainable_weights, world, when="when they are evaluated")
    vars(model).setdefault(KEY, Session(world))
    averaging.hook_test_step(model)
    with averaging.together(model, even=True):
        model.evaluate(data, verbose=0, return_dict=True)
    mine = float(sum(step.samples for step in data._steps))
    return metric_states.results(model, metric_states.states(model), world, mine)


def _unpacked(data: Any) -> tuple[Any, Any, Any]:
    """Returns x, y and sample weights; `None` for what is not there."""
    parts = data if isinstance(data, tuple) else (data,)
    if isinstance(data, list) or not 1 <= len(parts) <= 3:
        raise ConfigError(
            "data comes as a tuple (x, y) or (x, y, sample_weight), or is x alone",
            f"a {type(data).__name__} of {len(data)}",
            "(x, y) instead of [x, y]; several inputs or outputs of a model within it: ((x1, x2), y)",
        )
    x, y, weights = (*parts, None, None)[:3]
    return x, y, weights


def arrays(data: Any, name: str) -> Any:
    """Returns nested data with tensors as numpy arrays; `None` stays.

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


def _count(data: Any) -> int:
    lengths = [len(leaf) for leaf in keras.tree.flatten(data) if leaf is not None]
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
        return map_leaves(lambda weight: np.asarray(weight, keras.backend.floatx()), sample_weight)
    labels = None if keras.tree.is_nested(y) else np.asarray(y)
    if sample_weight is not None or labels is None:
        raise ConfigError(
            "class_weight= weighs the samples of one output, by their class",
            "sample weights beside it" if sample_weight is not None else "several outputs",
            "multiply the class weights into the sample weights: loader((x, y, sample_weight), ...)",
        )
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] > 1 else labels[..., 0]
    keys = list(class_weight) if isinstance(class_weight, Mapping) else [None]
    if any(not isinstance(label, (int, float, np.number)) or label % 1 for label in keys):
        raise ConfigError(
            "class_weight= is a dict from the number of a class, as y has it, to its weight",
            f"class_weight={class_weight!r}",
            "class_weight={0: 1.0, 1: 5.0}; of a list: dict(enumerate(...)); of text: {int(label): weight for ...}",
        )
    classes, where = np.unique(np.round(labels).astype(np.int64), return_inverse=True)  # 0.9 is class 1, as in Keras
    each = np.array([class_weight.get(label, 1.0) for label in classes.tolist()], keras.backend.floatx())
    return each[where].reshape(labels.shape)
