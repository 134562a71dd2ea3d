"""`World.mpi`: mpi4py's communicator of the same ranks, beside Horovod; sums written with it; the shards' example."""

from __future__ import annotations

import re

import pytest
from harness import PROGRAMS, REPOSITORY, run_ranks, told_once

FOLDER = PROGRAMS / "core"
EXAMPLE = REPOSITORY / "examples" / "mnist_shards.py"


@pytest.mark.parametrize(
    ("launcher", "mode"),
    [
        ("mpirun", "horovod-first"),
        pytest.param("mpirun", "mpi-first", marks=pytest.mark.thorough),
        pytest.param("mpirun", "never-left", marks=pytest.mark.thorough),
        pytest.param("horovodrun --mpi", "horovod-first", marks=pytest.mark.thorough),
    ],
)
def test_mpi_and_horovod_in_one_process_end_cleanly(launcher: str, mode: str) -> None:
    """Also sums by a ring and by servers as numpy does, with as many bytes as the rule says."""
    result = run_ranks([FOLDER / "mpi_beside_horovod.py", mode], 3, launcher=launcher).check()
    assert result.out.count("done") == 3 and "MPI" not in result.err, result.text
    assert ("all sums are numpy's" in result.out) is (mode == "horovod-first"), result.text


def test_without_mpi_it_is_refused_with_what_to_type() -> None:
    code = "import torch, hvdtrain\nfrom hvdtrain.world import startup\n"
    code += "startup.run_program('p', lambda _: hvdtrain.init('torch', device='cpu').mpi)"
    result = run_ranks(["-c", code], 2)
    assert result.returncode != 0
    told_once(result, "p", "MPI must carry the job", "started by horovodrun, without MPI", "mpirun -np N")


def test_alone_it_is_a_communicator_of_one() -> None:
    code = "import torch, hvdtrain\nwith hvdtrain.init('torch', device='cpu') as world:\n"
    code += "    print(world.mpi.size, world.mpi.allreduce(3))"
    assert run_ranks(["-c", code], 1).check().out.split() == ["1", "3"]


# the same shards' gradients, in one process and by another formula, without hvdtrain but for its data
REFERENCE = """
import numpy as np
from hvdtrain.datasets import load_mnist
images = load_mnist("digits")
x, y = images.x_train.reshape(-1, 784) / 255.0, np.eye(10)[images.y_train]
weights = np.zeros((784, 10))
for update in range(1, 61):
    scores = x @ weights
    top = scores.max(axis=1, keepdims=True)
    log_shares = scores - top - np.log(np.exp(scores - top).sum(axis=1, keepdims=True))
    loss = -(y * log_shares).sum() / len(x)
    weights -= 0.5 * x.T @ (np.exp(log_shares) - y) / len(x)
print(f"{loss:.8f}")
"""


@pytest.mark.thorough
def test_shards_by_threads_processes_and_mpi_train_alike() -> None:
    wanted = run_ranks(["-c", REFERENCE], 1, launcher="none").check().out.strip()
    outputs = [
        run_ranks([EXAMPLE, "--by", way, "--workers", "3"], 1, launcher="none").check().out
        for way in ("threads", "processes")
    ]
    outputs.append(run_ranks([EXAMPLE, "--by", "mpi"], 2, launcher="mpirun").check().out)
    for out in outputs:
        (found,) = re.findall(r"update 60: loss (\d\.\d+) over", out)
        assert abs(float(found) - float(wanted)) < 1e-8, (found, wanted)
