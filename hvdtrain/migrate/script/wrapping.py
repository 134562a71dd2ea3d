"""Turns `hvd.DistributedOptimizer` and the broadcasts around it into one `hvt.prepare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from hvdtrain.migrate.script.plan import HVDTRAIN, Rewrite, Target, condition_above, made_of, target_of
from hvdtrain.migrate.script.source import (
    SIGNATURES,
    Script,
    bind,
    calls,
    code,
    find,
    is_chain,
    literal,
    owner_of,
    tail,
    walk,
)
from hvdtrain.migrate.script.training import Optimizers

_NORM = "horovod.torch.SyncBatchNorm"
_BROADCASTS = ("horovod.torch.broadcast_parameters", "horovod.torch.broadcast_optimizer_state")
_ENDS = 'if {}:\n    raise SystemExit("{} averages gradients, and has no Adasum")'
# how gradients travel, which changes nothing but the time it takes
_OF_NO_MATTER = ("num_groups", "groups", "gradient_predivide_factor", "named_parameters", "sparse_as_dense")


@dataclass
class Wrap:
    """An optimizer that is wrapped."""

    call: cst.Call  # the call of DistributedOptimizer
    statement: cst.SimpleStatementLine  # the statement that it is in
    target: cst.BaseExpression | None  # the name it is assigned to; None if it is returned
    model: str  # the model whose parameters it has, as text
    optimizer: cst.BaseExpression  # the plain one
    arguments: dict[str, cst.BaseExpression]  # those of the call
    adasum: str = ""  # the condition under which it asks for Adasum, as text; "" for never
    extra: list[str] = field(default_factory=list)  # more arguments of `hvt.prepare`

    @property
    def name(self) -> cst.BaseExpression:
        """Returns the name of the optimizer from here on."""
        return self.optimizer if self.target is None else self.target

    def ends(self, target: Target) -> list[str]:
        """Returns the statement that ends a script where it asks for Adasum."""
        return [_ENDS.format(self.adasum, target.title)] if self.adasum else []

    def know(self, source: Script, optimizers: Optimizers) -> None:
        """Adds it to the script's optimizers."""
        passes = self.arguments.get("backward_passes_per_step")
        if is_chain(self.optimizer):
            optimizers.wrapped.add(tail(self.optimizer))
        if self.target is not None:
            optimizers.prepared[tail(self.target)] = literal(passes)
        elif isinstance(function := source.function(self.call), cst.FunctionDef):
            optimizers.makers[function.name.value] = {-1: literal(passes)}


def move_wraps(plan: Rewrite) -> Optimizers:
    """Converts every wrapped optimizer of a script; returns the script's optimizers."""
    source, optimizers = plan.source, Optimizers()
    norms = _norms(plan)
    for call in plan.calls("DistributedOptimizer"):
        plan.settle(call.func)
        wrap = read(plan, call)
        if wrap is None:
            continue
        if norms is not None and source.function(norms[0]) is source.function(call):
            choice, first = norms  # the model is built of plain layers, which `hvt.prepare` synchronises
            plan.settle(choice)
            plan.replace(choice, code(choice.orelse if first else choice.body))
            wrap.extra.append(f"sync_batchnorm={code(choice.test) if first else f'not ({code(choice.test)})'}")
        wrap.know(source, optimizers)
        function = source.function(call)
        parameters = find(function.params, cst.Param) if isinstance(function, cst.FunctionDef) else ()
        if wrap.target is not None and any(one.name.value == wrap.model for one in parameters):
            plan.note(
                call,
                f"{wrap.model} is prepared in a function, whose caller keeps the plain one, which is trained all the"
                f" same; but hvdtrain sees less of its loss: return {wrap.model}, and call what is returned",
            )
        _place(plan, wrap)
    return optimizers


