"""The loop over one epoch of a loader: who reads its batches, and what that may not be."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from hvdtrain.errors import ConfigError
from hvdtrain.torch._clock import CLOCK
from hvdtrain.torch._prefetch import Ahead

if TYPE_CHECKING:
    from hvdtrain.torch._loader import Loader

TOGETHER = 2  # batches in a row that two loaders of one order may serve in turns


@dataclass(frozen=True, eq=False)
class Live:
    """What the batch last handed out counts. A new object for every batch.

    Attributes:
        samples: samples of this rank that are in the batch and count; 0 in a ghost.
        ghost: this rank has no sample left: the batch keeps the step in step, and counts nothing.
        epoch: counted from 0.
        begin: samples of all ranks that were done in the epoch when the loop over it began.
        number: of the batch in that loop, counted from 0.
        consumed: samples of all ranks that are done in the epoch after it.
        global_samples: samples of all ranks in this step, as planned.
    """

    samples: int
    ghost: bool
    epoch: int
    begin: int
    number: int
    consumed: int
    global_samples: int


class Follower(Protocol):
    """Is told what each batch counts as it is handed out; None at the end."""

    def handed_out(self, live: Live | None) -> None: ...


Items = Generator[tuple[Any, Live], None, None] | Ahead[tuple[Any, Live]]


class Epoch:
    """The loop over the rest of one epoch. The loader only knows it weakly: when it is gone, the loop was left."""

    running: WeakSet[Epoch] = WeakSet()

    def __init__(self, loader: Loader, epoch: int) -> None:
        self.epoch = epoch
        self._loader = loader
        self._over = False
        self._stand_in: Live | None = None
        self._count = 0
        self._others: dict[int, tuple[int, int]] = {}  # of each twin: batches it had served, how often it went along

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        loader = self._loader
        if self._over:  # asked again: the loader may be elsewhere by now
            raise StopIteration
        if loader._loop is None or loader._loop() is not self:
            raise ConfigError(
                "a loader serves one loop at a time",
                f"a second loop was begun while this one was in epoch {self.epoch}",
                "make a second loader for a second loop",
            )
        self._check_stand_in()
        self._refuse_twins()
        CLOCK.enter("input")
        item = self._next()
        if item is None:
            self._over = True
            Epoch.running.discard(self)
            loader._end_of_loop(self.epoch + 1, 0)
            CLOCK.enter("other")
            _tell(loader, None)
            raise StopIteration
        batch, live = item
        self._stand_in = live if live.ghost else None
        self._count += 1
        loader.live, loader._begun = live, True
        _tell(loader, live)
        CLOCK.enter("forward")
        return batch

    def _next(self) -> tuple[Any, Live] | None:
        assert self._loader._items is not None
        for batch, live in self._loader._items:
            self._loader._done = live.consumed
            if not live.ghost or self._loader.stands_in():
                return batch, live
        return None

    def _check_stand_in(self) -> None:
        """A batch that counts nothing must go where that is known."""
        if self._stand_in is not None and self._stand_in is not self._loader._differentiated:
            raise ConfigError(
                "the training loader's batches go to optimizer.backward, which knows that some count nothing",
                f"rank {self._loader._world.rank} had no sample left in the last step of epoch {self.epoch}, got others"
                " to keep step, and did not train on them: a loop that only reads would count them",
                "train on each batch within the loop (for x, y in train: ..., not over list(train)); to read only, read"
                " under torch.no_grad(), or from a loader of its own",
            )

    def _refuse_twins(self) -> None:
        """Two loaders side by side must not serve the same order: pairs of a sample with itself.

        Side by side is what goes along, batch for batch, several times in a row: a loop that was interrupted does not.
        """
        mine = self._loader
        Epoch.running.add(self)
        for other in Epoch.running:
            its = other._loader
            if its is mine or not mine.plan.shuffle or (its.identity(), other.epoch) != (mine.identity(), self.epoch):
                continue
            before, together = self._others.get(id(other), (other._count, 0))
            together = together + 1 if other._count > before else 0
            self._others[id(other)] = (other._count, together)
            if together == TOGETHER:
                raise ConfigError(
                    "two loaders in one loop serve their samples in different orders",
                    f"both have {mine.samples} samples and seed {mine.plan.seed}, and are in epoch {self.epoch}: each"
                    " sample would meet itself",
                    f"give one of them another seed: loader(..., seed={mine.plan.seed + 1}); for data that belongs"
                    " together make one loader of both: loader((x, y, z), ...)",
                )


def _tell(loader: Loader, live: Live | None) -> None:
    for follower in loader.followers:
        follower.handed_out(live)
