"""`reduced_pictures.py FOLDER`: digits as large JPEGs, learnt from fractions of their pixels and from all of them.

Prints the share of the held-out ones that each model knows, by seed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.datasets import load_digits, load_folder

SIZE, PIXELS, EPOCHS = 192, 16, 4


def write(root: Path) -> None:
    digits = load_digits()
    for part, x, y in (("train", digits.x_train, digits.y_train), ("val", digits.x_test, digits.y_test)):
        for number, (picture, label) in enumerate(zip(x, y, strict=True)):
            folder = root / part / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            plain = Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0)).squeeze())
            plain.resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=90)


def learnt(root: Path, reduced: bool, seed: int) -> float:
    train, val = (
        hvt.ImageFiles(files, train=part, size=PIXELS, resize=PIXELS, reduced=reduced)
        for files, part in zip(load_folder(root), (True, False), strict=True)
    )
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * (PIXELS // 4) ** 2, 10),
    )  # fmt: skip
    batches = hvt.loader(train, 32, workers=0)
    model, optimizer = hvt.prepare(model, torch.optim.Adam(model.parameters(), lr=0.003), batches)
    for _ in batches.epochs(EPOCHS):
        for x, y in batches:
            optimizer.zero_grad()
            optimizer.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    return float(hvt.evaluate(model, val, hvt.classification(top=(1,)), per_rank_batch=64, workers=0)["top1"])


def main() -> None:
    root = Path(sys.argv[1])
    write(root)
    found = {}
    for seed in range(3):
        with hvdtrain.init("torch", engine="solo", device="cpu", seed=seed):
            found[seed] = [learnt(root, reduced, seed) for reduced in (True, False)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
