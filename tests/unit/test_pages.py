"""README.md and docs/*.md: what no test runs would be taken, named tests are there, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import snippets
from harness import REPOSITORY
from snippets import PAGES, blocks
from typed import Wrong

LINKING = [*PAGES, *(REPOSITORY / name for name in ("CONTRIBUTING.md", "CHANGELOG.md"))]
PAGE = """\
<!-- with torch_script -->
```diff
 import torch
-print(1)
+print(2)
```
"""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_to_be_typed_is_taken(page: Path) -> None:
    for block in blocks(page):
        snippets.check(block)


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Sphinx also looks at those of docs/ (`tests/process/test_docs.py`)."""
    assert not [*snippets.broken_links(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_the_text_names_is_there(page: Path) -> None:
    """Flags and arguments in the text, and tests by their files."""
    for text in snippets.spans(page):
        snippets.check_span(text)


@pytest.mark.parametrize(
    "text", ["hvdtrain launch --fast", "hvdtrain fly --high", "hvt.loader(x, batch=3)", "tests/unit/test_nothing.py"]
)
def test_what_the_text_names_and_is_not_there_is_seen(text: str) -> None:
    with pytest.raises(Wrong):
        snippets.check_span(text)


def test_a_diff_has_two_sides() -> None:
    assert snippets.sides(" a\n-b\n+c\n\n+d\n") == ("a\nb\n\n", "a\nc\n\nd\n")


@pytest.mark.parametrize(
    "text",
    [
        "<!-- not run: no host -->\n```bash\nhvdtrain launch -np 2 --fast -- python train.py\n```\n",
        "<!-- not run (host1): no host -->\n```bash\nhvdtrain verify\nhvdtrain doctor -H host1:4 --deep\n```\n",
        "<!-- tested by tests/unit/test_pages.py::test_nothing -->\n```bash\nhvdtrain verify\n```\n",
        "<!-- with nothing -->\n```python\nprint()\n```\n",
        "<!-- with torch_script -->\n```python\nhvt.loader(x, batch=3)\n```\n",
        "<!-- skip -->\n```bash\nhvdtrain verify\n```\n",
        "<!-- not run: no host -->\n\nText.\n",
        "```sh\nhvdtrain verify\n```\n",
        "```\nhvdtrain verify\n```\n",
        PAGE.replace("-print(1)", "print(1)"),
        PAGE.replace("print(2)", "print(2"),
    ],
)
def test_what_is_wrong_is_seen(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises(Wrong):
        for block in blocks(page):
            snippets.check(block)


def test_pages_that_the_code_names_are_there() -> None:
    """In messages and comments: `docs/torch-reference.md#zero`."""
    files = [file for folder in ("hvdtrain", "scripts", "tests") for file in (REPOSITORY / folder).rglob("*.*")]
    texts = [file.read_text(encoding="utf-8") for file in files if file.suffix in (".py", ".sh", ".toml")]
    named = {found for text in texts for found in re.findall(r"\bdocs/([a-z-]+\.md)(?:#([a-z-]+))?", text)}
    assert ("torch-reference.md", "ranks-that-come-and-go") in named
    pages = {page.name: page for page in PAGES}
    lost = {
        page for page, anchor in named if page not in pages or anchor and anchor not in snippets.anchors(pages[page])
    }
    assert not lost


def test_links_to_nothing_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n[a](#a-page) [b](b.md) [c](#c) | [d](page.md#a-page) [e](https://example.org)\n")
    assert [*snippets.broken_links(page)] == ["page.md: b.md", "page.md: #c"]
