"""The best split size, found on the user's own model and devices; or that it is better not to split."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from hvdtrain.core.errors import ConfigError, is_out_of_memory
from hvdtrain.pipeline.plan.schedule import micro_batch_sizes, usual_counts
from hvdtrain.pipeline.tuning.plots import SplitCurve
from hvdtrain.pipeline.tuning.search import Search, climb, race_in_turns
from hvdtrain.record.stats import Interval

if TYPE_CHECKING:
    from torch import Tensor

    from hvdtrain.pipeline.run.runtime import Pipeline
    from hvdtrain.pipeline.tuning.unsplit import Unsplit

Loss = Callable[[Any, Any], "Tensor"]
REFERENCE = 0  # in the place of a count: the unsplit model
ROUNDS = (5, 6)  # until one is faster, and at most
FOR_COUNTS = 0.7  # of a budget: what is left is for the comparison with the unsplit model


@dataclass(frozen=True)
class Trial:
    """A micro-batch count that was tried.

    Attributes:
        micro_batches: how many.
        split_size: samples of the largest.
        seconds: of its steps.
        median: of these.
        predicted_s: what had been predicted.
    """

    micro_batches: int
    split_size: int
    seconds: tuple[float, ...]
    median: float
    predicted_s: float

    def __str__(self) -> str:
        what = f"split size {self.split_size} ({counted(self.micro_batches)})"
        between = f" [{min(self.seconds):.3g} to {max(self.seconds):.3g}]" * (len(self.seconds) > 1)
        return f"{what}: {self.median:.3g}{between} s, predicted {self.predicted_s:.3g} s"


@dataclass(frozen=True)
class Tuning:
    """The result of `tune`.

    Attributes:
        batch: samples of a step.
        trials: what was tried, by micro-batch count.
        best: the trial to use.
        prediction: seconds of a step by micro-batch count, as predicted before the trials.
        unsplit_s: steps of the unsplit model on one device; empty: it does not fit.
        unsplit_on: that device.
        ratio: the best one's time over that of one device, paired; None: it does not fit.
        one_device: "faster" or "slower" than the best one, if that is shown.
        settled: True if the rounds sufficed to show that no other is faster by more than 3 %, and that one device is
            slower or faster.
        failed: what could not be run, with the reason.
        spent_s: how long the tuning took.
    """

    batch: int
    trials: tuple[Trial, ...]
    best: Trial
    prediction: Mapping[int, float]
    unsplit_s: tuple[float, ...]
    unsplit_on: str
    ratio: Interval | None
    one_device: str
    settled: bool
    failed: Mapping[int, str]
    spent_s: float

    @property
    def single_s(self) -> float | None:
        """The median seconds of steps on one device alone; None: the model does not fit on it."""
        return statistics.median(self.unsplit_s) if self.unsplit_s else None

    @property
    def split_pays(self) -> bool:
        """Returns True if the split model is shown to be faster than one device, or is the only one that fits."""
        return self.ratio is None or self.one_device == "slower"

    @property
    def one_is_faster(self) -> bool:
        """Returns True if one device is shown to be faster. If neither is, there were too few rounds."""
        return self.ratio is not None and self.one_device == "faster"

    @property
    def verdict(self) -> str:
        """The verdict in one sentence, with the numbers."""
        best = f"split size {self.best.split_size} ({counted(self.best.micro_batches)})"
        ours = f"{self.best.median:.3g} s a step of {self.batch}"
        if self.ratio is None:
            return f"split, {best}: {ours}; the unsplit model does not fit on one device ({self.unsplit_on})"
        theirs = f"{self.single_s:.3g} s on {self.unsplit_on} alone"
        level = f"{self.ratio} of its time"
        if self.split_pays:
            return f"split, {best}: {ours}, against {theirs} ({level})"
        if self.one_is_faster:
            return (
                f"do not split: one device is faster and the model fits: {theirs}, against {ours} at {best} ({level})"
            )
        return f"no gain from splitting that could be shown: {ours} at {best}, {theirs} ({level})"

    def picture(self) -> SplitCurve:
        """Returns the picture for `plot`: the measured times beside the predicted ones."""
        return SplitCurve(
            title=f"Time over split size, batch {self.batch}",
            batch=self.batch,
            seconds={trial.split_size: trial.seconds for trial in self.trials},
            predicted={split_size(self.batch, count): s for count, s in self.prediction.items()},
            best=self.best.split_size,
            lines={f"unsplit on {self.unsplit_on}": self.single_s} if self.single_s is not None else {},
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the content of a JSON file."""
        trials = [vars(trial) for trial in self.trials]
        return {
            "batch": self.batch, "trials": trials, "best": self.best.micro_batches,
            "prediction_s": {str(count): seconds for count, seconds in self.prediction.items()},
            "unsplit_s": list(self.unsplit_s), "unsplit_on": self.unsplit_on, "one_device": self.one_device,
            "best_over_unsplit": self.ratio and vars(self.ratio), "split_pays": self.split_pays,
            "settled": self.settled, "verdict": self.verdict,
            "failed": {str(count): reason for count, reason in self.failed.items()},
            "spent_s": self.spent_s,
        }  # fmt: skip


