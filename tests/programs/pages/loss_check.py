"""A step that is checked: docs/how-losses.md."""

import torch

import hvdtrain
import hvdtrain.torch as hvt

hvdtrain.init("torch")
model, loss_fn = torch.nn.Linear(4, 3), torch.nn.functional.cross_entropy
x, y = torch.randn(8, 4), torch.arange(8) % 3
# the page
assert hvt.check(lambda batch: loss_fn(model(batch[0]), batch[1]), (x, y)).exact
