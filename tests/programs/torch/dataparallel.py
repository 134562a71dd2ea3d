"""One process that cuts its batches into pieces; prints which cases passed."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from cases import refused
from passing import run_all
from torch import Tensor, nn

import hvdtrain
from hvdtrain.torch.engines.base import Pass, Transport
from hvdtrain.torch.engines.dataparallel import DataParallelEngine, piece_sizes


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Net(nn.Module):
    """Weights used twice, a buffer that the forward pass changes, and a record of the pieces it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.again = self.stem
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)
        self.head.weight = nn.Parameter(self.head.weight.detach())
        self.seen: list[int] = []

    def forward(self, x: Tensor, y: Tensor | None = None, *, options: Any = None) -> Any:
        self.seen.append(len(x))
        out = self.head(self.norm(self.again(x).tanh()))
        return out if y is None else (out - y).square().mean(1)


class Nested(nn.Module):
    def forward(self, given: dict[str, Any], flag: bool) -> Any:
        x, table = given["x"], given["table"]
        return {"pair": Pair(x * 2, x.sum(1)), "flag": flag, "list": [table.sum(), None][flag:], "od": OrderedDict(x=x)}


def bound_of(module: nn.Module, pieces: int) -> Any:
    engine = DataParallelEngine(name="dataparallel", pieces=pieces)
    parameters = list(module.parameters()) or [nn.Parameter(torch.zeros(1))]
    return engine.bind(module, torch.optim.SGD(parameters, lr=0.1), Transport())


def gap(samples: int, pieces: int, inside: bool) -> float:
    """The largest difference of loss and gradients to the whole batch at once, batch norm set to evaluation.

    Args:
        inside: the loss of each sample is computed in the model.
    """
    torch.manual_seed(1)
    net = Net().double()
    net.norm.eval()
    whole = copy.deepcopy(net)
    x, y = torch.randn(samples, 4).double(), torch.randn(samples, 3).double()
    bound = bound_of(net, pieces)
    loss = bound.call(x, y).mean() if inside else nn.functional.mse_loss(bound.call(x, options=[]), y)
    bound.backward(loss, Pass(reduce=True))
    expected = whole(x, y).mean()
    expected.backward()
    pairs = zip(net.parameters(), whole.parameters(), strict=True)
    assert net.seen == piece_sizes(samples, pieces), net.seen
    gaps = [(loss - expected).detach().abs(), *((a.grad - b.grad).abs().max() for a, b in pairs)]
    return float(torch.stack(gaps).max())  # not Python's max, which overlooks NaN


class Inside(nn.Module):
    """Returns a loss of its own making."""

    def __init__(self, loss_of: Any) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.loss_of = loss_of

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss_of(self.net(x), y)


CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.5]).double()
cross_entropy = nn.functional.cross_entropy
INSIDE = {
    "each sample's": lambda out, y: cross_entropy(out, y, reduction="none"),
    "each sample's, in a tuple": lambda out, y: (cross_entropy(out, y, CLASS_WEIGHTS, reduction="none"), None)[0],
    "ignored": cross_entropy,
    "a guard": lambda out, y: torch.nan_to_num(cross_entropy(out, y)),
    "a mean of one row": lambda out, y: cross_entropy(out, y).unsqueeze(0),
    "no gradient": lambda out, y: cross_entropy(out, y).detach(),
    "a count": lambda out, y: (cross_entropy(out, y, reduction="none"), (y >= 0).sum()),
    "samples": lambda out, y: (cross_entropy(out, y, reduction="none"), len(y)),
    "the samples as one": lambda out, y: out.mean(0),
    "a comparison": lambda out, y: cross_entropy(out @ out.T, torch.arange(len(y))),
}


def inside(loss_of: Any) -> Any:
    """The largest difference of gradients to the whole batch, of 2 pieces, the last without labels; or the refusal."""
    torch.manual_seed(4)
    net = Inside(loss_of).double()
    whole = copy.deepcopy(net)
    x, y = torch.randn(8, 4).double(), torch.tensor([0, 1, 2, 1, -100, -100, -100, -100])
    mean: Any = lambda loss: loss.sum() / (y >= 0).sum() if loss.dim() else loss  # noqa: E731
    try:
        mean(bound_of(net, 2).call(x, y)).backward()
    except hvdtrain.ConfigError as error:
        return str(error)
    mean(whole(x, y)).backward()
    gaps = [(a.grad - b.grad).abs().max() for a, b in zip(net.parameters(), whole.parameters(), strict=True)]
    return float(torch.stack(gaps).max())


def case_buffers_are_the_first_pieces() -> None:
    """Running statistics are those of the first piece; state dicts have no prefix; dropout repeats."""
    torch.manual_seed(2)
    net, first = Net(), Net()
    first.load_state_dict(net.state_dict())
    x = torch.randn(7, 4)
    bound_of(net, 2).call(x)
    first(x[:4])
    drop = nn.Dropout(0.5)
    calls = []
    for _ in range(2):
        torch.manual_seed(3)
        calls.append(bound_of(drop, 3).call(torch.ones(9, 5)))
    assert torch.equal(net.norm.running_mean, first.norm.running_mean) and int(net.norm.num_batches_tracked) == 1
    assert float(net.norm.running_mean.abs().max()) > 1e-3
    assert list(net.state_dict()) == list(first.state_dict())
    assert torch.equal(*calls) and 0 < float(calls[0].mean()) < 2


def case_nested_inputs_and_outputs() -> None:
    x = torch.arange(10.0).view(5, 2)
    out = bound_of(Nested(), 2).call({"x": x, "table": torch.ones(3)}, True)
    kinds = [type(out["pair"]).__name__, type(out["od"]).__name__, out["flag"], out["list"][0]]
    assert kinds == ["Pair", "OrderedDict", True, None]
    assert torch.equal(out["pair"].left, x * 2) and out["pair"].right.tolist() == [1.0, 5.0, 9.0, 13.0, 17.0]
    with refused("outputs must have one row per sample with engine='dataparallel'", kind=hvdtrain.ConfigError):
        bound_of(Strange(), 2).call(x)


class Strange(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return str(x.sum())


def case_pieces_give_the_whole_batchs_loss_and_gradients() -> None:
    for n, k, i in itertools.product((1, 2, 5, 8), (1, 2, 3, 4), (False, True)):
        assert gap(n, k, i) <= 1e-12, (n, k, i)


def case_of_a_loss_inside_the_model_only_that_of_each_sample_is_taken() -> None:
    for name, loss_of in INSIDE.items():
        found = inside(loss_of)
        if name.startswith("each sample's"):
            assert not isinstance(found, str) and found <= 1e-12, (name, found)
        else:
            assert "one row per sample" in str(found) and "reduction='none'" in found, (name, found)


def case_pieces_are_even_and_never_empty() -> None:
    assert [piece_sizes(*its) for its in ((10, 4), (3, 4), (8, 2))] == [[3, 3, 2, 2], [1, 1, 1], [4, 4]]


def case_how_many_pieces() -> None:
    pieces = []
    for gpus in (1, 3, 4):
        with hvdtrain.init("torch", engine="dataparallel", gpus_per_rank=gpus, seed=4) as world:
            pieces.append([world.engine, world.size, world.comm.pieces])
    assert pieces == [["dataparallel", 1, count] for count in (2, 3, 4)]


if __name__ == "__main__":
    run_all(globals())
