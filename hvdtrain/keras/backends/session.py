"""What hvdtrain keeps of one prepared model: a `KerasSession`, which its optimizers' hooks and its callbacks share.

It lives in `model.__dict__` and `optimizer.__dict__` under `KEY`, past the attribute tracking of Keras,
TensorFlow and torch: nothing of it reaches a config, a checkpoint or a saved model.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from hvdtrain.checkpoint.parts import Progress, Saver
from hvdtrain.comm import elastic
from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.core.generators import OwnRandom
from hvdtrain.core.lr import LR
from hvdtrain.record.clock import Clock
from hvdtrain.world.world import World

KEY = "_hvdtrain"
# A padding rank takes part in a step with a batch of one row that is no sample. Its sample weight shows it: NaN, which
# shows in a step without our hooks; where there are no sample weights, a mask (bool): is this row a sample?
NO_SAMPLE = float("nan")


@dataclass(frozen=True)
class Prepared:
    """The ranks of a prepared model, and the options of `prepare`."""

    world: World
    compression: str | None = None  # or "fp16"
    sparse_as_dense: bool = False
    verify: bool = True
    watch_every: int = 0  # steps; 0 is never
    lr: LR | None = None
    per_rank_batch: int | None = None  # which the learning rate is computed from
    samples: int = 0  # of an epoch of the data that prepare() was given; 0: not known
    sync_batchnorm: bool = False
    whole: bool = False
    name: str = field(init=False)  # of the model's collectives
    clock: Clock = field(default_factory=Clock)  # of a recorded run's phases
    printed: set[str] = field(default_factory=set)  # notes that are printed once

    def __post_init__(self) -> None:
        # Ranks prepare their models in the same order (checked at start). Counted on what joins the ranks, so that all
        # who have joined have counted as far.
        numbers = vars(self.world.comm).setdefault(KEY, itertools.count())
        object.__setattr__(self, "name", f"hvdtrain.{next(numbers)}")

    @property
    def alone(self) -> bool:
        return self.world.size == 1 and not elastic.ranks().may_change

    def say(self, text: str, *, once: str = "") -> None:
        """Prints a note, on rank 0; one that has a name (`once`) the first time only."""
        if self.world.is_main and once not in self.printed:
            print(f"hvdtrain: {text}", flush=True)
            if once:
                self.printed.add(once)


@dataclass
class TrainingPlace:
    """The point that training has reached; it lasts from one `fit` to the next."""

    progress: Progress = field(default_factory=Progress)  # counted or restored; the next `fit` resumes there
    executions: int = 0  # calls of the train function in this epoch
    order: str | None = None  # `KerasLoader.identity` of what the last `fit` read, or of a checkpoint; None: not known
    streams_set: bool = False  # every rank has its own random stream, which a second `fit` continues
    step_random: OwnRandom | None = None  # Python's and numpy's generators of this rank within a train step
    restored_random: Mapping[str, np.ndarray] | None = None  # of a checkpoint, until training starts from it
    callbacks: Sequence[Any] = ()  # of the last `fit`
    restored_counts: Mapping[tuple[str, int], Any] | None = None  # of its callbacks, until training starts from them
    restored_metrics: Sequence[np.ndarray] = ()  # of this rank, of a checkpoint within an epoch
    saves: bool = False  # this run writes checkpoints
    records: bool = False  # it writes steps to a run log
    preempted: bool = False  # all ranks know that one of them was
    elastic: Any = None  # the `elastic_fit.ElasticFit` of an elastic job


@dataclass
class RunningFit:
    """The `fit` that runs, from its checks to its end."""

    runs: bool = False  # False outside of `fit`
    data: Any = None  # the `KerasLoader` that it reads; None: data that hvdtrain does not deal
    saving: Saver | None = None  # what writes its checkpoints
    stops_in_epoch: bool = True  # ranks share a stop after every step, or no `fit` runs


@dataclass
class LiveBatch:
    """A step under way, and its batch."""

    samples: Any  # this rank's
    total: Callable[[], Any]  # gives those of all ranks; waits for the sum the first time
    even: bool | None = None  # in an evaluation: all ranks have as many batches; None in a train step
    calls: Iterator[int] = field(default_factory=itertools.count)  # of synchronised layers, to name their sums
    own: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # this rank's rows of what `whole` joined, by its id
    of_whole: bool = False  # the loss that is being computed is of the global batch
    applying: bool = False  # a hooked optimizer is at work, with those it holds

    @property
    def joined(self) -> bool:
        """Returns True if this step has gathered the global batch."""
        return bool(self.own)


@dataclass
class Proofs:
    """The checks that were made, and their results."""

    ready: bool = False  # the checks of this `fit` are done
    wants_broadcast: bool = False  # the callbacks asked for rank 0's state before the next step
    proof: Any = None  # the result of the last verification
    compared: set[str] = field(default_factory=set)  # over ranks in this `fit`: "step", or an optimizer's collectives
    undealt: bool = False  # the data of this `fit` may be the same on all ranks: the first batches are compared
    executed: int = 0  # calls of the train function, in all
    by_samples: bool = True  # every loss so far divides by samples: ranks need not exchange what it divides by
    # which metric's result a log of a step is, by their names ("val_..." of a test step); None: of none
    metric_of: dict[str, str | None] = field(default_factory=dict)


@dataclass
class KerasSession:
    """A prepared model (or an optimizer that has not met its model yet), as records grouped by their lifetime."""

    prepared: Prepared
    place: TrainingPlace = field(default_factory=TrainingPlace)
    fit: RunningFit = field(default_factory=RunningFit)
    proofs: Proofs = field(default_factory=Proofs)
    live: LiveBatch | None = None  # the step under way; outside of one all ranks weigh the same
    notes: Any = None  # what steps send and keep (`BACKEND.notes`); None before there is a model
    joint: bool | None = None  # `even` of the evaluation that runs
    test_functions: dict[bool | None, Any] = field(default_factory=dict)  # the model's traced ones, by `joint`
    moments: list[tuple[Any, Any]] = field(default_factory=list)  # each batch-norm layer, with its hook or None

    @property
    def ranks(self) -> Any:
        """Their number, as traced functions have it where it may change."""
        return self.prepared.world.size if self.place.elastic is None else self.place.elastic.size.read_value()

    def words(self) -> list[Any]:
        """Returns what a step sends to the other ranks: was this rank preempted, is it about to leave?"""
        its = self.place.elastic
        return [self.notes.preempted.read_value(), *([] if its is None else [its.leaving.read_value()])]

    def receive(self, preempted: Any, leaves: Any = 0) -> None:
        """Takes the sums of all ranks' `words`."""
        self.place.preempted = self.place.preempted or bool(preempted > 0)
        if leaves > 0:
            self.place.elastic.leaves = True


