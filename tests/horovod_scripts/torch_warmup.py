"""The learning rate is warmed up by hand, batch by batch, to its size times the base (Goyal et al.)."""

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

base_lr, warmup_epochs, epochs = 0.0125, 1, 2

hvd.init()
torch.manual_seed(13)
generator = torch.Generator().manual_seed(13)
x = torch.randn(320, 16, generator=generator)
y = (x @ torch.randn(16, 4, generator=generator)).argmax(1)
train_dataset = TensorDataset(x, y)
train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_dataset, batch_size=16, sampler=train_sampler)

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=base_lr * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


# Horovod: using `lr = base_lr * hvd.size()` from the very beginning leads to worse final accuracy.
# Scale the learning rate from `base_lr` up to `base_lr * hvd.size()` during the first epochs.
def adjust_learning_rate(epoch, batch_idx):
    if epoch < warmup_epochs:
        progress = epoch + float(batch_idx + 1) / len(train_loader)
        lr_adj = 1.0 / hvd.size() * (progress * (hvd.size() - 1) / warmup_epochs + 1)
    else:
        lr_adj = 1.0
    for param_group in optimizer.param_groups:
        param_group["lr"] = base_lr * hvd.size() * lr_adj


class Metric:
    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.0), torch.tensor(0.0)

    def update(self, val):
        self.sum += hvd.allreduce(val.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


for epoch in range(epochs):
    train_sampler.set_epoch(epoch)
    train_loss = Metric("train_loss")
    for batch_idx, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch_idx)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        train_loss.update(loss)
        loss.backward()
        optimizer.step()

if hvd.rank() == 0:
    print(f"final loss {train_loss.avg.item():.6f}")
