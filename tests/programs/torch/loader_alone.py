"""The loader in one process; ranks that are not there are acted by `Acted`. Prints which cases passed."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import threading
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import torch
from passing import run_all
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, StackDataset, TensorDataset

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import ConfigError, HvdtrainError
from hvdtrain.torch.data import prefetch, processes
from hvdtrain.values.nested import tensors_of
from hvdtrain.world.world import World


class Acted:
    """An engine whose other ranks say what this one says."""

    name, devices, local_rank, node, device = "acted", (), 0, 0, torch.device("cpu")

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.local_size = rank, size, size

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        return [data] * self.size


def acted(rank: int, size: int, seed: int = 0) -> World:
    return World(rank, size, rank, size, 0, "acted", "acted", (), seed, comm=Acted(rank, size))


class Training:
    """Stands for a prepared model."""

    preempted = leaves = False
    saver = None

    accumulate = 1

    def handed_out(self, step: Any, batch: Any = None) -> None:
        pass


TRAINING = Training()


class Numbers(Dataset):
    """Sample i is (i, i); those in `bad` cannot be read."""

    def __init__(self, samples: int, bad: tuple[int, ...] = ()) -> None:
        self.samples, self.bad = samples, bad

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            return hvt.Unreadable(f"file {index}", "broken")
        return torch.tensor(float(index)), index


class Hanging:
    """Forks of this process hang before their first line, as many as asked for; all are counted."""

    def __init__(self) -> None:
        self.forks, self.left = 0, 0
        os.register_at_fork(before=self._count, after_in_child=self._hang)

    def _count(self) -> None:
        self.forks += 1
        self.left -= 1

    def _hang(self) -> None:
        while self.left >= 0:
            signal.pause()


hanging = Hanging()


class Add:
    draws = 2

    def __call__(self, batch: Tensor, uniforms: Tensor) -> Tensor:
        return batch + uniforms.sum(1)


def arrays(samples: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(samples, dtype=np.float64), np.arange(samples)


def refused(action: Any, *parts: str, kind: type[Exception] = ConfigError) -> None:
    try:
        action()
    except kind as error:
        assert all(part in str(error) for part in parts), str(error)
    else:
        raise AssertionError(f"not refused: {parts}")


def failed(action: Any, kind: type[Exception]) -> str:
    """Returns the error's text, with notes and causes."""
    try:
        action()
    except kind as error:
        assert type(error) is kind, error
        return "".join(traceback.format_exception(error))
    raise AssertionError("no error")


def all_batches(train: Any) -> Any:
    """As a loop that trains reads them: batches that count nothing are differentiated too."""
    for batch in train:
        yield batch
        train.differentiated = train.step


def case_ranks_shares_make_up_every_step() -> None:
    for samples in range(1, 27):
        for size in range(1, 5):
            loaders = [hvt.loader(arrays(samples), 3, world=acted(rank, size)) for rank in range(size)]
            read = [[y.tolist() for _, y in train] for train in loaders]
            assert sorted(y for its in read for batch in its for y in batch) == list(range(samples))  # a user's loop
            assert [len(its) for its in read] == [len(train) for train in loaders]
            for train in loaders:
                train.followers.add(TRAINING)
            handed = [
                [
                    (train.step.samples, train.step.global_samples, train.step.padding, len(x))
                    for x, _ in all_batches(train)
                ]
                for train in loaders
            ]
            assert [len(its) for its in handed] == [len(train) for train in loaders] == [train.plan.steps()] * size
            for step in zip(*handed, strict=True):
                assert sum(own for own, *_ in step) == step[0][1]
                assert all(padding == (own == 0) for own, _, padding, _ in step)
                assert all(length == (own or min(2, samples)) for own, _, _, length in step)


def of_weights(train: Any) -> tuple[int, int]:
    """Where a restored run goes on."""
    state = train.state_of_weights()
    return state["epoch"], state["samples_in_epoch"]


