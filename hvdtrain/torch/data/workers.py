"""Data sets that are read sample by sample, in worker processes or in this one: the same batches either way.

Each sample has a seed of its own, made of its place in the epoch: Python's, numpy's and PyTorch's generators are set to
it before the sample is read. So random transforms do not depend on how many workers and ranks there are, nor on where
a resumed epoch began, and never touch the streams of the training process.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

from hvdtrain.core.errors import ConfigError, HvdtrainError
from hvdtrain.core.same_data import Digest, of_items
from hvdtrain.core.sharding import Step
from hvdtrain.torch.data.draws import SEED_STREAM, words
from hvdtrain.torch.data.forks import worker_context
from hvdtrain.torch.data.random_state import preserved_rng
from hvdtrain.torch.data.source import Fetched

# More than this many unreadable samples, and more than this part of what was read: the data is broken, not a file.
BAD_SAMPLES, BAD_PART = 8, 0.1

REFUSED, NOTHING = "refused", "nothing can be read"  # in place of a batch


@dataclass(frozen=True)
class Unreadable:
    """What a data set returns in place of a sample that cannot be read: it is left out, named and counted.

    Attributes:
        name: of the file.
        reason: why it cannot be read.
        fatal: it is refused, not left out.
    """

    name: str
    reason: str
    fatal: bool = False


class BatchReader(torch.utils.data.Dataset[Fetched]):
    """Reads and collates whole batches; what runs in the workers."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate
        self._stand_in: Any = None

    def __getitem__(self, step: Step) -> Fetched:
        if get_worker_info() is not None:  # a worker's generators are nobody else's
            return self._read(step)
        with preserved_rng():
            return self._read(step)

    def _read(self, step: Step) -> Fetched:
        seeds = words(step.plan, step.epoch, step.first, step.dealt, 1, stream=SEED_STREAM)[:, 0].tolist()
        samples, kept, bad = [], [], []
        indices = step.indices.tolist()
        for number, (index, seed) in enumerate(zip(indices, seeds, strict=True)):
            sample = _sample(self.dataset, index, seed)
            if isinstance(sample, Unreadable):
                bad.append((sample.name, sample.reason))
                if sample.fatal:  # as a value: an exception would lose its parts on the way out of a worker
                    return Fetched(REFUSED, None, bad)
            else:
                samples.append(sample)
                kept.append(number)
        if not samples:
            return Fetched(self._of_others(), [], bad)
        with located(f"while collating samples {', '.join(map(str, indices[:8]))}{' ...' * (len(indices) > 8)}"):
            return Fetched(self.collate(samples), kept if bad else None, bad)

    def _of_others(self) -> Any:
        """A batch of two samples that can be read, the first of the data set; kept for next time."""
        if self._stand_in is None:
            found: list[Any] = []
            for index in range(len(self.dataset)):
                sample = _sample(self.dataset, index, seed=index)
                if not isinstance(sample, Unreadable):
                    found.append(sample)
                if len(found) == 2:
                    break
            if not found:
                return NOTHING
            self._stand_in = self.collate(found)
        return self._stand_in


@contextmanager
def located(where: str) -> Iterator[None]:
    """Adds to an error where in the data it came from; its type and text stay."""
    try:
        yield
    except Exception as error:
        error.add_note(f"hvdtrain: {where}")
        raise


class _Samples:
    """A data set whose every read has the same random numbers."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return _sample(self._dataset, index, seed=index)


class _DigestReader(torch.utils.data.Dataset[Any]):
    """Makes the digest of a data set where its samples are read: a file that it opens must not be shared by workers."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, _: int) -> tuple[Any, Any]:
        with preserved_rng():
            digest = of_items(_Samples(self._dataset))
        return digest.card, digest.sketch()


def _sample(dataset: Any, index: int, seed: int) -> Any:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
    with located(f"while reading sample {index}"):
        return dataset[index]


def _as_it_is(fetched: Fetched) -> Fetched:
    return fetched


