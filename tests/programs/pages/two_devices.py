"""The smallest split: docs/how-split.md."""

import torch

x, y, loss_fn = torch.randn(4, 10), torch.randn(4, 5), torch.nn.functional.mse_loss
# the page
assert all(p.grad is not None for p in model.parameters())
