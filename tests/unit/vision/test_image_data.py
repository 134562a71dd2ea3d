"""Which pictures a name or a path means, before any framework is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from limits import Limit

from hvdtrain.vision import pictures as image_data


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("digits", "digits"),
        ("cifar10", "cifar10"),
        ("mnist", "mnist"),
        ("synthetic", "synthetic"),
        ("/data/mnist.npz", "mnist"),
        ("/data/cifar-10-python.tar.gz", "cifar10"),
        ("/data/imagenet", "folder"),
        ("/data/my.pictures", "folder"),
    ],
)
def test_kinds(path: str, kind: str) -> None:
    assert image_data.kind_of(path) == kind


def test_a_folder_that_holds_the_file(tmp_path: Path, limit: Limit) -> None:
    assert image_data.kind_of(str(tmp_path)) == "folder"
    (tmp_path / "cifar-10-python.tar.gz").touch()
    assert image_data.kind_of(str(tmp_path)) == "cifar10"
    (tmp_path / "mnist.npz").touch()
    assert image_data.kind_of(str(tmp_path)) == "mnist"
    limit("K19b", "torch_resnet refuses a folder with MNIST that keras_mnist takes", mended="both take it")


def test_mean_and_deviation_of_each_channel() -> None:
    rng = np.random.default_rng(3)
    pictures = rng.integers(0, (50, 100, 256), (40, 5, 7, 3)).astype(np.uint8).transpose(0, 3, 1, 2)
    mean, std = image_data.by_channel(pictures)
    values = pictures / 255
    assert mean == pytest.approx(values.mean((0, 2, 3))) and std == pytest.approx(values.std((0, 2, 3)))
