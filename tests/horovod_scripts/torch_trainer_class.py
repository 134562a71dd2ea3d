"""A trainer class, as projects write them: everything of Horovod's inside, two groups of parameters, early stopping."""

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, train_set, valid_set, lr=0.01, batch_size=16, patience=2):
        hvd.init()
        self.model = model
        self.criterion = nn.CrossEntropyLoss()
        self.patience, self.best, self.bad_epochs = patience, float("inf"), 0
        self.train_sampler = self._sampler(train_set, shuffle=True)
        self.train_loader = DataLoader(train_set, batch_size=batch_size, sampler=self.train_sampler, num_workers=0)
        self.valid_loader = DataLoader(valid_set, batch_size=batch_size, sampler=self._sampler(valid_set))
        self.optimizer = self.configure_optimizer(lr)

    @staticmethod
    def _sampler(dataset, shuffle=False):
        return DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=shuffle)

    def configure_optimizer(self, lr):
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=lr * hvd.size(), momentum=0.9)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return hvd.DistributedOptimizer(optimizer, named_parameters=self.model.named_parameters())

    def training_step(self, batch):
        inputs, labels = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(inputs), labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def validate(self):
        self.model.eval()
        with torch.no_grad():
            losses = [self.criterion(self.model(inputs), labels) for inputs, labels in self.valid_loader]
        self.model.train()
        return hvd.allreduce(torch.stack(losses).mean(), name="valid_loss").item()

    def fit(self, epochs):
        for epoch in range(epochs):
            self.train_sampler.set_epoch(epoch)
            for batch in self.train_loader:
                self.training_step(batch)
            loss = self.validate()  # the same on all ranks, so that they stop together
            self.bad_epochs = 0 if loss < self.best else self.bad_epochs + 1
            self.best = min(self.best, loss)
            if self.bad_epochs >= self.patience:
                break
        return loss


def main():
    torch.manual_seed(99)
    x = torch.randn(300, 18)
    y = (x @ torch.randn(18, 6)).argmax(1)
    train_set, valid_set = random_split(TensorDataset(x, y), [240, 60])
    model = nn.Sequential(nn.Linear(18, 30), nn.ReLU(), nn.Linear(30, 6))
    loss = Trainer(model, train_set, valid_set).fit(epochs=2)
    if hvd.rank() == 0:
        print(f"final loss {loss:.6f}")
    return model


if __name__ == "__main__":
    model = main()
