"""Horovod's own examples on the recipe's wheel: HVDTRAIN_HOROVOD_SOURCE names its repository, a checkout of v0.28.1 or
a git directory that has this tag. `tests/horovod_examples.toml` says what must become of each, and which of their lines
are replaced, and why."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomllib
from harness import PROGRAMS, REPOSITORY, run_ranks, together
from horovods_repository import taken

from hvdtrain.datasets import digits

pytestmark = pytest.mark.thorough

TABLE = tomllib.loads((REPOSITORY / "tests" / "horovod_examples.toml").read_text(encoding="utf-8"))
EXACT = 1e-10
SAMPLES = 128
Weights = dict[str, np.ndarray]
IDX_FILES = {  # which torchvision reads
    "x_train": "train-images-idx3-ubyte", "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte", "y_test": "t10k-labels-idx1-ubyte",
}  # fmt: skip


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples as they are."""
    return taken("examples", tmp_path_factory)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits: a file as Keras has it, files as torchvision has them, and a folder of pictures."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("data")
    arrays = dict(zip(IDX_FILES, digits.load(28), strict=True))
    arrays = {name: array[:SAMPLES] for name, array in arrays.items()}
    np.savez(folder / "digits.npz", **arrays)  # type: ignore[arg-type]
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, stem in IDX_FILES.items():
        head = struct.pack(f">BBBB{arrays[name].ndim}I", 0, 0, 8, arrays[name].ndim, *arrays[name].shape)
        (raw / stem).write_bytes(head + arrays[name].tobytes())
    for number, (picture, label) in enumerate(zip(arrays["x_train"][:8], arrays["y_train"], strict=False)):
        (folder / "images" / str(label % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).convert("RGB").save(folder / "images" / str(label % 2) / f"{number}.png")
    return folder


def replaced(examples: Path, folder: Path, example: dict[str, Any], how: str) -> Path:
    """The example with the lines of the table; each must be there as often as it says."""
    text = (examples / example["file"]).read_text(encoding="utf-8")
    for line in TABLE["line"]:
        here = Path(example["file"]).name in line["files"] and how in line.get("runs", [how])
        if here and not (line["why"].startswith("gone") and example.get("legacy")):
            assert text.count(line["old"]) == line.get("times", 1), line
            text = text.replace(line["old"], line["new"])
    file = folder / Path(example["file"]).name
    file.write_text(text, encoding="utf-8")
    return file


def run(how: str, example: dict[str, Any], examples: Path, data: Path, tmp_path: Path) -> None:
    environment = {"KERAS_BACKEND": "tensorflow", "DIGITS": str(data / "digits.npz"), "HOME": str(tmp_path)}
    environment |= {"TF_USE_LEGACY_KERAS": "1"} if example.get("legacy") else {}
    folder = tmp_path / how
    folder.mkdir()
    file = replaced(examples, folder, example, how)
    arguments = [argument.format(data=data) for argument in example.get("arguments", [])]
    ranks, launcher = (2, example.get("launcher", "horovodrun")) if how == "ranks" else (1, "none")
    program = [PROGRAMS / "horovod" / "example.py", how, "2", tmp_path, file, *arguments]
    run_ranks(program, ranks, launcher=launcher, env=environment, timeout_s=500, cwd=folder).check()


@pytest.mark.parametrize("example", [pytest.param(example, id=example["name"]) for example in TABLE["example"]])
def test_example(example: dict[str, Any], examples: Path, data: Path, tmp_path: Path) -> None:
    if example.get("legacy") and importlib.util.find_spec("tf_keras") is None:
        pytest.skip("legacy Keras is not here: pip install --no-deps tf-keras==2.21.0")
    hows = ["ranks", "unaveraged", *(["one"] if example["is"] == "one process" else [])]
    together(*(lambda how=how: run(how, example, examples, data, tmp_path) for how in hows))
    ours, other, unaveraged, *one = (
        weights(tmp_path / name) for name in ("ranks.0.npz", "ranks.1.npz", *(f"{how}.0.npz" for how in hows[1:]))
    )
    print(f"{example['name']}: between ranks {gap(ours, other):.1e}, not averaged {gap(ours, unaveraged):.1e}")
    assert gap(ours, other) == 0 and gap(ours, unaveraged) > 1e-6
    if one:
        print(f"{example['name']}: one process {gap(ours, *one):.1e}")
        assert gap(ours, *one) <= EXACT


@pytest.mark.parametrize(("op", "launcher"), [("Average", "horovodrun"), ("Adasum", "horovodrun --mpi")])
def test_adasum_small_model(op: str, launcher: str, examples: Path, data: Path, tmp_path: Path) -> None:
    """Each rank draws its samples: what the two do is worked out here."""
    arguments = ["--op", op, "--learning_rate", "0.05"]
    example = {"file": "examples/adasum/adasum_small_model.py", "arguments": arguments, "launcher": launcher}
    run("ranks", example, examples, data, tmp_path)
    ours, other = (weights(tmp_path / f"ranks.{rank}.npz") for rank in (0, 1))
    wanted = {name: [adasum_small_model(name, 0.05)] for name in ("Average", "Adasum")}
    print(f"adasum_small_model, {op}: {gap(ours, wanted[op]):.1e}, the other op {gap(*wanted.values()):.1e}")
    assert gap(ours, other) == 0 and gap(ours, wanted[op]) <= EXACT < 1e-3 < gap(*wanted.values())


def adasum_small_model(op: str, rate: float) -> np.ndarray:
    """A parabola fitted by two ranks, a sample each in every step. The combination is that of Maleki et al., "Scaling
    Distributed Training with Adaptive Summation" (2021), equation 3."""
    weights, draws = np.array([1.0, -1.0]), [np.random.RandomState(1 + rank) for rank in (0, 1)]
    for _ in range(50):
        gradients = []
        for x in (draw.rand() * 2 - 1 for draw in draws):
            away = (x * x + weights[0] * x + weights[1]) - (x * x - 20 * x + 50)
            gradients.append(2 * away * np.array([x, 1.0]))
        a, b = gradients
        shares = [0.5, 0.5] if op == "Average" else [1 - a @ b / (2 * a @ a), 1 - a @ b / (2 * b @ b)]
        weights = weights - rate * (shares[0] * a + shares[1] * b)
    return weights


def weights(file: Path) -> list[np.ndarray]:
    with np.load(file) as arrays:
        return [arrays[f"arr_{i}"] for i in range(len(arrays.files))]


def gap(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    assert len(a) == len(b) > 0
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))
