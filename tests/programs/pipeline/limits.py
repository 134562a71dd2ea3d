"""What was tried against pipelines: one line of JSON for each attack. References are plain PyTorch in float64."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import json
import pickle
import random
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from ending_threads import threads_left
from outcome import outcome
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import hvdtrain.pipeline
from hvdtrain.core.errors import HvdtrainError
from hvdtrain.pipeline import splitting
from hvdtrain.pipeline.run import passes as _passes
from hvdtrain.pipeline.run.runtime import Pipeline

torch.set_default_dtype(torch.float64)
WIDTH, BATCH = 4, 6
X, Y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
MSE = nn.MSELoss()


def split(model: nn.Module, x: Any = X, stages: int = 2, **options: Any) -> Pipeline:
    options = {"micro_batches": 3, "balance": "memory"} | options
    return hvdtrain.pipeline.split(model.train(), x, ["cpu"] * stages, **options)


def plain(model: nn.Module, x: Any = X, y: Any = Y, loss: Any = MSE, steps: int = 1) -> tuple[nn.Module, list[Tensor]]:
    """The unsplit model after forward and backward passes of the whole batch, and its gradients."""
    model = copy.deepcopy(model).train()
    for _ in range(steps):
        loss(model(*x) if isinstance(x, tuple) else model(x), y).backward()
    return model, [p.grad for p in model.parameters()]


def off(pipe: Pipeline, model: nn.Module, gradients: Sequence[Tensor]) -> float:
    """Of gradients and buffers."""
    pairs = [(p.grad, g) for p, g in zip(pipe.module.parameters(), gradients, strict=True)]
    pairs += list(zip(pipe.module.buffers(), model.buffers(), strict=True))
    return max(float((a - b).abs().max()) for a, b in pairs)


def compared(make: Callable[[], nn.Module], steps: int = 2, x: Any = X, y: Any = Y, **options: Any) -> float:
    torch.manual_seed(3)
    model = make()
    wanted, gradients = plain(model, x, y, steps=steps)
    pipe = split(model, x, **options)
    for _ in range(steps):
        pipe.step(x, y, MSE)
    return off(pipe, wanted, gradients)


# -- P1: a repeated pass draws the same --------------------------------------------------------------------------------
class Scale(nn.Module):
    """Linear in its weight: weight times gradient is the loss, if both come from the same draws."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.draw = nn.Parameter(torch.rand(WIDTH) + 0.5), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x * self.weight)


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, True)


class Leaf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random() * (1 if x.sum() > -1e9 else 2)  # the trace cannot follow it


def linear_mean(out: Tensor, y: Tensor) -> Tensor:
    return (out + 3 * out.detach().abs().mean() * 0).mean()


def drawing_loss(out: Tensor, y: Tensor) -> Tensor:
    return (out * torch.rand_like(out)).mean()


def inconsistent(make: Callable[[], nn.Module], loss: Any = linear_mean, change: Any = None, **options: Any) -> float:
    """The largest distance of weight times gradient from the loss in 20 steps: 0 for one mask in both passes."""
    model = nn.Sequential(Scale(nn.Identity()), make(), Scale(nn.Identity()), make())
    pipe = split(model, x=X.abs() + 1, **{"remat": "all"} | options)
    if change is not None:
        change(model)
    worst = 0.0
    for _ in range(20):
        pipe.zero_grad()
        value = float(pipe.step(X.abs() + 1, Y, loss))
        for scale in (model[0], model[2]):
            worst = max(worst, abs(float((scale.weight.detach() * scale.weight.grad).sum()) - value))
    return worst


