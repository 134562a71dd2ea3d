"""Each example, on one rank and on two, has the weights of the plain script that it was made of."""

from __future__ import annotations

import ast
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import PROGRAMS, REPOSITORY, run_ranks

PROGRAM = PROGRAMS / "examples" / "run.py"
EXAMPLES = {
    "torch": [
        "dcgan", "wgan_gp", "sam", "ppo", "moco", "ema", "moe", "seq2seq", "gpt2", "unet", "clip", "simclr",
        "detection",
    ],
    "keras": ["tabular", "multi_input"],
}  # fmt: skip
ALL = [name for names in EXAMPLES.values() for name in names]
OFTEN = ("wgan_gp", "moco", "moe", "tabular")  # the others are thorough
LINES = 120
TOLERANCE = {"gpt2": 1e-6}  # transformers takes the loss in float32
Weights = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of weights, by rank: of the plain scripts, on one rank (if that is asked for), on two."""
    here = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    asked = [item.callspec.params for item in here if hasattr(item, "callspec") and "ranks" in item.callspec.params]
    alone = ["1"] * any(params["ranks"] == 1 for params in asked)
    folders = {form: tmp_path_factory.mktemp(form) for form in ("plain", "2", *alone)}
    for (form, folder), (framework, names) in product(folders.items(), EXAMPLES.items()):
        kind, ranks = ("plain", 1) if form == "plain" else ("prepared", int(form))
        names = [name for name in names if any(params["example"] == name for params in asked)]
        if names:
            code = f"import runpy, {framework}; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"  # forked with it
            run_ranks(["-c", code, framework, folder, kind, *names], ranks, timeout_s=400).check()
    return folders


def weights(file: Path) -> Weights:
    if file.stem in EXAMPLES["keras"]:
        return dict(np.load(file))
    return {name: value.numpy() for name, value in torch.load(file).items()}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.thorough), 2])
@pytest.mark.parametrize(
    "example", [pytest.param(name, marks=[pytest.mark.thorough] * (name not in OFTEN)) for name in ALL]
)
def test_an_example_equals_the_plain_script(example: str, ranks: int, kept: dict[str, Path]) -> None:
    wanted = weights(kept["plain"] / f"{example}.0")
    for rank in range(ranks):
        found = weights(kept[str(ranks)] / f"{example}.{rank}")
        assert list(wanted) == list(found)
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=TOLERANCE.get(example, 1e-10), err_msg=name)


@pytest.mark.parametrize("example", ALL)
def test_an_example_is_short_and_says_how_to_run_it(example: str) -> None:
    text = (REPOSITORY / "examples" / f"{example}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES
    assert f"python examples/{example}.py" in (ast.get_docstring(ast.parse(text)) or "")


@pytest.mark.thorough
def test_an_example_runs_as_its_text_says() -> None:
    result = run_ranks([REPOSITORY / "examples" / "wgan_gp.py"], 2, launcher="horovodrun", timeout_s=120)
    assert result.returncode == 0 and "epoch 2: critic" in result.out, result.text


def test_every_example_is_here() -> None:
    elsewhere = {"cifar10", "mnist_shards", "two_devices"}
    assert {path.stem for path in (REPOSITORY / "examples").glob("*.py")} == {*ALL, *elsewhere}
