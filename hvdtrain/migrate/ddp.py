"""Off Horovod to plain PyTorch: `DistributedDataParallel`, and functions of `torch.distributed`, under torchrun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst

from hvdtrain.migrate import ranks, torch_calls, training, wrapping
from hvdtrain.migrate.ddp_models import Models
from hvdtrain.migrate.plan import DDP, Plan
from hvdtrain.migrate.ranks import Arguments, root_of
from hvdtrain.migrate.source import bind, calls, code, is_chain, literal, tail, walk

_PREFIX = "horovod.torch."
# what the new script imports, by what needs it
LINES = {
    "contextlib": "import contextlib",
    "os": "import os",
    "torch": "import torch",
    "dist": "import torch.distributed as dist",
    "fp16_compress_hook": "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook",
    "DistributedDataParallel": "from torch.nn.parallel import DistributedDataParallel",
}
# what it gets functions of its own for, by their names
FUNCTIONS = {
    "reduce_tensor": '''
def reduce_tensor(tensor, op="mean"):
    """Returns a new tensor, of all ranks: their mean, sum, min or max; without a gradient."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError("no gradient goes through reduce_tensor: give it tensor.detach()")
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, getattr(dist.ReduceOp, "SUM" if op == "mean" else op.upper()))
    if op != "mean":
        return result
    return result / dist.get_world_size() if result.is_floating_point() else result // dist.get_world_size()
''',
    "gather_tensors": '''
def gather_tensors(tensor):
    """Returns the rows of all ranks, which may be of unlike numbers, in the order of the ranks."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError("no gradient goes through gather_tensors: give it tensor.detach()")
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensor.detach().cpu())
    return torch.cat(parts).to(tensor.device)
''',
    "broadcast_tensor": '''
def broadcast_tensor(tensor, source=0):
    """Returns one rank's tensor, on all ranks, without a gradient."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError("no gradient goes through broadcast_tensor: give it tensor.detach()")
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(result, source)
    return result
''',
    "broadcast_state": '''
def broadcast_state(state, source=0):
    """Gives one rank's weights and buffers to all ranks, in place."""
    for tensor in state.values():
        sent = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(sent, source)
        tensor.copy_(sent)
''',
    "broadcast_value": '''
def broadcast_value(value, source=0):
    """Returns one rank's object, on all ranks."""
    values = [value]
    dist.broadcast_object_list(values, source)
    return values[0]
''',
    "gather_values": '''
