"""README.md and docs/*.md, run as they stand, and built by Sphinx without a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import snippets
from harness import REPOSITORY, run_ranks
from snippets import PAGES, blocks
from sphinx.util.inventory import InventoryFile
from typed import Wrong

LIST = REPOSITORY / "tests" / "public.txt"


def pages_with(*, thorough: bool) -> list[Any]:
    """Those with blocks to run: all that have thorough ones, or those that have others; README.md in each run."""
    its = [page for page in PAGES if any(block.thorough == thorough and block.is_run for block in blocks(page))]
    always = [] if thorough else ["README.md"]
    marks = {page: () if page.name in always else (pytest.mark.thorough,) for page in its}
    return [pytest.param(page, id=page.name, marks=marks[page]) for page in its]


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with(thorough=False))
def test_what_a_page_shows_runs(page: Path, tmp_path: Path) -> None:
    assert snippets.run(page, tmp_path, thorough=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with(thorough=True))
def test_all_that_a_page_shows_runs(page: Path, tmp_path: Path) -> None:
    assert snippets.run(page, tmp_path, thorough=True)


@pytest.mark.slow
@pytest.mark.thorough
def test_sphinx_has_nothing_to_say_and_every_public_name_is_there(tmp_path: Path) -> None:
    options: list[str | Path] = ["-q", "-n", "-W", "--keep-going", "-c", REPOSITORY / "docs"]
    command: list[str | Path] = ["-m", "sphinx", *options, REPOSITORY / "docs", tmp_path]
    built = run_ranks(command, 1, launcher="none", timeout_s=300).check()
    assert "WARNING" not in built.err, built.err
    with (tmp_path / "objects.inv").open("rb") as file:
        objects = InventoryFile.load(file, "", lambda _, name: name)
    there = {name for kind, names in objects.items() if kind.startswith("py:") for name in names}
    public = {line for line in LIST.read_text(encoding="utf-8").splitlines() if line.startswith("hvdtrain.")}
    packages = {name.rpartition(".")[0] for name in public}
    assert {name for name in there if name.rpartition(".")[0] in packages} - packages == public


# ---- what is wrong turns it red


def run(text: str, folder: Path) -> int:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return snippets.run(page, folder, thorough=False)


def test_blocks_are_run_in_order_in_one_folder(tmp_path: Path) -> None:
    text = """\
<!-- file first.py -->
```python
import sys
print("one")
```
<!-- file first.py -->
```diff
 import sys
-print("one")
+print("two", *sys.argv[1:])
```
```bash
python first.py a b >c    # a comment
cat c
```
<!-- prints -->
```text
two ... b
```
<!-- not run (false): it fails -->
```bash
cat c
false
```
<!-- thorough, not run (c): for no reason -->
```bash
false
```
"""
    assert run(text, tmp_path) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\nprint(undefined)\n```\n", "NameError"),
        ("```bash\nhvdtrain plan --fast\n```\n", "--fast"),
        ("```bash\nfalse\ntrue\n```\n", "exit code 1"),
        ("```bash\necho 12\n```\n<!-- prints -->\n```text\n1\n```\n", "not printed"),
        ("<!-- with two_devices -->\n```python\nmodel = torch.nn.Linear(1, 1)\n```\n", "AssertionError"),
        ("```diff\n-print(1)\n+print(2 + None)\n```\n", "TypeError"),
        ("```diff\n-print(1 + None)\n+print(2)\n```\n", "TypeError"),
        ("```diff\n-print(1)\n+import os\n+os.environ['HOROVOD_RANK']\n```\n", "KeyError"),
        (
            "<!-- file a.py -->\n```python\n1\n```\n<!-- file a.py -->\n```diff\n-2\n+3\n```\n",
            "the diff is not of a.py",
        ),
    ],
)
def test_what_is_wrong_is_seen(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=said) as seen:
        run(text, tmp_path)
    assert not isinstance(seen.value, Wrong)