def raised(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.5


def in_eval_but_dropouts(model: nn.Module) -> None:
    model.eval()
    for layer in model.modules():
        layer.training = isinstance(layer, nn.Dropout)


def draws() -> dict[str, Any]:
    def scripted() -> nn.Module:
        return torch.jit.script(Scripted())

    def half() -> nn.Module:
        return nn.Dropout(0.5)

    return {
        "raised": inconsistent(lambda: nn.Dropout(0.0), change=raised),
        "scripted": inconsistent(scripted),
        "loss": inconsistent(nn.Identity, drawing_loss),
        "python": inconsistent(Leaf),
        "one_micro_batch": max(inconsistent(one, micro_batches=1) for one in (half, scripted, Leaf)),
        "eval": inconsistent(half, change=in_eval_but_dropouts),
    }


def repeats() -> dict[str, Any]:
    """One seed, the same numbers; another thread that draws meanwhile is told."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), Leaf())

    def beside(*_: Any) -> None:
        thread = threading.Thread(target=torch.rand, args=(3,))
        thread.start()
        thread.join()

    def once() -> list[Tensor]:
        torch.manual_seed(4)
        random.seed(4)
        pipe.zero_grad()
        for _ in range(5):
            pipe.step(X, Y, drawing_loss)
        return [p.grad.clone() for p in model.parameters()]

    pipe = split(model, remat="all")
    pipe.proofs = False
    same = all(map(torch.equal, once(), once()))
    handle = model[0].register_forward_hook(beside)
    text = outcome(lambda: pipe.step(X, Y, MSE))
    pipe.remat = "never"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        pipe.step(X, Y, MSE)
    handle.remove()
    return {"same": same, "told": text, "warned": [str(one.message) for one in warned if "draw" in str(one.message)]}


# -- P2: what a trace fixes --------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tau, self.config = nn.Linear(WIDTH, WIDTH), 2.0, SimpleNamespace(power=1)
        self.nested, self.more = {"scales": [1.0]}, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activated(self.linear(x) / self.tau) * self.config.power * self.nested["scales"][0]
        return self.more(x)

    def activated(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Small(Block):
    """One layer: there is nothing to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Identity()


class Gathers(Block):
    def __init__(self, keep: str) -> None:
        super().__init__()
        self.keep, self.aux = keep, []

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.keep == "list":
            self.aux.append(x.mean())
        elif self.keep == "attribute":
            self.last = x.mean()
        else:
            self.aux.append(x.detach().mean())
        return x


class Checkpointed(Block):
    calls = 0

    def inner(self, x: Tensor) -> Tensor:
        Checkpointed.calls += 1
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class CheckpointedRoot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.b, checkpoint(self.a, x, use_reentrant=False), use_reentrant=False)


class SavedOnCpuRoot(CheckpointedRoot):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return self.b(self.a(x))


def doubled(module: nn.Module, x: Tensor) -> Tensor:
    """As another library puts in the place of a model's forward."""
    return 2 * type(module).forward(module, x)


def with_own_forward(place: str) -> nn.Module:
    """The replaced forward refers to its own module, so a copy needs its own, too."""

    class Model(nn.Sequential):
        def __deepcopy__(self, memo: Any) -> Any:
            copied = with_own_forward(place)
            copied.load_state_dict(self.state_dict())
            return copied

    model = Model(Block(), Block(), Block())
    changed = model if place == "root" else model[1]
    changed.forward = MethodType(doubled, changed)
    return model


def trace() -> dict[str, Any]:
    found: dict[str, Any] = {}

    def changed(change: Callable[[nn.Sequential], Any]) -> str:
        model = nn.Sequential(Block(), Block(), Block())
        pipe = split(model)
        pipe.step(X, Y, MSE)
        change(model)
        return outcome(lambda: pipe.step(X, Y, MSE))

    found["tau"] = changed(lambda model: setattr(model[1], "tau", 5.0))
    found["nested"] = changed(lambda model: model[1].nested["scales"].__setitem__(0, 2.0))
    found["module"] = changed(lambda model: setattr(model[1], "linear", nn.Linear(WIDTH, WIDTH)))
    found["hook"] = changed(lambda model: model[1].register_forward_hook(lambda *_: None))
    called = nn.Sequential(Block(), Block())
    pipe = split(called)
    called[1].register_forward_hook(lambda module, args, output: output * 2)
    found["hook_in_call"] = outcome(lambda: pipe.eval()(X))
    found["unread"] = changed(lambda model: setattr(model[1], "note", "mine"))
    found["forward"] = changed(lambda model: setattr(model, "forward", MethodType(doubled, model)))
    model = nn.Sequential(Block(), Small(), Block())
    pipe = split(model)
    model[1].tau, seen = 5.0, []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    wanted, gradients = plain(model)
    seen.clear()
    pipe.step(X, Y, MSE)
    found["small"] = [off(pipe, wanted, gradients), len(seen) > 0]
    for place in ("root", "part"):
        found[f"replaced_{place}"] = compared(lambda place=place: with_own_forward(place))
    found["leaf_hook"] = changed(lambda model: model[1].linear.register_forward_hook(lambda *_: None))
    for keep in ("list", "attribute", "detached"):
        model = nn.Sequential(Block(), Gathers(keep), Block())
        found[keep] = outcome(lambda model=model: float(split(model).step(X, Y, MSE)))
        found[f"{keep}_left"] = len(model[1].aux)
    model = nn.Sequential(Block(), Checkpointed(), Block())
    wanted, gradients = plain(model)
    unsplit, Checkpointed.calls = Checkpointed.calls, 0
    pipe = split(model, micro_batches=1)
    Checkpointed.calls = 0
    pipe.step(X, Y, MSE)
    found["checkpoint"] = [unsplit, Checkpointed.calls, off(pipe, wanted, gradients)]
    for name, kind in {"checkpoint_root": CheckpointedRoot, "saved_root": SavedOnCpuRoot}.items():
        found[name] = outcome(lambda kind=kind: split(kind()))
    found["saved_root_in_one_part"] = compared(lambda: nn.Sequential(SavedOnCpuRoot(), Block()))
    return found


