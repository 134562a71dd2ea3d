"""What the adapter remembers about one prepared model: a `KerasSession`, shared by its optimizers' hooks and
callbacks.

It lives in `model.__dict__` and `optimizer.__dict__` under `KEY`, past the attribute tracking of Keras,
TensorFlow and torch: nothing of it reaches a config, a checkpoint or a saved model.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

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
# A rank that has no sample left takes part with a batch of one row that is none. Its sample weight says so: NaN, which
# shows in a step without our hooks; where there are no sample weights, a mask (bool): is this row a sample?
NO_SAMPLE = float("nan")


@dataclass(frozen=True)
class LiveBatch:
    """The batch in flight.

    Attributes:
        samples: this rank's.
        total: gives those of all ranks; waits for the sum the first time.
        calls: numbers the calls of synchronised layers, for the names of their sums.
    """

    samples: Any
    total: Callable[[], Any]
    calls: Iterator[int] = field(default_factory=itertools.count)


@dataclass
class KerasSession:
    """One prepared model (or optimizer that has not met its model yet).

    Attributes:
        world: the ranks.
        compression: `None` or `"fp16"`.
        sparse_as_dense: turn `IndexedSlices` into dense gradients before the reduction.
        sync_batchnorm: batch-norm layers normalise over all ranks; moments: each such layer, and how in this session
            it comes by mean and variance, None for its own way.
        verify: prove the averaging before the first step.
        watch_every: compare replicas every so many steps; 0 is never.
        lr, per_rank_batch: the learning-rate contract, and the batch it is computed from.
        write_on_main: callbacks that write files, which do so on rank 0 only.
        samples: of an epoch of the data that prepare() was given; 0: not known.
        by_samples: every loss so far divides by samples, so that ranks need no word about it in a step.
        together: batches of an evaluation are the ranks' parts of global batches.
        even: all ranks have as many of those batches.
        test_function: `model.test_function` for those.
        telling: this rank was preempted, as a step sends it (`notes` of the backend); told: all know that one was.
        saving: what writes this `fit`'s checkpoints.
        records, step_loss: steps are recorded: the loss of the last step's global batch.
        own_step: the model's class has a `train_step` of its own.
        logs: which metric's result a log of the model's steps is, by their names ("val_..." of a test step).
        raw: logs that are no metric's result.
        tries: the loss is tried after this step, on its batch (`kept_batch`); wants_batch: that is not kept yet.
        live: weight of the batch in flight; `None` outside a train step (then all ranks weigh the same).
        ready: the checks of this `fit` are done.
        wants_broadcast: the callbacks asked for rank 0's state before the next step.
        streams_set: every rank has its own random stream (done once, so that a second `fit` goes on).
        restored_random: random state that a checkpoint gave this rank, to be put in place when training
            starts; until then `fit` goes on where the checkpoint was taken.
        saves: this run writes checkpoints.
        clock: of a recorded run's phases; waited: seconds within steps that waited for data, a number or a variable.
        step_random: what this rank draws with Python's and numpy's generators within a train step.
        progress: where training stands, as counted or restored; the next `fit` goes on from there.
        fitting: `fit` runs, and has been checked; fitted: the `KerasLoader` that it reads; `None`: data that hvdtrain
            does not deal.
        kept_weights: behind an average that Keras wrote over them at the end of a `fit` (`moving_average.KeptWeights`).
        loaded: a checkpoint was loaded since the last `fit`.
        order: `KerasLoader.identity` of what the last `fit` read, or that a checkpoint told; `None`: not known.
        said: the notes that are said once.
        first_epoch: `initial_epoch` of this `fit`.
        executions: calls of the train function in this epoch; executed: in all.
        in_pieces: a batch's loss is put together of those of the ranks' parts; else only what layers add to it.
        stops_in_epoch: a stop within the epoch is shared (ranks ask each other after every step), or no `fit` runs.
        compared: what was compared over ranks in this `fit`: "step", or an optimizer's collectives.
        applying: the hooked optimizer is at work, with those it holds.
        proving: trial updates are made.
        first_batch: numbers of the first batch; `False` until there is one, `None` if it is not needed.
        proof: the result of the last verification.
        changing: of an elastic job's `fit`: its part in it (`hvdtrain.keras.changing`).
        whole: `compute_loss` sees the global batch; joined: this step has gathered it; own: this rank's rows of
            what was gathered, by its id; of_whole: the loss that is being computed is of it.
    """

    world: World
    compression: str | None = None
    sparse_as_dense: bool = False
    verify: bool = True
    watch_every: int = 0
    lr: LR | None = None
    per_rank_batch: int | None = None
    samples: int = 0
    write_on_main: WeakSet[Any] = field(default_factory=WeakSet)
    sync_batchnorm: bool = False
    moments: list[tuple[Any, Any]] = field(default_factory=list)
    name: str = field(init=False)
    live: LiveBatch | None = None
    attached: bool = False
    by_samples: bool = True
    together: bool = False
    even: bool = False
    test_function: Any = None
    own_step: bool = False
    logs: dict[str, str] = field(default_factory=dict)
    raw: set[str] = field(default_factory=set)
    kept_batch: Any = None
    wants_batch: Any = None
    tries: bool = False
    in_pieces: bool = True
    telling: Any = None
    told: bool = False
    saving: Saver | None = None
    records: bool = False
    step_loss: Any = None
    ready: bool = False
    wants_broadcast: bool = False
    streams_set: bool = False
    restored_random: Mapping[str, np.ndarray] | None = None
    saves: bool = False
    step_random: OwnRandom | None = None
    progress: Progress = field(default_factory=Progress)
    fitting: bool = False
    fitted: Any = None
    clock: Clock = field(default_factory=Clock)
    waited: Any = 0.0
    kept_weights: Any = None
    loaded: bool = False
    order: str | None = None
    said: set[str] = field(default_factory=set)
    first_epoch: int = 0
    executions: int = 0
    executed: int = 0
    stops_in_epoch: bool = True
    compared: set[str] = field(default_factory=set)
    applying: bool = False
    proving: bool = False
    first_batch: Any = None
    proof: Any = None
    changing: Any = None
    whole: bool = False
    joined: bool = False
    own: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    of_whole: bool = False

    def __post_init__(self) -> None:
        # Names the collectives: ranks prepare their models in the same order (checked at start). Counted on what joins
        # the ranks, so that all who have joined have counted as far.
        self.name = f"hvdtrain.{next(vars(self.world.comm).setdefault(KEY, itertools.count()))}"

    @property
    def alone(self) -> bool:
        return self.world.size == 1 and elastic.active() is None

    @property
    def ranks(self) -> Any:
        """Their number, as traced functions have it where it may change."""
        return self.world.size if self.changing is None else self.changing.size.read_value()

    def leaving(self) -> list[Any]:
        """What a step tells the others besides `telling`."""
        return [] if self.changing is None else [self.changing.leaving.read_value()]

    def note(self, told: Any, leaves: Any = 0) -> None:
        """A step has come to know that ranks were preempted, or are about to change."""
        self.told = self.told or bool(told > 0)
        if leaves > 0:
            self.changing.leaves = True

    def say(self, text: str, *, once: str = "") -> None:
        """Prints a note, on rank 0; one that has a name (`once`) the first time only."""
        if self.world.is_main and once not in self.said:
            print(f"hvdtrain: {text}", flush=True)
            if once:
                self.said.add(once)


def session_of(target: Any) -> KerasSession | None:
    """Returns the session of a model or an optimizer; `None` if it was not prepared."""
    return vars(target).get(KEY) if target is not None else None


def optimizers_of(model: keras.Model) -> list[Any]:
    """Returns the outermost optimizers of a model: `model.optimizer`, then others that it or one of its layers
    keeps, as attributes or in dicts, lists and tuples (GANs).
    """
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


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """Returns nested data with each leaf as the function makes it; `None` stays."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), data)


@contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """While open, calls of `owner.name` are calls of `function`, which is given the original first."""
    original = getattr(owner, name)
    setattr(owner, name, _around(original, function))
    try:
        yield
    finally:
        setattr(owner, name, original)


def first_made(kind: type, made: Callable[[Any], None]) -> AbstractContextManager[None]:
    """While open, `made` is called with the first object of this kind."""
    left = [made]

    def make(init: Callable[..., None], it: Any, *args: Any, **kwargs: Any) -> None:
        init(it, *args, **kwargs)
        if left:
            left.pop()(it)

    return replaced(kind, "__init__", make)


def hook(owner: Any, name: str, function: Callable[..., Any]) -> bool:
    """The same for good, on this one object; once. Returns whether it was not done before."""
    code = getattr(getattr(function, "func", function), "__code__", None)  # of a partial, or a method
    fresh = name not in vars(owner)
    if fresh:
        vars(owner)[name] = _around(getattr(owner, name), function)
        vars(owner)[name].hooked = code
    assert getattr(vars(owner)[name], "hooked", code) is code, f"{name} is hooked by something else"
    return fresh


def _around(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return replacement


def require_keras(target: Any) -> None:
    """Raises `ConfigError` for what is no model or optimizer of Keras 3."""
    if isinstance(target, (keras.Model, keras.optimizers.Optimizer)):
        return
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(target).__mro__]
    old = any(kind.startswith(("tf_keras.", "tensorflow.python.keras.")) for kind in kinds)
    raise ConfigError(
        "hvdtrain.keras trains models of Keras 3 (keras.Model) and their optimizers",
        kinds[0] + (" of Keras 2" if old else ""),
        "build it with `import keras` (tf.keras, without TF_USE_LEGACY_KERAS), not tf_keras"
        if old
        else "give the compiled model, or its optimizer",
    )


