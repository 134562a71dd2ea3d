"""Split models equal unsplit ones in float64, to 1e-10: loss, gradients, running statistics, outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks

PROGRAM = PROGRAMS / "pipeline" / "parity.py"
SMALL = ("two_cross", "encoder", "nested")
LARGE = ("resnet18", "densenet121")
TOLERANCE = 1e-10

pytestmark = pytest.mark.slow


def compared(*arguments: str, **env: str) -> dict[str, dict[str, Any]]:
    """What was found of each model."""
    result = run_ranks([PROGRAM, *arguments], 1, timeout_s=400, env=env).check()
    lines = [json.loads(line) for line in result.out.splitlines() if line.startswith("{")]
    bad = [line for line in lines if "bad" in line]
    assert not bad, "\n".join(map(str, bad))
    return {line["model"]: line for line in lines}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    here = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    return compared(*sorted({item.callspec.params["case"] for item in here if hasattr(item, "callspec")}))


@pytest.mark.parametrize("case", [*SMALL, *(pytest.param(model, marks=pytest.mark.thorough) for model in LARGE)])
def test_equal_to_the_unsplit_model(found: dict[str, Any], case: str) -> None:
    received = found[case]
    assert received["combinations"] == (3 if case in LARGE else 6)
    assert received["segments"] >= 4
    for what in ("loss", "gradients", "buffers", "outputs"):
        assert received[what] <= TOLERANCE, f"{what} off by {received[what]:.3g}"


def test_on_a_gpu() -> None:
    """Both stages on one GPU."""
    if not Path("/dev/nvidiactl").exists():
        pytest.skip("no GPU of NVIDIA's is here")
    assert len(compared("--device", "cuda:0", *SMALL, "resnet18", CUDA_VISIBLE_DEVICES="0")) == 4
