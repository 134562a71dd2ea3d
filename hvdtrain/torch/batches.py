"""How much the batch at hand counts, and whether it closes its update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hvdtrain.core.errors import ConfigError

if TYPE_CHECKING:
    from hvdtrain.torch.data.live import Live
    from hvdtrain.torch.data.loader import Loader


@dataclass(frozen=True, eq=False)
class Batch:
    """What `backward` must know about a batch. Compared by identity: the same object means the same batch.

    Attributes:
        weight: of its mean loss in the update; over all ranks and micro-batches of an update they sum to 1.
        samples: live ones of this rank.
        update_samples: planned for the update, of all ranks; 0 when nobody counts them.
        global_samples: planned for this batch, of all ranks.
        closes: it is the last micro-batch of its update.
        ghost: this rank has no samples left, and takes part with weight 0.
        epoch: counted from 0.
        consumed: samples of all ranks done in the epoch after this batch.
        planned: what the update's weights are expected to sum to: its samples; where nobody counts them, its batches.
    """

    weight: float
    samples: int
    update_samples: int
    global_samples: int
    closes: bool
    ghost: bool
    epoch: int
    consumed: int
    planned: float

    @property
    def amount(self) -> float:
        """What the batch weighs if the caller does not say."""
        return float(self.samples) if self.update_samples else float(not self.ghost)


class Batches(Protocol):
    """Where batches come from."""

    def now(self) -> Batch | None:
        """The batch that training is at; None before the first."""
        ...

    def done(self) -> None:
        """The backward pass of the batch is complete."""
        ...

    def applied(self, batch: Batch) -> tuple[int, int]:
        """The update that `batch` completes is in the weights; returns (epoch, samples done in it) to go on with."""
        ...

    def restart(self) -> None:
        """A checkpoint was restored: no batch is in the weights but those of the checkpoint."""
        ...


class FromLoader:
    """Batches of an `hvdtrain.torch.loader`, which knows every rank's share."""

    def __init__(self, data: Loader, accumulate: int) -> None:
        self.data = data
        self._accumulate = accumulate
        self._live: Live | None = None
        self._batch: Batch | None = None
        self._applied: Live | None = None

    def now(self) -> Batch | None:
        live = self.data.live
        if live is not self._live:
            self._live, self._batch = live, None if live is None else self._of_live(live)
        return self._batch

    def done(self) -> None:
        self.data.differentiated(self._live)

    def applied(self, batch: Batch) -> tuple[int, int]:
        if batch is self._batch:
            self._applied = self._live
        over = self.data.plan.steps(batch.consumed) == 0
        return (batch.epoch + 1, 0) if over else (batch.epoch, batch.consumed)

    def restart(self) -> None:
        self._live = self._batch = self._applied = None

    def place(self) -> tuple[int, int]:
        """(epoch, samples done in it) where a run goes on that has the weights of now."""
        return self.data.position_after(self._applied)

    def _of_live(self, live: Live) -> Batch:
        update_samples, closes = self.data.plan.update(live.number, live.begin, self._accumulate)
        return Batch(
            weight=live.samples / update_samples,
            samples=live.samples,
            update_samples=update_samples,
            global_samples=live.global_samples,
            closes=closes,
            ghost=live.ghost,
            epoch=live.epoch,
            consumed=live.consumed,
            planned=float(update_samples),
        )


class Counted:
    """Batches of anything else: every rank's count the same, and samples are not counted."""

    def __init__(self, size: int, accumulate: int) -> None:
        self._planned = float(size * accumulate)
        self._accumulate = accumulate
        self._done = 0
        self._batch = self._next()

    def _next(self) -> Batch:
        closes = (self._done + 1) % self._accumulate == 0
        weight = 1.0 / self._planned
        return Batch(weight, 0, 0, 0, closes, ghost=False, epoch=0, consumed=0, planned=self._planned)

    def now(self) -> Batch:
        return self._batch

    def done(self) -> None:
        self._done += 1
        self._batch = self._next()

    def applied(self, batch: Batch) -> tuple[int, int]:
        return 0, 0

    def restart(self) -> None:
        """Nothing to forget."""


def require_batch(batch: Batch | None) -> Batch:
    """Raises `ConfigError` when no batch was handed out yet."""
    if batch is None:
        raise ConfigError(
            "backward() weighs the loss by the samples of the loader's batch",
            "no batch has come from the loader that prepare() was given",
            "train on batches of that loader: for x, y in train: ...",
        )
    return batch
