"""What DistributedDataParallel averages: the first pass after a call of the wrapped model, and nothing else."""

from __future__ import annotations

import libcst as cst

from hvdtrain.migrate.ddp.flow import Paths
from hvdtrain.migrate.ddp.models import Models
from hvdtrain.migrate.script import torch_calls, training
from hvdtrain.migrate.script.plan import Rewrite
from hvdtrain.migrate.script.source import calls, code, is_chain, literal, names_in, owner_of, tail, walk

_AVERAGES = "Horovod averages at the step, DistributedDataParallel in a backward() behind a call of the wrapped model"


def check_pass(plan: Rewrite, optimizers: training.Optimizers, models: Models, call: cst.Call) -> None:
    """`loss.backward()` stays as it is, where it is one that DistributedDataParallel averages after."""
    if training.refuse_arguments(plan, call):
        return
    source = plan.source
    steps = training.step_after(source, optimizers, call)
    if steps and training.is_of_one_rank(plan, optimizers, call, steps[0].optimizer):
        return
    if not _is_called_before(plan, models, call):
        plan.refuse(
            call,
            "no call of a wrapped model stands before this pass, in its loop, with gradients and on every way to it:"
            " DistributedDataParallel averages the first pass after one",
        )
        return
    if steps:
        training.note_clipping(plan, call, steps[0])
    passes = {optimizers.prepared[tail(steps[0].optimizer)]} if steps else set(optimizers.prepared.values())
    if passes <= {"", "1"} or _keep_back(plan, optimizers, models, call, steps):
        return
    if models.compressed:
        plan.refuse(
            call,
            "several passes an update, of which the last cannot be told, and compression: Horovod rounds their sum,"
            " DistributedDataParallel each of them",
        )
    else:
        plan.note(
            call,
            "each pass is averaged, which comes to the same: which is the last of an update cannot be told;"
            " `with model.no_sync():` around the others sends less",
        )


def _keep_back(
    plan: Rewrite, optimizers: training.Optimizers, models: Models, call: cst.Call, steps: list[training.OptimizerStep]
) -> bool:
    """Puts `no_sync` around a pass and its call of the model, unless it is the last of its update; whether it can."""
    source, statement = plan.source, plan.source.statement(call)
    if not steps or statement is None:
        return False
    trial = Rewrite(source, plan.module, plan.target)  # whose refusals are nobody's
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


def _is_called_before(plan: Rewrite, models: Models, backward: cst.Call) -> bool:
    """Whether on every way to a pass a wrapped model was called, with gradients, behind the pass before it."""
    passes = training.passes(plan.source)

    def event(call: cst.Call) -> str:
        if call in models.calls and not torch_calls.without_gradients(plan.source, call):
            return "call"
        return "pass" if call in passes else ""

    return Paths(plan.source, models.flow, event).before(backward) == {"call"}


def refuse_other_updates(plan: Rewrite, optimizers: training.Optimizers, models: Models) -> None:
    """Refuses what an optimizer steps with that no pass gave it."""
    passes = training.passes(plan.source)
    for node in walk(plan.source.module):
        if _sets_gradients(node):
            plan.refuse(node, f"gradients that are assigned: {_AVERAGES}")
        grown = owner_of(node, "add_param_group")
        if grown is not None and optimizers.knows(grown):
            plan.refuse(node, "add_param_group: DistributedDataParallel averages the wrapped model's parameters only")
    for step in calls(plan.source.module):
        if not (name := _stepped(optimizers, step)):
            continue

        def event(call: cst.Call, name: str = name) -> str:
            return "pass" if call in passes else "step" if _stepped(optimizers, call) == name else ""

        found = Paths(plan.source, models.flow, event).before(step)
        if "" in found or found == {"step"}:
            plan.refuse(step, f"a step that on some way to it has no backward() behind the step before: {_AVERAGES}")


