"""Pages and messages are plain English: no word or phrase of scripts/style.py, no long line, no long sentence."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

import pytest
from harness import REPOSITORY
from snippets import MARKDOWN

sys.path.insert(0, str(REPOSITORY / "scripts"))
import style

LINE = 100  # characters
SENTENCE = 30  # words
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


def long_lines(page: str) -> list[str]:
    """Returns the lines of a page that are too long, without its tables, code, comments and the targets of links."""
    tokens = MARKDOWN.parse(page)
    kinds = ("fence", "code_block", "html_block", "table_open")
    aside = {line for token in tokens if token.type in kinds and token.map for line in range(*token.map)}
    lines = [LINK.sub(r"\1", line) for number, line in enumerate(page.splitlines()) if number not in aside]
    return [line for line in lines if len(line) > LINE]


def long_sentences(page: str) -> Iterator[str]:
    """Yields the sentences of a page that are too long, without its tables and code."""
    tokens = MARKDOWN.parse(page)
    tables = {line for token in tokens if token.type == "table_open" and token.map for line in range(*token.map)}
    for token in tokens:
        if token.type == "inline" and token.map and token.map[0] not in tables:
            for sentence in re.split(r"(?<=[.!?])\s+", LINK.sub(r"\1", token.content)):
                if len(sentence.split()) > SENTENCE:
                    yield sentence


@pytest.mark.parametrize("page", style.pages(), ids=lambda page: page.name)
def test_a_page_has_plain_words_and_short_lines(page) -> None:
    text = page.read_text(encoding="utf-8")
    assert style.findings(text) == []
    assert long_lines(text) == []


def test_sentences_of_the_readme_are_short() -> None:
    assert [*long_sentences((REPOSITORY / "README.md").read_text(encoding="utf-8"))] == []


def test_messages_have_plain_words() -> None:
    texts = [*style.of_package()]
    assert len(texts) > 3000
    assert [(place, found) for place, text in texts if (found := style.findings(text))] == []


def test_exceptions_are_pages() -> None:
    for name in style.RESULTS:
        assert (REPOSITORY / "docs" / name).is_file(), f"remove {name} from scripts/style.py"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Rank 0 told nobody.", ["told", "nobody"]),
        ("It begins anew, as\never.", ["anew", "as ever"]),
        ("Besides, ranks go\non, too.", ["Besides", "go on", "too"]),
        ("what is left of it; once more", ["what is left", "once more"]),
        ("too many ranks; the unsaid; a follow-up-say; backward() is left as it is", []),
    ],
)
def test_negative_twin_words(text: str, found: list[str]) -> None:
    assert style.findings(text) == found


def test_negative_twin_lines_and_sentences() -> None:
    words = "word " * 31
    aside = f"```\n{words}\n```\n\n| a |\n|---|\n| {words} |\n\n<!-- {words} -->\n\n[a](https://{'b' * 99})\n"
    assert long_lines(f"{words}\n\n{aside}") == [words]
    assert [*long_sentences(f"One. {words}.\n\n{aside}")] == [f"{words}."]


def test_negative_twin_messages() -> None:
    code = '"""Said here."""\nfail(f"{x} told us", "told")\n'
    assert [*style.texts(ast.parse(code))] == [(2, "{} told us")]
    assert [line for line, _ in style.texts(ast.parse(f"{code}print(__doc__)\n"))] == [1, 2]
