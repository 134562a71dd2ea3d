"""Reads data sets sample by sample, in worker processes or in this one: the batches are the same.

Each sample has its own seed, made of its place in the epoch, for Python's, numpy's and PyTorch's generators. So random
transforms do not depend on the number of workers and ranks, and never change the random state of training. A data set
with `__getitems__` reads whole batches, unless it draws random numbers there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Subset, default_collate, get_worker_info

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.sharding import Step
from hvdtrain.torch.data.processes import Processes, ProcessReader, answers, located
from hvdtrain.torch.data.source import SEED_STREAM, Fetched, words
from hvdtrain.values.generators import HOST, differ
from hvdtrain.world.same_data import Digest, of_items

# More than this many unreadable samples, and more than this part of what was read: the data is broken, not a file.
BAD_SAMPLES, BAD_PART = 8, 0.1

Together = Callable[[list[int]], Any]

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
    together: Together | None = None,
    reader: ProcessReader,
    collate: Callable[[list[Any]], Any],
    others: Callable[[], Any],
) -> Fetched:
    """Reads a step's samples (the number that names each, and what `get` is called with), each with random numbers
    of its own, and collates them. `together` returns all samples of these numbers, where the data set can; `others`
    makes a batch of samples that do not count, where there is none that does."""
    seeds = words(step.plan, step.epoch, step.first, step.dealt, 1, stream=SEED_STREAM)[:, 0].tolist()
    names = [name for name, _ in samples]
    found, failed = _read_together(together, names, seeds, reader)
    if found is not None and not isinstance(found, (list, tuple)):  # a batch already, which torch also gives to collate
        return Fetched(located(f"while collating {_some(names)}", collate, found), None, [])
    read, kept, bad = [], [], []
    for number, ((name, asked), seed) in enumerate(zip(samples, seeds, strict=True)):
        if found is None:
            reader.at(name)
        sample = read_sample(get, name, asked, seed) if found is None else found[number]
        if isinstance(sample, Unreadable):
            bad.append((sample.name, sample.reason))
            if sample.fatal:  # as a value: an exception would lose its parts on the way out of a worker
                return Fetched(REFUSED, None, bad)
        else:
            read.append(sample)
            kept.append(number)
    if failed is not None:
        raise failed  # and none does alone, which would have been named
    if not read:
        return Fetched(others(), [], bad)
    return Fetched(located(f"while collating {_some(names)}", collate, read), kept if bad else None, bad)


def _some(names: Sequence[int]) -> str:
    return f"samples {', '.join(map(str, names[:8]))}{' ...' * (len(names) > 8)}"


def together_of(dataset: Any) -> Together | None:
    """Returns what reads many samples of a data set in one call; None where they are read one by one."""
    inner = dataset
    while type(inner) is Subset:  # asks for one after another where what it is a part of has nothing else
        inner = inner.dataset
    return dataset.__getitems__ if callable(getattr(inner, "__getitems__", None)) else None


def _read_together(
    together: Together | None, names: list[int], seeds: list[int], reader: ProcessReader
) -> tuple[Any, Exception | None]:
    """Returns the samples of one call, or why it fails; neither if it draws random numbers: ranks would differ."""
    if together is None or not names or reader.one_by_one:
        return None, None
    reader.at(names[0])
    HOST.seed_everything(seeds[-1])  # what is drawn next, by collate, is what it would be after the last sample
    before = HOST.everything()
    try:
        found = located(f"while reading {_some(names)} in one call of __getitems__", together, names)
    except Exception as error:
        return None, error
    if differ(before, HOST.everything()):
        reader.one_by_one = True
        return None, None
    if isinstance(found, (list, tuple)) and len(found) != len(names):
        raise ConfigError(
            "__getitems__ of a data set must return one sample per index, or a batch for collate=",
            f"{len(found)} samples for {len(names)} indices: {_some(names)}",
            "return as many samples as there are indices; or remove __getitems__",
        )
    return found, None


def read_sample(get: Callable[[Any], Any], name: int, asked: Any, seed: int) -> Any:
    """Returns a sample, read with random numbers of its own."""
    HOST.seed_everything(seed)
    return located(f"while reading sample {name}", get, asked)


def two_of(samples: Iterable[Any], collate: Callable[[list[Any]], Any]) -> Any:
    """Returns a batch of the first two that can be read; `NOTHING` where none can."""
    found = list(islice((sample for sample in samples if not isinstance(sample, Unreadable)), 2))
    return collate(found) if found else NOTHING


class BatchReader(ProcessReader, torch.utils.data.Dataset[Fetched]):
    """Reads and collates whole batches; what runs in the workers."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate
        self.in_one_call = together_of(dataset) is not None
        self._stand_in: Any = None

    def __getitem__(self, step: Step) -> Fetched:
        self.begin()
        if get_worker_info() is not None:  # a worker's generators are not shared
            return self._read(step)
        with HOST.preserved():
            return self._read(step)

    def _read(self, step: Step) -> Fetched:
        samples = [(index, index) for index in step.indices.tolist()]
        return read_batch(
            step, self.dataset.__getitem__, samples, together=together_of(self.dataset), reader=self,
            collate=self.collate, others=self._of_others,
        )  # fmt: skip

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


class _DigestReader(ProcessReader, torch.utils.data.Dataset[Any]):
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
