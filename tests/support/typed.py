"""What a page says to type is what the programs take, and the tests that it names are there."""

from __future__ import annotations

import argparse
import ast
import configparser
import functools
import importlib
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from harness import PROGRAMS, REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))
from sources import nodes, tree_of

from hvdtrain import __main__, keras_mnist, pipeline_resnet, torch_resnet
from hvdtrain.core.errors import HvdtrainError

MODULES = {
    "hvdtrain.keras_mnist": keras_mnist,
    "hvdtrain.pipeline_resnet": pipeline_resnet,
    "hvdtrain.torch_resnet": torch_resnet,
}
# scripts of the reader's
YOURS = ("train.py", "first.py")
# flags of other programs that pages use; True: with a value
OTHERS = {
    "sbatch": {},
    "pip install": {"-e": False, "--no-index": False, "--find-links": True},
    "horovodrun": {"-np": True, "-H": True, "--gloo": False},
    "mpirun": {"-np": True, "-H": True},
    "torchrun": {
        "--standalone": False, "--nnodes": True, "--nproc-per-node": True, "--node-rank": True, "--master-addr": True,
        "--master-port": True, "-m": False,
    },
    "docker run": {"--rm": False, "--gpus": True, "--shm-size": True},
    "docker build": {"-f": True, "-t": True, "--build-arg": True},
    "docker compose": {"-f": True, "--build": False, "--exit-code-from": True},
    "tensorboard": {"--logdir": True},
}  # fmt: skip
SHORT = {"hvt": "hvdtrain.torch", "hvk": "hvdtrain.keras", "hvdtrain": "hvdtrain"}
# variables that hold one of our objects in pages and examples
OBJECTS = {
    "world": "hvdtrain.World", "checkpoints": "hvdtrain.Checkpointer", "run": "hvdtrain.RunLog",
    "plan": "hvdtrain.Plan", "train": "hvdtrain.torch.Loader", "optimizer": "hvdtrain.torch.Optimizer",
    "pipe": "hvdtrain.pipeline.Pipeline",
}  # fmt: skip


class Wrong(AssertionError):
    """What a line of the page says is not so."""


# ---- commands


def check_typed(text: str) -> None:
    """A command line, or a line of Python.

    Raises:
        Wrong: it would not be taken.
    """
    words = shlex.split(text, comments=True)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if words[0] == ".":
        return  # an environment of the reader's
    two = " ".join(words[:2])
    if two in OTHERS or words[0] in OTHERS or words[0] in ("hvdtrain", "python") or words[0].startswith("scripts/"):
        check_command(words)
    else:
        check_python(text)


def check_command(words: Sequence[str]) -> None:
    program, rest = words[0], list(words[1:])
    if program == "docker":
        check_docker(rest[0], rest[1:])
    elif program == "pip":
        check_packages(after_flags("pip install", rest[1:]))
    elif program in OTHERS:
        left = after_flags(program, rest)
        if program == "torchrun":
            check_command(["python", *["-m"] * ("-m" in rest), *left])
        elif program == "sbatch":
            exists(left[0])
            check_command(left[1:])
        elif program != "tensorboard":
            check_command(left)
    elif program == "hvdtrain":
        args = taken(__main__._parser(), rest)
        if rest[0] == "launch":
            check_command([word for word in args.argv if word != "--"])
    elif program == "python":
        check_program(rest)
    else:
        check_file(program, rest)


def check_docker(what: str, rest: list[str]) -> None:
    left = after_flags(f"docker {what}", rest)
    if what == "run":
        check_command(left[1:])  # after the image
    else:
        exists(rest[rest.index("-f") + 1])


def check_packages(words: list[str]) -> None:
    """Extras of hvdtrain are those of setup.cfg."""
    known = configparser.ConfigParser()
    known.read(REPOSITORY / "setup.cfg", encoding="utf-8")
    asked = {extra for word in words for extra in re.findall(r"hvdtrain\[(\w+)\]", word)}
    if unknown := asked - {*known["options.extras_require"]}:
        raise Wrong(f"no extra {', '.join(unknown)}")


def check_program(words: list[str]) -> None:
    if words[0] != "-m":
        check_file(words[0], words[1:])
        return
    if words[1] not in MODULES:
        raise Wrong(f"no program {words[1]}: {', '.join(MODULES)}")
    module, flags = MODULES[words[1]], words[2:]
    args = taken(module.parser(), flags)
    if module is torch_resnet:
        torch_resnet.check_flags(args)


def check_file(name: str, words: Sequence[str]) -> None:
    """A script: it exists, and its text has the flags; or one of the reader's."""
    if name in YOURS:
        return
    text = exists(name).read_text(encoding="utf-8")
    unknown = [word for word in words if word.startswith("--") and not re.search(rf"{word}\b", text)]
    if unknown:
        raise Wrong(f"{name} has no {' '.join(unknown)}")


def exists(name: str) -> Path:
    if not (REPOSITORY / name).is_file():
        raise Wrong(f"no file {name}")
    return REPOSITORY / name


def after_flags(program: str, words: list[str]) -> list[str]:
    """What follows a program's own flags."""
    while words and words[0].startswith("-"):
        if words[0] not in OTHERS[program]:
            raise Wrong(f"{program} {words[0]}: not among {' '.join(OTHERS[program])}")
        words = words[2 if OTHERS[program][words[0]] else 1 :]
    return words


