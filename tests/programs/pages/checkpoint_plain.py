"""A checkpoint's files in plain PyTorch, and a plain training state in hvdtrain: docs/checkpoints.md."""

import torch

import hvdtrain
import hvdtrain.torch as hvt


def made() -> tuple[torch.nn.Module, torch.optim.AdamW]:
    model = torch.nn.Linear(4, 3)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def trained(model, optimizer) -> None:
    for x, y in data:
        optimizer.zero_grad()
        optimizer.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()


hvdtrain.init("torch", engine="solo", device="cpu")
torch.manual_seed(0)
data = hvt.loader((torch.randn(24, 4), torch.arange(24) % 3), 8, shuffle=False)
ours = hvt.prepare(*made(), data)
trained(*ours)
hvdtrain.Checkpointer("runs/a/checkpoints").save(hvt.model_state(*ours), progress=ours[1].progress)
model, optimizer = made()
# the page
assert all(torch.equal(value, ours[0].state_dict()[name]) for name, value in model.state_dict().items())
assert optimizer.state_dict()["state"][0]["step"] == 3
theirs = hvt.prepare(model, optimizer, data)
trained(*ours)
trained(*theirs)
assert all(map(torch.equal, ours[0].state_dict().values(), model.state_dict().values()))