def case_position_is_that_of_the_last_batch() -> None:
    train = hvt.loader(arrays(20), 3, world=World.solo())
    assert train.position == (0, 0) and len(train) == 7
    found = [(train.position, of_weights(train)) for _ in train]
    assert found == [*(((0, done), (0, 0)) for done in range(3, 20, 3)), ((1, 0), (0, 0))], found
    assert train.position == of_weights(train) == (1, 0) and len(train) == 7
    for _ in train:
        break
    assert train.position == (2, 0) and train.left_early() == (1, 3) and train.left_early() is None


def case_loops_that_end_early() -> None:
    train = hvt.loader(arrays(12), 4, world=World.solo())
    seen = []
    for epoch in train.epochs(4):
        for number, _ in enumerate(train):
            seen.append((epoch, train.step.epoch, number))
            if epoch in (1, 2) and number == epoch - 1:
                break
    assert seen == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (1, 1, 0), (2, 2, 0), (2, 2, 1), (3, 3, 0), (3, 3, 1), (3, 3, 2)]
    assert [epoch for epoch in train.epochs(6)] == [4, 5]  # bodies that do not read
    next(iter(train))
    assert train.step.epoch == 6
    first, second = iter(train), iter(train)  # none is begun: both stand at the next epoch
    assert next(second) is not None and train.step.epoch == 7
    refused(lambda: next(first), "cannot serve two loops at a time")
    assert len(list(second)) == 2 and train.position == (8, 0)
    third = iter(train)
    next(third)
    assert next(second, None) is None and train.position == (8, 4)  # what is over stays over, and moves nothing


def case_going_back_inside_an_epoch() -> None:
    train = hvt.loader(arrays(12), 4, world=World.solo())
    seen: list[tuple[int, int]] = []
    for epoch in train.epochs(2):
        for _ in train:
            seen.append((epoch, train.step.samples_done))
        if len(seen) == 6:
            train.go_on(1, 8)
    assert seen == [(0, 4), (0, 8), (0, 12), (1, 4), (1, 8), (1, 12), (1, 12)]


def case_places_that_are_not_there() -> None:
    train = hvt.loader(arrays(12), 4, world=World.solo())
    refused(lambda: train.go_on(0, 13), "0..12")
    refused(lambda: train.go_on(-1, 0), "epoch=-1")
    state = train.state_dict()
    for name, value in (("samples", 13), ("seed", 9), ("shuffle", False), ("order", "sorted words")):
        refused(lambda name=name, value=value: train.load_state_dict({**state, name: value}), f"{name}={value}")
    refused(lambda: train.load_state_dict({n: v for n, v in state.items() if n != "order"}), "order=unknown")
    train.load_state_dict(state)
    train.go_on(3, 12)
    assert train.position == (4, 0)


def case_tail_dropped() -> None:
    train = hvt.loader(arrays(14), 4, world=World.solo(), tail="drop")
    assert len(train) == 3
    assert [len(x) for x, _ in train] == [4, 4, 4]
    assert train.position == (1, 0)


def case_arrays_of_all_kinds() -> None:
    x = np.arange(20, dtype=np.uint8).reshape(10, 2)
    x.flags.writeable = False
    labels = np.arange(10, dtype=np.uint8)
    for batch, target, extra in hvt.loader((x, labels, torch.ones(10, 3)), 4, world=World.solo(), shuffle=False):
        assert (batch.dtype, target.dtype, extra.shape[1]) == (torch.uint8, torch.int64, 3)
        batch.zero_()  # a copy: the data stays
    assert x.sum() == 190
    own = torch.arange(10.0)
    for alone in hvt.loader(own, 10, world=World.solo(), shuffle=False):
        assert isinstance(alone, Tensor) and alone.tolist() == own.tolist()
        alone.zero_()
    assert own.sum() == 45
    known = hvt.loader(TensorDataset(own, own), 4, world=World.solo())
    assert known.workers == 0 and len(next(iter(known))) == 2


