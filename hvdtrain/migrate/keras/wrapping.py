"""`hvd.DistributedOptimizer` and `hvd.load_model` of Horovod's Keras: a plain optimizer, and `hvk.prepare(model)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst

from hvdtrain.migrate.keras.names import binds, for_many, of_callers, reaching, uses_of
from hvdtrain.migrate.script.plan import (
    Rewrite,
    arguments_of,
    assignments,
    condition_above,
    statement_of,
    target_of,
)
from hvdtrain.migrate.script.source import (
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

_OF_NO_MATTER = ("name", "device_dense", "device_sparse", "gradient_predivide_factor", "num_groups", "groups")
_ACCUMULATES = (
    "Horovod counts passes as iterations, by which Adam and schedules go, Keras counts updates: those two train"
    " otherwise than before"
)


# -- optimizers --------------------------------------------------------------------------------------------------
def move_wraps(plan: Rewrite) -> None:
    """Takes the wrapper off every optimizer, and prepares the models that are compiled with them, or loaded."""
    _move_pinning(plan)
    accumulates, prepared = False, list[cst.Call]()
    for call in plan.calls("DistributedOptimizer") if plan.module != "horovod.tensorflow" else ():
        plan.settle(call.func)
        arguments = arguments_of(plan, call, "DistributedOptimizer")
        if arguments is not None and _check(plan, call, arguments):
            accumulates |= _accumulate(plan, call, arguments)
            prepared += _take_off(plan, call, arguments)
    for call in prepared:
        _refuse_other_optimizers(plan, call, prepared)
    for call in plan.calls("load_model"):
        plan.settle(call.func)
        _move_load(plan, call, accumulates=accumulates)


def _check(plan: Rewrite, call: cst.Call, arguments: dict[str, cst.BaseExpression]) -> bool:
    """Whether each of them is kept, or is of no matter."""
    op, sets = arguments.get("op"), arguments.get("process_set")
    for node in (op, sets, *(arguments.get(name) for name in _OF_NO_MATTER)):
        plan.settle(node)
    if "optimizer" not in arguments:
        plan.refuse(call, "the arguments of hvd.DistributedOptimizer cannot be told")
    elif op is not None and plan.source.qualified(op) != plan.prefix + "Average":
        plan.refuse(op, f"op={code(op)}: hvk.prepare averages gradients over ranks, and does nothing else")
    elif sets is not None and plan.source.qualified(sets) != plan.prefix + "global_process_set":
        plan.refuse(sets, "a process set: hvdtrain trains one model on all ranks")
    elif not is_chain(arguments["optimizer"]) and not isinstance(arguments["optimizer"], cst.Call):
        plan.refuse(call, "DistributedOptimizer is moved where it is given a name, or an optimizer that is made there")
    else:
        return True
    return False


def _accumulate(plan: Rewrite, call: cst.Call, arguments: dict[str, cst.BaseExpression]) -> bool:
    """`backward_passes_per_step` becomes an argument of the optimizer that is wrapped; whether there is one."""
    passes = literal(arguments.get("backward_passes_per_step"))
    if passes in ("", "1"):
        return False
    if literal(arguments.get("average_aggregated_gradients")) != "True":
        plan.refuse(
            call,
            "backward_passes_per_step without average_aggregated_gradients=True adds gradients up, and Keras'"
            " gradient_accumulation_steps takes their mean: say average_aggregated_gradients=True, and multiply the"
            " learning rate by the passes, where the optimizer is plain SGD",
        )
        return False
    source, made = plan.source, arguments["optimizer"]
    if is_chain(made):
        found = assignments(source, code(made), call)
        made = found[0] if len(found) == 1 else made
    if not isinstance(made, cst.Call) or ".optimizers." not in source.qualified(made.func) or not passes.isdigit():
        plan.refuse(
            call,
            "backward_passes_per_step is moved where it is a number, to the one line that makes the optimizer:"
            " gradient_accumulation_steps=",
        )
        return False

    def written(updated: cst.Call) -> str:
        args = list(updated.args)
        if args and not isinstance(args[-1].comma, cst.Comma):
            args[-1] = args[-1].with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
        equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
        steps = cst.Arg(cst.Integer(passes), keyword=cst.Name("gradient_accumulation_steps"), equal=equal)
        return code(updated.with_changes(args=[*args, steps]))

    plan.note(call, _ACCUMULATES)
    plan.replace(made, written)
    return True


def _take_off(plan: Rewrite, call: cst.Call, arguments: dict[str, cst.BaseExpression]) -> list[cst.Call]:
    """The plain optimizer takes the wrapped one's place; what is compiled with it is prepared, and returned."""
    source = plan.source
    compiles = _compiles(plan, call) or []
    if not compiles and (above := condition_above(source, call)) is not None:
        what = type(above).__name__.lower()
        plan.refuse(call, f"the optimizer is wrapped within `{what}`: moved is `if hvd.size() > 1:`, and nothing else")
    elif not compiles:
        plan.refuse(
            call,
            "which model is compiled with it cannot be told: DistributedOptimizer is moved in model.compile(...), or"
            " where the name that it is assigned to is compiled with, and no other optimizer may be in it there",
        )
    for found in compiles:
        statement = statement_of(plan, found, "model.compile")
        assert isinstance(found.func, cst.Attribute)
        if statement is None:
            continue
        if not is_chain(found.func.value):
            plan.refuse(found, "a model is prepared where it has a name")
            continue
        plan.needs.add("hvk")
        text = _prepare(plan, code(found.func.value), arguments)
        if source.function(found) is not source.function(call) and text.count("=") > text.count(_FP16):
            plan.refuse(call, "compression= and sparse_as_dense= are moved within one function")
        plan.then(statement, [text])
    line = source.statement(call)
    target, value = target_of(line)
    if line is not None and value is call and target is not None and code(target) == code(arguments["optimizer"]):
        plan.remove(line)
        return compiles
    plan.replace(call, lambda updated: code(plan.bind(updated, "DistributedOptimizer")["optimizer"]))
    return compiles


