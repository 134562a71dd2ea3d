"""What split() refuses, and what it can be told; prints a JSON line a case."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from split_cases import compared_stages, difference
from split_models import BATCH, WIDTH, AutocastAtRoot, Base, DataAtRoot, Fickle, ModeAtRoot, SharedNorm, TwoCross
from torch import nn

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline import split, splitting
from hvdtrain.pipeline.run import stage as _stage
from hvdtrain.pipeline.run.stage import Copies, build_stages
from hvdtrain.pipeline.trace.segments import from_modules, segments

torch.set_num_threads(2)
X = torch.randn(BATCH, WIDTH, dtype=torch.float64)
CASES: dict[str, Callable[[], Any]] = {}


def case(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def enter(function: Callable[[], Any]) -> Callable[[], Any]:
        CASES[name] = function
        return function

    return enter


def chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers) if layers else nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def refused(**options: Any) -> dict[str, Any]:
    """The error of a split; nothing may have happened to the model before it."""
    model = options.pop("model", None) or chain()
    example, devices = options.pop("example", X), options.pop("devices", "cpu,cpu")
    options = {"balance": [2, 2], "micro_batches": 2} | options
    before = [(id(p), p.data_ptr(), p.grad) for p in model.parameters()]
    moves: list[Any] = []
    original, splitting.build_stages = splitting.build_stages, lambda *args: moves.append(args)
    try:
        split(model, example, devices, **options)
    except ConfigError as error:
        same = before == [(id(p), p.data_ptr(), p.grad) for p in model.parameters()]
        return {"error": str(error), "untouched": same and not moves}
    finally:
        splitting.build_stages = original
    return {"error": ""}


REFUSED: dict[str, Callable[[], dict[str, Any]]] = {
    "more stages than segments": lambda: refused(devices=["cpu"] * 5, balance="time"),
    "no such GPU": lambda: refused(devices="cpu,cuda:3"),
    "no such device": lambda: refused(devices=["cpu", "tpu:0"]),
    "a balance that does not sum up": lambda: refused(balance=[1, 2]),
    "an unknown balance": lambda: refused(balance="speed"),
    "more micro-batches than samples": lambda: refused(micro_batches=BATCH + 1),
    "another forward in training": lambda: refused(model=ModeAtRoot()),
    "a model on the meta device": lambda: refused(model=chain().to("meta")),
    "control flow that depends on the data": lambda: refused(model=DataAtRoot()),
    "autocast in the forward": lambda: refused(model=AutocastAtRoot()),
    "another result each time": lambda: refused(model=Fickle()),
    "an example that the model does not take": lambda: refused(example=torch.randn(BATCH, 3)),
    "a hook on the model": lambda: refused(model=hooked()),
    "a model in DataParallel": lambda: refused(model=nn.DataParallel(chain())),
    "parts that are not the model's": lambda: refused(modules=[nn.Linear(WIDTH, WIDTH)] * 2),
    "parts that are not there": lambda: refused(modules=["0", "1", "2", "9"]),
    "parts in another order": lambda: refused(modules=["1", "0", "2", "3"]),
    "batch norm in two stages by hand": lambda: build_refused(),
}


def hooked() -> nn.Module:
    model = chain()
    model.register_forward_hook(lambda module, args, output: output)
    return model


def build_refused() -> dict[str, Any]:
    model = SharedNorm()
    parts = from_modules(["a", "norm", "b", "norm", "c", "d"], model, X)
    try:
        build_stages(model, parts, [3, 3], ["cpu", "cpu"])
    except ConfigError as error:
        return {"error": str(error), "untouched": True}
    return {"error": ""}


@case("by hand")
def by_hand() -> Any:
    """Parts of a model that cannot be traced; an activation after a cut works in place."""

    class Data(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.a(x))
            return self.d(self.c(self.b(x))) if x.sum() > -1 else x

    model = Data()
    parts = from_modules(["a", nn.ReLU(inplace=True), "b", model.c, "d"], model, X)
    outcome = compared_stages(model, parts, (X,))
    return {"difference": outcome, "mutates": [p.mutates for p in parts], "names": [p.name for p in parts]}


@case("arguments in a tuple, fixed ones checked")
def fixed() -> Any:
    class Flag(Base):
        def forward(self, x: torch.Tensor, double: bool) -> torch.Tensor:
            return self.b(self.a(x) * (2 if double else 1))

    model = Flag()
    wanted = model(X, True)
    pipe = split(model, (X, True), "cpu,cpu", balance="memory", micro_batches=1)
    try:
        pipe.eval()(X, False)
    except ConfigError as error:
        return {"error": str(error), "same": difference(wanted, pipe(X, True))}
    return {"error": ""}


@case("attributes on a device")
def attributes() -> Any:
    """A part that is called takes its plain tensors, and the device that it names, along to its stage."""

    class Bound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.table, self.device = nn.Linear(WIDTH, WIDTH), torch.ones(WIDTH), torch.device("cpu")
            self.forward = self.shifted  # type: ignore[method-assign]

        def shifted(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.table + torch.zeros(1, device=self.device)

    def places(part: Any) -> list[str]:
        return [str(part.device), part.table.device.type]

    model = nn.Sequential(Bound(), Bound(), Bound())
    model[2].linear.weight = model[0].linear.weight
    parts = segments(model, X)
    copies = Copies(parts[0].chain, torch.device("meta"))
    measured = [copies.bind(node)[0] for node in parts[0].chain.used(0, 1)][0]
    before = [places(part) for part in model]
    with mock.patch.object(_stage, "_place"):  # weights cannot go to the meta device in place
        stages = build_stages(model, parts, [1, 1, 1], ["cpu", "meta", "meta"])
    twin = next(iter(stages[2].modules()))
    twin.device = None
    stages[2]._objects.proxies.clear()  # nor can their values
    stages[2].refresh()
    return {"measured": places(measured), "before": before, "after": [places(part) for part in model],
            "twin": places(twin), "is_twin": twin is not model[2] and twin.forward.__self__ is twin}  # fmt: skip


@case("memory")
def memory() -> Any:
    """The widest layers are the last: by bytes they are alone."""
    model = chain(*(nn.Linear(64, 64) for _ in range(6)), nn.Linear(64, 2048), nn.Linear(2048, 64))
    pipe = split(model, torch.randn(8, 64), "cpu,cpu", micro_batches=2, balance="memory")
    return {"sizes": [len(stage.segments) for stage in pipe.stages]}


@case("time")
def by_time() -> Any:
    """The first layer takes nearly all of the time, and gets a stage of its own."""
    model = chain(nn.Linear(512, 512), *(nn.Linear(512, 1) if i == 0 else nn.Linear(1, 1) for i in range(5)))
    names = list(model.state_dict())
    pipe = split(model, torch.randn(512, 512), ["cpu", torch.device("cpu")])
    y = pipe.step(torch.randn(512, 512), torch.zeros(512, 1), nn.MSELoss())
    return {
        "sizes": [len(stage.segments) for stage in pipe.stages],
        "micro_batches": pipe.micro_batches,
        "finite": bool(torch.isfinite(y)),
        "names": list(pipe.state_dict()) == names,
        "segments": len(pipe.segments),
    }


@case("by the number of segments")
def given() -> Any:
    return told(split(TwoCross(), X, "cpu,cpu", micro_batches=3, balance=[1, 3]))


@case("one device")
def one() -> Any:
    return told(split(TwoCross(), X, "cpu"))


def told(pipe: Any) -> dict[str, Any]:
    sizes = [len(stage.segments) for stage in pipe.stages]
    return {"sizes": sizes, "micro_batches": pipe.micro_batches}


def main() -> None:
    torch.set_default_dtype(torch.float64)
    for name in sys.argv[1:] or [*REFUSED, *CASES]:
        try:
            found = REFUSED[name]() if name in REFUSED else CASES[name]()
        except Exception:
            found = {"failed": traceback.format_exc()}
        print(json.dumps({"case": name, **found}), flush=True)


if __name__ == "__main__":
    main()
