"""What else a script asks of `horovod.torch`: who it is, metrics over all ranks, objects and flags of rank 0's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import libcst as cst
from libcst import metadata

from hvdtrain.migrate.plan import Plan, assignments, condition_above, statement_of
from hvdtrain.migrate.source import SIGNATURES, Source, bind, calls, code, is_chain, literal, tail, walk

_PREFIX = "horovod.torch."
_COLLECTIVES = ("allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_", "allgather", "broadcast")
_OPS = {"Average": "mean", "Sum": "sum", "Min": "min", "Max": "max"}
# what hvdtrain has nothing in place of, by how its name begins; "" is the rest
_REASONS = {
    "Adasum": "hvdtrain averages gradients, and has no Adasum",
    "elastic": "elastic state and samplers have no counterpart: hvdtrain resumes from checkpoints, exactly, at any"
    " number of ranks (hvdtrain.Checkpointer, hvdtrain launch --max-restarts)",
    "join": "ranks with unequal numbers of batches: Horovod counts those of a rank that is done as zero gradients;"
    " hvt.loader over the data of all ranks gives each rank as many batches, and weighs them right",
    "SyncBatchNorm": "hvt.prepare(..., sync_batchnorm=True) makes it of a model's nn.BatchNorm layers: build these",
    "add_process_set": "process sets: hvdtrain trains one model on all ranks",
    "remove_process_set": "process sets: hvdtrain trains one model on all ranks",
    "ProcessSet": "process sets: hvdtrain trains one model on all ranks",
    "global_process_set": "process sets: hvdtrain trains one model on all ranks",
    "horovod.run": "horovod.run is moved where it is called, with args=, kwargs=, np=, hosts= and hostfile=",
    "synchronize": "handles of operations under way have no counterpart: take the call that waits",
    "poll": "handles of operations under way have no counterpart: take the call that waits",
    "": "has no counterpart in hvdtrain",
}


# -- the ranks ---------------------------------------------------------------------------------------------------
def move_init(plan: Plan) -> None:
    """`hvd.init()` becomes `world = hvdtrain.init("torch")`, which is who knows of the ranks."""
    source = plan.source
    found = [call for call in calls(source.module) if source.qualified(call.func) == _PREFIX + "init"]
    for call in found:
        plan.settle(call)
        if call is not found[0]:
            plan.refuse(call, "a second hvd.init(): hvdtrain.init is called once")
            continue
        statement = statement_of(plan, call, "hvd.init()")
        if statement is None:
            continue
        if call.args:
            plan.refuse(call, "hvd.init with arguments: hvdtrain takes all ranks, and the devices that it finds")
        elif condition_above(source, call) is not None:
            plan.refuse(
                call, "hvd.init() under a condition: hvdtrain.init is always called, and one process is a world of one"
            )
        if "world" not in source.names():
            plan.world_scope = source.scope(call)
        plan.needs.add("hvdtrain")
        plan.rewrite(
            statement,
            lambda _: ['world = hvdtrain.init("torch")' if "world" in plan.needs else 'hvdtrain.init("torch")'],
        )
        _note_seeds(plan, call)


def _note_seeds(plan: Plan, init: cst.Call) -> None:
    """hvdtrain.init seeds: what was seeded before it is seeded anew."""
    source = plan.source
    for call in calls(source.module):
        above = source.line(call) < source.line(init) and source.function(call) is source.function(init)
        if above and source.qualified(call.func) in ("torch.manual_seed", "numpy.random.seed", "random.seed"):
            plan.note(call, "hvdtrain.init seeds Python, numpy and PyTorch anew: give it seed=, or seed after it")


def ranks(plan: Plan, node: cst.CSTNode) -> str:
    """The world, as a node can name it."""
    plan.needs.add("hvdtrain")
    scope = plan.source.scope(node)
    while plan.world_scope is not None and scope is not None:
        if scope is plan.world_scope:
            plan.needs.add("world")
            return "world"
        if isinstance(scope, metadata.GlobalScope):
            break
        scope = scope.parent
    return "hvdtrain.current()"


def move_imports(plan: Plan, imports: Sequence[cst.SimpleStatementLine]) -> None:
    """The first import of Horovod in each scope becomes those of hvdtrain that are needed."""
    lines = {"hvdtrain": "import hvdtrain", "hvt": "import hvdtrain.torch as hvt"}
    seen: list[Any] = []
    for statement in imports:
        scope = plan.source.scope(statement)
        texts = [line for name, line in lines.items() if name in plan.needs] if scope not in seen else []
        seen.append(scope)
        plan.rewrite(statement, _constantly(texts))


def _constantly(texts: Sequence[str]) -> Callable[[Any], Sequence[str]]:
    return lambda _: texts


# -- losses ------------------------------------------------------------------------------------------------------
def refuse_in_losses(plan: Plan) -> None:
    """Refuses collectives that a gradient goes through: there hvdtrain has none."""
    source = plan.source
    functions = {f.name.value: f for f in walk(source.module) if isinstance(f, cst.FunctionDef)}
    for call in calls(source.module):
        if isinstance(call.func, cst.Attribute) and tail(call.func) == "backward":
            _follow(plan, call, call.func.value, functions, set())
    for node in walk(source.module):
        if isinstance(node, cst.FunctionDef) and node.name.value == "forward":
            _refuse_in(plan, node.body)


def _follow(
    plan: Plan, at: cst.CSTNode, value: cst.CSTNode, functions: dict[str, cst.FunctionDef], seen: set[str]
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


def _refuse_in(plan: Plan, part: cst.CSTNode) -> None:
    source = plan.source
    for call in calls(part):
        name = source.qualified(call.func).removeprefix(_PREFIX)
        if source.qualified(call.func) == _PREFIX + name and name in _COLLECTIVES and not _is_detached(source, call):
            plan.settle(call)
            given = code(call.args[0].value) if call.args else "x"
            plan.refuse(
                call,
                f"hvd.{name} within a loss has a gradient, which hvdtrain's has not: optimizer.backward(loss) takes"
                f" this rank's own loss, and averages it over ranks; for a metric, {given}.detach()",
            )


def _is_detached(source: Source, call: cst.Call) -> bool:
    """Whether no gradient can go through it, as it is written."""
    given = code(call.args[0].value) if call.args else ""
    if any(mark in given for mark in (".detach()", ".item()", "torch.tensor(", ".data", ".grad")):
        return True
    names = [one for one in walk(call.args[0].value) if isinstance(one, cst.Name)] if call.args else []
    made = [
        assignments(source, name.value, call)[:1] for name in names if not source.qualified(name).startswith("torch")
    ]
    if any(made) and all(not one or code(one[0]).endswith(".detach()") for one in made):
        return True
    around: list[cst.CSTNode] = []
    for one in source.above(call):
        around += one.items if isinstance(one, cst.With) else one.decorators if isinstance(one, cst.FunctionDef) else []
    return any("no_grad" in code(one) or "inference_mode" in code(one) for one in around)


def averages_by_hand(source: Source) -> bool:
    """Whether gradients are averaged by collectives of the script's own."""
    return any(
        source.qualified(call.func).startswith(_PREFIX) and ".grad" in "".join(code(arg) for arg in call.args)
        for call in calls(source.module)
    )


