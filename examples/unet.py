"""A U-Net on masks with pixels that nobody labelled (255). "# +": added by hvdtrain.

    horovodrun -np 2 python examples/unet.py

The loss is a mean over labelled pixels, of which each rank has another number, and one minus dice of the whole batch, a
ratio of sums over all ranks' pixels.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils import data

import hvdtrain  # +
import hvdtrain.torch as hvt  # +

EPOCHS, BATCH, UNLABELLED = 2, 16, 255

world = hvdtrain.init("torch")  # +
torch.manual_seed(0)
images = torch.rand(90, 1, 16, 16)
masks = (images[:, 0] > 0.5).long() + (images[:, 0] > 0.9).long()
masks[torch.rand(90, 16, 16) < torch.rand(90, 1, 1)] = UNLABELLED


def convs(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.bottom, self.up = convs(1, 8), convs(8, 16), convs(24, 8)
        self.pool, self.grow, self.out = nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.Conv2d(8, 3, 1)

    def forward(self, x):
        fine = self.down(x)
        coarse = self.bottom(self.pool(fine))
        return self.out(self.up(torch.cat([fine, self.grow(coarse)], 1)))


def dice_loss(outputs, labels):
    known = (labels != UNLABELLED)[:, None]
    here = one_hot(labels.clamp(max=2), 3).permute(0, 3, 1, 2) * known
    found = outputs.softmax(1) * known
    return 1 - (2 * (found * here).sum() + 1) / (found.sum() + here.sum() + 1)


model = UNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train = data.TensorDataset(images, masks)
loader = hvt.loader(train, BATCH // world.size, shuffle=False)  # + instead of: loader = data.DataLoader(train, BATCH)
model, optimizer = hvt.prepare(model, optimizer, loader)  # +

for epoch in loader.epochs(EPOCHS):  # + instead of: for epoch in range(EPOCHS):
    for pictures, labels in loader:
        optimizer.zero_grad()
        outputs = model(pictures)
        outputs, labels = hvt.whole(outputs, labels)  # +
        loss = cross_entropy(outputs, labels, ignore_index=UNLABELLED) + dice_loss(outputs, labels)
        optimizer.backward(loss)  # + instead of: loss.backward()
        optimizer.step()
    if world.is_main:  # + instead of: if True:
        print(f"epoch {epoch}: loss {loss:.4f}")
