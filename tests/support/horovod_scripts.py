"""The scripts of tests/horovod_scripts, and how a test runs many of them in one start of the ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import PROGRAMS, REPOSITORY, run_ranks

FOLDER = REPOSITORY / "tests" / "horovod_scripts"
# One line a run. The first brings the process sets, which are asked for where Horovod starts.
TORCH = (
    "torch_process_sets.py", "torch_mnist.py", "torch_clipping.py", "torch_accumulation.py",
    "torch_fp16_compression.py", "torch_adasum.py", "torch_resume.py --epochs 1", "torch_resume.py --epochs 2",
    "torch_warmup.py", "torch_gather_predictions.py", "torch_batchnorm.py", "torch_elastic.py",
    "torch_grouped_allreduce.py", "torch_join.py", "torch_gan.py", "torch_trainer_class.py",
)  # fmt: skip
KERAS = (
    "tensorflow_gradient_tape.py", "tensorflow_keras_fit.py", "keras_fit.py", "keras_train_step.py", "keras_resume.py"
)  # fmt: skip


def run_in_turn(lines: Sequence[str], folder: Path, ranks: int = 2, **options: Any) -> list[dict[str, Any]]:
    """Runs scripts one after another in the same ranks; returns, of each rank, what each script printed and left."""
    env = {"KERAS_BACKEND": "tensorflow"}
    run_ranks([PROGRAMS / "horovod" / "in_turn.py", folder, *lines], ranks, env=env, timeout_s=120, **options).check()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
