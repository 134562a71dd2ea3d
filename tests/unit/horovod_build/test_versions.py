"""docs/versions.md has a row for what support.py and setup.cfg name; `scripts/versions.sh` keeps and resumes them."""

from __future__ import annotations

import sys

import pytest
from harness import REPOSITORY

from hvdtrain.horovod_build import support

sys.path.insert(0, str(REPOSITORY / "scripts"))
import versions

ROWS = versions.read_rows(versions.PAGE.read_text(encoding="utf-8"))


def series(version: str) -> tuple[int, ...]:
    return support.parse(version)[:2]


def test_no_row_has_failed():
    assert [row for row in ROWS.values() if not versions.done(row, since="2026")] == []


def test_what_the_page_calls_missing_is_what_has_no_row():
    page = versions.PAGE.read_text(encoding="utf-8")
    missing = [one for one in versions.COVERING_SET if one.key not in ROWS]
    assert [str(one) in page for one in missing] == [True] * len(missing)
    assert page.count("Not run yet: ") == len(missing)


@pytest.mark.parametrize(("name", "place"), [("Python", 0), ("torch", 1), ("tensorflow", 2)])
def test_the_covering_set_has_every_supported_release(name, place):
    supported = support.SUPPORTED[name]
    (major, first), (_, last) = support.parse(supported.oldest), support.parse(supported.newest)
    wanted = {(major, minor) for minor in range(first, last + 1)}
    assert {series(one.key[place]) for one in versions.COVERING_SET if one.key[place]} == wanted


def test_the_pins_have_a_row():
    pins = versions.pinned()
    pinned = (pins["torch"], pins["tensorflow-cpu"], pins["keras"])
    assert pinned in {key[1:4] for key in ROWS}
    assert pinned in {one.key[1:4] for one in versions.COVERING_SET}
