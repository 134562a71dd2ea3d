"""Converts calls of Horovod's Keras beside the optimizer: callbacks, ranks, numbers over all ranks."""

from __future__ import annotations

from collections.abc import Collection

import libcst as cst

from hvdtrain.migrate.keras.callbacks import move_callbacks, seed_each_rank
from hvdtrain.migrate.script import ranks
from hvdtrain.migrate.script.plan import SETS_REASON, Rewrite, arguments_of
from hvdtrain.migrate.script.ranks import Arguments, Handler, attribute, initialized, method, object_of, shutdown
from hvdtrain.migrate.script.source import code, literal

# they set the optimizer's learning rate, and nothing else
_KEPT = ("callbacks.LearningRateWarmupCallback", "callbacks.LearningRateScheduleCallback")
_SENT = "hvk.callbacks(model) of fit give all ranks rank 0's variables; outside of fit there is none"
_REASONS = {
    "DistributedGradientTape": "a loop of one's own has no counterpart of the tape: hvdtrain averages in fit, also of a"
    " model with a train_step of its own; hvdtrain guard watches this script as it is",
    "broadcast_variables": _SENT,
    "broadcast_global_variables": _SENT,
    "PartialDistributedOptimizer": "layers of each rank's own: hvdtrain trains one model on all ranks",
    "elastic": "elastic state has no counterpart: hvdtrain resumes from checkpoints, exactly, at any number of ranks"
    " (hvdtrain.Checkpointer, hvdtrain launch --max-restarts)",
    "callbacks.BestModelCheckpoint": "write keras.callbacks.ModelCheckpoint(..., save_best_only=True), on rank 0",
    "allgather": "hvd.allgather has no counterpart of its form: world.gather(value) is a list of all ranks' values",
    **dict.fromkeys(("add_process_set", "remove_process_set", "ProcessSet"), SETS_REASON),
    "horovod.run": ranks.RUN_REASON,
    "": "has no counterpart in hvdtrain",
}


def kept_imports(plan: Rewrite) -> dict[str, str]:
    """Returns the import of those of Horovod's callbacks that stay, by what needs it."""
    names = sorted(name.split(".")[1] for name in _KEPT if name in plan.needs)
    if names:
        plan.needs.add("kept callbacks")
    return {"keras": "import keras", "kept callbacks": f"from {plan.prefix}callbacks import {', '.join(names)}"}


def move_rest(plan: Rewrite, models: Collection[str]) -> None:
    """Moves every remaining use of Horovod, or refuses it; `models` are the last names of those that are prepared."""
    move_callbacks(plan, models)
    seed_each_rank(plan)
    ranks.move_rest(plan, dict.fromkeys(_HANDLERS, _move_call), _REASONS, dict.fromkeys(_KEPT, _keep))


def _keep(plan: Rewrite, node: cst.CSTNode, short: str) -> None:
    """Keeps Horovod's callback that sets the learning rate: it works beside hvdtrain's average."""
    name = short.split(".")[1]
    plan.needs.add(short)
    plan.replace(node, name)
    plan.note(node, f"{name} stays Horovod's, which must be there: hvdtrain.LR(warmup=...) is its counterpart, by hand")


# -- the rest ----------------------------------------------------------------------------------------------------
def _move_call(plan: Rewrite, call: cst.Call, name: str) -> None:
    arguments = arguments_of(plan, call, name)
    if arguments is not None:
        plan.settle(arguments.get("compression"))
        _HANDLERS[name](plan, call, name, arguments)


def _broadcast(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    """Converts `hvd.broadcast` of a number, or of another value that can be pickled."""
    if plan.module == "horovod.tensorflow":
        plan.refuse(call, "hvd.broadcast of a tensor: world.broadcast is of what can be pickled")
        return
    does = f"{ranks.ranks(plan, call)}.broadcast"
    plan.note(call, f"{does} gives what rank 0 has, as it is; Horovod's made an array of it")
    ranks.send(plan, call, name, does)


def _number(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    """Converts `hvd.allreduce` of a number; `world.mean` raises an error on anything else."""
    op, average = arguments.get("op"), literal(arguments.get("average"))
    found = "" if op is None else plan.source.qualified(op).removeprefix(plan.prefix)
    if plan.module == "horovod.tensorflow":
        plan.refuse(call, "hvd.allreduce of a tensor: world.mean({...}) is of numbers")
        return
    scales = [literal(arguments.get(scale)) for scale in ("prescale_factor", "postscale_factor")]
    if found not in ("", "Average", "Sum") or {"", "1", "1.0"} < {"", "1", "1.0", *scales}:
        plan.refuse(call, "hvd.allreduce must be a mean, or a sum, without factors")
        return
    if op is None and average not in ("", "None", "True", "False"):
        plan.refuse(call, f"average={average}: whether this is a mean or a sum is not known")
        return
    plan.settle(op)
    does = "sum" if found == "Sum" or (op is None and average == "False") else "mean"
    world, key = ranks.ranks(plan, call), literal(arguments.get("name"))
    key = key if isinstance(arguments.get("name"), cst.SimpleString) else '"value"'
    plan.note(call, f"world.{does} is of numbers: where this is an array, or in a graph, it raises")

    def written(updated: cst.Call) -> str:
        value = code(plan.bind(updated, name)["value"])
        return f"{world}.{does}({{{key}: {value}}})[{key}]"

    plan.replace(call, written)


_HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(("rank", "size", "local_rank", "local_size"), attribute),
    "allreduce": _number,
    "broadcast": _broadcast,
    "broadcast_object": object_of,
    "allgather_object": object_of,
    "barrier": method,
    "shutdown": shutdown,
    "is_initialized": initialized,
}
