"""Trains two epochs, or resumes, counting epochs as it is told: FOLDER first|range|epochs; prints where it is."""

import sys

import torch

import hvdtrain
import hvdtrain.torch as hvt

folder, way = sys.argv[1:]
with hvdtrain.init("torch") as world:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).long()
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = hvt.loader((x, y), per_rank_batch=512)  # more than there is: the rate is that of 24 samples
    model, optimizer = hvt.prepare(model, optimizer, train, lr=hvdtrain.LR(base=0.1, reference_batch=12))
    checkpoints = hvdtrain.Checkpointer(folder, best=None)
    restored = checkpoints.restore(hvt.model_state(model, optimizer, train)) is not None
    for _ in train.epochs(4 if restored else 2) if way in ("first", "epochs") else range(2):
        for a, b in train:
            optimizer.zero_grad()
            optimizer.backward(torch.nn.functional.cross_entropy(model(a), b))
            optimizer.step()
        checkpoints.save(hvt.model_state(model, optimizer, train), progress=optimizer.progress)
    print("restored", restored, "epoch", optimizer.progress.epoch, "rate", optimizer.param_groups[0]["lr"])