def gather_values(value):
    """Returns the objects of all ranks, in the order of the ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
''',
}  # fmt: skip
_RANKS = {
    "rank": "dist.get_rank()",
    "size": "dist.get_world_size()",
    "local_rank": 'int(os.environ["LOCAL_RANK"])',
    "local_size": 'int(os.environ["LOCAL_WORLD_SIZE"])',
    "is_initialized": "dist.is_initialized()",
    "barrier": "dist.barrier()",
    "shutdown": "dist.destroy_process_group()",
}
_SETS = "process sets: DistributedDataParallel(..., process_group=dist.new_group(ranks)), by hand"
REASONS = {
    "Adasum": "DistributedDataParallel averages gradients, and has no Adasum",
    "elastic": "elastic state and samplers have no counterpart: torchrun --max-restarts starts anew, from a checkpoint",
    "join": "ranks with unequal numbers of batches: torch.distributed.algorithms.join.Join([model]) goes around the"
    " loop, by hand",
    **dict.fromkeys(("add_process_set", "remove_process_set", "ProcessSet", "global_process_set"), _SETS),
    "horovod.run": "torchrun starts the ranks: take horovod.run away",
    "synchronize": "handles of operations under way: take the call that waits",
    "poll": "handles of operations under way: take the call that waits",
    "": "has no counterpart in torch.distributed that is moved",
}


AVERAGES = "Horovod averages at the step, DistributedDataParallel in a backward() behind a call of the wrapped model"


def move(plan: Plan, imports: Sequence[cst.SimpleStatementLine]) -> None:
    """Moves all of a script but its imports."""
    if plan.framework != "torch":
        plan.refuse(
            imports[0], "DistributedDataParallel trains scripts of horovod.torch: one of Keras is moved --to hvdtrain"
        )
        return
    for statement in imports:
        if statement not in plan.source.module.body:
            plan.refuse(statement, "Horovod is imported at the top of the script where it is moved off it")
    _move_init(plan)
    wrapping.refuse_variables(plan)
    for node in walk(plan.source.module):
        if is_chain(node) and plan.source.qualified(node) == _PREFIX + "SyncBatchNorm":
            plan.needs.add("torch")
            plan.settle(node)
            plan.replace(node, "torch.nn.SyncBatchNorm")
    optimizers, models = _move_wraps(plan)
    optimizers.spread(plan.source)
    torch_calls.refuse_in_losses(plan)
    if optimizers.prepared:
        for call in training.passes(plan.source):
            _check_pass(plan, optimizers, models, call)
        training.refuse_other_passes(plan)
        refuse_other_updates(plan, optimizers, models)
        for call in calls(plan.source.module):
            owner = call.func.value if isinstance(call.func, cst.Attribute) and tail(call.func) == "step" else None
            if owner is not None and call.args and tail(owner) in optimizers.prepared:
                plan.refuse(call, "step(closure): Horovod averages before the closure runs, and its ranks part")
        wrapping.move_synchronize(plan, optimizers)
    torch_calls.move_rest(plan, _HANDLERS, REASONS)


def _move_init(plan: Plan) -> None:
    """`hvd.init()` becomes `dist.init_process_group`, for GPUs too where the script knows of them."""
    text = plan.source.module.code
    for _, statement in ranks.inits(plan):
        plan.needs.add("dist")
        lines = ['dist.init_process_group("gloo")']
        if "cuda" in text:
            plan.needs.add("torch")
            lines = ['dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")']
            if "torch.cuda.set_device(" not in text:
                plan.needs.add("os")
                lines.append(f"if torch.cuda.is_available():\n    torch.cuda.set_device({_RANKS['local_rank']})")
        plan.rewrite(statement, ranks.constantly(lines))


def _move_wraps(plan: Plan) -> tuple[training.Optimizers, Models]:
    optimizers, models = training.Optimizers(), Models(plan)
    for call in wrapping.wraps_of(plan.source):
        plan.settle(call.func)
        wrap = wrapping.read(plan, call)
        if wrap is None:
            continue
        wrap.know(plan.source, optimizers)
        wrapping.check_start(plan, wrap)
        if "True" in literal(wrap.arguments.get("sparse_as_dense")) or "sparse=True" in plan.source.module.code:
            plan.refuse(call, "sparse gradients: Horovod averages them otherwise than DistributedDataParallel")
        given = wrap.arguments.get("compression")
        if given is not None and plan.source.qualified(given) != _PREFIX + "Compression.none":
            models.compressed |= literal(given) != "None"
            plan.note(
                call, "float16: DistributedDataParallel divides, then adds; Horovod adds first: the last digits differ"
            )
        models.follow(wrap)
        plan.needs.add("DistributedDataParallel")
        plan.rewrite(wrap.statement, _wrapped(wrap))
    models.settle()
    return optimizers, models


def _wrapped(wrap: wrapping.Wrap) -> Any:
    def written(updated: Any) -> Sequence[str]:
        arguments = bind(updated.body[0].value, "DistributedOptimizer") or {}
        inner = code(arguments["optimizer"])
        optimizer = code(wrap.target) if wrap.target is not None else inner if is_chain(wrap.optimizer) else "optimizer"
        lines = wrap.ends(DDP) + ([f"{optimizer} = {inner}"] if inner != optimizer else [])
        lines.append(f"{wrap.model} = DistributedDataParallel({wrap.model}, broadcast_buffers=False)")
        lines += _hook(wrap, arguments)
        return lines if wrap.target is not None else [*lines, f"return {optimizer}"]

    return written


def _hook(wrap: wrapping.Wrap, arguments: Arguments) -> list[str]:
    """How gradients travel, where they are compressed."""
    given = literal(arguments.get("compression"))
    if given in ("", "None"):
        return []
    registers = f"{wrap.model}.register_comm_hook(None, {{}})"
    if given == DDP.words["fp16"]:
        return [registers.format(given)]
    choice = arguments["compression"]
    if isinstance(choice, cst.IfExp) and (code(choice.body), code(choice.orelse)) == (DDP.words["fp16"], "None"):
        return [f"if {code(choice.test)}:\n    {registers.format(DDP.words['fp16'])}"]
    return [f"if {given} is not None:\n    {registers.format(given)}"]


def _check_pass(plan: Plan, optimizers: training.Optimizers, models: Models, call: cst.Call) -> None:
    """`loss.backward()` stays as it is, where it is one that DistributedDataParallel averages after."""
    if training.refuse_arguments(plan, call):
        return
    source = plan.source
    steps = training.step_after(source, optimizers, call)
    if steps and training.is_of_one_rank(plan, optimizers, call, steps[0].optimizer):
        return
    if not is_called_before(plan, models, call):
        plan.refuse(
            call,
            "no call of a wrapped model stands before this pass, in its loop, with gradients and on every way to it:"
            " DistributedDataParallel averages the first pass after one",
        )
        return
    if steps:
        training.note_clipping(plan, call, steps[0])
    passes = {optimizers.prepared[tail(steps[0].optimizer)]} if steps else set(optimizers.prepared.values())
    if passes <= {"", "1"} or _keep_back(plan, optimizers, models, call, steps):
        return
    if models.compressed:
        plan.refuse(
            call,
            "several passes an update, of which the last cannot be told, and compression: Horovod rounds their sum,"
            " DistributedDataParallel each of them",
        )
    else:
        plan.note(
            call,
            "each pass is averaged, which comes to the same: which is the last of an update cannot be told;"
            " `with model.no_sync():` around the others sends less",
        )


def _keep_back(
    plan: Plan, optimizers: training.Optimizers, models: Models, call: cst.Call, steps: list[training.Step]
) -> bool:
    """Puts `no_sync` around a pass and its call of the model, unless it is the last of its update; whether it can."""
    source, statement = plan.source, plan.source.statement(call)
    if not steps or statement is None:
        return False
    trial = Plan(source, plan.module, plan.target)  # whose refusals are nobody's
    more = training.more_passes(trial, optimizers, call, steps, code(steps[0].optimizer))
    begins = _begins(plan, models, call)
    if more is None or begins is None:
        return False
    first, model = begins
    test = more.removeprefix(", more=")
    block = source.block(statement)
    names = {node.value for node in walk(cst.parse_expression(test or "None")) if isinstance(node, cst.Name)}
    if any(names & training.stored(one) for one in block[block.index(first) : block.index(statement) + 1]):
        return False
    text = f"with {model}.no_sync():"
    if test not in ("", "True"):
        plan.needs.add("contextlib")
        text = f"with {model}.no_sync() if {test} else contextlib.nullcontext():"
    if test:
        plan.around[first, statement] = text
    return True


def is_called_before(plan: Plan, models: Models, backward: cst.Call) -> bool:
    """Whether on every way to a pass a wrapped model was called, with gradients, behind the pass before it."""
    passes = training.passes(plan.source)

    def event(call: cst.Call) -> str:
        if call in models.calls and not torch_calls.without_gradients(plan.source, call):
            return "call"
        return "pass" if call in passes else ""

    return training.Paths(plan.source, models.flow, event).before(backward) == {"call"}


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
            found = training.Paths(plan.source, models.flow, event).before(node)
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


def _differentiates(call: cst.Call) -> bool:
    return isinstance(call.func, cst.Attribute) and tail(call.func) == "backward"


def _begins(plan: Plan, models: Models, backward: cst.Call) -> tuple[cst.CSTNode, str] | None:
    """The first statement that calls a model for a pass, and which; in the pass' block, and only one model."""
    statement = plan.source.statement(backward)
    found: list[tuple[cst.CSTNode, str]] = []
    for one in plan.source.block(statement) if statement is not None else ():
        found += [(one, code(call.func)) for call in calls(one) if call in models.calls]
        if one is statement:
            break
        if any(map(_differentiates, calls(one))):
            found = []
    return found[0] if len({model for _, model in found}) == 1 else None