def require_compiled(model: Any) -> None:
    """Raises `ConfigError` for a model without optimizer."""
    if getattr(model, "optimizer", None) is None:
        raise ConfigError(
            "a model is prepared after compile()",
            f"{type(model).__name__} {getattr(model, 'name', '')!r} without an optimizer",
            "call model.compile(optimizer=..., loss=...) first, or prepare the optimizer itself",
        )


def is_stock(optimizer: Any) -> bool:
    """True for an optimizer made by `horovod.keras.DistributedOptimizer`, of our wheel or of another."""
    return hasattr(optimizer, "_horovod") or hasattr(optimizer, "_allreduce_grads")


def missing_hook(model_name: str, optimizer: Any) -> ReplicaError:
    """The error for an optimizer whose gradients are not averaged."""
    kind = type(optimizer)
    if is_stock(optimizer):
        return ReplicaError(
            "gradients are averaged by hvdtrain, and not by Horovod's own Keras wrapper beside it (which does not do so"
            " under Keras 3, unless its wheel is of hvdtrain's recipe)",
            f"{kind.__name__} from horovod.DistributedOptimizer",
            "give compile() the plain optimizer, then hvdtrain.keras.prepare(model)",
            shared=True,
        )
    return ReplicaError(
        "gradients must be averaged over ranks: the optimizer that trains must be prepared",
        f"{kind.__name__} {optimizer.name!r} of model {model_name!r} is not (load_model, clone_model, from_config and"
        " another compile() give a new optimizer)",
        "call hvdtrain.keras.prepare(model) after the last compile() or load, before fit(); an optimizer beside"
        " model.optimizer must be an attribute of the model or of a layer by then, or in a dict or list there",
        shared=True,
    )


HOOKS = ("apply", "check_finite", "_clip_gradients")


def is_hooked(optimizer: Any) -> bool:
    """True if this optimizer's `apply` averages over ranks."""
    return KEY in vars(optimizer) and "apply" in vars(optimizer)


def is_built(model: keras.Model) -> bool:
    """True if every layer of the model has its variables.

    By call() a model is built unless it has none, or has parts that its own train_step calls, as a GAN has: what it
    trains on need not be what its call() takes.
    """
    parts = all(layer.built for layer in model._flatten_layers(include_self=False))
    kind = type(model)
    of_parts = kind.train_step is not keras.Model.train_step and kind.build is keras.Model.build
    return parts and (bool(model.built) or of_parts or kind.call is keras.Model.call)