def _stepped(optimizers: training.Optimizers, call: cst.Call) -> str:
    """The prepared optimizer that a call steps."""
    return next((name for name in map(tail, training.stepped(call)) if name in optimizers.prepared), "")


def _sets_gradients(node: cst.CSTNode) -> bool:
    """`p.grad = g`, `p.grad.copy_(g)` or the like; not None, which takes it away."""
    targets: list[cst.BaseExpression] = []
    if isinstance(node, cst.Assign) and literal(node.value) != "None":
        targets = [one.target for one in node.targets]
    elif isinstance(node, cst.Call) and code(node.func) == "setattr" and len(node.args) == 3:
        return code(node.args[1].value).strip("'\"") == "grad" and literal(node.args[2].value) != "None"
    elif (target := owner_of(node, "copy_", "set_")) is not None:
        targets = [target]
    for target in targets:
        while isinstance(target, cst.Subscript) or (isinstance(target, cst.Attribute) and tail(target) == "data"):
            target = target.value
        if isinstance(target, cst.Attribute) and tail(target) == "grad" and is_chain(target):
            return True
    return False


def _begins(plan: Rewrite, models: Models, backward: cst.Call) -> tuple[cst.CSTNode, str] | None:
    """The first statement that calls a model for a pass, and which; in the pass' block, and only one model."""
    statement = plan.source.statement(backward)
    found: list[tuple[cst.CSTNode, str]] = []
    for one in plan.source.block(statement) if statement is not None else ():
        found += [(one, code(call.func)) for call in calls(one) if call in models.calls]
        if one is statement:
            break
        if any(owner_of(call, "backward") is not None for call in calls(one)):
            found = []
    return found[0] if len({model for _, model in found}) == 1 else None


def refuse_freezing(plan: Rewrite, models: Models) -> None:
    """Horovod takes zeros for gradients that do not come; DistributedDataParallel waits for them."""
    for node in walk(plan.source.module):
        frozen = (
            isinstance(node, cst.Call)
            and tail(node.func) == "requires_grad_"
            and (node.args and literal(node.args[0].value) != "True")
        )
        if isinstance(node, cst.Assign):
            frozen = any(tail(one.target) == "requires_grad" for one in node.targets) and literal(node.value) != "True"
        if isinstance(node, cst.Call) and code(node.func) == "setattr" and len(node.args) == 3:
            frozen = "requires_grad" in code(node.args[1].value) and literal(node.args[2].value) != "True"
        if frozen and not _is_of_a_copy(plan, models, node) and not models.is_early(node):
            plan.refuse(
                node,
                "parameters that are frozen after they are wrapped: Horovod averages zeros for them, and"
                " DistributedDataParallel waits for their gradients",
            )


def _is_of_a_copy(plan: Rewrite, models: Models, node: cst.CSTNode) -> bool:
    """Whether what is frozen is a copy's, which nobody trains: in `for p in copy.parameters():`, or the whole."""
    source = plan.source
    loop = next((one for one in source.above(node) if isinstance(one, cst.For)), None)
    over = node.func if isinstance(node, cst.Call) else None
    if loop is not None and isinstance(loop.iter, cst.Call):
        names = names_in(loop.target)
        own = (node.func, *(arg.value for arg in node.args[:1])) if isinstance(node, cst.Call) else (
            one.target for one in node.targets) if isinstance(node, cst.Assign) else ()  # fmt: skip
        if any(code(one).split(".")[0] in names for one in own):
            over = loop.iter.func
    owner = models.flow.variable(over.value) if isinstance(over, cst.Attribute) else None
    made = [giver.site for giver in models.flow.givers[owner]] if owner is not None else []
    return bool(made) and all(
        isinstance(one, cst.Assign) and isinstance(one.value, cst.Call)
        and (source.qualified(one.value.func) or code(one.value.func)) == "copy.deepcopy"
        for one in made
    )  # fmt: skip
