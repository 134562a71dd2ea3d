"""Ranks have different numbers of batches: who is done joins, and the others go on without it."""

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

hvd.init()
torch.manual_seed(23)
generator = torch.Generator().manual_seed(30 + hvd.rank())
samples = 80 + 24 * hvd.rank()  # each rank's own file is of another length
x = torch.randn(samples, 8, generator=generator)
loader = DataLoader(TensorDataset(x, x[:, :1] - x[:, 1:2]), batch_size=8, shuffle=True)

model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    last = hvd.join()
    # while a rank waited, its own weights stood still: take those of one that was last
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    hvd.broadcast_optimizer_state(optimizer, root_rank=last)

loss = hvd.allreduce(loss.detach(), name="loss")
if hvd.rank() == 0:
    print(f"final loss {loss.item():.6f}")
