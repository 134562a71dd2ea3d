"""Models that are wrapped in `DistributedDataParallel`: where they go, and what is done with them there.

Two ways in which a moved script would be wrong and say nothing are looked for: the plain module is called where the
wrapped one should be, whose gradients nobody averages then; and the wrapped one stands where its parts, its class or
the names in its state are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from hvdtrain.migrate.ddp.flow import SAME, Flow, Giver, Variable
from hvdtrain.migrate.script.plan import Rewrite, own_nodes
from hvdtrain.migrate.script.source import Script, calls, code, find, names_in, tail, walk
from hvdtrain.migrate.script.torch_calls import without_gradients
from hvdtrain.migrate.script.wrapping import Wrap, is_parameter

# the same of the wrapped model as of the plain one
_SAME = ("train", "eval", "training", "parameters", "zero_grad")
# of a module, and no pass through it
_METHODS = (
    "state_dict", "load_state_dict", "named_parameters", "modules", "named_modules", "children", "named_children",
    "buffers", "named_buffers", "apply", "get_submodule", "get_parameter", "get_buffer", "extra_repr",
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "size", "numel", "norm",
    "item", "detach", "clone", "clamp_", "mul_", "add_", "copy_", "zero_", "fill_", "mean", "sum", "abs", "max", "min",
    "reset_parameters", "cpu", "numpy", "tolist",
)  # fmt: skip
# of a module that has been wrapped they would change what is averaged
_CHANGES = (
    "to", "cuda", "cpu", "half", "float", "double", "bfloat16", "type", "requires_grad_", "register_parameter",
    "add_module", "register_module", "register_buffer", "compile", "share_memory", "to_empty",
)  # fmt: skip
_MAY_RUN = "may run a part of the model, whose gradients DistributedDataParallel leaves alone"
_MAY_BE_CALLED = "may be called there, and DistributedDataParallel leaves its gradients alone"
_NOT_ALWAYS = "what is the wrapped model at one time, and not at another"
# of a part of a model, and no part themselves
_NO_PARTS = (
    "weight", "bias", "data", "grad", "training", "device", "dtype", "shape", "in_features", "out_features",
    "in_channels", "out_channels", "num_features", "num_classes", "running_mean", "running_var", "config", "name",
)  # fmt: skip
_PARTS = ("modules", "named_modules", "children", "named_children", "_modules", "get_submodule")
# what is given a model, and neither keeps it nor runs it
_HARMLESS = (
    "copy.deepcopy", "copy.copy", "isinstance", "torch.save", "type", "print", "len", "repr", "str", "id", "hasattr",
    "getattr", "torch.optim.swa_utils.AveragedModel",
)  # fmt: skip


@dataclass
class _Followed:
    """A wrapped model.

    Attributes:
        wrap: its optimizer's.
        variable: that it is wrapped in.
        moments: the functions under way when it is wrapped, each with the statement that it is at.
        before, after: names of functions that run before and after that.
        only: of those of `before` whose calls are surely of them.
        plain, wrapped: variables that may hold the plain model then, and the wrapped one.
    """

    wrap: Wrap
    variable: Variable
    moments: dict[cst.CSTNode, cst.CSTNode] = field(default_factory=dict)
    before: set[str] = field(default_factory=set)
    after: set[str] = field(default_factory=set)
    only: set[str] = field(default_factory=set)
    plain: set[Variable] = field(default_factory=set)
    wrapped: set[Variable] = field(default_factory=set)


class Models:
    """The wrapped models of a script.

    Attributes:
        calls: of wrapped models.
        compressed: whether gradients of one are.
        flow: of the script.
    """

    def __init__(self, plan: Rewrite) -> None:
        self._plan, self._source = plan, plan.source
        self.flow = Flow(plan.source)
        self._models: list[_Followed] = []
        self.calls: list[cst.Call] = []
        self.compressed = False
        # functions that somebody may call later, by a name that is no call
        self._handed = {
            name
            for node in walk(plan.source.module)
            if isinstance(node, (cst.Name, cst.Attribute)) and not isinstance(plan.source.parent(node), cst.FunctionDef)
            and not (isinstance(up := plan.source.parent(node), cst.Call) and up.func is node)
            for name in (tail(node), f".{tail(node)}") if name in self.flow.functions
        }  # fmt: skip

    def follow(self, wrap: Wrap) -> None:
        """Finds where the model of an optimizer goes."""
        named = cst.parse_expression(wrap.model)
        flow = self.flow
        same = [node for nodes in flow.uses.values() for node in nodes if code(node) == wrap.model]
        here = [node for node in same if self._source.function(node) is self._source.function(wrap.call)]
        variable = flow.variable(here[0]) if here else None
        own = isinstance(named, cst.Name) or (isinstance(named, cst.Attribute) and code(named.value) == "self")
        if variable is None or not own:
            self._plan.refuse(
                wrap.call, f"{wrap.model}: what is wrapped is moved where it has a name, or is an attribute of self"
            )
            return
        if isinstance(named, cst.Name) and variable[0] is not self._source.scope(wrap.call):
            self._plan.refuse(wrap.call, f"{wrap.model} is another function's: it is wrapped where it is assigned")
            return
        if any(variable == one.variable for one in self._models):
            self._plan.refuse(wrap.call, f"a second optimizer of {wrap.model}, which is wrapped once")
            return
        owners = [self._source.function(giver.site) for giver in flow.givers[variable]]
        classes = {next((one for one in self._source.above(f) if isinstance(one, cst.ClassDef)), None) for f in owners}
        if variable[0] is None and len(classes) > 1:
            self._plan.refuse(
                wrap.call, f"attributes {variable[1]} of several classes: which is wrapped cannot be told"
            )
            return
        found = _Followed(wrap, variable)
        self._find_moments(found, wrap.call)
        self._spread(found)
        self._models.append(found)

    def settle(self) -> None:
        """Puts `.module` where the plain model is meant, and refuses what cannot be told."""
        for variable in {one for model in self._models for one in (*model.plain, *model.wrapped)}:
            for node in self.flow.uses[variable]:
                self._use(variable, node)
        for model in self._models:
            self._refuse_givers(model)
            for function, place in (*model.plain, *model.wrapped):
                if isinstance(function, cst.FunctionDef):
                    self._follow_calls(function, whole=place == "-1")

    def _follow_calls(self, function: cst.FunctionDef, *, whole: bool) -> None:
        """Refuses calls of a function that returns a model, alone or in a tuple, of which the flow loses sight."""
        source = self._source
        for call in calls(source.module):
            if function not in self.flow.called(call) or function.name.value == "__init__":
                continue
            up = source.parent(call)
            while (
                isinstance(up, cst.Attribute) and tail(up) in SAME and isinstance(made := source.parent(up), cst.Call)
            ):
                up = source.parent(made)  # build().to(device)
            apart = isinstance(up, cst.Element)
            up = source.parent(source.parent(up) or up) if apart and up is not None else up
            tuples = isinstance(up, cst.Assign) and all(isinstance(one.target, cst.Tuple) for one in up.targets)
            kept = isinstance(up, cst.Assign) and tuples == apart if whole else tuples and not apart
            if whole and isinstance(up, cst.Arg):
                given = source.parent(up)
                kept = isinstance(given, cst.Call) and bool(self.flow.called(given))
            if not kept and not isinstance(up, (cst.Expr, cst.Return) if whole else cst.Expr):
                self._lost(call, f"{code(call.func)}() returns a model, which goes where it cannot be followed")

    # -- when --------------------------------------------------------------------------------------------------
    def _find_moments(self, model: _Followed, call: cst.Call) -> None:
        """Follows a call to those of the function that it is in."""
        source = self._source
        function = source.function(call)
        statement = source.statement(call)
        if function in model.moments or statement is None:
            return
        model.moments[function] = statement
        line = source.line(statement)
        now = [one for one in own_nodes(function) if isinstance(one, cst.Call) and one is not call]
        early = [one for one in now if source.line(one) < line]
        model.before |= self.flow.reached(early)
        model.only |= self.flow.reached(early, surely=True)
        model.after |= self.flow.reached(one for one in now if one not in early)
        if isinstance(function, cst.FunctionDef):
            for other in calls(source.module):
                if function in self.flow.called(other):
                    self._find_moments(model, other)

    def _when(self, model: _Followed, node: cst.CSTNode) -> set[str]:
        """Whether a node runs before the model is wrapped, after it, or both."""
        function = self._source.function(node)
        if function in model.moments:
            statement = model.moments[function]
            late = self._source.line(node) > self._source.line(statement) and not self._source.within(node, statement)
            waits = any(isinstance(one, cst.Lambda) for one in self._source.above(node))
            return {"after"} if late else {"before", "after"} if waits else {"before"}
        names = {name for name, made in self.flow.functions.items() if function in made}
        found = {"before"} if names & model.before else set()
        late = bool(names & (model.after | self._handed)) or not names & model.only
        return found | ({"after"} if late else set())

    def is_early(self, node: cst.CSTNode) -> bool:
        """Whether a node runs before any model is wrapped, and never later."""
        return all(self._when(model, node) == {"before"} for model in self._models)

    # -- where -------------------------------------------------------------------------------------------------
    def _spread(self, model: _Followed) -> None:
        """Finds the variables that hold the plain model, and those that hold the wrapped one."""
        sources, held = {model.variable}, [model.variable]
        while held:
            for giver in self.flow.givers[held.pop()]:
                if giver.variable is not None and giver.variable not in sources:
                    sources.add(giver.variable)
                    held.append(giver.variable)
        model.plain = self._forward(model, sources, "before")
        model.wrapped = self._forward(model, {model.variable}, "after")

    def _forward(self, model: _Followed, start: set[Variable], when: str) -> set[Variable]:
        found = set(start)
        while True:
            new = {
                variable
                for variable, givers in self.flow.givers.items()
                if variable not in found and any(self._hands_on(model, giver, found, when) for giver in givers)
            }
            if not new:
                return found
            found |= new

    def _hands_on(self, model: _Followed, giver: Giver, found: set[Variable], when: str) -> bool:
        known = giver.variable
        return known in found and (known != model.variable or when in self._when(model, giver.site))

    def _states(self, variable: Variable, node: cst.CSTNode) -> set[str]:
        """What a variable may hold at a node: the plain model, the wrapped one, anything else."""
        found: set[str] = set()
        for model in self._models:
            if variable == model.variable:
                found |= {"wrapped" if when == "after" else "plain" for when in self._when(model, node)}
            else:
                found |= {"wrapped"} if variable in model.wrapped else set()
                found |= {"plain"} if variable in model.plain else set()
        wrapped = {one for model in self._models for one in model.wrapped}
        own = any(variable == model.variable for model in self._models)
        if not own and any(giver.variable not in wrapped for giver in self.flow.givers[variable]):
            found.add("other")
        return found

    # -- what --------------------------------------------------------------------------------------------------
    def _use(self, variable: Variable, node: cst.CSTNode) -> None:
        source, states = self._source, self._states(variable, node)
        early = self.is_early(node)
        outer = source.parent(node)
        if isinstance(outer, (cst.Attribute, cst.Subscript)) and outer.value is node:
            self._of_it(node, outer, states, early)
        elif isinstance(outer, cst.Call) and outer.func is node:
            self._called(node, outer, states, early)
        elif isinstance(outer, cst.Arg):
            self._argument(node, source.parent(outer), states)
        elif not self._is_followed(node, outer):
            self._lost(node, f"{code(node)} goes where it cannot be followed")

    def _is_followed(self, node: cst.CSTNode, outer: cst.CSTNode | None) -> bool:
        """Whether what is done with the whole model is known to the flow, or is nothing."""
        source = self._source
        if isinstance(outer, cst.Element) and isinstance(up := source.parent(outer), cst.Tuple):
            outer = source.parent(up)
            apart = isinstance(outer, cst.Assign) and all(isinstance(one.target, cst.Tuple) for one in outer.targets)
            return apart or isinstance(outer, (cst.AssignTarget, cst.Return)) or self._is_bound_anew(node)
        if isinstance(outer, cst.IfExp):
            return isinstance(source.parent(outer), (cst.Assign, cst.Return, cst.Arg))
        if isinstance(outer, (cst.Assign, cst.AssignTarget, cst.AnnAssign, cst.Return, cst.Param)):
            return True
        if isinstance(outer, (cst.Comparison, cst.ComparisonTarget, cst.If, cst.Assert, cst.UnaryOperation, cst.Del)):
            return True
        if isinstance(outer, (cst.FormattedStringExpression, cst.NameItem, cst.Expr)):
            return True
        return self._is_bound_anew(node)

    def _is_bound_anew(self, node: cst.CSTNode) -> bool:
        """Whether the statement assigns to the same variable: the old object is nobody's then."""
        statement = self._source.statement(node)
        assigns = find(statement, cst.Assign) if statement is not None else ()
        targets = [target.target for part in assigns for target in part.targets]
        parts = [one.value for target in targets if isinstance(target, cst.Tuple) for one in target.elements]
        return self.flow.variable(node) in map(self.flow.variable, (*targets, *parts))

    def _of_it(self, node: cst.CSTNode, outer: cst.Attribute | cst.Subscript, states: set[str], early: bool) -> None:
        """An attribute or an item of a model."""
        top, up = _whole(self._source, outer)
        call = up if isinstance(up, cst.Call) and up.func is top else None
        changes = isinstance(up, cst.AssignTarget) or (call is not None and top is outer and tail(top) in _CHANGES)
        if self._keeps_a_part(top, call):
            self._plan.refuse(node, f"{code(top)}: a part of the model under another name {_MAY_BE_CALLED}")
        elif early or (not changes and top is outer and tail(top) in _SAME):
            return
        elif changes:
            if not self._is_bound_anew(node):
                self._plan.refuse(node, f"{code(top)}: changes the model after it is wrapped")
        elif call is not None and self._runs_a_part(call, top):
            self._plan.refuse(node, f"{code(top)}() {_MAY_RUN}")
        elif states == {"wrapped"}:
            self._plain(node)
        elif "wrapped" in states:
            self._lost(node, f"{code(outer)} is asked of {_NOT_ALWAYS}")

    def _keeps_a_part(self, top: cst.CSTNode, call: cst.Call | None) -> bool:
        """Whether a part of the model gets another name, under which it may be called."""
        source = self._source
        if call is not None:
            if tail(top) not in _PARTS:
                return False
            loops = [one for one in source.above(top) if isinstance(one, (cst.For, cst.CompFor))]
            named = set().union(*(names_in(loop.target) for loop in loops if source.within(top, loop.iter)))
            around = source.statement(top)
            return tail(top) == "get_submodule" or any(
                isinstance(other.func, cst.Name) and other.func.value in named
                for other in (calls(around) if around is not None else ())
            )
        if isinstance(top, cst.Attribute) and tail(top) in _NO_PARTS:
            return False
        up = source.parent(top)
        if isinstance(up, cst.Arg):
            given = source.parent(up)
            return isinstance(given, cst.Call) and (source.qualified(given.func) or code(given.func)) not in _HARMLESS
        return isinstance(
            up,
            (cst.Assign, cst.AnnAssign, cst.NamedExpr, cst.Return, cst.Element, cst.DictElement, cst.For, cst.CompFor)
            + (cst.IfExp,),
        )

    def _runs_a_part(self, call: cst.Call, of: cst.CSTNode) -> bool:
        if tail(of) in (*_METHODS, *_SAME) or without_gradients(self._source, call):
            return False
        own = [one for one in self.flow.called(call) if one.name.value not in ("forward", "__init__")]
        return not own or any(self._calls_parts(one) for one in own)

    def _calls_parts(self, method: cst.FunctionDef) -> bool:
        return any(
            code(call.func).startswith("self") and tail(call.func) not in (*_METHODS, *_SAME)
            for call in calls(method.body)
        )

    def _called(self, node: cst.CSTNode, call: cst.Call, states: set[str], early: bool) -> None:
        if states == {"wrapped"}:
            self.calls.append(call)
        elif not early and not without_gradients(self._source, call):
            self._plan.refuse(
                node,
                f"{code(node)} may be the plain model here, whose gradients nobody averages: hand on what"
                " DistributedDataParallel returns",
            )

    def _argument(self, node: cst.CSTNode, call: cst.CSTNode | None, states: set[str]) -> None:
        if not isinstance(call, cst.Call) or self._is_bound_anew(node):
            return
        name = self._source.qualified(call.func) or code(call.func)
        if name in _HARMLESS:
            if states == {"wrapped"}:
                self._plain(node)
            elif "wrapped" in states:
                self._lost(node, f"{code(call.func)} is given {_NOT_ALWAYS}")
        elif not self.flow.called(call):
            self._lost(node, f"{code(call.func)} is given {code(node)}, and may call it")

    def _plain(self, node: cst.CSTNode) -> None:
        self._plan.replace(node, lambda updated: f"{code(updated)}.module")

    def _lost(self, node: cst.CSTNode, what: str) -> None:
        self._plan.refuse(
            node, f"{what}: whether it is to be the model or its DistributedDataParallel there cannot be told"
        )

    def _refuse_givers(self, model: _Followed) -> None:
        """Refuses a model that is assigned anew after it was wrapped, or that callers elsewhere may keep."""
        for giver in self.flow.givers[model.variable]:
            if self._when(model, giver.site) != {"before"}:
                self._plan.refuse(giver.site, f"{model.wrap.model} is assigned anew after it is wrapped")
        given = is_parameter(self._source, model.wrap.call, model.wrap.model)
        if given and not self.flow.givers[model.variable]:
            self._plan.note(
                model.wrap.call,
                f"{model.wrap.model} is given by another file, which keeps the plain one: where it trains with that,"
                " nothing is averaged",
            )


def _whole(source: Script, node: cst.CSTNode) -> tuple[cst.CSTNode, cst.CSTNode | None]:
    """The whole of a chain, `model.a[0].b` of `model.a`, and what it stands in."""
    while isinstance(up := source.parent(node), (cst.Attribute, cst.Subscript)) and up.value is node:
        node = up
    return node, up
