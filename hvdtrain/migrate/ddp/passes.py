"""Several backward passes an update: DistributedDataParallel averages after the last of them only."""

from __future__ import annotations

from collections.abc import Collection

import libcst as cst

from hvdtrain.migrate.script import training
from hvdtrain.migrate.script.plan import Rewrite
from hvdtrain.migrate.script.source import calls, code, names_in, owner_of, tail


def keep_back(plan: Rewrite, optimizers: training.Optimizers, models: Collection[str], call: cst.Call) -> None:
    """Puts `no_sync` around a pass and its call of the model, unless it is the last pass of its update.

    Args:
        plan: gets the change, or a note where the last pass is not known.
        optimizers: of the script.
        models: the last names of the wrapped models.
        call: `loss.backward()`.
    """
    steps = training.step_after(plan.source, optimizers, call)
    prepared = optimizers.prepared
    passes = {prepared.get(tail(steps[0].optimizer), "")} if steps else set(prepared.values())
    if passes <= {"", "1"} or _is_kept_back(plan, optimizers, models, call, steps):
        return
    plan.note(
        call,
        "each pass is averaged, which adds up to the same: which is the last of an update is not known;"
        " `with model.no_sync():` around the others sends less",
    )


def _is_kept_back(
    plan: Rewrite,
    optimizers: training.Optimizers,
    models: Collection[str],
    call: cst.Call,
    steps: list[training.OptimizerStep],
) -> bool:
    """Puts `no_sync` where it can; returns True if it could."""
    source, statement = plan.source, plan.source.statement(call)
    if not steps or statement is None:
        return False
    trial = Rewrite(source, plan.module, plan.target)  # its refusals are dropped
    more = training.more_passes(trial, optimizers, call, steps, code(steps[0].optimizer))
    begins = _begins(plan, models, call)
    if more is None or begins is None:
        return False
    first, model = begins
    test = more.removeprefix(", more=")
    block = source.block(statement)
    names = names_in(cst.parse_expression(test or "None"))
    if any(names & training.stored(one) for one in block[block.index(first) : block.index(statement) + 1]):
        return False
    text = f"with {model}.no_sync():"
    if test not in ("", "True"):
        plan.needs.add("contextlib")
        text = f"with {model}.no_sync() if {test} else contextlib.nullcontext():"
    if test:
        plan.around[first, statement] = text
    return True


def _begins(plan: Rewrite, models: Collection[str], backward: cst.Call) -> tuple[cst.CSTNode, str] | None:
    """Returns the first statement that calls a model for a pass, and the model; None: several, or in another block."""
    statement = plan.source.statement(backward)
    found: list[tuple[cst.CSTNode, str]] = []
    for one in plan.source.block(statement) if statement is not None else ():
        found += [(one, code(call.func)) for call in calls(one) if tail(call.func) in models]
        if one is statement:
            break
        if any(owner_of(call, "backward") is not None for call in calls(one)):
            found = []
    return found[0] if len({model for _, model in found}) == 1 else None
