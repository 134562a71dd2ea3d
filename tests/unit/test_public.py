"""Public names and the flags of every command are those of tests/public.txt; a change of either is made there, too."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import textwrap

import pytest
import snippets
from harness import REPOSITORY
from typed import Wrong, definition, names_of

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
# what users neither construct nor call: results, errors, constants
WITHOUT_EXAMPLE = re.compile(
    r"Check|Detected|Folder|Images|Progress|Proof|Step|Trial|Tuning|\w+Error|Preempted|[A-Z0-9_]+_(MEAN|STD)|__version__"
)
WITH_EXAMPLE = [
    (package, name) for package in PACKAGES for name in names_of(package) if not WITHOUT_EXAMPLE.fullmatch(name)
]


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


# ---- docstrings and the pages that show them


def example_of(docstring: str) -> str:
    """Returns the code below the line `Example:`; raises `Wrong` unless it is one to four lines."""
    found = re.search(r"^Example:\n((?: {4}.*\n)+)", docstring + "\n", re.MULTILINE)
    code = textwrap.dedent(found[1]) if found else ""
    if not 1 <= len(code.splitlines()) <= 4:
        raise Wrong(f"an example has one to four lines, not {len(code.splitlines())}")
    return code


def check_example(where: str, docstring: str) -> str:
    """Returns the example, which Python compiles and whose calls our functions take."""
    code = example_of(docstring)
    try:
        compile(code, where, "exec")
    except SyntaxError as error:
        raise Wrong(f"{where}: {error}") from error
    snippets.check(snippets.Block(where, "python", code))
    return code


@pytest.mark.parametrize(("package", "name"), WITH_EXAMPLE)
def test_what_users_call_has_an_example(package: str, name: str) -> None:
    found = definition(package, name)
    assert found is not None
    code = check_example(f"{package}.{name}", ast.get_docstring(found[1]) or "")
    assert isinstance(found[1], ast.ClassDef) or re.search(rf"\b{name}\(", code), code


@pytest.mark.parametrize(
    "text",
    [
        "Returns 1.",
        "Returns 1.\n\nExample:\n\nArgs:\n    x: a number.",
        "Example:\n    hvt.loader(x",
        "Example:\n    hvt.loader(x, batch=3)",
        "Example:\n    hvt.load(x)",
        "Example:\n    hvdtrain.pipeline.split(model, example, ['cpu'], parts=2)",
        "Example:\n    load_digits(width=3)",
        "Example:\n    optimizer.backward(loss, scale=2)",
        "Example:\n    world.allreduce(x)",
        "Example:\n" + 5 * "    x = 1\n",
    ],
)
def test_an_example_that_is_wrong_is_seen(text: str) -> None:
    with pytest.raises(Wrong):
        check_example("twin", text)


def shown(page: str) -> list[str]:
    """Returns the names that a page of docs/api shows."""
    lines = re.findall(r"^\.\. (?:auto(?:function|class|exception|data)|py:data):: (\S+)$", page, re.MULTILINE)
    return sorted(line.rpartition(".")[2] for line in lines)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_of_a_package_shows_each_public_name_once(package: str) -> None:
    page = (REPOSITORY / "docs" / "api" / f"{package}.md").read_text(encoding="utf-8")
    assert shown(page) == names_of(package)
    name = names_of(package)[-1]
    assert shown(re.sub(rf"(?m)^.*:: (\S+\.)?{name}$", "", page)) == names_of(package)[:-1], "negative twin"
