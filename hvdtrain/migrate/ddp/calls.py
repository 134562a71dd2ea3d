"""Converts calls of Horovod beside the optimizer to plain PyTorch, with the imports and functions they need."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from hvdtrain.migrate.script import ranks, torch_calls
from hvdtrain.migrate.script.plan import Rewrite
from hvdtrain.migrate.script.ranks import Arguments, Handler
from hvdtrain.migrate.script.source import code, tail

# what the new script imports, by what needs it
LINES = {
    "copy": "import copy",
    "os": "import os",
    "torch": "import torch",
    "dist": "import torch.distributed as dist",
    "fp16_compress_hook": "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook",
    "DistributedDataParallel": "from torch.nn.parallel import DistributedDataParallel",
}
MODEL = "DistributedModel"
# the functions and the class that it gets, by their names
FUNCTIONS = {
    MODEL: '''
class DistributedModel(DistributedDataParallel):
    """A model whose gradients are averaged; attributes, names, state and copies of it are the plain model's."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __getitem__(self, key):
        return self.module[key]

    def __reduce__(self):
        return copy.copy, (self.module,)

    def named_modules(self, *args, **kwargs):
        return self.module.named_modules(*args, **kwargs)

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        return self.module.load_state_dict(*args, **kwargs)
''',
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
    "elastic": "elastic state and samplers have no counterpart: torchrun --max-restarts restarts from a checkpoint",
    "join": "ranks with unequal numbers of batches: torch.distributed.algorithms.join.Join([model]) goes around the"
    " loop, by hand",
    **dict.fromkeys(("add_process_set", "remove_process_set", "ProcessSet", "global_process_set"), _SETS),
    "horovod.run": "torchrun starts the ranks: take horovod.run away",
    **dict.fromkeys(("synchronize", "poll"), "handles of operations under way: take the call that waits"),
    "": "has no counterpart in torch.distributed that is moved",
}


def move_init(plan: Rewrite) -> None:
    """Turns `hvd.init()` into `dist.init_process_group`, also for GPUs if the script uses them."""
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
        plan.rewrite(statement, lines)


def _of_ranks(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    text = _RANKS[name]
    plan.needs.add(text.removeprefix("int(").split(".")[0])
    strings = [one for one in plan.source.above(call) if isinstance(one, cst.FormattedString)]
    plan.replace(call, text.replace('"', "'") if strings and '"' in strings[0].start else text)


def _of_objects(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    ranks.send(plan, call, name, "broadcast_value" if name == "broadcast_object" else "gather_values")


def _parameters(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    given = arguments.get("params")
    if not isinstance(given, cst.Call) or tail(given.func) != "state_dict" or given.args:
        plan.refuse(call, "broadcast_parameters needs model.state_dict()")
        return
    ranks.send(plan, call, name, "broadcast_state")


def _optimizer_state(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    torch_calls.load_state(plan, call, name, arguments.get("optimizer"), "broadcast_value")


HANDLERS: dict[str, Handler] = {
    **torch_calls.HANDLERS,
    **dict.fromkeys(_RANKS, _of_ranks),
    **dict.fromkeys(("broadcast_object", "allgather_object"), _of_objects),
    "broadcast_parameters": _parameters,
    "broadcast_optimizer_state": _optimizer_state,
}


# -- what the new script begins with -----------------------------------------------------------------------------
def move_imports(plan: Rewrite, imports: Sequence[cst.SimpleStatementLine]) -> None:
    """Turns Horovod's import into those that are needed; puts functions behind the last import."""
    functions = [name for name in FUNCTIONS if name in plan.needs]
    plan.needs |= {"copy"} if MODEL in functions else set()
    if set(functions) - {MODEL}:
        plan.needs.add("dist")
    if set(functions) & {"reduce_tensor", "gather_tensors", "broadcast_tensor", "broadcast_state"}:
        plan.needs.add("torch")
    there = {code(line).split("#")[0].strip() for line in plan.source.module.body}
    ranks.move_imports(plan, imports, {name: line for name, line in LINES.items() if line not in there})
    if functions:
        plan.follow(_last_import(plan, imports[0]), [f"\n{FUNCTIONS[name]}" for name in functions])


def _last_import(plan: Rewrite, first: cst.SimpleStatementLine) -> cst.SimpleStatementLine:
    """Returns the last of the imports that a script begins with; at least Horovod's own."""
    found = first
    for line in plan.source.module.body[list(plan.source.module.body).index(first) :]:
        if not isinstance(line, cst.SimpleStatementLine) or not isinstance(line.body[0], (cst.Import, cst.ImportFrom)):
            break
        found = line
    return found


def names_taken(plan: Rewrite) -> list[str]:
    """Returns the names that the new script needs, and the old one uses for something else."""
    there = {code(line).split("#")[0].strip() for line in plan.source.module.body}
    needs = {name for name in plan.needs if LINES.get(name) not in there}
    return sorted(needs & plan.source.variables() - {"torch", "os", "copy"})