# -- P3: what is cut ---------------------------------------------------------------------------------------------------
class Masked(nn.Module):
    """x [batch, S, WIDTH], mask [S, S]."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.a(x)
        return self.b((x @ x.transpose(1, 2) + mask).softmax(-1) @ x)


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.lstm, self.b = nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.lstm(self.a(x))[0])


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def chunks() -> dict[str, Any]:
    x, mask = (
        torch.randn(BATCH, BATCH, WIDTH),
        torch.zeros(BATCH, BATCH).masked_fill(torch.rand(BATCH, BATCH) < 0.4, -9),
    )
    y = torch.randn(BATCH, BATCH, WIDTH)
    found: dict[str, Any] = {"mask": outcome(lambda: split(Masked(), (x, mask), micro_batches=BATCH))}
    model = Masked()
    wanted, gradients = plain(model, (x, mask), y)
    pipe = split(model, (x, mask), micro_batches=BATCH, chunk=[0, None])
    pipe.step((x, mask), y, MSE)
    found["chunk"] = off(pipe, wanted, gradients)
    found["sequence"] = outcome(lambda: split(SequenceFirst(), x))
    found["dimension"] = outcome(lambda: split(SequenceFirst(), x, chunk=[1]))
    found["centred"] = outcome(lambda: split(nn.Sequential(Block(), Centred(), Block())))
    longer = split(Masked(), (x[:4], mask), micro_batches=2)  # as long as the batch only later
    found["later"] = outcome(lambda: longer.step((x, mask), y, MSE))
    norm = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH, track_running_stats=False), Block())
    found["norm"] = outcome(lambda: float(split(norm).step(X, Y, MSE)))
    return found


# -- P4: what the calling thread has set -------------------------------------------------------------------------------
VARIABLE = contextvars.ContextVar("VARIABLE", default="unset")


class Looks(nn.Module):
    seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > -1e9:
            Looks.seen.append((VARIABLE.get(), str(torch.empty(1).device), threading.current_thread().name))
        return x


def context() -> dict[str, Any]:
    packed: list[str] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(threading.current_thread().name)
        return tensor

    model = nn.Sequential(Block(), Looks(), Block(), Looks())
    unsplit_packs: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: unsplit_packs.append(1) or t, lambda t: t):
        model(X)
    pipe = split(model, micro_batches=1)
    pipe.proofs = False
    Looks.seen.clear()
    VARIABLE.set("mine")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.device("meta"):
        with contextlib.suppress(HvdtrainError):
            pipe.eval()
            pipe(X)
        seen = list(Looks.seen)
        pipe.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        pipe.step(X, Y, lambda out, y: out.mean())
    with FlopCounterMode(display=False):
        flops = outcome(lambda: pipe.step(X, Y, MSE))
    one = split(nn.Sequential(Block(), Block()), stages=1, micro_batches=2)
    with FlopCounterMode(display=False) as counter:
        one.step(X, Y, MSE)
    with warnings.catch_warnings(record=True) as told, torch.profiler.profile():
        warnings.simplefilter("always")
        pipe.step(X, Y, MSE)
    return {
        "packs": [len(packed), len(unsplit_packs)], "threads": len(set(packed)), "flops": flops,
        "counted": counter.get_total_flops() > 0, "seen": sorted({entry[:2] for entry in seen}),
        "profiler": [str(one.message) for one in told if "profiler" in str(one.message)][:1],
    }  # fmt: skip


# -- P5: tied weights --------------------------------------------------------------------------------------------------
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class TiedNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.first, self.second = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
        self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.second(torch.tanh(self.b(self.first(self.a(x))))))  # micro-batches have other means


def tied() -> dict[str, Any]:
    model = Tied()
    pipe = split(model, balance=[1, 1, 1], stages=3)
    handle = model.a.weight.register_hook(lambda gradient: gradient)
    hook = outcome(lambda: pipe.step(X, Y, MSE))
    handle.remove()
    pipe.step(X, Y, MSE)
    pipe.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)
    assign = outcome(lambda: pipe.step(X, Y, MSE))
    norms = TiedNorms()
    pipe = split(norms, balance=[2, 3])
    shared = sum(len(stage.proxies) for stage in pipe.stages)
    inputs: list[Tensor] = []
    before = copy.deepcopy(norms)
    for module in pipe.stages[1].modules():
        if isinstance(module, nn.BatchNorm1d):
            module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    pipe.proofs = False
    inputs.clear()
    pipe.step(X, Y, MSE)
    whole = torch.cat(inputs)
    wanted = 0.9 * before.second.running_var + 0.1 * whole.var(0)
    error = float((norms.second.running_var - wanted).abs().max())
    return {"hook": hook, "assign": assign, "norm": error, "counter": int(norms.second.num_batches_tracked),
            "shared": shared}  # fmt: skip


# -- P6: buffers that move ---------------------------------------------------------------------------------------------
class Moving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("ema", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.training:
            self.ema.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.ema


class Counts(Block):
    """Attributes that a pass changes: how often it ran, what it last saw, a mean over passes, all that it has seen."""

    def __init__(self, *kept: str) -> None:
        super().__init__()
        self.kept, self.number, self.mean, self.seen = kept, 0, torch.zeros(WIDTH), []

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if "number" in self.kept and self.training:
            self.number += 1
            x = x / self.number  # so that it matters
        if "mean" in self.kept:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if "last" in self.kept:
            self.last = x.detach()
        if "list" in self.kept:
            self.seen.append(float(x.detach().sum()))
        return x


def counts() -> dict[str, Any]:
    """Counts that a pass changes are the batch's, or refused."""

    def alone(**options: Any) -> list[float]:
        torch.manual_seed(3)
        model = nn.Sequential(Block(), Counts("number", "last"), Block())
        wanted, gradients = plain(model, steps=2)
        pipe = split(model, **options)
        for _ in range(2):
            pipe.step(X, Y, MSE)
        return [off(pipe, wanted, gradients), wanted[1].number - model[1].number]

    def told(*kept: str, **options: Any) -> str:
        return outcome(lambda: float(split(nn.Sequential(Block(), Counts(*kept), Block()), **options).step(X, Y, MSE)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        several = told("list")
    return {
        "alone": alone(micro_batches=1),
        **{kept: told(kept) for kept in ("number", "mean", "last")},
        "list": several,
        "warned": [str(one.message) for one in caught],
        "micro": told("number", batch_norm="micro"),
        "again": told("number", micro_batches=1, remat="all"),
    }


def buffers() -> dict[str, Any]:
    spectral = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
    )
    instance = nn.Sequential(nn.Conv1d(2, 3, 1), nn.InstanceNorm1d(3, track_running_stats=True), nn.Conv1d(3, 2, 1))
    x, y = torch.randn(7, 2, 5), torch.randn(7, 2, 5)
    moving = nn.Sequential(nn.Linear(WIDTH, WIDTH), Moving(), nn.Linear(WIDTH, WIDTH))
    return {
        "spectral": outcome(lambda: split(spectral).step(X, Y, MSE)),
        "instance": outcome(lambda: split(instance, x).step(x, y, MSE)),
        "ema": outcome(lambda: split(copy.deepcopy(moving)).step(X, Y, MSE)),
        "ema_micro": outcome(lambda: float(split(copy.deepcopy(moving), batch_norm="micro").step(X, Y, MSE))),
        "ema_alone": compared(lambda: copy.deepcopy(moving), micro_batches=1, remat="all"),
    }


# -- P7: interrupted starts --------------------------------------------------------------------------------------------
def starts() -> dict[str, Any]:
    model = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), Block(), nn.BatchNorm1d(WIDTH), Block())
    pipe = split(model, stages=3)
    pipe.proofs = False
    start, found = threading.Thread.start, {}

    def interrupted(before: int, error: BaseException, launched: bool) -> Callable[[threading.Thread], None]:
        left = [before]

        def begin(thread: threading.Thread) -> None:
            left[0] -= 1
            if left[0] == 0 and not launched:
                raise error
            start(thread)
            if left[0] == 0:
                raise error

        return begin

    for name, error, launched in (
        ("ctrl_c", KeyboardInterrupt(), True), ("ctrl_c_before", KeyboardInterrupt(), False),
        ("no_thread", RuntimeError("can't start new thread"), False),
        ("at_the_end", RuntimeError("can't create new thread at interpreter shutdown"), False),
    ):  # fmt: skip
        ends = []
        for at in (1, 2, 3):
            raised = ""
            pipe.close()  # or there is nothing to start
            with mock.patch.object(threading.Thread, "start", interrupted(at, error, launched)):
                try:
                    pipe.step(X, Y, MSE)
                except (KeyboardInterrupt, HvdtrainError) as received:
                    raised = f"{type(received).__name__}: {received}"
            left = threads_left()  # one that had not begun goes by itself
            ends.append([raised, left, sum(p.grad is not None for p in model.parameters())])
        found[name] = ends
    hook = nn.Module.register_forward_pre_hook
    calls = [0]

    def interrupted_hook(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        handle = hook(module, *args, **kwargs)
        if calls[0] == 2:
            raise KeyboardInterrupt
        return handle

    norms = [layer for layer in model if isinstance(layer, nn.BatchNorm1d)]
    with (
        mock.patch.object(nn.Module, "register_forward_pre_hook", interrupted_hook),
        contextlib.suppress(KeyboardInterrupt),
    ):
        pipe.step(X, Y, MSE)
    found["norms"] = [[layer.momentum, layer.num_batches_tracked is not None] for layer in norms]
    found["next"] = float(pipe.step(X, Y, MSE)) > 0
    meeting, traced, met = threading.Barrier(2), splitting.segments, []

    def trace(*args: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            met.append(meeting.wait(0.5))
        return traced(*args)

    with mock.patch.object(splitting, "segments", trace), ThreadPoolExecutor(2) as pool:
        list(pool.map(split, [nn.Sequential(Block(), Block()) for _ in range(2)]))
    return found | {"two_splits_met": met}


# -- P8: small batches, copies, failing steps --------------------------------------------------------------------------
def lifecycle() -> dict[str, Any]:
    model = nn.Sequential(Block(), Block(), Block())
    wanted, gradients = plain(model, X[:2], Y[:2])
    pipe = split(model, micro_batches=5)
    pipe.step(X[:2], Y[:2], MSE)
    found: dict[str, Any] = {"small": off(pipe, wanted, gradients)}
    lazy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyBatchNorm1d(), nn.Linear(WIDTH, WIDTH))
    found["lazy"] = outcome(lambda: split(lazy))
    found["pickle"] = outcome(lambda: pickle.dumps(pipe))
    found["of_module"] = len(list(torch.optim.swa_utils.AveragedModel(pipe.module).parameters())) == 12
    earlier = [p.grad.clone() for p in model.parameters()]

    def bad(out: Tensor, y: Tensor) -> Tensor:
        bad.calls += 1
        if bad.calls == 4:
            raise ValueError("spoilt")
        return MSE(out, y)

    bad.calls = 0
    pipe.proofs = False
    found["failed"] = outcome(lambda: pipe.step(X, Y, bad))
    found["kept"] = all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), earlier, strict=True))
    return found