# -- the rest ----------------------------------------------------------------------------------------------------
def move_rest(plan: Plan) -> None:
    """Moves every use of Horovod that is left, or refuses it."""
    source = plan.source
    for node in list(walk(source.module)):
        meanings = source.meanings(node) if isinstance(node, (cst.Name, cst.Attribute)) else set()
        if not any(name.startswith("horovod") for name in meanings) or plan.is_settled(node):
            continue
        outer = source.parent(node)
        if isinstance(outer, cst.AsName) or (isinstance(outer, cst.Attribute) and outer.attr is node):
            continue
        plan.settle(node)
        if len(meanings) > 1:
            plan.refuse(node, f"{code(node)} is not Horovod's only: whether it is here cannot be told")
            continue
        short = meanings.pop().removeprefix(_PREFIX)
        if isinstance(outer, cst.Call) and outer.func is node and short in SIGNATURES:
            _move_call(plan, outer, short)
        elif isinstance(outer, cst.Call) and outer.func is node and short == "horovod.run":
            _move_run(plan, outer)
        elif short in ("Compression.fp16", "Compression.none"):
            plan.replace(node, '"fp16"' if short.endswith("fp16") else "None")
        else:
            plan.refuse(node, _reason(short, code(node)))


def _reason(name: str, text: str) -> str:
    if name.endswith(("_async", "_async_")):
        return _REASONS["synchronize"]
    if name in ("horovod.torch", "horovod"):
        return f"{text} itself as a value: what is done with it cannot be told"
    found = next(reason for begin, reason in _REASONS.items() if name.startswith(begin))
    return found if found != _REASONS[""] else f"{text} {found}"


