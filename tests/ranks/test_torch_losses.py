"""Any loss on ranks and in micro-batches: the weights and losses of one process, or a refusal that helps."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
from harness import FORKED, PROGRAMS, run_ranks
from limits import Limit

PROGRAM = PROGRAMS / "torch" / "losses.py"
SOURCE = PROGRAM.read_text(encoding="utf-8")
# a case's name, and whether it is exact as it is, weighted or refused
VERDICTS = {
    name: {"Case": "exact"}.get(kind, kind)
    for name, kind in re.findall(r'^    "([^"]+)": (Case|weighted|refused)\(', SOURCE, re.MULTILINE)
}
LATER = ("contrastive, later", "sum, always by 12")  # what shows in a later batch alone
SAYS = dict(re.findall(r'^    "([^"]+)": weighted\([^"]*?"((?:weight=|\(y|class)[^"]*)"', SOURCE, re.MULTILINE))


@dataclass(frozen=True)
class Found:
    engine: str
    ranks: int
    reports: list[list[dict[str, Any]]]  # by rank

    def of(self, name: str, **facts: Any) -> list[dict[str, Any]]:
        """A case's outcomes, on all ranks."""
        mine = [one for report in self.reports for one in report if one["case"] == name]
        return [one for one in mine if all(one[key] == value for key, value in facts.items())]

    def error(self, name: str, **facts: Any) -> float:
        return max(one["error"] for one in self.of(name, **facts))


@pytest.fixture(
    scope="module",
    params=[
        ("horovod", 2),
        *(
            pytest.param(way, marks=pytest.mark.thorough)
            for way in (("solo", 1), ("ddp", 2), ("horovod", 4), ("ddp", 4))
        ),
    ],
    ids=lambda way: "-".join(map(str, way)),
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    engine, ranks = request.param
    out = tmp_path_factory.mktemp("losses") / "found.json"
    thorough = ["all"] if (engine, ranks) != ("horovod", 2) else []
    run_ranks([PROGRAM, engine, out, *thorough], ranks, launcher=FORKED[engine], timeout_s=580).check()
    return Found(engine, ranks, json.loads(out.read_text()))


@pytest.mark.parametrize("name", VERDICTS)
def test_a_loss_is_that_of_one_process_or_refused(name: str, found: Found) -> None:
    outcomes = found.of(name)
    assert len(outcomes) >= found.ranks
    for one in outcomes:
        exact = VERDICTS[name] == "exact" or one["weight"] or one["one"]
        if exact:
            assert not one["refusal"], one
            assert one["error"] <= 1e-10, one
        else:
            assert one["refusal"].startswith("ConfigError") and "fix:" in one["refusal"], one
            if VERDICTS[name] == "refused" and one["call"] == "backward":
                assert one["says"] in one["refusal"], one
                assert not one["updates"] or name in LATER, one
            if SAYS.get(name) and "model and loss" not in one["refusal"]:
                assert SAYS[name].removeprefix("weight=") in one["refusal"], one


def test_every_loss_is_looked_at(found: Found) -> None:
    assert {one["case"] for one in found.reports[0]} == set(VERDICTS) and len(VERDICTS) >= 40
    assert sum(verdict == "exact" for verdict in VERDICTS.values()) >= 10, "clean programs, without a false alarm"


ROWS = {
    "A1": ("plain cross-entropy", "cross-entropy"),
    "A2": ("ignore_index", "ignore_index"),
    "A3": ("class weights", "class weights"),
    "A4": ("a rank, or a micro-batch, of which all labels are ignored", "ignore_index"),
    "A5": ("accumulate=3, ignore_index", "ignore_index"),
}


@pytest.mark.parametrize("row", ROWS)
def test_rows_of_losses(row: str, found: Found, limit: Limit) -> None:
    attack, name = ROWS[row]
    facts = {"accumulate": 3} if row == "A5" else {}
    weighted = VERDICTS[name] == "weighted"
    limit(f"{row}a", f"{attack}, {found.ranks} ranks", exact=found.error(name, weight=weighted, **facts))
    if weighted and found.ranks > 1:
        limit(f"{row}b", f"{attack}, without weight=", refused=found.of(name, weight=False, **facts)[0]["refusal"])
