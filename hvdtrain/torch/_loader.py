"""The training data of a rank: deterministic, weighted exactly in uneven tails, and able to go on from any sample."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, Literal
from weakref import WeakSet, ref

import torch
from torch import Tensor

from hvdtrain import same_data
from hvdtrain.errors import ConfigError
from hvdtrain.shard import ORDER_RULE, Plan
from hvdtrain.torch._data import Augment, augment_of, source_of
from hvdtrain.torch._epoch import Epoch, Follower, Items, Live
from hvdtrain.torch._prefetch import Ahead
from hvdtrain.torch._session import device_of, world_or_current
from hvdtrain.torch._source import Fetched, Source, tensors_of, to_device
from hvdtrain.torch._steps import Step, Steps, uniforms
from hvdtrain.world import World

WARNED_FILES = 3  # unreadable files that are named as they come; all are in `Loader.skipped`


class Loader:
    """One rank's batches; made by `loader`. A loop over it is one epoch, and the next loop the next epoch.

    Each sample comes once. In the last step of an epoch some ranks may have no sample: a loop that trains the model
    which `prepare` was given this loader for gets a batch of others there, which count nothing (`live.ghost`) and keep
    the ranks in step. Any other loop, and one under ``torch.no_grad()``, is over one batch earlier on these ranks.

    Attributes:
        plan: the `hvdtrain.Plan` that deals the samples.
        live: what the batch last handed out counts; None before the first.
        skipped: files of this rank that could not be read, with the reason, each once.
        device: where batches are handed out.
        followers: prepared models that train on these batches.
    """

    def __init__(self, source: Source, plan: Plan, world: World, *, augment: Augment | None) -> None:
        self.plan = plan
        self.live: Live | None = None
        self.skipped: list[tuple[str, str]] = []
        self.device = device_of(world)
        self.followers: WeakSet[Follower] = WeakSet()
        self._source = source
        self._world = world
        self._augment = augment
        self._epoch, self._done = 0, 0  # of the loop that runs, else of the next one
        self._begin = 0
        self._begun = False  # a batch of the loop was handed out
        self._loop: ref[Epoch] | None = None
        self._items: Items | None = None
        self._moves = 0
        self._left: tuple[int, int] | None = None  # (epoch, samples done) of a loop that ended before its epoch
        self._left_told = False
        self._differentiated: Live | None = None
        self._start = 0, 0  # where training begins: what is only looked at before does not count

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
    def position(self) -> tuple[int, int]:
        """(epoch, samples of all ranks handed out in it): where the loop is, or the next one begins.

        After a loop that was left early that is the next epoch; what was read before anything was trained on is no
        epoch. What a checkpoint holds is where *training* is (`model_state`).
        """
        self._notice_end()
        if not self._begun and self._only_looked_at():
            return self._start
        return self._place(self._done)

    @property
    def running(self) -> bool:
        """Whether a loop has begun that can go on."""
        self._notice_end()
        return self._begun

    def position_after(self, live: Live | None) -> tuple[int, int]:
        """Returns where a restored run goes on if `live` is the last batch that is in the weights."""
        self._notice_end()
        if not self._begun:
            return self.position
        of_this_loop = live is not None and (live.epoch, live.begin) == (self._epoch, self._begin)
        return self._place(live.consumed if live is not None and of_this_loop else self._begin)

    def _only_looked_at(self) -> bool:
        return bool(self.followers) and self._differentiated is None

    def _place(self, done: int) -> tuple[int, int]:
        return (self._epoch + 1, 0) if self.plan.steps(done) == 0 else (self._epoch, done)

    def _notice_end(self) -> None:
        """A loop that was left (by ``break``, say) is gone: as anywhere, a new loop is a new epoch."""
        if self._begun and (self._loop is None or self._loop() is None):
            self._left = (self._epoch, self._done) if self.plan.steps(self._done) else None
            self._end_of_loop(self._epoch + 1, 0)

    def _end_of_loop(self, epoch: int, done: int) -> None:
        self._epoch, self._done, self._begin, self._begun, self._loop = epoch, done, done, False, None

    def left_early(self) -> tuple[int, int] | None:
        """Returns (epoch, samples done in it) of the first loop that was left with samples to come; once, then None."""
        self._notice_end()
        if self._left is None or self._left_told or self._only_looked_at():
            return None
        self._left_told = True
        return self._left

    def go_on(self, epoch: int, samples_in_epoch: int) -> None:
        """Makes the next loop begin there; the world may have another size than the one that got there.

        Raises:
            ConfigError: no such place in this data.
        """
        if epoch < 0:
            raise ConfigError("an epoch is counted from 0", f"epoch={epoch}")
        over = self.plan.steps(samples_in_epoch) == 0
        self._stop()
        self._end_of_loop(epoch + over, 0 if over else samples_in_epoch)
        self._left = self.live = self._differentiated = None
        self._start = self._epoch, self._done
        self._moves += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, and what it is a position in."""
        epoch, samples_in_epoch = self.position
        return {"epoch": epoch, "samples_in_epoch": samples_in_epoch, **self.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved position.

        Raises:
            ConfigError: it is a position in other data, or in another order of it: samples would be repeated or missed.
        """
        differ = {name: value for name, value in self.identity().items() if state.get(name, "unknown") != value}
        if differ:
            saved = ", ".join(f"{name}={state.get(name, 'unknown')}" for name in differ)
            raise ConfigError(
                "a run goes on with the data and the order it began with",
                f"saved with {saved}; now {', '.join(f'{name}={value}' for name, value in differ.items())}",
                "give the same data, seed and shuffle, or start a new run directory",
            )
        self.go_on(int(state["epoch"]), int(state["samples_in_epoch"]))

    def identity(self) -> dict[str, Any]:
        rule = ORDER_RULE if self.plan.shuffle else "as it is"
        return {"samples": self.plan.samples, "seed": self.plan.seed, "shuffle": self.plan.shuffle, "order": rule}

    def epochs(self, total: int) -> Iterator[int]:
        """Yields the numbers of the epochs that are left until `total` are done; a restored run's first may be partial.

        An epoch whose loop was left early, or that was not read at all, counts as done; batches that were read before
        anything was trained on do not.
        """
        while self.position[0] < total:
            epoch, moves = self.position[0], self._moves
            yield epoch
            if self.position[0] == epoch and self._moves == moves:
                self.go_on(epoch + 1, 0)

    def __len__(self) -> int:
        """Batches that are left in the epoch for this rank."""
        done = self.position[1]
        steps = self.plan.steps(done)
        last, _ = self.plan.span(steps - 1, done, self._world.rank)
        return steps - (last.start == last.stop and not self.stands_in())

    def __iter__(self) -> Iterator[Any]:
        epoch, done = self.position
        if self._begun and epoch == self._epoch:
            epoch, done = epoch + 1, 0  # the other loop can be finished by nobody
        self._stop()
        self._end_of_loop(epoch, done)
        loop = Epoch(self, epoch)
        self._items = self._ready(Steps(self.plan, epoch, done, rank=self._world.rank))
        self._loop = ref(loop)
        return loop

    def _stop(self) -> None:
        """Ends the reading of the loop that runs."""
        if self._items is not None:
            self._items.close()
            self._items = None

    def stands_in(self) -> bool:
        """Returns whether the loop of now trains: then it gets a batch in every step, on every rank."""
        return bool(self.followers) and torch.is_grad_enabled()

    def differentiated(self, live: Live | None) -> None:
        """The batch had its backward pass."""
        self._differentiated = live

    def one_pass(self) -> Generator[tuple[Any, Live], None, None]:
        """Yields every batch of an epoch once, apart from training: position, `live` and the clock stay as they are."""
        with closing(self._ready(Steps(self.plan, 0, 0, rank=self._world.rank))) as items:
            for batch, live in items:
                if not live.ghost:
                    yield batch, live

    def all_skipped(self) -> list[tuple[str, str]]:
        """Returns the unreadable files of all ranks, each once, with the reason; collective."""
        found = dict(pair for files in self._world.gather(self.skipped) for pair in files)
        return sorted(found.items())

    def close(self) -> None:
        """Ends the worker processes; they end with this process in any case."""
        self._stop()
        self._source.close()

    def _ready(self, steps: Sequence[Step]) -> Items:
        """Batches on the device, each with what it counts; made ahead where there is something to hide."""
        made = self._made(steps)
        if self.device.type != "cuda" or not self._source.worth_a_thread:
            return made
        return Ahead(made, self.device, lambda item: tensors_of(item[0]))

    def _made(self, steps: Sequence[Step]) -> Generator[tuple[Any, Live], None, None]:
        with closing(self._source.read(steps)) as answers:
            for step, fetched in zip(steps, answers, strict=True):
                yield self._make(step, fetched)

    def _make(self, step: Step, fetched: Fetched) -> tuple[Any, Live]:
        self._note(fetched.bad)
        count = step.samples if fetched.kept is None else len(fetched.kept)
        ghost = count == 0
        batch = to_device(fetched.batch, self.device)
        if self._augment is not None:
            batch = self._augmented(batch, step, fetched.kept, ghost)
        live = Live(
            samples=count,
            ghost=ghost,
            epoch=step.epoch,
            begin=step.begin,
            number=step.number,
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
        drawn = uniforms(self.plan, step.epoch, step.first, step.samples, draws)
        if kept is not None:
            drawn = drawn[kept]
        if ghost:
            drawn = uniforms(self.plan, step.epoch, 0, len(images), draws)
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
        seed: of order and augmentation; by default the world's. Loaders of as many samples with the same seed have the
            same order: two of them in one loop are refused.
        collate: makes a batch of a list of samples (of arrays: of their rows); by default
            ``torch.utils.data.default_collate``.

    Raises:
        ConfigError: an argument is wrong, or the data has no samples.
        ReplicaError: ranks gave different data, or the same in another order, or different batches, seeds or orders.
    """
    world = world_or_current(world)
    seed = world.seed if seed is None else seed
    source = source_of(data, world, workers=workers, collate=collate)
    plan = Plan(source.samples, world.size, per_rank_batch, seed=seed, shuffle=shuffle, tail=tail)
    world.agree("data (samples, batch, seed, order, tail)", (*vars(plan).values(),))
    if plan.samples == 0:
        raise ConfigError("training needs samples", "the data set has none", "give data", shared=True)
    if world.size > 1:
        same_data.check(world, source.digest())
    return Loader(source, plan, world, augment=augment or augment_of(data))
