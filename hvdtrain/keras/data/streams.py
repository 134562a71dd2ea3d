"""A rank's batches of what is walked from its beginning: `tf.data`, PyTorch's `DataLoader`, generators, streams."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from hvdtrain.core.generators import OwnRandom, of_imported
from hvdtrain.keras.backends.session import replaced
from hvdtrain.keras.data.loader import KerasLoader
from hvdtrain.keras.data.sources import Batch, BatchSource
from hvdtrain.private.keras import EpochIterator
from hvdtrain.world.records import STREAM, CountedRecords, StreamHead, check_ends, head
from hvdtrain.world.streams import StreamPlan, StreamStep, epoch_seed, walk
from hvdtrain.world.world import World

OF_TENSORFLOW = replace(
    STREAM,
    name="the tf.data set",
    one="batch",
    many="batches",
    again="shuffle by a seed that is made of the epoch: loader(lambda epoch: dataset.shuffle(n, seed=epoch)),"
    " loader(lambda epoch: keras.utils.image_dataset_from_directory(..., seed=epoch)); or shuffle=False",
)
PEEKED = 2  # batches that are looked at before: what differs between them has no fixed length


class Walk(BatchSource):
    """A source of records that are read in sequence.

    Attributes:
        begin: begins the records of an epoch.
        collate: makes a batch of this rank's records of a step.
        by_tensorflow: TensorFlow reads ahead, and draws nothing from Python's generators.
    """

    def __init__(
        self,
        begin: Callable[[int], Iterator[Any]],
        collate: Callable[[list[Any]], Batch],
        seed: int,
        *,
        by_tensorflow: bool = False,
    ) -> None:
        self._begin, self._seed = begin, seed
        self.collate = collate
        self.by_tensorflow = by_tensorflow
        self.peeked: list[Batch] = []
        self.unstable: frozenset[str] = frozenset()

    def records(self, epoch: int) -> Iterator[Any]:
        """Yields the records of an epoch; what draws, draws what follows from seed and epoch."""
        own = OwnRandom(of_imported(), epoch_seed(self._seed, epoch))
        with own.in_place():
            records = self._begin(epoch)
        if self.by_tensorflow:  # read ahead beside what trains, whose generators these are
            yield from records
            return
        while True:
            with own.in_place():
                found = list(islice(records, 1))
            if not found:
                return
            yield found[0]

    def peek(self) -> StreamHead:
        """Returns how epoch 0 begins; keeps its first batches, for their shapes."""

        def begin() -> Iterator[Any]:
            for record in self.records(0):
                if len(self.peeked) < PEEKED:
                    self.peeked.append(self.collate([record]))
                yield record

        found = head(begin, PEEKED, OF_TENSORFLOW if self.by_tensorflow else STREAM)
        self.unstable = found.unstable
        self.weighted = bool(self.peeked) and self.peeked[0][2] is not None
        return found

    def take(self, indices: np.ndarray) -> Batch:
        """Returns one of the batches that were looked at."""
        return self.peeked[min(int(indices[0]), len(self.peeked) - 1)]


class WalkedLoader(KerasLoader):
    """A `KerasLoader` whose length is unknown before its end."""

    plan: StreamPlan
    source: Walk

    def __init__(self, source: Walk, plan: StreamPlan, *, rank: int, unit: int) -> None:
        source.unit = unit
        super().__init__(source, plan, rank=rank)
        self.reads_ahead = source.by_tensorflow
        self._epoch_steps: list[StreamStep] = []

    def identity(self) -> str:
        return f"a stream, by seed {self.plan.seed}"

    def _check_place(self, units: int) -> None:
        """Accepts any place: reading shows where the stream ends."""

    def _marks(self, units: int) -> bool:
        return True  # any step may be the last

    def has_more(self, epoch: int, samples_in_epoch: int) -> bool:
        """Returns False only with `tail="drop"`, which skips records."""
        if self.plan.tail == "weighted":
            return True
        with closing(self._walk(epoch, samples_in_epoch // self.unit)) as steps:
            return next(steps, None) is not None

    def _walk(self, epoch: int, done: int) -> Generator[tuple[StreamStep, list[Any], list[Any]], None, None]:
        """Yields the remaining steps, with this rank's records, and the first record of all."""
        records = CountedRecords(self.source.records(epoch), self.source.unstable, keep=1)
        for step, own in walk(records, self.plan, epoch, done, rank=self.rank, ahead=1):
            yield step, own, records.first

    def _read(self, epoch: int) -> None:
        self.epoch = epoch
        self._epoch_steps = []

    def apart(self) -> WalkedLoader:
        return WalkedLoader(self.source, self.plan, rank=self.rank, unit=self.unit)

    def __len__(self) -> int:
        raise TypeError("how many batches a stream has is known at its end")

    @property
    def num_batches(self) -> int | None:
        return None

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self._shown(self.source.take(np.array([index])), live=True)

    def _examples(self) -> list[tuple[Any, ...]]:
        return [self[0], self[1]]

    def batches(self) -> Generator[tuple[Any, ...], None, None]:
        """Yields this rank's batches of the remaining epoch."""
        source, epoch = self.source, self.epoch
        self._read(epoch)
        self.served = []
        # of this reading: an earlier one, which was left, may still read ahead
        steps, served = self._epoch_steps, self.served
        for step, own, first in self._walk(epoch, self.done(epoch) // self.unit):
            batch = self._shown(source.collate(own or first), live=bool(own))
            steps.append(step)
            self._note(step, batch, served)
            yield batch

    def steps_until(self, batch: int) -> int:
        return min(batch, len(self._epoch_steps)) if self._ended() else batch

    def samples_of(self, first: int, stop: int) -> int:
        return sum(step.global_samples for step in self._epoch_steps[first:stop]) * self.unit

    def complete(self, steps: int) -> bool:
        return self._ended() and steps >= len(self._epoch_steps)

    def _ended(self) -> bool:
        """Returns True if the last step was read."""
        return bool(self._epoch_steps) and not self._epoch_steps[-1].later

    def check_end(self, world: World) -> None:
        if self._epoch_steps:
            last = self._epoch_steps[-1]
            check_ends(world, last.samples_done * self.unit, last.digest)

    def mine(self) -> float | None:
        return None


@contextmanager
def open_ended() -> Iterator[None]:
    """Ends each epoch with the last step of its data while open.

    Keras takes all epochs of a `fit` to be as long, but the first may be the rest of one. And it makes an iterator
    after an epoch that nothing reads (3.15). Of walked data it would begin one more step, warn, and take the epoch's
    length for that of the next; and TensorFlow finds the end beside a step, not before, adding 1 to the optimizer's
    iterations, in plain Keras with data of unknown length too.
    """

    def enumerated(every: Callable[[Any], Iterator[Any]], iterator: Any) -> Iterator[Any]:
        data = iterator.data_adapter
        for first, last, batches in every(iterator):
            yield first, last, batches
            if isinstance(data, KerasLoader) and data.complete(last + 1):
                data.on_epoch_end()
                return

    with replaced(EpochIterator, "_enumerate_iterator", enumerated):
        yield