def _prepare(plan: Rewrite, model: str, arguments: dict[str, cst.BaseExpression]) -> str:
    compression = arguments.get("compression")
    extra = []
    if compression is not None and plan.source.qualified(compression) != plan.prefix + "Compression.none":
        fp16 = plan.source.qualified(compression) == plan.prefix + "Compression.fp16"
        extra.append(f"compression={_FP16 if fp16 else code(compression)}")
    if literal(arguments.get("sparse_as_dense")) not in ("", "False"):
        extra.append(f"sparse_as_dense={code(arguments['sparse_as_dense'])}")
    return f"hvk.prepare({', '.join([model, *extra])})"


_FP16 = '"fp16"'


def _optimizer_of(call: cst.Call) -> cst.BaseExpression | None:
    """What `model.compile` is given as the optimizer."""
    first = call.args[0].value if call.args and call.args[0].keyword is None else None
    return next((arg.value for arg in call.args if literal(arg.keyword) == "optimizer"), first)


def _is_compile(call: cst.CSTNode | None) -> bool:
    return owner_of(call, "compile") is not None


def _compiles(plan: Rewrite, call: cst.Call) -> list[cst.Call] | None:
    """The calls of `model.compile` that are given what a call makes; None where it may go elsewhere too."""
    source = plan.source
    arg = source.parent(call)
    compiles = source.parent(arg) if isinstance(arg, cst.Arg) else None
    if isinstance(compiles, cst.Call) and _is_compile(compiles) and _optimizer_of(compiles) is call:
        return [compiles]
    target, value = target_of(source.statement(call))
    if value is not call:
        return None
    if target is None:
        return of_callers(source, call, lambda one: _compiles(plan, one))
    return _compiled_with(plan, target) if is_chain(target) else None


def _compiled_with(plan: Rewrite, target: cst.BaseExpression) -> list[cst.Call] | None:
    """The same of the name that it is assigned to."""
    source = plan.source
    found: list[cst.Call] = []
    for use in uses_of(source, target):
        outer = source.parent(use)
        if binds(source, use) or (isinstance(outer, cst.Attribute) and outer.value is use):
            continue
        reach = reaching(source, target, use)
        if not any(one is target for one in reach):
            continue
        call = source.parent(outer) if isinstance(outer, cst.Arg) else None
        if isinstance(call, cst.Call) and _is_compile(call) and _optimizer_of(call) is use:
            more: list[cst.Call] | None = [call]
        elif isinstance(outer, cst.Return):
            more = of_callers(source, use, lambda one: _compiles(plan, one))
        elif isinstance(call, cst.Call) and not _is_own(source, call):
            continue  # a library's: print, Checkpoint
        else:
            more = None
        if more is None or (len(reach) > 1 and not (reach[0] is target and for_many(plan, target, use))):
            return None
        found += more
    return found


def _is_own(source: Script, call: cst.Call) -> bool:
    """Whether what is called may be the script's, or keeps what it is given."""
    return tail(call.func) in source.definitions() | {"dict", "list", "tuple", "partial"}


def _refuse_other_optimizers(plan: Rewrite, prepared: cst.Call, others: Sequence[cst.Call]) -> None:
    """A model that is compiled anew, with an optimizer of each rank's own, would not train."""
    source = plan.source
    assert isinstance(prepared.func, cst.Attribute)
    model = prepared.func.value
    for call in calls(source.function(prepared)):
        if not _is_compile(call) or call in others or source.line(call) < source.line(prepared):
            continue
        assert isinstance(call.func, cst.Attribute)
        its, given = call.func.value, _optimizer_of(call)
        same = code(its) == code(model) and reaching(source, its, call) == reaching(source, model, prepared)
        if same and literal(given) != f"{code(model)}.optimizer":
            plan.refuse(
                call,
                f"{code(model)} was compiled with a wrapped optimizer, and is now with one of each rank's own: what"
                " hvdtrain has prepared trains on all ranks; train a clone of it alone",
            )


