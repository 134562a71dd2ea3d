"""Batch norm: Horovod's over all ranks on GPUs; on CPU, where there is none, each rank's own, rank 0's at the end."""

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.manual_seed(2)
device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
BatchNorm = hvd.SyncBatchNorm if device.type == "cuda" else nn.BatchNorm2d

images = torch.randn(128, 1, 8, 8, generator=torch.Generator().manual_seed(4))
labels = (images.mean((1, 2, 3)) > 0).long()
dataset = TensorDataset(images, labels)
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=8, sampler=sampler)

model = nn.Sequential(
    nn.Conv2d(1, 4, 3, bias=False), BatchNorm(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2)
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.9, nesterov=True)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(2):
    model.train()
    sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # one set of statistics for all
model.eval()
with torch.no_grad():
    loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
if hvd.rank() == 0:
    print(f"final loss {loss.item():.6f}")
