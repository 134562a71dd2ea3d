"""A small data set of image files, with everything that real ones have: made by the test that needs it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

CORRUPT = "corrupt.jpg"
TURNED_90 = 6  # EXIF orientation: the camera was held so that the top is on the right side


def write_folder(root: Path) -> Path:
    """Writes ``train`` and ``val`` with three uneven classes: 9, 5 and 3 good files, and a corrupt one in the second.

    Among them are a grey, a CMYK and a palette picture and one with EXIF rotation; a text file and a hidden file are no
    pictures.
    """
    from PIL import Image

    draw = np.random.Generator(np.random.PCG64(0))
    for part, counts in (("train", (9, 5, 3)), ("val", (3, 2, 1))):
        for name, count in zip(("ant", "bee", "cat"), counts, strict=True):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (24 + number, 32, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=95)
    train = root / "train"
    gradient = np.linspace(0, 255, 32 * 24).reshape(24, 32).astype(np.uint8)
    Image.fromarray(gradient).save(train / "ant" / "1.jpg")
    Image.fromarray(np.full((24, 32, 3), (200, 30, 60), np.uint8)).convert("CMYK").save(train / "ant" / "2.jpg")
    Image.fromarray(gradient).convert("P").save(train / "ant" / "3.png")
    (train / "ant" / "3.jpg").unlink()
    exif = Image.Exif()
    exif[0x0112] = TURNED_90
    left_red = np.zeros((24, 32, 3), np.uint8)
    left_red[:, :16, 0] = 255
    Image.fromarray(left_red).save(train / "ant" / "4.jpg", exif=exif, quality=95)
    whole = (train / "bee" / "0.jpg").read_bytes()
    (train / "bee" / CORRUPT).write_bytes(b"not an image at all" * 20)
    assert len(whole) > 100
    (train / "bee" / "notes.txt").write_text("no picture")
    (train / "bee" / ".hidden.jpg").write_bytes(whole)
    return root
