"""What a training loop does when ranks are gone: the update under way is left out, and its batch comes once more.

How ranks go over to the next formation: `hvdtrain.comm.elastic`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from hvdtrain.checkpoint.parts import Part
from hvdtrain.checkpoint.staging import StateFile
from hvdtrain.comm import elastic, turns
from hvdtrain.core.errors import ConfigError, RanksLost, ReplicaError

if TYPE_CHECKING:
    from hvdtrain.torch.update.session import Session

OWN = ("model.safetensors", "training.pt")
RULE = "an elastic job trains one model and its optimizer, in a loop that can do a batch once more"


class Before:
    """What an update of this session that is discarded must not have changed: the user's loop goes through its batch
    all the same."""

    def __init__(self, of: Session) -> None:
        self._session = ref(of)
        self._buffers: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._rates: list[dict[str, Any]] = []
        self._extra: Mapping[str, bytes] = {}
        self._put_back = False
        self._batch: object = None
        self.losses: list[str] = []  # by what the last batch's were made
        self.expected: list[str] | None = None  # of a new process's first batch

    def look(self, loss: torch.Tensor, batch: object) -> None:
        """Notes a loss that is about to be differentiated. Raises `ReplicaError` in a new process if the other ranks
        have made theirs otherwise."""
        if batch is not self._batch:
            self._batch, self.losses = batch, []
        made_by = loss.grad_fn.name() if loss.grad_fn is not None else ""
        self.losses.append(made_by)
        if self.expected and made_by not in self.expected:
            raise ReplicaError(
                "a new rank trains as the others do, whatever they have done before",
                f"a loss made by {made_by}, theirs by {', '.join(self.expected)}",
                "what changes while a model trains must follow from the epoch, not from an epoch that has passed:"
                " `loss = b if epoch >= 1 else a`, not `if epoch == 1: loss = b`",
            )
        self.expected = None

    def note(self) -> None:
        """A batch is about to be handed out, between two updates."""
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
        """The batch at hand is left out: what it does besides is undone before the next one."""
        session = self._session()
        assert session is not None
        self._put_back, self._extra = True, written(extras_of(session))
        self._weights = [parameter.detach().clone() for parameter in session.module.parameters()]

    def _held(self) -> list[torch.Tensor]:
        return [*self._buffers, *self._weights]


def extras_of(session: Session) -> dict[str, Part]:
    """Returns the parts for what the user keeps beside model and optimizer, as far as a checkpointer knows it."""
    parts = {} if session.saver is None else session.saver.parts()
    return {name: part for name, part in parts.items() if name not in OWN}


def written(parts: Mapping[str, Part]) -> dict[str, bytes]:
    """Returns the files of these parts."""
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


def check_elastic(session: Session) -> None:
    """Prepares for ranks that change, where the job is elastic; raises `ConfigError` if the model could not go on
    with other ranks."""
    if elastic.active() is None:
        return
    reasons = {
        "prepare(model, optimizer, train), with a loader": session.batches.data is None,
        "a model in one piece": session.staged is not None,
        "sync_batchnorm=False": session.options.sync_batchnorm,
    }
    wrong = [need for need, lacks in reasons.items() if lacks]
    if wrong:
        raise ConfigError(
            RULE,
            f"it needs {', '.join(wrong)}",
            "leave --min-np, --max-np and --host-discovery out: --max-restarts goes on from the last checkpoint",
            shared=True,
        )
    session.before = Before(session)


def check_once(session: Session) -> None:
    """Raises `ConfigError` for several updates of one batch, or a closure, where the job is elastic."""
    if session.before is not None:
        raise ConfigError(
            RULE, "a batch that is differentiated several times", "one backward() and step() a batch", shared=True
        )


def go_on_without(session: Session, lost: RanksLost, *, joinable: bool = True) -> None:
    """Goes on with the ranks that are left; the update under way is complete, if one of them has it, or left out.
    `joinable`: nothing collective comes before the next batch. Raises the loss where the job is not elastic."""
    its = elastic.active()
    if its is None or session.before is None:
        raise lost
    its.regroup(lost, joinable=joinable)


def compared(session: Session, compare: Callable[[], None]) -> None:
    """Compares the replicas, unless ranks are lost over it: then they are made equal."""
    its = elastic.active()
    if its is None:
        compare()
        return
    try:
        its.without_repeating(compare)
    except RanksLost as lost:
        go_on_without(session, lost, joinable=False)


def updated(session: Session, updates: int) -> None:
    """Notes that an update is in the weights; raises `ConfigError` for a scheduler that an update that is left out
    would move on."""
    its = elastic.active()
    elastic.note_progress(updates)
    turns.updated(f"torch {session.engine.device.type}", partial(_few, session.module))
    if its is not None:
        its.updated()
        if not extras_of(session) and any("initial_lr" in group for group in session.optimizer.param_groups):
            raise ConfigError(
                "a batch may be done once more in an elastic job: a scheduler must then be put back",
                "a scheduler of torch.optim.lr_scheduler that no checkpointer knows",
                "prepare(..., lr=hvdtrain.LR(...)); or checkpoints.on_preemption(hvt.model_state(model, optimizer,"
                ' extra={"scheduler": scheduler})) before the loop',
                shared=True,
            )


def _few(module: torch.nn.Module) -> list[float]:
    """Some of the weights of each parameter."""
    parts = [p.detach().flatten()[:: p.numel() // 16 + 1].to("cpu", torch.float64) for p in module.parameters()]
    return torch.cat(parts).tolist()
