"""Models that are hard to cut; each with the arguments it takes. float64, so that a wrong gradient is seen."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {}
BATCH, WIDTH = 6, 8


def case(*arguments: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Enters a model under its name; arguments besides x."""

    def enter(cls: type[nn.Module]) -> type[nn.Module]:
        CASES[cls.__name__] = lambda: (cls(), (torch.randn(BATCH, WIDTH), *arguments))
        return cls

    return enter


class Base(nn.Module):
    """Four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))


class TwoLayers(nn.Module):
    """A part that is worth a cut: it is opened if it can be."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def both(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


@case()
class TwoCross(Base):
    def forward(self, x: Tensor) -> Tensor:
        left, right = self.a(x), self.b(x * 2)
        left, right = self.c(left) + right, self.d(right) * left
        return left - right


@case()
class Tied(nn.Module):
    """The last layer's weight is the first one's, and in the middle it is used as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(torch.tanh(self.first(x))) @ self.first.weight
        return self.last(torch.tanh(x))


@case()
class UsedTwice(Base):
    """One layer at both ends, with what is inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(self.block(x[:, None]))
        return self.b(self.block(x)).squeeze(1)


@case()
class SharedNorm(Base):
    """Batch norm used twice: both uses are of one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.b(self.norm(self.a(x))))
        return self.d(self.c(x))


@case()
class Constants(Base):
    """A buffer that every layer uses, a tensor that is none, and a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.shift = torch.linspace(-1, 1, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c, self.d):
            x = layer(x) * self.scale + self.shift * self.gain
        return x


@case()
class Made(Base):
    """Tensors made by the forward itself, in the size of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) + torch.arange(x.shape[0], dtype=x.dtype)[:, None]
        x = self.b(x) * torch.ones(len(x), 1, dtype=x.dtype)
        return nn.Softmax(dim=1)(self.c(x)) + self.d(x).new_zeros(())


@case()
class InPlace(Base):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.a(x))
        y = self.b(x)
        y += x
        y = self.relu(y)
        z = self.c(y).clone()
        z[:, 0] = y[:, 1]
        z.mul_(2)
        return self.d(z)


@case()
class View(Base):
    """A view is changed in place after the layer in between: no cut there."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        part = h[:, :4]
        y = self.b(x)
        part.mul_(2)
        return self.c(h) + self.d(y)


@case()
class Frozen(Base):
    """A part without gradients, by no_grad and by requires_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.b.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.a(x)
        return self.c(self.b(y)) + self.d(x)


class Cube(torch.autograd.Function):
    """Its backward is on purpose not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 7


@case()
class OwnBackward(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(Cube.apply(self.a(x)))


class Reentrant(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.both, x, use_reentrant=True)


@case()
class Checkpointed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.middle = Reentrant()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(self.a(x)))


class OnlyInTraining(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.both(x)
        return x * 3 if self.training else x


class OtherWire(TwoLayers):
    """The same operations in both modes, on different values."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.both(x)
        y, z = torch.tanh(x), torch.sigmoid(x)
        return (y if self.training else z) * 2


@case()
class ModeBelow(Base):
    def __init__(self) -> None:
        super().__init__()
        self.only, self.wire = OnlyInTraining(), OtherWire()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.wire(self.b(self.only(self.a(x)))))


class ByData(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.both(x) if x.sum() > 0 else self.both(-x)


class ByPython(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.both(x) if random.random() < 2 else x


class Counts(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.both(x)


class Remembers(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.detach()
        return self.both(x)


class OneLayer(nn.Module):
    """As all of these, but nothing in it is worth a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += random.random() < 2
        return self.inner(x) if x.sum() > 0 else self.inner(-x)


@case()
class Leaves(Base):
    """Submodules that a trace would get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.data, self.python, self.counts, self.remembers = ByData(), ByPython(), Counts(), Remembers()
        self.small = OneLayer()

    def forward(self, x: Tensor) -> Tensor:
        return self.small(self.remembers(self.counts(self.b(self.python(self.a(self.data(x)))))))


@case()
class OrderedOut(Base):
    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        return collections.OrderedDict([("out", self.b(x)), ("aux", self.c(x))])


@case(None, True)
class FixedArguments(Base):
    def forward(self, x: Tensor, mask: Tensor | None = None, double: bool = False, power: int = 2) -> Tensor:
        x = self.a(x) if mask is None else self.a(x) * mask
        return self.b(x * 2) ** power if double else self.c(x)


@case()
class Draws(Base):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.drop(self.a(x)))
        return self.d(self.c(x) + torch.rand(x.shape[0], 1, dtype=x.dtype))


def encoder(**options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)


@case()
class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(2, dtype=torch.float64)
        x = torch.stack([x, x * 2], dim=1)
        return self.encoder(self.encoder(x), mask=mask, is_causal=True)


class Typed(TwoLayers):
    """Asks what it is given; a stand-in is not a tensor."""

    def forward(self, x: Any) -> Tensor:
        return self.both(x) if type(x) is Tensor else x


@case()
class AsksForTypes(Base):
    def __init__(self) -> None:
        super().__init__()
        self.typed, self.block = Typed(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.block(self.typed(self.a(x))))


class Hooked(Base):
    """A hook of a submodule is called each time."""

    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.b(self.a(x)))


CASES["Hooked"] = lambda: (Hooked(), (torch.randn(BATCH, WIDTH),))


# -- models that are refused -----------------------------------------------------------------------------------------
class ModeAtRoot(Base):
    """As GoogLeNet: another output in training."""

    def forward(self, x: Tensor) -> Any:
        x = self.b(self.a(x))
        return (x, self.c(x)) if self.training else x


class DataAtRoot(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.sum() > 0:
            x = self.b(x)
        return self.c(x)


class AutocastAtRoot(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.b(self.a(x))


class Fickle(Base):
    """Another result each time: a trace cannot know."""

    def __init__(self) -> None:
        super().__init__()
        self.times = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.times[0] += 1
        return self.b(self.a(x) * self.times[0])
