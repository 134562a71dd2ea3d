"""Turns `hvd.DistributedOptimizer` and the broadcasts beside it into one `hvt.prepare`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst

from hvdtrain.migrate.script.plan import Rewrite, arguments_of, condition_above, made_of, target_of
from hvdtrain.migrate.script.source import (
    Script,
    Statement,
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

_BROADCASTS = ("horovod.torch.broadcast_parameters", "horovod.torch.broadcast_optimizer_state")
_ENDS = 'if {}:\n    raise SystemExit("hvdtrain averages gradients, and has no Adasum")'
# how gradients travel, which changes nothing but the time it takes
_OF_NO_MATTER = ("num_groups", "groups", "gradient_predivide_factor", "named_parameters", "sparse_as_dense")


@dataclass
class Wrap:
    """An optimizer that is wrapped."""

    statement: cst.SimpleStatementLine  # the statement that it is in
    target: cst.BaseExpression | None  # the name it is assigned to; None if it is returned
    model: str  # the model whose parameters it has, as text
    arguments: dict[str, cst.BaseExpression]  # those of the call
    adasum: str = ""  # the condition under which it asks for Adasum, as text; "" for never

    @property
    def optimizer(self) -> cst.BaseExpression:
        """Returns the plain one."""
        return self.arguments["optimizer"]

    @property
    def name(self) -> cst.BaseExpression:
        """Returns the name of the optimizer from here on."""
        return self.optimizer if self.target is None else self.target


def move_wraps(plan: Rewrite) -> Optimizers:
    """Converts every wrapped optimizer of a script; returns the script's optimizers."""
    source, optimizers = plan.source, Optimizers()
    for call in plan.calls("DistributedOptimizer"):
        plan.settle(call.func)
        wrap = read(plan, call)
        if wrap is None:
            continue
        optimizers.wrapped[tail(wrap.name)] = literal(wrap.arguments.get("backward_passes_per_step"))
        function = source.function(call)
        parameters = find(function.params, cst.Param) if isinstance(function, cst.FunctionDef) else ()
        if wrap.target is not None and any(one.name.value == wrap.model for one in parameters):
            plan.note(
                call,
                f"{wrap.model} is prepared in a function, whose caller keeps the plain one, which is trained all the"
                f" same; but hvdtrain sees less of its loss: return {wrap.model}, and call what is returned",
            )
        plan.needs.add("hvt")
        plan.rewrite(wrap.statement, functools.partial(_prepare, wrap))
        _remove_broadcasts(plan, wrap)
    optimizers.read(source)
    return optimizers


def _move_questions(plan: Rewrite, adasum: str) -> None:
    """Turns `if args.use_adasum and hvd.nccl_built()`, as of Horovod's examples, into the first alone."""
    for node in find(plan.source.module, cst.BooleanOperation):
        if isinstance(node.operator, cst.And):
            asked = isinstance(node.right, cst.Call) and plan.source.qualified(node.right.func)
            if code(node.left) == adasum and asked == "horovod.torch.nccl_built":
                plan.settle(node.right)
                plan.replace(node, adasum)


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
            f"the optimizer is wrapped within `{what}`: move it out, hvt.prepare also works on one process",
        )
        return None
    arguments = arguments_of(plan, call, "DistributedOptimizer")
    if arguments is None or (adasum := _adasum(plan, arguments)) is None:
        return None
    model = _model(source, statement, arguments)
    if model is None:
        plan.refuse(call, "the model of these parameters is not known: write named_parameters=model.named_parameters()")
        return None
    for name in _OF_NO_MATTER:
        plan.settle(arguments.get(name))
    return Wrap(statement, target, model, arguments, adasum)


