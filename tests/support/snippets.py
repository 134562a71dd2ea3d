"""The fenced blocks of README.md and docs/*.md: read, checked, and run in order, in a folder of their own.

A comment right before a block says what to do with it; without one it is run.

    <!-- with PROGRAM -->                 it stands in tests/programs/pages/PROGRAM.py, at the line "# the page". A
                                          page's Python blocks with the same program make one; of a diff both sides are
                                          run, the second, which stays as train.py, on 1 and on 2 ranks
    <!-- file NAME -->                    it is that file, which the commands that follow have; a diff changes it
    <!-- prints -->                       the command before printed these lines; "..." is any text
    <!-- tested by tests/a.py::test_b --> that test runs it; `and` names more of them
    <!-- not run: REASON -->              its lines are those that programs would take
    <!-- not run (WORD, WORD): REASON --> the same for lines with these words; the others are run

"thorough, " before any of it: not in the default run of the tests, for it takes long. Where there is no GPU, `cuda:N`
is run as `cpu`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import PROGRAMS, REPOSITORY, Result, run_ranks
from markdown_it import MarkdownIt
from mdit_py_plugins.anchors.index import slugify
from typed import Wrong, check_python, check_test, check_typed, exists

PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])
LANGUAGES = ("bash", "python", "diff", "text")
PLACE = "# the page\n"
ORDER = re.compile(
    r"(?P<thorough>thorough, )?(?:with (?P<program>\w+)|file (?P<file>[\w.]+)|(?P<prints>prints)"
    r"|tested by (?P<tests>.+)|not run(?: \((?P<words>.+)\))?: (?P<reason>.+))?"
)
MARKDOWN = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Block:
    """A fenced block, and what the comment before it says (`ORDER`'s parts).

    Attributes:
        where: page and line, as an editor takes it.
        language: one of `LANGUAGES`.
        text: what is between the fences.
    """

    where: str
    language: str
    text: str
    thorough: bool = False
    program: str | None = None
    file: str | None = None
    prints: bool = False
    tests: str | None = None
    words: str | None = None
    reason: str | None = None

    @property
    def is_run(self) -> bool:
        return self.language != "text" and not self.tests and (not self.reason or bool(self.words))

    def lines(self, *, run: bool) -> list[str]:
        """A bash block's commands: those that are run, or the others."""
        words = self.words.split(", ") if self.words else [""]
        told = [line for line in self.text.replace("\\\n", " ").splitlines() if line.split("#")[0].strip()]
        return [line for line in told if run == (self.is_run and not (self.reason and any(w in line for w in words)))]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page.

    Raises:
        Wrong: a language or a comment that nobody knows, or a comment with no block after it.
    """
    found, order, its_line = [], "", 0
    for token in MARKDOWN.parse(page.read_text(encoding="utf-8")):
        line = token.map[0] + 1 if token.map else 0
        if order and token.type != "fence":
            raise Wrong(f"{page.name}:{its_line}: no block after this comment")
        if token.type == "html_block" and token.content.startswith("<!--"):
            order, its_line = token.content.strip().removeprefix("<!--").removesuffix("-->").strip(), line
        elif token.type == "fence" and not token.info.startswith("{"):
            found.append(_block(f"{page.name}:{line}", token.info, token.content, order))
            order = ""
    return found


def _block(where: str, language: str, text: str, order: str) -> Block:
    said = ORDER.fullmatch(order)
    if language not in LANGUAGES:
        raise Wrong(f"{where}: a block is one of {', '.join(LANGUAGES)}, not {language!r}")
    if said is None:
        raise Wrong(f"{where}: unknown comment: {order}")
    parts = said.groupdict()
    return Block(where, language, text, bool(parts.pop("thorough")), prints=bool(parts.pop("prints")), **parts)


# ---- what is not run


def check(block: Block) -> None:
    """What no test runs is something that the programs would take, and tests that are named are there.

    Raises:
        Wrong: it is not.
    """
    try:
        if block.tests:
            for test in block.tests.split(" and "):
                check_test(test)
        if block.program:
            program(block.program)
        if block.language == "bash":
            for line in block.lines(run=False):
                for command in re.split(r"&&|\|", line):
                    check_typed(command.strip())
        elif block.language in ("python", "diff"):
            check_python(sides(block.text)[1] if block.language == "diff" else block.text)
    except Wrong as wrong:
        raise Wrong(f"{block.where}: {wrong}") from wrong


def spans(page: Path) -> Iterator[str]:
    """What stands in `code` within the text."""
    for token in MARKDOWN.parse(page.read_text(encoding="utf-8")):
        yield from (child.content for child in token.children or () if child.type == "code_inline")


def check_span(text: str) -> None:
    """Flags of our commands, arguments of our functions and tests exist; the rest of a span may be left out.

    Raises:
        Wrong: one does not.
    """
    said = text.split()
    if re.fullmatch(r"hvdtrain [a-z-]+ .*", text):
        ours = itertools.takewhile(lambda word: word not in ("--", "-m") and not word.endswith(".py"), said[2:])
        known = {flag for line in flags() if line.startswith(f"{said[1]}") for flag in line.split(": ")[1].split(", ")}
        if unknown := {word for word in ours if re.match("--?[a-z]", word)} - known:
            raise Wrong(f"hvdtrain {said[1]} has no {' '.join(sorted(unknown))}")
    elif re.fullmatch(r"tests/\S+\.py", text):
        exists(text)
    elif re.match(r"(hvt|hvk)\.\w+\(", text):
        with contextlib.suppress(SyntaxError):
            ast.parse(text)
            check_python(text)


@functools.cache
def flags() -> list[str]:
    """Lines "command: -a, --b" of tests/public.txt."""
    lines = (REPOSITORY / "tests" / "public.txt").read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("hvdtrain ") for line in lines if line.startswith("hvdtrain ")]


def sides(diff: str) -> tuple[str, str]:
    """What a diff goes from, and to."""
    marks = {line[:1] for line in diff.splitlines()}
    if not marks <= {"+", "-", " ", ""}:
        raise Wrong(f"lines of a diff begin with +, - or a blank, not {', '.join(sorted(marks))}")
    lines = diff.splitlines(keepends=True)
    before, after = ([line[1:] or "\n" for line in lines if not line.startswith(mark)] for mark in "+-")
    return "".join(before), "".join(after)


def program(name: str, text: str = "") -> str:
    """The program of tests/programs/pages with a page's lines in it."""
    path = PROGRAMS / "pages" / f"{name}.py"
    if not path.is_file() or (whole := path.read_text(encoding="utf-8")).count(PLACE) != 1:
        raise Wrong(f"no tests/programs/pages/{name}.py with a line {PLACE.strip()!r}")
    return whole.replace(PLACE, text)


# ---- what is run


def run(page: Path, folder: Path, *, thorough: bool) -> int:
    """Runs a page's blocks in order, in `folder`; the number of those that ran.

    Raises:
        AssertionError: one ended with another exit code than 0, or printed something else.
    """
    printed, ran, done = "", 0, set[str]()
    for block in (found := blocks(page)):
        if block.thorough and not thorough:
            printed = ""
        elif block.prints:
            assert not printed or _matches(block.text, printed), f"{block.where}: not printed:\n{block.text}\n{printed}"
        elif block.file:
            _write(block, folder)
        elif block.is_run and block.language == "python":
            name = block.program or ""
            if name not in done:
                same = [
                    it.text for it in found if it.is_run and it.language == "python" and it.program == block.program
                ]
                printed = _python(block, "\n\n".join(same), folder).out
            done.add(name)
            ran += 1
        elif block.is_run and block.language == "diff":
            printed, ran = _both_sides(block, folder).out, ran + 1
        elif block.is_run:
            printed, ran = _bash(block, folder).out, ran + 1
    return ran


def _write(block: Block, folder: Path) -> None:
    assert block.file is not None
    path, text = folder / block.file, block.text
    if block.language == "diff":
        before, text = sides(text)
        assert path.read_text(encoding="utf-8") == before, f"{block.where}: the diff is not of {block.file}"
    path.write_text(text, encoding="utf-8")


def _python(
    block: Block, text: str, folder: Path, np: int = 1, name: str = "page.py", launcher: str = "none"
) -> Result:
    whole = program(block.program, text) if block.program else text
    (folder / name).write_text(re.sub(r"cuda:(\d|\{i\})", "cpu", whole), encoding="utf-8")
    return _ended(block, run_ranks([folder / name], np, launcher=launcher, cwd=folder, timeout_s=300))


def _both_sides(block: Block, folder: Path) -> Result:
    before, after = sides(block.text)
    _python(block, before, folder, launcher="forked")
    _python(block, after, folder, name="train.py")  # from a cold start: its order of imports is that of the page
    return _python(block, after, folder, np=2, name="train.py", launcher="forked")


def _bash(block: Block, folder: Path) -> Result:
    script = folder / "page.sh"
    script.write_text("set -euo pipefail\n" + "\n".join(block.lines(run=True)) + "\n", encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run_it = "import os, sys; os.execvp('bash', ['bash', sys.argv[1]])"
    return _ended(
        block, run_ranks(["-c", run_it, script], 1, launcher="none", cwd=folder, env={"PATH": path}, timeout_s=600)
    )


def _ended(block: Block, result: Result) -> Result:
    assert result.returncode == 0, f"{block.where}: exit code {result.returncode}\n{result.text}"
    return result


def _matches(wanted: str, printed: str) -> bool:
    """Whether these lines were printed, in this order, others between them."""
    pattern = r"\n(?:.*\n)*?".join(re.escape(line.rstrip()).replace(r"\.\.\.", ".*") for line in wanted.splitlines())
    return re.search(rf"^{pattern}[ ]*$", printed, re.MULTILINE) is not None


# ---- links


def broken_links(page: Path) -> Iterator[str]:
    """Yields the links of a page to files that are not there, and to headings that pages do not have."""
    for target in _links(page):
        if "://" in target or target.startswith("mailto:"):
            continue
        file, _, anchor = target.partition("#")
        path = page if not file else page.parent / file
        if not path.exists() or (anchor and anchor not in anchors(path)):
            yield f"{page.name}: {target}"


def _links(page: Path) -> Iterator[str]:
    for token in MARKDOWN.parse(page.read_text(encoding="utf-8")):
        yield from (str(child.attrs["href"]) for child in token.children or () if child.type == "link_open")


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and Sphinx make them."""
    tokens = MARKDOWN.parse(page.read_text(encoding="utf-8"))
    heads = [after for token, after in zip(tokens, tokens[1:], strict=False) if token.type == "heading_open"]
    return {slugify("".join(part.content for part in head.children or ())) for head in heads}
