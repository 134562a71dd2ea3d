"""Gradients travel as float16, divided before the sum; a learning-rate scheduler of PyTorch's."""

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.manual_seed(hvd.rank())  # the broadcast makes the weights alike

rng = torch.Generator().manual_seed(11)
features = torch.randn(192, 16, generator=rng)
targets = features @ torch.randn(16, 1, generator=rng) + 0.1 * torch.randn(192, 1, generator=rng)
train_set = TensorDataset(features, targets)
train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_set, batch_size=12, sampler=train_sampler, drop_last=True)

net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
compression = hvd.Compression.fp16
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=net.named_parameters(),
    compression=compression,
    op=hvd.Average,
    gradient_predivide_factor=1.0,
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

hvd.broadcast_parameters(net.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(2):
    train_sampler.set_epoch(epoch)
    running = torch.zeros(())
    for batch, wanted in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(batch), wanted)
        loss.backward()
        optimizer.step()
        running += loss.detach()
    scheduler.step()
    mean = hvd.allreduce(running / len(train_loader), name=f"epoch_{epoch}_loss")

if hvd.rank() == 0:
    print(f"final loss {mean.item():.6f}")
model = net
