"""Split models equal unsplit ones in float64, to 1e-10: loss, gradients, running statistics, outputs.

``python tests/programs/pipeline/parity.py --all`` (with the repository in PYTHONPATH) tries every combination of 1-4
stages, 1, 2, 3, 5 and 7 micro-batches of a batch of 10, both schedules and every recomputation, on the full models:
some 20 minutes.
Here the large models get a choice of them, and the largest layers are narrow.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import pytest
from harness import PROGRAMS, run_ranks, together

PROGRAM = PROGRAMS / "pipeline" / "parity.py"
SMALL = ("two_cross", "encoder", "nested")
LARGE = ("resnet18", "densenet121", "vit_b_16")
MORE = ("resnet50", "vgg11_bn", "mobilenet_v3_small", "efficientnet_b0")  # of the same operations
TOLERANCE = 1e-10

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    here = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    more = MORE if any(item.get_closest_marker("thorough") for item in here) else ()
    shares = (SMALL, LARGE[:1]), (LARGE[1:], more)
    results = together(*(
        lambda models=models: run_ranks([PROGRAM, *itertools.chain(*models)], 1, timeout_s=400).check()
        for models in shares
    ))  # fmt: skip
    lines = [json.loads(line) for result in results for line in result.out.splitlines() if line.startswith("{")]
    bad = [line for line in lines if "bad" in line]
    assert not bad, "\n".join(map(str, bad))
    return {line["model"]: line for line in lines}


@pytest.mark.parametrize(
    "model", [*SMALL, *LARGE, *(pytest.param(model, marks=pytest.mark.thorough) for model in MORE)]
)
def test_equal_to_the_unsplit_model(found: dict[str, Any], model: str) -> None:
    received = found[model]
    assert received["combinations"] == 127 if model in SMALL else received["combinations"] >= 3
    assert received["segments"] >= 4
    for what in ("loss", "gradients", "buffers", "outputs"):
        assert received[what] <= TOLERANCE, f"{what} off by {received[what]:.3g}"


@pytest.mark.parametrize(
    ("model", "mechanism"),
    [
        ("resnet18", "micro-batches count the same"),
        ("resnet18", "recomputing counts twice"),
        ("encoder", "micro-batches count the same"),
        ("encoder", "a tied weight learns from one stage only"),
    ],
)
def test_negative_twin(found: dict[str, Any], model: str, mechanism: str) -> None:
    assert found[model]["twins"][mechanism] > 1e-4


@pytest.mark.thorough
def test_models_of_examples_equal_the_unsplit_ones() -> None:
    """By four schedules on one to four stages, but where a model has fewer layers than that."""
    result = run_ranks([PROGRAM.with_name("examples.py")], 1, timeout_s=300).check()
    lines = [json.loads(line) for line in result.out.splitlines() if line.startswith("{")]
    (by_numbers,) = [line.pop("by numbers") for line in lines if "by numbers" in line]
    assert "must not depend on the data" in by_numbers and "into a submodule" in by_numbers
    lines = [line for line in lines if line]
    assert len(lines) == 12
    for line in lines:
        assert line["difference"] <= TOLERANCE < 1e-3 < line["largest"], line
        assert line["refused"] == ("" if line["runs"] == 10 else "every stage needs a segment"), line
        assert line["runs"] >= 5, line


def test_on_a_gpu() -> None:
    """Both stages on one GPU."""
    probe = [sys.executable, "-c", "import torch, sys; sys.exit(not torch.cuda.is_available())"]
    if subprocess.run(probe, check=False).returncode:
        pytest.skip("PyTorch sees no GPU here")
    arguments = [str(PROGRAM), "--device", "cuda:0", *SMALL, "resnet18"]
    result = run_ranks(arguments, 1, timeout_s=400, env={"CUDA_VISIBLE_DEVICES": "0"}).check()
    lines = [json.loads(line) for line in result.out.splitlines() if line.startswith("{")]
    assert len(lines) == 4 and not [line for line in lines if "bad" in line], result.out
