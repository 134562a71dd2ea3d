"""What one prepared model and its optimizer share, and how the learning rate is set."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from hvdtrain.checkpoint.parts import Part, Saver
from hvdtrain.checkpoint.staging import StateFile
from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.core.lr import LR
from hvdtrain.core.sharding import Step
from hvdtrain.torch.engines import buffers
from hvdtrain.torch.engines.base import Staged, TorchEngine
from hvdtrain.torch.engines.engine import engine_of
from hvdtrain.torch.engines.shell import is_compiled
from hvdtrain.torch.engines.sync_batchnorm import uncounting
from hvdtrain.torch.engines.zero import ZeroModel
from hvdtrain.torch.losses.loss_proof import LossProof
from hvdtrain.torch.update.amp import MixedPrecision
from hvdtrain.torch.update.batches import Batches
from hvdtrain.torch.update.gradients import Gradients
from hvdtrain.torch.update.in_step import TrackedModel
from hvdtrain.torch.update.nonfinite import Losses
from hvdtrain.torch.update.several import members_of
from hvdtrain.values.generators import random_streams
from hvdtrain.world.world import World

# by its model, so that preparing a model again, with another optimizer or other options, first takes off what the last
# one put on; held weakly on both sides: an optimizer refers to its model, and what the user drops is to be freed
prepared_optimizers: WeakKeyDictionary[nn.Module, ref[Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Options:
    """The options of `prepare`, which are the same on every rank."""

    accumulate: int = 1
    clip: float | None = None
    amp: Literal["bf16", "fp16"] | None = None
    compression: Literal["fp16", "bf16"] | None = None
    sync_batchnorm: bool = False
    channels_last: bool = False
    verify: bool = True
    watch_every: int = 0
    zero: int = 0


@dataclass(eq=False)
class Session:
    """A prepared model: the user's own objects (for a pipeline the module that it was made of), and their connection to
    the ranks."""

    world: World  # the ranks
    module: nn.Module
    optimizer: torch.optim.Optimizer
    options: Options
    engine_model: TrackedModel  # the module on the engine
    batches: Batches  # how much each batch counts
    per_rank_batch: int | None  # samples; None without a loader
    precision: MixedPrecision
    losses: Losses
    gradients: Gradients  # of the update being gathered
    proof: LossProof  # whether the loss can be put together of pieces
    staged: Staged | None = None  # the pipeline that runs the module's passes, if one does
    zero: ZeroModel | None = None  # the model on the engine, where ranks share out the optimizer's state
    compiled: bool = False  # the module runs as `torch.compile` made it
    rates: Rates | None = None  # sets the learning rate; None leaves it to the user
    last_call: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # arguments of the last training forward pass
    last_method: Callable[..., Any] | None = None  # the user's own that took them, in place of forward
    entered: bool = False  # the model was called, or a method of it, since the last backward pass
    saver: Saver | None = None  # what saves this training, if a checkpointer knows it
    before: UpdateSnapshot | None = None  # the state to restore if an update is discarded, in an elastic job
    _begun_with: dict[str, Any] | None = field(default=None, repr=False)  # random numbers, as an update began
    _empty_batch: ExitStack = field(default_factory=ExitStack, repr=False)

    @property
    def engine(self) -> TorchEngine:
        return engine_of(self.world)

    @property
    def preempted(self) -> bool:
        """Returns True if all ranks know that one was preempted."""
        return self.losses.preempted

    @property
    def leaves(self) -> bool:
        """Returns True if all ranks know that the ranks are about to change."""
        return self.losses.leaves

    @property
    def accumulate(self) -> int:
        return self.options.accumulate

    def handed_out(self, step: Step | None, batch: Any = None) -> None:
        """Follows the loader to a batch, or to its end (None). One that does not count leaves no trace in buffers,
        whatever part of the model runs on it."""
        self._empty_batch.close()
        if step is not None and torch.is_grad_enabled():
            begins(self)
        if self.before is not None and not self.gradients.gathering:
            self.before.note()
        if step is not None and step.padding:
            compiled = self.compiled or any(is_compiled(part) for part in self.module.modules())
            kept = buffers.preserved if compiled else buffers.unmoved_by_calls
            self._empty_batch.enter_context(kept(self.module))
            self._empty_batch.enter_context(uncounting(self.module))
        if step is not None and self.options.accumulate > 1 and (step.number == 0 or not self.gradients.gathering):
            self._begun_with = random_streams(self.world.devices)
        if step is not None and not step.padding and torch.is_grad_enabled() and self.staged is None:
            self.proof.begin(batch, self.batches.now())
        else:
            self.proof.forget()

    def streams(self) -> dict[str, Any]:
        """Returns the random numbers of a run that resumes with the weights of now: within an update, those it began
        with."""
        data = self.batches.data
        within = self.gradients.gathering and data is not None and data.running
        return (self._begun_with if within else None) or random_streams(self.world.devices)

    def samples_called(self) -> int:
        call = self.last_call
        tensors = [value for value in (call[0] if call else ()) if isinstance(value, Tensor) and value.dim()]
        return len(tensors[0]) if tensors else 0

    def sizes(self) -> str:
        """Returns what a step holds in memory, in words."""
        batch = str(self.per_rank_batch) if self.per_rank_batch else str(self.samples_called() or "unknown")
        options, staged = self.options, self.staged
        where = str(self.engine.device)
        if staged is not None:
            where = f"{', '.join(map(str, staged.devices))}, in {staged.micro_batches} micro-batches"
        return (
            f"rank {self.world.rank}: per_rank_batch {batch}, accumulate {options.accumulate}, amp {options.amp},"
            f" on {where}"
        )


_at_hand: ref[Session] | None = None


def begins(session: Session) -> None:
    """The session's loader has handed out a batch to train on, or its model was called for one."""
    global _at_hand
    _at_hand = ref(session)


