"""Folders of image files: what is listed, what ranks must agree on, and what is refused; and the made-up data sets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_datasets import Threads

from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.datasets import Folder, as_rgb, load_folder, load_mnist, synthetic


def write(root: Path, *files: str) -> Path:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def listed(folder: Folder) -> list[tuple[str, str]]:
    return [
        (str(Path(folder.path(index)).relative_to(folder.root)), folder.classes[label])
        for index, label in enumerate(folder.labels)
    ]


def test_images_of_each_class(tmp_path: Path) -> None:
    root = write(
        tmp_path, "train/b/2.jpg", "train/b/10.JPEG", "train/b/notes.txt", "train/b/.hidden.png", "train/a/deep/x.png",
        "train/ü/é.webp", "train/loose.jpg", "train/.git/1.jpg", "val/b/1.jpg",
    )  # fmt: skip
    train, val = load_folder(root)
    assert train.classes == ("a", "b", "ü") and len(train) == 4 and train.labels.dtype == np.int64
    assert listed(train) == [("a/deep/x.png", "a"), ("b/10.JPEG", "b"), ("b/2.jpg", "b"), ("ü/é.webp", "ü")]
    assert val is not None and val.classes == train.classes  # labels mean the same, though it has one class only
    assert listed(val) == [("b/1.jpg", "b")]
    assert "4 image files of 3 classes" in train.note


def test_links_are_followed_and_circles_end(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", "1.jpg")
    root = write(tmp_path / "data", "a/2.jpg", "b/3.jpg")
    (root / "a" / "more").symlink_to(tmp_path / "elsewhere")
    (root / "a" / "circle").symlink_to(root / "a")
    assert listed(load_folder(root)[0]) == [("a/2.jpg", "a"), ("a/more/1.jpg", "a"), ("b/3.jpg", "b")]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "holds nothing"),
        (("1.jpg", "2.jpg"), "holds 1.jpg, 2.jpg"),
        (("train/1.jpg",), "holds 1.jpg"),
        (("val/a/1.jpg",), "one folder of images for each class"),
        (("train/a/1.jpg", "train/b/1.txt"), "every class must have images"),
        (("train/a/1.jpg", "val/b/1.jpg"), "only in .*: b"),
        (("train/a/1.jpg", "val/1.jpg"), "one folder of images for each class"),
        (("train/a/1.jpg", "train/b/1.jpg", "val/a/notes.txt"), "every class must have images"),
    ],
)
def test_refused(tmp_path: Path, files: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_folder(write(tmp_path, *files))


def test_ranks_that_see_other_classes_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "0", "train/a/1.jpg", "train/b/1.jpg")
    write(tmp_path / "1", "train/a/1.jpg", "train/c/1.jpg")
    results = Threads(2, ranks_per_node=1).run(lambda world: load_folder(tmp_path / f"{world.rank}", world=world))
    for error in results:
        assert isinstance(error, ReplicaError) and error.shared
        assert "class train/b" in error.rule and error.received == "rank 0: a folder\nrank 1: absent"


def test_grey_pictures_get_a_border_and_three_channels() -> None:
    grey = load_mnist("digits")
    colour = as_rgb(grey)
    assert colour.x_train.shape == (1437, 3, 32, 32)
    assert np.array_equal(colour.x_train[:, 1, 2:30, 2:30], grey.x_train)
    assert not colour.x_train[:, :, :2].any() and not colour.x_train[:, :, :, 30:].any()
    oblong = replace(grey, x_test=grey.x_test[:, :20])
    for pictures, size in ((grey, 27), (colour, 32), (oblong, 32)):
        with pytest.raises(ConfigError, match="must be uint8"):
            as_rgb(pictures, size)


def test_synthetic() -> None:
    images = synthetic(100, classes=7, size=8)
    assert images.x_train.shape == (90, 3, 8, 8) and images.x_test.shape == (10, 3, 8, 8)
    assert images.x_train.dtype == np.uint8 and set(images.y_train.tolist()) == set(range(7))
    assert images.fingerprint() == synthetic(100, classes=7, size=8).fingerprint()
    assert images.fingerprint() != synthetic(100, classes=7, size=8, seed=1).fingerprint()
    means = np.array([images.x_train[images.y_train == one].mean((0, 2, 3)) for one in range(7)])
    within = images.x_train[images.y_train == 0].mean((2, 3)).std(0).max()
    assert np.linalg.norm(means[0] - means[1:], axis=1).min() > within  # classes can be told apart
    assert synthetic(2000, classes=1000, size=2).y_train.max() == 999
    with pytest.raises(ConfigError, match="samples >= 2"):
        synthetic(0)
