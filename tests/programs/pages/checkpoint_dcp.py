"""A checkpoint to DCP and back by PyTorch's own tools: docs/checkpoints.md."""

import torch

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.__main__ import main

hvdtrain.init("torch", engine="solo", device="cpu")
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
data = hvt.loader((torch.randn(24, 4), torch.arange(24) % 3), 8)
model, optimizer = hvt.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), data)
for x, y in data:
    optimizer.zero_grad()
    optimizer.backward(torch.nn.functional.cross_entropy(model(x), y))
    optimizer.step()
hvdtrain.Checkpointer("runs/a/checkpoints").save(hvt.model_state(model, optimizer), progress=optimizer.progress)
assert main(["checkpoint", "export", "runs/a", "--to", "torch", "exported"]) == 0
# the page
assert main(["checkpoint", "import", "theirs.pt", "--into", "runs/b"]) == 0
one, other = (torch.load(name, weights_only=True) for name in ("exported/checkpoint.pt", "theirs.pt"))
assert one.keys() == other.keys() == {"model", "optim", "hvdtrain"}
assert all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())
weights = {name: value.clone() for name, value in hvt.unwrap(model).state_dict().items()}
with torch.no_grad():
    model.weight.zero_()
progress = hvdtrain.Checkpointer("runs/b/checkpoints").restore(hvt.model_state(model, optimizer))
assert progress == optimizer.progress and progress.step == 3, progress
assert all(torch.equal(value, weights[name]) for name, value in hvt.unwrap(model).state_dict().items())
