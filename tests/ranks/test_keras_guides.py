"""Programs of Keras' guides on two ranks have the weights, history, evaluation and predictions of plain Keras."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from harness import PROGRAMS, chosen_cases, run_ranks

PROGRAM = PROGRAMS / "keras" / "guides.py"
NAMES = re.findall(r"^@program\(\d+\)\ndef (\w+)", PROGRAM.read_text(encoding="utf-8"), re.MULTILINE)
QUICK = [
    "custom_train_step", "train_step_with_sample_weight", "compute_loss_of_ones_own", "gan", "wgan_gp", "vae",
    "endpoint_layer", "siamese_triplets", "metric_learning_with_a_sum",
    "metric_learning_of_an_unbuilt_model", "simclr", "metrics_of_the_whole_batch",
    "masked_language_model", "masked_loss_of_the_batch", "image_captioning", "loop_from_scratch",
]  # fmt: skip
# Keras on PyTorch computes losses and matrix products in float32, whatever the weights are
BOUNDS = {"tensorflow": 1e-10, "torch": 5e-6}
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in NAMES]

Outcome = dict[str, np.ndarray]


@pytest.fixture(scope="module", params=BOUNDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, backend: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Outcome, Outcome]:
    """Of plain Keras, with every import of Horovod and hvdtrain blocked, and of two ranks."""
    folder, cases = tmp_path_factory.mktemp("guides"), chosen_cases(request)

    def run(ranks: int) -> Outcome:
        out: Path = folder / f"{ranks}.npz"
        run_ranks(
            [PROGRAM, out, *cases], ranks, env={"KERAS_BACKEND": backend}, timeout_s=400
        ).check()  # fmt: skip
        return dict(np.load(out))

    return run(1), run(2)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_plain_keras(case: str, backend: str, outcomes: tuple[Outcome, Outcome]) -> None:
    plain, ranks = ({key: its[key] for key in its if key.startswith(f"{case}/")} for its in outcomes)
    assert set(plain) == set(ranks) and any("/weights/" in key for key in plain)
    for key, values in plain.items():
        bound = BOUNDS[backend]
        np.testing.assert_allclose(ranks[key], values, rtol=bound, atol=bound, equal_nan=False, err_msg=key)


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_are_not_averaged_differ(case: str, outcomes: tuple[Outcome, Outcome]) -> None:
    """The negative twin: rank 0's part of each batch alone."""
    plain, _ = outcomes
    weights = [key for key in plain if key.startswith(f"{case}/") and "/weights/" in key]
    assert max(float(np.abs(plain[key] - plain[f"alone/{key}"]).max()) for key in weights) > 1e-4
