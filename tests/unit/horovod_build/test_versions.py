"""docs/versions.md has a row for what support.py and setup.cfg name; `scripts/versions.sh` keeps and resumes them."""

from __future__ import annotations

import sys

import pytest
from harness import REPOSITORY

from hvdtrain.horovod_build import support

sys.path.insert(0, str(REPOSITORY / "scripts"))
import versions
from versions import Combination

ROWS = versions.read_rows(versions.PAGE.read_text(encoding="utf-8"))
PAGE = f"before\n\n{versions.HEAD}\nafter\n"
RECORD = {
    "Python": "3.13.0", "built with": "gcc 12.2.0, CMake 3.25.1", "controllers": "Gloo, Open MPI 4.1.4", "GPU": "none",
    "proof": "8 ranks proven, 120 s", "smoke": "6 passed",
}  # fmt: skip


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


def test_rows_are_kept_sorted_and_replaced(tmp_path, monkeypatch):
    page = tmp_path / "versions.md"
    page.write_text(PAGE)
    monkeypatch.setattr(versions, "PAGE", page)
    new, old = Combination("3.13", "2.15.0", "2.21.0", "3.15.1"), Combination("3.10", "2.11.0", None, None, "nccl")
    rows = {one.key: versions.row_of(one, {**RECORD, "Python": f"{one.python}.0"}) for one in (new, old)}
    rows[old.key] = versions.row_of(old, {"failed": "**failed**: install (exit code 1)"})
    versions.write_rows(rows)
    assert versions.read_rows(page.read_text()) == rows
    assert list(versions.read_rows(page.read_text())) == [old.key, new.key]
    assert page.read_text().startswith("before\n") and page.read_text().endswith("after\n")


def test_a_run_resumes_after_the_rows_of_its_day():
    row = versions.row_of(Combination("3.13", "2.15.0", "2.21.0", "3.15.1"), RECORD)
    day = row.strip(" |").split("| ")[-1]
    assert versions.done(row, since=day) and versions.done(row, since="2026-01-01")
    assert not versions.done(row, since="9999-01-01")  # older than asked for
    assert not versions.done(row.replace("8 ranks proven, 120 s", "**failed**: build"), since=day)
    assert not versions.done(None, since=day)


def test_a_combination_takes_the_place_of_the_pins():
    lines = versions.requirements(Combination("3.10", "2.11.0", "2.20.0", "3.12.4"))
    assert {"torch==2.11.0", "torchvision", "tensorflow-cpu==2.20.0", "keras==3.12.4"} <= set(lines)
    assert [line for line in lines if versions.name_of(line) == "torch"] == ["torch==2.11.0"]
    without = versions.requirements(Combination("3.14", "2.15.0", None, None))
    assert not {"keras", "tensorflow-cpu"} & {versions.name_of(line) for line in without}
    assert "pytest" in {versions.name_of(line) for line in without}, "for the smoke tests"


def test_newest_tries_what_the_table_lacks(monkeypatch):
    one = Combination("3.13", "2.15.0", "2.21.0", "3.15.1")
    rows = {one.key: "", ("3.14", "2.15.0", "", "", "none"): ""}
    index = {"torch": "2.15.0", "tensorflow-cpu": "2.21.0", "keras": "3.15.1"}
    monkeypatch.setattr(versions, "index_version", index.__getitem__)
    assert versions.newest(rows) == []
    index["torch"] = "2.16.0"
    assert versions.newest(rows) == [Combination("3.13", "2.16.0", "2.21.0", "3.15.1")]
