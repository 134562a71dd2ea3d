"""A detector whose loss has two divisors: pictures, and objects. "# +": added by hvdtrain.

    horovodrun -np 2 python examples/detection.py

Whether there is an object in a cell is a mean over cells; where it is, a mean over the cells that have one, of which
each rank has another number: each mean is given with its own divisor. A picture's objects are a list.
"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, l1_loss
from torch.utils import data

import hvdtrain  # +
import hvdtrain.torch as hvt  # +

EPOCHS, BATCH = 3, 24

world = hvdtrain.init("torch")  # +
torch.manual_seed(0)


class Scenes(data.Dataset):
    """Pictures [1, 16, 16] with 0 to 3 bright spots; of each its cell of 4 x 4 and its brightness."""

    def __init__(self):
        self.pictures = 0.1 * torch.rand(170, 1, 16, 16)
        self.objects = [torch.randint(0, 4, (n, 2)) for n in torch.randint(0, 4, (170,))]
        for picture, cells in zip(self.pictures, self.objects, strict=True):
            for row, column in cells:
                picture[0, 4 * row + 1 : 4 * row + 3, 4 * column + 1 : 4 * column + 3] += torch.rand(())

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        return self.pictures[index], self.objects[index]


def collate(samples):
    return torch.stack([picture for picture, _ in samples]), [objects for _, objects in samples]


def targets_of(pictures, objects):
    """Of each cell: is there an object, and how bright is it?"""
    here = torch.zeros(len(pictures), 4, 4)
    for number, cells in enumerate(objects):
        here[number, cells[:, 0], cells[:, 1]] = 1
    return here, nn.functional.avg_pool2d(pictures, 4)[:, 0]


model = nn.Sequential(nn.Conv2d(1, 16, 4, stride=4), nn.ReLU(), nn.Conv2d(16, 2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
train = Scenes()
options = {"shuffle": False, "collate_fn": collate}
options = {"shuffle": False, "collate": collate}  # +
per_rank = BATCH // world.size  # +
loader = hvt.loader(train, per_rank, **options)  # + instead of: loader = data.DataLoader(train, BATCH, **options)
model, optimizer = hvt.prepare(model, optimizer, loader)  # +

for epoch in loader.epochs(EPOCHS):  # + instead of: for epoch in range(EPOCHS):
    for pictures, objects in loader:
        optimizer.zero_grad()
        here, bright = targets_of(pictures, objects)
        found = model(pictures)
        whether = binary_cross_entropy_with_logits(found[:, 0], here)
        where = l1_loss(found[:, 1][here > 0], bright[here > 0])
        optimizer.backward([(whether, here.numel()), (where, here.sum())])  # + instead of: (whether + where).backward()
        optimizer.step()
    if world.is_main:  # + instead of: if True:
        print(f"epoch {epoch}: loss {optimizer.record()['loss']:.4f}")  # + of all ranks; instead of: whether + where
