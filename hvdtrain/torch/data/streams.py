"""Streams, and orders of a user's own, as batches: each rank walks all of it, and reads its own samples only."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from itertools import islice
from operator import index as whole
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.generators import OwnRandom
from hvdtrain.core.sharding import Step
from hvdtrain.private.torch import data_worker
from hvdtrain.torch.data.loader import Loader
from hvdtrain.torch.data.memory import Memory
from hvdtrain.torch.data.processes import Processes, worker_context
from hvdtrain.torch.data.source import Augment, Fetched
from hvdtrain.torch.data.workers import ReadByProcesses, read_batch, two_of
from hvdtrain.values.generators import HOST
from hvdtrain.world.records import STREAM, CountedRecords, StreamHead, StreamWords, check_ends, head
from hvdtrain.world.streams import StreamPlan, StreamStep, epoch_seed, walk
from hvdtrain.world.world import World

Begin = Callable[[int], Iterator[Any]]  # the stream of an epoch


def drawn_by_epoch(sampler: Any, begin: Begin, seed: int) -> Begin:
    """Returns the order of a sampler as a function of the epoch, for which its own generator is seeded."""

    def of_epoch(epoch: int) -> Iterator[Any]:
        for drawing in (sampler, getattr(sampler, "sampler", None)):
            generator = getattr(drawing, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(epoch_seed(seed, epoch) >> 1)
        return begin(epoch)

    return of_epoch


class Get:
    """Makes samples of records: what a sampler names in `dataset`, or what `decode` makes of it."""

    def __init__(self, dataset: Any, decode: Callable[[Any], Any] | None) -> None:
        self.dataset = dataset
        self._decode = decode

    def __call__(self, record: Any) -> Any:
        sample = record if self.dataset is None else self.dataset[whole(record)]
        return sample if self._decode is None else self._decode(sample)


@contextmanager
def _no_worker() -> Iterator[None]:
    """Hides from streams that they are read by several workers, among which many share themselves out."""
    info, data_worker._worker_info = data_worker._worker_info, None
    try:
        yield
    finally:
        data_worker._worker_info = info


class _Walker(IterableDataset[Any]):
    """Walks a stream; what runs in the workers. Each walks all of it, and reads every so many steps of its rank."""

    def __init__(
        self, source: Streamed, plan: StreamPlan, epoch: int, done: int, *, rank: int, ahead: int, digest: int | None
    ) -> None:
        self._source = source
        self._plan, self._epoch, self._done, self._digest = plan, epoch, done, digest
        self._rank, self._ahead = rank, ahead
        # one worker at a time is inside
        self._turn = (worker_context() or torch.multiprocessing).Lock() if source.workers else nullcontext()

    def __iter__(self) -> Iterator[tuple[StreamStep, Fetched]]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        plan, source = self._plan, self._source
        own = OwnRandom(HOST, epoch_seed(plan.seed, self._epoch))
        # Hugging Face's streams have the epoch in memory that workers share, and set_epoch adds what is missing to it
        with own.in_place(), _no_worker(), self._turn:
            records = CountedRecords(source.begin(self._epoch), source.unstable, kind=source.kind)
        steps = walk(
            records, plan, self._epoch, self._done, rank=self._rank, ahead=self._ahead, digest=self._digest
        )  # fmt: skip
        while True:
            with own.in_place(), _no_worker():
                found = next(steps, None)
            if found is None:
                return
            step, mine = found
            if step.number % workers == worker:
                with HOST.preserved():
                    fetched = source.fetch(step, mine, records.first)
                yield step, fetched


class _HeadReader(Dataset[StreamHead]):
    def __init__(self, source: Streamed, seed: int) -> None:
        self._source, self._seed = source, seed

    def __getitem__(self, epoch: int) -> StreamHead:
        def begin() -> Iterator[Any]:
            own = OwnRandom(HOST, epoch_seed(self._seed, epoch))
            with own.in_place(), _no_worker():
                records = self._source.begin(epoch)
            while True:
                with own.in_place(), _no_worker():
                    found = list(islice(records, 1))
                if not found:
                    return
                yield found[0]

        return head(begin, kind=self._source.kind)


class Streamed(ReadByProcesses):
    """A `Source` of what is walked: `begin` gives the records of an epoch, `get` makes a sample of one; `unstable`
    are the names of parts of a record that are not compared among ranks."""

    samples = 0  # not known

    def __init__(
        self, begin: Begin, get: Get | Memory, processes: Processes, collate: Callable[[list[Any]], Any] | None,
        kind: StreamWords = STREAM,
    ) -> None:  # fmt: skip
        super().__init__(processes, collate)
        self.begin = begin
        self.get = get
        self.kind = kind
        self.unstable: frozenset[str] = frozenset()

    def head(self, seed: int) -> StreamHead:
        """Returns how epoch 0 begins, and notes what of it is not the same when it is read again."""
        begins: StreamHead = self._one_answer(_HeadReader(self, seed))
        self.unstable = begins.unstable
        return begins

    def walk(
        self, plan: StreamPlan, epoch: int, done: int, *, rank: int, ahead: int, digest: int | None = None
    ) -> Generator[tuple[StreamStep, Fetched], None, None]:
        """Yields the remaining steps of an epoch, with this rank's batches; closing it ends what it holds."""
        walker = _Walker(self, plan, epoch, done, rank=rank, ahead=ahead, digest=digest)
        with closing(self._answers(walker)) as found:
            for step, fetched in found:
                self._failures.check(step, fetched, float("inf"))
                yield step, fetched

    def fetch(self, step: StreamStep, own: list[Any], first: list[Any]) -> Fetched:
        """Returns the batch of a step's own records, or, where there are none, one of the first of the stream."""
        if step.plan.whole_batches and not own:  # type: ignore[attr-defined]
            first = [record for batch in first for record in batch]
        if isinstance(self.get, Memory):
            return Fetched(self.get.take(np.array(own or first[:2], np.int64)), None if own else [], [])
        get, named = self.get, self.get.dataset is not None
        names = [whole(record) for record in own] if named else range(step.first, step.first + len(own))
        return read_batch(
            step, get, list(zip(names, own, strict=True)), collate=self._collate,
            others=lambda: two_of(map(get, first), self._collate),
        )  # fmt: skip


