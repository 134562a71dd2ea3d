"""An exponential moving average of the weights, kept in the checkpoint and evaluated. "# +": added by hvdtrain.

horovodrun -np 2 python examples/ema.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import data

import hvdtrain  # +
import hvdtrain.torch as hvt  # +

EPOCHS, BATCH = 3, 64

world = hvdtrain.init("torch")  # +
torch.manual_seed(0)
y = torch.arange(1600) % 10
x = torch.rand(10, 64)[y] + 0.5 * torch.randn(1600, 64)  # ten classes of 8x8 pictures
train = data.TensorDataset(x[:1500], y[:1500])
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = hvt.loader(train, BATCH // world.size, shuffle=False)  # + instead of: loader = data.DataLoader(train, BATCH)
model, optimizer = hvt.prepare(model, optimizer, loader)  # +
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))  # of a plain copy: the same on every rank
state = hvt.model_state(model, optimizer, extra={"ema": ema})  # + for hvdtrain.Checkpointer's save and restore

for epoch in loader.epochs(EPOCHS):  # + instead of: for epoch in range(EPOCHS):
    for pictures, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(pictures), labels)
        optimizer.backward(loss)  # + instead of: loss.backward()
        optimizer.step()
        ema.update_parameters(model)
    held_out = data.TensorDataset(x[1500:], y[1500:])
    scores = hvt.evaluate(ema, held_out, hvt.classification(top=(1,)), per_rank_batch=50)  # +
    if world.is_main:  # +
        print(f"epoch {epoch}: loss {loss:.4f}, averaged weights: top-1 {scores['top1']:.4f}")  # +
