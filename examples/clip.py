"""CLIP: pictures and texts find each other among the whole batch. "# +": added by hvdtrain.

    horovodrun -np 2 python examples/clip.py

Each picture is compared with all texts of the global batch, so the loss is computed on what all ranks' models gave. The
learned temperature is a parameter of the loss.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils import data

import hvdtrain  # +
import hvdtrain.torch as hvt  # +

EPOCHS, BATCH = 3, 48

world = hvdtrain.init("torch")  # +
torch.manual_seed(0)
kinds = torch.arange(333) % 20
pictures = torch.rand(20, 64)[kinds] + 0.2 * torch.randn(333, 64)
texts = torch.randint(1, 50, (20, 6))[kinds]
texts[:, 5] = torch.randint(1, 50, (333,))


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.see = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
        self.read = nn.Sequential(nn.EmbeddingBag(50, 32), nn.Linear(32, 16))
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, picture, text):
        return normalize(self.see(picture), dim=1), normalize(self.read(text), dim=1)


model = CLIP()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
train = data.TensorDataset(pictures, texts)
loader = hvt.loader(train, BATCH // world.size, shuffle=False)  # + instead of: loader = data.DataLoader(train, BATCH)
model, optimizer = hvt.prepare(model, optimizer, loader)  # +

for epoch in loader.epochs(EPOCHS):  # + instead of: for epoch in range(EPOCHS):
    for picture, text in loader:
        optimizer.zero_grad()
        seen, read = model(picture, text)
        seen, read = hvt.whole(seen, read)  # +
        logits, own = model.scale.exp() * seen @ read.T, torch.arange(len(seen))
        loss = (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2
        optimizer.backward(loss)  # + instead of: loss.backward()
        optimizer.step()
    if world.is_main:  # + instead of: if True:
        print(f"epoch {epoch}: loss {loss:.4f}")