# -- calls -------------------------------------------------------------------------------------------------------
def _of_ranks(plan: Plan, call: cst.Call, name: str, arguments: Arguments) -> None:
    text = _RANKS[name]
    plan.needs.add(text.removeprefix("int(").split(".")[0])
    strings = [one for one in plan.source.above(call) if isinstance(one, cst.FormattedString)]
    plan.replace(call, text.replace('"', "'") if strings and '"' in strings[0].start else text)


def _of_objects(plan: Plan, call: cst.Call, name: str, arguments: Arguments) -> None:
    does = "broadcast_value" if name == "broadcast_object" else "gather_values"
    plan.needs.add(does)

    def written(updated: cst.Call) -> str:
        found = bind(updated, name) or {}
        return f"{does}({code(found['obj'])}{root_of(found)})"

    plan.replace(call, written)


def _parameters(plan: Plan, call: cst.Call, name: str, arguments: Arguments) -> None:
    given = arguments.get("params")
    if not isinstance(given, cst.Call) or tail(given.func) != "state_dict" or given.args:
        plan.refuse(call, "broadcast_parameters is moved where it is given model.state_dict()")
        return
    if wrapping.refuse_root(plan, call, literal(arguments.get("root_rank"))):
        return
    plan.needs.add("broadcast_state")

    def written(updated: cst.Call) -> str:
        found = bind(updated, name) or {}
        return f"broadcast_state({code(found['params'])}{root_of(found)})"

    plan.replace(call, written)


