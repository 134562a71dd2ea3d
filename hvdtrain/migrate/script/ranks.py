"""Converts what scripts of every framework ask of Horovod: `hvd.init`, `hvd.rank`, objects, imports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import libcst as cst
from libcst import metadata

from hvdtrain.migrate.script.plan import Rewrite, condition_above, statement_of
from hvdtrain.migrate.script.source import Script, calls, code, is_chain, literal, walk

Arguments = dict[str, cst.BaseExpression]
Mover: TypeAlias = Callable[[Rewrite, cst.Call, str], None]
Handler: TypeAlias = Callable[[Rewrite, cst.Call, str, Arguments], None]
RUN_REASON = "hvdtrain.run(function, args=, kwargs=, np=, hosts=) is its counterpart"
# of the global generators
_ORDERS = (
    "torch.randperm", "random.shuffle", "random.sample", "numpy.random.shuffle", "numpy.random.permutation",
    "numpy.random.choice", "torch.utils.data.random_split",
)  # fmt: skip


def move_init(plan: Rewrite) -> None:
    """Turns the one `hvd.init()` into `world = hvdtrain.init("torch")`, or "keras"; refuses others."""
    source, found = plan.source, plan.calls("init")
    for call in found:
        plan.settle(call)
        if call is not found[0]:
            plan.refuse(call, "a second hvd.init(): hvdtrain.init is called once")
            continue
        statement = statement_of(plan, call, "hvd.init()")
        if statement is None:
            continue
        if call.args:
            plan.refuse(call, "hvd.init with arguments: hvdtrain.init takes all ranks")
        elif condition_above(source, call) is not None:
            plan.refuse(
                call, "hvd.init() under a condition: hvdtrain.init is always called, and one process is a world of one"
            )
        if "world" not in source.names():
            plan.world_scope = source.scope(call)
        plan.needs.add("hvdtrain")
        plan.rewrite(
            statement,
            lambda _: [f'{"world = " if "world" in plan.needs else ""}hvdtrain.init("{plan.framework}")'],
        )


def ranks(plan: Rewrite, node: cst.CSTNode) -> str:
    """Returns the world, as a node can name it."""
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


LINES = {
    "hvdtrain": "import hvdtrain",
    "hvk": "import hvdtrain.keras as hvk",
    "hvt": "import hvdtrain.torch as hvt",
}


def move_imports(plan: Rewrite, imports: Sequence[cst.SimpleStatementLine], lines: Mapping[str, str]) -> None:
    """Turns the first import of Horovod in each scope into the `lines` that are needed, by the names that need them."""
    seen: list[Any] = []
    for statement in imports:
        scope = plan.source.scope(statement)
        texts = [line for name, line in lines.items() if name in plan.needs] if scope not in seen else []
        seen.append(scope)
        plan.rewrite(statement, texts)


def attribute(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    plan.replace(call, f"{ranks(plan, call)}.{name}")


def method(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    plan.replace(call, f"{ranks(plan, call)}.{name}()")


def initialized(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    plan.needs.add("hvdtrain")
    plan.replace(call, "(hvdtrain.current() is not None)")


def shutdown(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    statement = statement_of(plan, call, "hvd.shutdown()")
    if statement is not None:
        plan.remove(statement)  # a world is left at the program's end


def root_of(arguments: Arguments) -> str:
    root = literal(arguments.get("root_rank"))
    return "" if root in ("", "0") else f", {root}"


def send(plan: Rewrite, call: cst.Call, name: str, does: str) -> None:
    """Turns the call into one of `does`, with the first of its arguments, and the root rank."""
    first = plan.signatures[name].split()[0]
    plan.needs.add(does.split(".")[0])

    def written(updated: cst.Call) -> str:
        found = plan.bind(updated, name)
        return f"{does}({code(found[first])}{root_of(found)})"

    plan.replace(call, written)


def object_of(plan: Rewrite, call: cst.Call, name: str, arguments: Arguments) -> None:
    send(plan, call, name, f"{ranks(plan, call)}.{'broadcast' if name == 'broadcast_object' else 'gather'}")


def uses(plan: Rewrite) -> Iterator[tuple[cst.Name | cst.Attribute, str]]:
    """Yields every remaining use of Horovod, and what it means; refuses a name that may also be another's."""
    source = plan.source
    for node in list(walk(source.module)):
        meanings = source.meanings(node)
        if not is_chain(node) or not any(name.startswith("horovod") for name in meanings) or plan.is_settled(node):
            continue
        outer = source.parent(node)
        if isinstance(outer, cst.AsName) or (isinstance(outer, cst.Attribute) and outer.attr is node):
            continue
        plan.settle(node)
        if len(meanings) > 1:
            plan.refuse(node, f"{code(node)} is not Horovod's only: whether it is here is not known")
        else:
            yield node, meanings.pop()


def move_rest(
    plan: Rewrite, movers: Mapping[str, Mover], reasons: Mapping[str, str], kept: Mapping[str, Callable[..., None]] = {}
) -> None:
    """Converts every remaining use of Horovod, or refuses it.

    Args:
        plan: gets the changes.
        movers: convert a call, by the name of Horovod's function.
        reasons: why others are refused, by the beginning of their names; "" for the rest.
        kept: convert a name that is not called, by that name.
    """
    for node, meaning in uses(plan):
        outer, short = plan.source.parent(node), meaning.removeprefix(plan.prefix)
        if isinstance(outer, cst.Call) and outer.func is node and short in movers:
            movers[short](plan, outer, short)
        elif short in ("Compression.fp16", "Compression.none"):
            plan.replace(node, '"fp16"' if short.endswith("fp16") else "None")
        elif short in kept:
            kept[short](plan, node, short)
        elif short in (plan.module, "horovod"):
            plan.refuse(node, f"{code(node)} as a value: what is done with it is not known")
        else:
            name = "synchronize" if short.endswith(("_async", "_async_")) else short
            found = next(reason for begin, reason in reasons.items() if name.startswith(begin))
            plan.refuse(node, found if found != reasons[""] else f"{code(node)} {found}")


# -- orders that ranks draw alike, each by itself, and share out by rank -------------------------------------------
def refuse_shared_orders(plan: Rewrite) -> None:
    """Refuses orders drawn behind `hvt.prepare` in a script that takes parts of something by its rank."""
    source = plan.source
    if not (wraps := plan.calls("DistributedOptimizer")):
        return
    shares = _shares_out(source)
    for call in calls(source.module):
        known = source.qualified(call.func) in _ORDERS and "generator" not in "".join(code(arg) for arg in call.args)
        if not known or any(source.is_above(call, wrap) for wrap in wraps):
            continue
        if source.qualified(call.func) == "torch.utils.data.random_split":
            plan.note(call, "where this runs after hvt.prepare, each rank splits in its own way: give it a generator")
        elif shares:
            plan.refuse(
                call,
                f"{code(call.func)}: an order that all ranks draw alike, and share out by rank; after hvt.prepare each"
                " rank draws its own: give it a generator of its own, seeded by the epoch",
            )


def _shares_out(source: Script) -> bool:
    """Returns True if a part is taken by rank: x[hvd.rank()::hvd.size()], range(hvd.rank(), ...)."""
    return any(
        source.mentions(node, "horovod.torch.rank")
        for node in walk(source.module)
        if isinstance(node, cst.Slice) or (isinstance(node, cst.Call) and code(node.func) in ("range", "islice"))
    )
