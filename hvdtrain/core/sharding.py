"""Deals samples to ranks: the same global order at any world size, from any point in an epoch.

The epoch is one permutation of all samples, a pure function of their number, the seed and the epoch. A global step
takes its next `size * per_rank_batch` samples, and rank r the r-th contiguous piece, so N ranks x B see the samples of
one process x N·B. A job resumes at any size without repeating or skipping a sample. The permutation is never stored:
each position is computed when a step needs it (see `_feistel`).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, overload

from hvdtrain.core.errors import ConfigError

if TYPE_CHECKING:
    from typing import Self  # from Python 3.11 on

    import numpy as np

# Names the rule that makes an order of a seed. A saved position counts along an order: under another rule it would
# repeat and skip samples, so whoever saves one saves this name with it, and refuses another.
ORDER_RULE = "feistel-1"

# up to here a permutation is drawn evenly from all there are, and takes 0.5 MiB; above, it is computed by position
SMALL = 2**16
ROUNDS = 8  # of the Feistel network; with 4 independent rounds it passes as random to whoever sees the output only


@dataclass(frozen=True)
class Plan:
    """The division of an epoch of `samples` samples over `size` ranks.

    Example:
        plan = hvdtrain.Plan(samples=len(x), size=world.size, per_rank_batch=32)
        for step in plan.step_slices(epoch=0, rank=world.rank):
            batch = x[step.indices]

    Attributes:
        samples: samples in the data set.
        size: ranks.
        per_rank_batch: samples of a rank in a full step.
        seed: the seed of the order; the same on every rank.
        shuffle: False keeps the data set's order.
        tail: for the last samples, if they do not fill a global step: "weighted" deals them as evenly as possible
            (ranks may get one less, or none; weight gradients by samples), "drop" skips them.
        whole: samples of all ranks in a full step, if ranks left or joined: they are dealt like a tail. 0:
            `size * per_rank_batch`.
    """

    samples: int
    size: int
    per_rank_batch: int
    seed: int = 0
    shuffle: bool = True
    tail: Literal["weighted", "drop"] = "weighted"
    whole: int = 0

    def __post_init__(self) -> None:
        for name, least in (("samples", 0), ("size", 1), ("per_rank_batch", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
                fix = "loader((x, y), per_rank_batch=32), with the arrays as one tuple"
                if isinstance(value, (int, float)):
                    fix = "divide with //, as in 64 // world.size" if value >= least else ""
                raise ConfigError(f"{name} must be a whole number >= {least}", f"{name}={value!r}"[:100], fix)
        if self.seed >= 2**64:
            raise ConfigError("seed must be below 2**64", f"seed={self.seed!r}")
        if self.tail not in ("weighted", "drop"):
            raise ConfigError('tail must be "weighted" or "drop"', f"tail={self.tail!r}")
        if self.tail == "drop" and self.samples and self.steps() == 0:
            raise ConfigError(
                'tail="drop" needs at least one full global step in an epoch',
                f"{self.samples} samples, {self.size} x {self.per_rank_batch} = {self.global_batch} a step",
                'make the batch smaller, use fewer ranks, or tail="weighted"',
                code=12,
            )

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in a full step."""
        return self.whole or self.size * self.per_rank_batch

    def update_samples(self, passes: int) -> int:
        """Returns the samples of an update of `passes` full steps, as far as an epoch has so many."""
        full = self.global_batch * passes
        return min(full, self.samples or full)  # streams have 0: not known

    def of(self, size: int) -> Self:
        """Returns the plan by which the same steps are dealt to another number of ranks."""
        return replace(self, size=size, whole=self.global_batch)

    def total(self) -> int:
        """Returns the samples of an epoch; a plan that does not know them (`streams.StreamPlan`) refuses."""
        return self.samples

    def steps(self, consumed: int = 0) -> int:
        """Returns how many steps remain in an epoch of which `consumed` samples are done."""
        if not 0 <= consumed <= self.samples:
            raise ConfigError(
                f"samples done in this epoch must be within 0..{self.samples}", f"consumed={consumed}",
                "the checkpoint belongs to another data set: give the same data, or another run directory",
            )  # fmt: skip
        left = self.samples - consumed
        return left // self.global_batch if self.tail == "drop" else -(-left // self.global_batch)

    def order(self, epoch: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns the samples at positions `start` to `stop` of an epoch's order; equal on every rank, at every size.

        Computes only these positions, with words from Philox, which numpy never changes (NEP 19).

        Args:
            epoch: counted from 0.
            start, stop: positions, as of a slice; default: all.

        Returns:
            int64 [stop - start], each sample of the data set at most once.
        """
        import numpy as np

        if epoch < 0:
            raise ConfigError("epoch must be >= 0", f"epoch={epoch}")
        start, stop, _ = slice(start, stop).indices(self.samples)
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        if self.samples <= SMALL:
            return _small_order(self.samples, self.seed, epoch)[start:stop].copy()
        keys = random_words(self.samples, self.seed, epoch, ROUNDS)
        return _feistel(np.arange(start, stop, dtype=np.uint64), self.samples, keys).astype(np.int64)

    def step_slices(self, epoch: int, consumed: int = 0, *, rank: int) -> Steps:
        """Returns `rank`'s part of every step that remains in the epoch: a sequence that makes a step when it is read.

        Args:
            epoch: counted from 0.
            consumed: samples of all ranks already done in this epoch.
            rank: the rank whose steps to return.

        Raises:
            ConfigError: `rank` or `consumed` is out of range.
        """
        if not 0 <= rank < self.size:
            raise ConfigError(f"rank must be below {self.size}", f"rank={rank}")
        return Steps(self, epoch, consumed, rank)

    def span(self, number: int, consumed: int, rank: int) -> tuple[slice, int]:
        """Returns the positions of rank's samples in the epoch's order, and the samples of all ranks, in one step,
        which is counted from 0 after `consumed` samples of all ranks."""
        start = consumed + number * self.global_batch
        count = min(self.global_batch, self.samples - start)
        mine = contiguous(count, rank, self.size)
        return slice(start + mine.start, start + mine.stop), count

    def place_after(self, epoch: int, consumed: int) -> tuple[int, int]:
        """Returns (epoch, samples done in it) to continue with when `consumed` samples of an epoch are done."""
        return (epoch + 1, 0) if self.steps(consumed) == 0 else (epoch, consumed)


@dataclass(frozen=True, eq=False)
class Step:
    """A rank's part of one global step. Compared by identity: the same object means the same batch.

    Attributes:
        plan: what deals the samples.
        epoch: counted from 0.
        begin: samples of all ranks that were done in the epoch when the loop over it began.
        number: of the step in that loop, counted from 0.
        first: where in the epoch's order this rank's samples begin.
        dealt: this rank's samples; `per_rank_batch`, or less (even 0) in a tail.
        global_samples: samples of all ranks in this step, as planned.
        unreadable: those of this rank that could not be read, and are skipped.
    """

    plan: Plan
    epoch: int
    begin: int
    number: int
    first: int
    dealt: int
    global_samples: int
    unreadable: int = 0

    @property
    def samples(self) -> int:
        """This rank's samples that count: gradients are weighted by `samples` / `global_samples`."""
        return self.dealt - self.unreadable

    @property
    def padding(self) -> bool:
        """Returns True if this rank has no sample left: its batch keeps the ranks in step, and counts nothing."""
        return self.samples == 0

    @property
    def indices(self) -> np.ndarray:
        """The samples dealt to this rank, int64 [dealt]; computed each time."""
        return self.plan.order(self.epoch, self.first, self.first + self.dealt)

    @property
    def samples_done(self) -> int:
        """Samples of all ranks that are done in the epoch after this step."""
        return self.begin + self.number * self.plan.global_batch + self.global_samples

    @property
    def place_after(self) -> tuple[int, int]:
        """(epoch, samples done in it) to continue with after this step."""
        return self.plan.place_after(self.epoch, self.samples_done)

    def update(self, accumulate: int) -> tuple[int, bool]:
        """Returns all ranks' samples in this step's update of `accumulate` steps, and True if the step is its last."""
        steps = self.plan.steps(self.begin)
        left = min(self.plan.samples - self.begin, steps * self.plan.global_batch)
        window = accumulate * self.plan.global_batch
        samples = min(window, left - self.number // accumulate * window)
        return samples, (self.number + 1) % accumulate == 0 or self.number + 1 == steps


class Steps(Sequence[Step]):
    """A rank's remaining steps in an epoch; made by `Plan.step_slices`."""

    def __init__(self, plan: Plan, epoch: int, begin: int, rank: int) -> None:
        self._plan, self._epoch, self._begin, self._rank = plan, epoch, begin, rank
        self._count = plan.steps(begin)
        plan.order(epoch, 0, 0)  # an epoch that is none is refused here

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> list[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | list[Step]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._count))]
        number = range(self._count)[index]  # counts from the end, and refuses, as any sequence does
        mine, samples = self._plan.span(number, self._begin, self._rank)
        return Step(self._plan, self._epoch, self._begin, number, mine.start, mine.stop - mine.start, samples)