def _move_call(plan: Plan, call: cst.Call, name: str) -> None:
    arguments = bind(call, name)
    if arguments is None or set(arguments) - set(SIGNATURES[name].split()):
        plan.refuse(call, f"the arguments of hvd.{name} cannot be told")
        return
    sets = arguments.get("process_set")
    if sets is not None:
        plan.settle(sets)
        if plan.source.qualified(sets) != _PREFIX + "global_process_set":
            plan.refuse(call, _REASONS["ProcessSet"])
            return
    if name == "DistributedOptimizer" or name == "init":
        return
    for dropped in ("name", "compression", "model"):
        plan.settle(arguments.get(dropped))
    _HANDLERS.get(name, _attribute)(plan, call, name, arguments)


Arguments = dict[str, cst.BaseExpression]


def _attribute(plan: Plan, call: cst.Call, name: str, arguments: Arguments) -> None:
    plan.replace(call, f"{ranks(plan, call)}.{name}")


def _method(plan: Plan, call: cst.Call, name: str, arguments: Arguments) -> None:
    plan.replace(call, f"{ranks(plan, call)}.{name}()")


def _initialized(plan: Plan, call: cst.Call, name: str, arguments: Arguments) -> None:
    plan.needs.add("hvdtrain")
    plan.replace(call, "(hvdtrain.current() is not None)")


def _shutdown(plan: Plan, call: cst.Call, name: str, arguments: Arguments) -> None:
    statement = statement_of(plan, call, "hvd.shutdown()")
    if statement is not None:
        plan.remove(statement)  # a world is left at the program's end


def _reduced(plan: Plan, call: cst.Call, name: str, arguments: Arguments) -> None:
    op = _op(plan, call, arguments)
    if op is None:
        return
    plan.needs.add("hvt")
    last = "" if op == "mean" else f', "{op}"'
    detached = _was_differentiated(plan.source, call) or _is_a_number(plan.source, call)

    def written(updated: cst.Call) -> str:
        given = (bind(updated, name) or {})["tensors" if name.startswith("grouped") else "tensor"]
        tensor = code(given)
        if name.startswith("grouped"):
            one = "tensor.copy_(hvt.reduce(tensor{0}))" if name.endswith("_") else "hvt.reduce(tensor{0})"
            return f"[{one.format(last)} for tensor in {tensor}]"
        whole = isinstance(given, (cst.Name, cst.Attribute, cst.Call, cst.Subscript))
        alone = f"{tensor if whole else f'({tensor})'}.detach()" if detached else tensor
        reduced = f"hvt.reduce({alone}{last})"
        return f"{tensor}.copy_({reduced})" if name.endswith("_") else reduced

    plan.replace(call, written)


def _op(plan: Plan, call: cst.Call, arguments: Arguments) -> str | None:
    """What is made of the ranks' values; None where it is refused."""
    for name in ("prescale_factor", "postscale_factor"):
        if literal(arguments.get(name)) not in ("", "1.0", "1"):
            plan.refuse(call, f"{name}: multiply what hvt.reduce is given, or returns")
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
        plan.refuse(call, f"op={code(op)}: hvt.reduce makes a mean, a sum, the smallest or the largest")
    return found


def _is_a_number(source: Source, call: cst.Call) -> bool:
    """Whether only a number is made of what it returns, `hvd.allreduce(x).item()`, and a gradient may hang on it."""
    outer = source.parent(call)
    return isinstance(outer, cst.Attribute) and tail(outer) == "item" and not _is_detached(source, call)


