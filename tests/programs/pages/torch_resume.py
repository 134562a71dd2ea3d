"""A PyTorch loop that saves and resumes: docs/how-resume.md."""

import torch

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.datasets import load_digits

digits = load_digits()
pictures, test_pictures = (torch.from_numpy(x[:, :1]).float() / 255 for x in (digits.x_train, digits.x_test))
labels, test_labels = (torch.from_numpy(y).long() for y in (digits.y_train, digits.y_test))
validation = (test_pictures, test_labels)
loss_of = torch.nn.CrossEntropyLoss()
hvdtrain.init("torch")
model: torch.nn.Module = torch.nn.Sequential(torch.nn.AvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
train = hvt.loader((pictures, labels), per_rank_batch=32)
model, optimizer = hvt.prepare(model, optimizer, train)
# the page
assert progress is None, "nothing to resume"
again = checkpoints.restore(state)
assert again.epoch == 3 and again.samples_seen == 3 * len(labels), again
assert checkpoints.best().metrics["top1"] >= checkpoints.latest().metrics["top1"]
