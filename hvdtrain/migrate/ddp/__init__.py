"""Off Horovod to plain PyTorch: `DistributedDataParallel`, and functions of `torch.distributed`, under torchrun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst

from hvdtrain.migrate.ddp import start, updates
from hvdtrain.migrate.ddp.calls import HANDLERS, REASONS, move_imports, move_init, names_taken
from hvdtrain.migrate.ddp.models import Models
from hvdtrain.migrate.script import ranks, torch_calls, training, wrapping
from hvdtrain.migrate.script.plan import DDP, Rewrite
from hvdtrain.migrate.script.ranks import Arguments
from hvdtrain.migrate.script.source import bind, code, is_chain, literal, walk

__all__ = ["move", "move_imports", "names_taken"]

_PREFIX = "horovod.torch."


def move(plan: Rewrite, imports: Sequence[cst.SimpleStatementLine]) -> None:
    """Moves all of a script but its imports."""
    if plan.framework != "torch":
        plan.refuse(
            imports[0], "DistributedDataParallel trains scripts of horovod.torch: one of Keras is moved --to hvdtrain"
        )
        return
    for statement in imports:
        if statement not in plan.source.module.body:
            plan.refuse(statement, "Horovod is imported at the top of the script where it is moved off it")
    move_init(plan)
    start.refuse_variables(plan)
    for node in walk(plan.source.module):
        if plan.source.qualified(node) == _PREFIX + "SyncBatchNorm":
            plan.needs.add("torch")
            plan.settle(node)
            plan.replace(node, "torch.nn.SyncBatchNorm")
    optimizers, models = _move_wraps(plan)
    optimizers.spread(plan.source)
    torch_calls.refuse_in_losses(plan)
    if optimizers.prepared:
        for call in training.passes(plan.source):
            updates.check_pass(plan, optimizers, models, call)
        training.refuse_other_passes(plan)
        updates.refuse_other_updates(plan, optimizers, models)
        for call in training.closures(plan.source, optimizers):
            plan.refuse(call, "step(closure): Horovod averages before the closure runs, and its ranks part")
        wrapping.move_synchronize(plan, optimizers)
    ranks.move_rest(plan, torch_calls.movers(HANDLERS, REASONS), REASONS)


def _move_wraps(plan: Rewrite) -> tuple[training.Optimizers, Models]:
    optimizers, models = training.Optimizers(), Models(plan)
    for call in plan.calls("DistributedOptimizer"):
        plan.settle(call.func)
        wrap = wrapping.read(plan, call)
        if wrap is None:
            continue
        wrap.know(plan.source, optimizers)
        start.check_start(plan, wrap)
        if "True" in literal(wrap.arguments.get("sparse_as_dense")) or "sparse=True" in plan.source.module.code:
            plan.refuse(call, "sparse gradients: Horovod averages them otherwise than DistributedDataParallel")
        given = wrap.arguments.get("compression")
        if given is not None and plan.source.qualified(given) != _PREFIX + "Compression.none":
            models.compressed |= literal(given) != "None"
            plan.note(
                call, "float16: DistributedDataParallel divides, then adds; Horovod adds first: the last digits differ"
            )
        models.follow(wrap)
        plan.needs.add("DistributedDataParallel")
        plan.rewrite(wrap.statement, _wrapped(wrap))
    models.settle()
    updates.refuse_freezing(plan, models)
    return optimizers, models


def _wrapped(wrap: wrapping.Wrap) -> Any:
    def written(updated: Any) -> Sequence[str]:
        arguments = bind(updated.body[0].value, "DistributedOptimizer") or {}
        inner = code(arguments["optimizer"])
        optimizer = code(wrap.target) if wrap.target is not None else inner if is_chain(wrap.optimizer) else "optimizer"
        lines = wrap.ends(DDP) + ([f"{optimizer} = {inner}"] if inner != optimizer else [])
        lines.append(f"{wrap.model} = DistributedDataParallel({wrap.model}, broadcast_buffers=False)")
        lines += _hook(wrap, arguments)
        return lines if wrap.target is not None else [*lines, f"return {optimizer}"]

    return written


def _hook(wrap: wrapping.Wrap, arguments: Arguments) -> list[str]:
    """How gradients travel, where they are compressed."""
    given = literal(arguments.get("compression"))
    if given in ("", "None"):
        return []
    registers = f"{wrap.model}.register_comm_hook(None, {{}})"
    if given == DDP.words["fp16"]:
        return [registers.format(given)]
    choice = arguments["compression"]
    if isinstance(choice, cst.IfExp) and (code(choice.body), code(choice.orelse)) == (DDP.words["fp16"], "None"):
        return [f"if {code(choice.test)}:\n    {registers.format(DDP.words['fp16'])}"]
    return [f"if {given} is not None:\n    {registers.format(given)}"]
