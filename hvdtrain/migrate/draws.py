"""Orders that ranks draw alike, each by itself, and share out by rank: after `hvt.prepare` each rank draws others."""

from __future__ import annotations

import libcst as cst

from hvdtrain.migrate.plan import Plan
from hvdtrain.migrate.source import Source, calls, code, walk

# of the global generators
_ORDERS = (
    "torch.randperm", "random.shuffle", "random.sample", "numpy.random.shuffle", "numpy.random.permutation",
    "numpy.random.choice", "torch.utils.data.random_split",
)  # fmt: skip


def refuse_shared_orders(plan: Plan, wraps: list[cst.Call]) -> None:
    """Refuses orders drawn behind `hvt.prepare` in a script that takes parts of something by its rank."""
    source = plan.source
    if not wraps:
        return
    shares = _shares_out(source)
    for call in calls(source.module):
        known = source.qualified(call.func) in _ORDERS and "generator" not in "".join(code(arg) for arg in call.args)
        before = any(
            source.function(wrap) is source.function(call) and source.line(call) < source.line(wrap) for wrap in wraps
        )
        if not known or before:
            continue
        if source.qualified(call.func) == "torch.utils.data.random_split":
            plan.note(call, "where this runs after hvt.prepare, each rank splits in its own way: give it a generator")
        elif shares:
            plan.refuse(
                call,
                f"{code(call.func)}: an order that all ranks draw alike, and share out by rank; after hvt.prepare each"
                " rank draws its own: give it a generator of its own, seeded by the epoch",
            )


def _shares_out(source: Source) -> bool:
    """Whether a part is taken by rank: x[hvd.rank()::hvd.size()], range(hvd.rank(), ...)."""
    return any(
        any(source.qualified(one) == "horovod.torch.rank" for one in walk(node))
        for node in walk(source.module)
        if isinstance(node, cst.Slice) or (isinstance(node, cst.Call) and code(node.func) in ("range", "islice"))
    )
