"""The TensorFlow backend of Keras: everything the adapter does with tf tensors and Horovod's tf operations.

Twin of `torch.py`. Two rules hold for every Horovod call: it has an explicit name and `ignore_name_scope=True`, because
names derived from the graph differ as soon as one rank has built one model more, and ranks that wait for different
names wait forever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.comm.engines import losses_in
from hvdtrain.keras.backends.session import KEY, LiveBatch, first_made, map_leaves
from hvdtrain.private.keras import BackendEpochIterator

_HIDDEN_RANDOM = {
    "Multinomial", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoissonV2", "RandomShuffle",
    "RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal",
}  # fmt: skip


class TensorFlowBackend:
    """Tensor and collective operations for `KERAS_BACKEND=tensorflow`."""

    name = "tensorflow"
    epoch_iterator = BackendEpochIterator  # of Keras' `fit`

    def __init__(self) -> None:
        self._host_operations: dict[str, Any] = {}

    @property
    def hvd(self) -> Any:
        """`horovod.tensorflow`, imported when the first collective needs it (one process needs none)."""
        import horovod.tensorflow as hvd

        return hvd

    # ---------------------------------------------------------------- host side
    def host_allreduce(self, array: np.ndarray, op: str, name: str) -> np.ndarray:
        """Reduces a host array over ranks. `op`: `sum` | `min` | `max`."""
        operation = {"sum": self.hvd.Sum, "min": self.hvd.Min, "max": self.hvd.Max}[op]
        return self._on_host(self.hvd.allreduce, array, f"allreduce.{op}", op=operation)

    def host_broadcast(self, array: np.ndarray, root: int, name: str) -> np.ndarray:
        return self._on_host(self.hvd.broadcast, array, f"broadcast.{root}", root_rank=root)

    def host_allgather(self, array: np.ndarray, name: str) -> np.ndarray:
        """Concatenates the ranks' arrays along axis 0 (lengths may differ)."""
        return self._on_host(self.hvd.allgather, array, "allgather")

    def _on_host(self, operation: Callable[..., Any], array: np.ndarray, kind: str, **options: Any) -> np.ndarray:
        """Runs one of Horovod's operations on an array [n], outside of whatever is being traced.

        Through a `tf.function` for each kind and dtype: called eagerly, Horovod's operations ignore their names.
        """
        with tf.init_scope(), tf.device("CPU:0"):
            value = tf.constant(array)
            name = f"hvdtrain.host.{kind}.{value.dtype.name}"
            if name not in self._host_operations:

                @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], value.dtype)])
                def run(sent: Any) -> Any:
                    with tf.device("CPU:0"):
                        return operation(sent, name=name, ignore_name_scope=True, **options)

                self._host_operations[name] = run
            with self.rank_losses():
                return self._host_operations[name](value).numpy()

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Leaves a function that is being traced; variables that are made inside do not have it traced again."""

        def real(make: Callable[..., Any], **options: Any) -> Any:
            return make(**{**options, "experimental_enable_variable_lifting": False})

        with tf.init_scope(), tf.variable_creator_scope(real):
            yield

    def to_numpy(self, variable: Any) -> np.ndarray:
        """A variable's values, to be read at once: they may be its own memory."""
        with tf.init_scope():
            value = tf.convert_to_tensor(variable.value)
            known = np.dtype(value.dtype.as_numpy_dtype).isbuiltin == 1  # numpy's own, as bfloat16 is not
            return np.asarray(memoryview(value) if known else value.numpy())

    def copies(self, variables: Sequence[Any]) -> list[Any]:
        """Device-side copies of the variables' values, for `put_back`."""
        return [tf.identity(variable.value) for variable in variables]

    def make_copies(self, variables: Sequence[Any]) -> Callable[[], list[Any]]:
        """`copies` as a function to be called often: a variable's memory is copied only where a step writes into it."""

        @tf.function(autograph=False)
        def copies() -> list[Any]:
            return [tf.identity(variable.value) for variable in variables]

        return copies

    def put_back(self, variables: Sequence[Any], copies: Sequence[Any]) -> None:
        for variable, copy in zip(variables, copies, strict=True):
            variable.value.assign(copy)

    def number(self, value: float) -> Any:
        """A float64 scalar that traced functions read whenever they run; `.assign` changes it."""
        with tf.init_scope(), tf.device("CPU:0"):
            return tf.Variable(value, trainable=False, dtype=tf.float64)

    def rank_losses(self) -> AbstractContextManager[None]:
        """Explains errors of Horovod's: TensorFlow has no class of its own for a lost rank."""
        words = ("Horovod", "gloo", "node hvdtrain.")
        kinds = (tf.errors.UnknownError, tf.errors.AbortedError, tf.errors.FailedPreconditionError)
        return losses_in(*kinds, told_by=lambda error: any(word in str(error.message) for word in words))

    # ---------------------------------------------------------------- inside a step
    def split_dead(self, x: Any, sample_weight: Any) -> tuple[Any, Any]:
        """Returns this rank's samples (float64 scalar), and its weights as Keras may see them (`NO_SAMPLE`)."""
        first = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
        samples = tf.cast(_rows(first), tf.float64)
        if getattr(sample_weight, "dtype", None) == tf.bool:
            return tf.where(tf.reduce_any(sample_weight), samples, tf.zeros_like(samples)), None
        weights = [w for w in keras.tree.flatten(sample_weight) if w is not None and tf.as_dtype(w.dtype).is_floating]
        if not weights:
            return samples, sample_weight
        dead = tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_nan(weight)) for weight in weights]))
        shown = map_leaves(lambda weight: tf.where(dead, tf.zeros_like(weight), weight), sample_weight)
        return tf.where(dead, tf.zeros_like(samples), samples), shown

    def notes(self) -> TensorFlowNotes:
        """Returns the notes of a model; to be called outside of a step."""
        return TensorFlowNotes(self)

    def given_of(self, batches: Any) -> Any:
        """Returns what Keras gives its train function, of an iterator over batches."""
        return batches

    def no_gradient(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def total(self, values: Any) -> Any:
        """The sum of a tensor, as a float64 scalar without gradient."""
        return tf.reduce_sum(tf.cast(tf.stop_gradient(tf.convert_to_tensor(values)), tf.float64))

    def elements(self, values: Any) -> Any:
        return tf.cast(tf.size(values, out_type=tf.int64), tf.float64)

    def by_samples(self, values: Any, data: Any) -> bool:
        """Returns True if the elements of a loss are known to be a multiple of the samples, the same in all batches."""
        leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None and hasattr(leaf, "shape")]
        rows = leaves[0].shape[0] if leaves else None
        if rows is not None:  # a batch that was given as it is: the next may have another shape
            return tuple(values.shape) == (rows,)
        return all(leaf.shape.rank is not None and None not in leaf.shape[1:] for leaf in leaves)

    def unless_zero(self, value: Any, samples: Any) -> Any:
        """`value`, or 0 if there are no samples."""
        value = tf.cast(value, tf.float64)
        return tf.where(tf.equal(samples, 0), tf.zeros_like(value), value)

    def times(self, tensor: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        """`tensor * (a * b) / (c * d)`, exactly `tensor` where the products are equal; 0 for a division by 0."""
        return tensor * tf.cast(tf.math.divide_no_nan(a * b, c * d), tensor.dtype)

    @functools.cached_property
    def _no_constant(self) -> Any:
        with self.eager():
            return self.number(0.0)

    def start_sum(self, value: Any, name: str, words: Sequence[Any] = (), receive: Any = None) -> Any:
        """Starts the sum of a float64 scalar over ranks; in a graph it runs beside the forward pass. `receive` is
        called with the sums of `words`, if one of these is not 0.
        """
        with tf.device("CPU:0"):
            # Horovod's operations are not marked as stateful: what they are given must be no constant (the samples of
            # batches of one shape), or one rank's optimiser of graphs runs them once, instead of in each step
            row = [value + self._no_constant, *words]
            sums = self.hvd.allreduce(tf.stack(row), op=self.hvd.Sum, name=name, ignore_name_scope=True)
            if receive is not None:
                _receive(sums[1:], receive)
            return sums[0]  # in the step's own graph: the first to ask for it may be a branch of a user's cond

    def finish_sum(self, started: Any) -> Any:
        return started

    def number_of_call(self, live: Any) -> int:
        """Numbers what is called again within a step, from 0 whenever one is traced: sums of a graph are in flight
        together, each by a name of its own that all ranks give it.
        """
        if live is not None:
            return next(live.calls)
        if tf.executing_eagerly():
            return 0
        graph = tf.compat.v1.get_default_graph()
        while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
            graph = graph.outer_graph
        number = getattr(graph, KEY, 0)
        setattr(graph, KEY, number + 1)
        return int(number)

    def differentiable_sum(self, values: Any, samples: Any, name: str) -> Any:
        """The sum of a float64 tensor over ranks that have samples.

        Gradients are those of the mean over all samples, for ranks whose own are weighed by `samples` afterwards.
        """

        @tf.custom_gradient
        def summed(values: Any) -> Any:
            sent = self.unless_zero(values, samples)
            total = self.hvd.allreduce(sent, op=self.hvd.Sum, name=name, ignore_name_scope=True)
            total.set_shape(values.shape)

            def gradient(upstream: Any) -> Any:
                weight = tf.cast(samples, tf.float64)
                weighed = tf.math.multiply_no_nan(upstream, weight)
                back = self.differentiable_sum(weighed, samples, f"{name}.gradient")
                return tf.math.divide_no_nan(back, weight)

            return total, gradient

        return summed(values)

    def gather_rows(self, tensors: list[Any], samples: Any, total: Any, rank: int, name: str) -> list[Any]:
        """Joins the ranks' tensors [n, ...], without those of ranks that have no samples.

        Gradients reach a rank's own rows multiplied by total / samples: `weigh` removes that factor.
        """
        live = tf.cast(tf.not_equal(samples, 0), tf.int64)
        # see `start_sum`: what Horovod is given must be no constant
        rows = tf.cast(tf.stack([_rows(tensor) for tensor in tensors]), tf.int64) * live + tf.cast(
            self._no_constant, tf.int64
        )
        every = self.hvd.allgather(rows, name=f"{name}.rows", ignore_name_scope=True)
        starts = tf.reduce_sum(tf.reshape(every, [-1, len(tensors)])[:rank], 0)
        factor = tf.math.divide_no_nan(total, samples)
        return [
            self._gathered(tensor, rows[at], starts[at], factor, f"{name}.{at}") for at, tensor in enumerate(tensors)
        ]

    def _gathered(self, tensor: Any, rows: Any, start: Any, factor: Any, name: str) -> Any:
        def join(values: Any) -> Any:
            kind, sent = values.dtype, values[:rows]
            sent = tf.bitcast(sent, tf.uint16) if kind == tf.bfloat16 else sent
            joined = self.hvd.allgather(sent, name=name, ignore_name_scope=True)
            joined = tf.bitcast(joined, kind) if kind == tf.bfloat16 else joined
            joined.set_shape([None, *values.shape[1:]])
            return joined

        if not tensor.dtype.is_floating:
            return join(tensor)

        @tf.custom_gradient
        def gathered(values: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                own = upstream[start : start + rows] * tf.cast(factor, upstream.dtype)
                return tf.pad(own, [[0, tf.cast(_rows(values), tf.int64) - rows]] + [[0, 0]] * (len(values.shape) - 1))

            return join(values), gradient

        return gathered(tensor)

    def usable_here(self, tensor: Any) -> bool:
        """Returns False for a value noted eagerly and used inside a nested traced function: it would be baked in."""
        if tf.executing_eagerly():
            return True
        noted_in = tensor.graph if tf.is_symbolic_tensor(tensor) else None
        graph = tf.compat.v1.get_default_graph()
        while graph is not None:
            if graph is noted_in:
                return True
            graph = getattr(graph, "outer_graph", None)
        return False

    def weigh(self, tensors: list[Any], samples: Any, total: Any, size: int) -> list[Any]:
        """Multiplies tensors by `samples * size / total`; exactly 1 for equal shares, zeros without samples."""

        def scaled() -> list[Any]:
            factor = tf.math.divide_no_nan(samples * size, total)
            return [tf.math.multiply_no_nan(tensor, tf.cast(factor, tensor.dtype)) for tensor in tensors]

        even = tf.equal(samples * size, total)
        if tf.executing_eagerly():
            return tensors if bool(even) else scaled()
        return list(tf.cond(even, lambda: [tf.identity(tensor) for tensor in tensors], scaled))

    @contextmanager
    def unmoved_if_dead(self, samples: Any, variables: Sequence[Any]) -> Iterator[None]:
        """Undoes what happens to variables inside, if this rank's batch holds no sample."""
        before = self.copies(variables)
        yield

        def restore() -> Any:
            return tf.group(*[v.value.assign(c) for v, c in zip(variables, before, strict=True)])

        if not tf.executing_eagerly():
            tf.cond(tf.equal(samples, 0), restore, tf.no_op)
        elif float(samples) == 0:
            self.put_back(variables, before)

    def reduce(self, tensors: list[Any], op: str, name: str) -> list[Any]:
        """Reduces dense tensors of one dtype over all ranks, as one group. `op`: `average` | `sum` | `max`."""
        operation = {"average": self.hvd.Average, "sum": self.hvd.Sum, "max": self.hvd.Max}[op]
        received = self.hvd.grouped_allreduce(tensors, op=operation, name=name, ignore_name_scope=True)
        for value, tensor in zip(received, tensors, strict=True):
            value.set_shape(tensor.shape)
        return list(received)

    def gather_sparse(self, slices: Any, name: str, size: int) -> Any:
        """Returns the average of `IndexedSlices` over ranks; `grouped_allreduce` mistakes their dense_shape."""
        dtype = slices.values.dtype
        values = slices.values if dtype in (tf.float16, tf.float32, tf.float64) else tf.cast(slices.values, tf.float32)
        values = values / tf.cast(size, values.dtype)
        values = self.hvd.allgather(values, name=f"{name}.values", ignore_name_scope=True)
        indices = self.hvd.allgather(slices.indices, name=f"{name}.indices", ignore_name_scope=True)
        return tf.IndexedSlices(tf.cast(values, dtype), indices, slices.dense_shape)

    def is_sparse(self, gradient: Any) -> bool:
        return isinstance(gradient, tf.IndexedSlices)

    def with_values(self, slices: Any, values: Any) -> Any:
        return tf.IndexedSlices(values, slices.indices, slices.dense_shape)

    def densify(self, gradient: Any) -> Any:
        return tf.convert_to_tensor(gradient)

    def agree_finite(self, finite: Any, name: str) -> Any:
        """Returns True only if `finite` is true on every rank."""
        flag = tf.reshape(tf.cast(finite, tf.int32), [1])
        with tf.device("CPU:0"):
            lowest = self.hvd.allreduce(flag, op=self.hvd.Min, name=name, ignore_name_scope=True)
        return tf.equal(lowest[0], 1)

    def in_branch(self) -> bool:
        """Returns True while a `tf.cond` branch is being traced: ranks may take different branches."""
        graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
        return type(graph).__name__ == "CondBranchFuncGraph"

    # ---------------------------------------------------------------- devices and random state
    def visible_gpus(self) -> int:
        return len(tf.config.list_physical_devices("GPU"))

    def pin(self, devices: Sequence[int], *, cpu_only: bool) -> None:
        """Shows this process its own GPUs only, with memory that grows instead of all of it at once."""
        gpus = tf.config.list_physical_devices("GPU")
        chosen = [] if cpu_only else [gpus[index] for index in devices]
        tf.config.set_visible_devices(chosen, "GPU")
        for gpu in chosen:
            tf.config.experimental.set_memory_growth(gpu, True)

    def random_state(self) -> dict[str, np.ndarray]:
        """Random state outside of seed generators: what `tf.random`'s operations keep cannot be read."""
        return {}

    def set_random_state(self, state: dict[str, np.ndarray]) -> None:
        del state

    def reseed(self, seed: int) -> None:
        """Seeds `tf.random`'s operations, of the functions that are being traced too."""
        with tf.init_scope():
            tf.random.set_seed(seed)
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        while graph is not None:
            graph.seed = seed
            graph = getattr(graph, "outer_graph", None)

    def tracing(self) -> bool:
        return not tf.executing_eagerly()

    def hidden_random(self) -> list[str]:
        """The kinds of operations in the graph being traced that keep their random state to themselves."""
        if tf.executing_eagerly():
            return []
        graph = tf.compat.v1.get_default_graph().as_graph_def()
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        return sorted({node.op for node in nodes} & _HIDDEN_RANDOM)


class TensorFlowNotes:
    """The variables that steps send to the other ranks in addition to gradients, and those that they keep.

    Attributes:
        preempted: 1 if this rank was preempted; the next step sends it to all ranks.
        kept_batch: the batch of a step that had to keep it; `None` until then.
        waited: seconds that steps have waited for data, as a number or a variable.
    """

    def __init__(self, backend: TensorFlowBackend) -> None:
        self._backend = backend
        self.preempted = backend.number(0.0)
        self._loss = tf.Variable(float("nan"), trainable=False, dtype=tf.float64)
        self._wants_batch = tf.Variable(False, trainable=False)
        self.kept_batch: Any = None
        self.waited: Any = 0.0

    def note_loss(self, loss: Any, live: LiveBatch, name: str) -> None:
        """Notes the loss of the global batch, from this rank's part (its loss times its samples)."""
        self._loss.assign(self._backend.start_sum(tf.cast(loss, tf.float64), name) / live.total())

    def loss(self) -> float:
        return float(self._loss)

    def want_batch(self) -> None:
        """Makes the next step keep its batch."""
        self.kept_batch = None
        self._wants_batch.assign(True)

    def keep_batch(self, data: Any) -> None:
        """Keeps a wanted batch as `kept_batch`; not a ragged or sparse one, which is not cut in pieces."""
        leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
        if any(isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) for leaf in leaves):
            return
        if tf.executing_eagerly():
            if self._wants_batch:
                self.kept_batch = data
                self._wants_batch.assign(False)
            return

        def store(*arrays: Any) -> None:
            received = iter([np.array(array) for array in arrays])
            self.kept_batch = keras.tree.map_structure(lambda leaf: None if leaf is None else next(received), data)

        def keep() -> Any:
            with tf.control_dependencies([tf.numpy_function(store, leaves, [])]):
                return self._wants_batch.assign(False, read_value=False)

        tf.cond(self._wants_batch, keep, tf.no_op)

    @contextmanager
    def timed_input(self) -> Iterator[None]:
        """Adds to `waited`, in the data's pipeline, the seconds for which steps wait for their batches."""
        self.waited = self._backend.number(0.0)

        def made(iterator: Any) -> None:
            if isinstance(iterator._distributed_dataset, tf.data.Dataset):
                iterator._distributed_dataset = _timed(iterator._distributed_dataset, self.waited)

        with first_made(BackendEpochIterator, made):
            yield


def _receive(words: Any, receive: Callable[..., None]) -> None:
    """Passes on the words of a step, if there are any, so that no step reads a variable for it."""

    def received() -> Any:
        with tf.control_dependencies([tf.numpy_function(receive, tf.unstack(words), [])]):
            return tf.no_op()

    if not tf.executing_eagerly():
        tf.cond(tf.reduce_any(words > 0), received, tf.no_op)
    elif tf.reduce_any(words > 0):
        receive(*words)


def _timed(data: Any, waited: Any) -> Any:
    """Returns the same data; adds the seconds that a step waits for each batch of it to a variable."""
    as_it_is = tf.autograph.experimental.do_not_convert  # autograph would read and rewrite the source: 0.05 s
    asked = tf.data.Dataset.counter().map(as_it_is(lambda _: tf.timestamp()))

    @as_it_is
    def arrived(since: Any, batch: Any) -> Any:
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            noted = waited.assign_add(tf.timestamp() - since)
        with tf.control_dependencies([noted]):
            return tf.nest.map_structure(tf.identity, batch, expand_composites=True)

    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # it would wait in the step's stead
    return tf.data.Dataset.zip((asked, data)).map(arrived).with_options(options)


def _rows(leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows()
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf)[0]
