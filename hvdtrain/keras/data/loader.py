"""A rank's batches for `fit` and `evaluate`, of data that is read by index: every sample exactly once."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import Any
from weakref import WeakSet

import keras
import numpy as np

from hvdtrain.comm import elastic
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.sharding import Dealt, Plan, Step
from hvdtrain.keras.backends.session import NO_SAMPLE, map_leaves
from hvdtrain.keras.data.sources import Batch, BatchSource, rows_of
from hvdtrain.private.keras import DataAdapter, data_adapter_utils
from hvdtrain.world.world import World

known: WeakSet[KerasLoader] = WeakSet()


class KerasLoader(Dealt, keras.utils.PyDataset, DataAdapter):
    """A rank's batches, made by `loader`: a `keras.utils.PyDataset` for `fit`.

    It is its own data adapter: Keras' adapter for a `PyDataset` would shuffle the batches again, in another order on
    every rank. Give weights to `loader`: `fit` refuses its own with this loader.

    Example:
        data = hvk.loader((x_train, y_train), per_rank_batch=32)
        model.fit(data, epochs=3, callbacks=hvk.callbacks(model))

    Attributes:
        plan: the `hvdtrain.Plan` that deals samples, or batches.
        unit: samples of one dealt item: 1, or those of a full batch.
        epoch: the epoch whose order is being read.
        served: the steps of the last reading that have samples of this rank, and how many rows each had.
        last_rows: this rank's rows in the last step that was read.
        reads_ahead: True if TensorFlow may read batches before they are trained on.
        next_epoch: the epoch to turn to, as our callbacks set it (Keras does not); `None`: the one that follows.
    """

    reads_ahead = True

    def __init__(self, source: BatchSource, plan: Plan, *, rank: int) -> None:
        super().__init__(workers=1)  # see `batches`
        self.plan = plan
        self.rank = rank
        self.unit = source.unit
        self.source = source
        self.next_epoch: int | None = None
        self.served: list[tuple[Step, int]] = []
        self.last_rows = 0
        self._entered = 0, 0  # (epoch, steps of it that were done) when the ranks have changed
        self.go_on(0, 0)
        known.add(self)

    @property
    def samples(self) -> int:
        """The number of samples in the data set."""
        return self.plan.total() * self.unit

    @property
    def per_rank_batch(self) -> int:
        """The number of samples of a rank in a full step."""
        return self.plan.per_rank_batch * self.unit

    @property
    def global_batch(self) -> int:
        """The number of samples of all ranks in a full step."""
        return self.plan.global_batch * self.unit

    def go_on(self, epoch: int, samples_in_epoch: int) -> None:
        """Makes the next `fit` begin there, as a restore does. Raises `ConfigError` if the data has no such place."""
        if samples_in_epoch % self.unit:
            raise ConfigError(
                "a run cannot resume within a batch of the data",
                f"{samples_in_epoch} samples done, batches of {self.unit}",
                "give the data that the run began with",
            )
        self._check_place(samples_in_epoch // self.unit)
        self.first_epoch, self._done, self._begun = epoch, samples_in_epoch, False
        self._rest = False
        self._weighted = self.source.weighted or self._marks(samples_in_epoch // self.unit)
        self._spec: Any = None
        self._read(epoch)

    def _marks(self, units: int) -> bool:
        """Returns True if a rank has no sample in some last step: Keras then expects weights in every batch."""
        plan = self.plan
        if elastic.ranks().may_change:  # there may be any number of ranks some time
            return True
        tails = [(plan.samples - done) % plan.global_batch for done in (0, units)]
        return plan.tail == "weighted" and any(0 < tail < plan.size for tail in tails)

    def identity(self) -> str:
        """Returns the identity of the samples' order; equal identities mean equal orders. It omits the number and the
        size of a `PyDataset`'s batches if they keep their order."""
        if self.plan.shuffle:
            return f"{self.plan.total()} {self._dealt()}, shuffled by seed {self.plan.seed}"
        return f"{self.plan.total()} samples, in order" if self.unit == 1 else "in order"

    def _dealt(self) -> str:
        return "samples" if self.unit == 1 else f"batches of {self.unit}"

    def _check_place(self, units: int) -> None:
        if self.plan.samples == 0 or self.plan.steps(units) == 0:
            received = f"{self.plan.samples * self.unit} samples, {units * self.unit} done"
            raise ConfigError("an epoch needs samples", received, "give more data")

    def has_more(self, epoch: int, samples_in_epoch: int) -> bool:
        """Returns True if the epoch has another step after so many of its samples."""
        return self.plan.steps(samples_in_epoch // self.unit) > 0

    def _read(self, epoch: int) -> None:
        self._steps = self.plan.step_slices(epoch, self.done(epoch) // self.unit, rank=self.rank)
        self.epoch = epoch

    def redeal(self, world: World, whole: int = 0, place: tuple[int, int] | None = None) -> None:
        """Deals to the changed ranks of `world`. `whole`: the global batch, if it stays; `place`: (epoch, steps of it
        that are done) of training; None: from the beginning."""
        self.plan, self.rank = replace(self.plan, size=world.size, whole=whole), world.rank
        if place is not None:
            self._entered = place
        self._read(self.epoch if place is None else place[0])

    def steps_until(self, batch: int) -> int:
        """Returns how many steps of the epoch are done with those before `batch`, which may be past its end."""
        return min(batch, len(self._steps))

    def samples_of(self, first: int, stop: int) -> int:
        """Returns the samples of all ranks in the steps `first` to `stop` of the remaining epoch."""
        return sum(step.global_samples for step in self._steps[first:stop]) * self.unit

    def complete(self, steps: int) -> bool:
        """Returns True if so many steps complete the remaining epoch."""
        return steps >= len(self._steps)

    def check_end(self, world: World) -> None:
        """Checks a complete epoch; collective. What is read by index was compared before it was dealt."""

    def mine(self) -> float | None:
        """Returns this rank's samples of an epoch; None if only the batches show their number."""
        return float(sum(step.samples for step in self._steps)) if self.unit == 1 else None

    def leave_nothing_out(self) -> None:
        """Makes the next `fit` of an epoch begin at its beginning, after the rest of it was fitted."""
        if self._done:
            self.go_on(self.first_epoch, 0)

    def done(self, epoch: int) -> int:
        """Returns the samples of an epoch that are skipped, because an earlier run has done them."""
        return self._done if epoch == self.first_epoch else 0

    def apart(self) -> KerasLoader:
        """Returns a loader of the same data at its beginning: what reads that leaves this one where it is."""
        return KerasLoader(self.source, self.plan, rank=self.rank)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def num_batches(self) -> int | None:
        """The batches of a whole epoch; the first of a `fit` may be the rest of one."""
        return self.plan.steps()

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self._batch(self._steps[index])

    def _batch(self, step: Step) -> tuple[Any, ...]:
        if step.padding:
            return self._shown(self.source.take(np.zeros(1, np.int64)), live=False)
        return self._shown(self.source.take(step.indices), live=True)

    def _shown(self, batch: Batch, *, live: bool) -> tuple[Any, ...]:
        """A batch as Keras gets it; one of a rank without samples has a row that is none."""
        x, y, weights = batch = batch if live else map_leaves(lambda array: array[:1], batch)
        if not self._weighted:
            return (x,) if y is None else (x, y)
        if weights is None:
            return x, y, np.full(rows_of(batch), live)
        return x, y, weights if live else map_leaves(lambda weight: weight * NO_SAMPLE, weights)

    def batches(self) -> Generator[tuple[Any, ...], None, None]:
        """Yields this rank's batches of the remaining epoch; closing it ends its readers. Keras' own threads are not
        used: they would keep what they have read when `fit` leaves an epoch."""
        workers = self.source.workers or 1
        epoch, done = self._entered
        steps = islice(self._steps, done if epoch == self.epoch else 0, None)
        served = self.served = []
        if workers < 2:
            for step in steps:
                batch = self._batch(step)
                self._note(step, batch, served)
                yield batch
            return
        with ThreadPoolExecutor(workers) as threads:

            def ask(count: int) -> Iterator[tuple[Step, Any]]:
                return ((step, threads.submit(self._batch, step)) for step in islice(steps, count))

            ready = deque(ask(workers + 1))
            try:
                while ready:
                    step, answer = ready.popleft()
                    batch = answer.result()
                    self._note(step, batch, served)
                    yield batch
                    ready.extend(ask(1))
            finally:
                threads.shutdown(wait=True, cancel_futures=True)

    def _note(self, step: Step, batch: tuple[Any, ...], served: list[tuple[Step, int]]) -> None:
        rows = rows_of(batch)
        self.last_rows = 0 if step.padding else rows
        if self.last_rows:
            served.append((step, rows))

    def served_order(self) -> np.ndarray:
        """Returns where the rows of the last reading belong: int64 [rows], growing with the data's order."""
        places = [np.zeros(0, np.int64)]
        for step, rows in self.served:
            places.append(step.indices if step.dealt == rows else np.repeat(step.indices, rows))
        return np.concatenate(places)

    def get_numpy_iterator(self) -> Any:
        return self.batches()

    def _examples(self) -> list[tuple[Any, ...]]:
        """Returns two batches: what differs between them has no fixed length."""
        steps = self.plan.step_slices(self.epoch, rank=self.rank)
        return [self._batch(steps[index]) for index in range(min(2, len(steps)))]

    def get_tf_dataset(self) -> Any:
        import tensorflow as tf

        if self._spec is None:
            self._spec = data_adapter_utils.get_tensor_spec(self._examples())
        found = tf.data.Dataset.from_generator(lambda: for_tensorflow(self.batches()), output_signature=self._spec)
        options = tf.data.Options()
        # nothing here is tuned; and its thread may sleep for seconds before an epoch's iterator can go (2.21)
        options.autotune.enabled = False
        if self.reads_ahead:
            return found.prefetch(2).with_options(options)
        options.experimental_optimization.inject_prefetch = False  # it draws from Python's generators, as training does
        return found.with_options(options)

    def get_torch_dataloader(self) -> Any:
        made = data_adapter_utils.get_torch_dataloader(self.batches())
        made.collate_fn = lambda batch: batch  # PyTorch's own makes lists of tuples; a step of fit(x) is given x itself
        if self._rest:  # a restored state has behind it what PyTorch draws, as a seed for workers, when an epoch begins
            self._rest = False
            import torch

            made.generator = torch.Generator()
        return made

    @property
    def batch_size(self) -> int | None:
        return None  # a tail batch has another size

    def _coming(self) -> int:
        counted = self.epoch + 1 if self._begun else self.first_epoch
        return counted if self.next_epoch is None else self.next_epoch

    def on_epoch_begin(self) -> None:
        """Turns to the next epoch's order (Keras calls it before it reads the epoch)."""
        epoch = self._coming()
        self._begun, self.next_epoch = True, None
        self._rest = self.done(epoch) > 0
        self.source.begin(epoch)
        if epoch != self.epoch:
            self._read(epoch)


def for_tensorflow(batches: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yields batches with what Keras' specification asks for in place of None, and makes None again."""
    import tensorflow as tf

    nothing = tf.experimental.Optional.empty(None)
    for batch in batches:
        yield tuple(nothing if part is None else part for part in batch)
