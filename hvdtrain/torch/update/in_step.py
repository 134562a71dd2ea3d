"""Updates in step: a rank that waits in a reduction is noted; what its update is of travels with the sums."""

from __future__ import annotations

import itertools
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hvdtrain.torch.engines.base import EngineModel, Pass, StagedEngineModel
from hvdtrain.torch.engines.reducer import Reducer
from hvdtrain.torch.engines.zero import ZeroModel
from hvdtrain.torch.update.batches import Batches
from hvdtrain.watch.meeting import out_of_step
from hvdtrain.world.world import World

_LAG = 2  # updates, on a GPU, so that none waits for the answer
_BITS = (1 << 20) - 1  # of a digest: their squares, added up over 8192 ranks, are exact in a float64
_numbers = itertools.count(1)  # of this process; ranks prepare their models in the same order


class _Place(NamedTuple):
    """The identity of an update: a model, the place of its last batch in the loader, and the number stepped before."""

    model: int
    epoch: int
    samples_done: int
    stepped: int

    def __str__(self) -> str:
        at = f", sample {self.samples_done} of epoch {self.epoch}" if self.samples_done else ""
        return f"of model {self.model}{at}, {self.stepped} stepped before"


class TrackedModel:
    """An `EngineModel` (and `StagedEngineModel`) whose ranks are in the same update, or raise: ranks that reduce the
    gradients of different models, or of different batches of the loader (after one rank's `continue` or `break`),
    would add up mismatched tensors."""

    def __init__(self, model: EngineModel, world: World, batches: Batches) -> None:
        self._engine_model, self._world, self._batches = model, world, batches
        self._number = next(_numbers)
        self._extras: tuple[Tensor, Tensor] | None = None  # the caller's; with two numbers more
        self._under_way: deque[tuple[_Place, Tensor, Any]] = deque()
        self._place = _Place(0, 0, 0, 0)
        self.stepped = 0  # updates that the optimizer has taken
        self.call: Callable[..., Any] = model.call
        self.close = model.close
        self._zero = isinstance(model, ZeroModel)
        world.tracker.stepped(world.tracker.steps or 0)  # the proof's update is none of the training

    @contextmanager
    def _starting(self, extras: Tensor | None) -> Iterator[Tensor | None]:
        """Gives what travels: `extras` [k], and a digest of this rank's place and its square."""
        if extras is None or not self._world.tracker.on:
            yield extras
            return
        self._place = _Place(self._number, *self._batches.at(), self.stepped)
        own = zlib.crc32(struct.pack("4q", *self._place)) & _BITS
        sent = torch.cat([extras, torch.tensor([own, own * own], dtype=extras.dtype, device=extras.device)])
        self._extras = extras, sent
        self._world.tracker.begin_update(self._place)
        try:
            yield sent
        except BaseException:
            self._world.tracker.drop_update()
            raise

    def backward(self, loss: Tensor, sent: Pass) -> None:
        with self._starting(sent.extras) as extras:
            self._engine_model.backward(loss, replace(sent, extras=extras))

    def run(self, passes: Callable[[], None], sent: Pass) -> None:
        with self._starting(sent.extras) as extras:

            def then_extras() -> None:
                passes()
                if sent.extras is not None and extras is not sent.extras:
                    cast(Tensor, extras)[:-2] = sent.extras

            cast(StagedEngineModel, self._engine_model).run(then_extras, replace(sent, extras=extras))

    def finish(self) -> None:
        """See `EngineModel.finish`. Raises `ReplicaError`, on every rank, when they were not in the same update (on
        a GPU, some updates later)."""
        self._engine_model.finish()
        self._world.tracker.end_update()
        if self._extras is None:
            return
        (own, sums), self._extras = self._extras, None
        own.copy_(sums[:-2])
        arrived, found = None, sums[-2:]
        if found.is_cuda:
            found = torch.empty(2, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._under_way.append((self._place, found, arrived))
        while len(self._under_way) > (0 if arrived is None else _LAG):
            self._check(*self._under_way.popleft())

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
        self._under_way.clear()
        self._extras, self.stepped = None, stepped

    def _check(self, place: _Place, sums: Tensor, arrived: Any) -> None:
        if arrived is not None:
            arrived.synchronize()
        total, squares = map(int, sums.tolist())
        if total * total == self._world.size * squares:  # only where all are equal (Cauchy and Schwarz)
            return
        raise out_of_step(self._world.gather(self._world.tracker.state_of_update(place)))
