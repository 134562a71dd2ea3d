"""Converts calls of `horovod.torch` beside the optimizer: ranks, metrics over all ranks, objects of rank 0."""

from __future__ import annotations

from collections.abc import Mapping

import libcst as cst

from hvdtrain.migrate.script import ranks
from hvdtrain.migrate.script.plan import Rewrite, arguments_of, statement_of
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
    is_chain,
    literal,
    owner_of,
    tail,
)

_PREFIX = "horovod.torch."
_OPS = {"Average": "mean", "Sum": "sum", "Min": "min", "Max": "max"}
# what has no counterpart in hvdtrain, by the beginning of its name; "" is the rest
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


def averages_by_hand(source: Script) -> bool:
    """Returns True if the script averages gradients by collectives of its own."""
    return any(
        source.qualified(call.func).startswith(_PREFIX) and ".grad" in "".join(code(arg) for arg in call.args)
        for call in calls(source.module)
    )


# -- the rest ----------------------------------------------------------------------------------------------------
def move_rest(plan: Rewrite) -> None:
    """Converts every remaining use of Horovod, or refuses it."""
    ranks.move_rest(plan, movers(HANDLERS, _REASONS) | {"horovod.run": ranks.move_run}, _REASONS)


def movers(handlers: Mapping[str, Handler], reasons: Mapping[str, str]) -> dict[str, ranks.Mover]:
    """Returns what converts a call of each of Horovod's functions: `handlers` of the same names, with its arguments."""

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
    """Returns what is made of the ranks' values; None, and refuses the call, if there is none for it."""
    for name in ("prescale_factor", "postscale_factor"):
        if literal(arguments.get(name)) not in ("", "1.0", "1"):
            plan.refuse(call, f"{name}: multiply what {plan.use('reduce')} is given, or returns")
            return None
    op, average = arguments.get("op"), literal(arguments.get("average"))
    plan.settle(op)
    if op is None or literal(op) == "None":
        if average not in ("", "None", "True", "False"):
            plan.refuse(call, f"average={average}: whether this is a mean or a sum is not known")
            return None
        return "sum" if average == "False" else "mean"
    found = _OPS.get(plan.source.qualified(op).removeprefix(_PREFIX))
    if found is None:
        plan.refuse(call, f"op={code(op)}: {plan.use('reduce')} makes a mean, a sum, the smallest or the largest")
    return found


def _is_a_number(source: Script, call: cst.Call) -> bool:
    """Returns True if only a number is made of the result, `hvd.allreduce(x).item()`: no gradient goes through it."""
    outer = source.parent(call)
    given = code(call.args[0].value) if call.args else ""
    plain = any(mark in given for mark in (".detach()", ".item()", "torch.tensor(", ".data", ".grad"))
    return isinstance(outer, cst.Attribute) and tail(outer) == "item" and not plain


def _was_differentiated(source: Script, call: cst.Call) -> bool:
    """Returns True if its tensor is a loss whose backward pass stands above in the same function."""
    given = call.args[0].value if call.args else None
    return is_chain(given) and any(
        (loss := owner_of(other, "backward")) is not None and code(loss) == code(given) and source.is_above(other, call)
        for other in calls(source.function(call))
    )


def _gathered(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    ranks.send(plan, call, name, plan.use("gather"))


def _is_written_to(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> bool:
    """Returns True, and refuses an operation in place, if its tensor has no name: it is written twice."""
    given = arguments.get("tensor")
    while isinstance(given, cst.Subscript) and not any(True for part in given.slice for _ in calls(part)):
        given = given.value
    if not name.endswith("_") or name.startswith("grouped") or is_chain(given):
        return False
    plan.refuse(call, f"hvd.{name} needs a tensor that has a name")
    return True


def _broadcast(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    if _is_written_to(plan, call, name, arguments):
        return
    does = plan.use("broadcast")

    def written(updated: cst.Call) -> str:
        found = plan.bind(updated, name)
        tensor = code(found["tensor"])
        return f"{tensor}.data.copy_({does}({tensor}.data{root_of(found)}))"

    if name.endswith("_"):  # also of a parameter: without a gradient, as Horovod does
        plan.replace(call, written)
    else:
        ranks.send(plan, call, name, does)


def _state(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    """Converts a broadcast that `hvt.prepare` does not make: after training, or of another rank."""
    given = arguments.get("params" if name == "broadcast_parameters" else "optimizer")
    if name == "broadcast_parameters":
        of = given.func if isinstance(given, cst.Call) and not given.args else None
        if not isinstance(of, cst.Attribute) or of.attr.value != "state_dict":
            plan.refuse(call, "broadcast_parameters needs model.state_dict()")
            return
        given = of.value
    if load_state(plan, call, name, given, f"{ranks.ranks(plan, call)}.broadcast"):
        statement_of(plan, call, f"hvd.{name}")


def load_state(plan: Rewrite, call: cst.Call, name: str, given: cst.BaseExpression | None, does: str) -> bool:
    """Loads one rank's state, which `does` sends to all; returns False, and refuses it, for what has no name."""
    if not is_chain(given):
        plan.refuse(call, f"hvd.{name} needs an argument that has a name")
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
