"""Streams: records that arrive one after another, of unknown number, dealt to ranks without communication.

The order of the stream is the global order. Every rank walks all of it and keeps its own records, those that a `Plan`
would deal it: step s has the records [s·N·B, (s+1)·N·B), of which rank r has the r-th contiguous piece. So each rank
finds the end of the stream and the number of samples of the last step without the others. A place in the stream is a
number of records, valid for any number of ranks. The costly work (decoding) is done for a rank's own records only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.sharding import Plan, Step, contiguous
from hvdtrain.world.records import STREAM, CountedRecords, StreamWords

if TYPE_CHECKING:
    import numpy as np

_END: Any = object()
_WALK_STREAM = 3  # of random words: the order of samples, augmentation and samples' seeds have those before


@dataclass(frozen=True)
class StreamPlan(Plan):
    """The plan that deals a stream; made with `samples=0`, as the number is unknown, and `shuffle=False`."""

    whole_batches: int = 0  # records are lists of a whole step's samples, this many as a rule; 0: each is a sample
    kind: StreamWords = STREAM

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.whole_batches and self.tail == "drop":
            raise ConfigError(
                "tail= cannot be given with batch_sampler=, which makes the batches",
                'tail="drop"',
                "leave the last batch out in the batch sampler (drop_last=True)",
            )

    @property
    def global_batch(self) -> int:
        return self.whole or self.whole_batches or super().global_batch

    def total(self) -> NoReturn:
        raise ConfigError(
            f"the number of samples of {self.kind.name} is not known before its end",
            "samples (or steps) of an epoch were asked for",
            f"give the number: LR(total_samples=1_281_167 * epochs), or count the {self.kind.many} once",
        )

    def steps(self, consumed: int = 0) -> NoReturn:
        self.total()

    def order(self, epoch: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns the numbers of these records: a stream is taken as it comes."""
        import numpy as np

        return np.arange(start, self.total() if stop is None else stop, dtype=np.int64)

    def place_after(self, epoch: int, consumed: int) -> tuple[int, int]:
        """Returns the place as it is: whether there are more records, the step that consumed them knows."""
        if consumed < 0:
            raise ConfigError("samples done in an epoch must be >= 0", f"consumed={consumed}")
        return epoch, consumed


@dataclass(frozen=True, eq=False)
class StreamStep(Step):
    """A rank's part of one step of a stream."""

    before: int = 0  # samples of all ranks that were done in the epoch before this step
    earlier: tuple[int, ...] = ()  # samples of all ranks in the steps just before, as far as they are kept
    later: tuple[int, ...] = ()  # and just after, as far as they are known
    ended: bool = False  # no step follows on those
    digest: int = 0  # of all ranks' records of the epoch up to its last

    @property
    def samples_done(self) -> int:
        return self.before + self.global_samples

    @property
    def place_after(self) -> tuple[int, int]:
        return (self.epoch, self.samples_done) if self.later else (self.epoch + 1, 0)

    def update(self, accumulate: int) -> tuple[int, bool]:
        place = self.number % accumulate
        left = accumulate - 1 - place
        if len(self.later) < left and not self.ended or len(self.earlier) < place:
            raise ConfigError(
                f"{self.plan.kind.name} is read ahead as far as an update needs",  # type: ignore[attr-defined]
                f"a loop that knows {len(self.later)} steps more, and prepare(accumulate={accumulate})",
                "prepare model and optimizer with the loader before the loop over it begins",
            )
        samples = sum(self.earlier[len(self.earlier) - place :]) + self.global_samples + sum(self.later[:left])
        return samples, left == 0 or not self.later


def epoch_seed(seed: int, epoch: int) -> int:
    """Returns 64 bits that seed a stream's own random draws in an epoch, the same on every rank."""
    import numpy as np

    counter = np.array([0, 0, 0, _WALK_STREAM], np.uint64)
    return int(np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=counter).random_raw(1)[0])