def _start_worker(worker: int) -> None:
    # Ctrl-C goes to the whole terminal group; the rank ends its workers itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Workers:
    """A `Source` of a map-style data set.

    Workers are started for each pass, as PyTorch's own loader does by default: they read the data set as it is then,
    as this process does where there are none. They are started in the way `torch.multiprocessing` is set to (by
    default a fork, see `hvdtrain.torch.data.forks`; on InfiniBand, where forked processes can corrupt memory, call
    `torch.multiprocessing.set_start_method("forkserver")` first, as Horovod's examples do).
    """

    def __init__(
        self, dataset: Any, *, workers: int, collate: Callable[[list[Any]], Any] | None, pin_memory: bool
    ) -> None:
        self.dataset = dataset
        self.workers = workers
        self._collate = collate or default_collate
        self._pin_memory = pin_memory
        self._closed = False
        self._read_samples = 0
        self._bad: dict[str, str] = {}

    @property
    def samples(self) -> int:
        return len(self.dataset)

    @property
    def worth_a_thread(self) -> bool:
        return self.workers > 0  # without workers a thread would read, and set the generators the training draws from

    def read(self, steps: Sequence[Step]) -> Generator[Fetched, None, None]:
        if self._closed:
            raise ConfigError("a loader that was closed serves no more batches", "close() was called")
        reader = BatchReader(self.dataset, self._collate)
        with closing(self._answers(reader, steps, self.workers, self._pin_memory)) as answers:
            for step, fetched in zip(steps, answers, strict=True):
                self._check(step, fetched)
                yield fetched

    def digest(self) -> Digest:
        with closing(self._answers(_DigestReader(self.dataset), (0,), min(1, self.workers), False)) as answers:
            card, sketch = next(answers)
        return Digest(card, lambda: sketch)

    def _answers(
        self, reader: Any, questions: Sequence[Any], workers: int, pin_memory: bool
    ) -> Generator[Any, None, None]:
        """Yields `reader[question]` for each question, in order, from as many worker processes."""
        with _named_errors():
            answers = iter(
                DataLoader(
                    reader,
                    batch_size=None,  # the reader makes whole batches
                    sampler=questions,
                    collate_fn=_as_it_is,  # type: ignore[arg-type]
                    num_workers=workers,
                    multiprocessing_context=worker_context() if workers > 0 else None,
                    worker_init_fn=_start_worker,
                    pin_memory=pin_memory,
                    generator=torch.Generator(),  # else each pass draws from the stream that dropout uses
                )
            )
        try:
            for _ in range(len(questions)):
                with _named_errors():
                    answer = next(answers)
                yield answer
        finally:
            if hasattr(answers, "_shutdown_workers"):
                answers._shutdown_workers()  # what it does itself when it is collected, but at a known time

    def _check(self, step: Step, fetched: Fetched) -> None:
        """Raises `ConfigError` where samples that must be read cannot be, or too many."""
        if isinstance(fetched.batch, str) and fetched.batch == REFUSED:
            name, reason = fetched.bad[-1]
            raise ConfigError(
                "every file can be read",
                f"{name}: {reason}",
                "replace or remove it; without strict=True it is left out, named and counted",
            )
        if isinstance(fetched.batch, str) and fetched.batch == NOTHING:
            raise ConfigError("a data set has samples that can be read", f"none of {self.samples} can")
        self._read_samples += step.dealt
        self._bad.update(fetched.bad)  # each file once: a later epoch meets it again
        read = min(self._read_samples, self.samples)
        if len(self._bad) > max(BAD_SAMPLES, BAD_PART * read):
            name, reason = list(self._bad.items())[-1]
            raise ConfigError(
                f"no more than {BAD_PART:.0%} of the files may be unreadable",
                f"{len(self._bad)} of {read} read so far; the last: {name}: {reason}",
                "check that the file system is there and the files are images",
            )

    def close(self) -> None:
        """No more passes; the one that is read now is ended by whoever reads it."""
        self._closed = True


@contextmanager
def _named_errors() -> Iterator[None]:
    """A worker that was killed, by the out-of-memory killer or for want of shared memory, says so in our words.

    An error that the data set raised in a worker is passed on as it is.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not text.startswith("DataLoader worker (pid"):
            raise
        raise HvdtrainError(
            "the loader's workers must live as long as the training",
            text.strip().splitlines()[-1],
            "look for the out-of-memory killer in the kernel's log, and use fewer workers (workers=...);\n"
            "in a container give /dev/shm more room (docker run --shm-size=8g, or --ipc=host)",
        ) from error
