"""Gradients are clipped after they were averaged: synchronize(), clip, step without synchronizing again."""

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.manual_seed(7)

generator = torch.Generator().manual_seed(0)
x = torch.randn(256, 20, generator=generator)
y = (x @ torch.randn(20, 5, generator=generator)).argmax(1)
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=True)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)

model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.003 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = criterion(model(data), target)
        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        with optimizer.skip_synchronize():
            optimizer.step()

loss = hvd.allreduce(loss.detach(), name="loss")
if hvd.rank() == 0:
    print(f"final loss {loss.item():.6f}")
