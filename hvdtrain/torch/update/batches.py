"""How much the batch at hand counts, and whether it is the last of its update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.sharding import Step
from hvdtrain.torch.data.loader import Loader, known
from hvdtrain.values.nested import tensors_of


@dataclass(frozen=True, eq=False)
class Batch:
    """The facts about a batch that `backward` needs; compared by identity. The update's weights are `planned` to sum to
    its samples; if samples are not counted, to its batches."""

    planned: float
    is_last_micro_batch: bool  # of its update
    step: Step | None = None  # of the loader; None where samples are not counted
    amount: float = 1.0  # what the batch weighs if the caller gives no weight
    update_samples: int = 0  # planned for the update, of all ranks; 0 when they are not counted
    place: tuple[int, int] = (0, 0)  # (epoch, samples of all ranks done in it after this batch)

    @property
    def weight(self) -> float:
        """The weight of its mean loss in the update; over all ranks and micro-batches of an update they sum to 1."""
        return self.amount / self.planned

    @property
    def whole_update(self) -> bool:
        """Returns True if this batch alone makes an update."""
        return self.is_last_micro_batch and (self.step is None or self.planned == self.step.global_samples)

    @property
    def padding(self) -> bool:
        """Returns True if this rank has no remaining samples, and takes part with weight 0."""
        return self.step is not None and self.step.padding


class Batches:
    """A source of batches: a loader, which knows every rank's share; or anything else, where each batch counts the
    same."""

    def __init__(self, data: Loader | None, size: int, accumulate: int) -> None:
        self.data = data
        self._accumulate = accumulate
        self._planned = float(size * accumulate)
        self._done = 0
        self._batch: Batch | None = None
        self._saved: Step | None = None
        self._calls: set[bool | None] = set()

    def called(self, values: Any) -> None:
        """Notes a call of the model on `values` in training: those of the batch last handed out, of another batch, or
        of unknown origin."""
        if self.data is not None:
            steps = {step for tensor in tensors_of(values) if (step := self.data.step_of(tensor)) is not None}
            self._calls.add(self.data.step in steps if steps else None)
        elif any(loader.step_of(tensor) is not None for tensor in tensors_of(values) for loader in known):
            self._calls.add(True)

    def check_calls(self) -> bool:
        """Returns True if the model has seen the batch at hand since the last backward pass; raises `ConfigError` if
        it has seen earlier batches only, or a batch of a loader that `prepare` was not given."""
        calls, self._calls = self._calls, set()
        if self.data is None and calls:
            raise ConfigError(
                "prepare() must be given the loader that the model trains on",
                "prepare() was given no loader; the model trains on a batch of hvdtrain.torch.loader()",
                "model, optimizer = hvdtrain.torch.prepare(model, optimizer, train)",
            )
        if calls == {False}:
            raise ConfigError(
                "the model must be called on the loader's latest batch",
                "the model was called on an earlier batch",
                "train on each batch within the loader's own loop (for x, y in train: ...);\n"
                "do not loop over list(train) or a prefetcher: the loader's workers already read ahead",
                code=33,
            )
        return True in calls

    def now(self) -> Batch | None:
        """Returns the batch that training is at; None before the first."""
        step = None if self.data is None else self.data.step
        if self.data is None:
            self._batch = self._batch or Batch(self._planned, (self._done + 1) % self._accumulate == 0)
        elif step is None:
            self._batch = None
        elif self._batch is None or self._batch.step is not step:
            samples, is_last = step.update(self._accumulate)
            self._batch = Batch(float(samples), is_last, step, float(step.samples), samples, self.at())
        return self._batch

    @property
    def are_dealt_anew(self) -> bool:
        """Returns True if the batch at hand was dealt to ranks that have changed since: it comes again."""
        return self.data is not None and self.data.is_dealt_anew

    def at(self) -> tuple[int, int]:
        """Returns (epoch, samples of all ranks done in it after the batch last handed out); (0, 0) without a loader."""
        step = None if self.data is None else self.data.step
        return (0, 0) if step is None else (step.epoch, step.samples_done)

    def done(self) -> None:
        """Notes that the backward pass of the batch is complete."""
        if self.data is not None:
            self.data.differentiated = None if self._batch is None else self._batch.step
        else:
            self._done, self._batch = self._done + 1, None

    def applied(self, batch: Batch) -> tuple[int, int]:
        """Notes that the update which `batch` completes is in the weights; returns (epoch, samples done in it) to
        continue with."""
        if batch is self._batch and self.data is not None:
            self.data.in_weights = batch.step
        return (0, 0) if batch.step is None else batch.step.place_after

    def restart(self) -> None:
        """Forgets batches, as a checkpoint was restored: none is in the weights but those of the checkpoint."""
        if self.data is not None:
            self._batch = self._saved = self.data.in_weights = None
            self._calls = set()

    def state(self) -> dict[str, Any] | None:
        """Returns the loader's state where a run resumes that has the weights of now; None without one."""
        return None if self.data is None else self.data.state_of_weights()

    def saved(self, gathered: Batch | None) -> None:
        """Notes that a checkpoint is taken; a restored run resumes after the last batch that is in the weights of any
        model. Raises `ConfigError` if an incomplete update (`gathered` is its last batch) has batches before that
        place."""
        last = None if self.data is None else self.data.in_weights
        step = None if gathered is None else gathered.step
        in_one_loop = step is not None and last is not None and (step.epoch, step.begin) == (last.epoch, last.begin)
        place = 0 if step is None else step.number % self._accumulate
        if in_one_loop and last.number >= step.number - place:  # type: ignore[union-attr]
            raise ConfigError(
                "a checkpoint cannot be saved while models on one loader have applied different batches",
                f"one model is at batch {place + 1} of {self._accumulate} of an update; another has applied these",
                "save after the step() of all optimizers has applied an update of the same batch",
            )
        self._saved = last

    def check_not_saved(self, batch: Batch) -> None:
        """Raises `ConfigError` for an update of a batch that is done in a checkpoint of this model."""
        if batch.step is not None and batch.step is self._saved:
            raise ConfigError(
                "a checkpoint cannot be saved between two step() calls on the same batch",
                "a checkpoint was saved after a step() on this batch, and this is another step() on the batch:\n"
                "a resumed run would skip it",
                "save after the last step() on the batch; do not restore checkpoints that this loop has saved so far",
            )


def require_batch(batch: Batch | None) -> Batch:
    """Raises `ConfigError` when no batch was handed out yet."""
    if batch is None:
        raise ConfigError(
            "backward() needs a batch of the loader, to weigh the loss by its samples",
            "no batch was read from the loader that prepare() was given",
            "train on batches of that loader: for x, y in train: ...",
        )
    return batch
