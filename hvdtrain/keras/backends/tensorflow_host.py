"""What the TensorFlow backend of Keras does outside of a step: host arrays, variables, devices, random state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.comm.engines import losses_in
from hvdtrain.world import same_data
from hvdtrain.world.same_data import PRIME

_HIDDEN_RANDOM = {
    "Multinomial", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoissonV2", "RandomShuffle",
    "RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal",
}  # fmt: skip
_INTEGER_OF_WIDTH = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


class OutsideOfSteps:
    """The part of `TensorFlowBackend` that takes and gives arrays of the host, or is about the process."""

    @property
    def hvd(self) -> Any:
        """`horovod.tensorflow`, imported when the first collective needs it (one process needs none)."""
        import horovod.tensorflow as hvd

        return hvd

    # ---------------------------------------------------------------- host side
    def host_allreduce(self, array: np.ndarray, op: str, name: str) -> np.ndarray:
        """Reduces a host array over ranks. `op`: `sum` | `min` | `max`."""
        operation = {"sum": self.hvd.Sum, "min": self.hvd.Min, "max": self.hvd.Max}[op]
        return _on_host(self.hvd.allreduce, array, f"allreduce.{op}", op=operation)

    def host_broadcast(self, array: np.ndarray, root: int, name: str) -> np.ndarray:
        return _on_host(self.hvd.broadcast, array, f"broadcast.{root}", root_rank=root)

    def host_allgather(self, array: np.ndarray, name: str) -> np.ndarray:
        """Concatenates the ranks' arrays along axis 0 (lengths may differ)."""
        return _on_host(self.hvd.allgather, array, "allgather")

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Leaves a function that is being traced: variables made inside are real ones, for which TensorFlow does not
        trace it a second time.
        """

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
        return _rank_losses()

    def checksums(self, variables: Sequence[Any]) -> np.ndarray:
        """One int64 per variable, of its bits and their order."""
        return np.array([self._checksum(variable) for variable in variables], np.int64)

    def _checksum(self, variable: Any) -> int:
        """A dozen operations of TensorFlow's, called one by one, take longer than numpy with millions of numbers."""
        small = int(np.prod(variable.shape)) <= 1 << 22
        return same_data.checksum(self.to_numpy(variable)) if small else int(_checksum(variable.value))

    def make_checksums(self, variables: Sequence[Any]) -> Callable[[], np.ndarray]:
        """`checksums` as a function to be called often: traced once, one launch, one transfer to the
        host.
        """

        @tf.function(autograph=False)
        def checksums() -> Any:
            return tf.stack([_checksum(variable.value) for variable in variables])

        return lambda: checksums().numpy()

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


def _rank_losses() -> AbstractContextManager[None]:
    """Says what it means when Horovod gives up: TensorFlow has no error of its own for it."""
    words = ("Horovod", "gloo", "node hvdtrain.")
    kinds = (tf.errors.UnknownError, tf.errors.AbortedError, tf.errors.FailedPreconditionError)
    return losses_in(*kinds, told_by=lambda error: any(word in str(error.message) for word in words))


_host_operations: dict[tuple[str, str], Any] = {}


def _on_host(operation: Callable[..., Any], array: np.ndarray, kind: str, **options: Any) -> np.ndarray:
    """Runs one of Horovod's operations on an array [n], outside of whatever is being traced.

    Through a `tf.function`: called eagerly, Horovod's operations ignore their names, and all-reduces pair with
    whichever other one a rank happens to be in. One function for each kind and dtype; a name of its own for each call
    would be traced each time.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        value = tf.constant(array)
        key = (kind, value.dtype.name)
        if key not in _host_operations:
            name = f"hvdtrain.host.{kind}.{value.dtype.name}"

            @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], value.dtype)])
            def run(sent: Any) -> Any:
                with tf.device("CPU:0"):
                    return operation(sent, name=name, ignore_name_scope=True, **options)

            _host_operations[key] = run
        with _rank_losses():
            return _host_operations[key](value).numpy()


def _checksum(value: Any) -> Any:
    """The elements' bits as integers, each times an odd number that belongs to its place, modulo 2**64."""
    value = tf.reshape(value, [-1])
    bits = tf.cast(value, tf.int8) if value.dtype == tf.bool else tf.bitcast(value, _INTEGER_OF_WIDTH[value.dtype.size])
    places = tf.range(1, tf.size(bits, out_type=tf.int64) + 1, dtype=tf.int64) * PRIME
    factors = tf.bitwise.bitwise_xor(places, tf.bitwise.right_shift(places, tf.constant(29, tf.int64))) * PRIME
    return tf.reduce_sum(tf.cast(bits, tf.int64) * tf.bitwise.bitwise_or(factors, tf.constant(1, tf.int64)))
