"""What else a script asks of `horovod.torch`: who it is, metrics over all ranks, objects and flags of rank 0's."""

from __future__ import annotations

from collections.abc import Mapping

import libcst as cst

from hvdtrain.migrate.script import ranks
from hvdtrain.migrate.script.plan import Rewrite, arguments_of, assignments, statement_of
from hvdtrain.migrate.script.ranks import (
    Arguments,
    Handler,
    attribute,
    initialized,
    method,
    object_of,
    root_of,
    shutdown,
)
from hvdtrain.migrate.script.source import (
    SIGNATURES,
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

_PREFIX = "horovod.torch."
_COLLECTIVES = ("allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_", "allgather", "broadcast")
# what of `Target.words` each is
_DOES = {name: "gather" if "gather" in name else "broadcast" if "broad" in name else "reduce" for name in _COLLECTIVES}
_OPS = {"Average": "mean", "Sum": "sum", "Min": "min", "Max": "max"}
# what hvdtrain has nothing in place of, by how its name begins; "" is the rest
_REASONS = {
    "Adasum": "hvdtrain averages gradients, and has no Adasum",
    "elastic": "elastic state and samplers have no counterpart: hvdtrain resumes from checkpoints, exactly, at any"
    " number of ranks (hvdtrain.Checkpointer, hvdtrain launch --max-restarts)",
    "join": "ranks with unequal numbers of batches: Horovod counts those of a rank that is done as zero gradients;"
    " hvt.loader over the data of all ranks gives each rank as many batches, and weighs them right",
    "SyncBatchNorm": "hvt.prepare(..., sync_batchnorm=True) makes it of a model's nn.BatchNorm layers: build these",
    **dict.fromkeys(("add_process_set", "remove_process_set", "ProcessSet", "global_process_set"), ranks.SETS_REASON),
    "horovod.run": ranks.RUN_REASON,
    **dict.fromkeys(
        ("synchronize", "poll"), "handles of operations under way have no counterpart: take the call that waits"
    ),
    "": "has no counterpart in hvdtrain",
}


# -- losses ------------------------------------------------------------------------------------------------------
def refuse_in_losses(plan: Rewrite) -> None:
    """Refuses collectives that a gradient goes through: there hvdtrain has none."""
    source = plan.source
    functions = {function.name.value: function for function in find(source.module, cst.FunctionDef)}
    for call in calls(source.module):
        if (loss := owner_of(call, "backward")) is not None:
            _follow(plan, call, loss, functions, set())
    for function in find(source.module, cst.FunctionDef):
        if function.name.value == "forward":
            _refuse_in(plan, function.body)


def _follow(
    plan: Rewrite, at: cst.CSTNode, value: cst.CSTNode, functions: dict[str, cst.FunctionDef], seen: set[str]
) -> None:
    """Looks at what a loss is made of: names assigned above, and functions of the script."""
    source = plan.source
    _refuse_in(plan, value)
    for node in walk(value):
        if isinstance(node, cst.Call) and tail(node.func) in functions and f"{tail(node.func)}()" not in seen:
            seen.add(f"{tail(node.func)}()")
            _refuse_in(plan, functions[tail(node.func)].body)
        if isinstance(node, (cst.Name, cst.Attribute)) and code(node) not in seen:
            seen.add(code(node))
            for assigned in assignments(source, code(node), at):
                _follow(plan, assigned, assigned, functions, seen)


def _refuse_in(plan: Rewrite, part: cst.CSTNode) -> None:
    source = plan.source
    for call in calls(part):
        name = source.qualified(call.func).removeprefix(_PREFIX)
        if source.qualified(call.func) == _PREFIX + name and name in _COLLECTIVES and not _is_detached(source, call):
            plan.settle(call)
            given = code(call.args[0].value) if call.args else "x"
            plan.refuse(
                call,
                f"hvd.{name} within a loss has a gradient, which {plan.use(_DOES[name])} has not: {plan.target.loss}"
                f" takes this rank's own loss, and averages it over ranks; for a metric, {given}.detach()",
            )


def _is_detached(source: Script, call: cst.Call) -> bool:
    """Whether no gradient can go through it, as it is written."""
    given = code(call.args[0].value) if call.args else ""
    if any(mark in given for mark in (".detach()", ".item()", "torch.tensor(", ".data", ".grad")):
        return True
    names = list(find(call.args[0].value, cst.Name)) if call.args else []
    made = [
        assignments(source, name.value, call)[:1] for name in names if not source.qualified(name).startswith("torch")
    ]
    if any(made) and all(not one or code(one[0]).endswith(".detach()") for one in made):
        return True
    return without_gradients(source, call)


def without_gradients(source: Script, node: cst.CSTNode) -> bool:
    """Whether a node stands in `with torch.no_grad():`, or in a function that is decorated so."""
    around: list[cst.CSTNode] = []
    for one in source.above(node):
        around += one.items if isinstance(one, cst.With) else one.decorators if isinstance(one, cst.FunctionDef) else []
    return any("no_grad" in code(one) or "inference_mode" in code(one) for one in around)


def averages_by_hand(source: Script) -> bool:
    """Whether gradients are averaged by collectives of the script's own."""
    return any(
        source.qualified(call.func).startswith(_PREFIX) and ".grad" in "".join(code(arg) for arg in call.args)
        for call in calls(source.module)
    )


# -- the rest ----------------------------------------------------------------------------------------------------
def move_rest(plan: Rewrite) -> None:
    """Moves every use of Horovod that is left, or refuses it."""
    ranks.move_rest(plan, movers(HANDLERS, _REASONS) | {"horovod.run": ranks.move_run}, _REASONS)


def movers(handlers: Mapping[str, Handler], reasons: Mapping[str, str]) -> dict[str, ranks.Mover]:
    """What moves a call of each of Horovod's functions: `handlers` of the same names, given its arguments."""

    def move(plan: Rewrite, call: cst.Call, name: str) -> None:
        arguments = arguments_of(plan, call, name)
        if arguments is None:
            return
        sets = arguments.get("process_set")
        plan.settle(sets)
        if sets is not None and plan.source.qualified(sets) != _PREFIX + "global_process_set":
            plan.refuse(call, reasons["ProcessSet"])
        elif name in handlers:  # else it has been moved
            for dropped in ("name", "compression", "model"):
                plan.settle(arguments.get(dropped))
            handlers[name](plan, call, name, arguments)

    return dict.fromkeys(SIGNATURES, move)


def _reduced(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    op = _op(plan, call, arguments)
    if op is None or _is_written_to(plan, call, name, arguments):
        return
    reduce = plan.use("reduce")
    last = "" if op == "mean" else f', "{op}"'
    detached = _was_differentiated(plan.source, call) or _is_a_number(plan.source, call)

    def written(updated: cst.Call) -> str:
        given = plan.bind(updated, name)["tensors" if name.startswith("grouped") else "tensor"]
        tensor = code(given)
        if name.startswith("grouped"):
            one = f"{reduce}(tensor{last})"
            return f"[{f'tensor.copy_({one})' if name.endswith('_') else one} for tensor in {tensor}]"
        whole = isinstance(given, (cst.Name, cst.Attribute, cst.Call, cst.Subscript))
        alone = f"{tensor if whole else f'({tensor})'}.detach()" if detached else tensor
        reduced = f"{reduce}({alone}{last})"
        return f"{tensor}.data.copy_({reduced})" if name.endswith("_") else reduced

    plan.replace(call, written)


def _op(plan: Rewrite, call: cst.Call, arguments: Arguments) -> str | None:
    """What is made of the ranks' values; None where it is refused."""
    for name in ("prescale_factor", "postscale_factor"):
        if literal(arguments.get(name)) not in ("", "1.0", "1"):
            plan.refuse(call, f"{name}: multiply what {plan.use('reduce')} is given, or returns")
            return None
    op, average = arguments.get("op"), literal(arguments.get("average"))
    plan.settle(op)
    if op is None or literal(op) == "None":
        if average not in ("", "None", "True", "False"):
            plan.refuse(call, f"average={average}: whether this is a mean or a sum cannot be told")
            return None
        return "sum" if average == "False" else "mean"
    found = _OPS.get(plan.source.qualified(op).removeprefix(_PREFIX))
    if found is None:
        plan.refuse(call, f"op={code(op)}: {plan.use('reduce')} makes a mean, a sum, the smallest or the largest")
    return found


def _is_a_number(source: Script, call: cst.Call) -> bool:
    """Whether only a number is made of what it returns, `hvd.allreduce(x).item()`, and a gradient may hang on it."""
    outer = source.parent(call)
    return isinstance(outer, cst.Attribute) and tail(outer) == "item" and not _is_detached(source, call)


def _was_differentiated(source: Script, call: cst.Call) -> bool:
    """Whether its tensor is a loss whose backward pass is done, above in the same function: its graph is gone."""
    given = call.args[0].value if call.args else None
    return is_chain(given) and any(
        (loss := owner_of(other, "backward")) is not None and code(loss) == code(given) and source.is_above(other, call)
        for other in calls(source.function(call))
    )


def _gathered(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    ranks.send(plan, call, name, plan.use("gather"))


def _is_written_to(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> bool:
    """Whether an operation in place is refused: what it writes to would stand twice in what replaces it."""
    given = arguments.get("tensor")
    while isinstance(given, cst.Subscript) and not any(True for part in given.slice for _ in calls(part)):
        given = given.value
    if not name.endswith("_") or name.startswith("grouped") or is_chain(given):
        return False
    plan.refuse(call, f"hvd.{name} is moved where what it writes to has a name")
    return True


def _broadcast(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    if _is_written_to(plan, call, name, arguments):
        return
    does = plan.use("broadcast")

    def written(updated: cst.Call) -> str:
        found = plan.bind(updated, name)
        tensor = code(found["tensor"])
        return f"{tensor}.data.copy_({does}({tensor}.data{root_of(found)}))"

    if name.endswith("_"):  # of a parameter, too: without a gradient, as Horovod does
        plan.replace(call, written)
    else:
        ranks.send(plan, call, name, does)


def _state(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    """A broadcast that `hvt.prepare` does not make: of a state after training, or of another rank's."""
    given = arguments.get("params" if name == "broadcast_parameters" else "optimizer")
    if name == "broadcast_parameters":
        of = given.func if isinstance(given, cst.Call) and not given.args else None
        if not isinstance(of, cst.Attribute) or of.attr.value != "state_dict":
            plan.refuse(call, "broadcast_parameters is moved where it is given model.state_dict()")
            return
        given = of.value
    if load_state(plan, call, name, given, f"{ranks.ranks(plan, call)}.broadcast"):
        statement_of(plan, call, f"hvd.{name}")


def load_state(plan: Rewrite, call: cst.Call, name: str, given: cst.BaseExpression | None, does: str) -> bool:
    """Loads the state of what has a name from one rank's, which `does` gives to all; whether it has one."""
    if not is_chain(given):
        plan.refuse(call, f"hvd.{name} is moved where it is given a name")
        return False
    owner = code(given)
    plan.needs.add(does.split(".")[0])

    def written(updated: cst.Call) -> str:
        return f"{owner}.load_state_dict({does}({owner}.state_dict(){root_of(plan.bind(updated, name))}))"

    plan.replace(call, written)
    return True


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(("allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_"), _reduced),
    "allgather": _gathered,
    "broadcast": _broadcast,
    "broadcast_": _broadcast,
    "broadcast_object": object_of,
    "allgather_object": object_of,
    "broadcast_parameters": _state,
    "broadcast_optimizer_state": _state,
    "barrier": method,
    "shutdown": shutdown,
    "is_initialized": initialized,
    **dict.fromkeys(("rank", "size", "local_rank", "local_size"), attribute),
}
