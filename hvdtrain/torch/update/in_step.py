"""Updates in step: a rank that waits in a reduction is noted, and what its update is of travels with the sums."""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, cast

from torch import Tensor

from hvdtrain.core.errors import ReplicaError
from hvdtrain.torch.engines.base import EngineModel, Pass, StagedEngineModel
from hvdtrain.torch.engines.reducer import Reducer
from hvdtrain.torch.engines.zero import ZeroModel
from hvdtrain.torch.update.batches import Batches
from hvdtrain.watch.meeting import out_of_step
from hvdtrain.world.world import World

_BITS = (1 << 20) - 1  # of a digest: their squares, added up over 8192 ranks, are exact in a float64
_numbers = itertools.count(1)  # of this process; ranks prepare their models in the same order


class UpdatePlace(NamedTuple):
    """The identity of an update: a model, the place of its last batch in the loader, and the number stepped before."""

    model: int
    epoch: int
    samples_done: int
    stepped: int

    def __str__(self) -> str:
        at = f", sample {self.samples_done} of epoch {self.epoch}" if self.samples_done else ""
        return f"of model {self.model}{at}, {self.stepped} stepped before"

    def digest(self) -> float:
        return float(zlib.crc32(struct.pack("4q", *self)) & _BITS)


class TrackedModel:
    """An `EngineModel` (and `StagedEngineModel`) that knows its updates: ranks that reduce the gradients of different
    models, or of different batches of the loader (after one rank's `continue` or `break`), would add up mismatched
    tensors."""

    def __init__(self, model: EngineModel, world: World, batches: Batches) -> None:
        self._engine_model, self._world, self._batches = model, world, batches
        self._number = next(_numbers)
        self.stepped = 0  # updates that the optimizer has taken
        self.call: Callable[..., Any] = model.call
        self.close = model.close
        self._zero = isinstance(model, ZeroModel)
        world.tracker.stepped(world.tracker.steps or 0)  # the proof's update is none of the training

    def place(self) -> UpdatePlace:
        return UpdatePlace(self._number, *self._batches.at(), self.stepped)

    def out_of_step(self, place: UpdatePlace) -> ReplicaError:
        """Returns the error for ranks that were not in the same update; collective."""
        return out_of_step(self._world.gather(self._world.tracker.state_of_update(place)))

    @contextmanager
    def _tracked(self, sent: Pass) -> Iterator[None]:
        """Notes that this rank is in a reduction, if the pass is an update's last."""
        if sent.extras is not None and self._world.tracker.on:
            self._world.tracker.begin_update(self.place())
        try:
            yield
        except BaseException:
            self._world.tracker.drop_update()
            raise

    def backward(self, loss: Tensor, sent: Pass) -> None:
        with self._tracked(sent):
            self._engine_model.backward(loss, sent)

    def run(self, passes: Callable[[], None], sent: Pass) -> None:
        with self._tracked(sent):
            cast(StagedEngineModel, self._engine_model).run(passes, sent)

    def finish(self) -> None:
        self._engine_model.finish()
        self._world.tracker.end_update()

    def step(self, closure: Callable[[], object] | None = None) -> None:
        """Runs `EngineModel.step`. With zero= it is collective: the tracker also notes a rank that waits in it."""
        collective = self._world.tracker.reduction("the optimizer's step") if self._zero else nullcontext()
        with collective:
            self._engine_model.step(closure)
        self.stepped += 1
        self._world.tracker.stepped((self._world.tracker.steps or 0) + 1)

    def begin_again(self, stepped: int) -> None:
        """The ranks have changed: what is under way is forgotten."""
        cast(Reducer, self._engine_model).begin_again()
        self.stepped = stepped