def at_hand() -> Session | None:
    """Returns the session whose batch is at hand: of the loader that handed out the last one, unless another model was
    called since."""
    return None if _at_hand is None else _at_hand()


def session_of(module: nn.Module) -> Session | None:
    """Returns what ties a plain module to the ranks, if it was prepared."""
    optimizer = prepared_optimizers[module]() if module in prepared_optimizers else None
    session: Session | None = None if optimizer is None else optimizer.session
    return session


def not_finite(session: Session) -> list[str]:
    """Names parameters with a gradient that is not finite."""
    names = {id(parameter): name for name, parameter in session.module.named_parameters()}
    every = session.gradients.parameters()
    return [names[id(p)] for p in every if p.grad is not None and not torch.isfinite(p.grad).all()]


class Rates:
    """The rates of one optimizer, made with base rates: each group's own base, times the factor that the contract gives
    for a global batch. Raises `ConfigError` if no group has the contract's base rate, for example because a rate was
    scaled already."""

    def __init__(self, optimizer: torch.optim.Optimizer, lr: LR, global_batch: int) -> None:
        self._optimizer = optimizer
        self.lr = lr
        self.global_batch = global_batch
        self._bases = rates_of(optimizer)
        if not any(math.isclose(base, lr.base, rel_tol=1e-5) for base in self._bases):
            lr.check_optimizer(self._bases[0], global_batch)
        self._last: list[float] | None = None
        self._marks = _marks(optimizer)
        members = members_of(optimizer)
        self._refuse_scheduler(any(getattr(member.step, "_wrapped_by_lr_sched", False) for member in members))

    def apply(self, samples_seen: int) -> None:
        """Sets the rates of the update that begins after `samples_seen` samples; raises `ConfigError` if something
        else has set a rate since the last update, or is about to."""
        self._refuse_scheduler(_marks(self._optimizer)[: len(self._marks)] != self._marks)
        now = rates_of(self._optimizer)
        if self._last is not None and now[: len(self._last)] != self._last:
            raise ConfigError(
                "the learning rate cannot be set elsewhere with lr=: prepare(..., lr=...) sets it",
                f"it was set to {self._last}, and is now {now}",
                _SCHEDULES,
            )
        factor = self.lr.at(samples_seen, self.global_batch) / self.lr.base
        self._bases += now[len(self._bases) :]  # of groups that were added
        for group, base in zip(self._optimizer.param_groups, self._bases, strict=True):
            if isinstance(group["lr"], Tensor):  # of capturable optimizers
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor
        self._last = rates_of(self._optimizer)

    def forget(self) -> None:
        """Forgets the last rates, which a checkpoint has replaced; the next update sets them again."""
        self._last = None
        self._marks = _marks(self._optimizer)

    def _refuse_scheduler(self, found: bool) -> None:
        """Raises ConfigError if a scheduler was found, before it has changed a rate: some begin after many epochs."""
        if found:
            raise ConfigError(
                "prepare(..., lr=...) cannot be combined with a scheduler: both set the learning rate",
                "a scheduler of torch.optim.lr_scheduler was made for the same optimizer",
                _SCHEDULES,
                code=23,
            )


