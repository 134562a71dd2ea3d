"""A model cut and tuned: docs/how-split.md."""

from pathlib import Path

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU()) for _ in range(4)))
example, loss_fn = torch.randn(16, 32), torch.nn.functional.mse_loss
data = [(torch.randn(16, 32), torch.randn(16, 32)) for _ in range(2)]
# the page
assert pipe.micro_batches >= 1 and Path("split_size.png").is_file()
