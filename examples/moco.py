"""MoCo: contrast against a queue of keys from a momentum encoder. "# +": added by hvdtrain.

    horovodrun -np 2 python examples/moco.py

Each sample is compared with its own other view and with the queue, which is the same on all ranks: so the loss is a
mean over samples. The queue takes the keys of all ranks, in the order of the global batch.
"""

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils import data

import hvdtrain  # +
import hvdtrain.torch as hvt  # +

EPOCHS, BATCH, QUEUE, MOMENTUM, TEMPERATURE = 2, 64, 256, 0.99, 0.2

world = hvdtrain.init("torch")  # +
torch.manual_seed(0)


class MoCo(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.query, self.key = encoder, copy.deepcopy(encoder).requires_grad_(False)
        self.register_buffer("queue", normalize(torch.randn(QUEUE, 16), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, first, second):
        q = normalize(self.query(first), dim=1)
        with torch.no_grad():
            k = normalize(self.key(second), dim=1)
        own = (q * k).sum(1, keepdim=True)
        return torch.cat([own, q @ self.queue.clone().T], 1) / TEMPERATURE, k

    @torch.no_grad()
    def follow(self, keys):
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
            slow.lerp_(fast, 1 - MOMENTUM)
        self.queue[(self.place + torch.arange(len(keys))) % QUEUE] = keys
        self.place.add_(len(keys))


pictures = torch.rand(10, 64)[torch.arange(641) % 10] + 0.3 * torch.randn(641, 64)
views = [pictures + 0.1 * torch.randn_like(pictures) for _ in range(2)]
model = MoCo(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)))
optimizer = torch.optim.SGD(model.query.parameters(), lr=0.05, momentum=0.9)
train = data.TensorDataset(*views)
loader = hvt.loader(train, BATCH // world.size, shuffle=False)  # + instead of: loader = data.DataLoader(train, BATCH)
model, optimizer = hvt.prepare(model, optimizer, loader)  # +

for epoch in loader.epochs(EPOCHS):  # + instead of: for epoch in range(EPOCHS):
    for first, second in loader:
        optimizer.zero_grad()
        logits, keys = model(first, second)
        loss = cross_entropy(logits, torch.zeros(len(first), dtype=torch.long))
        optimizer.backward(loss)  # + instead of: loss.backward()
        optimizer.step()
        keys = hvt.whole(keys)  # + of all ranks, in the order of the global batch
        model.follow(keys)
    if world.is_main:  # + instead of: if True:
        print(f"epoch {epoch}: loss {loss:.4f}")