def case_refusals() -> None:
    world = World.solo()
    for given, said in (
        (DataLoader(Numbers(3)), "not its DataLoader"), ({1, 2}, "a set"), ((), "a tuple"),
        ((np.zeros(3), np.zeros(4)), "(3,), (4,)"), ([np.zeros((5, 2)), np.zeros(5)], "(x, y) instead of [x, y]"),
        ((np.array(["a", "b"]),), "must have a dtype of PyTorch"), ((np.zeros((2, 5)), [1, 2]), "(ndarray, list)"),
        ((np.zeros((0, 3)),), "needs samples"), ((np.ma.masked_array(np.zeros(3), mask=True),), "x.filled"),
        ((np.zeros(3, ">f8"),), "x.astype(np.float32)"),
    ):  # fmt: skip
        refused(lambda given=given: hvt.loader(given, 2, world=world), said)
    assert hvt.loader([np.zeros(5), np.ones(5)], 2, world=world).samples == 2  # samples of one shape
    refused(lambda: hvt.loader({"x": np.zeros(5), "y": np.ones(5)}, 2, world=world), "a dict of x, y", "StackDataset")
    stacked = hvt.loader(StackDataset(x=np.arange(5.0), y=np.ones(5)), 2, world=world, shuffle=False, workers=0)
    assert next(iter(stacked))["x"].tolist() == [0.0, 1.0], "what the refusal of a dict says to do"
    assert hvt.loader({0: torch.ones(1), 1: torch.ones(1)}, 2, world=world).samples == 2
    for batch, options, said in (
        (2, {"seed": 2**64}, "below 2**64"), (0, {}, "per_rank_batch=0"), (2, {"workers": -1}, "workers=-1"),
        (2, {"tail": "pad"}, "tail='pad'"),
    ):  # fmt: skip
        refused(lambda batch=batch, options=options: hvt.loader(arrays(3), batch, world=world, **options), said)
    refused(lambda: hvt.loader(arrays(3), 2), "hvdtrain.init")
    dictionaries = hvt.loader([{"a": torch.ones(1)}] * 3, 2, world=world, workers=0, augment=Add())
    refused(lambda: next(iter(dictionaries)), "a dict")


def case_the_training_generators_are_left_alone() -> None:
    class Greedy(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(()) + np.random.rand() + random.random()

    def states() -> list[Any]:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]

    for workers in (0, 1):
        before = states()
        train = hvt.loader(Greedy(9), 4, world=World.solo(), workers=workers)
        values = [batch.tolist() for _ in train.epochs(2) for batch in train]
        train.close()
        assert states() == before, workers
        assert len({value for batch in values for value in batch}) == 18


def case_samples_that_cannot_be_read() -> None:
    def values(bad: tuple[int, ...], workers: int) -> tuple[dict[int, float], Any]:
        train = hvt.loader(Numbers(40, bad), 4, world=World.solo(), workers=workers, augment=Add())
        got = {}
        counted = 0
        for _ in train.epochs(2):
            for x, y in train:
                if not train.step.padding:
                    got.update(zip(y.tolist(), x.tolist(), strict=True))
                    assert len(x) == train.step.samples
                counted += train.step.samples
        train.close()
        assert counted == 2 * (40 - len(bad))
        return got, sorted(train.skipped)

    whole, none = values((), 0)
    assert none == []
    for workers in (0, 1):
        got, skipped = values((3, 17), workers)
        assert skipped == [("file 17", "broken"), ("file 3", "broken")]
        # the others get the random numbers they would have got
        assert got == {sample: value for sample, value in whole.items() if sample not in (3, 17)}


def case_a_batch_without_a_readable_sample_counts_nothing() -> None:
    for bad, samples, found in (
        ((2, 3), 6, [(2, False, [0, 1]), (0, True, [0, 1]), (2, False, [4, 5])]),
        ((0, 1), 3, [(0, True, [2]), (1, False, [2])]),
    ):
        train = hvt.loader(Numbers(samples, bad), 2, world=World.solo(), workers=0, shuffle=False)
        assert [y.tolist() for _, y in train] == [y for _, padding, y in found if not padding]
        train.followers.add(TRAINING)
        assert [(train.step.samples, train.step.padding, y.tolist()) for _, y in all_batches(train)] == found
        with torch.no_grad():
            assert [y.tolist() for _, y in train] == [y for _, padding, y in found if not padding]
        refused(lambda train=train: list(train), "not over list(train)", "no_grad()", "did not train on it")
    refused(lambda: list(hvt.loader(Numbers(3, (0, 1, 2)), 2, world=World.solo(), workers=0)), "none of 3")


