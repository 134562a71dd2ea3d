"""WGAN with gradient penalty: five updates of the critic a batch, and one of the generator. "# +": added by hvdtrain.

    horovodrun -np 2 python examples/wgan_gp.py

The penalty differentiates a gradient (`create_graph`), which `torch.autograd.grad` does as ever. Noise and mixing
weights come with the samples, so that any number of ranks gives one result.
"""

import torch
from torch import nn
from torch.utils import data

import hvdtrain  # +
import hvdtrain.torch as hvt  # +

EPOCHS, BATCH, CRITIC, PENALTY = 3, 64, 5, 10.0

world = hvdtrain.init("torch")  # +
torch.manual_seed(0)
angle = torch.rand(600) * 2 * torch.pi
points = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(600, 2)  # a ring
noise, mixing = torch.randn(600, CRITIC + 1, 4), torch.rand(600, CRITIC, 1)

generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))

train = data.TensorDataset(points, noise, mixing)
loader = hvt.loader(train, BATCH // world.size, shuffle=False)  # + instead of: loader = data.DataLoader(train, BATCH)
critic, optimizer_c = hvt.prepare(critic, optimizer_c, loader)  # +
generator, optimizer_g = hvt.prepare(generator, optimizer_g, loader)  # +


def penalty(real: torch.Tensor, fake: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    between = (share * real + (1 - share) * fake).requires_grad_()
    slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
    return ((slope.norm(dim=1) - 1) ** 2).mean()


for epoch in loader.epochs(EPOCHS):  # + instead of: for epoch in range(EPOCHS):
    for real, z, shares in loader:
        for turn in range(CRITIC):
            fake = generator(z[:, turn]).detach()
            optimizer_c.zero_grad()
            loss_c = critic(fake).mean() - critic(real).mean() + PENALTY * penalty(real, fake, shares[:, turn])
            optimizer_c.backward(loss_c)  # + instead of: loss_c.backward()
            optimizer_c.step()
        optimizer_g.zero_grad()
        loss_g = -critic(generator(z[:, CRITIC])).mean()
        optimizer_g.backward(loss_g)  # + instead of: loss_g.backward()
        optimizer_g.step()
    if world.is_main:  # + instead of: if True:
        print(f"epoch {epoch}: critic {loss_c:.4f}, generator {loss_g:.4f}")
