"""An elastic script, started without elasticity: state that is committed, a sampler that knows what is done."""

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

hvd.init()
torch.manual_seed(3)

x = torch.randn(160, 6, generator=torch.Generator().manual_seed(8))
dataset = TensorDataset(x, x.sum(1, keepdim=True))
sampler = hvd.elastic.ElasticSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)

model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * hvd.size()


@hvd.elastic.run
def train(state):
    loss = torch.zeros(())
    for state.epoch in range(state.epoch, 2):
        for state.batch, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            state.sampler.record_batch(state.batch, loader.batch_size)
            if state.batch % 5 == 0:
                state.commit()
        state.sampler.set_epoch(state.epoch + 1)
        state.commit()
    return loss.detach()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)
state.register_reset_callbacks([on_state_reset])
loss = hvd.allreduce(train(state), name="loss")
if hvd.rank() == 0:
    print(f"final loss {loss.item():.6f}")
