"""The blocks of docs/how-lightning.md, on real digits."""

import tempfile

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvdtrain.datasets import load_digits

digits = load_digits()
dataset, validation = (
    TensorDataset(torch.from_numpy(x[:, :1]).float() / 255, torch.from_numpy(y).long())
    for x, y in ((digits.x_train, digits.y_train), (digits.x_test, digits.y_test))
)
folder = tempfile.mkdtemp()

# the page
assert trainer.global_rank == trainer.strategy.world.rank and trainer.world_size == trainer.strategy.world.size
assert trainer.callback_metrics["accuracy"] > 0.5, trainer.callback_metrics
