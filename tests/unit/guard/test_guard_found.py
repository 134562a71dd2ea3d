"""What the guard reads off a source, and what it makes of reports."""

from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.guard.judge import Judge
from hvdtrain.guard.rates import scaled_twice

HEAD = "import horovod.torch as hvd\nfrom horovod.tensorflow import size\n"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("SGD(p, lr=0.1 * hvd.size())", []),
        ("SGD(p, lr=0.1 * hvd.size() * hvd.size())", [3]),
        ("lr = 0.1 * hvd.size()\nSGD(p, lr=lr * size())", [4]),
        ("args.lr *= hvd.size()\nSGD(p, lr=args.lr * hvd.size())", [4]),
        ("lr = 0.1 * hvd.size()\nSGD(p, lr=lr / hvd.size() * hvd.size())", []),
        ("if x:\n    lr = hvd.size()\nelse:\n    lr = 1\nSGD(p, lr=lr)", []),
        ("o = SGD(p, lr=hvd.size())\nfor g in o.param_groups:\n    g['lr'] *= hvd.size()", [5]),
        ("o = SGD(p, lr=hvd.size())\ndef f(b):\n    for g in o.param_groups:\n        g['lr'] = b * hvd.size()", []),
        ("lr = hvd.size()\ndef make(lr):\n    return SGD(p, lr=lr * hvd.size())", []),
        ("keras.optimizers.SGD(hvd.size() ** 0.5 * hvd.size())", []),
        ("keras.optimizers.SGD(hvd.size() * hvd.size())", [3]),
        ("o = SGD(p, lr=hvd.size())\nLambdaLR(o, lambda e: hvd.size() * 0.9**e)", [4]),
        ("o = SGD(p, lr=0.1)\nLambdaLR(o, lambda e: hvd.size() * 0.9**e)", []),
        ("no python", []),
    ],
)
def test_rates(text: str, lines: list[int]) -> None:
    assert list(scaled_twice(HEAD + text)) == lines


def weights(step: int = 1, when: str = "after", number: int = 0, **more: Any) -> dict[str, Any]:
    report = {
        "kind": "weights",
        "ranks": [0, 1],
        "key": [number, 0, step, when],
        "value": "a",
        "state": "",
        "made": "made",
    }
    return {**report, "settings": "", "line": "line", "averaged": False, "framework": "torch", **more}


def found(*reports: tuple[int, dict[str, Any]]) -> list[str]:
    judge = Judge()
    for rank, report in reports:
        judge.take(rank, report)
    return [finding.kind for finding in judge.findings]


def test_weights() -> None:
    assert found((0, weights()), (1, weights())) == []
    assert found((0, weights()), (1, weights(value="b"))) == ["not-averaged"]
    assert found((0, weights(when="before")), (1, weights(when="before", value="b"))) == ["broadcast"]
    assert found((0, weights(when="before")), (1, weights(when="before", state="b"))) == ["optimizer-state"]
    second: dict[str, Any] = {"step": 2, "when": "before", "framework": "tensorflow"}
    assert found((0, weights(**second)), (1, weights(**second, value="b"))) == ["not-averaged"]
    second["averaged"] = True
    assert found((0, weights(**second)), (1, weights(**second, value="b"))) == ["broadcast"]
    assert found((0, weights(when="before")), (1, weights(when="before", settings="b"))) == ["settings"]


def test_what_parts_because_it_was_clipped_too_early_is_told_by_its_cause() -> None:
    apart = [(0, weights(16, clipped=True)), (1, weights(16, value="b"))]
    other = [(0, weights(number=1)), (1, weights(number=1, value="b"))]
    assert found(*apart) == [] and found(*apart, *other) == ["not-averaged"]


def data(number: int, value: str) -> dict[str, Any]:
    return {"kind": "data", "ranks": [0, 1], "key": [0, number], "value": value, "line": "line"}


def test_data() -> None:
    same = [(rank, data(number, str(number))) for number in (1, 2) for rank in (0, 1)]
    assert found(*same) == ["same-data"]
    assert found(*same[:3], (1, data(2, "another"))) == []
    constant = [(rank, data(number, "a")) for number in (1, 2) for rank in (0, 1)]
    assert found(*constant) == []  # one batch, again and again: not a stream