# -- loaded models -----------------------------------------------------------------------------------------------
def _move_load(plan: Rewrite, call: cst.Call, *, accumulates: bool) -> None:
    """`hvd.load_model` wraps what it loads: a plain file's model is prepared."""
    arguments = arguments_of(plan, call, "load_model")
    if arguments is None:
        return
    statement = plan.source.statement(call)
    target, value = target_of(statement)
    if value is not call or not is_chain(target) or "filepath" not in arguments:
        plan.refuse(call, "hvd.load_model is moved where what it loads is assigned to one name")
        return
    if "custom_optimizers" in arguments:
        plan.refuse(call, "custom_optimizers: Keras takes them by name, custom_objects={...}")
        return
    for name in ("compression", "legacy_opts"):
        if name != "compression" or plan.source.qualified(arguments.get(name, call)).endswith(".none"):
            plan.settle(arguments.get(name))
    assert isinstance(statement, cst.SimpleStatementLine)
    model = code(target)
    plan.needs.add("hvk")
    keras = keras_of(plan)

    def loads(updated: cst.Call) -> str:
        found = plan.bind(updated, "load_model")
        objects = [f"custom_objects={code(found['custom_objects'])}"] if "custom_objects" in found else []
        return f"{keras}.models.load_model({', '.join([code(found['filepath']), *objects])})"

    plan.replace(call, loads)
    more = []
    if accumulates:
        more.append(f"{model}.optimizer.gradient_accumulation_steps = None")
        plan.note(
            call,
            "hvd.load_model forgets backward_passes_per_step, and so does the new script: take the line with"
            " gradient_accumulation_steps = None out to go on accumulating",
        )
    plan.then(statement, [*more, _prepare(plan, model, arguments)])


def keras_of(plan: Rewrite) -> str:
    """How the script names Keras; an import is added where it does not."""
    found = {
        plan.source.qualified(node): code(node)
        for node in walk(plan.source.module)
        if plan.source.qualified(node) in ("keras", "tensorflow.keras")
        and not isinstance(plan.source.parent(node), (cst.ImportAlias, cst.ImportFrom, cst.AsName))
    }
    if not found:
        plan.needs.add("keras")
    return found.get("keras") or found.get("tensorflow.keras") or "keras"


# -- GPUs --------------------------------------------------------------------------------------------------------
def _move_pinning(plan: Rewrite) -> None:
    """`hvdtrain.init` gives each rank its GPU: the lines that do go, since they would come too late."""
    source = plan.source
    local = plan.prefix + "local_rank"
    pins = [
        call
        for call in calls(source.module)
        if _device_call(source, call) == "set_visible_devices" and source.mentions(call, local)
    ]
    init = [source.line(call) for call in plan.calls("init")]
    for call in calls(source.module):
        sets = source.qualified(call.func).startswith("tensorflow.config.threading.set_")
        if sets and init and source.line(call) > init[0]:
            plan.refuse(call, "hvdtrain.init starts TensorFlow, whose threads are set before: put it above hvd.init()")
    gone: list[Any] = []
    for pin in pins:
        block = source.function(pin)
        inside = [node for node in walk(block) if _pins(source, node, local)]
        gone += [node for node in inside if source.parent(node) not in inside and node not in gone]
        gone = [node for node in gone if not any(above in gone for above in source.above(node))]
    for statement in gone:
        plan.settle(statement)
        plan.remove(statement)
    for call in calls(source.module):
        if _device_call(source, call) == "list_physical_devices" and gone:
            statement = source.statement(call)
            target, value = target_of(statement)
            found = value is call and isinstance(target, cst.Name) and not _used(source, target, gone)
            if found and statement is not None:
                plan.remove(statement)


def _device_call(source: Script, call: cst.CSTNode) -> str:
    name = source.qualified(call.func) if isinstance(call, cst.Call) else ""
    return name.split(".")[-1] if name.startswith("tensorflow.config.") else ""


def _pins(source: Script, node: cst.CSTNode, local: str) -> bool:
    """Whether a statement does nothing but choose this rank's GPU and how its memory is taken."""
    if isinstance(node, cst.SimpleStatementLine):
        [small] = node.body if len(node.body) == 1 else [None]
        value = small.value if isinstance(small, cst.Expr) else None
        does = "" if value is None else _device_call(source, value)
        ours = does == "set_visible_devices" and source.mentions(node, local)
        return ours or does == "set_memory_growth"
    if isinstance(node, (cst.If, cst.For)) and node.orelse is None and isinstance(node.body, cst.IndentedBlock):
        return all(_pins(source, one, local) for one in node.body.body)
    return False


def _used(source: Script, name: cst.Name, gone: Sequence[cst.CSTNode]) -> bool:
    """Whether a name is used elsewhere than in statements that go."""
    return any(
        node.value == name.value and node is not name and not any(above in gone for above in source.above(node))
        for node in find(source.module, cst.Name)
    )
