"""Public names and the flags of every command are those of tests/public.txt; a change of either is made there, too."""

from __future__ import annotations

import argparse
import ast
import importlib
import re

import pytest
from harness import REPOSITORY
from typed import names_of

import hvdtrain
from hvdtrain.__main__ import COMMANDS
from hvdtrain.core.flags import LateParser

# where the two adapters define what they both have
BOTH = {
    "loader": ("torch/data/create.py", "keras/data/create.py"),
    "prepare": ("torch/preparation.py", "keras/__init__.py"),
    "evaluate": ("torch/evaluation.py", "keras/evaluation.py"),
    "predict": ("torch/evaluation.py", "keras/evaluation.py"),
    "model_state": ("torch/checkpoint.py", "keras/checkpoint.py"),
    "verify": ("torch/update/averaging.py", "keras/__init__.py"),
    "fingerprint": ("torch/engines/replicas.py", "keras/state/replicas.py"),
    "go_on": ("torch/data/loader.py", "keras/data/loader.py"),
}
PACKAGES = ("hvdtrain", "hvdtrain.torch", "hvdtrain.keras", "hvdtrain.pipeline", "hvdtrain.datasets")
LIST = REPOSITORY / "tests" / "public.txt"


def flags_of(command: str) -> list[str]:
    """Flags, also of subcommands."""
    parser = argparse.ArgumentParser(add_help=False)
    importlib.import_module(COMMANDS[command][0]).add_arguments(parser)
    return _flags(parser, command)


def _flags(parser: argparse.ArgumentParser, command: str) -> list[str]:
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                if isinstance(inner, LateParser):
                    inner.fill()
                found += _flags(inner, f"{command} {name}")
        elif "--help" not in action.option_strings:
            found.append(f"hvdtrain {command}: {', '.join(action.option_strings) or action.dest}")
    return found


def arguments_of(name: str, path: str) -> dict[str, str | None]:
    """A function's arguments, each with its default."""
    tree = ast.parse((REPOSITORY / "hvdtrain" / path).read_text(encoding="utf-8"))
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    of = found.args
    names = [argument.arg for argument in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
    positional = [None] * (len(of.args) - len(of.defaults)) + [*of.defaults]
    defaults = [None if default is None else ast.unparse(default) for default in (*positional, *of.kw_defaults)]
    return dict(zip(names, defaults, strict=True))


@pytest.mark.parametrize("name", BOTH)
def test_the_adapters_rhyme(name: str) -> None:
    """What both take has one name, one default and one order."""
    torch, keras = (arguments_of(name, path) for path in BOTH[name])
    assert [name for name in torch if name in keras] == [name for name in keras if name in torch] != []
    assert all(keras[name] == torch[name] for name in keras if name in torch), (torch, keras)


def listed() -> str:
    names = [f"{package}.{name}" for package in PACKAGES for name in names_of(package)]
    return "\n".join([*names, *(flag for command in COMMANDS for flag in flags_of(command))]) + "\n"


def test_public_names_and_flags_are_those_that_are_listed() -> None:
    now = listed()
    assert now == LIST.read_text(encoding="utf-8"), f"if that is meant, {LIST.name} becomes:\n{now}"


@pytest.mark.parametrize(("short", "package"), [("hvt", "hvdtrain.torch"), ("hvk", "hvdtrain.keras")])
def test_what_programs_and_pages_call_is_public(short: str, package: str) -> None:
    """Names are looked up when they are used, so neither an import nor mypy misses one that is gone."""
    known = {*names_of(package)}
    top = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("hvdtrain/**/*.py")]
    used = {name for file in top for name in re.findall(rf"\b{short}\.(\w+)", file.read_text(encoding="utf-8"))}
    assert used and used <= known, used - known


def test_public_names_are_there_and_others_are_attribute_errors() -> None:
    assert [name for name in hvdtrain.__all__ if getattr(hvdtrain, name) is None or name not in dir(hvdtrain)] == []
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        hvdtrain.Trainer  # noqa: B018
