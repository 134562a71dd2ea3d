"""The page of limits: rows are noted with one verdict, sorted, and all are asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from limits import AREAS, PAGE, VARIABLE, Limit, Row, missing, render

FOLDER = Path(__file__).parents[1]


def test_rows_are_noted_and_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "rows"))
    note = Limit("test_x.py::test_y")
    note("K10", "best of an accuracy", mended="the highest")
    note("K2b", "5 samples | 2 ranks", exact=1.26e-16)
    rows = [Row(**json.loads(line)) for line in (tmp_path / "rows").read_text().splitlines()]
    page = render(rows)
    assert page.index("| K2b | 5 samples \\| 2 ranks | exact | 1.3e-16 | `test_x.py::test_y` |") < page.index("| K10 |")
    assert missing(page) == [
        f"{a}{n}" for a, c in AREAS.items() for n in range(1, c + 1) if f"{a}{n}" not in ("K2", "K10")
    ]


@pytest.mark.parametrize("verdicts", [{}, {"exact": 0.0, "mended": "x"}])
def test_a_row_has_one_verdict(verdicts: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        Limit("t")("K1", "tried", **verdicts)  # type: ignore[arg-type]


def test_the_page_has_every_row_and_names_tests_that_are_there() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert missing(page) == []
    named = set(re.findall(r"`(test_\w+\.py)::(test_\w+)", page))
    assert len(named) > 30
    for file, test in named:
        assert f"def {test}(" in next(FOLDER.rglob(file)).read_text(encoding="utf-8"), f"{file}::{test}"