_SCHEDULES = (
    'remove the scheduler: LR(..., schedule="cosine" or "step", milestones=...) has schedules;\n'
    "or remove lr=, and keep the scheduler"
)


def _marks(optimizer: torch.optim.Optimizer) -> list[bool]:
    """Returns True for each group with an initial rate written by torch's schedulers, which do so at once."""
    return ["initial_lr" in group for group in optimizer.param_groups]


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


class UpdateSnapshot:
    """The state to restore if an update of this session is discarded: the user's loop still goes through its batch."""

    def __init__(self, of: Session) -> None:
        self._session = ref(of)
        self._buffers: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._rates: list[dict[str, Any]] = []
        self._extra: Mapping[str, bytes] = {}
        self._put_back = False
        self._batch: object = None
        self.losses: list[str] = []  # by what the last batch's were made
        self.expected: list[str] | None = None  # of a new process's first batch

    def look(self, loss: Tensor, batch: object) -> None:
        """Notes a loss that is about to be differentiated. Raises `ReplicaError` in a new process if the other ranks
        have made theirs otherwise."""
        if batch is not self._batch:
            self._batch, self.losses = batch, []
        made_by = loss.grad_fn.name() if loss.grad_fn is not None else ""
        self.losses.append(made_by)
        if self.expected and made_by not in self.expected:
            raise ReplicaError(
                "a new rank must train as the other ranks do",
                f"a loss made by {made_by}; on the other ranks by {', '.join(self.expected)}",
                "changes during training must depend on the epoch's number, not on an earlier epoch:\n"
                "`loss = b if epoch >= 1 else a`, not `if epoch == 1: loss = b`",
            )
        self.expected = None

    def note(self) -> None:
        """Notes that a batch is about to be handed out, between two updates."""
        session = self._session()
        assert session is not None
        buffers, groups = list(session.module.buffers()), session.optimizer.param_groups
        if self._put_back:
            self._put_back = False
            with torch.no_grad():
                for tensor, before in zip([*buffers, *session.module.parameters()], self._held(), strict=True):
                    tensor.copy_(before)
            for group, rates in zip(groups, self._rates, strict=True):
                group.update(rates)
            load(extras_of(session), self._extra)
            self._weights, self._extra = [], {}
        self._buffers = [buffer.detach().clone() for buffer in buffers]
        self._rates = [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def keep(self) -> None:
        """Has what the loop does on the batch at hand, which is discarded, undone before the next one."""
        session = self._session()
        assert session is not None
        self._put_back, self._extra = True, written(extras_of(session))
        self._weights = [parameter.detach().clone() for parameter in session.module.parameters()]

    def _held(self) -> list[Tensor]:
        return [*self._buffers, *self._weights]


def extras_of(session: Session) -> dict[str, Part]:
    """Returns the parts for what the user keeps beside model and optimizer, as far as a checkpointer knows it."""
    parts = {} if session.saver is None else session.saver.parts()
    return {name: part for name, part in parts.items() if name not in ("model.safetensors", "training.pt")}


def written(parts: Mapping[str, Part]) -> dict[str, bytes]:
    found = {}
    for name, part in parts.items():
        with StateFile(name, os.memfd_create(name)) as file:
            part.write(file)
            found[name] = os.pread(file.fileno(), file.size, 0)
    return found


def load(parts: Mapping[str, Part], files: Mapping[str, bytes]) -> None:
    """Loads what `written` gave, as far as it is there."""
    for name, part in parts.items():
        if name in files:
            with StateFile(name, os.memfd_create(name)) as file:
                file.write(files[name])
                part.check(Path(file.path))
                part.load(Path(file.path))
