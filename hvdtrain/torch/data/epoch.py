"""One loop over a loader: what it hands out, what its models are told, and what it must not do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakSet

from hvdtrain.checkpoint.preemption import Training, end_if_told
from hvdtrain.comm import elastic
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.sharding import Plan, Step
from hvdtrain.torch.values.clock import CLOCK
from hvdtrain.world.world import World

TOGETHER = 2  # batches in a row that two loaders of one order may serve in turns


class Follower(Training, Protocol):
    """Receives each batch as it is handed out, with its step; None at the end."""

    @property
    def accumulate(self) -> int: ...
    @property
    def leaves(self) -> bool:
        """All ranks know that the ranks are about to change."""

    def handed_out(self, step: Step | None, batch: Any = None) -> None: ...


class Server(Protocol):
    """What a loop is served by: a `hvdtrain.torch.Loader`."""

    plan: Plan
    world: World
    followers: WeakSet[Follower]
    differentiated: Step | None

    @property
    def samples(self) -> int: ...
    def identity(self) -> dict[str, Any]: ...
    def pads(self) -> bool: ...
    def refuse_other_loop(self, loop: Epoch) -> None: ...
    def made_next(self) -> tuple[Any, Step] | None: ...
    def hand_out(self, batch: Any, step: Step) -> None: ...
    def end_loop(self) -> None: ...


class Epoch:
    """The loop over the rest of one epoch. The loader only knows it weakly: when it is gone, the loop was left.

    Attributes:
        epoch: its number.
        padding: the step of the batch last handed out, if that counts nothing.
    """

    running: WeakSet[Epoch] = WeakSet()

    def __init__(self, loader: Server, epoch: int) -> None:
        self.epoch = epoch
        self.padding: Step | None = None
        self._loader = loader
        self._over = False
        self._count = 0
        self._others: dict[int, tuple[int, int]] = {}  # of each twin: batches it had served, how often it went along

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        loader = self._loader
        if self._over:  # asked again: the loader may be elsewhere by now
            raise StopIteration
        loader.refuse_other_loop(self)
        self._check_padding()
        self._refuse_twins()
        CLOCK.enter("input")
        item = loader.made_next()
        if item is None:
            self._over = True
            Epoch.running.discard(self)
            loader.end_loop()
            CLOCK.enter("other")
            self._tell(None, None)
            raise StopIteration
        if loader.pads():  # what is saved, or dealt anew, begins with this batch
            end_if_told(loader.followers, loader.world)
            if _change_if_asked(loader.followers):
                item = loader.made_next()
                assert item is not None  # there was one
        batch, step = item
        loader.hand_out(batch, step)
        self.padding = step if step.padding else None
        self._count += 1
        self._tell(step, batch)
        CLOCK.enter("forward")
        return batch

    def _tell(self, step: Step | None, batch: Any) -> None:
        for follower in self._loader.followers:
            follower.handed_out(step, batch)

    def _check_padding(self) -> None:
        """A batch that counts nothing must go where that is known."""
        if self.padding is not None and self.padding is not self._loader.differentiated:
            raise ConfigError(
                "the training loader's batches go to optimizer.backward, which knows that some count nothing",
                f"rank {self._loader.world.rank} had no sample left in the last step of epoch {self.epoch}, got others"
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


def _change_if_asked(followers: Iterable[Follower]) -> bool:
    """Takes in new ranks, or lets some go, where all ranks know that it is time to; collective then."""
    its = elastic.active()
    if its is None:
        return False
    its.in_epoch()
    asked = any(follower.leaves for follower in followers)
    if asked:
        its.regroup(None)
    return asked
