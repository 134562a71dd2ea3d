"""Gradients are averaged by hand, in one grouped all-reduce: no optimizer is wrapped."""

import horovod.torch as hvd
import torch
from torch import nn


def average_gradients(model):
    parameters = [p for p in model.parameters() if p.grad is not None]
    averaged = hvd.grouped_allreduce([p.grad for p in parameters], op=hvd.Average, name="gradients")
    for parameter, gradient in zip(parameters, averaged):
        parameter.grad.copy_(gradient)


hvd.init()
torch.manual_seed(17)
generator = torch.Generator().manual_seed(17)
x = torch.randn(128, 9, generator=generator)
y = x.pow(2).mean(1, keepdim=True)
x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]

model = nn.Sequential(nn.Linear(9, 18), nn.ReLU(), nn.Linear(18, 1))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)

for epoch in range(2):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
    for rows in order.split(8):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        loss.backward()
        average_gradients(model)
        optimizer.step()

loss = hvd.allreduce(loss.detach(), name="loss")
if hvd.rank() == 0:
    print(f"final loss {loss.item():.6f}")
