"""DCGAN: two models, two optimizers, one loader. Lines that end in "# +" are what hvdtrain adds.

    python examples/dcgan.py
    horovodrun -np 2 python examples/dcgan.py

The noise of a picture comes with it, so that any number of ranks gives one
result; noise drawn in the loop (torch.randn) is each rank's own.
"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils import data

import hvdtrain  # +
import hvdtrain.torch as hvt  # +

EPOCHS, BATCH, NOISE = 2, 64, 16

world = hvdtrain.init("torch")  # +
torch.manual_seed(0)
rows, columns = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
images = torch.stack([((rows - a) ** 2 + (columns - b) ** 2 < 5) * 2.0 - 1 for a, b in torch.randint(2, 6, (500, 2))])
images = images[:, None].to(torch.get_default_dtype())  # a disc somewhere
noise = torch.randn(len(images), NOISE, 1, 1)


def block(layer: type[nn.Module], inputs: int, outputs: int, stride: int, activation: nn.Module) -> list[nn.Module]:
    return [layer(inputs, outputs, 4, stride, stride // 2, bias=False), nn.BatchNorm2d(outputs), activation]


generator = nn.Sequential(
    *block(nn.ConvTranspose2d, NOISE, 32, 1, nn.ReLU()), nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Tanh()
)
discriminator = nn.Sequential(*block(nn.Conv2d, 1, 32, 2, nn.LeakyReLU(0.2)), nn.Conv2d(32, 1, 4), nn.Flatten(0))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))

train = data.TensorDataset(images, noise)
loader = hvt.loader(train, BATCH // world.size, shuffle=False)  # + instead of: loader = data.DataLoader(train, BATCH)
# batch-norm over the batches of all ranks, as one process has it
discriminator, optimizer_d = hvt.prepare(discriminator, optimizer_d, loader, sync_batchnorm=True)  # +
generator, optimizer_g = hvt.prepare(generator, optimizer_g, loader, sync_batchnorm=True)  # +

for epoch in loader.epochs(EPOCHS):  # + instead of: for epoch in range(EPOCHS):
    for real, z in loader:
        fake = generator(z)

        optimizer_d.zero_grad()
        loss_real = bce(discriminator(real), torch.ones(len(real)))
        optimizer_d.backward(loss_real, more=True)  # + instead of: loss_real.backward()
        loss_fake = bce(discriminator(fake.detach()), torch.zeros(len(real)))
        optimizer_d.backward(loss_fake)  # + instead of: loss_fake.backward()
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = bce(discriminator(fake), torch.ones(len(real)))
        optimizer_g.backward(loss_g)  # + instead of: loss_g.backward()
        optimizer_g.step()
    if world.is_main:  # + instead of: if True:
        print(f"epoch {epoch}: discriminator {loss_real + loss_fake:.4f}, generator {loss_g:.4f}")
