"""The training data of a rank: deterministic, weighted exactly in uneven tails, and able to go on from any sample."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hvdtrain.errors import ConfigError
from hvdtrain.shard import ORDER_RULE, Plan
from hvdtrain.torch._clock import CLOCK
from hvdtrain.torch._data import Augment, augment_of, source_of
from hvdtrain.torch._prefetch import Ahead
from hvdtrain.torch._session import device_of, world_or_current
from hvdtrain.torch._source import Fetched, Source, tensors_of, to_device
from hvdtrain.torch._steps import Step, Steps, uniforms
from hvdtrain.world import World

WARNED_FILES = 3  # unreadable files that are named as they come; all are in `Loader.skipped`


@dataclass(frozen=True, eq=False)
class Live:
    """What the batch last handed out counts. A new object for every batch.

    Attributes:
        samples: samples of this rank that are in the batch and count; 0 in a ghost.
        update_samples: samples of all ranks in all micro-batches of its update, as planned.
        closes: it is the last micro-batch of its update.
        ghost: this rank has no sample left: the batch keeps the step in step, and counts nothing.
        epoch: counted from 0.
        consumed: samples of all ranks that are done in the epoch after it.
        global_samples: samples of all ranks in this step, as planned.
    """

    samples: int
    update_samples: int
    closes: bool
    ghost: bool
    epoch: int
    consumed: int
    global_samples: int


class Loader:
    """One rank's batches; made by `loader`. A loop over it is one epoch, and the next loop the next epoch.

    Attributes:
        plan: the `hvdtrain.Plan` that deals the samples.
        accumulate: micro-batches of an update; `prepare` sets it.
        live: what the batch last handed out counts; None before the first.
        skipped: files of this rank that could not be read, with the reason, each once.
        device: where batches are handed out.
    """

    def __init__(self, source: Source, plan: Plan, world: World, *, augment: Augment | None) -> None:
        self.plan = plan
        self.accumulate = 1
        self.live: Live | None = None
        self.skipped: list[tuple[str, str]] = []
        self.device = device_of(world)
        self._source = source
        self._world = world
        self._augment = augment
        self._epoch, self._done = 0, 0
        self._serving: _Epoch | None = None
        self._moves = 0

    @property
    def samples(self) -> int:
        """Samples in the data set."""
        return self.plan.samples

    @property
    def per_rank_batch(self) -> int:
        return self.plan.per_rank_batch

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in a full step."""
        return self.plan.global_batch

    @property
    def workers(self) -> int:
        """Worker processes of this rank; 0 is none."""
        return self._source.workers

    @property
    def may_skip(self) -> bool:
        """Files may turn out to be unreadable, so that a batch has fewer samples than planned."""
        return self._source.may_skip

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, samples of all ranks done in it) after the last complete update: where a restored run goes on.

        The samples of an update that is not complete (`accumulate`) are seen again after a restore, as their gradients
        are in no weight yet.
        """
        if self.plan.steps(self._done) == 0:
            return self._epoch + 1, 0
        return self._epoch, self._done

    def go_on(self, epoch: int, samples_in_epoch: int) -> None:
        """Makes the next loop begin there; the world may have another size than the one that got there.

        Raises:
            ConfigError: no such place in this data.
        """
        if epoch < 0:
            raise ConfigError("an epoch is counted from 0", f"epoch={epoch}")
        over = self.plan.steps(samples_in_epoch) == 0
        self._stop()
        self._epoch, self._done = (epoch + 1, 0) if over else (epoch, samples_in_epoch)
        self.live = None
        self._moves += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, and what it is a position in."""
        epoch, samples_in_epoch = self.position
        return {"epoch": epoch, "samples_in_epoch": samples_in_epoch, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved position.

        Raises:
            ConfigError: it is a position in other data, or in another order of it: samples would be repeated or missed.
        """
        differ = {name: value for name, value in self._identity().items() if state.get(name, "unknown") != value}
        if differ:
            saved = ", ".join(f"{name}={state.get(name, 'unknown')}" for name in differ)
            raise ConfigError(
                "a run goes on with the data and the order it began with",
                f"saved with {saved}; now {', '.join(f'{name}={value}' for name, value in differ.items())}",
                "give the same data, seed and shuffle, or start a new run directory",
            )
        self.go_on(int(state["epoch"]), int(state["samples_in_epoch"]))

    def _identity(self) -> dict[str, Any]:
        rule = ORDER_RULE if self.plan.shuffle else "as it is"
        return {"samples": self.plan.samples, "seed": self.plan.seed, "shuffle": self.plan.shuffle, "order": rule}

    def epochs(self, total: int) -> Iterator[int]:
        """Yields the numbers of the epochs that are left until `total` are done; a restored run's first may be partial.

        An epoch whose loop was left early, or that was not read at all, counts as done.
        """
        while self.position[0] < total:
            epoch, moves = self.position[0], self._moves
            yield epoch
            if self.position[0] == epoch and self._moves == moves:
                self.go_on(epoch + 1, 0)

    def __len__(self) -> int:
        """Steps that are left in the epoch."""
        return self.plan.steps(self.position[1])

    def __iter__(self) -> Iterator[Any]:
        epoch, done = self.position
        if self._serving is not None and self._serving.begun and self._serving.epoch == epoch:
            epoch, done = epoch + 1, 0  # the loop before was left early: as anywhere, a new loop is a new epoch
        self._stop()
        self._epoch, self._done = epoch, done
        self._serving = _Epoch(self, epoch, done)
        return self._serving

    def _stop(self) -> None:
        if self._serving is not None:
            self._serving.close()
            self._serving = None

    def one_pass(self) -> Iterator[tuple[Any, Live]]:
        """Yields every batch of an epoch once, apart from training: position, `live` and the clock stay as they are.

        Raises:
            ConfigError: in the middle of a loop whose workers it would take away.
        """
        if self.workers and self._serving is not None:
            raise ConfigError(
                "a loader serves one loop at a time",
                f"a pass over all samples in the middle of epoch {self._serving.epoch}",
                "evaluate after the loop, or make a second loader",
            )
        ready = self._ready(Steps(self.plan, 0, 0, rank=self._world.rank))
        try:
            yield from ready
        finally:
            if isinstance(ready, Ahead):
                ready.close()

    def all_skipped(self) -> list[tuple[str, str]]:
        """Returns the unreadable files of all ranks, each once, with the reason; collective."""
        found = dict(pair for files in self._world.gather(self.skipped) for pair in files)
        return sorted(found.items())

    def close(self) -> None:
        """Ends the worker processes; they end with this process in any case."""
        self._stop()
        self._source.close()

    def _ready(self, steps: Sequence[Step]) -> Iterator[tuple[Any, Live]]:
        """Batches on the device, each with what it counts; made ahead where there is something to hide."""
        made = map(self._make, steps, self._source.read(steps))
        if self.device.type != "cuda" or not self._source.worth_a_thread:
            return made
        return Ahead(made, self.device, lambda item: tensors_of(item[0]))

    def _make(self, step: Step, fetched: Fetched) -> tuple[Any, Live]:
        self._note(fetched.bad)
        count = step.samples if fetched.kept is None else len(fetched.kept)
        ghost = count == 0
        batch = to_device(self._source.ghost() if ghost else fetched.batch, self.device)
        if self._augment is not None:
            batch = self._augmented(batch, step, fetched.kept, ghost)
        live = Live(
            samples=count,
            update_samples=step.update_samples,
            closes=step.closes,
            ghost=ghost,
            epoch=step.epoch,
            consumed=step.consumed,
            global_samples=step.global_samples,
        )
        return batch, live

    def _augmented(self, batch: Any, step: Step, kept: list[int] | None, ghost: bool) -> Any:
        if type(batch) not in (Tensor, tuple, list):
            raise ConfigError(
                "augment changes the first part of a batch that is a tensor, tuple or list",
                f"a {type(batch).__name__}",
                "augment in the data set or the training loop, or give another collate",
            )
        images = batch if isinstance(batch, Tensor) else batch[0]
        draws = getattr(self._augment, "draws", 0)
        drawn = uniforms(self.plan.seed, step.epoch, step.first, step.samples, draws)
        if kept is not None:
            drawn = drawn[kept]
        if ghost:
            drawn = uniforms(self.plan.seed, step.epoch, 0, len(images), draws)
        assert self._augment is not None
        images = self._augment(images, torch.from_numpy(drawn).to(self.device, non_blocking=True))
        return images if isinstance(batch, Tensor) else type(batch)((images, *batch[1:]))

    def _note(self, bad: list[tuple[str, str]]) -> None:
        known = {name for name, _ in self.skipped}
        for name, reason in bad:
            if name not in known:
                self.skipped.append((name, reason))
                if len(self.skipped) <= WARNED_FILES:
                    print(f"hvdtrain: rank {self._world.rank} leaves out {name}: {reason}", file=sys.stderr, flush=True)


class _Epoch:
    """The loop over the rest of one epoch."""

    def __init__(self, loader: Loader, epoch: int, consumed: int) -> None:
        self.epoch = epoch
        self.begun = self._over = False
        self._loader: Loader | None = loader
        self._items = loader._ready(
            Steps(loader.plan, epoch, consumed, rank=loader._world.rank, accumulate=loader.accumulate)
        )

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        loader = self._loader
        if self._over:  # asked again: the loader may be elsewhere by now
            raise StopIteration
        if loader is None:
            raise ConfigError(
                "a loader serves one loop at a time",
                f"a second loop was begun while this one was in epoch {self.epoch}",
                "make a second loader for a second loop",
            )
        CLOCK.enter("input")
        item = next(self._items, None)
        if item is None:
            loader._epoch, loader._done, loader._serving = self.epoch + 1, 0, None
            CLOCK.enter("other")
            self._over = True
            raise StopIteration
        batch, live = item
        self.begun = True
        loader.live = live
        if live.closes:
            loader._done = live.consumed
        CLOCK.enter("forward")
        return batch

    def close(self) -> None:
        self._loader = None
        if isinstance(self._items, Ahead):
            self._items.close()


def loader(
    data: Any,
    per_rank_batch: int,
    *,
    world: World | None = None,
    shuffle: bool = True,
    tail: Literal["weighted", "drop"] = "weighted",
    workers: int | Literal["auto"] = "auto",
    augment: Augment | None = None,
    seed: int | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Loader:
    """Returns this rank's training batches: each sample once an epoch over all ranks, in an order that does not depend
    on how many ranks there are; collective.

    Args:
        data: the same on every rank: arrays or tensors of all samples, as a tuple ``(x, y, ...)`` (served in whole
            batches from memory, the GPU's if they fit), or a map-style ``torch.utils.data.Dataset``.
        per_rank_batch: samples a rank takes in a full step.
        world: the ranks; by default those of `hvdtrain.init`.
        shuffle: False keeps the data's order.
        tail: samples that do not fill a global step are dealt out and weighed exactly, or left out ("drop").
        workers: processes that read a ``Dataset``; "auto" sizes them to the cores that this rank really has.
        augment: called with each batch's first part, on the device, and ``augment.draws`` uniform numbers a sample,
            which depend on the sample's place in the epoch only; by default ``data.augment`` if there is one.
        seed: of order and augmentation; by default the world's.
        collate: makes a batch of a list of samples; by default ``torch.utils.data.default_collate``.

    Raises:
        ConfigError: an argument is wrong, or the data has no samples.
        ReplicaError: ranks gave data of different lengths, or different batches, seeds or orders.
    """
    world = world_or_current(world)
    seed = world.seed if seed is None else seed
    source = source_of(data, world, workers=workers, seed=seed, collate=collate)
    plan = Plan(source.samples, world.size, per_rank_batch, seed=seed, shuffle=shuffle, tail=tail)
    world.agree("data (samples, batch, seed, order, tail)", (*vars(plan).values(),))
    if plan.samples == 0:
        raise ConfigError("training needs samples", "the data set has none", "give data", shared=True)
    return Loader(source, plan, world, augment=augment or augment_of(data))