# -- P10: memory and plans ---------------------------------------------------------------------------------------------
class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.randn(500, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.table[0]


def memory() -> dict[str, Any]:
    model = nn.Sequential(Table(), Table(), nn.BatchNorm1d(WIDTH), Table())
    pipe = split(model, remat="all")
    most = [0]
    remember = _passes.Passes._remember

    def counting(worker: Any, kept: Any) -> None:
        remember(worker, kept)
        most[0] = max(most[0], sum(buffer.numel() for buffer in kept.buffers))

    with mock.patch.object(_passes.Passes, "_remember", counting):
        pipe.step(X, Y, MSE)
    wide = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1000))
    costs = hvdtrain.pipeline.profile(wide, X, ["cpu", "cpu"], sizes=[2, 4], timed=False).costs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        big = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200)).float()
        cast = hvdtrain.pipeline.profile(big, torch.randn(4, 200).float(), ["cpu", "cpu"], sizes=[1, 2], timed=False)
    return {
        "remembered": most[0], "output_bytes": costs[-1].activation_bytes(4) / (4 * 1000 * 8),
        "cast_bytes": cast.costs[-1].activation_bytes(1) / (200 * 200 * 2),
    }  # fmt: skip


CHECKS = (draws, repeats, trace, chunks, context, tied, buffers, counts, starts, lifecycle, memory)

if __name__ == "__main__":
    for check in CHECKS:
        if len(sys.argv) == 1 or check.__name__ in sys.argv:
            print(json.dumps({"check": check.__name__, **check()}), flush=True)
