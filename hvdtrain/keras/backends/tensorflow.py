"""The TensorFlow backend of Keras: what the adapter does with tf tensors and Horovod's tf operations inside of steps.

The rest of it is in `tensorflow_host.py`. Twin of `torch.py`; both implement the protocol in `chosen.py`. Two rules
hold for every Horovod call: it has an explicit name and `ignore_name_scope=True`, because names derived from the graph
differ as soon as one rank has built one model more, and ranks that wait for different names wait for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator

from hvdtrain.keras.backends.session import KEY, first_made, map_leaves
from hvdtrain.keras.backends.tensorflow_host import OutsideOfSteps

# bfloat16 and the unsigned types are missing from the type list of Horovod's TensorFlow operations.
REDUCIBLE = frozenset({"float16", "float32", "float64"})


class TensorFlowBackend(OutsideOfSteps):
    """Tensor and collective operations for `KERAS_BACKEND=tensorflow`."""

    name = "tensorflow"

    def split_dead(self, x: Any, sample_weight: Any) -> tuple[Any, Any]:
        """Returns this rank's samples (float64 scalar), and its sample weights as Keras may see them.

        See `session.NO_SAMPLE`.
        """
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

    def notes(self) -> tuple[Any, Any, Any]:
        """A variable, for `keep_batch`, one for the number of `note_loss`, and one that `tell` makes 1; to
        be made outside of a step.
        """
        with tf.device("CPU:0"):
            telling = tf.Variable(0.0, trainable=False, dtype=tf.float64)
        loss = tf.Variable(float("nan"), trainable=False, dtype=tf.float64)
        return tf.Variable(False, trainable=False), loss, telling

    def tell(self, session: Any) -> None:
        """This rank was preempted: the next step lets all others know."""
        session.telling.assign(1.0)

    def note_loss(self, session: Any, loss: Any, name: str) -> None:
        """Notes the loss of the global batch, from this rank's part (its loss times its samples)."""
        total = self.start_sum(tf.cast(loss, tf.float64), name)
        session.step_loss.assign(total / session.live.total())

    def loss_noted(self, session: Any) -> float:
        return float(session.step_loss)

    def want_batch(self, session: Any) -> None:
        """The next step keeps its batch, if `session.tries`."""
        session.kept_batch = None
        session.wants_batch.assign(session.tries)

    def keep_batch(self, data: Any, session: Any) -> None:
        """Keeps a wanted batch as `session.kept_batch`."""
        leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
        if tf.executing_eagerly():
            if session.tries and session.kept_batch is None:
                session.kept_batch = data
            return
        if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
            return  # ragged and sparse batches are not cut in pieces
        wanted = session.wants_batch

        def store(*arrays: Any) -> None:
            received = iter([np.array(array) for array in arrays])
            session.kept_batch = keras.tree.map_structure(lambda leaf: None if leaf is None else next(received), data)

        def keep() -> Any:
            with tf.control_dependencies([tf.numpy_function(store, leaves, [])]):
                return wanted.assign(False, read_value=False)

        tf.cond(wanted, keep, tf.no_op)

    @contextmanager
    def timed_input(self, session: Any) -> Iterator[None]:
        """Adds to `session.waited` the seconds for which the steps of the `fit` inside wait for their batches.

        Measured within the data's pipeline, where a busy machine's delay of the step itself does not count; made once a
        fit, as to trace it takes longer than two steps of a small model.
        """
        with tf.device("CPU:0"):
            session.waited = tf.Variable(0.0, trainable=False, dtype=tf.float64)

        def made(iterator: Any) -> None:
            if isinstance(iterator._distributed_dataset, tf.data.Dataset):
                iterator._distributed_dataset = _timed(iterator._distributed_dataset, session.waited)

        with first_made(TFEpochIterator, made):
            yield

    def first_iterator(self, made: Callable[[Any], None]) -> AbstractContextManager[None]:
        """While `fit` runs inside, `made` is called with its iterator over training's epochs."""
        return first_made(TFEpochIterator, made)

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
        """True if the elements of a loss are known to be a multiple of the samples, the same in all batches."""
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
        with self.eager(), tf.device("CPU:0"):
            return tf.Variable(0.0, trainable=False, dtype=tf.float64)

    def start_sum(self, value: Any, name: str, session: Any = None) -> Any:
        """Starts the sum of a float64 scalar over ranks; in a graph it runs beside the forward pass. With a session
        the word goes along that a rank was preempted.
        """
        with tf.device("CPU:0"):
            # Horovod's operations are not marked as stateful: what they are given must be no constant (the samples of
            # batches of one shape), or one rank's optimiser of graphs runs them once, instead of in each step
            words = [] if session is None else [session.telling, *session.leaving()]
            row = [value + self._no_constant, *words]
            sums = self.hvd.allreduce(tf.stack(row), op=self.hvd.Sum, name=name, ignore_name_scope=True)
            if session is not None:
                _note(session, sums[1:])
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
        """Joins the ranks' tensors [n, ...]; those of a rank without samples are left out.

        Gradients go to a rank's own rows, times total / samples: `weigh` takes that away again.
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
        """False for a value noted eagerly and used inside a nested traced function: it would be baked in."""
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
        """Multiplies tensors by `samples * size / total`; equal shares return them untouched, bit for
        bit, and no samples zeros, whatever the tensors hold.
        """

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

    def reduce(self, tensors: list[Any], op: str, name: str, *, half: bool, size: int) -> list[Any]:
        """All-reduces dense tensors of one dtype as one group. `op`: `average` | `max`."""
        dtype = tensors[0].dtype
        if half and op == "average" and dtype.size > 2:
            # divided before the cast: a sum of N values then fits wherever one value does
            sent = [tf.cast(tensor / tf.cast(size, dtype), tf.float16) for tensor in tensors]
            operation = self.hvd.Sum
        else:
            sent = tensors if dtype.name in REDUCIBLE else [tf.cast(tensor, tf.float32) for tensor in tensors]
            operation = self.hvd.Average if op == "average" else self.hvd.Max
        received = self.hvd.grouped_allreduce(sent, op=operation, name=name, ignore_name_scope=True)
        received = [value if value.dtype == dtype else tf.cast(value, dtype) for value in received]
        for value, tensor in zip(received, tensors, strict=True):
            value.set_shape(tensor.shape)
        return received

    def gather_sparse(self, slices: Any, name: str, size: int) -> Any:
        """The average of `IndexedSlices` over ranks: all slices, values divided by the number of ranks.

        Horovod's `grouped_allreduce` takes the wrong `dense_shape` when a list mixes dense and sparse
        tensors, so values and indices travel on their own here.
        """
        dtype = slices.values.dtype
        values = slices.values if dtype.name in REDUCIBLE else tf.cast(slices.values, tf.float32)
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
        """True only if `finite` is true on every rank."""
        flag = tf.reshape(tf.cast(finite, tf.int32), [1])
        with tf.device("CPU:0"):
            lowest = self.hvd.allreduce(flag, op=self.hvd.Min, name=name, ignore_name_scope=True)
        return tf.equal(lowest[0], 1)

    def in_branch(self) -> bool:
        """True while a `tf.cond` branch is being traced: ranks may take different branches."""
        graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
        return type(graph).__name__ == "CondBranchFuncGraph"


def _note(session: Any, words: Any) -> None:
    """Notes in the session whether a rank was preempted, or is to leave, so that no step reads a variable for it."""

    def noted() -> Any:
        with tf.control_dependencies([tf.numpy_function(session.note, tf.unstack(words), [])]):
            return tf.no_op()

    if not tf.executing_eagerly():
        tf.cond(tf.reduce_any(words > 0), noted, tf.no_op)
    elif tf.reduce_any(words > 0):
        session.note(*words)


def _timed(data: Any, waited: Any) -> Any:
    """The same data; what a step waits for each batch of it is added to a variable."""
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
