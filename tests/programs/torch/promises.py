"""The loader's promises, attacked on ranks; what is trained is compared with loops of plain PyTorch in one process.

Prints "shown ROW TEXT" for what a row of docs/limits.md tells.
"""

from __future__ import annotations

import gc
import io
import random
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any
from weakref import ref

import numpy as np
import torch
from cases import gap, main, plainly, refused, shown, windows
from cases import train as train_on
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, Subset

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import ConfigError, HvdtrainError, ReplicaError
from hvdtrain.torch.data.processes import worker_context

torch.set_default_dtype(torch.float64)


def data(samples: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    return torch.randn(samples, 3, generator=made), torch.randn(samples, 2, generator=made)


def net() -> nn.Module:
    made = torch.Generator().manual_seed(5)
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=made))
    return model


def prepared(train: Any, **options: Any) -> tuple[Any, Any]:
    model = net()
    return hvt.prepare(model, sgd(model), train, **({"verify": False} | options))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(model(x), y)


def update(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    train_on(model, optimizer, [(x, y)], loss_of)


def plain(updates: Iterable[tuple[Tensor, ...]]) -> nn.Module:
    model = net()
    plainly(model, sgd(model), updates, loss_of)
    return model


@contextmanager
def folder(world: hvdtrain.World) -> Iterator[str]:
    yield world.broadcast(tempfile.mkdtemp() if world.is_main else "")


# -- samples that cannot be read ----------------------------------------------------------------------------------
class Holes(Dataset):
    """Rows of which some cannot be read; nothing about it says so before they are read."""

    bad = (1, 6, 7, 9, 17)

    def __init__(self, samples: int) -> None:
        self.x, self.y = (part[:samples] for part in data(24))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return hvt.Unreadable(str(index), "gone") if index in self.bad else (self.x[index], self.y[index])


def case_samples_left_out_do_not_weigh(world: hvdtrain.World) -> None:
    samples, batch = 20, 8
    x, y = data(24)
    for accumulate in (1, 2):
        starts, size = range(0, samples, batch * accumulate), batch * accumulate
        there = [[i for i in range(s, min(s + size, samples)) if i not in Holes.bad] for s in starts]
        wanted = plain([(x[rows], y[rows]) for rows in there])
        unweighted = plain([(x[rows], y[rows] * 1.1) for rows in there])
        for source in (Holes(samples), Subset(Holes(samples + 4), range(samples))):
            train = hvt.loader(source, batch // world.size, shuffle=False, workers=0)
            model, optimizer = prepared(train, accumulate=accumulate)
            train_on(model, optimizer, train, loss_of)
            error = gap(model, wanted)
            assert error < 1e-10 < gap(model, unweighted), error
    shown("T4", error)


# -- passes with gradients that nothing is differentiated of --------------------------------------------------------
def case_a_validation_pass_with_gradients_holds_no_graph(world: hvdtrain.World) -> None:
    x, y = data(24)
    train = hvt.loader((x, y), 8 // world.size, shuffle=False, workers=0)
    model, optimizer = prepared(train, verify=True)  # what looks at the loss holds outputs

    def alive_after_ten() -> int:
        held = [ref(model(x)) for _ in range(10)]
        return sum(out() is not None for out in held)

    before = alive_after_ten()
    train_on(model, optimizer, train, loss_of)
    after = alive_after_ten()
    assert before <= 1 and after <= 1, (before, after)  # that of the last call alone
    shown("T12b", f"{before} and {after} outputs of ten are held, before the first update and after it")


# -- one loader, two models ---------------------------------------------------------------------------------------
def case_one_loader_for_two_models(world: hvdtrain.World) -> None:
    samples, batch = 26, 4  # 7 batches: the last update of four micro-batches has three
    x, y = data(samples)
    train = hvt.loader((x, y), batch // world.size, shuffle=False)
    often, its_optimizer = prepared(train)
    rarely, other_optimizer = prepared(train, accumulate=4)
    for rows in train:
        update(often, its_optimizer, *rows)
        update(rarely, other_optimizer, *rows)
    assert (its_optimizer.progress.step, other_optimizer.progress.step) == (7, 2)
    error = max(gap(often, plain(windows(4, x, y))), gap(rarely, plain(windows(16, x, y))))
    assert error < 1e-10 < gap(often, rarely), error
    shown("T7", error)


# -- a validation loop of the user's own --------------------------------------------------------------------------
def case_a_loop_of_ones_own_has_each_sample_once(world: hvdtrain.World) -> None:
    x, y = data(9)
    model = net()
    held_out = hvt.loader((x, y), 8 // world.size, shuffle=False)
    train = hvt.loader((x, y), 8 // world.size, shuffle=False)
    training = prepared(train)
    wanted = float(mse_loss(model(x), y).detach())
    for loader in (held_out, train):
        total, count = 0.0, 0
        with torch.no_grad():
            for inputs, targets in loader:
                total += float(mse_loss(model(inputs), targets)) * len(inputs)
                count += len(inputs)
        sums = world.sum({"total": total, "count": count})
        assert sums["count"] == 9
        error = abs(sums["total"] / 9 - wanted)
        assert error < 1e-12, error
    shown("T10a", error)
    paddings = 0
    assert training
    try:  # the training loader, read with gradients: its last batch counts nothing on rank 1
        for _ in train:
            paddings += train.step.padding
    except ConfigError as error:
        assert "no_grad()" in str(error)
        text = str(error)
    else:
        text = ""
    found = world.gather((paddings, text))
    assert [bool(its) for _, its in found] == [its > 0 for its, _ in found] == [rank > 0 for rank in range(world.size)]
    shown("T10b", next((its for _, its in found if its), "no rank had none"))


# -- the same data, another order ---------------------------------------------------------------------------------
def case_ranks_with_other_data_are_refused(world: hvdtrain.World) -> None:
    if world.size == 1:
        return
    x, y = data(24)
    rows = [(x[i], y[i]) for i in range(24)]
    turned = rows[world.rank :] + rows[: world.rank]
    for row, mine, said in (
        ("T11b", (x[world.rank :: world.size], y[world.rank :: world.size]), "x[rank::size]"),
        ("T11c", turned, "rank 1: "),
        ("", (x.roll(world.rank, 0), y.roll(world.rank, 0)), "the contents of [0], [1] differ"),
    ):
        with refused(said, kind=ReplicaError, row=row):
            hvt.loader(mine, 4, workers=1)
    hvt.loader(rows, 4, workers=1)
    hvt.loader(Noisy(), 4, workers=0)  # random transforms are not other data


class Noisy(Dataset):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        return index + torch.rand(()), np.random.rand(), random.random(), np.random.default_rng().normal(), index


def case_a_loader_that_goes_along_with_its_twin_is_refused(world: hvdtrain.World) -> None:
    first, second = (hvt.loader(data(24), 4) for _ in range(2))
    with refused("each sample would be paired with itself", "seed=6", kind=ConfigError, row="T11a"):
        for _ in zip(first, second, strict=True):
            pass


# -- random numbers -----------------------------------------------------------------------------------------------
def drawn() -> list[Any]:
    own = next(iter(DataLoader(Noisy(), batch_size=1)))  # no workers: this process's generators
    return [random.random(), np.random.rand(), float(torch.rand(())), *[float(part) for part in own[:3]]]


def case_random_numbers_differ_by_rank_and_are_restored(world: hvdtrain.World) -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    train = hvt.loader(data(16), 4)
    model, optimizer = prepared(train)
    everywhere = world.gather(drawn())
    for rank, its in enumerate(everywhere[1:], 1):
        assert all(a != b for a, b in zip(everywhere[0], its, strict=True)), rank
    # a plain fork may hang on Pythons up to 3.11.9, see hvdtrain/torch/data/processes.py
    workers = DataLoader(Noisy(), num_workers=1, multiprocessing_context=worker_context())
    in_workers = [float(part) for part in next(iter(workers))[:3]]
    assert all(len(set(its)) == world.size for its in zip(*world.gather(in_workers), strict=True))
    with folder(world) as path:
        checkpoints = hvdtrain.Checkpointer(path)
        checkpoints.save(hvt.model_state(model, optimizer), progress=optimizer.progress)
        after = drawn()
        again, other = prepared(hvt.loader(data(16), 4))
        for begin in (random.seed, np.random.seed, torch.manual_seed):
            begin(7)  # `prepare` began them where the saved run did
        assert all(a != b for a, b in zip(drawn(), after, strict=True))
        checkpoints.restore(hvt.model_state(again, other))
        assert drawn() == after
    shown("T11d", "each rank draws its own; a restored run draws what the saved one would have")


def case_synchronised_batch_norm_comes_off(world: hvdtrain.World) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvt.prepare(model, optimizer, sync_batchnorm=True, verify=False)
    assert (type(model[1]) is nn.BatchNorm1d) == (world.size == 1)
    hvt.prepare(model, optimizer, verify=False)
    assert type(model[1]) is nn.BatchNorm1d
    shown("T11e", "the layers are plain again")


# -- what is kept --------------------------------------------------------------------------------------------------
def case_gradients_that_are_kept_stay(world: hvdtrain.World) -> None:
    if world.engine in ("ddp", "deepspeed"):
        return  # their gradients are views of buffers that PyTorch uses again: clone them to keep them
    x, y = data(32)
    train = hvt.loader((x, y), 8 // world.size, shuffle=False)
    model, optimizer = prepared(train)
    kept, wanted = [], []
    for rows in train:
        update(model, optimizer, *rows)
        kept.append([parameter.grad for parameter in model.parameters()])
        wanted.append([parameter.grad.clone() for parameter in model.parameters()])
    pairs = [(a, b) for its, then in zip(kept, wanted, strict=True) for a, b in zip(its, then, strict=True)]
    assert len(pairs) == 8 and all(torch.equal(a, b) for a, b in pairs)
    del kept, pairs
    addresses = set()
    for _ in range(2):
        for rows in train:
            update(model, optimizer, *rows)
            addresses.add(next(iter(model.parameters())).grad.data_ptr())
    assert world.engine != "horovod" or len(addresses) == 1, "memory is used again where nobody kept it"
    shown("T11f", "they stay as they were; the next update takes other memory")


# -- where a run goes on ------------------------------------------------------------------------------------------
class Run:
    """Epochs of 4 updates of 8 samples; keeps the samples it was given."""

    def __init__(self, world: hvdtrain.World, path: str, accumulate: int = 1) -> None:
        self.world, self.checkpoints = world, hvdtrain.Checkpointer(path)
        x, y = data(32)
        self.train = hvt.loader((x, y, torch.arange(32)), 8 // world.size // accumulate, seed=2)
        self.model, self.optimizer = prepared(self.train, accumulate=accumulate)
        self.seen: list[int] = []

    def save(self) -> None:
        self.checkpoints.save(hvt.model_state(self.model, self.optimizer), progress=self.optimizer.progress)

    def restore(self) -> Run:
        self.checkpoints.restore(hvt.model_state(self.model, self.optimizer))
        return self

    def batch(self, rows: Any) -> None:
        x, y, numbers = rows
        update(self.model, self.optimizer, x, y)
        self.seen += [number for its in self.world.gather(numbers.tolist()) for number in its]

    def epochs(self, total: int, *, leave_after: int = 99, stop: int = 99) -> Run:
        """Leaves each epoch after so many updates; saves after each; ends after `stop` epochs."""
        for number, _ in enumerate(self.train.epochs(total), 1):
            for update_number, rows in enumerate(self.train, 1):
                self.batch(rows)
                if update_number == leave_after:
                    break
            self.save()
            if number == stop:
                break
        return self


def case_saved_before_the_first_update(world: hvdtrain.World) -> None:
    for accumulate in (1, 2):
        with folder(world) as path:
            first = Run(world, path, accumulate)
            for number, _ in enumerate(first.train):
                if number == accumulate - 1:  # one batch was handed out (in micro-batches), and no update made
                    first.save()
                    break
            again = Run(world, path, accumulate).restore()
            for rows in again.train:
                again.batch(rows)
            assert sorted(again.seen) == list(range(32)), (accumulate, len(again.seen))
    shown("T13b", f"{len(again.seen)} of 32 samples of the epoch are trained on")


def case_saved_in_mid_update(world: hvdtrain.World) -> None:
    with folder(world) as path:
        first = Run(world, path, accumulate=2)
        for number, rows in enumerate(first.train, 1):
            first.batch(rows)
            if number == 5:  # two updates and a micro-batch, whose gradients are in no weight
                first.save()
                break
        again = Run(world, path, accumulate=2).restore()
        for rows in again.train:
            again.batch(rows)
        assert sorted(first.seen[:16] + again.seen) == list(range(32))


def case_epochs_that_were_left(world: hvdtrain.World) -> None:
    with folder(world) as path:
        whole = Run(world, path + "/whole").epochs(4, leave_after=2)
        first = Run(world, path + "/parts").epochs(4, leave_after=2, stop=2)
        again = Run(world, path + "/parts").restore().epochs(4, leave_after=2)
    steps = again.optimizer.progress.step
    assert steps == whole.optimizer.progress.step == 8
    assert first.seen + again.seen == whole.seen
    assert gap(again.model, whole.model) == 0.0
    shown("T13c", f"{steps} updates, as without the restart, on the same samples")


def case_what_follows_on_an_epochs_loop_is_not_done_for_a_checkpoint_within_it_which_is_said(world: Any) -> None:
    said = []
    for within in (True, False):
        with folder(world) as path:
            first = Run(world, path)
            for number, rows in enumerate(first.train, 1):
                first.batch(rows)
                if number == 4 and within:
                    first.save()
            if not within:
                first.save()
            with redirect_stdout(io.StringIO()) as out:
                again = Run(world, path).restore()
            assert again.train.position == (1, 0)
            said.append("saved after the last batch of epoch 0, within its loop" in out.getvalue())
    assert said == [world.is_main, False], said


def case_a_second_loader_goes_on_where_it_was(world: hvdtrain.World) -> None:
    """Within its pass and after it, with `extra=` and without; where it is made too late, that is said."""
    said = "the place of a second loader, of 32 samples (epoch 0, 16 samples done)"

    def part(path: str, *, kept: bool, late: bool, leave_after: int) -> tuple[list[int], tuple[int, int], str]:
        run, seen = Run(world, path), []
        out = io.StringIO()
        if late:
            with redirect_stdout(out):
                run.restore()
        alike, second = (hvt.loader((torch.arange(32),), 8 // world.size, seed=7) for _ in range(2))
        state = hvt.model_state(run.model, run.optimizer, extra={"second": second} if kept else None)
        if not late:
            with redirect_stdout(out):
                run.checkpoints.restore(state)
        place = second.position
        for number, (rows, (numbers,)) in enumerate(zip(run.train, second, strict=False), 1):
            run.batch(rows)
            seen += [one for its in world.gather(numbers.tolist()) for one in its]
            run.checkpoints.save(state, progress=run.optimizer.progress)
            if number == leave_after:
                break
        run.checkpoints.wait()
        assert alike.position == (0, 0)
        return seen, place, out.getvalue()

    for kept, late in ((False, False), (False, True), (True, False)):
        gc.collect()  # a loader that was left within its loop is there until then
        with folder(world) as path:
            first, _, _ = part(path, kept=kept, late=False, leave_after=2)
            gc.collect()
            rest, place, told = part(path, kept=kept, late=late, leave_after=9)
            assert (sorted(first + rest) == list(range(32))) == (not late), first + rest
            assert place == ((0, 0) if late else (0, 16)), place
            assert (said in told) == (late and world.is_main), told
            next_epoch, place, told = part(path, kept=kept, late=False, leave_after=9)
            if not late:
                assert place == (1, 0) and sorted(next_epoch) == list(range(32)), place
                assert "second loader" not in told, told
                assert next_epoch != first + rest, "another order each epoch"


def case_a_rank_that_is_ahead_in_a_second_loader_stays_ahead(world: hvdtrain.World) -> None:
    """A rank without a sample in the last step of a pass begins the next one earlier, where it draws by hand."""
    with folder(world) as path:
        places = []
        for part in range(2):
            run = Run(world, path)
            second = hvt.loader((torch.arange(5),), 1, seed=7)
            run.restore()
            places.append(second.position)
            draws = iter(second)
            for _ in range(3 if part == 0 else 0):
                if next(draws, None) is None:
                    draws = iter(second)
                    next(draws)
            if part == 0:
                places.append(second.position)
                run.save()
                run.checkpoints.wait()
        assert places[1] == places[2] == [(1, 0), (1, world.size)][world.rank], places


def case_what_is_read_before_training_is_no_epoch(world: hvdtrain.World) -> None:
    train = hvt.loader(data(17), 4)
    sum(len(x) for x, _ in train)  # a statistic
    next(iter(train))  # a look at the shapes
    model, optimizer = prepared(train)
    next(iter(train))
    orders, updates = [], []
    for epoch in train.epochs(2):
        orders.append(epoch)
        order = train.plan.order(epoch)
        updates += [order[start : start + train.global_batch] for start in range(0, 17, train.global_batch)]
        train_on(model, optimizer, train, loss_of)
    assert orders == [0, 1] and train.position == (2, 0)
    every = data(17)
    assert gap(model, plain([(every[0][rows], every[1][rows]) for rows in updates])) < 1e-6


def case_a_loop_that_trains_on_nothing_is_no_epoch(world: hvdtrain.World) -> None:
    """Accuracy after each epoch, and a look at a batch before and after it, change nothing; two loops that train do."""
    train, whole = hvt.loader(data(17), 4), hvt.loader(data(17), 4)
    (model, optimizer), (other, its_optimizer) = prepared(train), prepared(whole)
    numbers = []
    for epoch in train.epochs(3):
        numbers.append(epoch)
        next(iter(train))
        train_on(model, optimizer, train, loss_of)
        with torch.no_grad():
            assert sum(len(x) for x, _ in train) >= 17 // world.size
        next(iter(train))
    for _ in whole.epochs(3):
        train_on(other, its_optimizer, whole, loss_of)
    assert numbers == [0, 1, 2] and train.position == (3, 0) and gap(model, other) == 0.0
    with refused("an epoch of loader.epochs() cannot have more than one training loop", "2 loops", kind=ConfigError):
        for _ in train.epochs(5):
            for _ in range(2):
                train_on(model, optimizer, train, loss_of)


def case_a_loader_that_prepare_was_not_given(world: hvdtrain.World) -> None:
    train = hvt.loader(data(16), 4)
    model, optimizer = prepared(None)
    with refused("the loader that prepare() was given", kind=ConfigError, row="T13a"):
        hvt.model_state(model, optimizer, train)
    with refused("hvdtrain.torch.loader", "DataLoader", kind=ConfigError, row="T17d"):
        prepared(DataLoader(Noisy()))


# -- what ranks have of their own ---------------------------------------------------------------------------------
def case_a_rate_of_a_ranks_own_is_refused(world: hvdtrain.World) -> None:
    train = hvt.loader(data(32), 4)
    model, optimizer = prepared(train)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    before = None
    with refused("the same learning rates", "rank 1: 0.01", "evaluate()", kind=ReplicaError):
        for number, (x, y) in enumerate(train):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            update(model, optimizer, x, y)
            scheduler.step(number * (2 * world.rank - 1))  # a loss of its own: one falls, one grows
    assert before is not None and all(map(torch.equal, before, model.parameters())), "before it was applied"


def case_hooks_that_change_gradients_are_named(world: hvdtrain.World) -> None:
    def doubled(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    for register in (
        lambda p: p.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1)),
        lambda p: p.register_post_accumulate_grad_hook(doubled),
    ):
        model = net()
        hook = register(model.weight)
        with refused("a hook on weight changes it", "between optimizer.backward(loss)", kind=ReplicaError):
            hvt.prepare(model, sgd(model))
        hook.remove()
        model.bias.register_hook(lambda gradient: None)  # one that only looks
        hvt.prepare(model, sgd(model))


# -- the rest -----------------------------------------------------------------------------------------------------
def case_a_scheduler_beside_lr_is_refused_at_once(world: hvdtrain.World) -> None:
    train = hvt.loader(data(16), 8 // world.size)
    model, optimizer = prepared(train, lr=hvdtrain.LR(0.1, 8))
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    x, y = next(iter(train))
    optimizer.backward(mse_loss(model(x), y))
    with refused("a scheduler of torch.optim.lr_scheduler", kind=HvdtrainError, row="T19d"):
        optimizer.step()


if __name__ == "__main__":
    main(globals().copy())
