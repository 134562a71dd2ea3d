"""Rank 0 writes a checkpoint an epoch; a second start goes on from it, broadcast from rank 0."""

import argparse
import os

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.pth.tar", help="checkpoint file format")
parser.add_argument("--epochs", type=int, default=2)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(10, 20)
        self.out = nn.Linear(20, 3)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x)))


def save_checkpoint(epoch):
    if hvd.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch))


def train(epoch):
    train_sampler.set_epoch(epoch)
    for inputs, labels in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    return loss.detach()


args = parser.parse_args()
hvd.init()
torch.manual_seed(42)

# If set > 0, will resume training from a given checkpoint.
resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break
# Horovod: broadcast resume_from_epoch from rank 0 (which will have checkpoints) to other ranks.
resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()

generator = torch.Generator().manual_seed(9)
x = torch.randn(144, 10, generator=generator)
dataset = TensorDataset(x, x[:, :3].argmax(1))
train_sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(dataset, batch_size=12, sampler=train_sampler)

model = TwoLayers()
optimizer = torch.optim.Adam(model.parameters(), lr=0.002 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

# Restore from a previous checkpoint, on the first worker only: the broadcasts give it to the others.
if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

loss = torch.zeros(())
for epoch in range(resume_from_epoch, args.epochs):
    loss = train(epoch)
    save_checkpoint(epoch + 1)
loss = hvd.allreduce(loss, name="last")
if hvd.rank() == 0:
    print(f"final loss {loss.item():.6f}")