def _optimizer_state(plan: Plan, call: cst.Call, name: str, arguments: Arguments) -> None:
    given = arguments.get("optimizer")
    if given is None or not is_chain(given):
        plan.refuse(call, f"hvd.{name} is moved where it is given a name")
        return
    plan.needs.add("broadcast_value")
    owner = code(given)

    def written(updated: cst.Call) -> str:
        root = root_of(bind(updated, name) or {})
        return f"{owner}.load_state_dict(broadcast_value({owner}.state_dict(){root}))"

    plan.replace(call, written)


_HANDLERS: dict[str, torch_calls.Handler] = {
    **torch_calls.HANDLERS,
    **dict.fromkeys(_RANKS, _of_ranks),
    **dict.fromkeys(("broadcast_object", "allgather_object"), _of_objects),
    "broadcast_parameters": _parameters,
    "broadcast_optimizer_state": _optimizer_state,
}


# -- what the new script begins with -----------------------------------------------------------------------------
def move_imports(plan: Plan, imports: Sequence[cst.SimpleStatementLine]) -> None:
    """Horovod's import becomes what is needed in its place; functions stand behind the last import."""
    functions = [name for name in FUNCTIONS if name in plan.needs]
    if functions:
        plan.needs.add("dist")
    if set(functions) & {"reduce_tensor", "gather_tensors", "broadcast_tensor", "broadcast_state"}:
        plan.needs.add("torch")
    there = {code(line).split("#")[0].strip() for line in plan.source.module.body}
    ranks.move_imports(plan, imports, {name: line for name, line in LINES.items() if line not in there})
    if functions:
        plan.follow(_last_import(plan, imports[0]), [f"\n{FUNCTIONS[name]}" for name in functions])


def _last_import(plan: Plan, first: cst.SimpleStatementLine) -> cst.SimpleStatementLine:
    """The last of the imports that a script begins with; at least Horovod's own."""
    found = first
    for line in plan.source.module.body[list(plan.source.module.body).index(first) :]:
        if not isinstance(line, cst.SimpleStatementLine) or not isinstance(line.body[0], (cst.Import, cst.ImportFrom)):
            break
        found = line
    return found


def names_taken(plan: Plan) -> list[str]:
    """Names that the new script needs, and the old one has for something else."""
    there = {code(line).split("#")[0].strip() for line in plan.source.module.body}
    needs = {name for name in plan.needs if LINES.get(name) not in there}
    return sorted(needs & plan.source.variables() - {"torch", "os", "contextlib"})