def tune(
    pipe: Pipeline,
    x: Any,
    y: Any,
    loss: Loss,
    *,
    candidates: Sequence[int] | None = None,
    budget_s: float | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Tuning:
    """Finds the micro-batch count that makes a step fastest, and sets `pipe.micro_batches` to it.

    Predicts the step time of every candidate from a few short steps (`hvdtrain.pipeline.plan.simulate`). Then the
    best and its neighbours take turns until the fastest is known. Last, it takes turns with the unsplit model on one
    device. Weights do not change; gradients, buffers and random state are restored.

    Example:
        tuning = hvdtrain.pipeline.tune(pipe, x, y, loss_fn, budget_s=60)
        print(tuning.verdict)

    Args:
        pipe: a split model.
        x, y, loss: a batch like those of training; as in `Pipeline.step`.
        candidates: micro-batch counts; default: 1, 2, 3, 4, 6, 8, 12, ... up to the batch.
        budget_s: seconds after which no further round begins; None: as long as needed.
        kwargs: the model's keyword arguments, as in `Pipeline.step`.

    Raises:
        ConfigError: a candidate that is no count of micro-batches of this batch.
        StageError: nothing could be run.
    """
    from hvdtrain.pipeline.tuning.predict import predict, preserved
    from hvdtrain.pipeline.values.microbatch import flat, samples_of

    started = time.perf_counter()
    batch = samples_of(flat(x, kwargs, pipe.names))
    counts = _counts(candidates, batch)
    with preserved(pipe):
        prediction = predict(pipe, x, y, loss, kwargs)
        predicted = {count: prediction(micro_batch_sizes(batch, count)) for count in counts}
        runs = _Runs(pipe, x, y, loss, batch, kwargs)
        left_s = math.inf if budget_s is None else max(0.0, budget_s - (time.perf_counter() - started))
        search = Search(partial(race_in_turns, runs), FOR_COUNTS * left_s)
        start = next((count for count in sorted(counts, key=predicted.__getitem__) if runs(count) < math.inf), None)
        if start is None:
            raise runs.errors[min(counts, key=predicted.__getitem__)]
        best, settled = climb(search, start, predicted, ROUNDS)
        one = search.compared(best, REFERENCE, ROUNDS, left_s) if runs.one is not None else None
    pipe.micro_batches = best
    seconds = {count: [its for its in runs.seconds[count] if its < math.inf] for count in runs.seconds}
    trials = {
        count: Trial(count, split_size(batch, count), tuple(its), statistics.median(its), predicted[count])
        for count, its in sorted(seconds.items())
        if its and count != REFERENCE
    }
    ratio = one.ratio if one else None
    return Tuning(
        batch=batch,
        trials=tuple(trials.values()),
        best=trials[best],
        prediction=predicted,
        unsplit_s=tuple(seconds.get(REFERENCE, ())) if ratio else (),
        unsplit_on=str(runs.one or ", ".join(dict.fromkeys(map(str, pipe.devices)))),
        ratio=ratio and Interval(1 / ratio.value, 1 / ratio.high, 1 / ratio.low),
        one_device=one.outcome if one else "",
        settled=settled and (one is None or one.outcome in ("faster", "slower")),
        failed={count: str(error) for count, error in runs.errors.items() if count != REFERENCE},
        spent_s=time.perf_counter() - started,
    )


def counted(micro_batches: int) -> str:
    """Returns a number of micro-batches in words."""
    return f"{micro_batches} micro-batch{'es' * (micro_batches != 1)}"


def split_size(batch: int, micro_batches: int) -> int:
    """Samples of the largest micro-batch."""
    return -(-batch // micro_batches)


def micro_batches_for(batch: int, size: int) -> int:
    """Returns how many micro-batches of at most that many samples a batch makes."""
    return -(-batch // size)


def _counts(candidates: Sequence[int] | None, batch: int) -> list[int]:
    if candidates is None:
        return usual_counts(batch)
    wrong = [count for count in candidates if isinstance(count, bool) or not 1 <= count <= batch]
    if wrong or not candidates:
        received = f"{', '.join(map(str, wrong)) or 'none'} for a batch of {batch}"
        rule = "candidates= must be numbers of micro-batches, from 1 to the samples of a batch"
        raise ConfigError(rule, received, f"between 1 and {batch}")
    return sorted(set(candidates))


# ---- runs


@dataclass
class _Runs:
    """Times one step: in so many micro-batches, or (`REFERENCE`) of the unsplit model on the fastest one device."""

    pipe: Pipeline
    x: Any
    y: Any
    loss: Loss
    batch: int
    kwargs: Mapping[str, Any] | None = None
    one: Unsplit | None = None
    errors: dict[int, Exception] = field(default_factory=dict)
    seconds: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from hvdtrain.pipeline.tuning.unsplit import unsplit

        timed = [(self._seconds(REFERENCE, one), one) for one in unsplit(self.pipe)]
        seconds, self.one = min(timed, key=lambda pair: pair[0], default=(math.inf, None))
        if seconds == math.inf:
            self.one = None

    def __call__(self, count: int) -> float:
        seconds = self._seconds(count, self.one if count == REFERENCE else None)
        self.seconds.setdefault(count, []).append(seconds)
        return seconds

    def _seconds(self, count: int, one: Unsplit | None) -> float:
        """Returns a step's seconds; infinite if it cannot run: too little memory, or too few samples for a layer."""
        from hvdtrain.pipeline.run.worker import StageError
        from hvdtrain.pipeline.tuning.unsplit import seconds_of

        model: Any = self.pipe if one is None else one
        if one is None:
            self.pipe.micro_batches = count
        try:
            return seconds_of(lambda: model.step(self.x, self.y, self.loss, kwargs=self.kwargs), self.pipe.devices)
        except Exception as error:
            if not isinstance(error, StageError) and not is_out_of_memory(error):
                raise
            self.errors[count] = error
            return math.inf
        finally:
            for parameter in (self.pipe.module if one is None else one.model).parameters():
                parameter.grad = None
