"""What a training loop does when ranks are gone: it discards the update under way, and its batch comes again.

How ranks go over to the next formation: `hvdtrain.comm.elastic`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from hvdtrain.comm import elastic, turns
from hvdtrain.core.errors import ConfigError, RanksLost
from hvdtrain.torch.update.session import Session, UpdateSnapshot, extras_of

RULE = "an elastic job must train one model with one optimizer, and be able to repeat a batch"


def check_elastic(session: Session) -> None:
    """Prepares for ranks that change, where the job is elastic; raises `ConfigError` if the model could not continue
    with other ranks."""
    if not elastic.ranks().may_change:
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
            f"the job needs {', '.join(wrong)}",
            "remove --min-np, --max-np and --host-discovery: --max-restarts resumes from the last checkpoint",
            shared=True,
        )
    session.before = UpdateSnapshot(session)


def check_once(session: Session) -> None:
    """Raises `ConfigError` for several updates of one batch, or a closure, where the job is elastic."""
    if session.before is not None:
        raise ConfigError(RULE, "several backward passes of one batch", "one backward() per batch", shared=True)


def go_on_without(session: Session, lost: RanksLost, *, joinable: bool = True) -> None:
    """Continues with the remaining ranks; the update under way is complete, if one of them has it, or discarded.
    `joinable`: nothing collective comes before the next batch. Raises the loss where the job is not elastic."""
    if session.before is None:
        raise lost
    elastic.ranks().regroup(lost, joinable=joinable)


def compared(session: Session, compare: Callable[[], None]) -> None:
    """Compares the replicas, unless ranks are lost over it: then they are made equal."""
    try:
        elastic.ranks().without_repeating(compare)
    except RanksLost as lost:
        go_on_without(session, lost, joinable=False)


def updated(session: Session, updates: int) -> None:
    """Notes that an update is in the weights; raises `ConfigError` for a scheduler that a discarded update would
    advance."""
    elastic.note_progress(updates)
    turns.updated(f"torch {session.engine.device.type}", partial(_few, session.module))
    elastic.ranks().updated()
    scheduled = any("initial_lr" in group for group in session.optimizer.param_groups)
    if elastic.ranks().may_change and scheduled and not extras_of(session):
        raise ConfigError(
            "an elastic job must be able to restore the scheduler when it repeats a batch",
            "a scheduler of torch.optim.lr_scheduler that no checkpointer knows",
            "prepare(..., lr=hvdtrain.LR(...)); or before the loop:\n"
            'checkpoints.on_preemption(hvt.model_state(model, optimizer, extra={"scheduler": scheduler}))',
            shared=True,
        )


def _few(module: torch.nn.Module) -> list[float]:
    """Returns some of the weights of each parameter."""
    parts = [p.detach().flatten()[:: p.numel() // 16 + 1].to("cpu", torch.float64) for p in module.parameters()]
    return torch.cat(parts).tolist()
