"""SimCLR over batches that are gathered: the loss needs them all at once. "# +": added by hvdtrain.

    horovodrun -np 2 python examples/simclr.py

The plain script has one batch of 64. Here each rank takes two of 16, and the loss is still that of all 64 pictures:
`forward_backward(whole=True)` runs the model twice on each, and keeps no graph of more than one.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils import data

import hvdtrain  # +
import hvdtrain.torch as hvt  # +

EPOCHS, BATCH, GATHERED, TEMPERATURE = 3, 64, 2, 0.3

world = hvdtrain.init("torch")  # +
torch.manual_seed(0)
pictures = torch.rand(10, 64)[torch.arange(450) % 10] + 0.2 * torch.randn(450, 64)
views = torch.stack([pictures + 0.1 * torch.randn_like(pictures) for _ in range(2)], 1)  # [n, 2, 64]


def nt_xent(z, numbers):
    """z [n, 2, width]: two views of each of n pictures."""
    z = normalize(torch.cat([z[:, 0], z[:, 1]]), dim=1)
    logits = (z @ z.T / TEMPERATURE).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
    own = torch.arange(len(z))
    return cross_entropy(logits, (own + len(z) // 2) % len(z))


model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train = data.TensorDataset(views, torch.arange(450))
per_rank = BATCH // world.size // GATHERED  # +
loader = hvt.loader(train, per_rank, shuffle=False)  # + instead of: loader = data.DataLoader(train, BATCH)
model, optimizer = hvt.prepare(model, optimizer, loader, accumulate=GATHERED)  # +

for epoch in loader.epochs(EPOCHS):  # + instead of: for epoch in range(EPOCHS):
    for x, y in loader:
        optimizer.zero_grad()
        optimizer.forward_backward(x, y, nt_xent, whole=True)  # + instead of: nt_xent(model(x), y).backward()
        optimizer.step()
    x = views[:BATCH]
    if world.is_main:  # + instead of: if True:
        print(f"epoch {epoch}: loss {nt_xent(model(x), None):.4f}")
