"""Rows of docs/limits.md: what was tried against a promise, and what happens now, as the tests themselves saw it.

A test that takes the fixture `limit` notes a row with it; `scripts/limits.py` runs these tests and writes the page.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pytest

VARIABLE = "HVDTRAIN_LIMITS"  # names the file that rows are added to, one JSON object a line
PAGE = Path(__file__).resolve().parents[2] / "docs" / "limits.md"
EXACT = 1e-10
# an area, and how many rows it has
AREAS = {"A": 8, "K": 30, "P": 19, "T": 41, "L": 21, "F": 11, "H": 16, "C": 16}
# refused though nobody has made a mistake, and why; all other refusals name one
CANNOT: dict[str, str] = {
    "K7d": "TensorFlow keeps what `tf.random` has drawn where no checkpoint finds it: `keras.random`, with a generator",
    "K16c": "one `lr=` is not several rates: each optimizer is given its own",
    "K16d": "Keras 2 has other hooks, and is not maintained",
    "K16h": "Horovod has no way into XLA's JAX programs",
    "P3c": "micro-batches are cut along dimension 0: `batch_first=True`, or a transpose inside of the model",
    "P4b": "PyTorch's dispatch modes are a thread's own: outside of a pipeline, or one of one device",
    "P5a": "the gradient of a weight in two stages is there after the step: change it then",
    "P6a": "as P6c",
    "P6b": "as P6c",
    "P6c": "what a layer of one's own averages over batches, it would average over micro-batches: `micro_batches=1`, or"
    ' `batch_norm="micro"`, which says so',
    "P6d": "as P6c",
    "T19d": "two that set one rate: `LR` has warm-up, milestones and cosine of its own",
}
# refused as well, without a row of its own: what, why, and a test that sees it
ALSO = (
    ("PyTorch, `optimizer.step(closure)` with accumulation, fp16, several optimizers, or on DeepSpeed",
     "the closure is a whole update, which the optimizer asks for as often as it likes",
     "test_torch_engine_promises.py::test_an_engine_keeps_a_promise"),
    ("PyTorch, a compiled model under dataparallel",
     "the copies on other devices would run the code compiled for the first one",
     "test_torch_engines.py::test_refusals"),
    ("PyTorch, a pipeline under ddp, deepspeed or dataparallel", "they run the passes themselves: horovod, solo",
     "test_torch_pipeline.py::test_stages"),
    ("PyTorch, metrics of torchmetrics whose states are joined by a mean, and `Running`",
     "ranks have other batches: nothing adds up to what one process has",
     "test_torch_data_ranks.py::test_what_a_loop_kept_comes_in_order"),
    ("Keras, a synchronised batch-norm in a branch that a step may leave out, on TensorFlow",
     "a rank that leaves it out would leave the others waiting",
     "test_keras_sync_batchnorm.py::test_a_branch_is_refused"),
    ("Pipeline, a model whose own forward decides by numbers in tensors",
     "such a part is called as a whole: make it a submodule, or name the parts in `modules=`",
     "test_pipeline_split.py::test_what_a_trace_would_get_wrong_is_called_instead"),
)  # fmt: skip
_TEMPORARY = re.compile(r"/\S*pytest-of-\S*/|" + re.escape(f"{PAGE.parents[1]}/"))  # folders of one run, or machine
Verdict = Literal["exact", "mended", "refused"]


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        row: area, number and, where a row holds several attacks, a letter: "A1", "K8b".
        attack: what was tried, for a reader who knows the product and not its history.
        verdict: exact (same as one process), mended (what happens now is right), refused (with a message).
        shown: the error that was measured, what happens now, or the message.
        test: file::name.
    """

    row: str
    attack: str
    verdict: Verdict
    shown: str
    test: str


