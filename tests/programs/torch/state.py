"""What a checkpoint holds, against loops of plain PyTorch in one process; usage: state.py ENGINE

Every rank computes the plain loop by itself, in float64: the order of the samples is that of the data.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from cases import gap as distance
from cases import main, plainly, refused, train, windows
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.comm import engines
from hvdtrain.core.errors import ConfigError, HvdtrainError, NonFiniteError, ReplicaError
from hvdtrain.torch.engines import buffers, replicas

SAMPLES, BATCH = 24, 8  # of all ranks: 3 updates an epoch


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def data() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, 4, generator=made), torch.randint(0, 3, (SAMPLES,), generator=made)


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)


def plain(updates: int, lr: Any = 0.1, after: Callable[[Any, Any], None] = lambda *_: None) -> nn.Module:
    """The loop without hvdtrain; `after` each update is given model and optimizer."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for batch in itertools.islice(windows(BATCH, *data(), epochs=updates), updates):
        plainly(model, optimizer, [batch], loss_of)
        after(model, optimizer)
    return model


class Job:
    def __init__(self, world: hvdtrain.World, lr: Any = 0.1, **options: Any) -> None:
        model = net()
        self.data = hvt.loader(data(), BATCH // world.size, world=world, shuffle=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.model, self.optimizer = hvt.prepare(model, optimizer, self.data, verify=False, **options)
        self.batches = self.stream()

    def stream(self) -> Iterator[Any]:
        while True:
            yield from self.data

    def train(self, updates: int, after: Callable[[Any, Any], None] = lambda *_: None) -> None:
        for _ in range(updates):
            train(self.model, self.optimizer, [next(self.batches)], loss_of)
            after(self.model, self.optimizer)

    def state(self, **extra: Any) -> Any:
        return hvt.model_state(self.model, self.optimizer, **extra)

    def save(self, checkpoints: hvdtrain.Checkpointer, **extra: Any) -> Path:
        path = checkpoints.save(self.state(**extra), progress=self.optimizer.progress)
        checkpoints.wait()
        return Path(path)

    def restore(self, checkpoints: hvdtrain.Checkpointer, **extra: Any) -> Any:
        self.batches = self.stream()
        return checkpoints.restore(self.state(**extra))


@contextmanager
def folder(world: hvdtrain.World) -> Iterator[hvdtrain.Checkpointer]:
    """Checkpoints in a folder that all ranks see."""
    with tempfile.TemporaryDirectory() as own:
        checkpoints = hvdtrain.Checkpointer(Path(world.broadcast(own)) / "checkpoints", world=world, best=None)
        yield checkpoints
        checkpoints.wait()


def case_t12_numpy_numbers_are_saved_as_numbers(world: hvdtrain.World) -> None:
    rate = 0.1 * np.sqrt(2)
    assert type(rate) is not float
    with folder(world) as checkpoints:
        job = Job(world, rate)
        job.optimizer.param_groups[0]["weight_decay"] = np.float32(0.25)
        job.optimizer.param_groups[0]["note"] = {"steps": np.arange(3), np.int64(4): (np.True_, "text")}
        job.train(2)
        job.save(checkpoints)
        again = Job(world)
        again.restore(checkpoints)
        group = again.optimizer.param_groups[0]
        assert type(group["lr"]) is float and group["lr"] == float(rate) and group["weight_decay"] == 0.25
        assert group["note"]["steps"].tolist() == [0, 1, 2] and group["note"][4] == (True, "text")
        group["weight_decay"] = job.optimizer.param_groups[0]["weight_decay"] = 0.01
        again.train(2)
        job.train(2)
        print(f"error t12 {distance(again.model, job.model)}")
        assert distance(again.model, job.model) == 0


def case_t12_what_cannot_be_read_again_is_refused_while_saving(world: hvdtrain.World) -> None:
    with folder(world) as checkpoints:
        job = Job(world)
        job.train(1)
        good = job.save(checkpoints)
        job.optimizer.param_groups[0]["schedule"] = {"warm": [len]}
        with refused("['param_groups'][0]['schedule']['warm'][0] is a builtin_function_or_method"):
            job.save(checkpoints)
        assert [info.path for info in checkpoints.list()] == [good]
    with folder(world) as checkpoints, refused("extra['ema']['x'][0] is a set"):
        Job(world).save(checkpoints, extra={"ema": {"x": [{1}]}})


class Masters(torch.optim.Optimizer):
    """Weights of more digits than the model's, and a state that is no parameter's shape."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(master=p.double(), seen=[torch.zeros(p.shape[0], 2, dtype=torch.float64)])
            state["master"] -= 0.1 * p.grad.double() / 3
            state["seen"][0] += 1 / 3
            p.copy_(state["master"] + 0 * state["seen"][0].sum())


def case_m_state_of_any_shape_and_precision_goes_on(world: hvdtrain.World) -> None:
    x, y = data()
    for kind in (lambda p: torch.optim.Adafactor(p, 0.05), Masters):
        made = []
        for _ in range(2):
            model, loader = net(), hvt.loader((x, y), BATCH // world.size, world=world)
            made.append((*hvt.prepare(model, kind(model.parameters()), loader, verify=False), loader))
        with folder(world) as checkpoints:
            for again, (model, optimizer, loader) in enumerate(made):
                if again:
                    checkpoints.restore(hvt.model_state(model, optimizer))
                for epoch in loader.epochs(3):
                    train(model, optimizer, loader, loss_of)
                    if epoch == 0:
                        checkpoints.save(hvt.model_state(model, optimizer), progress=optimizer.progress)
            assert distance(made[0][0], made[1][0]) == 0, kind
        other = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        backwards = kind(list(other.parameters())[::-1])
        wrapped = hvt.prepare(other, backwards, hvt.loader((x, y), BATCH // world.size, world=world), verify=False)
        with folder(world) as checkpoints:
            checkpoints.save(hvt.model_state(*made[0][:2]), progress=made[0][1].progress)
            with refused("0.weight (6, 4) in the checkpoint, where 2.bias (3,) is here", kind=HvdtrainError):
                checkpoints.restore(hvt.model_state(*wrapped))


def case_m_random_numbers_within_an_update_are_those_it_began_with(world: hvdtrain.World) -> None:
    ends = []
    with folder(world) as checkpoints:
        for again in range(2):
            model = nn.Sequential(net(), nn.Dropout(0.5))
            loader = hvt.loader(data(), 4 // world.size, world=world)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model, optimizer = hvt.prepare(model, optimizer, loader, accumulate=3, verify=False)
            if again:
                checkpoints.restore(hvt.model_state(model, optimizer))
            for epoch in loader.epochs(2):
                for batch, (x, y) in enumerate(loader):
                    optimizer.backward(cross_entropy(model(x), y))
                    optimizer.step()
                    if not again and (epoch, batch) == (0, 4):
                        checkpoints.save(hvt.model_state(model, optimizer), progress=optimizer.progress)
            ends.append(model)
    assert distance(*ends) == 0


class Two:
    """A critic and a generator, each with its optimizer, on one loader; `turns` says who steps on which batch.

    Of a batch's moves "c" and "g" are an update, "s" one of the critic that is left out, and "!" saves.
    """

    def __init__(self, world: hvdtrain.World, accumulate: int = 1) -> None:
        self.data = hvt.loader(data(), 4 // world.size, world=world)
        self.models, self.optimizers = {}, {}
        for name, every in (("c", 1), ("g", accumulate)):
            model = net()
            sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            made = hvt.prepare(model, sgd, self.data, accumulate=every, verify=False)
            self.models[name], self.optimizers[name] = made

    def state(self, order: str) -> Any:
        parts = {name: hvt.model_state(self.models[name], self.optimizers[name]) for name in order}
        return {f"{name}.{file}": part for name in order for file, part in parts[name].items()}

    def run(self, turns: list[str], checkpoints: Any, order: str) -> None:
        batches, update = iter(self.data), 0
        for x, y in batches:
            for move in turns[(self.data.step.samples_done - 1) // 4]:
                if move == "!":
                    checkpoints.save(self.state(order), progress=self.optimizers["c"].progress)
                    continue
                optimizer, update = self.optimizers["g" if move == "g" else "c"], update + 1
                outputs = self.models["c"](x)
                if move == "g":
                    outputs = self.models["g"](x) + outputs.detach()
                optimizer.backward(cross_entropy(outputs, y))
                optimizer.skip() if move == "s" else optimizer.step()


LOOPS = {
    "a GAN": ["cg", "cg", "cg!", "cg", "cg", "cg"],
    "saved within a batch, after its last": ["cg", "cg", "c!", "cg", "c", "cg"],
    "five on a batch": ["cccccg", "cccccg", "cccccg!", "cccccg", "cccccg", "cccccg"],
    "none for long": ["g", "c", "c", "c!", "c", "cg"],
}


def case_m_two_models_of_one_loader_go_on_after_the_last_batch_of_either(world: hvdtrain.World) -> None:
    for name, turns in LOOPS.items():
        order = "gc" if "long" in name else "cg"
        with folder(world) as checkpoints:
            whole, again = Two(world), Two(world)
            whole.run(turns, checkpoints, order)
            checkpoints.restore(again.state(order))
            again.run([moves.replace("!", "") for moves in turns], None, order)
            for which, model in whole.models.items():
                assert distance(model, again.models[which]) == 0, (name, order, which)


def case_m_a_checkpoint_within_a_batch_is_refused_when_the_other_steps(world: hvdtrain.World) -> None:
    for turns in (["cg", "c!g"], ["cg", "c!c"], ["cg", "s!g"]):
        two = Two(world)
        with folder(world) as checkpoints, refused("saved", "between two step() calls", "after the last step()"):
            two.run([*turns, "", "", "", ""], checkpoints, "cg")
        assert two.optimizers["c"].progress.step + two.optimizers["g"].progress.step == 3
    ends = []
    with folder(world) as checkpoints:
        for turns in (["cg", "cg!", "cg", "cg", "cg", "cg"], ["cg", "cg", "cg", "cg", "cg", "cg"]):
            two = Two(world, accumulate=2)
            if ends:
                checkpoints.restore(two.state("cg"))
            two.run(turns, checkpoints, "cg")
            ends.append(two)
        assert all(distance(ends[0].models[name], ends[1].models[name]) == 0 for name in "cg")
    for turns in (["cg!"], ["cg", "c!"], ["cg", "cg", "cg!"]):
        with folder(world) as checkpoints, refused("have applied different batches", "step() of all optimizers"):
            Two(world, accumulate=2).run([*turns, "", "", "", "", ""], checkpoints, "cg")


def case_m_tensors_that_share_or_expand_memory_come_back(world: hvdtrain.World) -> None:
    class Odd(nn.Module):
        def __init__(self, value: float, tied: bool = True) -> None:
            super().__init__()
            flat = torch.full((6,), value)
            self.weight, self.bias = nn.Parameter(flat[:4].view(2, 2)), nn.Parameter(flat[4:])
            self.again = self.weight if tied else nn.Parameter(torch.ones(2, 2))
            self.register_buffer("flat", flat)
            self.register_buffer("turned", torch.full((2,), value + 1j, dtype=torch.complex64).conj())
            self.register_buffer("row", torch.zeros(1).expand(4))

    with folder(world) as checkpoints:
        checkpoints.save(hvt.model_state(Odd(3.0), world=world), progress=hvdtrain.Progress())
        received = Odd(7.0)
        checkpoints.restore(hvt.model_state(received, world=world))
        assert all(torch.equal(received.state_dict()[name], value) for name, value in Odd(3.0).state_dict().items())
        received.wide = nn.Parameter(torch.zeros(1, dtype=torch.complex128))
        with refused("wide is torch.strided, torch.complex128"):
            checkpoints.save(hvt.model_state(received, world=world), progress=hvdtrain.Progress(step=2))
    with folder(world) as checkpoints:
        checkpoints.save(hvt.model_state(Odd(3.0, tied=False), world=world), progress=hvdtrain.Progress(step=1))
        with refused("weight and again are one tensor in the model", kind=HvdtrainError):
            checkpoints.restore(hvt.model_state(Odd(7.0), world=world))


def case_m_buffers_of_any_type_begin_as_rank_0s(world: hvdtrain.World) -> None:
    kinds = (torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.int16, torch.complex64)

    class Typed(nn.Module):
        def __init__(self, value: int) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)
            for kind in kinds:
                self.register_buffer(f"of_{str(kind).removeprefix('torch.')}", torch.full((2, 3), value).to(kind))
            self.register_buffer("expanded", torch.full((1, 3), float(value)).expand(4, 3))

    with folder(world) as checkpoints:
        model = Typed(1 if world.is_main else 0)
        expanded = torch.full((1, 3), 1.0).expand(4, 3)
        hvt.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        wanted = Typed(1)
        assert all(torch.equal(one.double(), two.double()) if not one.is_complex() else torch.equal(one, two)
                   for one, two in zip(model.buffers(), wanted.buffers(), strict=True))  # fmt: skip
        checkpoints.save(hvt.model_state(model, extra={"x": expanded}), progress=hvdtrain.Progress())
        torch.zero_(expanded[:1])
        checkpoints.restore(hvt.model_state(model, extra={"x": expanded}))
        assert torch.equal(expanded, torch.ones(4, 3))


def case_t15_what_is_saved_of_numpy_is_numpys(world: hvdtrain.World) -> None:
    class Mean:
        value: Any = np.zeros(2)

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value, "count": np.float32(0.1)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value, self.count = state["value"], state["count"]

    with folder(world) as checkpoints:
        mean = Mean()
        mean.value = np.arange(2.0)
        own = {"history": [np.ones(2)], "best": np.zeros(1), "votes": Counter("aab"), "back": np.arange(3)[::-1]}
        Job(world).save(checkpoints, extra={"mean": mean, **own})
        back = np.zeros(3)[::-1]
        extra = {"mean": Mean(), "history": [], "best": None, "votes": Counter(), "back": back}
        Job(world).restore(checkpoints, extra=extra)
        assert isinstance(extra["mean"].value, np.ndarray) and extra["mean"].value.tolist() == [0, 1]
        assert type(extra["mean"].count) is np.float32 and type(extra["history"][0]) is np.ndarray
        assert type(extra["best"]) is np.ndarray and extra["votes"]["c"] == 0 and extra["votes"] == own["votes"]
        assert extra["back"] is back and back.tolist() == [2, 1, 0]


def case_t15_own_objects_and_schedulers_go_on(world: hvdtrain.World) -> None:
    """An average of weights, a scheduler, a counter, a dict, an array and a tensor, against the unbroken plain loop."""
    averages: list[Any] = []

    def follow(model: Any, optimizer: Any) -> None:
        if not averages:
            average = torch.optim.swa_utils.AveragedModel(hvt.unwrap(model))
            averages.extend([average, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)])
        averages[0].update_parameters(hvt.unwrap(model))
        averages[1].step()

    reference, wanted = plain(5, after=follow), averages
    with folder(world) as checkpoints:
        averages = []
        job = Job(world)
        job.train(3, follow)
        table, history = np.arange(4.0), torch.tensor([1.0, 2.0])
        own = {"seen": 3, "table": table, "history": history, "best": {"score": np.float64(0.5), 7: [table]}}
        job.save(checkpoints, extra={"ema": averages[0], "scheduler": averages[1], **own})
        averages = []
        again = Job(world)
        again.train(1, follow)  # builds them, and is undone
        fresh_table, fresh = np.zeros(4), torch.zeros(2)
        extra = {
            "ema": averages[0],
            "scheduler": averages[1],
            "seen": 0,
            "table": fresh_table,
            "history": fresh,
            "best": {},
        }
        again.restore(checkpoints, extra=extra)
        assert extra["seen"] == 3 and extra["table"] is fresh_table and fresh_table.tolist() == table.tolist()
        assert extra["history"] is fresh and fresh.tolist() == [1.0, 2.0]
        assert extra["best"]["score"] == 0.5 and extra["best"][7][0].tolist() == table.tolist()
        again.train(2, follow)
        error = max(distance(again.model, reference), distance(averages[0], wanted[0]))
        print(f"error t15 {error}")
        assert error < 1e-12 and averages[1].last_epoch == wanted[1].last_epoch == 5
        with refused("lacks other", "it has best, ema, history", kind=HvdtrainError):
            again.restore(checkpoints, extra={"other": 1})
        with refused("extra['history']", "shape (2,) in the checkpoint, (3,) here", kind=HvdtrainError):
            again.restore(checkpoints, extra={"history": torch.zeros(3)})
        with refused("extra= must be a dict", kind=ConfigError):
            again.state(extra=[averages[0]])


def case_m_two_models_share_no_directory(world: hvdtrain.World) -> None:
    """Known by the user's module, however it is saved; a copy that restores does not lock the training out."""
    with folder(world) as checkpoints:
        job, other, copied = Job(world), Job(world), net()
        first = job.save(checkpoints)
        for state in (other.state(), hvt.model_state(copied)):
            with refused("a checkpoint directory belongs to one training: this model must not save there"):
                checkpoints.save(state, progress=hvdtrain.Progress(step=9))
        again = hvdtrain.Checkpointer(checkpoints.directory, world=world, best=None)
        assert again.restore(hvt.model_state(copied)) is not None
        job.train(1)
        second = job.save(again)
        third = again.save(hvt.model_state(job.model), progress=hvdtrain.Progress(step=2))
        own = other.save(hvdtrain.Checkpointer(checkpoints.directory / "own", world=world, best=None))
        assert [info.path for info in again.list()] == [first, second, third] and own.parent.name == "own"


def case_t14_weights_that_are_not_finite_are_not_saved(world: hvdtrain.World) -> None:
    """A NaN in the gradient of one layer, a finite loss, and no clipping: nobody notices before the checkpoint."""
    with folder(world) as checkpoints:
        job = Job(world)
        job.train(2)
        good = job.save(checkpoints)
        hook = job.model[0].bias.register_hook(lambda gradient: gradient * float("nan"))
        job.train(1)
        hook.remove()
        assert not all(bool(p.isfinite().all()) for p in job.model.parameters())
        with refused("weights that are not finite are not saved", "rank 0: 0.bias", "restore one", kind=NonFiniteError):
            job.save(checkpoints)
        assert [info.path for info in checkpoints.list()] == [good]
        job.restore(checkpoints)
        job.train(2)
        error = distance(job.model, plain(4))
        print(f"error t14a {error}")
        assert error < 1e-12 and job.optimizer.progress.step == 4
        job.model[0].bias.requires_grad_(False).fill_(float("-inf"))  # what is not trained may be a mask
        job.save(checkpoints)


def case_t14_after_a_nan_loss_training_goes_back(world: hvdtrain.World) -> None:
    for accumulate, clip in ((1, None), (1, 1e9), (2, None)):
        with folder(world) as checkpoints:
            job = Job(world, clip=clip)
            job.train(2)
            job.save(checkpoints)
            broken = Job(world, clip=clip, accumulate=accumulate)
            broken.train(1)
            x, y = next(broken.batches)
            with refused("restore one, here or in a new run", kind=NonFiniteError):
                if clip is None:
                    broken.optimizer.backward(cross_entropy(broken.model(x), y) * float("nan"))
                    broken.optimizer.step()
                    x, y = next(broken.batches)
                    broken.optimizer.backward(cross_entropy(broken.model(x), y))
                hook = broken.model[0].bias.register_hook(lambda gradient: gradient * float("inf"))
                broken.optimizer.backward(cross_entropy(broken.model(x), y))
                hook.remove()
                broken.optimizer.step()
            if clip is not None:
                hook.remove()
            broken.restore(checkpoints)
            broken.train(2 * accumulate)
            if accumulate == 1:
                error = distance(broken.model, plain(4))
                print(f"error t14b {error}")
                assert error < 1e-12


class Queue(nn.Module):
    """As in MoCo: unit-norm rows that every rank fills with its own keys; and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.register_buffer("queue", normalize(torch.randn(5, 3), dim=1))
        self.register_buffer("seen", torch.zeros(1))


def case_t8_only_running_statistics_are_averaged(world: hvdtrain.World) -> None:
    torch.manual_seed(1)
    module = Queue()
    torch.manual_seed(7 + world.rank)
    x = torch.randn(6, 4)
    for buffer in ("queue", "seen"):
        getattr(module, buffer).copy_(torch.randn_like(getattr(module, buffer)))
    module.queue.copy_(normalize(module.queue, dim=1))
    module.norm(module.layer(x))
    queues, means = world.gather(module.queue.clone()), world.gather(module.norm.running_mean.clone())
    buffers.synchronize(module, world)
    assert torch.equal(module.queue, queues[0]), "rank 0's"
    norms = module.queue.norm(dim=1)
    assert float((norms - 1).abs().max()) < 1e-12
    torch.testing.assert_close(module.norm.running_mean, sum(means) / world.size, rtol=0, atol=1e-12)
    print(f"error t8 {float((norms - 1).abs().max())}")


def case_t8_checksums_see_the_order(world: hvdtrain.World) -> None:
    pairs = [
        (torch.tensor([3.0, 1.0]), torch.tensor([1.0, 3.0])),
        (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 3.0], [2.0, 4.0]])),
        (torch.tensor([True, False]), torch.tensor([False, True])),
        (torch.tensor([1, -1, 2]), torch.tensor([1, 2, -1])),
        (torch.tensor([0.0, 1.0]).bfloat16(), torch.tensor([1.0, 0.0]).bfloat16()),
        (torch.arange(3_000_000), torch.arange(3_000_000).roll(1_500_000)),
    ]
    for one, other in pairs:
        sums = replicas.checksums({"one": one, "other": other, "again": one.clone()})
        assert sums["one"] != sums["other"] and sums["one"] == sums["again"], one
    # as the docstring has it, computed in whole numbers of Python
    prime, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def signed(value: int) -> int:
        value &= mask
        return value - 2**64 if value >> 63 else value

    total = 0
    for place, bits in enumerate([5, -9, 0, 7], start=1):
        spread = signed(place * prime)
        total += bits * signed((signed(spread ^ (spread >> 29)) * prime) | 1)
    assert replicas.checksums({"x": torch.tensor([5, -9, 0, 7], dtype=torch.int16)})["x"] == signed(total)
    transposed = torch.randn(6, 5).t()
    sums = replicas.checksums({"one": transposed, "other": transposed.contiguous()})
    assert sums["one"] == sums["other"], "of the values, not of how they lie in memory"
    model = nn.Sequential(nn.Linear(4, 2))
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([3.0, 1.0] if world.rank == 0 else [1.0, 3.0]))
        model[0].weight.fill_(1)
    if world.size > 1:
        with refused("0.bias of rank(s) 1", kind=ReplicaError):
            replicas.check_equal(model, world, "now")


def case_t19_buffers_of_other_shapes_are_named(world: hvdtrain.World) -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("memory", torch.zeros(1 + world.rank))
    if world.size > 1:
        with refused("memory differs", "rank 1: (2,)", kind=ReplicaError):
            buffers.synchronize(module, world)


def case_m_another_world_size_gives_every_rank_a_stream_of_its_own(world: hvdtrain.World) -> None:
    def draws() -> list[tuple[float, ...]]:
        return world.gather(tuple(torch.rand(8).tolist()))

    with folder(world) as checkpoints:
        job = Job(world)
        assert len(set(draws())) == world.size, "all were seeded alike"
        one_more = [copy.deepcopy(stream) for stream in world.gather(None)] + [None]
        state = job.state()
        with mock.patch.object(state["training.pt"], "collect", lambda: None):
            state["training.pt"].streams = one_more  # as a world of one rank more has them
            checkpoints.save(state, progress=job.optimizer.progress)
        torch.manual_seed(0)
        Job(world).restore(checkpoints)
        first = draws()
        assert len(set(first)) == world.size
        torch.manual_seed(1)
        Job(world).restore(checkpoints)
        assert draws() == first, "it follows from the checkpoint"


def case_m_what_is_longer_than_a_message_arrives_whole(world: hvdtrain.World) -> None:
    with mock.patch.object(engines, "CHUNK_BYTES", 1000), mock.patch.object(buffers, "_CHUNK_BYTES", 1000):
        for root in range(world.size):
            wanted = np.random.default_rng(root).integers(0, 256, 10_007, np.uint8).tobytes()
            given = wanted if world.rank == root else None
            assert world.comm.broadcast_bytes(given, root) == wanted
        tensors = [torch.full((n,), float(world.rank + n)) for n in (3, 700, 1, 250, 90)]
        tensors.append(torch.full((40, 3), world.rank))
        buffers.broadcast_(tensors, world, world.size - 1)
        means = [torch.full((n,), float(world.rank)) for n in (5, 400, 30)]
        buffers.average_(means, world)
    for tensor in tensors[:-1]:
        assert bool((tensor == world.size - 1 + len(tensor)).all())
    assert bool((tensors[-1] == world.size - 1).all())
    assert all(bool((mean == (world.size - 1) / 2).all()) for mean in means)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    main(globals().copy())
