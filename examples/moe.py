"""A mixture of experts: each sample goes to two of eight, so that a rank may not use some. "# +": added by hvdtrain.

    horovodrun -np 2 python examples/moe.py

An expert that got no sample on some rank counts with a gradient of zero there; one that no rank used keeps None, as in
one process. The balance of the load is a product of means over the batch, which no weights put together of the ranks'
pieces: so one factor, how many samples each expert got, is summed over ranks (it carries no gradient).
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils import data

import hvdtrain  # +
import hvdtrain.torch as hvt  # +

EPOCHS, BATCH, EXPERTS, CHOSEN = 3, 64, 8, 2

world = hvdtrain.init("torch")  # +
torch.manual_seed(0)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        shares = self.gate(x).softmax(1)
        weights, chosen = shares.topk(CHOSEN)
        out = x.new_zeros(len(x), 10)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, weights[rows, places, None] * expert(x[rows]))
        return out, shares, one_hot(chosen[:, 0], EXPERTS).sum(0)


y = torch.arange(1601) % 10
x = torch.rand(10, 64)[y] + 0.5 * torch.randn(1601, 64)  # ten classes of 8x8 pictures
train = data.TensorDataset(x, y)
model = Mixture()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
loader = hvt.loader(train, BATCH // world.size, shuffle=False)  # + instead of: loader = data.DataLoader(train, BATCH)
model, optimizer = hvt.prepare(model, optimizer, loader)  # +

for epoch in loader.epochs(EPOCHS):  # + instead of: for epoch in range(EPOCHS):
    for pictures, labels in loader:
        optimizer.zero_grad()
        out, shares, counts = model(pictures)
        counts = sum(world.gather(counts * (not loader.step.padding)))  # + what only keeps a rank in step is no sample
        balance = EXPERTS * (shares.mean(0) * counts / counts.sum()).sum()
        loss = cross_entropy(out, labels) + 0.01 * balance
        optimizer.backward(loss)  # + instead of: loss.backward()
        optimizer.step()
    if world.is_main:  # + instead of: if True:
        print(f"epoch {epoch}: loss {loss:.4f}")