def case_too_many_unreadable_samples() -> None:
    for bad, enough in ((8, False), (9, True)):
        train = hvt.loader(Numbers(40, tuple(range(bad))), 4, world=World.solo(), workers=0)
        if enough:
            refused(lambda train=train: list(train), "9 of ", "file ")
        else:
            assert len([batch for _ in train.epochs(3) for batch in train]) == 30  # the same ones, again and again


def case_a_killed_worker_is_named() -> None:
    class Slow(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return index

    train = hvt.loader(Slow(40), 4, world=World.solo(), workers=1, shuffle=False)
    refused(lambda: list(train), "must not end before the training", "shm-size", kind=HvdtrainError)
    assert not psutil.Process().children(recursive=True)
    train.close()
    refused(lambda: list(train), "closed")


def case_workers_see_the_data_set_as_it_is_and_end() -> None:
    class Growing(Numbers):
        size = 1

        def __getitem__(self, index: int) -> Any:
            return os.getpid(), torch.get_num_threads(), self.size

    for workers in (0, 2):
        data = Growing(12)
        train = hvt.loader(data, 3, world=World.solo(), workers=workers)
        passes = []
        for data.size in (1, 2, 3):
            batches = list(train)
            assert {size for _, _, sizes in batches for size in sizes.tolist()} == {data.size}
            passes.append({pid for pids, _, _ in batches for pid in pids.tolist()})
            assert workers == 0 or all(threads.max() == 1 for _, threads, _ in batches)
            assert not psutil.Process().children(recursive=True)
        assert [len(pids) for pids in passes] == [workers or 1] * 3
        assert (os.getpid() in set.union(*passes)) == (workers == 0)
        for number, _ in enumerate(train):
            if number == 1:
                break
        assert sum(len(pids) for pids, _, _ in train) == 12  # what was read ahead for the loop left early is not served
        next(iter(train))
        assert sum(len(batch[0]) for batch, _ in train.one_pass()) == 12  # beside a loop
        train.close()
        assert not psutil.Process().children(recursive=True)


def case_a_worker_that_hangs_at_its_fork_is_forked_again() -> None:
    hanging.forks, hanging.left = 0, 1
    train = hvt.loader(Numbers(40), 4, world=World.solo(), workers=2)
    assert sorted(int(i) for _, indices in train for i in indices) == list(range(40))
    assert hanging.forks == 3 and not psutil.Process().children()


def case_workers_that_always_hang_are_given_up() -> None:
    hanging.left = 100
    train = hvt.loader(Numbers(40), 4, world=World.solo(), workers=2)
    with mock.patch.object(processes, "PATIENCE_S", (0.1, 0.2)):
        refused(lambda: next(iter(train)), "did not start", "0.1 s, 0.2 s", "forkserver", kind=HvdtrainError)
    hanging.left = 0
    assert not psutil.Process().children()


def case_errors_of_the_data_set_come_through() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise self.kind("a bug of the user's")
            return index

    def collate(samples: list[int]) -> Tensor:
        raise RuntimeError("a bug in collate")

    for workers in (0, 1):
        for kind in (KeyError, RuntimeError):
            Broken.kind = kind
            train = hvt.loader(Broken(4), 2, world=World.solo(), workers=workers, shuffle=False)
            text = failed(lambda train=train: list(train), kind)
            assert "a bug of the user's" in text and "while reading sample 3" in text, text
            assert "out-of-memory" not in text
        train = hvt.loader(Numbers(4), 2, world=World.solo(), workers=workers, shuffle=False, collate=collate)
        text = failed(lambda train=train: list(train), RuntimeError)
        assert "a bug in collate" in text and "while collating samples 0, 1" in text, text
        assert not psutil.Process().children(recursive=True)


def case_what_a_worker_cannot_send_is_said() -> None:
    class OfAFunction(Exception):
        """Pickle finds no class that a function made"""

    class Broken(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise OfAFunction("a bug of the user's")
            return super().__getitem__(index)

    def collate(samples: list[Any]) -> Any:
        return lambda: samples

    whole: dict[str, Any] = {"world": World.solo(), "shuffle": False}
    for workers in (1, 2):
        train = hvt.loader(Broken(8), 2, workers=workers, **whole)
        refused(lambda train=train: list(train), "bug of the user's", "reading sample 3", kind=RuntimeError)
        train = hvt.loader(Numbers(8), 2, workers=workers, collate=collate, **whole)
        refused(lambda train=train: list(train), "pickle", "workers=0", kind=ConfigError)
        train = hvt.loader(lambda: range(9), 2, workers=workers, collate=collate, **whole)
        refused(lambda train=train: list(train), "pickle", "workers=0", kind=ConfigError)


def case_a_pass_that_a_fork_inherits_is_left_alone() -> None:
    train = hvt.loader(Numbers(40), 4, world=World.solo(), workers=1)
    found = train._source.read(train.plan.step_slices(0, rank=0))
    next(found)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(writing, 2)  # where an error within the end of a generator is told
        found.close()
        os._exit(0)
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0
    assert not os.read(reading, 1)
    os.close(reading)
    next(found)
    found.close()


def case_workers_begin_and_read_ahead_as_they_are_told(folder: Path) -> None:
    class Told(Numbers):
        def __getitem__(self, index: int) -> Any:
            with (folder / "read").open("a") as file:
                file.write(f"{index} {told}\n")
            return super().__getitem__(index)

    told = "nothing"

    def begin(worker: int) -> None:
        nonlocal told
        told = f"worker {worker}"

    train = hvt.loader(
        Told(60), 1, world=World.solo(), workers=1, worker_init_fn=begin, prefetch_factor=7, shuffle=False
    )
    batches = iter(train)
    (folder / "read").write_text("")
    next(batches)
    train.close()  # ends the worker when it has made what it was asked for
    read = (folder / "read").read_text().splitlines()
    assert set(read) == {f"{number} worker 0" for number in range(len(read))} and 1 <= len(read) <= 8, read
    refused(lambda: hvt.loader(Told(3), 1, world=World.solo(), prefetch_factor=0), "prefetch_factor")


def case_what_moves_itself_is_moved() -> None:
    class Graphs:
        def __init__(self, x: Tensor) -> None:
            self.x, self.device = x, torch.device("cpu")

        def to(self, device: torch.device) -> Graphs:
            moved = Graphs(self.x)
            moved.device = device
            return moved

    def collate(samples: list[Any]) -> Any:
        return torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]), Graphs(torch.ones(1)), torch.float32

    train = hvt.loader(Numbers(4), 4, world=World.solo(), collate=collate, workers=0)
    train.device = torch.device("meta")
    ((packed, graphs, kept),) = train
    assert graphs.device.type == "meta" and kept is torch.float32 and graphs.x in tensors_of(graphs)
    assert packed.data.device.type == "meta" and packed.batch_sizes.device.type == "cpu"


