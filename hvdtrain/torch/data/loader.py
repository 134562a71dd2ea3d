"""The training data of a rank: deterministic, weighted exactly in uneven tails, and able to resume at any sample."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hvdtrain.checkpoint.parts import Training, end_if_preempted
from hvdtrain.comm import elastic
from hvdtrain.core.errors import ConfigError, RanksLost
from hvdtrain.core.sharding import ORDER_RULE, Dealt, Plan, Step
from hvdtrain.torch.data.prefetch import Ahead
from hvdtrain.torch.data.source import Augment, Fetched, Source, uniforms
from hvdtrain.torch.engines import unprepared
from hvdtrain.torch.engines.engine import device_of
from hvdtrain.torch.values.clock import CLOCK
from hvdtrain.values.nested import tensors_of, to_device
from hvdtrain.world.world import World

WARNED_FILES = 3  # unreadable files that are named as they come; all are in `Loader.skipped`
TOGETHER = 2  # batches in a row that two loaders of one order may serve in turns
known: WeakSet[Loader] = WeakSet()
_NUMBERS = itertools.count()

Items = Generator[tuple[Any, Step], None, None] | Ahead[tuple[Any, Step]]


class Follower(Training, Protocol):
    """Receives each batch as it is handed out, with its step; None at the end."""

    @property
    def accumulate(self) -> int: ...
    @property
    def leaves(self) -> bool:
        """Returns True if all ranks know that the ranks are about to change."""

    def handed_out(self, step: Step | None, batch: Any = None) -> None: ...


class Loader(Dealt):
    """A rank's batches, made by `loader`. A loop over it is one epoch; the next loop is the next epoch.

    Each sample comes once. In the last step of an epoch some ranks may have no sample. A loop that trains then gets a
    padding batch, which does not count (`step.padding`). Other loops, also under `torch.no_grad()`, end earlier there.

    Example:
        train = hvt.loader((x, y), per_rank_batch=32)
        for epoch in train.epochs(10):
            for inputs, targets in train:
                ...

    Attributes:
        plan: the `hvdtrain.Plan` that deals the samples.
        step: the `hvdtrain.Step` of the current batch; None before the first.
        skipped: this rank's files that could not be read, with the reason, each once.
        device: the device of the batches.
        followers: prepared models that train on these batches.
        differentiated: the step of the last batch whose backward pass is done.
        in_weights: the step of the last batch that is in the weights of one of them.
    """

    def __init__(self, source: Source, plan: Plan, world: World, *, augment: Augment | None) -> None:
        self.plan = plan
        self.step: Step | None = None
        self.skipped: list[tuple[str, str]] = []
        self.device = device_of(world)
        self.followers: WeakSet[Follower] = WeakSet()
        self._source = source
        self.world = world
        self._augment = augment
        self._epoch, self._done = 0, 0  # of the loop that runs, else of the next one
        self._begin = 0
        self._begun = False  # a batch of the loop was handed out
        self._loop: ref[Epoch] | None = None
        self._items: Items | None = None
        self._moves = 0
        self._restored = False  # into an epoch that is not the first; no loop has begun since
        self._left: tuple[int, int] | None = None  # (epoch, samples done) of a loop that ended before its epoch
        self._left_reported = self._part_reported = False
        self.differentiated: Step | None = None
        self.in_weights: Step | None = None
        self._served = WeakIdKeyDictionary()  # of each tensor that was handed out to train on, its step
        self._deals = self._step_of_deal = 0  # how often the ranks have changed; before the batch last handed out
        self._torn: ref[Epoch] | None = None  # a loop that was under way when the ranks changed
        known.add(self)
        self._number = next(_NUMBERS)
        self._start = 0, 0  # where training begins

    @property
    def workers(self) -> int:
        """The number of this rank's worker processes."""
        return self._source.workers

    @property
    def position(self) -> tuple[int, int]:
        """Returns (epoch, samples of all ranks done in it) of the current loop, or of the beginning of the next one.

        After a loop that was left early that is the next epoch; a loop that did not train does not count. A checkpoint
        holds the position of *training* (`model_state`).
        """
        self._notice_end()
        if not self._begun and self._only_looked_at():
            return self._start
        return self._place(self._done)

    @property
    def running(self) -> bool:
        """Returns True if a loop has begun that can continue."""
        self._notice_end()
        return self._begun

    def _position_of_weights(self) -> tuple[int, int]:
        self._notice_end()
        if not self._begun:
            return self.position
        step = self.in_weights
        of_this_loop = step is not None and (step.epoch, step.begin) == (self._epoch, self._begin)
        return self._place(step.samples_done if step is not None and of_this_loop else self._begin)

    def _only_looked_at(self) -> bool:
        """Returns True if nothing was trained on yet; loops of before `prepare` count as epochs of nothing."""
        return bool(self.followers) and self.differentiated is None

    def _after_loop(self) -> tuple[int, int]:
        """Returns where the next loop begins if this one ends here: there again if it only looked at the data."""
        over = self._trained() or not self.followers
        return (self._epoch + 1, 0) if over else (self._epoch, self._begin)

    def _trained(self) -> bool:
        """Returns True if a batch of the loop that runs had its backward pass."""
        its = self.differentiated
        return its is not None and (its.epoch, its.begin) == (self._epoch, self._begin)

    def _place(self, done: int) -> tuple[int, int]:
        step = self.step
        if step is not None and (step.epoch, step.samples_done) == (self._epoch, done):
            return step.place_after
        return self.plan.place_after(self._epoch, done)

    def _notice_end(self) -> None:
        """Notes that a loop was left (for example by `break`): as in any other loader, a new loop is a new epoch."""
        if self._begun and (self._loop is None or self._loop() is None):
            next_place = self._after_loop()
            left = next_place[0] > self._epoch and self._place(self._done)[0] == self._epoch
            self._left = (self._epoch, self._done) if left else None
            self._end_of_loop(*next_place)

    def _end_of_loop(self, epoch: int, done: int) -> None:
        self._epoch, self._done, self._begin, self._begun, self._loop = epoch, done, done, False, None

    def left_early(self) -> tuple[int, int] | None:
        """Returns (epoch, samples done in it) of the first loop that was left with samples to come; once, then None."""
        self._notice_end()
        if self._left is None or self._left_reported or self._only_looked_at():
            return None
        self._left_reported = True
        return self._left

    def go_on(self, epoch: int, samples_in_epoch: int) -> None:
        """Makes the next loop begin there, at any world size. Raises `ConfigError` if the data has no such place."""
        if epoch < 0:
            raise ConfigError("epoch must be >= 0", f"epoch={epoch}")
        place = self.plan.place_after(epoch, samples_in_epoch)
        self._stop()
        self._end_of_loop(*place)
        self._start = self._epoch, self._done
        self._left = self.step = self.differentiated = self.in_weights = None
        self._moves += 1

    @property
    def is_dealt_anew(self) -> bool:
        """Returns True if the batch last handed out was dealt to ranks that have changed since: it comes again."""
        return self.step is not None and self._step_of_deal != self._deals

    def redeal(self, state: Mapping[str, Any]) -> None:
        """Deals the samples from a place on to the present ranks, in the same steps, for this loop or a new rank."""
        self.plan = self.plan.of(self.world.size)
        self._deals += 1
        if not self.followers:  # no training: each loop is from the beginning
            self._torn = self._loop
            self._stop()
            return
        epoch, done = int(state["epoch"]), int(state["samples_in_epoch"])
        loop = None if self._loop is None else self._loop()
        if loop is None:
            self.load_state_dict(dict(state))
            return
        self.differentiated = self.in_weights = None
        self._start = epoch, done
        loop.padding = None
        self._stop()
        if epoch == self._epoch:
            self._done = self._begin = done
            self.note_place(state)
            self._items = self._ready(epoch, done)
        else:
            self._items = (item for item in list[tuple[Any, Step]]())

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, and the identity of the data that it is a position in."""
        return self._state(self.position, self.step)

    def state_of_weights(self) -> dict[str, Any]:
        """Returns the state to resume from: after the last batch that is in any model's weights."""
        return self._state(self._position_of_weights(), self.in_weights)

    def state_of_next_loop(self) -> dict[str, Any]:
        """Returns the state of where a new loop would begin if this one did not continue."""
        return self._state(self._after_loop() if self.running else self.position, None)

    def loop_goes_on(self) -> bool:
        """Returns True if the last batch of an epoch is in the weights, whose loop is not over."""
        return self.running and self._position_of_weights()[0] > self._epoch

    def others(self, kept: Iterable[object]) -> list[Loader]:
        """Returns the other loaders that no model trains on, without `kept`, also of earlier runs; newest first."""
        keeps = {id(self), *map(id, kept)}
        others = [its for its in known if its.world is self.world and id(its) not in keeps]
        untrained = [its for its in others if not its.followers and its.differentiated is None]
        return sorted(untrained, key=lambda its: -its._number)

    def _state(self, place: tuple[int, int], step: Step | None) -> dict[str, Any]:
        """Returns the state of a place, which is that after `step`, or one before it."""
        return {"epoch": place[0], "samples_in_epoch": place[1], **self.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at a saved position.

        Raises:
            ConfigError: it is a position in other data, or in another order of it: samples would be repeated or missed.
        """
        differ = self.differs(state)
        if differ:
            saved = ", ".join(f"{name}={state.get(name, 'unknown')}" for name in differ)
            raise ConfigError(
                "data and sample order must be the same as when the run was saved",
                f"saved with {saved}; now {', '.join(f'{name}={value}' for name, value in differ.items())}",
                "give the same data, seed and shuffle, or start a new run directory",
            )
        self.go_on(int(state["epoch"]), int(state["samples_in_epoch"]))
        self.note_place(state)
        self._restored = self.position[0] > 0

    def note_place(self, state: Mapping[str, Any]) -> None:
        """Keeps the other fields of a saved place, which a stream has."""

    def differs(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns this loader's identity fields that differ from a saved state's: other data, or another order."""
        return {name: value for name, value in self.identity().items() if state.get(name, "unknown") != value}

    def identity(self) -> dict[str, Any]:
        rule = ORDER_RULE if self.plan.shuffle else "as it is"
        return {"samples": self.plan.samples, "seed": self.plan.seed, "shuffle": self.plan.shuffle, "order": rule}

    def epochs(self, total: int) -> Iterator[int]:
        """Yields the numbers of the remaining epochs, up to `total`; after a restore the first epoch may be partial.

        An epoch whose loop was left early, or did not start, counts as done. A loop that does not train (accuracy under
        `torch.no_grad()`, a look at one batch) does not count.

        Raises:
            ConfigError: an epoch had two training loops; then its end, and where to resume, are undefined.
        """
        its = elastic.ranks() if self.followers else elastic.JobRanks()
        if self.position[0] >= total > 0 and self.world.is_main:
            done = f"hvdtrain: {total} of {total} epochs are done, and nothing is trained"
            print(f"{done}\n  fix: give epochs() a larger number, or train in another directory", flush=True)
        while True:
            its.begin_epoch()
            if self.position[0] >= total:
                return
            end_if_preempted(self.followers, self.world)
            self._restored = False
            epoch, moves = self.position[0], self._moves
            yield epoch
            if self._moves == moves and self.position[0] == epoch:
                self.go_on(epoch + 1, 0)
            elif self._moves == moves and self.followers and self.position[0] > epoch + 1:
                raise ConfigError(
                    "an epoch of loader.epochs() cannot have more than one training loop",
                    f"{self.position[0] - epoch} loops over the loader in epoch {epoch}, each with optimizer.backward",
                    "run one training loop per epoch, and more epochs;\n"
                    "for other passes use another loader, or your own loop over range()",
                )

    def __len__(self) -> int:
        """Returns the number of this rank's remaining batches in the epoch."""
        done = self.position[1]
        steps = self.plan.steps(done)
        last, _ = self.plan.span(steps - 1, done, self.world.rank)
        return steps - (last.start == last.stop and not self.pads())

    def __iter__(self) -> Iterator[Any]:
        epoch, done = self.position
        if self._restored and self.followers and self.world.is_main:
            print(
                f"hvdtrain: restored: this loop over the loader is epoch {epoch}, counted from 0\n"
                "  fix: for epoch in loader.epochs(n), or in range(progress.epoch, n); range(n) trains n more epochs",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        self._restored = False
        if self._begun and epoch == self._epoch:
            epoch, done = self._after_loop()  # the other loop can be finished by nobody
        self._stop()
        self._end_of_loop(epoch, done)
        loop = Epoch(self, epoch)
        self._items = self._ready(epoch, done)
        self._loop = ref(loop)
        return loop

    def refuse_other_loop(self, loop: Epoch) -> None:
        """Raises `RanksLost` or `ConfigError` for a loop that the loader no longer serves."""
        if self._torn is not None and self._torn() is loop:
            raise RanksLost(
                "a loop that does not train cannot continue after the ranks have changed",
                f"a loop over {self.samples} samples: no rank has the results of the lost ranks",
                "hvt.evaluate(model, data, metrics), which starts again when ranks change",
            )
        if self._loop is None or self._loop() is not loop:
            raise ConfigError(
                "a loader cannot serve two loops at a time",
                f"a second loop began, or a checkpoint was restored, while this loop was in epoch {loop.epoch}",
                "make a second loader for a second loop; begin a new loop after a restore",
            )

    def made_next(self) -> tuple[Any, Step] | None:
        """Returns the next batch of the loop that runs, not handed out yet, with its step; None at the end."""
        assert self._items is not None
        for batch, step in self._items:
            if not step.padding or self.pads():
                return batch, step
        return None

    def hand_out(self, batch: Any, step: Step) -> None:
        """Moves the loader's position after a batch, which the loop gets now."""
        self._done, self._step_of_deal = step.samples_done, self._deals
        self.step, self._begun = step, True
        for tensor in tensors_of(batch) if torch.is_grad_enabled() else ():
            self._served[tensor] = step

    def end_loop(self) -> None:
        """The loop that runs got its last batch; where it trained, every rank comes here."""
        looked_at = not self._trained() and not unprepared.reported  # a plain optimizer may have trained in the loop
        if self.world.size > 1 and self.world.is_main and looked_at and not self._part_reported:
            self._part_reported = True
            print(
                "hvdtrain: a loop over a loader without optimizer.backward() read rank 0's part of the samples"
                "\n  fix: world.sum(right) / world.sum(count), or hvt.evaluate, hvt.predict, hvt.update_bn of all",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        self._end_of_loop(*self._after_loop())

    def _stop(self) -> None:
        if self._items is not None:
            self._items.close()
            self._items = None

    def pads(self) -> bool:
        """Returns True if the loop of now trains: then it gets a batch in every step, on every rank."""
        return bool(self.followers) and torch.is_grad_enabled()

    def step_of(self, tensor: Tensor) -> Step | None:
        """Returns the step whose batch a tensor is part of; None where it is of none, or was made of one."""
        step: Step | None = self._served.get(tensor)
        return step

    def one_pass(self, *, padded: bool = False) -> Generator[tuple[Any, Step], None, None]:
        """Yields every batch of an epoch once, apart from training. `padded`: also padding batches."""
        with closing(self._ready(0, 0)) as items:
            for batch, step in items:
                if padded or not step.padding:
                    yield batch, step

    def all_skipped(self) -> list[tuple[str, str]]:
        """Returns the unreadable files of all ranks, each once, with the reason; collective."""
        found = dict(pair for files in self.world.gather(self.skipped) for pair in files)
        return sorted(found.items())

    def close(self) -> None:
        """Ends the worker processes; the end of this process does the same."""
        self._stop()
        self._source.close()

    def _ready(self, epoch: int, done: int) -> Items:
        """Batches on the device, each with what it counts; made ahead where there is something to hide."""
        made = self._made(epoch, done)
        if self.device.type != "cuda" or not self._source.worth_a_thread:
            return made
        return Ahead(made, self.device, lambda item: tensors_of(item[0]))

    def _made(self, epoch: int, done: int) -> Generator[tuple[Any, Step], None, None]:
        steps = self.plan.step_slices(epoch, done, rank=self.world.rank)
        with closing(self._source.read(steps)) as answers:
            for step, fetched in zip(steps, answers, strict=True):
                yield self._make(step, fetched)

    def _make(self, step: Step, fetched: Fetched) -> tuple[Any, Step]:
        self._note(fetched.bad)
        if fetched.kept is not None:
            step = replace(step, unreadable=step.dealt - len(fetched.kept))
        batch = to_device(fetched.batch, self.device)
        if self._augment is not None:
            batch = self._augmented(batch, step, fetched.kept)
        return batch, step

    def _augmented(self, batch: Any, step: Step, kept: list[int] | None) -> Any:
        if type(batch) not in (Tensor, tuple, list):
            raise ConfigError(
                "augment= needs batches that are a tensor, a tuple or a list",
                f"a {type(batch).__name__}",
                "augment in the data set or the training loop, or give another collate",
            )
        images = batch if isinstance(batch, Tensor) else batch[0]
        draws = getattr(self._augment, "draws", 0)
        first, samples = (0, len(images)) if step.padding else (step.first, step.dealt)
        drawn = uniforms(self.plan, step.epoch, first, samples, draws)
        if kept:
            drawn = drawn[kept]
        assert self._augment is not None
        images = self._augment(images, torch.from_numpy(drawn).to(self.device, non_blocking=True))
        return images if isinstance(batch, Tensor) else type(batch)((images, *batch[1:]))

    def _note(self, bad: list[tuple[str, str]]) -> None:
        known = {name for name, _ in self.skipped}
        for name, reason in bad:
            if name not in known:
                self.skipped.append((name, reason))
                if len(self.skipped) <= WARNED_FILES:
                    print(f"hvdtrain: rank {self.world.rank} skips {name}: {reason}", file=sys.stderr, flush=True)


class Epoch:
    """The loop over the rest of an epoch; `padding` is the step of the current batch, if that is a padding batch. The
    loader only knows it weakly: when it is gone, the loop was left."""

    running: WeakSet[Epoch] = WeakSet()

    def __init__(self, loader: Loader, epoch: int) -> None:
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
        if loader.pads():  # a saved or redealt position begins with this batch
            end_if_preempted(loader.followers, loader.world)
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
        """Raises `ConfigError` if a batch that counts nothing did not go where that is known."""
        if self.padding is not None and self.padding is not self._loader.differentiated:
            raise ConfigError(
                "every batch of the training loader must go to optimizer.backward()",
                f"rank {self._loader.world.rank} had no samples left in the last step of epoch {self.epoch}:\n"
                "it got a padding batch and did not train on it; a loop that only reads would count it",
                "train on each batch within the loop (for x, y in train: ..., not over list(train));\n"
                "to read only, read under torch.no_grad(), or from a separate loader",
            )

    def _refuse_twins(self) -> None:
        """Refuses two loaders that serve the same order side by side, batch for batch, several times in a row."""
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
                    "two loaders in one loop must serve their samples in different orders",
                    f"both have {mine.samples} samples and seed {mine.plan.seed}, and are in epoch {self.epoch}:\n"
                    "each sample would be paired with itself",
                    f"give one loader another seed: loader(..., seed={mine.plan.seed + 1});\nfor data that belongs"
                    " together make one loader: loader((x, y, z), ...)",
                )


def _change_if_asked(followers: Iterable[Follower]) -> bool:
    """Takes in new ranks, or lets some go, where all ranks know that it is time to; collective then."""
    elastic.ranks().in_epoch()
    asked = any(follower.leaves for follower in followers)
    if asked:
        elastic.ranks().regroup(None)
    return asked