class Limit:
    """What the fixture `limit` gives: call it once a row, after the assertions that it stands for."""

    def __init__(self, test: str) -> None:
        self._test = test

    def __call__(
        self,
        row: str,
        attack: str,
        *,
        exact: float | None = None,
        mended: str | None = None,
        refused: object | None = None,
    ) -> None:
        """Notes a row; exactly one verdict.

        Args:
            row, attack: see `Row`.
            exact: the largest error against one process without the project's code; no more than `EXACT`.
            mended: what happens now, in a few words.
            refused: the error, or its text.
        """
        given = {"exact": exact, "mended": mended, "refused": refused}
        verdicts = {name: value for name, value in given.items() if value is not None}
        assert len(verdicts) == 1 and row[0] in AREAS and row[1:].rstrip("abcdefghijklmnopqrstuvwxyz").isdigit()
        (verdict, value), *_ = verdicts.items()
        assert verdict != "exact" or float(value) <= EXACT, f"{row}: {value} off"  # type: ignore[arg-type]
        shown = f"{value:.1e}" if verdict == "exact" else _TEMPORARY.sub("", " ".join(str(value).split()))
        noted = Row(row, attack, verdict, shown, self._test)  # type: ignore[arg-type]
        if os.environ.get(VARIABLE):
            with open(os.environ[VARIABLE], "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(noted)) + "\n")


@pytest.fixture
def limit(request: pytest.FixtureRequest) -> Limit:
    """Notes rows of docs/limits.md; see `Limit`."""
    return Limit(f"{request.node.path.name}::{request.node.name}")


def note_all(limit: Limit, rows: Mapping[str, tuple[str, str]], lines: Iterable[str], *, near: float = 0.0) -> None:
    """Asserts and notes rows that a program showed: "shown ROW WHAT", what being a gap or the text of an error.

    Args:
        limit: the fixture.
        rows: what was tried and how it must end, by row: "exact", "near", "mended" or "refused".
        lines: rank 0's output.
        near: the largest gap where numbers are rounded.
    """
    shown = dict(line.removeprefix("shown ").split(" ", 1) for line in lines if line.startswith("shown "))
    assert shown.keys() == rows.keys()
    for row, (attack, verdict) in rows.items():
        if verdict == "exact":
            limit(row, attack, exact=float(shown[row]))
        elif verdict == "near":
            assert float(shown[row]) < near, (row, attack, shown[row])
            limit(row, attack, mended=f"{float(shown[row]):.0e} off: numbers are rounded")
        elif verdict == "mended":
            limit(row, attack, mended=shown[row])
        else:
            assert "received: " in shown[row] and "fix: " in shown[row], (row, attack, shown[row])
            limit(row, attack, refused=shown[row])


def render(rows: list[Row]) -> str:
    """Returns the page: a table an area, a row an attack."""
    titles = {
        "A": "Losses whose mean is not over samples", "K": "Keras, and the core", "P": "Pipeline", "T": "PyTorch",
        "L": "Lightning's Trainer", "F": "Lightning Fabric", "H": "Hugging Face's Trainer",
        "C": "Cluster, launcher, recipe",
    }  # fmt: skip
    lines = [
        "# Limits: what was tried against the promises, and what happens",
        "",
        "Written by `scripts/limits.py` from what the tests named here saw: do not edit. **exact**: the largest error"
        " against one process in float64",
        "that shares no code with hvdtrain. **mended**: once wrong, right now. **refused**: an error that says so.",
    ]
    refused = {row.row: row.attack for row in rows if row.verdict == "refused"}
    lines += [
        "",
        "## What is refused though it is no mistake",
        "",
        *(f"- {refused[row]} ({row}): {why}" for row, why in CANNOT.items() if row in refused),
        *(f"- {what}: {why} (`{test}`)" for what, why, test in ALSO),
    ]
    for area, title in titles.items():
        lines += ["", f"## {title}", "", "| row | tried | now | measured, or printed | test |", "|---|---|---|---|---|"]
        mine = sorted({(row.row, row.attack, row.test): row for row in rows if row.row[0] == area}.values(), key=_order)
        lines += [
            f"| {row.row} | {_cell(row.attack)} | {row.verdict} | {_cell(_short(row.shown))} | `{row.test}` |"
            for row in mine
        ]
    return "\n".join(lines) + "\n"


def _order(row: Row) -> tuple[int, str, str, str]:
    number = row.row[1:].rstrip("abcdefghijklmnopqrstuvwxyz")
    return int(number), row.row, row.attack, row.test


def _short(text: str) -> str:
    return text if len(text) <= 240 else text[:237] + "..."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def missing(text: str) -> list[str]:
    """Returns the rows that a page says nothing about."""
    found = {
        line.split("|")[1].strip().rstrip("abcdefghijklmnopqrstuvwxyz") for line in text.splitlines() if "|" in line
    }
    return [f"{area}{n}" for area, count in AREAS.items() for n in range(1, count + 1) if f"{area}{n}" not in found]
