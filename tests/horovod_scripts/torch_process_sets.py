"""An ensemble: even ranks train one model, odd ranks another, each within a process set."""

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

hvd.init(process_sets="dynamic")
even = [rank for rank in range(hvd.size()) if rank % 2 == 0]
odd = [rank for rank in range(hvd.size()) if rank % 2 == 1]
even_set = hvd.add_process_set(even)
odd_set = hvd.add_process_set(odd) if odd else None
mine = even_set if hvd.rank() % 2 == 0 else odd_set

torch.manual_seed(100 + hvd.rank() % 2)  # two models
data = torch.Generator().manual_seed(5)
x = torch.randn(160, 12, generator=data)
y = (x.sum(1) > 0).long()
train_set = TensorDataset(x, y)
sampler = DistributedSampler(train_set, num_replicas=mine.size(), rank=mine.rank(), seed=hvd.rank() % 2)
loader = DataLoader(train_set, batch_size=16, sampler=sampler)

model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 2))
for name, tensor in sorted(model.state_dict().items()):
    hvd.broadcast_(tensor, root_rank=mine.ranks[0], name=f"start.{name}", process_set=mine)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * mine.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), process_set=mine)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()

# the ensemble's prediction is the mean over all ranks
probabilities = hvd.allreduce(model(x).softmax(1).detach(), name="ensemble")
loss = nn.functional.nll_loss(probabilities.log(), y)
if hvd.rank() == 0:
    print(f"final loss {loss.item():.6f}")