class UnknownLength(ConfigError, TypeError):
    """`len()` of what has none: `list()` and the like continue without it."""


class StreamLoader(Loader):
    """A rank's batches of unknown number, from a stream or an order of the user's own; made by `loader`. It hands out a
    batch once it has read the records of the batch's update and of the step after that."""

    plan: StreamPlan
    _source: Streamed  # type: ignore[assignment]

    def __init__(
        self, source: Streamed, plan: StreamPlan, world: World, *, augment: Augment | None, begins: StreamHead
    ) -> None:
        super().__init__(source, plan, world, augment=augment)  # type: ignore[arg-type]
        self._begins = begins
        self._gone_on: tuple[tuple[int, int], int] | None = None  # a saved place, and the digest up to it

    def __len__(self) -> int:
        kind = self._begins.kind
        raise UnknownLength(
            f"the number of batches of {kind.name} is not known before its end",
            "len(loader)",
            f"count the steps, or the {kind.many}",
        )

    def identity(self) -> dict[str, Any]:
        kind, get = self._begins.kind, self._source.get
        begins = f"{kind.name}, whose first {self._begins.records} {kind.many} have digest {self._begins.digest}"
        data = get.samples if isinstance(get, Memory) else None if get.dataset is None else len(get.dataset)
        samples = kind.name if data is None else f"{data} samples, in {kind.name}"
        return {"samples": samples, "seed": self.plan.seed, "shuffle": False, "order": begins}

    def go_on(self, epoch: int, samples_in_epoch: int) -> None:
        super().go_on(epoch, samples_in_epoch)
        self._gone_on = None  # no digest of the records before that place

    def note_place(self, state: Mapping[str, Any]) -> None:
        if state["digest"] is not None:
            self._gone_on = (int(state["epoch"]), int(state["samples_in_epoch"])), int(state["digest"], 16)

    def _state(self, place: tuple[int, int], step: Step | None) -> dict[str, Any]:
        """Beside the place the digest of the records before it, which do not depend on who they were dealt to."""
        digest = self._digest_before(place)
        if isinstance(step, StreamStep) and (step.epoch, step.samples_done) == place:
            digest = step.digest
        return {**super()._state(place, step), "digest": None if digest is None else f"{digest:08x}"}

    def _digest_before(self, place: tuple[int, int]) -> int | None:
        return self._gone_on[1] if self._gone_on is not None and self._gone_on[0] == place else None

    def _made(self, epoch: int, done: int) -> Generator[tuple[Any, Step], None, None]:
        ahead = max([1, *(follower.accumulate - 1 for follower in self.followers)])
        rank, digest = self.world.rank, self._digest_before((epoch, done))
        with closing(self._source.walk(self.plan, epoch, done, rank=rank, ahead=ahead, digest=digest)) as found:
            for step, fetched in found:
                yield self._make(step, fetched)

    def end_loop(self) -> None:
        if self.world.size > 1 and self._trained():
            assert isinstance(self.step, StreamStep)
            check_ends(self.world, self.step.samples_done, self.step.digest, self._begins.kind)
        super().end_loop()
