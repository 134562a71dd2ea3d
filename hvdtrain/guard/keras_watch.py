"""What is watched of a script that trains with horovod.tensorflow or Keras: `fit`, or a loop with a tape.

A step is a call of a compiled function in which an optimizer's `apply` was traced, or an eager `apply`. Horovod's own
examples broadcast after the first step, so that the optimizer has its variables: the replicas are compared before and
after the second.
"""

from __future__ import annotations

import hashlib
import weakref
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from hvdtrain.comm.lines import user_line
from hvdtrain.guard.hooks import Hook, wrap
from hvdtrain.guard.session import GuardSession
from hvdtrain.world import same_data

_COLLECTIVE = (
    "allreduce", "grouped_allreduce", "allgather", "broadcast", "broadcast_variables", "broadcast_object",
    "allgather_object", "alltoall", "reducescatter", "barrier",
)  # fmt: skip
_BATCHES = (2, 3)  # steps whose inputs are compared


def hooks(session: GuardSession) -> dict[str, Hook]:
    """Returns what is to be done to each module when it is imported."""
    watch = KerasWatch(session)
    return {
        "keras.src.optimizers.base_optimizer": watch.optimizers,
        "tensorflow.python.eager.polymorphic_function.polymorphic_function": watch.functions,
        "horovod.tensorflow": watch.horovod,
        "horovod.tensorflow.keras": watch.front,
        "horovod.keras": watch.front,
    }


