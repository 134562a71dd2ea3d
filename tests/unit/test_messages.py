"""The first line of every error says what is wrong: it must, cannot, needs or is not; at most 100 characters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from harness import REPOSITORY

LONGEST = 100  # characters, of what stands in the code
SAYS_WHAT_IS_WRONG = re.compile(
    r"\b(must|cannot|needs?|(is|are|was|were|does|do|did|has|have) not|has no|have no|no longer|failed|interrupted)\b"
)
QUOTED = {"the new script {}", "{} on rank 0: {}"}  # what is wrong is what is put in


def text_of(node: ast.AST | None) -> str | None:
    """Returns a text as written, with {} for what is put in; of a choice of two the first; None for anything else."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(text_of(value) or "{}" for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = text_of(left), text_of(right)
            return None if None in parts else "".join(filter(None, parts))
        case ast.IfExp(body=body):
            return text_of(body)
    return None


def errors(trees: Mapping[str, ast.Module]) -> set[str]:
    """Returns the classes of errors whose first argument is what is wrong."""
    found = {"HvdtrainError"}
    while True:
        more = {
            node.name
            for tree in trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and {ast.unparse(base).rpartition(".")[2] for base in node.bases} & found
        }
        if more <= found:
            return found
        found |= more


def first_lines(trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """Yields the place and the first line of every error whose text stands there, or beside it under a name."""
    kinds = errors(trees)
    for name, tree in trees.items():
        for scope in ast.walk(tree):
            if not isinstance(scope, (ast.FunctionDef, ast.Module)):
                continue
            inner = list(ast.walk(scope)) if isinstance(scope, ast.FunctionDef) else []
            texts = {
                node.targets[0].id: text_of(node.value)
                for node in [*tree.body, *inner]
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            }
            for node in inner:
                if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in kinds and node.args:
                    first = node.args[0]
                    line = texts.get(first.id) if isinstance(first, ast.Name) else text_of(first)
                    if line is not None:
                        yield f"{name}:{node.lineno}", line.split("\n")[0]


def wrong(trees: Mapping[str, ast.Module]) -> set[str]:
    return {
        f"{place}: {line}"
        for place, line in first_lines(trees)
        if len(line) > LONGEST or not (SAYS_WHAT_IS_WRONG.search(line) or line in QUOTED)
    }


def test_the_first_line_of_an_error_says_what_is_wrong() -> None:
    paths = (REPOSITORY / "hvdtrain").rglob("*.py")
    trees = {str(path.relative_to(REPOSITORY)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    assert len(set(first_lines(trees))) > 500
    assert wrong(trees) == set()


def test_negative_twin() -> None:
    code = (
        "class Odd(HvdtrainError): ...\n"
        "RULE = 'a model has layers'\n"
        "def f(x):\n"
        "    raise Odd(RULE)\n"
        "    raise HvdtrainError(f'{x} must be ' + 'a' * 9)\n"
        "    raise Odd('x needs ' 'y')\n"
        "    raise Odd(f'{x} cannot be " + "a" * 100 + "')\n"
    )
    found = wrong({"code": ast.parse(code)})
    assert [each.split(": ")[0] for each in sorted(found)] == ["code:4", "code:7"]
