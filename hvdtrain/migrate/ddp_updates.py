"""What makes an update under `DistributedDataParallel`: a call of the wrapped model, the pass behind it, the step.

Horovod averages whatever gradients there are when an optimizer steps. DistributedDataParallel averages those of a
`backward()` behind a call of the wrapped model, and no others: an update that comes about in another way is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import libcst as cst

from hvdtrain.migrate import training
from hvdtrain.migrate.ddp_models import Models
from hvdtrain.migrate.plan import Plan
from hvdtrain.migrate.source import Flow, Source, calls, code, is_chain, literal, tail, walk
from hvdtrain.migrate.torch_calls import without_gradients

_LEAVES = (cst.Return, cst.Raise, cst.Continue, cst.Break)
_BLOCKS = (cst.SimpleStatementLine, cst.SimpleStatementSuite, cst.IndentedBlock, cst.Module)
NOBODYS = "?"  # of a function that nothing here calls
AVERAGES = "Horovod averages at the step, DistributedDataParallel in a backward() behind a call of the wrapped model"


class Paths:
    """What may have happened last on the ways to a node, back to the beginning of its loop; "" for nothing."""

    def __init__(self, source: Source, flow: Flow, event: Callable[[cst.Call], str]) -> None:
        self._source, self._flow, self._event = source, flow, event
        self._known: dict[cst.FunctionDef, set[str]] = {}

    def before(self, node: cst.CSTNode, within: cst.CSTNode | None = None) -> set[str]:
        """Goes back from a node; not out of the function `within`."""
        found = self._calls(one for one in calls(node, now=True) if one is not node)
        at, up = node, self._source.parent(node)
        while "" in found and up is not None:
            if isinstance(up, _BLOCKS):
                body: list[Any] = list(up.body)
                found = _behind(found, self._block(body[: next(i for i, one in enumerate(body) if one is at)]))
            elif isinstance(up, (cst.For, cst.While)) and at is up.body:
                return found
            elif isinstance(up, cst.With) and at is up.body:
                found = _behind(found, self._calls(one for item in up.items for one in calls(item)))
            elif isinstance(up, cst.FunctionDef):
                return found if up is within else _behind(found, self._callers(up))
            elif isinstance(up, cst.Lambda):
                return found
            at, up = up, self._source.parent(up)
        return found

    def _callers(self, function: cst.FunctionDef) -> set[str]:
        sites = [call for call in calls(self._source.module) if function in self._flow.called(call)]
        if not sites:
            return {""} if any(map(self._event, calls(function.body))) else {NOBODYS}
        if function in self._known:
            return self._known[function]
        self._known[function] = {""}  # one that calls itself
        found = set().union(*(self.before(site) for site in sites))
        del self._known[function]
        return found

    def _calls(self, found: Iterable[cst.Call]) -> set[str]:
        last = {""}
        for call in reversed(list(found)):
            if "" in last:
                word = self._event(call)
                last = _behind(last, {word} if word else self._called(call))
        return last

    def _called(self, call: cst.Call) -> set[str]:
        functions = [] if without_gradients(self._source, call) else self._flow.called(call)
        return set().union(*map(self._function, functions)) if functions else {""}

    def _function(self, function: cst.FunctionDef) -> set[str]:
        """What has happened last when it returns."""
        if function not in self._known:
            self._known[function] = {""}
            ends = [node for node in walk(function.body) if isinstance(node, cst.Return)]
            ends = [node for node in ends if self._source.function(node) is function]
            found = self._of(function.body).union(*(self.before(node, function) for node in ends))
            del self._known[function]
            return found
        return self._known[function]

    def _block(self, statements: Sequence[cst.CSTNode]) -> set[str]:
        found = {""}
        for one in reversed(statements):
            if "" not in found:
                break
            found = _behind(found, self._of(one))
        return found

    def _of(self, node: cst.CSTNode) -> set[str]:
        if isinstance(node, _BLOCKS):
            return self._block(list(node.body))
        if isinstance(node, _LEAVES):
            return set()
        if isinstance(node, cst.If):
            found = self._of(node.body) | (self._of(node.orelse) if node.orelse is not None else {""})
            return _behind(found, self._calls(calls(node.test, now=True)))
        if isinstance(node, (cst.For, cst.While)):  # which are taken to turn once at least
            return self._of(node.body) or {""}
        if isinstance(node, cst.With):
            return _behind(self._of(node.body), self._calls(one for item in node.items for one in calls(item)))
        if isinstance(node, (cst.Else, cst.Try)):
            return self._of(node.body)
        return self._calls(calls(node, now=True))


def _behind(later: set[str], earlier: set[str]) -> set[str]:
    return (later - {""}) | earlier if "" in later else later


def is_called_before(plan: Plan, models: Models, backward: cst.Call) -> bool:
    """Whether on every way to a pass a wrapped model was called, with gradients, behind the pass before it."""
    passes = training.passes(plan.source)

    def event(call: cst.Call) -> str:
        if call in models.calls and not without_gradients(plan.source, call):
            return "call"
        return "pass" if call in passes else ""

    return Paths(plan.source, models.flow, event).before(backward) == {"call"}


def refuse_other_updates(plan: Plan, optimizers: training.Optimizers, models: Models) -> None:
    """Refuses what an optimizer steps with that no pass gave it."""
    passes = training.passes(plan.source)
    for node in walk(plan.source.module):
        if _sets_gradients(node):
            plan.refuse(node, f"gradients that are assigned: {AVERAGES}")
        if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
            continue
        owner = tail(node.func.value)
        if tail(node.func) == "add_param_group" and (owner in optimizers.prepared or owner in optimizers.wrapped):
            plan.refuse(node, "add_param_group: DistributedDataParallel averages the wrapped model's parameters only")
        name = _stepped(optimizers, node)

        def event(call: cst.Call, name: str = name) -> str:
            return "pass" if call in passes else "step" if name and _stepped(optimizers, call) == name else ""

        if name:
            found = Paths(plan.source, models.flow, event).before(node)
            if "" in found or found == {"step"}:
                plan.refuse(node, f"a step that on some way to it has no backward() behind the step before: {AVERAGES}")


def _stepped(optimizers: training.Optimizers, call: cst.Call) -> str:
    """The prepared optimizer that a call steps."""
    if not isinstance(call.func, cst.Attribute) or tail(call.func) != "step":
        return ""
    names = [tail(one) for one in (call.func.value, *(arg.value for arg in call.args[:1]))]
    return next((name for name in names if name in optimizers.prepared), "")


def _sets_gradients(node: cst.CSTNode) -> bool:
    """`p.grad = g`, `p.grad.copy_(g)` or the like; not None, which takes it away."""
    targets: list[cst.BaseExpression] = []
    if isinstance(node, cst.Assign) and literal(node.value) != "None":
        targets = [one.target for one in node.targets]
    elif isinstance(node, cst.Call) and code(node.func) == "setattr" and len(node.args) == 3:
        return code(node.args[1].value).strip("'\"") == "grad" and literal(node.args[2].value) != "None"
    elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and tail(node.func) in ("copy_", "set_"):
        targets = [node.func.value]
    for target in targets:
        while isinstance(target, cst.Subscript) or (isinstance(target, cst.Attribute) and tail(target) == "data"):
            target = target.value
        if isinstance(target, cst.Attribute) and tail(target) == "grad" and is_chain(target):
            return True
    return False
