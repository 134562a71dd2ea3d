"""A loss of the whole batch that keeps its outputs in a buffer, changes them, and draws: against one process."""

from __future__ import annotations

import sys

import torch
from cases import plainly, report, windows
from torch import Tensor, nn

import hvdtrain
import hvdtrain.torch as hvt

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(32.0, dtype=torch.float64)
UPDATE, BATCHES = 8, 2


class Banked(nn.Module):
    """[n, 4] to [n, 3]; the last outputs are kept as negatives."""

    bank: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("bank", torch.zeros(UPDATE + 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def loss(self, out: Tensor, y: Tensor, *, draws: bool) -> Tensor:
        against = torch.cat([out.detach(), self.bank])
        with torch.no_grad():
            self.bank.copy_(against[: len(self.bank)])
        out.mul_(torch.rand(out.shape) if draws else 2.0)  # in place, as of any output
        return (out @ against.T).logsumexp(1).mean() + 0.01 * (out.sum(1) * y).mean()


def one_process(*, draws: bool) -> Banked:
    torch.manual_seed(0)
    model = Banked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(7)
    plainly(model, optimizer, windows(UPDATE, X, Y, epochs=2), lambda model, x, y: model.loss(model(x), y, draws=draws))
    return model


def main() -> None:
    torch.set_default_dtype(torch.float64)
    with hvdtrain.init("torch") as world:
        draws = world.size == 1  # ranks draw for the whole batch by a seed of the update
        torch.manual_seed(0)
        plain = Banked()
        data = hvt.loader((X, Y), UPDATE // BATCHES // world.size, shuffle=False)
        model, optimizer = hvt.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1), data, accumulate=BATCHES)
        torch.manual_seed(7)
        for _ in data.epochs(2):
            for x, y in data:
                optimizer.zero_grad()
                optimizer.forward_backward(x, y, lambda out, every: plain.loss(out, every, draws=draws), whole=True)
                optimizer.step()
        wanted = one_process(draws=draws).state_dict()
        found = {name: float((its - wanted[name]).abs().max()) for name, its in plain.state_dict().items()}
        report(world, found, sys.argv[1])


if __name__ == "__main__":
    main()
