"""What a rehearsal imports before it forks, and the places of its ranks; no process is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.cluster.function.rehearsal import imported_by
from hvdtrain.core import variables
from hvdtrain.record import folder


@pytest.mark.parametrize(
    ("source", "backend", "found"),
    [
        ("import os", "tensorflow", []),
        ("import torch.nn as nn\nimport horovod.torch as hvd", "tensorflow", ["torch", "horovod.torch"]),
        ("def main():\n    from torchvision import models", "tensorflow", ["torchvision"]),
        ("from hvdtrain.vision import classifiers", "tensorflow", ["torchvision"]),
        ("import keras", "tensorflow", ["tensorflow", "horovod.tensorflow"]),
        ("import keras", "torch", ["torch", "horovod.torch"]),
        ("from hvdtrain import keras", "torch", ["torch", "horovod.torch"]),
        ("import hvdtrain.torch as hvt", "torch", ["torch", "horovod.torch"]),
        ("from . import torch\nimport torchlike, tensorflow_datasets", "tensorflow", []),
    ],
)
def test_what_a_script_imports_is_imported_before(source: str, backend: str, found: list[str]) -> None:
    assert imported_by(source, backend) == found


def test_a_rehearsed_program_writes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert folder.place_of("runs/a") == Path("runs/a")
    monkeypatch.setenv(variables.REHEARSAL, str(tmp_path / "rehearsal"))
    placed = {path: folder.place_of(path) for path in ("runs/a", "b/a", "/data/a")}
    assert len(set(placed.values())) == 3 and all(its.is_relative_to(tmp_path / "rehearsal") for its in placed.values())
    assert folder.place_of(placed["b/a"] / "c") == placed["b/a"] / "c"
    chosen, resume = folder.choose_run(None, "net", resume=False, data_sha256="")
    assert chosen.is_dir() and chosen.is_relative_to(tmp_path / "rehearsal") and not resume
    assert not (tmp_path / "runs").exists()
