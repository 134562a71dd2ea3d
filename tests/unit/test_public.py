"""Public names and the flags of every command are those of tests/public.txt; a change of either is made there, too."""

from __future__ import annotations

import argparse
import ast
import importlib

from harness import REPOSITORY

from hvdtrain.__main__ import COMMANDS

PACKAGES = ("hvdtrain", "hvdtrain.torch", "hvdtrain.keras", "hvdtrain.pipeline", "hvdtrain.datasets")
LIST = REPOSITORY / "tests" / "public.txt"


def names_of(package: str) -> list[str]:
    """Public names; without importing what imports a framework."""
    source = (REPOSITORY / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return sorted(ast.literal_eval(node.value))
    return sorted(importlib.import_module(package).__all__)


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
                found += _flags(inner, f"{command} {name}")
        elif "--help" not in action.option_strings:
            found.append(f"hvdtrain {command}: {', '.join(action.option_strings) or action.dest}")
    return found


def listed() -> str:
    names = [f"{package}.{name}" for package in PACKAGES for name in names_of(package)]
    return "\n".join([*names, *(flag for command in COMMANDS for flag in flags_of(command))]) + "\n"


def test_public_names_and_flags_are_those_that_are_listed() -> None:
    now = listed()
    assert now == LIST.read_text(encoding="utf-8"), f"if that is meant, {LIST.name} becomes:\n{now}"