def _was_differentiated(source: Source, call: cst.Call) -> bool:
    """Whether its tensor is a loss whose backward pass is done, above in the same function: its graph is gone."""
    given = call.args[0].value if call.args else None
    if given is None or not is_chain(given):
        return False
    return any(
        isinstance(other.func, cst.Attribute)
        and tail(other.func) == "backward"
        and code(other.func.value) == code(given)
        and source.line(other) < source.line(call)
        and source.function(other) is source.function(call)
        for other in calls(source.function(call))
    )


def _gathered(plan: Plan, call: cst.Call, name: str, arguments: Arguments) -> None:
    plan.needs.add("hvt")
    plan.replace(call, lambda updated: f"hvt.gather({code((bind(updated, name) or {})['tensor'])})")


def _root(arguments: Arguments) -> str:
    root = literal(arguments.get("root_rank"))
    return "" if root in ("", "0") else f", {root}"


def _broadcast(plan: Plan, call: cst.Call, name: str, arguments: Arguments) -> None:
    plan.needs.add("hvt")

    def written(updated: cst.Call) -> str:
        found = bind(updated, name) or {}
        given = f"hvt.broadcast({code(found['tensor'])}{_root(found)})"
        return f"{code(found['tensor'])}.copy_({given})" if name.endswith("_") else given

    plan.replace(call, written)


def _object(plan: Plan, call: cst.Call, name: str, arguments: Arguments) -> None:
    world, does = ranks(plan, call), "broadcast" if name == "broadcast_object" else "gather"

    def written(updated: cst.Call) -> str:
        found = bind(updated, name) or {}
        return f"{world}.{does}({code(found['obj'])}{_root(found)})"

    plan.replace(call, written)


def _state(plan: Plan, call: cst.Call, name: str, arguments: Arguments) -> None:
    """A broadcast that `hvt.prepare` does not make: of a state after training, or of another rank's."""
    given = arguments.get("params" if name == "broadcast_parameters" else "optimizer")
    if name == "broadcast_parameters":
        of = given.func if isinstance(given, cst.Call) and not given.args else None
        if not isinstance(of, cst.Attribute) or of.attr.value != "state_dict":
            plan.refuse(call, "broadcast_parameters is moved where it is given model.state_dict()")
            return
        given = of.value
    if given is None or not is_chain(given):
        plan.refuse(call, f"hvd.{name} is moved where it is given a name")
        return
    if statement_of(plan, call, f"hvd.{name}") is None:
        return
    world, owner = ranks(plan, call), code(given)
    plan.replace(
        call,
        lambda updated: (
            f"{owner}.load_state_dict({world}.broadcast({owner}.state_dict(){_root(bind(updated, name) or {})}))"
        ),
    )


def _move_run(plan: Plan, call: cst.Call) -> None:
    """`horovod.run(f, args=(...), np=2)` starts ranks from Python; hvdtrain's have Gloo between them."""
    names = ["func", "args", "kwargs", "np"][: len(call.args)]
    names = [names[i] if arg.keyword is None else arg.keyword.value for i, arg in enumerate(call.args)]
    if any(arg.star for arg in call.args) or set(names) - {*_RUN, *_RUN_DROPPED}:
        plan.refuse(call, _REASONS["horovod.run"])
        return
    plan.needs.add("hvdtrain")

    def written(updated: cst.Call) -> str:
        kept = [(name, code(arg.value)) for name, arg in zip(names, updated.args, strict=True) if name in _RUN]
        return f"hvdtrain.run({', '.join(text if name == 'func' else f'{name}={text}' for name, text in kept)})"

    plan.replace(call, written)


_RUN = ("func", "args", "kwargs", "np", "hosts", "hostfile")
_RUN_DROPPED = ("use_gloo", "use_mpi", "verbose")
_HANDLERS: dict[str, Callable[[Plan, cst.Call, str, Arguments], None]] = {
    **dict.fromkeys(("allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_"), _reduced),
    "allgather": _gathered,
    "broadcast": _broadcast,
    "broadcast_": _broadcast,
    "broadcast_object": _object,
    "allgather_object": _object,
    "broadcast_parameters": _state,
    "broadcast_optimizer_state": _state,
    "barrier": _method,
    "shutdown": _shutdown,
    "is_initialized": _initialized,
}
