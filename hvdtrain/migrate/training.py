"""Backward passes and the steps that follow them: whose optimizer differentiates, and which pass is the last."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from hvdtrain.migrate.plan import Plan, own_nodes, target_of
from hvdtrain.migrate.source import Source, calls, code, is_chain, literal, runs_later, tail, walk

_PURE = ("len", "int", "float", "max", "min", "ceil", "floor", "size", "numel")


def trainers(source: Source) -> set[str]:
    """Names of the script's functions that train, or call one that does."""
    functions = [node for node in walk(source.module) if isinstance(node, cst.FunctionDef)]
    found: set[str] = set()
    while True:
        new = {f.name.value for f in functions if any(_trains(call, found) for call in calls(f.body))} - found
        if not new:
            return found
        found |= new


def _trains(call: cst.Call, known: set[str]) -> bool:
    name = tail(call.func)
    return (isinstance(call.func, cst.Attribute) and name in ("backward", "step")) or name in known


def trains(statement: cst.CSTNode, known: set[str]) -> bool:
    """Whether weights may change while a statement runs."""
    return any(_trains(call, known) for call in calls(statement, now=True)) and not runs_later(statement)


@dataclass
class Optimizers:
    """What is known of the script's optimizers.

    Attributes:
        prepared: the last identifiers of those that are prepared, with the number of passes of each ("" for 1).
        plain: of those that nobody wraps.
        wrapped: the last identifiers of what is wrapped, also under another name.
        makers: functions that return prepared ones, with their places in the tuple returned (-1: no tuple).
    """

    prepared: dict[str, str] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)
    wrapped: set[str] = field(default_factory=set)
    makers: dict[str, dict[int, str]] = field(default_factory=dict)

    def spread(self, source: Source) -> None:
        """Follows them through functions that return them, to what is assigned there."""
        functions = [node for node in walk(source.module) if isinstance(node, cst.FunctionDef)]
        lines = [node for node in walk(source.module) if isinstance(node, cst.SimpleStatementLine)]
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

    def _assign(self, source: Source, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        targets = [e.value for e in target.elements] if isinstance(target, cst.Tuple) else []
        if targets and isinstance(value, cst.Tuple):
            for one, its in zip(targets, value.elements, strict=False):
                self._assign(source, one, its.value)
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
class Step:
    """The step that follows a backward pass.

    Attributes:
        optimizer: whose.
        call: of `step`.
        loops: that the pass is in and the step is not.
        tests: `if`s that the step is under and the pass is not.
    """

    optimizer: cst.BaseExpression
    call: cst.Call
    loops: list[cst.CSTNode]
    tests: list[cst.If]


def step_after(source: Source, optimizers: Optimizers, backward: cst.Call) -> list[Step]:
    """The steps that follow a pass in its function, up to the next pass: the first is its own."""
    zeroed = {
        code(call.func.value)
        for call in calls(source.function(backward))
        if isinstance(call.func, cst.Attribute) and tail(call.func) == "zero_grad"
    }
    loops: list[cst.CSTNode] = []
    at = source.statement(backward)
    while at is not None:
        block = list(source.block(at))
        found: list[Step] = []
        for statement in block[block.index(at) + 1 :]:
            for call in calls(statement, now=True):
                if isinstance(call.func, cst.Attribute) and tail(call.func) == "backward" and found:
                    return found
                optimizer = _stepped(source, optimizers, call, zeroed)
                if optimizer is not None:
                    tests = [one for one in _within(source, call, statement) if isinstance(one, cst.If)]
                    found.append(Step(optimizer, call, loops, tests))
        if found:
            return found
        outer = next(source.above(source.parent(at) or at), None)
        if isinstance(outer, (cst.For, cst.While)):
            loops = [*loops, outer]
        if outer is None or isinstance(outer, (cst.FunctionDef, cst.Module)):
            return []
        at = source.statement(outer)
    return []


def _within(source: Source, node: cst.CSTNode, top: cst.CSTNode) -> list[cst.CSTNode]:
    found = []
    for one in source.above(node):
        found.append(one)
        if one is top:
            break
    return found


def _stepped(source: Source, optimizers: Optimizers, call: cst.Call, zeroed: set[str]) -> cst.BaseExpression | None:
    """The optimizer that a call steps, by itself or through a gradient scaler."""
    if not isinstance(call.func, cst.Attribute) or tail(call.func) != "step":
        return None
    for one in (call.func.value, *(arg.value for arg in call.args[:1])):
        known = tail(one) in optimizers.prepared or tail(one) in optimizers.wrapped
        if known or (is_chain(one) and code(one) in zeroed):
            return one
    return None


def passes(source: Source) -> list[cst.Call]:
    """The calls of loss.backward(); not those of torch.autograd.backward and the like, or of the script's classes."""
    return [
        call
        for call in calls(source.module)
        if isinstance(call.func, cst.Attribute)
        and tail(call.func) == "backward"
        and not _is_own(call.func)
        and not (is_chain(call.func.value) and source.qualified(call.func.value).startswith("torch."))
    ]


def refuse_other_passes(plan: Plan) -> None:
    """Refuses `backward` that is no method of a loss, called there."""
    source = plan.source
    for node in walk(source.module):
        if isinstance(node, cst.Attribute) and tail(node) == "backward" and not _is_own(node):
            outer = source.parent(node)
            called = isinstance(outer, cst.Call) and outer.func is node
            if not called or source.qualified(node).startswith("torch."):
                plan.refuse(node, f"{code(node)}: what is moved is loss.backward(), called there")


def _is_own(node: cst.Attribute) -> bool:
    return code(node.value).startswith("super(") or code(node.value) in ("self", "cls")


def move_backward(plan: Plan, optimizers: Optimizers, call: cst.Call) -> None:
    """`loss.backward()` becomes `optimizer.backward(loss)`, of the optimizer whose step follows."""
    if refuse_arguments(plan, call):
        return None
    steps = step_after(plan.source, optimizers, call)
    optimizer = steps[0].optimizer if steps else _only(plan, optimizers, call)
    if optimizer is None or is_of_one_rank(plan, optimizers, call, optimizer):
        return None
    if others := [step.optimizer for step in steps if code(step.optimizer) != code(optimizer)]:
        both = f"{code(optimizer)}, {code(others[0])}"
        return plan.refuse(
            call, f"one backward() for several optimizers: prepare them as one, hvt.prepare(model, [{both}])"
        )
    more = more_passes(plan, optimizers, call, steps, code(optimizer))
    if more is None:
        return None
    if steps:
        note_clipping(plan, call, steps[0])

    def written(updated: cst.Call) -> str:
        assert isinstance(updated.func, cst.Attribute)
        rest = "".join(f", {code(arg.with_changes(comma=cst.MaybeSentinel.DEFAULT))}" for arg in updated.args)
        return f"{code(optimizer)}.backward({code(updated.func.value)}{more}{rest})"

    plan.replace(call, written)
    return None


def refuse_arguments(plan: Plan, call: cst.Call) -> bool:
    """Whether a backward pass is refused for what it is given."""
    strange = [literal(arg.keyword) or "an argument" for arg in call.args if literal(arg.keyword) != "retain_graph"]
    if strange:
        plan.refuse(call, f"backward({strange[0]}=...): averaged gradients are those of one loss, without it")
    return bool(strange)


def is_of_one_rank(plan: Plan, optimizers: Optimizers, call: cst.Call, optimizer: cst.BaseExpression) -> bool:
    """Whether a pass is for an optimizer that nobody wraps; one that is wrapped, and steps by itself, is refused."""
    if tail(optimizer) not in optimizers.plain or tail(optimizer) in optimizers.prepared:
        return False
    if tail(optimizer) in optimizers.wrapped:
        plan.refuse(call, f"{code(optimizer)} steps, which DistributedOptimizer wraps under another name")
    return True


def note_clipping(plan: Plan, backward: cst.Call, step: Step) -> None:
    """Gradients that Horovod still has on their way are clipped there; here they are averaged."""
    source = plan.source
    clips, waits = False, False
    for call in calls(source.function(backward)):
        if source.line(backward) < source.line(call) <= source.line(step.call):
            waits |= tail(call.func) == "synchronize" and code(step.optimizer) in code(call.func)
            if tail(call.func).startswith("clip_grad_") and not waits and not clips:
                clips = True
                plan.note(
                    call,
                    f"clipped before Horovod has averaged; with {plan.target.title} backward() has: another, right,"
                    " result",
                )


def note_closures(plan: Plan, optimizers: Optimizers) -> None:
    """Horovod's step(closure) averages nothing that the closure differentiates."""
    for call in calls(plan.source.module):
        owner = call.func.value if isinstance(call.func, cst.Attribute) and tail(call.func) == "step" else None
        if owner is not None and call.args and tail(owner) in optimizers.prepared:
            plan.note(
                call, "step(closure): Horovod averages before the closure runs, and its ranks part; hvdtrain within it"
            )


def _only(plan: Plan, optimizers: Optimizers, call: cst.Call) -> cst.BaseExpression | None:
    """The one optimizer there is, where the function of a backward pass can name it."""
    function = plan.source.function(call)
    found: dict[str, cst.BaseExpression] = {
        code(node): node
        for node in walk(function)
        if isinstance(node, (cst.Name, cst.Attribute)) and is_chain(node) and tail(node) in optimizers.prepared
    }
    if not found:
        found = {code(node): node for node in _reachable(plan, optimizers, call)}
    if len(found) == 1:
        return next(iter(found.values()))
    plan.refuse(
        call,
        "no step() of a wrapped optimizer follows in this function: whose gradients these are cannot be told;"
        " write optimizer.backward(loss) with the optimizer that hvt.prepare returns",
    )
    return None


def _reachable(plan: Plan, optimizers: Optimizers, call: cst.Call) -> list[cst.BaseExpression]:
    """Prepared optimizers that a method has as attributes of its object, or a function as names of the module."""
    source = plan.source
    owner = next((one for one in source.above(call) if isinstance(one, cst.ClassDef)), None)
    if owner is not None:
        attributes = [node for node in walk(owner) if isinstance(node, cst.Attribute) and code(node.value) == "self"]
        return [node for node in attributes if tail(node) in optimizers.prepared]
    lines = [line for line in source.module.body if isinstance(line, cst.SimpleStatementLine)]
    targets = [target for target, _ in map(target_of, lines) if target is not None]
    return [target for target in targets if isinstance(target, cst.Name) and target.value in optimizers.prepared]


def more_passes(plan: Plan, optimizers: Optimizers, call: cst.Call, steps: list[Step], optimizer: str) -> str | None:
    """The argument that tells a pass that others of the same update follow; None where it is refused."""
    source = plan.source
    passes = optimizers.prepared.get(tail(cst.parse_expression(optimizer)), "")
    if passes in ("", "1"):
        return ""
    if not steps:
        plan.refuse(call, "of several passes an update which is the last cannot be told: no step() follows here")
        return None
    loops, tests = steps[0].loops, steps[0].tests
    later = _later_passes(source, call, steps[0])
    if _may_leave_before(source, call, steps[0]):
        plan.refuse(call, "of several passes an update which is the last cannot be told: the step may be left out")
        return None
    if not loops and not tests:
        return ", more=True" if later else ""
    if len(loops) == 1 and not tests and not later:
        bounds = _range(loops[0])
        if bounds is not None and _asks_only(loops[0]) and not _stores(source, loops[0], bounds):
            return f", more={bounds}"
    if not loops and len(tests) == 1 and not later and tests[0].orelse is None:
        names = {node.value for node in walk(tests[0].test) if isinstance(node, cst.Name)}
        if _asks_only(tests[0].test) and not names & _stored_between(source, call, tests[0]):
            return f", more={_negated(tests[0].test)}"
    plan.refuse(
        call,
        f"backward_passes_per_step={passes}: which pass is the last of an update cannot be told here; it can in"
        " `for i in range(...)` before the step, and where an `if` of the same block holds the step",
    )
    return None


def _may_leave_before(source: Source, call: cst.Call, step: Step) -> bool:
    """Whether `continue`, `break` or `return` stands between a pass and its step."""
    leaves = (cst.Continue, cst.Break, cst.Return)
    return any(
        isinstance(node, leaves) and source.line(call) < source.line(node) < source.line(step.call)
        for node in walk(source.function(call))
    )


def _asks_only(node: cst.CSTNode) -> bool:
    """Whether a condition, or the bounds of a loop, can be computed twice: what they call changes nothing."""
    node = node.iter if isinstance(node, cst.For) else node
    inner = list(walk(node))[1 if isinstance(node, cst.Call) and code(node.func) == "range" else 0 :]
    return not any(
        isinstance(one, (cst.NamedExpr, cst.Await)) or (isinstance(one, cst.Call) and tail(one.func) not in _PURE)
        for one in inner
    )


def _later_passes(source: Source, call: cst.Call, step: Step) -> bool:
    """Whether another pass stands between a pass and its step."""

    def line(node: cst.CSTNode) -> int:
        return source.line(node)

    return any(
        isinstance(other.func, cst.Attribute) and tail(other.func) == "backward"
        and line(call) < line(other) < line(step.call)
        for other in calls(source.function(call))
    )  # fmt: skip


def _range(loop: cst.CSTNode) -> str | None:
    """Whether another turn of `for i in range(...)` follows, as text."""
    if not isinstance(loop, cst.For) or not isinstance(loop.target, cst.Name) or loop.orelse is not None:
        return None
    over = loop.iter
    if not isinstance(over, cst.Call) or code(over.func) != "range" or any(a.star or a.keyword for a in over.args):
        return None
    values = [code(arg.value).strip() for arg in over.args]
    if any(isinstance(node, (cst.Break, cst.Continue)) for node in walk(loop.body)):
        return None
    return f"{loop.target.value} + {values[2] if len(values) == 3 else 1} < {values[min(1, len(values) - 1)]}"


def _stores(source: Source, block: cst.CSTNode, text: str) -> bool:
    """Whether a loop's body assigns to a name of an expression."""
    names = {node.value for node in walk(cst.parse_expression(text)) if isinstance(node, cst.Name)}
    assert isinstance(block, cst.For)
    return bool(names & stored(block.body))


def stored(node: cst.CSTNode) -> set[str]:
    """The names that a node assigns to."""
    found: set[str] = set()
    for one in walk(node):
        targets: list[cst.CSTNode] = []
        if isinstance(one, cst.Assign):
            targets = [target.target for target in one.targets]
        elif isinstance(one, (cst.AugAssign, cst.AnnAssign, cst.NamedExpr, cst.For)):
            targets = [one.target]
        found |= {name.value for target in targets for name in walk(target) if isinstance(name, cst.Name)}
    return found


def _stored_between(source: Source, call: cst.Call, test: cst.If) -> set[str]:
    start, top = source.statement(call), source.statement(test)
    assert start is not None and top is not None
    block = list(source.block(start))
    between = block[block.index(start) : block.index(top)] if top in block else []
    return set().union(*(stored(statement) for statement in between)) if between else set()


def _negated(test: cst.BaseExpression) -> str:
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        target = test.comparisons[0]
        if isinstance(target.operator, cst.Equal):
            return f"{code(test.left)} != {code(target.comparator)}"
    return f"not ({code(test)})"
