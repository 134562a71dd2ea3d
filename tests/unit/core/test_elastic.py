"""Ranks that go over to another formation: threads stand for processes, and what connects them breaks at random."""

from __future__ import annotations

import os
import pickle
import random
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from hvdtrain.comm import elastic
from hvdtrain.comm.elastic import Elastic
from hvdtrain.core.errors import ConfigError, RanksLost, ReplicaError
from hvdtrain.core.launchers import detect, gpus_for


class Gone(Exception):
    """This rank is lost."""


@dataclass
class Formation:
    """A world of `size` ranks. An exchange completes on each by itself: when it breaks, some may have the result."""

    size: int
    number: int
    lock: threading.Condition = field(default_factory=threading.Condition)
    given: dict[int, dict[int, Any]] = field(default_factory=dict)
    broken: bool = False

    def exchange(self, rank: int, count: int, value: Any, deaf: bool) -> list[Any]:
        """Returns what all ranks have given; `deaf`: this one does not get it, for another is lost by then."""
        with self.lock:
            self.given.setdefault(count, {})[rank] = value
            self.lock.notify_all()
            self.lock.wait_for(lambda: len(self.given[count]) == self.size or self.broken, 20)
            whole = len(self.given[count]) == self.size
            if not whole or (deaf and self.broken):
                self.broken = True
                self.lock.notify_all()
                raise RanksLost("lost", f"in {count}")
            return [self.given[count][other] for other in range(self.size)]

    def break_up(self) -> None:
        with self.lock:
            self.broken = True
            self.lock.notify_all()


class Launcher:
    """Makes the next formation when all that live have left the last one."""

    def __init__(self, size: int) -> None:
        self.lock = threading.Condition()
        self.formation = Formation(size, 1)
        self.living = set(range(size))
        self.ranks = {number: number for number in range(size)}
        self.waiting: set[int] = set()

    def lose(self, number: int) -> None:
        with self.lock:
            self.living.discard(number)
            self.formation.break_up()
            self._form()

    def wait(self, number: int) -> dict[str, Any]:
        with self.lock:
            before = self.formation
            before.break_up()
            self.waiting.add(number)
            self._form()
            self.lock.wait_for(lambda: self.formation is not before, 20)
            return {"formation": self.formation.number, "rank": self.ranks[number], "size": self.formation.size}

    def _form(self) -> None:
        if self.living and self.waiting >= self.living:
            order = sorted(self.living, key=lambda number: self.ranks[number])
            self.ranks = {number: rank for rank, number in enumerate(order)}
            self.formation = Formation(len(order), self.formation.number + 1)
            self.waiting = set()
            self.lock.notify_all()


class Line:
    """What an `Elastic` needs of its line."""

    def __init__(self, launcher: Launcher, number: int) -> None:
        self._launcher, self._number = launcher, number
        self.formation, self.asked_to_leave = 1, 0
        self.said: list[dict[str, Any]] = []

    def say(self, **words: Any) -> None:
        self.said.append(words)

    def next_form(self) -> dict[str, Any]:
        return self._launcher.wait(self._number)


class Rank:
    """One process: it trains on a row of numbers, of which an update adds the next to its weight."""

    def __init__(self, launcher: Launcher, number: int, draw: random.Random, losses: float) -> None:
        self.launcher, self.number, self.draw, self.losses = launcher, number, draw, losses
        self.world, self.count, self.rank = launcher.formation, 0, number
        self.line = Line(launcher, number)
        self.its = Elastic(self.line, new=False, answers=[])  # type: ignore[arg-type]
        self.its.leave, self.its.join = lambda **_: None, self.join
        self.its.gather, self.its.broadcast = self.gather, lambda obj, root: self.gather(obj)[root]
        self.its.member = self
        self.weight = self.updates = 0
        self.results: list[Any] = []

    def join(self, form: Mapping[str, Any]) -> None:
        self.world, self.count, self.rank = self.launcher.formation, 0, form["rank"]
        assert form["size"] == self.world.size

    def gather(self, value: Any) -> list[Any]:
        if self.draw.random() < self.losses and len(self.launcher.living) > 1:
            self.launcher.lose(self.number)
            raise Gone
        self.count += 1
        return self.world.exchange(self.rank, self.count, value, deaf=self.draw.random() < 0.5)

    # -- a `Member`
    def place(self) -> int:
        return self.updates

    def state(self) -> bytes:
        return f"{self.weight}:{self.updates}".encode()

    def take(self, state: bytes, *, new: bool) -> None:
        self.weight, self.updates = map(int, state.split(b":"))

    def go_on(self, place: int, *, late: bool) -> None:
        assert self.updates == place, "all are at the place of the first"

    # -- the program
    def train(self, updates: int) -> None:
        while self.updates < updates:
            number = self.updates + 1
            try:
                sums = self.gather(number)
            except RanksLost as lost:
                self.its.regroup(lost)  # the update is done by now, or comes again
            else:
                assert set(sums) == {number}, "all are in the same update"
                self.weight, self.updates = self.weight + number, number
            if self.updates % 3 == 0 and self.updates > len(self.results) * 3:
                at = self.updates
                found = self.its.run("gather", partial(self.gather, ("operation", at)))
                assert set(found) == {("operation", at)}
                self.results.append(at)


