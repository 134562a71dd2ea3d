"""Loops on Lightning Fabric as users write them, on ranks: the weights of a plain PyTorch loop in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from samples import (  # isort: skip (makes cases.py importable)
    BATCH, HOLES, KINDS, NOISE, TRAIN, VALID, WIDE, XV, YV, Stream, X, Y, adversaries, contrast, data, judged, network,
)  # fmt: skip

import cases
import lightning
import torch
import torch.nn.functional as F
import torchmetrics
from cases import close, folder, plainly, refused, shown, windows
from lightning.fabric.loggers import CSVLogger
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.integrations.fabric import HorovodFabricStrategy


def started(**options: Any) -> lightning.Fabric:
    fabric = lightning.Fabric(accelerator="cpu", strategy=HorovodFabricStrategy(), **options)
    fabric.launch()
    return fabric


def loader(world: hvdtrain.World, *parts: Tensor, **options: Any) -> DataLoader[Any]:
    return data(BATCH // world.size, *(parts or (X, Y)), **options)


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, ignore_index=-100)


def compare(
    world: hvdtrain.World, row: str, update: Callable[..., None], optimizer: Callable[..., Any], *parts: Tensor
) -> None:
    """Trains on ranks and in one process: `update(fabric or None, backward, model, optimizer, x, y)` for each batch."""
    model, wanted, fabric = network(), network(), started()
    found, ours = fabric.setup(model, optimizer(model.parameters()))
    theirs = optimizer(wanted.parameters())
    for batch in fabric.setup_dataloaders(loader(world, *parts)):
        update(fabric, fabric.backward, found, ours, *batch)
    for batch in windows(BATCH, *(parts or (X, Y))):
        update(None, torch.Tensor.backward, wanted, theirs, *batch)
    close(row, (model, wanted))


def case_a_plain_loop(world: hvdtrain.World) -> None:
    fabric = started()
    assert (fabric.global_rank, fabric.world_size) == (world.rank, world.size)
    wanted = network()
    model, optimizer = network(3 + world.rank), None
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    model, optimizer = fabric.setup(model, optimizer)
    train = fabric.setup_dataloaders(loader(world))
    assert len(train) == 4
    losses, right = [], 0.0
    for _ in range(3):
        for x, y in train:
            optimizer.zero_grad()
            outputs = model(x)
            loss = F.cross_entropy(outputs, y)
            fabric.backward(loss)
            right += float(fabric.all_reduce((outputs.argmax(1) == y).sum(), reduce_op="sum"))
            losses.append(float(fabric.all_reduce(loss.detach())))
            optimizer.step()
    hits = []

    def counted(model: Any, x: Tensor, y: Tensor) -> Tensor:
        outputs = model(x)
        hits.append(int((outputs.argmax(1) == y).sum()))
        return F.cross_entropy(outputs, y)

    expected = plainly(wanted, torch.optim.Adam(wanted.parameters(), 0.05), windows(BATCH, X, Y, epochs=3), counted)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-10
    assert right == sum(hits)
    close("F1", (model.module, wanted))


def case_each_sample_once_in_an_evaluation(world: hvdtrain.World) -> None:
    fabric = started()
    model = fabric.setup(network())
    valid = fabric.setup_dataloaders(loader(world, XV, YV))
    model.eval()
    accuracy = fabric.strategy.join_metric(torchmetrics.Accuracy(task="multiclass", num_classes=KINDS))
    total, right, samples, own = torch.zeros(()), 0, 0, 0.0
    with torch.no_grad():
        for x, y in valid:
            outputs = model(x)
            total += F.cross_entropy(outputs, y, reduction="sum")
            right, samples = right + (outputs.argmax(1) == y).sum(), samples + len(y)
            accuracy(outputs, y)
        own = total / samples
        mean, total = fabric.all_reduce(own.clone()), fabric.all_reduce(total, reduce_op="sum")
        assert fabric.all_reduce(torch.tensor(samples), reduce_op="sum") == VALID
        every = F.cross_entropy(model(XV), YV)
        ratio = fabric.all_reduce(right) / fabric.all_reduce(torch.tensor(samples))  # means of counts
        expected = (model(XV).argmax(1) == YV).double().mean()
    gaps = [abs(float(its)) for its in (mean - every, total / VALID - every, ratio - expected)]
    assert max(gaps) < 1e-12 and abs(float(accuracy.compute() - expected)) < 1e-6, gaps
    shown("F2", max(gaps))
    with torch.no_grad():
        for x, y in fabric.setup_dataloaders(loader(world, X[:24], Y[:24])):
            fabric.all_reduce(F.cross_entropy(model(x), y))
    with refused("a batch on every rank in every step", row="F2b"), torch.no_grad():
        for x, y in valid:
            fabric.all_reduce(F.cross_entropy(model(x), y))


def accumulated(fabric: Any, train: Any, model: Any, optimizer: Any, pieces: int, weigh: bool = False) -> None:
    for number, (x, y) in enumerate(train, 1):
        updates = number % pieces == 0 or number == len(train)
        with fabric.no_backward_sync(model, enabled=not updates):
            weight = {"weight": (y != -100).sum()} if weigh else {}
            fabric.backward(loss_of(model, x, y) / pieces, **weight)
        if updates:
            optimizer.step()
            optimizer.zero_grad()


def case_accumulation_with_a_tail(world: hvdtrain.World) -> None:
    for row, targets in (("F3a", Y), ("F3b", HOLES)):
        model, wanted = network(), network()
        theirs = torch.optim.SGD(wanted.parameters(), 0.3, momentum=0.9)
        for number, (x, y) in enumerate(windows(BATCH, X, targets, epochs=2), 1):
            (loss_of(wanted, x, y) / 3).backward()
            if number % 4 in (3, 0):
                theirs.step()
                theirs.zero_grad()
        fabric = started()
        found, ours = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.3, momentum=0.9))
        train = fabric.setup_dataloaders(loader(world, X, targets))
        for _ in range(2):
            accumulated(fabric, train, found, ours, 3, weigh=targets is HOLES)
        close(row, (model, wanted))


def case_sums_wait_within_no_backward_sync(world: hvdtrain.World) -> None:
    fabric, model = started(), network()
    found, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    train = fabric.setup_dataloaders(loader(world))
    with refused("gradients that wait since no_backward_sync()", row="F4"):
        for x, y in train:
            with fabric.no_backward_sync(found):
                fabric.backward(loss_of(found, x, y))
            gradients = world.gather(model[0].weight.grad)
            assert world.size == 1 or not torch.equal(gradients[0], gradients[1])
            optimizer.step()
    optimizer.zero_grad()
    for x, y in train:
        optimizer.zero_grad()
        fabric.backward(loss_of(found, x, y))
        optimizer.step()
    world.agree("weights after a dropped gradient", hvt.fingerprint(model))


def case_clipping(world: hvdtrain.World) -> None:
    for row, options in (("F5a", {"max_norm": 0.1}), ("F5b", {"clip_val": 0.01})):

        def update(fabric: Any, backward: Any, model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            backward(loss_of(model, x, y))
            if fabric:
                fabric.clip_gradients(model, optimizer, **options)  # noqa: B023
            elif "max_norm" in options:  # noqa: B023
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            else:
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()

        compare(world, row, update, partial(torch.optim.SGD, lr=0.3))


def gan(backward: Callable[[Tensor], None], g: Any, d: Any, for_g: Any, for_d: Any, x: Tensor, z: Tensor) -> None:
    for_g.zero_grad()
    backward(judged(d(g(z)), 1.0))
    for_g.step()
    for_d.zero_grad()
    backward(judged(d(x), 1.0))
    backward(judged(d(g(z).detach()), 0.0))
    for_d.step()


def case_a_gan(world: hvdtrain.World) -> None:
    ours, theirs, fabric = adversaries(), adversaries(), started()
    parts = [fabric.setup(its, torch.optim.Adam(its.parameters(), 0.05)) for its in ours]
    train = fabric.setup_dataloaders(loader(world, X, NOISE))
    for _ in range(2):
        for x, z in train:
            gan(fabric.backward, parts[0][0], parts[1][0], parts[0][1], parts[1][1], x, z)
    plain = [torch.optim.Adam(its.parameters(), 0.05) for its in theirs]
    for x, z in windows(BATCH, X, NOISE, epochs=2):
        gan(torch.Tensor.backward, *theirs, *plain, x, z)
    close("F6", *zip(ours, theirs, strict=True))


class Callback:
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def on_epoch_end(self, epoch: int) -> None:
        self.epochs.append(epoch)


def epoch_of(fabric: Any, train: Any, model: Any, optimizer: Any, stop: int = 0) -> None:
    for number, (x, y) in enumerate(train, 1):
        optimizer.zero_grad()
        fabric.backward(loss_of(model, x, y))
        optimizer.step()
        if number == stop:
            return


def case_save_and_resume(world: hvdtrain.World) -> None:
    def made(**options: Any) -> tuple[Any, ...]:
        fabric, model = started(**options), network()
        found, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), 0.05))
        return fabric, model, found, optimizer, fabric.setup_dataloaders(loader(world, shuffle=True))

    fabric, whole, found, optimizer, train = made()
    for _ in range(3):
        epoch_of(fabric, train, found, optimizer)
    for row, stop in (("F7a", 0), ("F7b", 2)):
        with folder(world) as its:
            fabric, _, found, optimizer, train = made()
            epoch_of(fabric, train, found, optimizer)
            number = 0
            for number, (x, y) in enumerate(train, 1):
                optimizer.zero_grad()
                fabric.backward(loss_of(found, x, y))
                optimizer.step()
                if number == (stop or len(train)):
                    state = {"model": found, "optimizer": optimizer, "data": train, "epoch": 1}
                    fabric.save(its / "saved.ckpt", state)
                    break
            fabric, model, found, optimizer, train = made()
            state = {"model": found, "optimizer": optimizer, "data": train, "epoch": 0}
            fabric.load(its / "saved.ckpt", state)
            assert state["epoch"] == 1 and len(list(its.iterdir())) == 1
            for _ in range(2 if stop else 1):
                epoch_of(fabric, train, found, optimizer)
            close(row, (model, whole))


def case_lbfgs(world: hvdtrain.World) -> None:
    def update(fabric: Any, backward: Any, model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        def evaluated() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            backward(loss)
            return loss

        optimizer.step(evaluated)

    options: dict[str, Any] = {"lr": 0.5, "max_iter": 4, "line_search_fn": "strong_wolfe"}
    compare(world, "F8", update, partial(torch.optim.LBFGS, **options), X[:35], Y[:35])


def case_precision(world: hvdtrain.World) -> None:
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))  # type: ignore[attr-defined]
    ways: tuple[tuple[str, dict[str, Any], float], ...] = (
        ("F9a", {"precision": "64-true"}, 1e-10), ("F9b", {"precision": "bf16-mixed"}, 2e-3),
        ("F9c", {"plugins": [scaled]}, 2e-3),
    )  # fmt: skip
    for row, options, below in ways:
        torch.set_default_dtype(torch.float64 if row == "F9a" else torch.float32)
        model, wanted = network().float(), network().float()
        wanted = wanted.double() if row == "F9a" else wanted
        fabric = started(**options)
        found, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.02))
        theirs = torch.optim.SGD(wanted.parameters(), 0.02)
        kind = torch.bfloat16 if row == "F9b" else torch.float16
        epoch_of(fabric, fabric.setup_dataloaders(loader(world, X.float(), Y)), found, optimizer)
        for x, y in windows(BATCH, X.float().double() if row == "F9a" else X.float(), Y):
            theirs.zero_grad()
            with torch.autocast("cpu", kind, enabled=row != "F9a"):
                outputs = wanted(x)
            F.cross_entropy(outputs.to(torch.get_default_dtype()), y).backward()
            theirs.step()
        torch.set_default_dtype(torch.float64)
        close(row, (model, wanted), below=below)


def case_contrast_of_gathered_outputs(world: hvdtrain.World) -> None:
    torch.manual_seed(1)
    model = nn.Linear(WIDE, 1)
    wanted = copy.deepcopy(model)
    fabric = started()
    found, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.05))
    theirs = torch.optim.SGD(wanted.parameters(), 0.05)
    train = fabric.setup_dataloaders(loader(world, X[:24], Y[:24]))
    for x, _ in train:
        optimizer.zero_grad()
        scores, every = fabric.all_gather((found(x), x), sync_grads=True)
        fabric.backward(contrast(scores.reshape(-1, 1), every.reshape(-1, WIDE)))
        optimizer.step()
    for x, _ in windows(BATCH, X[:24], Y[:24]):
        theirs.zero_grad()
        contrast(wanted(x), x).backward()
        theirs.step()
    close("F10", (model, wanted))
    if world.size > 1:  # a process alone needs no other's values
        with refused("hvt.whole() needs", row="F10b"):
            for x, _ in train:
                fabric.backward(contrast(*hvt.whole(found(x), x)))


def case_buffers_of_padding_batches(world: hvdtrain.World) -> None:
    """Running statistics are the mean of the ranks' when an evaluation begins; a padding batch changes none."""
    fabric, model = started(), network(3, nn.BatchNorm1d(8, momentum=None))
    found, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.0))
    epoch_of(fabric, fabric.setup_dataloaders(loader(world, X[:25], Y[:25], drop_last=True)), found, optimizer)
    with torch.no_grad():
        hidden = model[0](X[:24]).reshape(-1, BATCH, 8)  # equal batches: the mean of means
    assert float((model[1].running_mean - hidden.mean((0, 1))).abs().max()) < 1e-12

    class Counts(nn.Module):
        """Counts its batches in a buffer that ranks average."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.running_mean += 1
            return x

    fabric, model = started(), network(3, Counts())
    found, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    accuracy = fabric.strategy.join_metric(torchmetrics.Accuracy(task="multiclass", num_classes=KINDS))
    samples = 0
    for x, y in fabric.setup_dataloaders(loader(world, X[:13], Y[:13])):
        fabric.backward(loss_of(found, x, y))
        accuracy.update(found(x), y)
        samples += fabric.strategy.samples
    assert sum(world.gather(samples)) == 13
    assert abs(float(model[1].running_mean) - 2 * (2 + world.size - 1) / world.size) < 1e-12
    with torch.no_grad():
        assert abs(float(accuracy.compute()) - float((found(X[:13]).argmax(1) == Y[:13]).double().mean())) < 1e-6


def case_collectives_and_callbacks(world: hvdtrain.World) -> None:
    callback = Callback()
    with folder(world) as its:
        fabric = started(callbacks=[callback], loggers=CSVLogger(its))
        fabric.seed_everything(7 + world.rank, verbose=False)  # ranks may have seeds of their own
        fabric.setup_dataloaders(loader(world, shuffle=True))
        fabric.call("on_epoch_end", epoch=3)
        fabric.log("loss", 1.0)
        fabric.logger.save()  # type: ignore[attr-defined]
        assert callback.epochs == [3]
        assert fabric.broadcast({"of": world.rank}, src=world.size - 1) == {"of": world.size - 1}
        gathered = fabric.all_gather(torch.tensor([float(world.rank)]))
        assert gathered.flatten().tolist() == [float(rank) for rank in range(world.size)]
        given = torch.tensor(float(world.rank))
        assert float(fabric.all_reduce(given)) == (world.size - 1) / 2 == float(given), "in place, as Fabric does"
        assert fabric.all_reduce(torch.tensor(world.rank), reduce_op="max") == world.size - 1
        fabric.barrier()
        assert fabric.launch(lambda its: its.global_rank) == world.rank
        assert len(list(its.rglob("metrics.csv"))) == 1


def case_what_is_refused(world: hvdtrain.World) -> None:
    fabric, model = started(), network()
    found, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    pairs = TensorDataset(X, Y)
    with refused("whose end is not known", row="F11a"):
        fabric.setup_dataloaders(DataLoader(Stream(), batch_size=2))
    with refused("batch_sampler=", row="F11b"):
        sampler = type("Own", (BatchSampler,), {})(range(TRAIN), 2, False)
        fabric.setup_dataloaders(DataLoader(pairs, batch_sampler=sampler))
    with refused("DistributedSampler", row="F11c"):
        fabric.setup_dataloaders(DataLoader(pairs, 2, sampler=DistributedSampler(pairs, world.size, world.rank)))
    with refused("needs a training loop", row="F11d"):
        fabric.backward(loss_of(found, X, Y))
    train = fabric.setup_dataloaders(loader(world))
    with refused("needs a training loop", "model.train()", row="F11e"):
        found.eval()
        for x, y in train:
            fabric.backward(loss_of(found, x, y))
    found.train()
    with refused("the same part of their batches", row="F11f"):
        for (x, y), _ in zip(train, fabric.setup_dataloaders(loader(world, X[:13], Y[:13])), strict=False):
            fabric.backward(loss_of(found, x, y))
    with refused("parameters of no module", row="F11g"):
        torch.manual_seed(world.rank)
        other = fabric.setup_optimizers(torch.optim.SGD([nn.Parameter(torch.zeros(2))], 0.1))
        other.step()
    with refused("nn.SyncBatchNorm is not supported", row="F11h"):
        fabric.setup(nn.SyncBatchNorm(3))
    with refused("must be the same on every rank", row="F11i"):
        for x, y in train:
            optimizer.zero_grad()
            fabric.backward(loss_of(found, x, y))
            optimizer.step()
            with torch.no_grad():
                model[0].weight += world.rank


if __name__ == "__main__":
    cases.main(globals())
