"""Checkpoints of the adapter. usage: checkpoints.py ENGINE[-zeroN] FOLDER [float32] [CASE ...]

The first job that is given a folder writes a checkpoint there, with what came of going on from it; jobs of other
engines and sizes that are given the same folder go on from it too.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cases import main, refused
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import CheckpointError, ConfigError

SAMPLES, GLOBAL_BATCH, UPDATES, SAVED_AFTER = 26, 8, 6, 3  # 2 updates an epoch: the checkpoint is in mid-epoch
FOLDER = Path(sys.argv[2])
ENGINE, _, ZERO = sys.argv[1].partition("-zero")
# DeepSpeed takes no float64
FLOAT32 = ENGINE == "deepspeed" or "float32" in sys.argv[3:]
DTYPE, TOLERANCE = (torch.float32, 1e-5) if FLOAT32 else (torch.float64, 1e-10)


def net(classes: int = 3) -> nn.Module:
    """With dropout, so that random streams matter, and running statistics."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, classes))


def data() -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 4, generator=made, dtype=torch.float64)
    return torch.arange(SAMPLES), x.to(torch.get_default_dtype()), torch.randint(0, 3, (SAMPLES,), generator=made)


class Job:
    """One run: model, optimizer, data, and the samples it was given."""

    def __init__(self, world: hvdtrain.World, *, start: int, model: nn.Module | None = None, **options: Any) -> None:
        self.world = world
        torch.manual_seed(start)
        model = model if model is not None else net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.data = hvt.loader(data(), GLOBAL_BATCH // world.size, world=world, seed=3)
        self.lr = hvdtrain.LR(0.05, GLOBAL_BATCH, warmup_samples=40, schedule="cosine", total_samples=80)
        with contextlib.redirect_stdout(io.StringIO()):
            self.model, self.optimizer = hvt.prepare(
                model, optimizer, self.data, lr=self.lr, **{"accumulate": 2, "zero": int(ZERO or 0), **options}
            )
        self.batches = self._stream()
        self.seen: list[int] = []
        self.losses: list[float] = []

    def state(self) -> Any:
        return hvt.model_state(self.model, self.optimizer, self.data)

    def train(self, until: int) -> None:
        """Goes on until so many updates are done."""
        while self.optimizer.progress.step < until:
            ids, x, y = next(self.batches)
            if not self.data.step.padding:
                self.seen += ids.tolist()
            self.model.train(len(ids) > getattr(self.world.comm, "pieces", 1))  # batch norm needs two samples
            self.model[2].train()
            self.optimizer.backward(cross_entropy(self.model(x), y))
            self.optimizer.step()
            record = self.optimizer.record()
            self.losses += [record["loss"]] if record["samples"] else []

    def _stream(self) -> Iterator[Any]:
        """Epoch after epoch; a loop that is left would make the next one a new epoch."""
        while True:
            yield from self.data

    def everything(self) -> list[Any]:
        """What bit-exact means: parameters, statistics, optimizer, rates, place."""
        state = self.optimizer.state_dict()
        numbers = [sorted((k, v.tolist()) for k, v in its.items()) for its in state["state"].values()]
        place = [vars(self.optimizer.progress), self.data.position, self.optimizer.lr]
        return [hvt.fingerprint(self.model), numbers, place]


def restored(world: hvdtrain.World, checkpoints: hvdtrain.Checkpointer, **options: Any) -> Job:
    job = Job(world, start=99, **options)
    assert checkpoints.restore(job.state()) is not None
    return job


def case_a_run_goes_on_bit_for_bit(world: hvdtrain.World) -> None:
    unbroken = Job(world, start=1)
    unbroken.train(SAVED_AFTER)
    checkpoints = hvdtrain.Checkpointer(FOLDER / f"own-{sys.argv[1]}-{world.size}")
    path = checkpoints.save(unbroken.state(), progress=unbroken.optimizer.progress)
    checkpoints.wait()
    assert sorted(p.name for p in Path(path).iterdir()) == ["manifest.json", "model.safetensors", "training.pt"]
    seen_before = sorted(i for ids in world.gather(unbroken.seen) for i in ids)
    unbroken.losses.clear()
    unbroken.train(UPDATES)
    resumed = restored(world, checkpoints)
    assert vars(resumed.optimizer.progress) == {"epoch": 1, "step": 3, "samples_seen": 42, "samples_in_epoch": 16}
    resumed.train(UPDATES)
    assert resumed.everything() == unbroken.everything() and resumed.losses == unbroken.losses
    common = FOLDER / "common"
    if not world.broadcast(common.exists()):
        hvdtrain.Checkpointer(common).save(restored(world, checkpoints).state(), progress=resumed.optimizer.progress)
        if world.is_main:
            facts = {"seen": seen_before, "weights": [p.tolist() for p in resumed.model.parameters()]}
            (FOLDER / "facts.json").write_text(json.dumps({**facts, "size": world.size, "losses": resumed.losses}))


def case_any_engine_and_size_goes_on_from_the_common_checkpoint(world: hvdtrain.World) -> None:
    facts = world.on_main(lambda: json.loads((FOLDER / "facts.json").read_text()))
    job = restored(world, hvdtrain.Checkpointer(FOLDER / "common"))
    assert job.optimizer.progress.step == SAVED_AFTER and job.data.position == (1, 16)
    job.train(SAVED_AFTER + 1)  # to the end of the epoch
    seen = sorted(facts["seen"] + [i for ids in world.gather(job.seen) for i in ids])
    assert seen == sorted(2 * list(range(SAMPLES))), "two epochs, every sample once in each"
    if world.size == facts["size"]:  # other ranks have other dropout; the same number goes on as the saved run did
        job.train(UPDATES)
        for parameter, wanted in zip(job.model.parameters(), facts["weights"], strict=True):
            torch.testing.assert_close(parameter.detach(), torch.tensor(wanted), rtol=0, atol=TOLERANCE)
    assert len(set(world.gather(hvt.fingerprint(hvt.unwrap(job.model)[0])))) == 1


def case_the_scaler_goes_on(world: hvdtrain.World) -> None:
    checkpoints = hvdtrain.Checkpointer(FOLDER / f"scaler-{world.engine}-{world.size}")
    job = Job(world, start=1, amp="fp16", accumulate=1)
    hook = job.model[3].bias.register_hook(lambda gradient: gradient * float("inf"))
    job.train(2)  # both are skipped, and the scale is halved twice
    hook.remove()
    job.train(3)
    scaler = job.optimizer.session.precision.state_dict()
    assert scaler["skipped_steps"] == 2 and scaler["scaler"]["scale"] == 2.0**14
    checkpoints.save(job.state(), progress=job.optimizer.progress)
    other = restored(world, checkpoints, amp="fp16", accumulate=1)
    assert other.optimizer.session.precision.state_dict() == scaler and other.optimizer.skipped_steps == 2
    plain = restored(world, checkpoints, accumulate=1)  # a run may go on in another precision
    assert plain.optimizer.session.precision.state_dict()["scaler"] == {}


def case_a_machine_without_a_gpu_reads_the_file(world: hvdtrain.World) -> None:
    """The file of a state that was on a GPU names no GPU."""
    job = Job(world, start=1)
    job.train(until=2)
    checkpoints = hvdtrain.Checkpointer(FOLDER / f"gpu-{world.engine}-{world.size}{ZERO}")
    ours, *others = torch.serialization._package_registry
    on_a_gpu = (1, lambda storage: f"cuda:{world.rank}", lambda storage, location: storage)
    with mock.patch.object(torch.serialization, "_package_registry", [ours, on_a_gpu, *others]):
        path = checkpoints.save(job.state(), progress=job.optimizer.progress)
    checkpoints.wait()
    state = torch.load(path / "training.pt", weights_only=True)["optimizer"]["state"]
    assert state and all(value.device.type == "cpu" for its in state.values() for value in its.values())


def case_checkpoints_of_something_else_are_refused(world: hvdtrain.World) -> None:
    checkpoints = hvdtrain.Checkpointer(FOLDER / f"own-{sys.argv[1]}-{world.size}")
    wide = Job(world, start=1, model=net(classes=5))
    before = hvt.fingerprint(wide.model)
    with refused("3.weight has shape (3, 8) in the checkpoint, (5, 8) in the model", "3 outputs", kind=CheckpointError):
        checkpoints.restore(wide.state())
    assert hvt.fingerprint(wide.model) == before
    deep = Job(world, start=1, model=nn.Sequential(*net(), nn.Dropout(), nn.Linear(3, 3)))
    with refused("the checkpoint lacks 5.bias, 5.weight", kind=CheckpointError):
        checkpoints.restore(deep.state())
    model = net()
    other, optimizer = hvt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), verify=False)
    before = hvt.fingerprint(other)
    with refused("AdamW in the checkpoint, SGD here", kind=CheckpointError):
        checkpoints.restore(hvt.model_state(other, optimizer))
    assert hvt.fingerprint(other) == before, "weights were loaded, though the optimizer was refused"
    model = net()
    groups = [{"params": list(model.parameters())[:2]}, {"params": list(model.parameters())[2:]}]
    other, optimizer = hvt.prepare(model, torch.optim.AdamW(groups, lr=0.1), verify=False)
    with refused("groups of [6] parameters", "[2, 4] here", kind=CheckpointError):
        checkpoints.restore(hvt.model_state(other, optimizer))
    model = net()
    train = hvt.loader(tuple(part[:20] for part in data()), 4, seed=3)
    other, optimizer = hvt.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), train, verify=False)
    with refused("samples=26", "samples=20", kind=CheckpointError):
        checkpoints.restore(hvt.model_state(other, optimizer, train))


def case_what_cannot_be_saved_safely_is_refused(world: hvdtrain.World) -> None:
    checkpoints = hvdtrain.Checkpointer(FOLDER / f"unsafe-{world.engine}-{world.size}")

    def save(job: Job) -> None:
        checkpoints.save(job.state(), progress=job.optimizer.progress)

    job = Job(world, start=1)
    job.optimizer.param_groups[0]["note"] = Path("x")
    with refused("training state['optimizer']['param_groups'][0]['note'] is a PosixPath", "must not run code"):
        save(job)
    job = Job(world, start=1, accumulate=1)
    ids, x, y = next(iter(job.data))
    job.optimizer.backward(cross_entropy(job.model(x), y))
    with refused("complete but not applied", kind=ConfigError):
        save(job)
    with refused("that prepare() returned", kind=ConfigError):
        hvt.model_state(job.model, job.optimizer.wrapped)
    assert checkpoints.list() == []


if __name__ == "__main__":
    torch.set_default_dtype(DTYPE)
    main(globals().copy(), ENGINE)
