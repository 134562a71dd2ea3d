"""Two models, two optimizers, each wrapped: a GAN on points of a circle."""

import math

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

LATENT = 4


def build_generator():
    return nn.Sequential(nn.Linear(LATENT, 16), nn.ReLU(), nn.Linear(16, 2))


def build_discriminator():
    return nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def distributed(model, lr):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5, 0.999))
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return optimizer


def main():
    hvd.init()
    torch.manual_seed(hvd.rank())  # each rank draws its own noise
    angles = torch.linspace(0, 2 * math.pi, 193)[:-1]
    dataset = TensorDataset(torch.stack([angles.cos(), angles.sin()], 1))
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)

    netG, netD = build_generator(), build_discriminator()
    # names of gradients are those of the parameters: the two models' must differ
    netG, netD = nn.ModuleDict({"generator": netG}), nn.ModuleDict({"discriminator": netD})
    optimizerG, optimizerD = distributed(netG, 1e-3), distributed(netD, 1e-3)
    criterion = nn.BCEWithLogitsLoss()

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
            optimizerD.zero_grad()
            fake = netG["generator"](torch.randn(len(real), LATENT))
            errD = criterion(netD["discriminator"](real), ones)
            errD = errD + criterion(netD["discriminator"](fake.detach()), zeros)
            errD.backward()
            optimizerD.step()
            # (2) Update G network: maximize log(D(G(z)))
            for parameter in netD.parameters():
                parameter.requires_grad_(False)
            optimizerG.zero_grad()
            errG = criterion(netD["discriminator"](fake), ones)
            errG.backward()
            optimizerG.step()
            for parameter in netD.parameters():
                parameter.requires_grad_(True)

    losses = hvd.allreduce(torch.stack([errG.detach(), errD.detach()]), name="losses")
    if hvd.rank() == 0:
        print(f"final loss {losses.sum().item():.6f}")
    return nn.ModuleList([netG, netD])


if __name__ == "__main__":
    model = main()