def _adasum(plan: Rewrite, arguments: dict[str, cst.BaseExpression]) -> str | None:
    """Returns the condition under which Adasum is asked for, as text; "" for never; None, and refuses it, for another
    operation."""
    op = arguments.get("op")
    plan.settle(op)
    if op is None or plan.source.qualified(op) == "horovod.torch.Average":
        return ""
    if isinstance(op, cst.IfExp) and "horovod." not in "".join(map(plan.source.qualified, walk(op.test))):
        both = [plan.source.qualified(part).removeprefix("horovod.torch.") for part in (op.body, op.orelse)]
        if sorted(both) == ["Adasum", "Average"]:
            plan.note(op, "where Adasum is asked for, the new script ends: hvdtrain averages gradients")
            test = code(op.test) if both[0] == "Adasum" else f"not ({code(op.test)})"
            _move_questions(plan, test)
            return test
    what = "Adasum" if "Adasum" in code(op) else code(op)
    plan.refuse(op, f"op={what}: hvt.prepare averages gradients over ranks, and does nothing else")
    return None


def _model(source: Script, statement: cst.SimpleStatementLine, arguments: dict[str, cst.BaseExpression]) -> str | None:
    """Returns the model, as text, by its named parameters, or by those that the optimizer was made of."""
    named = made_of(source, arguments.get("named_parameters"), statement)
    if (found := _owner(named, "named_parameters")) is not None and "optimizer" in arguments:
        return found
    if "named_parameters" in arguments and code(arguments["named_parameters"]) != "None":
        return None
    made = made_of(source, arguments.get("optimizer"), statement)
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


def _remove_broadcasts(plan: Rewrite, wrap: Wrap) -> None:
    """Removes the broadcasts beside a wrapping line, which `hvt.prepare` makes; no call may stand between them."""
    block = plan.source.block(wrap.statement)
    at = block.index(wrap.statement)
    for beside in (block[:at][::-1], block[at + 1 :]):
        for statement in beside:
            call = _broadcast(plan, wrap, statement)
            if call is not None:
                plan.settle(call)
                plan.remove(statement)
            elif any(True for _ in calls(statement)):
                break


def _broadcast(plan: Rewrite, wrap: Wrap, statement: Statement) -> cst.Call | None:
    """Returns the broadcast of rank 0's model or optimizer that a statement is, or None."""
    [small] = statement.body if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1 else [None]
    call = small.value if isinstance(small, cst.Expr) else None
    if not isinstance(call, cst.Call) or (name := plan.source.qualified(call.func)) not in _BROADCASTS:
        return None
    arguments = plan.bind(call, name.removeprefix(plan.prefix))
    given = arguments.get("optimizer", arguments.get("params"))
    ours = {code(wrap.name), code(wrap.optimizer), f"{wrap.model}.state_dict()", f"{wrap.model}.named_parameters()"}
    return call if literal(arguments.get("root_rank")) in ("0", "") and literal(given) in ours else None


def _prepare(wrap: Wrap, updated: Any) -> Sequence[str]:
    """Returns the statements in place of the wrapping one."""
    [small] = updated.body
    arguments = bind(small.value, "DistributedOptimizer") or {}
    optimizer = code(arguments["optimizer"])
    parts = [wrap.model, optimizer]
    if literal(arguments.get("compression")) not in ("", "None"):
        parts.append(f"compression={code(arguments['compression'])}")
    target = code(wrap.name) if is_chain(wrap.name) else "optimizer"
    line = f"{wrap.model}, {target} = hvt.prepare({', '.join(parts)})"
    if len(line) > 100 or "\n" in line:
        inner = "".join(f"    {part},\n" for part in parts)
        line = f"{wrap.model}, {target} = hvt.prepare(\n{inner})"
    ends = [_ENDS.format(wrap.adasum)] if wrap.adasum else []
    return [*ends, line, *[f"return {target}"] * (wrap.target is None)]


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
    return owner is not None and optimizers.knows(owner)


def _unwrapped(updated: Any) -> Sequence[Any]:
    body = list(updated.body.body)
    if isinstance(updated.body, cst.SimpleStatementSuite):
        body = [cst.SimpleStatementLine(list(updated.body.body))]
    body[0] = body[0].with_changes(leading_lines=[*updated.leading_lines, *body[0].leading_lines])
    return body
