"""Backward passes and the steps that follow them: whose optimizer differentiates, and which pass is the last."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from hvdtrain.migrate.script.plan import Rewrite, own_nodes, target_of
from hvdtrain.migrate.script.source import (
    Script,
    calls,
    code,
    find,
    is_chain,
    literal,
    owner_of,
    tail,
    walk,
)

_LEAVES = (cst.Continue, cst.Break, cst.Return)


@dataclass
class Optimizers:
    """The script's optimizers, by the last identifiers of their names."""

    # the prepared ones, with the number of passes of each ("" for 1)
    prepared: dict[str, str] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)  # those that are not wrapped
    wrapped: set[str] = field(default_factory=set)  # the plain ones within the wrapped, also under another name
    # functions that return prepared ones, with their places in the tuple returned (-1: no tuple)
    makers: dict[str, dict[int, str]] = field(default_factory=dict)

    def knows(self, optimizer: cst.BaseExpression) -> bool:
        """Returns True for one that is prepared, or wrapped under this name."""
        return tail(optimizer) in self.prepared or tail(optimizer) in self.wrapped

    def spread(self, source: Script) -> None:
        """Follows them through functions that return them, to what is assigned there."""
        functions = list(find(source.module, cst.FunctionDef))
        lines = list(find(source.module, cst.SimpleStatementLine))
        for _ in range(3):  # functions that return what others returned
            for function in functions:
                self.makers.setdefault(function.name.value, {}).update(self._returned(function))
            for target, value in map(target_of, lines):
                if target is not None and value is not None:
                    self._assign(source, target, value)
        self.plain -= set(self.prepared)

    def _returned(self, function: cst.FunctionDef) -> dict[int, str]:
        found = {}
        for node in own_nodes(function):
            if isinstance(node, cst.Return) and node.value is not None:
                parts = [e.value for e in node.value.elements] if isinstance(node.value, cst.Tuple) else []
                for place, part in [(-1, node.value), *enumerate(parts)]:
                    if is_chain(part) and tail(part) in self.prepared:
                        found[place] = self.prepared[tail(part)]
        return found

    def _assign(self, source: Script, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        targets = [e.value for e in target.elements] if isinstance(target, cst.Tuple) else []
        if targets and isinstance(value, cst.Tuple):
            for one, element in zip(targets, value.elements, strict=False):
                self._assign(source, one, element.value)
        elif is_chain(value) and tail(value) in self.prepared and tail(target):
            self.prepared.setdefault(tail(target), self.prepared[tail(value)])
        elif isinstance(value, cst.Call):
            for place, passes in self.makers.get(tail(value.func), {}).items():
                one = target if place < 0 else targets[place] if place < len(targets) else target
                if tail(one):
                    self.prepared.setdefault(tail(one), passes)
            name = source.qualified(value.func)
            if name.startswith("torch.optim.") and "lr_scheduler" not in name and tail(target):
                self.plain.add(tail(target))


@dataclass
class OptimizerStep:
    """The step that follows a backward pass."""

    optimizer: cst.BaseExpression  # the one that steps
    call: cst.Call  # the call of `step`
    loops: list[cst.For | cst.While]  # that the pass is in and the step is not
    tests: list[cst.If]  # `if`s that the step is under and the pass is not


def step_after(source: Script, optimizers: Optimizers, backward: cst.Call) -> list[OptimizerStep]:
    """Returns the steps that follow a pass in its function, up to the next pass: the first is its own."""
    own = [owner_of(call, "zero_grad") for call in calls(source.function(backward))]
    zeroed = {code(owner) for owner in own if owner is not None}
    loops: list[cst.For | cst.While] = []
    at = source.statement(backward)
    while at is not None:
        block = list(source.block(at))
        found: list[OptimizerStep] = []
        for statement in block[block.index(at) + 1 :]:
            for call in calls(statement, now=True):
                if found and owner_of(call, "backward") is not None:
                    return found
                known = (one for one in stepped(call) if optimizers.knows(one) or is_chain(one) and code(one) in zeroed)
                if (optimizer := next(known, None)) is not None:
                    around = list(source.above(statement))
                    tests = [one for one in source.above(call) if isinstance(one, cst.If) and one not in around]
                    found.append(OptimizerStep(optimizer, call, loops, tests))
        if found:
            return found
        outer = next(source.above(source.parent(at) or at), None)
        if isinstance(outer, (cst.For, cst.While)):
            loops = [*loops, outer]
        if outer is None or isinstance(outer, (cst.FunctionDef, cst.Module)):
            return []
        at = source.statement(outer)
    return []


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
    steps = step_after(plan.source, optimizers, call)
    optimizer = steps[0].optimizer if steps else _only(plan, optimizers, call)
    if optimizer is None or _is_of_one_rank(plan, optimizers, call, optimizer):
        return None
    if others := [step.optimizer for step in steps if code(step.optimizer) != code(optimizer)]:
        both = f"{code(optimizer)}, {code(others[0])}"
        return plan.refuse(
            call, f"one backward() for several optimizers: prepare them as one, hvt.prepare(model, [{both}])"
        )
    more = more_passes(plan, optimizers, call, steps, code(optimizer))
    if more is None:
        return None

    def written(updated: cst.Call) -> str:
        assert isinstance(updated.func, cst.Attribute)
        rest = "".join(f", {code(arg.with_changes(comma=cst.MaybeSentinel.DEFAULT))}" for arg in updated.args)
        return f"{code(optimizer)}.backward({code(updated.func.value)}{more}{rest})"

    plan.replace(call, written)
    return None


def _is_of_one_rank(plan: Rewrite, optimizers: Optimizers, call: cst.Call, optimizer: cst.BaseExpression) -> bool:
    """Returns True if a pass is for a plain optimizer; refuses one that is wrapped under another name, and steps."""
    if tail(optimizer) in optimizers.prepared or tail(optimizer) not in optimizers.plain | optimizers.wrapped:
        return False
    if tail(optimizer) in optimizers.wrapped:
        plan.refuse(call, f"{code(optimizer)} steps, which DistributedOptimizer wraps under another name")
    return True


def _only(plan: Rewrite, optimizers: Optimizers, call: cst.Call) -> cst.BaseExpression | None:
    """Returns the one optimizer that the function of a backward pass can name; refuses the pass if there is none."""
    function = plan.source.function(call)
    found: dict[str, cst.BaseExpression] = {
        code(node): node for node in walk(function) if is_chain(node) and tail(node) in optimizers.prepared
    }
    if not found:
        found = {code(node): node for node in _reachable(plan, optimizers, call)}
    if len(found) == 1:
        return next(iter(found.values()))
    plan.refuse(
        call,
        "no step() of a wrapped optimizer follows in this function: whose gradients these are is not known;"
        " write optimizer.backward(loss) with the optimizer that hvt.prepare returns",
    )
    return None


def _reachable(plan: Rewrite, optimizers: Optimizers, call: cst.Call) -> list[cst.BaseExpression]:
    """Returns prepared optimizers that a method has as attributes of self, or a function as names of the module."""
    source = plan.source
    owner = next((one for one in source.above(call) if isinstance(one, cst.ClassDef)), None)
    if owner is not None:
        attributes = [node for node in find(owner, cst.Attribute) if code(node.value) == "self"]
        return [node for node in attributes if tail(node) in optimizers.prepared]
    targets = [target for target, _ in map(target_of, source.module.body)]
    return [target for target in targets if isinstance(target, cst.Name) and target.value in optimizers.prepared]


def more_passes(
    plan: Rewrite, optimizers: Optimizers, call: cst.Call, steps: list[OptimizerStep], optimizer: str
) -> str | None:
    """Returns the argument by which a pass knows that others of the same update follow; None if it is refused."""
    source = plan.source
    passes = optimizers.prepared.get(tail(cst.parse_expression(optimizer)), "")
    if passes in ("", "1"):
        return ""
    if not steps:
        plan.refuse(call, "which of several passes is the last of an update is not known: no step() follows here")
        return None
    loops, tests = steps[0].loops, steps[0].tests
    between = [
        node
        for node in walk(source.function(call))
        if isinstance(node, (cst.Call, *_LEAVES)) and source.line(call) < source.line(node) < source.line(steps[0].call)
    ]
    later = any(owner_of(node, "backward") is not None for node in between)
    if any(isinstance(node, _LEAVES) for node in between):
        plan.refuse(call, "which of several passes is the last of an update is not known: the step may be skipped")
        return None
    if not loops and not tests:
        return ", more=True" if later else ""
    bounds = _range(loops[0]) if len(loops) == 1 and not tests and not later else None
    if bounds is not None and not names_in(bounds) & stored(loops[0].body):
        return f", more={code(bounds)}"
    one_test = not loops and len(tests) == 1 and not later and tests[0].orelse is None
    if one_test and not names_in(tests[0].test) & _stored_between(source, call, tests[0]):
        return f", more={_negated(tests[0].test)}"
    plan.refuse(
        call,
        f"backward_passes_per_step={passes}: which pass is the last of an update is not known here; it is in"
        " `for i in range(...)` before the step, and where an `if` of the same block holds the step",
    )
    return None


def _range(loop: cst.CSTNode) -> cst.BaseExpression | None:
    """Returns the condition that another turn of `for i in range(...)` follows; None: not known."""
    if not isinstance(loop, cst.For) or not isinstance(loop.target, cst.Name) or loop.orelse is not None:
        return None
    over = loop.iter
    if not isinstance(over, cst.Call) or code(over.func) != "range" or any(a.star or a.keyword for a in over.args):
        return None
    if any(isinstance(node, (cst.Break, cst.Continue)) for node in walk(loop.body)):
        return None
    values = [code(arg.value).strip() for arg in over.args]
    step, end = values[2] if len(values) == 3 else 1, values[min(1, len(values) - 1)]
    return cst.parse_expression(f"{loop.target.value} + {step} < {end}")


def names_in(node: cst.CSTNode) -> set[str]:
    """Returns every identifier in a node."""
    return {name.value for name in find(node, cst.Name)}


def stored(node: cst.CSTNode) -> set[str]:
    """Returns the names that a node assigns to."""
    found: set[str] = set()
    for one in walk(node):
        targets: list[cst.CSTNode] = []
        if isinstance(one, cst.Assign):
            targets = [target.target for target in one.targets]
        elif isinstance(one, (cst.AugAssign, cst.AnnAssign, cst.NamedExpr, cst.For)):
            targets = [one.target]
        found = found.union(*map(names_in, targets))
    return found


def _stored_between(source: Script, call: cst.Call, test: cst.If) -> set[str]:
    """Returns the names that are assigned to after a pass and before the `if` that its step is under."""
    start, top = source.statement(call), source.statement(test)
    assert start is not None and top is not None
    block = list(source.block(start))
    return set().union(*map(stored, block[block.index(start) : block.index(top)] if top in block else []))


def _negated(test: cst.BaseExpression) -> str:
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        target = test.comparisons[0]
        if isinstance(target.operator, cst.Equal):
            return f"{code(test.left)} != {code(target.comparator)}"
    return f"not ({code(test)})"
