"""What plain PyTorch would begin otherwise with: whose weights and state, of which parameters, as which rank."""

from __future__ import annotations

import re

import libcst as cst

from hvdtrain.migrate.script.plan import Rewrite, assignments, made_of, own_nodes
from hvdtrain.migrate.script.source import Script, calls, code, find, is_chain, literal, owner_of
from hvdtrain.migrate.script.wrapping import Wrap

# what horovodrun and mpirun tell each rank, and torchrun does not
_VARIABLES = re.compile("(HOROVOD|OMPI_COMM_WORLD|PMI|PMIX)_((LOCAL|CROSS|NODE)_)?(RANK|SIZE)")


def refuse_variables(plan: Rewrite) -> None:
    """Refuses environment variables that no longer tell a rank who it is."""
    for node in find(plan.source.module, cst.SimpleString):
        if _VARIABLES.fullmatch(str(node.evaluated_value)):
            plan.refuse(node, f"{code(node)} is not set by torchrun: that sets RANK, WORLD_SIZE, LOCAL_RANK")


def check_start(plan: Rewrite, wrap: Wrap) -> None:
    """Refuses, or tells, what would begin otherwise once an optimizer's model is wrapped."""
    _check_parameters(plan, wrap)
    source = plan.source
    roots = plan.calls("broadcast_parameters")
    given = [literal(plan.bind(call, "broadcast_parameters").get("params")) for call in roots]
    if all(text.startswith(f"{wrap.model}.") and text != f"{wrap.model}.state_dict()" for text in given):
        plan.note(
            wrap.call,
            f"nothing broadcasts the whole of {wrap.model}: with Horovod each rank keeps weights of its own,"
            " DistributedDataParallel sends rank 0's",
        )
    inner, target = code(wrap.optimizer), code(wrap.name)
    loads = [call for call in calls(source.module) if code(call.func) == f"{target}.load_state_dict"]
    for call in own_nodes(source.function(wrap.call)):
        if not isinstance(call, cst.Call) or source.line(call) >= source.line(wrap.call):
            continue
        if code(call.func) in (f"{inner}.load_state_dict", f"{inner}.step"):
            plan.note(
                call,
                "Horovod's DistributedOptimizer begins without the state (momentum, Adam's) of the optimizer that it"
                " is given; the new script keeps it",
            )
        of = [code(arg.value) for arg in call.args]
        later = any(source.line(one) > source.line(wrap.call) for one in loads)
        if source.qualified(call.func).startswith("torch.optim.lr_scheduler.") and inner in of and later:
            plan.note(
                call,
                f"{target}.load_state_dict parted Horovod's optimizer from this scheduler of the one within; in"
                " the new script the scheduler goes on",
            )


def refuse_root(plan: Rewrite, call: cst.Call, root: str) -> bool:
    """Whether weights of another rank than 0 are broadcast to models that have been given rank 0's."""
    source = plan.source
    late = any(
        source.function(wrap) is not source.function(call) or source.line(wrap) < source.line(call)
        for wrap in plan.calls("DistributedOptimizer")
    )
    if root in ("", "0") or not late:
        return False
    plan.refuse(
        call,
        f"root_rank={root}: DistributedDataParallel has given all ranks rank 0's weights by then; broadcast before the"
        " optimizer is wrapped",
    )
    return True


# -- whose parameters --------------------------------------------------------------------------------------------
def _check_parameters(plan: Rewrite, wrap: Wrap) -> None:
    """Horovod averages the gradients that its optimizer steps with; DistributedDataParallel those of a model."""
    source = plan.source
    made = made_of(source, wrap.optimizer, wrap.statement)
    if not isinstance(made, cst.Call) or not made.args:
        return
    kind = _kind(source, made.args[0].value, wrap)
    if kind in ("part", "other"):
        plan.refuse(
            made,
            f"an optimizer of {'a part of' if kind == 'part' else 'others than'} {wrap.model}.parameters(): Horovod"
            f" averages the gradients of what is in it, DistributedDataParallel those of {wrap.model}",
        )
    elif kind != "whole":
        plan.note(
            made,
            f"whether these are all parameters of {wrap.model} is not read off: DistributedDataParallel averages those"
            " that are in no optimizer too, and none but the model's",
        )


def _kind(source: Script, node: cst.BaseExpression, wrap: Wrap) -> str:
    """Whose parameters these are: the "whole" model's, of a "part", of an "other" too; "" where it cannot be told."""
    if is_chain(node):
        grown = any(code(one.func) in (f"{code(node)}.append", f"{code(node)}.extend") for one in calls(source.module))
        found = assignments(source, code(node), wrap.statement)
        return _kind(source, found[0], wrap) if len(found) == 1 and not grown and not is_chain(found[0]) else ""
    if isinstance(node, cst.Call) and code(node.func) in ("list", "tuple", "iter") and len(node.args) == 1:
        return _kind(source, node.args[0].value, wrap)
    if isinstance(node, cst.Call) and code(node.func) == "filter" and len(node.args) == 2:
        return _fewer(_kind(source, node.args[1].value, wrap), "requires_grad" in code(node.args[0]))
    if (named := owner_of(node, "parameters", "named_parameters")) is not None:
        owner = code(named)
        inner = owner.startswith((f"{wrap.model}.", f"{wrap.model}["))
        return "whole" if owner == wrap.model else "part" if inner else "other"
    if isinstance(node, (cst.ListComp, cst.GeneratorExp)):
        loop = node.for_in
        kept = all("requires_grad" in code(one.test) for one in loop.ifs) and loop.inner_for_in is None
        return _fewer(_kind(source, loop.iter, wrap), kept)
    if isinstance(node, cst.BinaryOperation):
        return _sum({_kind(source, node.left, wrap), _kind(source, node.right, wrap)})
    if isinstance(node, (cst.List, cst.Tuple)):
        return _sum({_of_element(source, one, wrap) for one in node.elements})
    return ""


def _of_element(source: Script, element: cst.BaseElement, wrap: Wrap) -> str:
    if isinstance(element, cst.StarredElement):
        return _kind(source, element.value, wrap)
    if not isinstance(element.value, cst.Dict):
        return "other"
    for one in element.value.elements:
        if isinstance(one, cst.DictElement) and code(one.key).strip("'\"") == "params":
            return _kind(source, one.value, wrap)
    return ""


def _fewer(kind: str, all_that_learn: bool) -> str:
    return kind if kind != "whole" or all_that_learn else "part"


def _sum(kinds: set[str]) -> str:
    """Of several groups: parts may make a whole."""
    return "other" if "other" in kinds else kinds.pop() if kinds == {"whole"} else ""
