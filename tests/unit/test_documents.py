"""docs/documents.md is right: each row has a test that exists, and what it says to type is what the programs take."""

from __future__ import annotations

import re

import pytest
from harness import REPOSITORY
from typed import Wrong, check_test, check_typed

from hvdtrain.core.errors import HvdtrainError

PAGE = REPOSITORY / "docs" / "documents.md"
HEAD = "| in the document | here | tested by |"


def rows() -> list[tuple[str, str, str]]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    found = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ") and line != HEAD]
    assert [row for row in found if len(row) != 3] == []
    return [(row[0], row[1], row[2]) for row in found]


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# ---- the page


def test_every_document_has_its_rows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^## ([A-Z])\.", text, re.MULTILINE) == list("ABCDE")
    assert text.count(HEAD) == 5 and len(rows()) >= 60
    said = [row[0] for row in rows()]
    assert len(set(said)) == len(said)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_a_row_can_be_typed_and_is_tested(row: tuple[str, str, str]) -> None:
    _, here, tests = row
    assert spans(here) and spans(tests)
    for text in spans(here):
        check_typed(text)
    for text in spans(tests):
        check_test(text)
    for link in re.findall(r"\]\(([^)#]+)", " ".join(row)):
        assert (PAGE.parent / link).exists(), link


@pytest.mark.parametrize(
    "text",
    [
        "hvdtrain plan --model resnet18 --fast",
        "python -m hvdtrain.keras_mnist --backend jax",
        "horovodrun -np 2 -H a:1,b:1 python -m hvdtrain.torch_resnet --amp bf17",
        "python -m hvdtrain.torch_resnet --pipeline 2 --compile",
        "hvdtrain launch -np 2 -H a:1,b:1 -- python -m hvdtrain.keras_mnist --epoch x",
        "docker run --rm hvdtrain horovodrun -np 2 python -m hvdtrain.keras_minst",
        "python examples/mnist_shards.py --by threads --rank 4",
        "hvt.prepare(model, optimizer, train, clipping=1.0)",
        "see the README",
    ],
)
def test_what_is_wrong_is_seen(text: str) -> None:
    with pytest.raises((Wrong, HvdtrainError)):
        check_typed(text)


@pytest.mark.parametrize(
    "text",
    [
        "tests/unit/test_documents.py::test_nothing",
        "tests/unit/test_nothing.py::test_row",
        "tests/unit/core/test_launchers.py::TestDetect::test_rule",
        "tests/unit/core/test_launchers.py::TestGpus",
        "tests/ranks/test_torch_prepare.py::test_in_one_process[case_of_no_kind]",
    ],
)
def test_tests_that_are_none_are_seen(text: str) -> None:
    with pytest.raises(Wrong):
        check_test(text)
