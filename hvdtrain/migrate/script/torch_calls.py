"""Converts calls of `horovod.torch` beside the optimizer: ranks, metrics over all ranks, objects of rank 0."""

from __future__ import annotations

import libcst as cst

from hvdtrain.migrate.script import ranks
from hvdtrain.migrate.script.plan import SETS_REASON, Rewrite, arguments_of, statement_of
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
from hvdtrain.migrate.script.source import SIGNATURES, Script, calls, code, is_chain, literal

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
    **dict.fromkeys(("add_process_set", "remove_process_set", "ProcessSet", "global_process_set"), SETS_REASON),
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
    ranks.move_rest(plan, dict.fromkeys(SIGNATURES, _move_call), _REASONS)


def _move_call(plan: Rewrite, call: cst.Call, name: str) -> None:
    arguments = arguments_of(plan, call, name)
    if arguments is not None and name in _HANDLERS:  # else it has been moved
        for dropped in ("name", "compression", "model"):
            plan.settle(arguments.get(dropped))
        _HANDLERS[name](plan, call, name, arguments)


def _reduced(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    op = _op(plan, call, arguments)
    if op is None or _is_written_to(plan, call, name, arguments):
        return
    plan.needs.add("hvt")
    last = "" if op == "mean" else f', "{op}"'

    def written(updated: cst.Call) -> str:
        tensor = code(plan.bind(updated, name)["tensors" if name.startswith("grouped") else "tensor"])
        if name.startswith("grouped"):
            one = f"hvt.reduce(tensor{last})"
            return f"[{f'tensor.copy_({one})' if name.endswith('_') else one} for tensor in {tensor}]"
        reduced = f"hvt.reduce({tensor}{last})"
        return f"{tensor}.data.copy_({reduced})" if name.endswith("_") else reduced

    plan.replace(call, written)


def _op(plan: Rewrite, call: cst.Call, arguments: Arguments) -> str | None:
    """Returns what is made of the ranks' values; None, and refuses the call, if there is none for it."""
    for name in ("prescale_factor", "postscale_factor"):
        if literal(arguments.get(name)) not in ("", "1.0", "1"):
            plan.refuse(call, f"{name}: multiply what hvt.reduce is given, or returns")
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
        plan.refuse(call, f"op={code(op)}: hvt.reduce makes a mean, a sum, the smallest or the largest")
    return found


def _gathered(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    ranks.send(plan, call, name, "hvt.gather")


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

    def written(updated: cst.Call) -> str:
        found = plan.bind(updated, name)
        tensor = code(found["tensor"])
        return f"{tensor}.data.copy_(hvt.broadcast({tensor}.data{root_of(found)}))"

    if name.endswith("_"):  # also of a parameter: without a gradient, as Horovod does
        plan.needs.add("hvt")
        plan.replace(call, written)
    else:
        ranks.send(plan, call, name, "hvt.broadcast")


def _state(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    """Converts a broadcast that `hvt.prepare` does not make: after training, or of another rank."""
    given = arguments.get("params" if name == "broadcast_parameters" else "optimizer")
    if name == "broadcast_parameters":
        of = given.func if isinstance(given, cst.Call) and not given.args else None
        if not isinstance(of, cst.Attribute) or of.attr.value != "state_dict":
            plan.refuse(call, "broadcast_parameters needs model.state_dict()")
            return
        given = of.value
    if not is_chain(given):
        plan.refuse(call, f"hvd.{name} needs an argument that has a name")
        return
    owner, world = code(given), ranks.ranks(plan, call)

    def written(updated: cst.Call) -> str:
        root = root_of(plan.bind(updated, name))
        return f"{owner}.load_state_dict({world}.broadcast({owner}.state_dict(){root}))"

    plan.replace(call, written)
    statement_of(plan, call, f"hvd.{name}")


_HANDLERS: dict[str, Handler] = {
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
