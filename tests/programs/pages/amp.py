"""Mixed precision in PyTorch: docs/how-mixed-precision.md."""

import torch

import hvdtrain
import hvdtrain.torch as hvt

hvdtrain.init("torch")
model: torch.nn.Module = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = hvt.loader((torch.randn(8, 4), torch.randn(8, 1)), per_rank_batch=8)
# the page
for x, y in train:
    optimizer.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
    assert model(x).dtype == torch.float32 and not torch.equal(model(x), hvt.unwrap(model)(x)), "rounded to bfloat16"