def session_of(target: Any) -> KerasSession | None:
    """Returns the session of a model or an optimizer; `None` if it was not prepared."""
    return vars(target).get(KEY) if target is not None else None


def optimizers_of(model: keras.Model) -> list[Any]:
    """Returns the outermost optimizers that a model or one of its layers holds; `model.optimizer` is the first."""
    kept = [vars(part) for part in (model, *model._flatten_layers(include_self=False))]
    candidates = _optimizers_in([getattr(model, "optimizer", None), *kept], depth=5)
    found = {id(optimizer): optimizer for optimizer in candidates}
    held = {id(leaf) for optimizer in found.values() for leaf in leaves_of(optimizer) if leaf is not optimizer}
    return [optimizer for key, optimizer in found.items() if key not in held]


def _optimizers_in(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, keras.optimizers.Optimizer):
        yield value
    elif depth and isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _optimizers_in(item, depth - 1)


_SEVERAL = getattr(keras.optimizers, "MultiOptimizer", ())  # from Keras 3.15 on


def leaves_of(optimizer: Any) -> list[Any]:
    """Returns the optimizers that do the updates: inside `LossScaleOptimizer` and `MultiOptimizer`."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return leaves_of(optimizer.inner_optimizer)
    if isinstance(optimizer, _SEVERAL):
        return [leaf for inner in optimizer.optimizers for leaf in leaves_of(inner)]
    return [optimizer]


def lr_not_applied(prepared: Prepared, optimizer: Any) -> str:
    """Returns the part of a report that lr= is not applied; an empty text without lr=."""
    rate = None if prepared.lr is None else float(keras.ops.convert_to_numpy(leaves_of(optimizer)[0].learning_rate))
    return "" if rate is None else f"; lr=LR(...) is not applied, the rate stays {rate:g}"


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """Returns nested data with each leaf as the function makes it; `None` stays."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), data)


