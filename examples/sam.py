"""SAM (sharpness-aware minimisation, Foret et al. 2021) through a closure. "# +": added by hvdtrain.

    horovodrun -np 2 python examples/sam.py

The optimizer moves the weights uphill along the gradient of all ranks, asks the closure for the gradient there, moves
back, and steps. On every rank the closure's gradient is that of the global batch.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils import data

import hvdtrain  # +
import hvdtrain.torch as hvt  # +

EPOCHS, BATCH = 3, 64

world = hvdtrain.init("torch")  # +
torch.manual_seed(0)


class SAM(torch.optim.SGD):
    def __init__(self, parameters, rho=0.05, **options):
        super().__init__(parameters, **options)
        self.rho = rho

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        moves = [p.grad * (self.rho / norm) for p in held]
        torch._foreach_add_(held, moves)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(held, moves)
        super().step()
        return loss


y = torch.arange(1600) % 10
x = torch.rand(10, 64)[y] + 0.5 * torch.randn(1600, 64)  # ten classes of 8x8 pictures
train = data.TensorDataset(x, y)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = SAM(model.parameters(), lr=0.1, momentum=0.9)
loader = hvt.loader(train, BATCH // world.size, shuffle=False)  # + instead of: loader = data.DataLoader(train, BATCH)
model, optimizer = hvt.prepare(model, optimizer, loader)  # +

for epoch in loader.epochs(EPOCHS):  # + instead of: for epoch in range(EPOCHS):
    for pictures, labels in loader:

        def closure():
            optimizer.zero_grad()
            loss = cross_entropy(model(pictures), labels)  # noqa: B023 (called in this turn)
            optimizer.backward(loss)  # + instead of: loss.backward()
            return loss

        loss = optimizer.step(closure)
    if world.is_main:  # + instead of: if True:
        print(f"epoch {epoch}: loss {loss:.4f}")