def random_words(samples: int, seed: int, epoch: int, count: int, *, block: int = 0, stream: int = 0) -> np.ndarray:
    """Returns uint64 [count], from the `block`th four words of a stream on; each number of samples has its own words.

    Words are Philox's (Salmon et al. 2011), a function of key and counter.
    """
    import numpy as np

    key, counter = np.array([seed, epoch], np.uint64), np.array([block, samples, 0, stream], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


@lru_cache(maxsize=8)
def _small_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns int64 [samples]: a permutation that is drawn evenly from all there are, by sorting random words."""
    import numpy as np

    return np.argsort(random_words(samples, seed, epoch, samples), kind="stable").astype(np.int64, copy=False)


def _feistel(positions: np.ndarray, samples: int, keys: np.ndarray) -> np.ndarray:
    """Returns where a permutation of 0..samples-1 takes `positions`, uint64 [n].

    A position is a cell of a rectangle of just over `samples` cells. Each round turns every row, or every column, by a
    random function of its number: a Feistel network, which is a permutation whatever the function (Black and Rogaway
    2002, "Ciphers with Arbitrary Finite Domains"). A cell beyond the samples is sent through again ("cycle walking").
    """
    import numpy as np

    rows = np.uint64(math.isqrt(samples - 1) + 1)
    columns = np.uint64(-(-samples // int(rows)))
    out = positions
    left: np.ndarray | slice = slice(None)
    while True:
        row, column = np.divmod(out[left], columns)
        for number, key in enumerate(keys):
            if number % 2:
                column = (column + _scattered(row, key) % columns) % columns
            else:
                row = (row + _scattered(column, key) % rows) % rows
        moved = row * columns + column
        if isinstance(left, slice):
            out = moved
        else:
            out[left] = moved
        left = np.flatnonzero(out >= np.uint64(samples))
        if not len(left):
            return out


def _scattered(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Returns a random function of each value: the mixer of SplitMix64 (Steele, Lea and Flood 2014), after a key."""
    import numpy as np

    mixed = values * np.uint64(0x9E3779B97F4A7C15) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class Dealt:
    """The numbers of a plan, as a loader of either adapter has them."""

    plan: Plan

    @property
    def samples(self) -> int:
        """Samples in the data set."""
        return self.plan.total()

    @property
    def per_rank_batch(self) -> int:
        return self.plan.per_rank_batch

    @property
    def global_batch(self) -> int:
        return self.plan.global_batch


def check_evaluation(data: Any, per_rank_batch: int | None) -> None:
    """Raises `ConfigError` for an evaluation that would not count every sample, in batches of one known size."""
    if not isinstance(data, Dealt):
        if per_rank_batch is None:
            raise ConfigError("evaluation needs a batch size", "per_rank_batch was not given", "per_rank_batch=64")
    elif per_rank_batch not in (None, data.per_rank_batch):
        raise ConfigError(
            "the batch size must be set once: by the loader or by per_rank_batch=",
            f"a loader of {data.per_rank_batch} samples a rank, per_rank_batch={per_rank_batch}",
            "remove per_rank_batch=",
        )
    elif data.plan.tail != "weighted":
        raise ConfigError('evaluation needs tail="weighted", which counts every sample', f"tail={data.plan.tail!r}")


def tail_pieces(samples: int, full: int, pieces: int) -> int:
    """Returns into how many pieces a tail is cut so that none is larger than those of a full batch."""
    return -(-samples // -(-full // pieces))


def contiguous(samples: int, rank: int, size: int) -> slice:
    """Returns `rank`'s slice of `samples` items: each item is in one slice, and sizes differ by at most 1.

    Example:
        mine = files[hvdtrain.contiguous(len(files), world.rank, world.size)]
    """
    if samples < 0 or not 0 <= rank < size:
        raise ConfigError("need samples >= 0 and 0 <= rank < size", f"samples={samples}, rank={rank}, size={size}")
    each, extra = divmod(samples, size)
    start = rank * each + min(rank, extra)
    return slice(start, start + each + (rank < extra))


def weight_number(weight: Any, example: str) -> float:
    """Returns a weight from a number or an array of one element; else raises `ConfigError` with `example`."""
    shape = getattr(weight, "shape", None)
    single = not isinstance(weight, (str, bytes)) if shape is None else math.prod(shape) == 1
    try:
        number = float(getattr(weight, "item", lambda: weight)()) if single else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number) and number >= 0:
        return number
    received = repr(weight) if single or shape is None else f"shape {tuple(shape)}"
    raise ConfigError("a weight must be a number >= 0: the denominator of the mean loss", received, example)