@contextmanager
def while_set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an attribute another value while open."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def replaced(owner: Any, name: str, function: Callable[..., Any]) -> AbstractContextManager[None]:
    """Makes calls of `owner.name` calls of `function` while open, which is given the original first."""
    return while_set(owner, name, _around(getattr(owner, name), function))


def first_made(kind: type, made: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Calls `made` with the first object of this kind while open."""
    left = [made]

    def make(init: Callable[..., None], it: Any, *args: Any, **kwargs: Any) -> None:
        init(it, *args, **kwargs)
        if left:
            left.pop()(it)

    return replaced(kind, "__init__", make)


def hook(owner: Any, name: str, function: Callable[..., Any]) -> bool:
    """Puts `function` around a method of this one object, permanently and once. Returns True the first time."""
    if name in vars(owner):
        return False
    vars(owner)[name] = _around(getattr(owner, name), function)
    return True


def _around(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return replacement


def require_keras(target: Any) -> None:
    """Raises `ConfigError` for what is no model or optimizer of Keras 3."""
    if isinstance(target, (keras.Model, keras.optimizers.Optimizer)):
        return
    raise ConfigError(
        "hvdtrain.keras needs a model of Keras 3 (keras.Model) or its optimizer",
        f"{type(target).__module__}.{type(target).__qualname__}",
        "give the compiled model, or its optimizer; build it with `import keras` (tf_keras, and tf.keras with\n"
        "TF_USE_LEGACY_KERAS, are Keras 2)",
    )


def require_compiled(model: Any) -> None:
    """Raises `ConfigError` for a model without optimizer."""
    if getattr(model, "optimizer", None) is None:
        raise ConfigError(
            "a model must be compiled before it is prepared",
            f"{type(model).__name__} {getattr(model, 'name', '')!r} without an optimizer",
            "call model.compile(optimizer=..., loss=...) first, or prepare the optimizer itself",
            code=24,
        )


def is_stock(optimizer: Any) -> bool:
    """Returns True for an optimizer made by `horovod.keras.DistributedOptimizer`, of our wheel or of another."""
    return hasattr(optimizer, "_horovod") or hasattr(optimizer, "_allreduce_grads")


def missing_hook(model_name: str, optimizer: Any) -> ReplicaError:
    """Returns the error for an optimizer whose gradients are not averaged."""
    kind = type(optimizer)
    if is_stock(optimizer):
        return ReplicaError(
            "an optimizer of Horovod's own Keras wrapper cannot be used: hvdtrain averages the gradients",
            f"{kind.__name__} from horovod.DistributedOptimizer\n"
            "(under Keras 3 it averages no gradients, unless hvdtrain's recipe built its wheel)",
            "give compile() the plain optimizer, then hvdtrain.keras.prepare(model)",
            shared=True,
            code=26,
        )
    return ReplicaError(
        "gradients must be averaged over ranks: the optimizer that trains must be prepared",
        f"{kind.__name__} {optimizer.name!r} of model {model_name!r} is not prepared\n"
        "(load_model, clone_model, from_config and another compile() give a new optimizer)",
        "call hvdtrain.keras.prepare(model) after the last compile() or load, and before fit();\n"
        "a second optimizer must be an attribute of the model or of a layer by then",
        shared=True,
        code=25,
    )


HOOKS = ("apply", "check_finite", "_clip_gradients")


def is_hooked(optimizer: Any) -> bool:
    """Returns True if this optimizer's `apply` averages over ranks."""
    return KEY in vars(optimizer) and "apply" in vars(optimizer)


def has_own_step(model: keras.Model) -> bool:
    """Returns True if the model's class has a `train_step` of its own."""
    return type(model).train_step is not keras.Model.train_step


def is_built(model: keras.Model) -> bool:
    """Returns True if every layer has its variables; a model of parts for its own train_step need not be called."""
    parts = all(layer.built for layer in model._flatten_layers(include_self=False))
    kind = type(model)
    of_parts = has_own_step(model) and kind.build is keras.Model.build
    return parts and (bool(model.built) or of_parts or kind.call is keras.Model.call)
