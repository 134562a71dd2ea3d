"""Several backward passes an update, the loss divided by their number, as Horovod's ImageNet example does."""

import math

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCHES_PER_ALLREDUCE = 2
BATCH_SIZE = 8
BASE_LR = 0.0125


def main():
    hvd.init()
    torch.manual_seed(1)
    allreduce_batch_size = BATCH_SIZE * BATCHES_PER_ALLREDUCE

    generator = torch.Generator().manual_seed(3)
    x = torch.randn(256, 30, generator=generator)
    y = (x @ torch.randn(30, 10, generator=generator)).argmax(1)
    train_dataset = TensorDataset(x, y)
    train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_dataset, batch_size=allreduce_batch_size, sampler=train_sampler)

    model = nn.Sequential(nn.Linear(30, 24), nn.ReLU(), nn.Linear(24, 10))
    lr_scaler = BATCHES_PER_ALLREDUCE * hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=BASE_LR * lr_scaler, momentum=0.9, weight_decay=5e-5)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=BATCHES_PER_ALLREDUCE,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    total = 0.0
    for epoch in range(2):
        model.train()
        train_sampler.set_epoch(epoch)
        total = 0.0
        for data, target in train_loader:
            optimizer.zero_grad()
            # Split data into sub-batches of size batch_size
            for i in range(0, len(data), BATCH_SIZE):
                data_batch = data[i : i + BATCH_SIZE]
                target_batch = target[i : i + BATCH_SIZE]
                output = model(data_batch)
                loss = F.cross_entropy(output, target_batch)
                total += loss.item() / len(train_loader) / BATCHES_PER_ALLREDUCE
                # Average gradients among sub-batches
                loss.div_(math.ceil(float(len(data)) / BATCH_SIZE))
                loss.backward()
            # Gradient is applied across all ranks
            optimizer.step()
    total = hvd.allreduce(torch.tensor(total), name="train_loss").item()
    if hvd.rank() == 0:
        print(f"final loss {total:.6f}")
    return model


if __name__ == "__main__":
    model = main()