def _move_questions(plan: Rewrite, adasum: str) -> None:
    """Turns `if args.use_adasum and hvd.nccl_built()`, as of Horovod's examples, into the first alone."""
    for node in find(plan.source.module, cst.BooleanOperation):
        if isinstance(node.operator, cst.And):
            asked = isinstance(node.right, cst.Call) and plan.source.qualified(node.right.func)
            if code(node.left) == adasum and asked == "horovod.torch.nccl_built":
                plan.settle(node.right)
                plan.replace(node, adasum)


def _norms(plan: Rewrite) -> tuple[cst.IfExp, bool] | None:
    """Returns the only `hvd.SyncBatchNorm if ... else nn.BatchNorm2d` of a script, and True if the first is Horovod's;
    None if there is another use."""
    source = plan.source
    wraps = plan.calls("DistributedOptimizer")
    uses = [node for node in walk(source.module) if source.qualified(node) == _NORM]
    if len(wraps) != 1 or len(uses) != 1:
        return None
    choice = source.parent(uses[0])
    if not isinstance(choice, cst.IfExp) or "horovod." in "".join(map(source.qualified, walk(choice.test))):
        return None
    first = choice.body is uses[0]
    other = choice.orelse if first else choice.body
    return (choice, first) if source.qualified(other).startswith("torch.nn.BatchNorm") else None


def read(plan: Rewrite, call: cst.Call) -> Wrap | None:
    """Returns what a call of DistributedOptimizer wraps; None, and refuses it, if that is not known."""
    source = plan.source
    statement = source.statement(call)
    target, value = target_of(statement)
    named = target is None or is_chain(target)
    if value is not call or not named or not isinstance(statement, cst.SimpleStatementLine):
        plan.refuse(call, "DistributedOptimizer must be assigned to one name, or returned")
        return None
    if (above := condition_above(source, call)) is not None:
        what = type(above).__name__.lower()
        plan.refuse(
            call,
            f"the optimizer is wrapped within `{what}`: move it out, {plan.target.wrap} also works on one process",
        )
        return None
    arguments = bind(call, "DistributedOptimizer")
    if (
        arguments is None
        or "optimizer" not in arguments
        or set(arguments) - set(SIGNATURES["DistributedOptimizer"].split())
    ):
        plan.refuse(call, "the arguments of DistributedOptimizer are not known")
        return None
    if not _check_arguments(plan, call, arguments):
        return None
    model = _model(source, statement, arguments)
    if model is None:
        plan.refuse(call, "the model of these parameters is not known: write named_parameters=model.named_parameters()")
        return None
    op = arguments.get("op")
    adasum = None if op is None else _adasum_test(source, op)
    if adasum:
        _move_questions(plan, adasum)
    return Wrap(call, statement, target, model, arguments["optimizer"], arguments, adasum or "")


def _adasum_test(source: Script, op: cst.BaseExpression) -> str | None:
    """Returns the condition under which `hvd.Adasum if ... else hvd.Average` is Adasum; None of anything else."""
    if not isinstance(op, cst.IfExp) or "horovod." in "".join(map(source.qualified, walk(op.test))):
        return None
    one, other = (source.qualified(part).removeprefix("horovod.torch.") for part in (op.body, op.orelse))
    return {("Adasum", "Average"): code(op.test), ("Average", "Adasum"): f"not ({code(op.test)})"}.get((one, other))


def _check_arguments(plan: Rewrite, call: cst.Call, arguments: dict[str, cst.BaseExpression]) -> bool:
    """Returns True if each argument is kept, or changes no weights; refuses the others."""
    right = True
    op = arguments.get("op")
    if op is not None:
        plan.settle(op)
        if _adasum_test(plan.source, op) is not None:
            plan.note(op, f"where Adasum is asked for, the new script ends: {plan.target.title} averages gradients")
        elif plan.source.qualified(op) != "horovod.torch.Average":
            what = "Adasum" if "Adasum" in code(op) else code(op)
            plan.refuse(op, f"op={what}: {plan.target.wrap} averages gradients over ranks, and does nothing else")
            right = False
    process_set = arguments.get("process_set")
    if process_set is not None:
        plan.settle(process_set)
        if plan.source.qualified(process_set) != "horovod.torch.global_process_set":
            plan.refuse(process_set, f"a process set: {plan.target.title} here trains one model on all ranks")
            right = False
    for name in _OF_NO_MATTER:
        if name in arguments:
            plan.settle(arguments[name])
    return right


