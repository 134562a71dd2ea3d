"""Reads data sets sample by sample, in worker processes or in this one: the batches are the same.

Each sample has its own seed, made of its place in the epoch, for Python's, numpy's and PyTorch's generators. So random
transforms do not depend on the number of workers and ranks, and never change the random state of training.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.sharding import Step
from hvdtrain.torch.data.processes import Processes, answers, located
from hvdtrain.torch.data.source import SEED_STREAM, Fetched, words
from hvdtrain.values.generators import HOST
from hvdtrain.world.same_data import Digest, of_items

# More than this many unreadable samples, and more than this part of what was read: the data is broken, not a file.
BAD_SAMPLES, BAD_PART = 8, 0.1

REFUSED, NOTHING = "refused", "nothing can be read"  # in place of a batch


@dataclass(frozen=True)
class Unreadable:
    """A data set returns it for a sample that cannot be read: the loader skips, names and counts the sample.

    Example:
        def __getitem__(self, index):
            path, label = self.samples[index]
            return (read(path), label) if is_image(path) else hvt.Unreadable(path, "not an image")

    Attributes:
        name: the file's name.
        reason: why it cannot be read.
        fatal: True raises an error instead.
    """

    name: str
    reason: str
    fatal: bool = False


def read_batch(
    step: Step,
    get: Callable[[Any], Any],
    samples: Sequence[tuple[int, Any]],
    *,
    collate: Callable[[list[Any]], Any],
    others: Callable[[], Any],
) -> Fetched:
    """Reads a step's samples (the number that names each, and what `get` is called with), each with random numbers
    of its own, and collates them. `others` makes a batch of samples that do not count, where there is none that
    does."""
    seeds = words(step.plan, step.epoch, step.first, step.dealt, 1, stream=SEED_STREAM)[:, 0].tolist()
    read, kept, bad = [], [], []
    for number, ((name, asked), seed) in enumerate(zip(samples, seeds, strict=True)):
        sample = read_sample(get, name, asked, seed)
        if isinstance(sample, Unreadable):
            bad.append((sample.name, sample.reason))
            if sample.fatal:  # as a value: an exception would lose its parts on the way out of a worker
                return Fetched(REFUSED, None, bad)
        else:
            read.append(sample)
            kept.append(number)
    if not read:
        return Fetched(others(), [], bad)
    names = ", ".join(str(name) for name, _ in samples[:8]) + " ..." * (len(samples) > 8)
    return Fetched(located(f"while collating samples {names}", collate, read), kept if bad else None, bad)


def read_sample(get: Callable[[Any], Any], name: int, asked: Any, seed: int) -> Any:
    """Returns a sample, read with random numbers of its own."""
    HOST.seed_everything(seed)
    return located(f"while reading sample {name}", get, asked)


def two_of(samples: Iterable[Any], collate: Callable[[list[Any]], Any]) -> Any:
    """Returns a batch of the first two that can be read; `NOTHING` where none can."""
    found = list(islice((sample for sample in samples if not isinstance(sample, Unreadable)), 2))
    return collate(found) if found else NOTHING


class BatchReader(torch.utils.data.Dataset[Fetched]):
    """Reads and collates whole batches; what runs in the workers."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate
        self._stand_in: Any = None

    def __getitem__(self, step: Step) -> Fetched:
        if get_worker_info() is not None:  # a worker's generators are not shared
            return self._read(step)
        with HOST.preserved():
            return self._read(step)

    def _read(self, step: Step) -> Fetched:
        samples = [(index, index) for index in step.indices.tolist()]
        return read_batch(step, self.dataset.__getitem__, samples, collate=self.collate, others=self._of_others)

    def _of_others(self) -> Any:
        """A batch of two samples that can be read, the first of the data set; kept for next time."""
        if self._stand_in is None:
            self._stand_in = two_of(map(_Samples(self.dataset).__getitem__, range(len(self.dataset))), self.collate)
        return self._stand_in


class _Samples:
    """A data set whose every read has the same random numbers."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return read_sample(lambda at: self._dataset[at], index, index, seed=index)


class _DigestReader(torch.utils.data.Dataset[Any]):
    """Makes the digest of a data set where its samples are read: a file that it opens must not be shared by workers."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, _: int) -> Digest:
        with HOST.preserved():
            return of_items(_Samples(self._dataset))


class Failures:
    """Counts the samples that cannot be read."""

    def __init__(self) -> None:
        self._read_samples = 0
        self._bad: dict[str, str] = {}

    def check(self, step: Step, fetched: Fetched, samples: float) -> None:
        """Raises `ConfigError` where samples that must be read cannot be, or too many of the data's `samples`."""
        if isinstance(fetched.batch, str) and fetched.batch == REFUSED:
            name, reason = fetched.bad[-1]
            raise ConfigError(
                "every file must be readable with strict=True",
                f"{name}: {reason}",
                "replace or remove the file; without strict=True it is skipped, named and counted",
            )
        self._read_samples += step.dealt
        self._bad.update(fetched.bad)  # each file once: a later epoch meets it again
        read = min(self._read_samples, samples)
        if isinstance(fetched.batch, str) and fetched.batch == NOTHING:
            raise ConfigError("a data set needs samples that can be read", f"none of {samples} can be read")
        if len(self._bad) > max(BAD_SAMPLES, BAD_PART * read):
            name, reason = list(self._bad.items())[-1]
            raise ConfigError(
                f"more than {BAD_PART:.0%} of the files cannot be read",
                f"{len(self._bad)} of {read} read so far; the last: {name}: {reason}",
                "check that the file system is mounted and the files are images",
            )


class ReadByProcesses:
    """The base of sources that processes read."""

    def __init__(self, processes: Processes, collate: Callable[[list[Any]], Any] | None) -> None:
        self._processes, self._collate = processes, collate or default_collate
        self._failures = Failures()
        self._closed = False

    @property
    def workers(self) -> int:
        return self._processes.count

    @property
    def worth_a_thread(self) -> bool:
        return self.workers > 0  # without workers a thread would read, and set the generators the training draws from

    def _answers(self, reader: Any, questions: Sequence[Any] | None = None) -> Generator[Any, None, None]:
        if self._closed:
            raise ConfigError("a closed loader cannot serve batches", "close() was called")
        return answers(reader, self._processes, questions)

    def _one_answer(self, reader: Any) -> Any:
        one = replace(self._processes, count=min(1, self.workers), pin_memory=False)
        with closing(answers(reader, one, (0,))) as found:
            return next(found)

    def close(self) -> None:
        """Serves no more passes; the one that is read now is ended by its reader."""
        self._closed = True


class Workers(ReadByProcesses):
    """A `Source` of a map-style data set.

    Each pass starts new workers, like PyTorch's loader, in the way that `torch.multiprocessing` is set to (default: a
    fork, see `processes`). Forked processes can corrupt memory on InfiniBand: there call
    `torch.multiprocessing.set_start_method("forkserver")` first.
    """

    def __init__(self, dataset: Any, processes: Processes, collate: Callable[[list[Any]], Any] | None) -> None:
        super().__init__(processes, collate)
        self.dataset = dataset

    @property
    def samples(self) -> int:
        return len(self.dataset)

    def read(self, steps: Sequence[Step]) -> Generator[Fetched, None, None]:
        reader = BatchReader(self.dataset, self._collate)
        with closing(self._answers(reader, steps)) as found:
            for step, fetched in zip(steps, found, strict=True):
                self._failures.check(step, fetched, self.samples)
                yield fetched

    def digest(self) -> Digest:
        digest: Digest = self._one_answer(_DigestReader(self.dataset))
        return digest