class StepPart(NamedTuple):
    """A rank's part of a step: its records, raw, the number of the first, all ranks' samples, and the digest so far."""

    first: int
    own: list[Any]
    samples: int
    digest: int


def walk(
    records: CountedRecords,
    plan: StreamPlan,
    epoch: int,
    begin: int,
    *,
    rank: int,
    ahead: int,
    digest: int | None = None,
) -> Iterator[tuple[StreamStep, list[Any]]]:
    """Yields each remaining step of the epoch after `begin` samples, and this rank's records of it, raw.

    Args:
        ahead: the number of steps that it reads before it yields one, at least 1.
        digest: the digest of the records before `begin` in the run that used them; None: not known.

    Raises:
        ConfigError: the stream ends before `begin`; `begin` is within a batch; the records before it have changed.
    """
    _skip(records, plan, begin, digest)
    steps, waiting, ended = _steps(records, plan, begin, rank), deque[StepPart](), False
    earlier: deque[int] = deque(maxlen=ahead)
    number, before = 0, begin
    while True:
        while not ended and len(waiting) <= ahead:
            found = next(steps, None)
            ended = found is None
            waiting.extend([] if found is None else [found])
        if not waiting:
            return
        now = waiting.popleft()
        yield (
            StreamStep(
                plan, epoch, begin, number, now.first, len(now.own), now.samples, before=before,
                earlier=tuple(earlier), later=tuple(step.samples for step in waiting), ended=ended,
                digest=now.digest,
            ),
            now.own,
        )  # fmt: skip
        earlier.append(now.samples)
        number, before = number + 1, before + now.samples


def _skip(records: CountedRecords, plan: StreamPlan, begin: int, digest: int | None) -> None:
    rule, kind = "a resumed run must read the same data in the same order", plan.kind
    done = 0
    while done < begin and (record := next(records, _END)) is not _END:
        done += len(record) if plan.whole_batches else 1
    if done < begin:
        raise ConfigError(
            rule,
            f"{begin} samples of the epoch were done; {kind.name} ends after {done}",
            "give the same data, seed and order, or start a new run directory",
        )
    if done > begin:  # its batches are others than those of the saved run
        records.put_back(done - begin)
    if digest not in (None, records.digest):
        raise ConfigError(
            rule,
            f"{kind.name} has other {kind.many} than before, among the first {begin} samples of the epoch\n"
            f"(digest {digest:08x} when the run was saved, {records.digest:08x} now)",
            f"give the same data (unchanged files, in the same order) and seed; {kind.again};\nor start a new"
            " run directory",
        )


def _steps(records: CountedRecords, plan: StreamPlan, begin: int, rank: int) -> Iterator[StepPart]:
    before = begin
    while True:
        if plan.whole_batches:
            batch = next(records, _END)
            if batch is _END:
                return
            count = len(batch)
            if count == 0:
                raise ConfigError("a batch must have samples", "batch_sampler= gave an empty batch", "skip it")
            mine = contiguous(count, rank, plan.size)
            own = list(batch)[mine]
        else:
            own, count = _piece(records, plan, rank)
            mine = contiguous(count, rank, plan.size)
            if count == 0 or (plan.tail == "drop" and count < plan.global_batch):
                return
        yield StepPart(before + mine.start, own, count, records.digest)
        before += count


def _piece(records: Iterator[Any], plan: StreamPlan, rank: int) -> tuple[list[Any], int]:
    """Returns rank's records of the next step, and how many that step has; holds a quarter of them at most."""
    held: deque[Any] = deque()
    most = contiguous(plan.global_batch, rank, plan.size).stop
    low = count = 0  # position in the step of the first that is held, and records read
    for record in islice(records, plan.global_batch):
        if count < most:
            held.append(record)
        count += 1
        start = contiguous(count, rank, plan.size).start
        while low < start:
            held.popleft()
            low += 1
    mine = contiguous(count, rank, plan.size)
    return list(islice(held, mine.stop - mine.start)), count