def case_workers_tell_a_stream_its_epoch_one_after_the_other() -> None:
    both = torch.multiprocessing.Barrier(2)

    class Shared:
        """As Hugging Face's streams: the epoch is in memory that workers share, and what is missing is added."""

        def __init__(self) -> None:
            self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

        def set_epoch(self, epoch: int) -> None:
            missing = epoch - int(self._epoch)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.3)  # were the other worker here as well, both would add it
            self._epoch += missing

        def __iter__(self) -> Any:
            order = list(range(20))
            random.Random(int(self._epoch)).shuffle(order)
            return iter(order)

    stream = Shared()

    def told(epoch: int) -> Any:
        stream.set_epoch(epoch)
        return stream

    for given in (stream, told):
        seen: list[list[int]] = []
        both.reset()
        train = hvt.loader(given, 4, world=World.solo(), workers=2)
        for epoch in train.epochs(2):
            both.reset()
            seen.append([number for batch in train for number in batch.tolist()])
            assert sorted(seen[-1]) == list(range(20)), (epoch, seen)
        assert seen[0] != seen[1]
        train.close()


def case_streams_with_records_that_cannot_be_read() -> None:
    def decode(number: int) -> Any:
        return hvt.Unreadable(f"record {number}", "torn") if number in (0, 3, 8) else torch.tensor(number)

    train = hvt.loader(lambda: range(10), 2, world=World.solo(), decode=decode)
    assert [batch.tolist() for batch in train] == [[1], [2], [4, 5], [6, 7], [9]]
    assert [name for name, _ in train.skipped] == ["record 0", "record 3", "record 8"]
    strict = hvt.loader(range(4), 2, world=World.solo(), sampler=[0, 1, 2])  # a range is read by index
    assert [batch.tolist() for batch in strict] == [[0, 1], [2]]
    first = hvt.loader(lambda: range(9), 2, world=World.solo(), decode=lambda n: n if n > 1 else decode(0))
    first.followers.add(TRAINING)
    batches = iter(first)
    assert next(batches).tolist() == [2, 3] and first.step and first.step.padding  # none of its own: others
    first.differentiated = first.step
    assert next(batches).tolist() == [2, 3] and first.step.samples == 2
    first.close()


