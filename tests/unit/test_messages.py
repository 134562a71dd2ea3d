"""The first line of every error says what is wrong: it must, cannot, needs or is not. No line has over 100 letters."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping

from harness import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))
from sources import modules, nodes, tree_of

LONGEST = 100  # characters, of what stands in the code
SAYS_WHAT_IS_WRONG = re.compile(
    r"\b(must|cannot|needs?|(is|are|was|were|does|do|did|has|have) not|has no|have no|no longer|failed|interrupted)\b"
)
IN_A_VARIABLE = {  # first lines that do not stand in the call itself
    35: "weight= must equal the denominator of the mean loss",
    47: "the hosts must pass the checks that come before a job",
    50: "the loss of a batch must be the weighted mean of the losses of its pieces",
}
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


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def errors(trees: Mapping[str, ast.Module]) -> set[str]:
    """Returns the classes of errors whose first argument is what is wrong."""
    found = {"HvdtrainError"}
    classes = [node for tree in trees.values() for node in nodes(tree) if isinstance(node, ast.ClassDef)]
    while more := {node.name for node in classes if set(map(last_name, node.bases)) & found} - found:
        found |= more
    return found


def first_lines(trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """Yields the place and the first line of every error whose text stands there, or beside it under a name."""
    kinds = errors(trees)
    for name, tree in trees.items():
        for scope in nodes(tree):
            if not isinstance(scope, ast.FunctionDef):
                continue
            inner = nodes(scope)
            texts = {
                node.targets[0].id: text_of(node.value)
                for node in [*tree.body, *inner]
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            }
            for node in inner:
                if isinstance(node, ast.Call) and last_name(node.func) in kinds and node.args:
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


def codes(trees: Mapping[str, ast.Module]) -> Iterator[tuple[int, str]]:
    """Yields the code of every error that has one, with its first line."""
    kinds = errors(trees)
    for node in (node for tree in trees.values() for node in nodes(tree)):
        if isinstance(node, ast.Call) and last_name(node.func) in kinds:
            for keyword in node.keywords:
                if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                    yield int(str(keyword.value.value)), text_of(node.args[0]) or ""


def explained(page: str) -> dict[int, str]:
    """Returns the errors that docs/troubleshooting.md explains: by their codes, as they are printed."""
    return {int(code): line for code, line in re.findall(r"^### HVT-(\d{3})\n\n`(.*)`$", page, re.MULTILINE)}


def of_package() -> dict[str, ast.Module]:
    return {str(path.relative_to(REPOSITORY)): tree_of(path) for path in modules().values()}


def unexplained(found: Iterable[tuple[int, str]], page: str) -> list[str]:
    """Returns the errors whose code the page does not have, or with another first line; and codes of no error."""
    shown = explained(page)
    wrong = [f"{code}: {shown[code]}" for code in shown.keys() - {code for code, _ in found} - IN_A_VARIABLE.keys()]
    for code, line in found:
        parts = map(re.escape, (line or IN_A_VARIABLE.get(code, "")).split("{}"))
        if code not in shown or not re.match(".*".join(parts), shown[code]):
            wrong.append(f"{code}: {line}")
    return wrong


def test_every_code_is_explained_under_the_words_of_its_error() -> None:
    page = (REPOSITORY / "docs/troubleshooting.md").read_text(encoding="utf-8")
    found = list(codes(of_package()))
    assert len({code for code, _ in found}) > 40
    assert unexplained(found, page) == []
    first = f"`{explained(page)[1]}`"
    assert unexplained(found, page.replace(first, "`something else`")) != [], "negative twin"
    assert unexplained(found, page.replace("### HVT-002", "### HVT-902")) != [], "negative twin"


def test_the_first_line_of_an_error_says_what_is_wrong() -> None:
    trees = of_package()
    assert len(set(first_lines(trees))) > 500
    assert wrong(trees) == set()


def long_lines(trees: Mapping[str, ast.Module]) -> set[str]:
    """Returns the lines of errors that are too long, of what was received and of what to type, too."""
    kinds = errors(trees)
    return {
        f"{name}:{node.lineno}: {line}"
        for name, tree in trees.items()
        for node in nodes(tree)
        if isinstance(node, ast.Call) and last_name(node.func) in kinds
        for argument in node.args
        for line in (text_of(argument) or "").split("\n")
        if len(line) > LONGEST
    }


def test_no_line_of_an_error_is_longer() -> None:
    assert long_lines(of_package()) == set()
    code = "class Odd(HvdtrainError): ...\ndef f(x):\n    raise Odd('x', f'{x}', 'a\\n' 'b" + "c" * 100 + "')\n"
    assert len(long_lines({"code": ast.parse(code)})) == 1, "negative twin"


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