class KerasWatch:
    """Reports a model's weights around the updates of its optimizers."""

    def __init__(self, session: GuardSession) -> None:
        self._session = session
        self._numbers: dict[int, int] = {}  # by id: Keras compares optimizers' variables, not optimizers
        self._steps: dict[int, int] = {}
        self._variables: dict[int, tuple[Any, list[Any]]] = {}  # the optimizer, and what it updates
        self._in_function: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._traced: list[int] | None = None
        self._first: ExitStack | None = None  # what a function's first call runs inside of
        self._applying = 0
        self._tape = False
        self._compared: dict[int, int] = {}  # steps of each optimizer that ended with a comparison
        session.at_end.append(self._last)

    def optimizers(self, module: ModuleType) -> None:
        def made(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            optimizer.__dict__["_guard_line"] = user_line()
            return original(optimizer, *args, **kwargs)

        def applied(original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            if self._applying or not self._session.on:
                return original(optimizer, grads, trainable_variables)
            variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
            number = self._number(optimizer, variables)
            self._applying += 1
            try:
                if self._traced is not None:
                    self._traced.append(number)
                    if self._first is not None:  # it is a training step, which begins when it is traced
                        self._first.enter_context(self._session.collective("a training step"))
                        self._first = None
                    return original(optimizer, grads, variables)
                self._before([number])
                result = original(optimizer, grads, variables)
                self._after([number])
                return result
            finally:
                self._applying -= 1

        wrap(module.BaseOptimizer, "__init__", made)
        wrap(module.BaseOptimizer, "apply", applied)

    def functions(self, module: ModuleType) -> None:
        def called(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            if self._traced is not None or not self._session.on:
                return original(function, *args, **kwargs)
            known = self._in_function.get(function, [])
            self._traced = []
            try:
                if not known:
                    with ExitStack() as self._first:
                        result = original(function, *args, **kwargs)
                else:
                    self._before(known)
                    self._of_data(known[0], args)
                    with self._session.collective("a training step"):
                        result = original(function, *args, **kwargs)
                traced = sorted({*known, *self._traced})
            finally:
                self._traced = self._first = None
            if traced:
                self._in_function[function] = traced
                self._after(traced)
            return result

        wrap(module.Function, "__call__", called)

    def horovod(self, module: ModuleType) -> None:
        def tape(original: Any, *args: Any, **kwargs: Any) -> Any:
            self._tape = True
            return original(*args, **kwargs)

        self._broadcast_object = module.broadcast_object
        for name in _COLLECTIVE:
            wrap(module, name, self._collective)
        wrap(module, "join", self._session.joined)
        wrap(module, "DistributedGradientTape", tape)
        self._init(module)

    def front(self, module: ModuleType) -> None:
        """The Keras front doors: their functions call those of horovod.tensorflow, but for `init`."""
        if module.init.__module__.startswith("horovod.common"):
            self._init(module)

        def distributed(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            wrapped = original(optimizer, *args, **kwargs)
            if hasattr(wrapped, "__dict__"):
                wrapped.__dict__["_guard_line"] = user_line()
            return wrapped

        wrap(module, "DistributedOptimizer", distributed)

    def _init(self, module: ModuleType) -> None:
        def init(original: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._session.meet(
                module.rank(), module.size(), lambda x: self._broadcast_object(x, 0, name="hvdtrain.guard")
            )
            return result

        if "_guard" not in vars(module):
            wrap(module, "init", init)
            module.__dict__["_guard"] = True

    def _collective(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._traced is not None:
            return original(*args, **kwargs)
        return self._session.wrapped_collective(original, *args, **kwargs)

    def _number(self, optimizer: Any, variables: list[Any]) -> int:
        number = self._numbers.setdefault(id(optimizer), len(self._numbers))
        self._variables[number] = (optimizer, variables)  # kept, so that its id stays its own
        return number

    def _before(self, numbers: list[int]) -> None:
        for number in numbers:
            if self._steps.get(number) == 1:
                self._report(number, 2, "before")

    def _after(self, numbers: list[int]) -> None:
        session = self._session
        for number in numbers:
            steps = self._steps[number] = self._steps.get(number, 0) + 1
            session.stepped(f"Keras optimizer {number}")
            if steps == 2 or steps % session.every == 0:
                self._compared[number] = steps
                self._report(number, steps, "after")

    def _last(self) -> None:
        """Compares what has been updated since the last time."""
        for number, steps in self._steps.items():
            if steps > max(self._compared.get(number, 0), 1):
                self._report(number, steps, "after")

    def _report(self, number: int, step: int, when: str) -> None:
        session = self._session
        optimizer, variables = self._variables[number]
        own = getattr(optimizer, "_horovod", None)
        local = getattr(own, "_local", ())  # these are each rank's own
        native = [its.value if hasattr(its, "_value") else its for its in variables]  # TensorFlow's, of Keras'
        shared = [variable for variable in native if variable.ref() not in local]
        process_set = getattr(own, "_process_set", None)
        ranks = getattr(process_set, "ranks", None) or range(session.size)
        session.report(
            kind="weights", ranks=sorted(ranks), key=[f"keras {number}", session.joins, step, when],
            value=_fingerprint(shared), state="", settings="", line=user_line(),
            made=optimizer.__dict__.get("_guard_line", "?"), averaged=own is not None or self._tape,
            framework="tensorflow",
        )  # fmt: skip

    def _of_data(self, number: int, inputs: tuple[Any, ...]) -> None:
        step = self._steps.get(number, 0) + 1
        if step not in _BATCHES:
            return
        tensors = [value for value in inputs if hasattr(value, "numpy") and hasattr(value, "shape")]
        arrays = [array for tensor in tensors if (array := tensor.numpy()).ndim]
        if not arrays:
            return
        value = hashlib.blake2b(str(tuple(same_data.of_arrays(arrays))).encode(), digest_size=8).hexdigest()
        ranks, key = list(range(self._session.size)), [f"keras {number}", step - 1]
        self._session.report(kind="data", ranks=ranks, key=key, value=value, line=user_line())


def _fingerprint(variables: list[Any]) -> str:
    import numpy as np

    kinds = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
    arrays = [np.ascontiguousarray(variable.numpy()).reshape(-1) for variable in variables]
    sums = [int(array.view(kinds[array.itemsize]).sum(dtype=np.uint64)) for array in arrays]
    return hashlib.blake2b(repr(sums).encode(), digest_size=8).hexdigest()
