"""What a pipeline does besides the right sums: one line of JSON for each check, named after its function."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from ending_threads import threads_left
from torch import Tensor, nn

import hvdtrain.pipeline
from hvdtrain.pipeline.plan.schedule import actions
from hvdtrain.pipeline.run import passes as _passes
from hvdtrain.pipeline.run.runtime import Pipeline, StageError

MSE = nn.MSELoss()
X, Y = torch.randn(12, 16), torch.randn(12, 4)


class Block(nn.Module):
    """Has a hook in it, so that a test can look, or raise, in the middle of a stage."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(dropout)
        self.hook: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.hook is not None:
            self.hook(x)
        return self.drop(torch.tanh(self.linear(x)))


def model(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[Block(dropout=dropout) for _ in range(4)], nn.Linear(16, 4))


def split(net: nn.Sequential, balance: Sequence[int], **options: Any) -> Pipeline:
    """By hand: the blocks stay whole, so that their hooks are called."""
    cpus = ["cpu"] * len(balance)
    pipe = hvdtrain.pipeline.split(net, X, cpus, balance=list(balance), modules=list(net), **options)
    pipe.proofs = False  # hooks here count passes
    return pipe


def gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def message(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def draws() -> dict[str, Any]:
    """Dropout: the same numbers for every cut, schedule and recomputation; for one micro-batch the unsplit model's."""

    def one(balance: Sequence[int], seed: int = 5, **options: Any) -> list[Tensor]:
        net = model(0.5).train()
        pipe = split(net, balance, **options)
        torch.manual_seed(seed)
        pipe.step(X, Y, MSE)
        return [*gradients(net), torch.get_rng_state()]

    def same(a: list[Tensor], b: list[Tensor]) -> bool:
        return all(torch.equal(p, q) for p, q in zip(a[-1:], b[-1:], strict=True)) and all(
            torch.allclose(p, q, atol=1e-6) for p, q in zip(a[:-1], b[:-1], strict=True)
        )

    ways = [
        ([5], {}), ([2, 3], {}), ([1, 2, 2], {"schedule": "gpipe"}), ([2, 3], {"remat": "all"}),
        ([2, 1, 1, 1], {"remat": "except_last", "schedule": "gpipe"}),
    ]  # fmt: skip
    several = [one(balance, micro_batches=4, **options) for balance, options in ways]
    alone = [one(balance, micro_batches=1, **options) for balance, options in ways]
    net = model(0.5).train()
    torch.manual_seed(5)
    MSE(net(X), Y).backward()
    plain = [*gradients(net), torch.get_rng_state()]
    return {
        "several": all(same(several[0], other) for other in several),
        "alone": all(same(plain, other) for other in alone),
        "another_seed_differs": not same(several[0], one([2, 3], seed=6, micro_batches=4)),
    }


def raising() -> dict[str, Any]:
    """A stage that raises: named, no thread left, memory freed, gradients as before; the next step works."""
    net = model().train()
    pipe = split(net, [2, 2, 1], micro_batches=3)
    pipe.step(X, Y, MSE)
    earlier = gradients(net)
    alive: list[weakref.ref[Tensor]] = []
    net[2].hook = lambda x: alive.append(weakref.ref(x))

    def bad(x: Tensor) -> None:
        alive.append(weakref.ref(x))
        if len(alive) > 3:
            raise ValueError("spoilt on purpose")

    net[3].hook = bad
    text, kept = "", None
    try:
        pipe.step(X, Y, MSE)
    except StageError as error:
        text, kept = str(error), error  # who keeps the error does not keep the activations
    gc.collect()
    found = {
        "text": text,
        "cause": type(kept.__cause__).__name__ if kept else "",
        "threads": threads_left(),
        "alive": sum(reference() is not None for reference in alive),
        "looked_at": len(alive),
        "gradients": all(torch.equal(a, b) for a, b in zip(gradients(net), earlier, strict=True)),
    }
    net[2].hook = net[3].hook = None
    return found | {"next_step": float(pipe.step(X, Y, MSE)) > 0}


def backward_raising() -> dict[str, Any]:
    net = model().train()
    pipe = split(net, [3, 2], micro_batches=4)

    def bad(gradient: Tensor) -> None:
        raise ValueError("spoilt on the way back")

    handle = net[1].linear.weight.register_hook(bad)
    text = message(lambda: pipe.step(X, Y, MSE))
    handle.remove()
    return {"text": text, "threads": threads_left(), "gradients": len(gradients(net))}


def interrupted() -> dict[str, Any]:
    """Ctrl-C in the middle of a stage's work."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found: dict[str, Any] = {}
    for balance in ([5], [2, 3]):
        net = model().train()
        pipe = split(net, balance, micro_batches=4)
        calls = itertools.count()
        net[3].hook = lambda x, calls=calls: os.kill(os.getpid(), signal.SIGINT) if next(calls) == 1 else None
        raised = ""
        try:
            pipe.step(X, Y, MSE)
        except KeyboardInterrupt:
            raised = "KeyboardInterrupt"
        net[3].hook = None
        found[f"stages_{len(balance)}"] = [raised, threads_left(), len(gradients(net))]
        pipe.step(X, Y, MSE)
        del pipe
    try:
        hvdtrain.pipeline.split(nn.Sequential(*model(), Pressed()), X, "cpu,cpu", micro_batches=2, balance=[3, 3])
    except KeyboardInterrupt:
        found["split"] = len(PRESSED)
    return found


PRESSED: list[int] = []


class Pressed(nn.Module):
    """Ctrl-C in its first pass; notes every pass that goes to its end."""

    def forward(self, x: Tensor) -> Tensor:
        if not PRESSED:
            PRESSED.append(0)
            os.kill(os.getpid(), signal.SIGINT)
        PRESSED.append(len(PRESSED))
        return x


def refusals() -> dict[str, Any]:
    net = model().train()
    pipe = split(net, [2, 3], micro_batches=4)
    other = split(model().train(), [2, 3], micro_batches=4)
    return {
        "empty": message(lambda: pipe.step(X[:0], Y[:0], MSE)),
        "targets": message(lambda: pipe.step(X, Y[:5], MSE)),
        "loss": message(lambda: pipe.step(X, Y, nn.MSELoss(reduction="none"))),
        "closed": message(lambda: pipe.step(X, Y, lambda out, y: pipe.close() or MSE(out, y))),
        "nested": message(lambda: pipe.step(X, Y, lambda out, y: other.step(X, Y, MSE) and MSE(out, y))),
        "detached": message(lambda: pipe.step(X, Y, lambda out, y: MSE(out.detach(), y))),
        "no_tensor": message(lambda: pipe.step("x", Y, MSE)),
        "forward": message(lambda: pipe(X)),
        "no_grad": message(lambda: _under_no_grad(lambda: pipe.step(X, Y, MSE))),
        "moved": message(lambda: pipe.double()),
        "part": message(lambda: setattr(pipe, "head", nn.Linear(2, 2))),
        "micro_batches": message(lambda: setattr(pipe, "micro_batches", 0)),
        "schedule": message(lambda: setattr(pipe, "schedule", "fifo")),
    }


def _under_no_grad(function: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return function()


def inference() -> dict[str, Any]:
    """Any batch, also smaller than the micro-batches, in every mode that PyTorch has for it; nested outputs."""
    net = model().eval()
    pipe = split(net, [2, 3], micro_batches=4)
    equal = {}
    for name, context in {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "grad": torch.enable_grad,
    }.items():
        with context():
            equal[name] = all(torch.allclose(pipe(X[:n]), net(X[:n]), atol=1e-6) for n in (12, 7, 3, 1))
            equal[name] &= not pipe(X).requires_grad
    with torch.no_grad():
        equal["empty"] = pipe(X[:0]).shape == net(X[:0]).shape
    return {
        **equal,
        "rank_2_scalar": message(
            lambda: hvdtrain.pipeline.split(
                Mean(), X, ["cpu"] * 2, balance=[1, 1], micro_batches=2, modules=["a", "b"]
            ).eval()(X)
        ),
    }


class Mean(nn.Module):
    """Returns a number for the whole batch, which micro-batches cannot be joined to."""

    class Last(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 4), self.Last()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def autocast() -> dict[str, Any]:
    """The caller's mixed precision reaches the stages' threads."""
    found = {}
    for enabled in (True, False):
        net, other = model().train(), model().train()
        seen: list[torch.dtype] = []
        net[1].linear.register_forward_hook(lambda _, args, out, seen=seen: seen.append(out.dtype))
        pipe = split(net, [2, 3], micro_batches=1, remat="all")
        seen.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = pipe.step(X, Y, MSE)
            wanted = MSE(other(X), Y)
        wanted.backward()
        equal = all(torch.equal(a, b) for a, b in zip(gradients(net), gradients(other), strict=True))
        found[str(enabled)] = [str(seen[0]), len(seen), equal, bool(loss == wanted)]
    return found


def memory() -> dict[str, Any]:
    """Micro-batches that a stage holds at most, counted where they are kept."""
    found = {}
    forward = _passes.Passes.forward
    for schedule, remat in itertools.product(("gpipe", "1f1b"), ("never", "all")):
        most: dict[int, int] = {}
        graphs: dict[int, int] = {}

        def counting(worker: Any, micro: int, values: Any, most: Any = most, graphs: Any = graphs) -> None:
            forward(worker, micro, values)
            most[worker.index] = max(most.get(worker.index, 0), len(worker.kept))
            held = sum(kept.outputs is not None for kept in worker.kept.values())
            graphs[worker.index] = max(graphs.get(worker.index, 0), held)

        _passes.Passes.forward = counting  # type: ignore[method-assign]
        split(model().train(), [2, 2, 1], micro_batches=6, schedule=schedule, remat=remat).step(X, Y, MSE)
        _passes.Passes.forward = forward  # type: ignore[method-assign]
        found[f"{schedule} {remat}"] = [[most[k] for k in range(3)], [graphs[k] for k in range(3)]]
    return found


def order() -> dict[str, Any]:
    """Every stage does what its row says."""
    pipe = split(model().train(), [2, 2, 1], micro_batches=4)
    rows: list[list[Any]] = [[], [], []]
    do = _passes.Passes.do

    def noted(passes: Any, action: Any, values: Any) -> None:
        rows[passes.index].append(action)
        do(passes, action, values)

    with mock.patch.object(_passes.Passes, "do", noted):
        pipe.step(X, Y, MSE)
    return {"rows": rows == [list(actions("1f1b", k, 3, 4)) for k in range(3)]}


def like_the_model() -> dict[str, Any]:
    """Names, state dicts and modes are the unsplit model's; gradients add up as with backward()."""
    net, other = model().train(), model().train()
    net.note = "mine"
    pipe = split(net, [2, 3], micro_batches=3)
    for _ in range(2):
        pipe.step(X, Y, MSE, factor=0.5)
    MSE(other(X), Y).backward()
    close = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients(net), gradients(other), strict=True))
    pipe.load_state_dict({name: value * 0 for name, value in other.state_dict().items()})
    return {
        "names": list(pipe.state_dict()) == list(other.state_dict())
        and [n for n, _ in pipe.named_parameters()] == [n for n, _ in other.named_parameters()],
        "same_objects": all(a is b for a, b in zip(pipe.parameters(), net.parameters(), strict=True)),
        "factor_and_sum": close,
        "loaded": all(not p.any() for p in net.parameters()),
        "modes": [pipe.eval().training, net.training, pipe.train().training, net[0].training],
        "attribute": [pipe.note, getattr(pipe, "0") is net[0]],
    }


CHECKS = (
    draws, raising, backward_raising, interrupted, refusals, inference, autocast, memory, order,
    like_the_model,
)  # fmt: skip

if __name__ == "__main__":
    for check in CHECKS:
        if len(sys.argv) == 1 or check.__name__ in sys.argv:
            print(json.dumps({"check": check.__name__, **check()}), flush=True)
