"""Bad input: one clear message, an exit code that is not 0, nobody left behind.

`run_ranks` fails the test if a process outlives its launcher, or its hard timeout.
"""

from __future__ import annotations

import os
import re
import sys
import venv
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from harness import Result, run_ranks

NOWHERE = "http://127.0.0.1:9/mnist.npz"  # the discard port: nobody listens


def refused(flags: list[object], ranks: int = 2, launcher: str = "horovodrun", **options: Any) -> Result:
    """Runs the program, which must be refused; returns what it said."""
    command = ["-m", "hvdtrain.keras_mnist", *map(str, flags)]
    result = run_ranks(command, ranks, launcher=launcher, timeout_s=60, **options)
    assert result.returncode not in (0, None), result.text
    return result


def told_once(result: Result, *parts: str) -> None:
    harness.told_once(result, "hvdtrain.keras_mnist", *parts)


def test_batch_of_0_on_ranks() -> None:
    told_once(refused(["--per-rank-batch", 0]), "--per-rank-batch")


def test_no_data_and_no_network(tmp_path: Path) -> None:
    env = {"KERAS_HOME": str(tmp_path), "HVDTRAIN_MNIST_URL": NOWHERE, "no_proxy": "127.0.0.1"}
    result = refused(["--data", "mnist"], env=env)
    told_once(result, NOWHERE, "--data digits")


def test_corrupt_mnist(tmp_path: Path) -> None:
    file = tmp_path / "datasets" / "mnist.npz"
    file.parent.mkdir()
    np.savez(file, x_train=np.zeros((100, 28, 28), np.uint8))
    file.write_bytes(file.read_bytes()[:-100])
    before = file.read_bytes()
    told_once(refused([], launcher="mpirun", env={"KERAS_HOME": str(tmp_path)}), str(file))
    assert file.read_bytes() == before


def test_missing_data() -> None:
    told_once(refused(["--data", "/no/such/folder"], 1, "none"), "/no/such/folder", "FileNotFoundError")


@pytest.mark.parametrize("launcher", ["horovodrun", pytest.param("mpirun", marks=pytest.mark.thorough)])
def test_one_rank_cannot_import_horovod(launcher: str, tmp_path: Path) -> None:
    """Rank 1 finds a Horovod that does not load; rank 0 waits for it in the rendezvous, and must not stay there."""
    broken = tmp_path / "broken" / "horovod"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libmpi.so.40: cannot open shared object file')")
    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys\n"
        "rank = os.environ.get('HOROVOD_RANK') or os.environ['OMPI_COMM_WORLD_RANK']\n"
        f"if rank == '1': sys.path.insert(0, {str(broken.parent)!r})\n"
        "from hvdtrain.keras_mnist import main\n"
        "sys.exit(main())\n"
    )
    result = run_ranks([script], 2, launcher=launcher, timeout_s=60, cwd=tmp_path)
    assert result.returncode != 0, result.text
    said = result.ranks_error[1]
    assert "hvdtrain.keras_mnist: rank 1: horovod must load" in said, result.text
    assert "libmpi.so.40" in said and "hvdtrain build-horovod --install" in said
    assert "Traceback" not in "\n".join(result.ranks_error.values())


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has nothing installed."""
    folder = tmp_path_factory.mktemp("other")
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def test_launched_with_another_python(other_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    monkeypatch.setenv("PATH", here)  # where the harness finds horovodrun
    result = refused([], 2, python=other_python)
    said = "\n".join(result.ranks_error.values())
    assert f"no numpy, horovod, tensorflow, keras in {other_python}" in said, result.text
    assert re.search(r"-m pip install -e '.*\[keras,build\]' && .* -m hvdtrain build-horovod --install", said), said
