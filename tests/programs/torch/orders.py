"""Resumed in an order that is not the one of the saved run; ranks that are not there are acted. Prints what passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from loader_alone import Numbers, acted, refused
from passing import run_all
from torch.utils.data import DataLoader, TensorDataset

import hvdtrain.torch as hvt

RECORDS, DONE = 60, 24


def shuffled(seed: int, keep: int = 8) -> Callable[[int], list[int]]:
    """The order of an epoch; its first eight are the same whatever the seed."""

    def order(epoch: int) -> list[int]:
        rest = np.random.default_rng([seed, epoch]).permutation(np.arange(keep, RECORDS))
        return [*range(keep), *rest.tolist()]

    return order


def texts(seed: int) -> Callable[[int], list[dict[str, Any]]]:
    order = shuffled(seed)
    return lambda epoch: [{"text": f"{index:<2000}", "row": np.full(3000, index)} for index in order(epoch)]


def read(train: Any, steps: int) -> list[int]:
    found = []
    for number, batch in enumerate(train):
        found += [int(value) for value in (batch["text"] if isinstance(batch, dict) else batch[1])]
        if number + 1 == steps:
            break
    return found


def saved(make: Callable[[Any], Any], size: int, rank: int = 0) -> dict[str, Any]:
    """The state after DONE samples of `size` ranks; of what is handed out and read since nothing is in it."""
    train = make(acted(rank, size))
    for _ in train:
        if train.position[1] == DONE:
            state, step = train.state_dict(), train.step
        if train.position[1] > DONE:
            train.in_weights = step
            assert train.state_of_weights() == state and train.state_dict() != state
            return state
    raise AssertionError("not reached")


def loader_of(order: Any, **options: Any) -> Callable[[Any], Any]:
    def make(world: Any) -> Any:
        given = {"batch_sampler": order} if options.get("batches") else {"sampler": order}
        workers = options.get("workers", 0)
        per_rank = 12 // world.size
        if options.get("stream"):
            return hvt.loader(order, per_rank, world=world, workers=workers)
        return hvt.loader(Numbers(RECORDS), per_rank, world=world, workers=workers, **given)

    return make


def in_batches(order: Callable[[int], list[int]]) -> Callable[[int], list[list[int]]]:
    return lambda epoch: [order(epoch)[at : at + 2] for at in range(0, RECORDS, 2)]


def case_a_stream_is_gone_on_with_at_other_ranks_and_workers_but_not_in_another_order() -> None:
    for size, workers in ((1, 0), (4, 0), (2, 2)):
        states = [saved(loader_of(texts(3), stream=True, workers=workers), size, rank) for rank in (0, size - 1)]
        assert states[0] == states[1]
        for other, now in ((1, 2), (2, 0), (4, 0)):
            rest = []
            for rank in range(other):
                train = loader_of(texts(3), stream=True, workers=now)(acted(rank, other))
                train.load_state_dict(states[0])
                assert train.state_dict() == states[0]  # saved again before anything is read
                rest += read(train, 99)
            assert sorted(rest) == sorted(shuffled(3)(0)[DONE:])
            train = loader_of(texts(4), stream=True, workers=now)(acted(0, other))
            train.load_state_dict(states[0])
            refused(lambda train=train: read(train, 1), "the stream", f"first {DONE} samples", "made of the epoch")


def case_a_record_that_was_changed_is_noticed() -> None:
    """In one part, wherever in its bytes: their length, both ends and some between are looked at."""

    def changed(place: int | None) -> Callable[[], list[bytes]]:
        def records() -> list[bytes]:
            found = [bytearray([number]) * 20_000 for number in range(RECORDS)]
            if place is not None:
                found[DONE - 1][place : place + 100] = b"x" * 100
            return [bytes(record) for record in found]

        return records

    def make(records: Callable[[], list[bytes]]) -> Callable[[Any], Any]:
        return lambda world: hvt.loader(records, 12, world=world, workers=0, decode=lambda record: record[0])

    state = saved(make(changed(None)), 1)
    for place in (None, 0, 9_950, 19_900):
        train = make(changed(place))(acted(0, 1))
        train.load_state_dict(state)
        if place is None:
            assert sum(len(batch) for batch in train) == RECORDS - DONE
        else:
            refused(lambda train=train: next(iter(train)), f"first {DONE} samples")
    train = make(changed(0))(acted(0, 1))
    train.go_on(0, DONE)  # nobody says what was before it
    assert sum(len(batch) for batch in train) == RECORDS - DONE


def case_samplers_that_differ_after_a_resume_are_noticed() -> None:
    for batches, name in ((False, "sampler="), (True, "batch_sampler=")):
        order = in_batches if batches else lambda its: its
        state = saved(loader_of(order(shuffled(3, 16)), batches=batches), 2)
        for seed in (3, 4):
            train = loader_of(order(shuffled(seed, 16)), batches=batches)(acted(1, 2))
            train.load_state_dict(state)
            if seed == 3:
                assert len(read(train, 99)) == (RECORDS - DONE) // 2
            else:
                refused(lambda train=train: read(train, 1), name, f"first {DONE} samples", "generator")
        train = hvt.loader(
            Numbers(RECORDS + 1), 6, world=acted(0, 2),
            workers=0, **{name[:-1]: order(shuffled(3, 16))},
        )  # fmt: skip
        refused(lambda train=train, state=state: train.load_state_dict(state), f"{RECORDS} samples", name)


def case_a_sampler_counts_from_the_end_over_arrays_as_torchs_does() -> None:
    values, order = torch.arange(23.0), [-1, -2, 3, 0, 22]
    plain = DataLoader(TensorDataset(values), batch_size=3, sampler=order)
    ours = hvt.loader((values,), 3, world=acted(0, 1), sampler=order, workers=0)
    assert [x.tolist() for (x,) in ours] == [x.tolist() for (x,) in plain] == [[22, 21, 3], [0, 22]]
    for wrong in (23, -24):
        train = hvt.loader((values,), 3, world=acted(0, 1), sampler=[0, wrong], workers=0)
        refused(lambda train=train: list(train), f"sample {wrong} ", "of 23", kind=IndexError)


if __name__ == "__main__":
    run_all(globals())
