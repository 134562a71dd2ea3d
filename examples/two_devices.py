"""The smallest split: two layers, each on a device of its own; by hand, and by `hvdtrain.pipeline.split`.

python examples/two_devices.py cuda:0 cuda:1

Read `TwoDevices` and `by_hand` first: that is all there is to model parallelism without a pipeline. The second device
waits while the first one works, and the other way round.
"""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hvdtrain.pipeline import split

UPDATES, SAMPLES, FEATURES, OUTPUTS, RATE = 10, 20, 10, 5, 0.1


class TwoDevices(nn.Module):
    """Two dense layers; each moves what it is given to its own device."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.devices = first, second
        self.layer1 = nn.Linear(FEATURES, FEATURES).to(first)
        self.layer2 = nn.Linear(FEATURES, OUTPUTS).to(second)

    def forward(self, x: Tensor) -> Tensor:
        """Takes [samples, 10] from any device; returns [samples, 5] on the second."""
        x = torch.relu(self.layer1(x.to(self.devices[0])))
        return self.layer2(x.to(self.devices[1]))


def by_hand(model: TwoDevices, data: Sequence[Sequence[Tensor]]) -> list[float]:
    """An update a batch; returns the losses. Labels go where the outputs are: there the loss is computed."""
    loss_of, optimizer = nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        outputs = model(x)
        loss = loss_of(outputs, y.to(outputs.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_split(model: nn.Module, data: Sequence[Sequence[Tensor]], devices: Sequence[str]) -> list[float]:
    """Trains like `by_hand` a model without device code: cut between its layers, a batch in two micro-batches."""
    pipe = split(model, data[0][0], list(devices), micro_batches=2)
    loss_of, optimizer = nn.MSELoss(), torch.optim.SGD(pipe.parameters(), lr=RATE)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        losses.append(pipe.step(x, y, loss_of).item())
        optimizer.step()
    return losses


def main() -> None:
    """Trains both in float64 from the same weights."""
    devices = sys.argv[1:]
    model = TwoDevices(*devices).double()
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, OUTPUTS)).double()
    model.load_state_dict(dict(zip(model.state_dict(), whole.state_dict().values(), strict=True)))
    shapes = [(SAMPLES, FEATURES), (SAMPLES, OUTPUTS)]
    data = [tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes) for _ in range(UPDATES)]
    losses = zip(by_hand(model, data), by_split(whole, data, devices), strict=True)
    print("update  loss by hand    by split")
    for update, (hand, cut) in enumerate(losses, 1):
        print(f"{update:<7} {hand:.12f}  {cut:.12f}")
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    apart = max(float((one.detach().cpu() - other.detach().cpu()).abs().max()) for one, other in pairs)
    print(f"after {UPDATES} updates weights differ by {apart:.1e}")


if __name__ == "__main__":
    main()
