"""Backward passes and the steps that follow them: whose optimizer differentiates, and which pass is the last."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from hvdtrain.migrate.script.plan import Rewrite, target_of
from hvdtrain.migrate.script.source import Script, calls, code, find, is_chain, literal, owner_of, tail, walk


@dataclass
class Optimizers:
    """The script's optimizers, by the last identifiers of their names."""

    wrapped: dict[str, str] = field(default_factory=dict)  # with the number of passes of each ("" for 1)
    zeroed: set[str] = field(default_factory=set)  # those whose gradients are set to zero
    plain: set[str] = field(default_factory=set)  # those that are made, and not wrapped under this name

    def read(self, source: Script) -> None:
        """Adds what the script makes, and what it sets to zero."""
        owners = (owner_of(call, "zero_grad") for call in calls(source.module))
        self.zeroed = {tail(owner) for owner in owners if owner is not None}
        for target, value in map(target_of, find(source.module, cst.SimpleStatementLine)):
            name = source.qualified(value.func) if isinstance(value, cst.Call) else ""
            if target is not None and name.startswith("torch.optim.") and "lr_scheduler" not in name:
                self.plain.add(tail(target))
        self.plain -= set(self.wrapped)

    def knows(self, optimizer: cst.BaseExpression) -> bool:
        """Returns True for a name that is wrapped, or set to zero as an optimizer is."""
        return tail(optimizer) in {*self.wrapped, *self.zeroed} - {""}

    def passes(self, optimizer: cst.BaseExpression) -> str:
        """Returns the passes of an update: those of all that are wrapped, where this name is another's."""
        known = set(self.wrapped.values())
        return self.wrapped.get(tail(optimizer), known.pop() if len(known) == 1 else "")


@dataclass
class OptimizerStep:
    """The step that follows a backward pass."""

    optimizer: cst.BaseExpression  # the one that steps
    line: int  # where
    loops: list[cst.For | cst.While]  # that the pass is in and the step is not
    tests: list[cst.If]  # `if`s that the step is under and the pass is not


def step_after(source: Script, optimizers: Optimizers, backward: cst.Call) -> OptimizerStep | None:
    """Returns the step that follows a pass in its function; None if there is none."""
    loops: list[cst.For | cst.While] = []
    at = source.statement(backward)
    while at is not None:
        block = source.block(at)
        for statement in block[block.index(at) + 1 :]:
            for call in calls(statement, now=True):
                optimizer = next(filter(optimizers.knows, stepped(call)), None)
                if optimizer is not None:
                    around = list(source.above(statement))
                    tests = [one for one in source.above(call) if isinstance(one, cst.If) and one not in around]
                    return OptimizerStep(optimizer, source.line(call), loops, tests)
        outer = next(source.above(source.parent(at) or at), None)
        if isinstance(outer, (cst.For, cst.While)):
            loops = [*loops, outer]
        if outer is None or isinstance(outer, (cst.FunctionDef, cst.Module)):
            return None
        at = source.statement(outer)
    return None


def stepped(call: cst.Call) -> list[cst.BaseExpression]:
    """Returns what may be the optimizer that a call steps: its object, or the argument of a gradient scaler."""
    owner = owner_of(call, "step")
    return [] if owner is None else [owner, *(arg.value for arg in call.args[:1])]


def passes(source: Script) -> list[cst.Call]:
    """Returns the calls of loss.backward(), but not of torch.autograd.backward and methods of the script."""
    return [
        call
        for call in calls(source.module)
        if (loss := owner_of(call, "backward")) is not None
        and not code(loss).startswith("super(")
        and code(loss) not in ("self", "cls")
        and not source.qualified(loss).startswith("torch.")
    ]


def move_backward(plan: Rewrite, optimizers: Optimizers, call: cst.Call) -> None:
    """Turns `loss.backward()` into `optimizer.backward(loss)`, of the optimizer whose step follows."""
    strange = [literal(arg.keyword) or "an argument" for arg in call.args if literal(arg.keyword) != "retain_graph"]
    if strange:
        return plan.refuse(call, f"backward({strange[0]}=...): optimizer.backward(loss) takes retain_graph only")
    step = step_after(plan.source, optimizers, call)
    optimizer = step.optimizer if step is not None else _only(plan, optimizers, call)
    if optimizer is None or tail(optimizer) in optimizers.plain:
        return None  # refused, or a pass for one rank's own optimizer
    more = _more_passes(plan, call, step) if optimizers.passes(optimizer) not in ("", "1") else ""

    def written(updated: cst.Call) -> str:
        assert isinstance(updated.func, cst.Attribute)
        rest = "".join(f", {code(arg.with_changes(comma=cst.MaybeSentinel.DEFAULT))}" for arg in updated.args)
        return f"{code(optimizer)}.backward({code(updated.func.value)}{more}{rest})"

    plan.replace(call, written)
    return None


def _only(plan: Rewrite, optimizers: Optimizers, call: cst.Call) -> cst.BaseExpression | None:
    """Returns the one optimizer that the function of a backward pass names; refuses the pass if there is none."""
    names = (node for node in walk(plan.source.function(call)) if is_chain(node) and optimizers.knows(node))
    found = {code(name): name for name in names}
    if len(found) == 1:
        return next(iter(found.values()))
    plan.refuse(
        call,
        "no step() of a wrapped optimizer follows in this function: whose gradients these are is not known;"
        " write optimizer.backward(loss) with the optimizer that hvt.prepare returns",
    )
    return None


def _more_passes(plan: Rewrite, call: cst.Call, step: OptimizerStep | None) -> str:
    """Returns the argument by which a pass knows that others of the same update follow; refuses it if none is known.

    An argument that is wrong stops the proof: hvdtrain refuses a step, or a pass, that was not announced.
    """
    if step is not None and not step.loops and not step.tests:
        between = [loss for loss in passes(plan.source) if plan.source.line(call) < plan.source.line(loss) < step.line]
        return ", more=True" if between else ""
    if step is not None and len(step.loops) == 1 and not step.tests and (bounds := _range(step.loops[0])):
        return f", more={bounds}"
    if step is not None and not step.loops and len(step.tests) == 1 and step.tests[0].orelse is None:
        return f", more={_negated(step.tests[0].test)}"
    plan.refuse(
        call,
        "which of several passes is the last of an update is not known here; it is in"
        " `for i in range(...)` before the step, and where an `if` of the same block holds the step",
    )
    return ""


def _range(loop: cst.For | cst.While) -> str:
    """Returns the condition that another turn of `for i in range(...)` follows; "": not known."""
    if not isinstance(loop, cst.For) or not isinstance(loop.target, cst.Name) or not isinstance(loop.iter, cst.Call):
        return ""
    values = [code(arg.value).strip() for arg in loop.iter.args]
    if code(loop.iter.func) != "range":
        return ""
    step, end = values[2] if len(values) == 3 else 1, values[min(1, len(values) - 1)]
    return f"{loop.target.value} + {step} < {end}"


def _negated(test: cst.BaseExpression) -> str:
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        target = test.comparisons[0]
        if isinstance(target.operator, cst.Equal):
            return f"{code(test.left)} != {code(target.comparator)}"
    return f"not ({code(test)})"