def taken(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    def refuse(message: str) -> NoReturn:
        raise Wrong(message)

    parser.error = refuse  # type: ignore[method-assign]  # of subcommands it is told by their exit
    try:
        return parser.parse_args(words)
    except (HvdtrainError, SystemExit) as error:
        raise Wrong(f"{' '.join(words)}: {error}") from error


# ---- Python


def names_of(package: str) -> list[str]:
    """Public names; without importing what imports a framework."""
    for node in tree_of(REPOSITORY / package.replace(".", "/") / "__init__.py").body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return sorted(ast.literal_eval(node.value))
    return sorted(importlib.import_module(package).__all__)


def check_python(text: str) -> None:
    """What is called of ours is public, and takes these keywords."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise Wrong(f"neither a command nor Python: {text}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in SHORT:
            package = SHORT[node.value.id]
            if node.attr not in {*names_of(package), *(() if package != "hvdtrain" else ("pipeline", "torch"))}:
                raise Wrong(f"{package} has no {node.attr}")
        if isinstance(node, ast.Call):
            check_keywords(node)


def check_keywords(call: ast.Call) -> None:
    owner, _, name = ast.unparse(call.func).rpartition(".")
    given = {keyword.arg for keyword in call.keywords if keyword.arg}
    if not owner and name in names_of("hvdtrain.datasets"):
        owner = "hvdtrain.datasets"
    if owner in OBJECTS:
        takes = method_keywords(OBJECTS[owner], name)
        if takes is not None and not given <= takes:
            raise Wrong(f"{owner}.{name} takes no {', '.join(sorted(given - takes))}")
    if given and owner.split(".")[0] in SHORT:
        unknown = given - keywords_of(SHORT.get(owner, owner), name)
        if unknown:
            raise Wrong(f"{owner}.{name} takes no {', '.join(sorted(unknown))}")


@functools.cache
def keywords_of(package: str, name: str) -> frozenset[str]:
    """Arguments of a public function, or fields and arguments of a class, wherever the package defines it."""
    folder = REPOSITORY / package.replace(".", "/")
    found: set[str] = set()
    for file in folder.rglob("*.py"):
        for node in tree_of(file).body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                found |= arguments(node)
            elif isinstance(node, ast.ClassDef) and node.name == name:
                fields = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
                found |= {field.id for field in fields if isinstance(field, ast.Name)}
                makers = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
                found |= {argument for maker in makers for argument in arguments(maker)}
    return frozenset(found)


def definition(module: str, name: str) -> tuple[str, ast.FunctionDef | ast.ClassDef] | None:
    """Returns the module and the node that define a function or class, by the source; None if it is not ours."""
    path = REPOSITORY / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in nodes(tree_of(file)):
        match node:
            case ast.FunctionDef() | ast.ClassDef() if node.name == name:
                return module, node
            case ast.ImportFrom(module=str(source), names=names) if source.startswith("hvdtrain"):
                for alias in names:
                    if (alias.asname or alias.name) == name:
                        return definition(source, alias.name)
            case ast.Call(func=ast.Name("public"), args=[_, homes]):
                for home, public in ast.literal_eval(homes).items():
                    if name in public.split():
                        return definition(f"{module}.{home}", name)
    return None


@functools.cache
def method_keywords(owner: str, name: str) -> set[str] | None:
    """Returns the arguments of a method of our class `owner`; None if they are unknown: it is inherited, or takes any.

    Raises:
        Wrong: the class, all of whose bases are ours, has no such method or attribute.
    """
    module, _, kind = owner.rpartition(".")
    waiting, known = [definition(module, kind)], True
    while waiting:
        if (found := waiting.pop()) is None:
            known = False
            continue
        module, node = found
        assert isinstance(node, ast.ClassDef)
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == name:
                return None if part.args.kwarg else arguments(part)
        waiting += [definition(module, base.id) if isinstance(base, ast.Name) else None for base in node.bases]
    if known:
        raise Wrong(f"{owner} has no {name}()")
    return None


def arguments(function: ast.FunctionDef) -> set[str]:
    of = function.args
    return {argument.arg for argument in (*of.posonlyargs, *of.args, *of.kwonlyargs)}


# ---- tests


def check_test(text: str) -> None:
    """tests/folder/file.py::function, ::Class::method, either with [parameters].

    Raises:
        Wrong: there is no such test.
    """
    name, _, parameters = text.removesuffix("]").partition("[")
    file, *path = name.split("::")
    scope: list[ast.stmt] = tree_of(exists(file)).body
    for part in path:
        kinds = (ast.FunctionDef, ast.ClassDef)
        inner = [node for node in scope if isinstance(node, kinds) and node.name == part]
        if not inner:
            raise Wrong(f"{file} has no {'::'.join(path)}")
        scope = inner[0].body
    if not path or not path[-1].startswith("test_"):
        raise Wrong(f"no test: {text}")
    case = parameters.rpartition("-")[2]
    if case and case not in exists(file).read_text(encoding="utf-8") + all_programs():
        raise Wrong(f"no case {case}: {text}")


@functools.cache
def all_programs() -> str:
    """What ranks run in tests: some cases are functions of it."""
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(PROGRAMS.rglob("*.py")))