def _model(source: Script, statement: cst.SimpleStatementLine, arguments: dict[str, cst.BaseExpression]) -> str | None:
    """Returns the model, as text, by its named parameters, or by those that the optimizer was made of."""
    named = made_of(source, arguments.get("named_parameters"), statement)
    if (found := _owner(named, "named_parameters")) is not None:
        return found
    if "named_parameters" in arguments and code(arguments["named_parameters"]) != "None":
        return None
    made = made_of(source, arguments["optimizer"], statement)
    if isinstance(made, cst.Call) and made.args:
        return _owner(made.args[0].value, "parameters")
    return None


def _owner(node: cst.BaseExpression | None, method: str) -> str | None:
    """Returns `model` of `model.parameters()`, also within list(...)."""
    if isinstance(node, cst.Call) and code(node.func) in ("list", "iter", "tuple") and len(node.args) == 1:
        node = node.args[0].value
    if not isinstance(node, cst.Call) or any(literal(arg.keyword) != "prefix" for arg in node.args):
        return None
    inner = owner = owner_of(node, method)
    while isinstance(inner, cst.Subscript):
        inner = inner.value
    return code(owner) if owner is not None and is_chain(inner) else None


def _place(plan: Rewrite, wrap: Wrap) -> None:
    """Puts `hvt.prepare` where the last of the broadcasts before training stands, and takes these away."""
    source = plan.source
    block = list(source.block(wrap.statement))
    at = block.index(wrap.statement)
    target = code(wrap.name)
    texts = {target, code(wrap.optimizer)}
    end = next((i for i, one in enumerate(block) if i > at and _may_train(source, one)), len(block))
    theirs = [i for i in range(end) if (call := _broadcast(source, block[i])) and _is_of(plan, call, wrap.model, texts)]
    last = max([at, *theirs])
    between = [one for i, one in enumerate(block) if at < i < last and i not in theirs]
    if wrap.target is None or not any(_touches(source, one, {wrap.model, *texts}) for one in between):
        last = at
    for index in theirs:
        call = _broadcast(source, block[index])
        assert call is not None
        others = [one for i, one in enumerate(block) if index < i < last and i not in (at, *theirs)]
        if not any(_reads(source, one, wrap.model) for one in others):  # else it stays, as one of the state
            plan.settle(call)
            plan.remove(block[index])
    parts: dict[str, Any] = {}
    plan.needs.add("hvt")
    if last == at:
        plan.rewrite(wrap.statement, lambda updated: _prepare(wrap, updated, parts))
        return

    def stays(updated: Any) -> Sequence[str]:
        ends = _prepare(wrap, updated, parts)[:-1]
        return ends if parts["optimizer"] == target else [*ends, f"{target} = {parts['optimizer']}"]

    plan.rewrite(wrap.statement, stays)
    moved = block[last]
    plan.rewrite(moved, lambda _: [_written(wrap.model, target, target, parts["extra"])])


def _broadcast(source: Script, statement: cst.CSTNode) -> cst.Call | None:
    """Returns the broadcast that a statement is, or None."""
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        [small] = statement.body
        if isinstance(small, cst.Expr) and isinstance(small.value, cst.Call):
            return small.value if source.qualified(small.value.func) in _BROADCASTS else None
    return None


def _is_of(plan: Rewrite, call: cst.Call, model: str, optimizers: set[str]) -> bool:
    """Returns True if a broadcast sends rank 0's state of this model or its optimizer."""
    name = plan.source.qualified(call.func).split(".")[-1]
    arguments = plan.bind(call, name)
    if literal(arguments.get("root_rank")) not in ("0", ""):
        return False
    if name == "broadcast_optimizer_state":
        return literal(arguments.get("optimizer")) in optimizers
    return model in (_owner(arguments.get("params"), one) for one in ("state_dict", "named_parameters", "parameters"))


