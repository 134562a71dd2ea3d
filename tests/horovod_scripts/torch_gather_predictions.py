"""Each rank predicts its share of the test set; predictions are gathered, and rank 0 judges them."""

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_data():
    generator = torch.Generator().manual_seed(21)
    x = torch.randn(203, 14, generator=generator)  # does not divide evenly
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def evaluate(model, data):
    model.eval()
    shard = Subset(data, range(hvd.rank(), len(data), hvd.size()))
    outputs, wanted = [], []
    with torch.no_grad():
        for x, y in DataLoader(shard, batch_size=32):
            outputs.append(model(x))
            wanted.append(y)
    outputs = hvd.allgather(torch.cat(outputs), name="outputs")
    wanted = hvd.allgather(torch.cat(wanted), name="wanted")
    counts = hvd.allgather_object(len(shard), name="counts")
    assert sum(counts) == len(data) == len(outputs)
    return nn.functional.cross_entropy(outputs, wanted).item()


def main():
    hvd.init()
    torch.manual_seed(1234)
    dataset = make_data()
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), drop_last=True)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler)
    model = nn.Sequential(nn.Linear(14, 24), nn.ReLU(), nn.Linear(24, 2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3 * hvd.size()), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(2):
        model.train()
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        loss = evaluate(model, dataset)
    if hvd.rank() == 0:
        print(f"final loss {loss:.6f}")
    return model


if __name__ == "__main__":
    model = main()
