"""Data sets that are read sample by sample, in worker processes or in this one: the same batches either way.

Each sample has a seed of its own, made of its place in the epoch: Python's, numpy's and PyTorch's generators are set to
it before the sample is read. So random transforms do not depend on how many workers and ranks there are, nor on where
a resumed epoch began, and never touch the streams of the training process.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

from hvdtrain.errors import ConfigError, HvdtrainError
from hvdtrain.torch._forks import worker_context
from hvdtrain.torch._source import Fetched
from hvdtrain.torch._steps import SEED_STREAM, Step, words

# More than this many unreadable samples, and more than this part of what was read: the data is broken, not a file.
BAD_SAMPLES, BAD_PART = 8, 0.1

REFUSED = "refused"


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


@dataclass(frozen=True, eq=False)
class Request:
    """A batch to read: int64 `indices`, and the `epoch` and position of the first sample in it, which seed them."""

    epoch: int
    first: int
    indices: np.ndarray


class BatchReader(torch.utils.data.Dataset[Fetched]):
    """Reads and collates whole batches; what runs in the workers."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset = dataset
        self.collate = collate
        self.seed = seed

    def __getitem__(self, request: Request) -> Fetched:
        if get_worker_info() is not None:  # a worker's generators are nobody else's
            return self._read(request)
        with kept_generators():
            return self._read(request)

    def _read(self, request: Request) -> Fetched:
        count = len(request.indices)
        seeds = words(self.seed, request.epoch, request.first, count, 1, stream=SEED_STREAM)[:, 0].tolist()
        samples, kept, bad = [], [], []
        for number, (index, seed) in enumerate(zip(request.indices.tolist(), seeds, strict=True)):
            _seed_all(seed)
            sample = self.dataset[index]
            if isinstance(sample, Unreadable):
                bad.append((sample.name, sample.reason))
                if sample.fatal:  # as a value: an exception would lose its parts on the way out of a worker
                    return Fetched(REFUSED, None, bad)
            else:
                samples.append(sample)
                kept.append(number)
        return Fetched(self.collate(samples) if samples else None, kept if bad else None, bad)


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Puts the generators of Python, numpy and PyTorch (CPU) back at the end."""
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(pytorch)


def _as_it_is(fetched: Fetched) -> Fetched:
    return fetched


def _start_worker(worker: int) -> None:
    # Ctrl-C goes to the whole terminal group; the rank ends its workers itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Requests:
    """The sampler: the steps of the epoch that is read now. Persistent workers keep it for all epochs."""

    def __init__(self) -> None:
        self.steps: Sequence[Step] = ()

    def __iter__(self) -> Iterator[Request]:
        return (Request(step.epoch, step.first, step.indices()) for step in self.steps)

    def __len__(self) -> int:
        return len(self.steps)


class Workers:
    """A `Source` of a map-style data set.

    Workers are started once, at the first batch, in the way ``torch.multiprocessing`` is set to (by default a fork, see
    `hvdtrain.torch._forks`; on InfiniBand, where forked processes can corrupt memory, call
    ``torch.multiprocessing.set_start_method("forkserver")`` first, as Horovod's examples do).
    """

    def __init__(
        self,
        dataset: Any,
        *,
        workers: int,
        seed: int,
        collate: Callable[[list[Any]], Any] | None,
        pin_memory: bool,
    ) -> None:
        self.dataset = dataset
        self.workers = workers
        self.may_skip = bool(getattr(dataset, "may_skip", False))
        self._reader = BatchReader(dataset, collate or default_collate, seed)
        self._requests = _Requests()
        self._loader: DataLoader[Any] | None = DataLoader(
            self._reader,
            batch_size=None,  # the reader makes whole batches
            sampler=self._requests,  # type: ignore[arg-type]
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            num_workers=workers,
            persistent_workers=workers > 0,
            multiprocessing_context=worker_context() if workers > 0 else None,
            worker_init_fn=_start_worker,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # else each epoch draws from the stream that dropout uses
        )
        self._ghost: Any = None
        self._read_samples = 0
        self._bad: dict[str, str] = {}

    @property
    def samples(self) -> int:
        return len(self.dataset)

    @property
    def worth_a_thread(self) -> bool:
        return self.workers > 0  # without workers a thread would read, and set the generators the training draws from

    def read(self, steps: Sequence[Step]) -> Iterator[Fetched]:
        if self._loader is None:
            raise ConfigError("a loader that was closed serves no more batches", "close() was called")
        self._requests.steps = steps
        with self._named_errors():
            batches = iter(self._loader)
        return self._checked(batches, steps)

    def _checked(self, batches: Iterator[Fetched], steps: Sequence[Step]) -> Iterator[Fetched]:
        for step in steps:
            with self._named_errors():
                fetched = next(batches)
            if isinstance(fetched.batch, str) and fetched.batch == REFUSED:
                name, reason = fetched.bad[-1]
                raise ConfigError(
                    "every file can be read", f"{name}: {reason}",
                    "replace or remove it; without strict=True it is left out, named and counted",
                )  # fmt: skip
            self._read_samples += step.samples
            self._bad.update(fetched.bad)  # each file once: a later epoch meets it again
            read = min(self._read_samples, self.samples)
            if len(self._bad) > max(BAD_SAMPLES, BAD_PART * read):
                name, reason = list(self._bad.items())[-1]
                raise ConfigError(
                    f"no more than {BAD_PART:.0%} of the files may be unreadable",
                    f"{len(self._bad)} of {read} read so far; the last: {name}: {reason}",
                    "check that the file system is there and the files are images",
                )
            yield fetched

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """A worker that was killed, by the out-of-memory killer or for want of shared memory, says so in our words."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            if isinstance(error, HvdtrainError) or "DataLoader worker" not in text:
                raise
            self.close()
            raise HvdtrainError(
                "the loader's workers must live as long as the training",
                text.strip().splitlines()[-1],
                "look for the out-of-memory killer in the kernel's log, and use fewer workers (workers=...);\n"
                "in a container give /dev/shm more room (docker run --shm-size=8g, or --ipc=host)",
            ) from error

    def ghost(self) -> Any:
        """Two samples that can be read, the first of the data set; kept for next time."""
        if self._ghost is None:
            with kept_generators():
                found: list[Any] = []
                for index in range(self.samples):
                    _seed_all(index)
                    sample = self.dataset[index]
                    if not isinstance(sample, Unreadable):
                        found.append(sample)
                    if len(found) == 2:
                        break
            if not found:
                raise ConfigError("a data set has samples that can be read", f"none of {self.samples} can")
            self._ghost = self._reader.collate(found)
        return self._ghost

    def close(self) -> None:
        """Ends the workers."""
        loader, self._loader = self._loader, None
        iterator = getattr(loader, "_iterator", None)
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()  # what DataLoader itself does when it is collected, but at a known time
