"""Converts a Horovod script to hvdtrain, or names the lines that it cannot convert."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from hvdtrain.migrate.keras import calls as keras_calls
from hvdtrain.migrate.keras import wrapping as keras_wrapping
from hvdtrain.migrate.script import ranks, torch_calls, training, wrapping
from hvdtrain.migrate.script.plan import Rewrite
from hvdtrain.migrate.script.source import LineNote, Script, children, code, find, walk

_MODULES = ("horovod.torch", "horovod.tensorflow.keras", "horovod.keras", "horovod.tensorflow")


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion."""

    text: str  # the new script; the old one if lines of it are refused
    refused: tuple[LineNote, ...] = ()  # the lines that cannot be converted, with reasons
    notes: tuple[LineNote, ...] = ()  # what to know of converted lines
    framework: str = "torch"  # the script's framework: torch, keras


def convert(text: str) -> Conversion:
    """Moves a script from `horovod.torch` to `hvdtrain.torch`, or from Horovod's Keras to `hvdtrain.keras`."""
    try:
        return _convert(text)
    finally:
        children.cache_clear()


def _convert(text: str) -> Conversion:
    try:
        source = Script(text)
    except cst.ParserSyntaxError as error:
        message = str(error.message).splitlines()[0]
        return Conversion(text, (LineNote(error.raw_line, f"the script does not compile: {message}"),))
    plan = Rewrite(source, _module(source))
    imports = _imports(plan)
    if not imports and not plan.refused:
        return Conversion(text, (LineNote(1, "nothing here imports horovod.torch, or Horovod's Keras"),))
    ranks.move_init(plan)
    if plan.framework == "torch":
        _move_torch(plan)
    else:
        keras_calls.move_rest(plan, keras_wrapping.move_wraps(plan))
    for node in find(source.module, cst.SimpleString):
        if node.evaluated_value == "horovod":
            plan.refuse(node, "'horovod' as text: a library that calls Horovod itself (Lightning's strategy)")
    for name in sorted({"hvt", "hvk", "hvdtrain"} & plan.needs & source.names()):
        plan.refuse(imports[0], f"the new script needs the name {name}, which the script uses itself")
    notes = tuple(sorted(plan.notes))
    if plan.refused:
        return Conversion(text, tuple(sorted(plan.refused)), notes, plan.framework)
    ranks.move_imports(plan, imports, {**keras_calls.kept_imports(plan), **ranks.LINES})
    return Conversion(plan.apply(), (), notes, plan.framework)


def _move_torch(plan: Rewrite) -> None:
    optimizers = wrapping.move_wraps(plan)
    ranks.refuse_shared_orders(plan)
    passes = training.passes(plan.source)
    if optimizers.wrapped:
        for call in passes:
            training.move_backward(plan, optimizers, call)
        wrapping.move_synchronize(plan, optimizers)
    elif passes and not (plan.refused or torch_calls.averages_by_hand(plan.source)):
        plan.note(
            passes[0],
            "no optimizer is wrapped in this file, and backward() is not changed; if another file prepares it,"
            " write optimizer.backward(loss)",
        )
    torch_calls.move_rest(plan)


def _imported(node: cst.CSTNode) -> list[str]:
    """Returns the modules of Horovod that a statement imports, whole or in part."""
    names: list[str] = []
    if isinstance(node, cst.Import):
        names = [code(alias.name) for alias in node.names]
    elif isinstance(node, cst.ImportFrom) and node.module is not None and not node.relative:
        names = [code(node.module)]
        if not isinstance(node.names, cst.ImportStar):
            whole = [f"{names[0]}.{code(alias.name)}" for alias in node.names]
            if names[0] == "horovod" or set(whole) & set(_MODULES):
                names = whole
    return [name for name in names if name.split(".")[0] == "horovod"]


def _module(source: Script) -> str:
    """Returns the module of Horovod that the script trains with."""
    found = [name.removesuffix(".callbacks") for node in walk(source.module) for name in _imported(node)]
    return next((module for module in _MODULES if module in found), _MODULES[0])


def _imports(plan: Rewrite) -> list[cst.SimpleStatementLine]:
    """Returns the statements that import Horovod; refuses those of another framework."""
    found = []
    for node in walk(plan.source.module):
        theirs = _imported(node)
        if not theirs:
            continue
        if isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
            plan.refuse(node, f"from {theirs[0]} import *: import Horovod under a name")
        assert isinstance(node, (cst.Import, cst.ImportFrom))
        alone = isinstance(node, cst.ImportFrom) or len(node.names) == 1
        statement = plan.source.statement(node)
        moved = {plan.module, "horovod", *([f"{plan.module}.callbacks"] if plan.framework == "keras" else [])}
        if set(theirs) - moved:
            other = next(name for name in theirs if name not in moved)
            plan.refuse(node, f"{other} cannot be converted: only what is imported from {plan.module} can")
        elif not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) > 1 or not alone:
            plan.refuse(node, "Horovod must be imported on a line of its own")
        else:
            found.append(statement)
        plan.settle(node)
    return found