def case_collate_and_getitem_of_the_users_are_called() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            x, y = super().__getitem__(index)
            return x * 2, y

    x = torch.arange(6.0)
    world, plain = World.solo(), {"shuffle": False, "world": World.solo()}
    for workers in (0, 1):
        got = [batch[0].tolist() for batch in hvt.loader(Doubled(x, x), 3, workers=workers, **plain)]
        assert got == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
    for data in ((x, x), TensorDataset(x, x)):
        found = list(hvt.loader(data, 3, collate=lambda rows: {"sum": sum(a + b for a, b in rows)}, **plain))
        assert [float(batch["sum"]) for batch in found] == [6.0, 24.0]
    assert [float(batch) for batch in hvt.loader(x, 3, world=world, shuffle=False, collate=sum)] == [3.0, 12.0]


def case_dictionaries_of_all_kinds() -> None:
    class Named(dict):
        """With an attribute and a way to be made of its own, as models' libraries have them."""

        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind

    def collate(rows: list[Any]) -> Any:
        made = Named("batch")
        made["x"] = torch.stack([x for x, _ in rows])
        return {"named": made, "lists": collections.defaultdict(list, y=[torch.tensor([i for _, i in rows])])}

    (batch,) = hvt.loader(Numbers(2), 2, world=World.solo(), workers=0, collate=collate, shuffle=False)
    assert type(batch["named"]) is Named and batch["named"].kind == "batch" and batch["named"]["x"].tolist() == [0, 1]
    assert batch["lists"]["y"][0].tolist() == [0, 1] and batch["lists"]["new"] == []


def case_reading_ahead() -> None:
    cpu = torch.device("cpu")
    assert list(prefetch.Ahead(iter(range(20)), cpu, lambda _: [])) == list(range(20))

    def broken() -> Any:
        yield 1
        raise ValueError("in the thread")

    ahead = prefetch.Ahead(broken(), cpu, lambda _: [])
    assert next(ahead) == 1
    refused(lambda: next(ahead), "in the thread", kind=ValueError)
    read: list[int] = []
    left = prefetch.Ahead((read.append(number) or number for number in range(100)), cpu, lambda _: [])
    assert next(left) == 0
    left.close()
    assert not left._thread.is_alive() and len(read) <= 5


if __name__ == "__main__":
    assert hvdtrain.current() is None
    run_all(globals())
    # a rank that is killed cannot end its workers: they must notice; the harness looks for processes left behind
    left_open = hvt.loader(Numbers(40), 4, world=World.solo(), workers=2)
    next(iter(left_open))
    print(f"left {len(psutil.Process().children())} workers", flush=True)
    os._exit(0)
