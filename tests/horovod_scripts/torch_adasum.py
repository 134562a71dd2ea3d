"""Adasum where Horovod has MPI (Gloo has none of it), else the average, whose learning rate is scaled."""

import argparse

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--use-adasum", action="store_true", help="use adasum algorithm to do reduction")
    parser.add_argument("--base-lr", type=float, default=0.02)
    return parser.parse_args()


def train_model(args):
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 128).unsqueeze(1)
    dataset = TensorDataset(x, 2 * x + 1 + 0.1 * torch.sin(20 * x))
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)

    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    # By default, Adasum doesn't need scaling up the learning rate
    lr_scaler = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr * lr_scaler)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, outputs in loader:
            optimizer.zero_grad()
            loss = ((model(inputs) - outputs) ** 2).mean()
            loss.backward()
            optimizer.step()
    mean = hvd.allreduce(loss.detach(), name="loss")
    if hvd.rank() == 0:
        print(f"final loss {mean.item():.6f}")
    return model


if __name__ == "__main__":
    hvd.init()
    model = train_model(parse_args())