@pytest.fixture
def numbered(monkeypatch):
    """Each thread has the place of its own in the environment."""

    class Environ(dict):
        def __getitem__(self, name: str) -> str:
            if name != "HOROVOD_RANK":
                return super().__getitem__(name)
            return str(threading.current_thread().rank.rank)  # type: ignore[attr-defined]

    monkeypatch.setattr(os, "environ", Environ())


@pytest.mark.parametrize("seed", range(40))
def test_whatever_breaks_all_that_are_left_do_every_update_and_operation_once(numbered, seed):
    draw = random.Random(seed)
    launcher = Launcher(4)
    ranks = [Rank(launcher, number, random.Random(draw.random()), losses=0.02) for number in range(4)]
    failed: list[BaseException] = []

    def run(rank: Rank) -> None:
        try:
            rank.train(30)
        except Gone:
            pass
        except BaseException as error:
            failed.append(error)
            launcher.lose(rank.number)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread, rank in zip(threads, ranks, strict=True):
        thread.rank = rank  # type: ignore[attr-defined]
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed, failed
    left = [rank for rank in ranks if rank.number in launcher.living]
    assert left
    for rank in left:
        assert rank.weight == sum(range(31)) and rank.results == list(range(3, 31, 3))


def test_a_new_rank_comes_by_what_was_there(monkeypatch):
    its = Elastic(Line(Launcher(1), 0), new=True, answers=[("World.gather", [1, 2]), ("evaluate", {"loss": 0.5})])  # type: ignore[arg-type]
    assert its.run("World.gather", list) == [1, 2]
    with pytest.raises(ReplicaError, match="World.barrier, where rank 0 called evaluate"):
        its.run("World.barrier", list)
    with pytest.raises(ReplicaError, match="nothing more"):
        its.run("World.barrier", list)
    with pytest.raises(ConfigError, match=r"needs prepare\(\) and a loop"):
        its.begin_epoch()


@pytest.mark.parametrize(("size", "slot"), [(1, "2/4"), (2, "0/2"), (8, "3/4")])
def test_a_new_process_has_the_gpu_of_its_slot(monkeypatch, tmp_path, size, slot):
    """Local ranks are counted anew with each formation; a survivor keeps its GPU, whatever its local rank by now."""
    ours, theirs = socket.socketpair()
    (tmp_path / "answers").write_bytes(pickle.dumps([]))
    environ = {"HVDTRAIN_ELASTIC": "new", "HVDTRAIN_ELASTIC_ANSWERS": str(tmp_path / "answers")}
    environ |= {"HVDTRAIN_ELASTIC_SIZE": str(size), "HVDTRAIN_ELASTIC_SLOT": slot}
    environ["HVDTRAIN_AGENT_FD"] = str(ours.detach())
    monkeypatch.setenv("HVDTRAIN_ELASTIC_SLOT", slot)
    monkeypatch.setattr(elastic, "_ranks", elastic.JobRanks())
    monkeypatch.setattr(elastic, "_line", None)
    with theirs:
        elastic.begin(environ)
        found = detect(environ)
        assert (found.rank, found.size) == (size - 1, size)
        assert gpus_for(*elastic.place_on_host(found.local_rank, found.local_size), 4) == (int(slot[0]),)