def _may_train(source: Script, statement: cst.CSTNode) -> bool:
    """Returns True if weights may change while a statement runs: it steps, or calls a function of the script."""
    own = source.definitions()
    return any(
        owner_of(call, "backward", "step") is not None or tail(call.func) in own for call in calls(statement, now=True)
    )


def _reads(source: Script, statement: cst.CSTNode, model: str) -> bool:
    """Returns True if a statement may use a model's weights, as a copy does; not if it makes an optimizer of it."""
    own = source.definitions()
    _, value = target_of(statement)
    if isinstance(value, cst.Call) and source.qualified(value.func).startswith("torch.optim."):
        return False
    return any(is_chain(node) and code(node) == model for node in walk(statement)) or any(
        isinstance(call.func, cst.Name) and call.func.value in own for call in calls(statement)
    )


def _touches(source: Script, statement: cst.CSTNode, texts: set[str]) -> bool:
    """Returns True if a statement may change the model or its optimizer, or needs the wrapped one; not if it makes a
    scheduler."""
    if isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
        return False
    _, value = target_of(statement)
    if isinstance(value, cst.Call) and source.qualified(value.func).startswith("torch.optim.lr_scheduler."):
        return False
    return any(is_chain(node) and code(node) in texts for node in walk(statement))


def _prepare(wrap: Wrap, updated: Any, parts: dict[str, Any]) -> Sequence[str]:
    """Returns the statements in place of the wrapping one; `parts` gets what they are made of."""
    [small] = updated.body
    arguments = bind(small.value, "DistributedOptimizer")
    assert arguments is not None
    extra = list(wrap.extra)
    if "compression" in arguments and code(arguments["compression"]) != "None":
        extra.append(f"compression={code(arguments['compression'])}")
    parts.update(optimizer=code(arguments["optimizer"]), extra=extra)
    ends = wrap.ends(HVDTRAIN)
    if wrap.target is not None:
        return [*ends, _written(wrap.model, code(wrap.target), parts["optimizer"], extra)]
    optimizer = parts["optimizer"] if is_chain(wrap.optimizer) else "optimizer"
    return [*ends, _written(wrap.model, optimizer, parts["optimizer"], extra), f"return {optimizer}"]


def _written(model: str, target: str, optimizer: str, extra: Sequence[str]) -> str:
    line = f"{model}, {target} = hvt.prepare({', '.join([model, optimizer, *extra])})"
    if len(line) <= 100 and "\n" not in line:
        return line
    return (
        f"{model}, {target} = hvt.prepare(\n" + "".join(f"    {part},\n" for part in [model, optimizer, *extra]) + ")"
    )


def move_synchronize(plan: Rewrite, optimizers: Optimizers) -> None:
    """Removes `synchronize()` and `skip_synchronize()`: gradients are averaged when backward returns."""
    around: list[cst.CSTNode] = []
    for node in walk(plan.source.module):
        if isinstance(node, cst.With) and len(node.items) == 1:
            call = node.items[0].item
            if _is_method(call, "skip_synchronize", optimizers):
                around.append(call)
                plan.statements[node] = _unwrapped
        elif _is_method(node, "skip_synchronize", optimizers) and node not in around:
            plan.refuse(node, "optimizer.skip_synchronize() must be all that a `with` has")
        elif _is_method(node, "synchronize", optimizers):
            statement = plan.source.statement(node)
            if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
                plan.remove(statement)
            else:
                plan.refuse(node, "optimizer.synchronize() must be a line of its own")


def _is_method(call: cst.CSTNode, name: str, optimizers: Optimizers) -> bool:
    owner = owner_of(call, name)
    return owner is not None and tail(owner) in optimizers.prepared


def _unwrapped(updated: Any) -> Sequence[Any]:
    body = list(updated.body.body)
    if isinstance(updated.body, cst.SimpleStatementSuite):
        body = [cst.SimpleStatementLine(list(updated.body.body))]
    body[0] = body[0].with_changes(leading_lines=[*updated.leading_lines, *body[0].leading_lines])
    return body
