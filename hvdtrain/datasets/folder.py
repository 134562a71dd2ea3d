"""Folders of image files, one folder per class: the same list on every rank."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.core.errors import ConfigError
from hvdtrain.datasets.images import together
from hvdtrain.world.world import World

if TYPE_CHECKING:
    import numpy as np

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff")
TRAIN, VAL = "train", "val"


@dataclass(frozen=True, eq=False)
class Folder:
    """The image files below a folder that has one folder per class.

    Attributes:
        root: the folder with the classes.
        classes: names of the class folders, sorted; a label is an index into it.
        files: bytes [N], paths below `root`. Worker processes that count references would copy a list of strings.
        labels: int64 [N].
    """

    root: str
    classes: tuple[str, ...]
    files: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        """Returns the full path of a file."""
        return os.path.join(self.root, os.fsdecode(self.files[index]))

    @property
    def note(self) -> str:
        """Returns one line that describes these pictures."""
        return f"{len(self):,} image files of {len(self.classes)} classes in {self.root}"


def load_folder(path: str | os.PathLike[str], *, world: World | None = None) -> tuple[Folder, Folder | None]:
    """Lists the files for training and for validation; collective. Rank 0 reads the tree; every rank checks its
    classes.

    Example:
        training, validation = load_folder("imagenet", world=world)

    Args:
        path: a folder with `train` and, optionally, `val`, each with one folder per class; or a folder with one folder
            per class: then validation is None.
        world: the ranks; None: this process alone.

    Raises:
        ConfigError: on every rank: no such folder on one of them, no classes, a class without files, or validation
            classes that are not trained.
        ReplicaError: on every rank, if ranks see different classes.
    """
    world = world or World.solo()
    top = Path(os.path.expanduser(os.fspath(path)))
    parts = together(world, lambda: _parts(top))[world.rank]
    world.agree_all(
        {os.path.join(part, name): "a folder" for part, classes in parts.items() for name in classes},
        f"every rank must see the class {{}} in {top}",
        lambda _: "copy the same data to every node, or use a file system that they share",
    )
    part = TRAIN if TRAIN in parts else ""
    train = world.on_main(scan, top / part, parts[part])
    if VAL not in parts:
        return train, None
    unknown = sorted(set(parts[VAL]) - set(parts[part]))
    if unknown:
        raise ConfigError(
            "classes for validation must also be classes for training",
            f"only in {top / VAL}: {_some(unknown)}",
            "correct the names of the class folders",
            shared=True,
        )
    return train, world.on_main(scan, top / VAL, parts[part], present=parts[VAL])


def _parts(top: Path) -> dict[str, list[str]]:
    """The classes in each part of the data: {"train": [...], "val": [...]}, or {"": [...]} of the folder itself."""
    try:
        found = {part: _class_names(top / part) for part in (TRAIN, VAL) if (top / part).is_dir()}
        found = found or {"": _class_names(top)}
    except OSError as error:
        received = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{top} cannot be listed", received, "correct the path, or its permissions") from error
    for part, classes in found.items():
        if not classes or list(found) == [VAL]:
            raise ConfigError(
                "a data folder must hold one folder of images for each class",
                f"{top / part} holds {_some(sorted(os.listdir(top / part)))}",
                "name the folder above train and val; move images into class folders: train/cat/1.jpg, val/dog/2.jpg",
            )
    return found


def _class_names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def scan(folder: Path, classes: list[str], *, present: list[str] | None = None) -> Folder:
    """Lists the image files of each class below `folder`, sorted; follows links, each folder once. Raises `ConfigError`
    if a class of those `present` (None: of all) has none."""
    import numpy as np

    below = [[os.fsencode(os.path.relpath(file, folder)) for file in _images_below(folder / one)] for one in classes]
    counts = list(map(len, below))
    wanted = zip(classes, counts, strict=True)
    empty = [str(folder / one) for one, count in wanted if not count and one in (present or classes)]
    if empty:
        received = f"none ({', '.join(SUFFIXES)}) in {_some(empty)}"
        raise ConfigError("every class must have images", received, "remove empty class folders, or add images")
    files = np.array(list(itertools.chain.from_iterable(below)))
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), counts)
    return Folder(str(folder), tuple(classes), files, labels)


def _images_below(folder: Path) -> list[str]:
    found = []
    seen: set[tuple[int, int]] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in seen:  # a link to a folder above: a circle
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders.sort()
        found += [
            os.path.join(place, name) for name in files if name.lower().endswith(SUFFIXES) and not name.startswith(".")
        ]
    return sorted(found)


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" ... ({len(names)} in all)" if len(names) > 8 else "") or "nothing"
