"""Off Horovod to plain PyTorch: `DistributedDataParallel`, and functions of `torch.distributed`, under torchrun."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import libcst as cst

from hvdtrain.migrate.ddp.calls import HANDLERS, MODEL, REASONS, move_imports, move_init, names_taken
from hvdtrain.migrate.script import ranks, torch_calls, training, wrapping
from hvdtrain.migrate.script.plan import DDP, Rewrite
from hvdtrain.migrate.script.ranks import Arguments
from hvdtrain.migrate.script.source import bind, calls, code, find, is_chain, literal, walk

__all__ = ["move", "move_imports", "names_taken"]

_PREFIX = "horovod.torch."
# what horovodrun and mpirun set for each rank, and torchrun does not
_VARIABLES = re.compile("(HOROVOD|OMPI_COMM_WORLD|PMI|PMIX)_((LOCAL|CROSS|NODE)_)?(RANK|SIZE)")


def move(plan: Rewrite, imports: Sequence[cst.SimpleStatementLine]) -> None:
    """Converts all of a script but its imports."""
    if plan.framework != "torch":
        plan.refuse(imports[0], "DistributedDataParallel needs a script of horovod.torch; convert Keras --to hvdtrain")
        return
    for statement in imports:
        if statement not in plan.source.module.body:
            plan.refuse(statement, "Horovod must be imported at the top of the script to be converted --to ddp")
    move_init(plan)
    for string in find(plan.source.module, cst.SimpleString):
        if _VARIABLES.fullmatch(str(string.evaluated_value)):
            plan.refuse(string, f"torchrun does not set {code(string)}: it sets RANK, WORLD_SIZE and LOCAL_RANK")
    for node in walk(plan.source.module):
        if plan.source.qualified(node) == _PREFIX + "SyncBatchNorm":
            plan.needs.add("torch")
            plan.settle(node)
            plan.replace(node, "torch.nn.SyncBatchNorm")
    optimizers = _move_wraps(plan)
    optimizers.spread(plan.source)
    passes = training.passes(plan.source)
    if passes and set(optimizers.prepared.values()) - {"", "1"}:
        plan.note(
            passes[0],
            "each pass is averaged, which adds up to the same; `with model.no_sync():` around each pass and its call of"
            " the model, but for the last of an update, sends less",
        )
    wrapping.move_synchronize(plan, optimizers)
    ranks.move_rest(plan, torch_calls.movers(HANDLERS, REASONS), REASONS)


def _move_wraps(plan: Rewrite) -> training.Optimizers:
    """Converts every wrapped optimizer; returns the script's optimizers."""
    optimizers, models = training.Optimizers(), dict[str, wrapping.Wrap]()
    for call in plan.calls("DistributedOptimizer"):
        plan.settle(call.func)
        wrap = wrapping.read(plan, call)
        if wrap is None:
            continue
        wrap.know(plan.source, optimizers)
        if "True" in literal(wrap.arguments.get("sparse_as_dense")) or "sparse=True" in plan.source.module.code:
            plan.refuse(call, "sparse gradients: Horovod and DistributedDataParallel average them differently")
        if wrap.model in models and plan.source.function(models[wrap.model].call) is plan.source.function(call):
            plan.refuse(call, f"{wrap.model} has two optimizers: DistributedDataParallel cannot wrap a model twice")
        models[wrap.model] = wrap
        given = wrap.arguments.get("compression")
        if given is not None and plan.source.qualified(given) != _PREFIX + "Compression.none":
            plan.note(
                call, "float16: DistributedDataParallel divides, then adds; Horovod adds first: the last digits differ"
            )
        plan.needs |= {MODEL, "DistributedDataParallel"}
        plan.rewrite(wrap.statement, _wrapped(wrap))
        _move_questions(plan, wrap)
    return optimizers


def _move_questions(plan: Rewrite, wrap: wrapping.Wrap) -> None:
    """Makes `isinstance(model, Net)` test the plain model; otherwise the wrapped model acts like it."""
    for call in calls(plan.source.module):
        if code(call.func) != "isinstance" or not call.args or plan.source.is_above(call, wrap.call):
            continue
        model = call.args[0].value
        if is_chain(model) and code(model) == wrap.model:
            plan.replace(model, f'getattr({wrap.model}, "module", {wrap.model})')


def _wrapped(wrap: wrapping.Wrap) -> Any:
    def written(updated: Any) -> Sequence[str]:
        arguments = bind(updated.body[0].value, "DistributedOptimizer") or {}
        inner = code(arguments["optimizer"])
        optimizer = code(wrap.target) if wrap.target is not None else inner if is_chain(wrap.optimizer) else "optimizer"
        lines = wrap.ends(DDP) + ([f"{optimizer} = {inner}"] if inner != optimizer else [])
        lines.append(f"{wrap.model} = {MODEL}({wrap.model}, broadcast_buffers=False)")
        lines += _hook(wrap, arguments)
        return lines if wrap.target is not None else [*lines, f"return {optimizer}"]

    return written


def _hook(wrap: wrapping.Wrap, arguments: Arguments) -> list[str]:
    """Returns the lines that compress gradients on their way."""
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
