"""The records of a stream: read again in each epoch, counted, and compared among ranks and with a later run."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from hvdtrain.core.errors import ConfigError, ReplicaError, by_rank
from hvdtrain.core.version import add_note
from hvdtrain.world import same_data
from hvdtrain.world.world import World

HEAD = 8  # records that ranks compare before anything is dealt


@dataclass(frozen=True)
class StreamWords:
    """The names that messages use for a stream and its records."""

    name: str  # of it, or of the argument that gives it
    one: str  # of its records
    many: str
    again: str  # what makes it the same whenever it is read
    whole: str  # what makes it the same on every rank
    anew: str  # what can be read in every epoch
    batches: bool = False  # records are lists of a step's samples, which are compared one by one


STREAM = StreamWords(
    "the stream", "record", "records",
    "a function that draws random numbers: make them inside it: rng = numpy.random.default_rng(epoch);\n"
    "shuffle by a seed that is made of the epoch alone: a callable records(epoch), or set_epoch(epoch)\n"
    "(webdataset: .shuffle(n, rng=random.Random(epoch)) within records(epoch)); what is drawn for each\n"
    "sample belongs into decode=, whose random numbers are made of the sample's place",
    "give every rank the whole stream, hvdtrain deals it: no records[rank::size], shard(), split_by_node or"
    " split_dataset_by_node; sort lists of files; shuffle by a seed that is made of the epoch alone (a callable"
    " records(epoch), or set_epoch(epoch))",
    "give a data set, a list or a tuple of arrays; or the function that makes the stream,\n"
    "loader(lambda epoch: records(epoch), ...), or an object with __iter__",
)  # fmt: skip


def _order(argument: str, one: str, *, batches: bool = False) -> StreamWords:
    return StreamWords(
        f"the order of {argument}", one, "indices",
        "draw with torch's global generator, or with one that the sampler has as `generator`"
        " (RandomSampler(data, generator=torch.Generator())): both are seeded by seed= and the epoch; or give a"
        f" function of the epoch, {argument}lambda epoch: ...",
        f"give every rank the same {argument}, which names the samples of all ranks: hvdtrain deals them, no"
        " [rank::size]; draw by the same seed on every rank",
        f"give a sampler, a list, or a function of the epoch: {argument}lambda epoch: ...",
        batches,
    )  # fmt: skip


SAMPLER, BATCH_SAMPLER = _order("sampler=", "index"), _order("batch_sampler=", "batch", batches=True)


def stream_of(data: Any, kind: StreamWords = STREAM) -> Callable[[int], Iterator[Any]]:
    """Returns the function that begins the stream of an epoch.

    Args:
        data: an iterable that can be read again (`set_epoch(epoch)` is called if it has one); or a function that
            returns one: of the epoch, if it has a parameter that must be given or is named `epoch`, else of nothing.

    Raises:
        ConfigError: an iterator, which can be read once only, or nothing that can be read.
    """
    if (
        isinstance(data, Iterable)
        and not isinstance(data, (str, bytes, set, frozenset))
        and not hasattr(data, "__next__")
    ):

        def begin(epoch: int) -> Iterator[Any]:
            for part in (data, getattr(data, "sampler", None)):
                set_epoch = getattr(part, "set_epoch", None)
                if callable(set_epoch):
                    set_epoch(epoch)
            return iter(data)

        return begin
    if callable(data) and not hasattr(data, "__next__"):
        return (lambda epoch: iter(data(epoch))) if _takes_epoch(data) else (lambda epoch: iter(data()))
    name = getattr(data, "__name__", "") if isinstance(data, Generator) else ""
    raise ConfigError(
        f"{kind.name} must be readable again: in each epoch, and after a restart",
        f"a {type(data).__name__}" + (", which can be read once" if hasattr(data, "__next__") else ""),
        (f"loader({name}), without ();\n" if kind is STREAM and name.isidentifier() else "") + kind.anew,
    )


def _takes_epoch(function: Callable[..., Any]) -> bool:
    """Returns True if a function needs an argument or has one named epoch; `lambda path=path: read(path)` does not."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p for p in parameters.values() if p.default is p.empty and p.kind not in free]
    return "epoch" in parameters or bool(needed)


class CountedRecords:
    """Iterates over the records of an epoch, counts them and keeps a digest; names the record that fails.

    Args:
        unstable: names of parts that differ from one reading to the next; it does not compare them.
        keep: the number of first records to keep, as `first`.
    """

    def __init__(
        self,
        records: Iterator[Any],
        unstable: frozenset[str] = frozenset(),
        keep: int = HEAD,
        kind: StreamWords = STREAM,
    ) -> None:
        self._records = records
        self._unstable = unstable
        self._keep = keep
        self._batch: list[Any] = []
        self._rest: list[Any] = []
        self._before = 0
        self.kind = kind
        self.count = 0
        self.digest = 0
        self.first: list[Any] = []

    def __iter__(self) -> CountedRecords:
        return self

    def __next__(self) -> Any:
        if self._rest:
            record, self._rest = self._rest, []
            return self._noted(record)
        try:
            record = next(self._records)
        except StopIteration:
            raise
        except Exception as error:
            add_note(error, f"hvdtrain: while reading {self.kind.one} {self.count} of {self.kind.name}")
            raise
        if len(self.first) < self._keep:
            self.first.append(record)
        self.count += 1
        return self._noted(record)

    def _noted(self, record: Any) -> Any:
        if self.kind.batches:
            record = self._batch = list(record)
            self._before = self.digest
        for sample in record if self.kind.batches else (record,):
            for name, seen in same_data.glance(sample):
                if name not in self._unstable:
                    self.digest = zlib.crc32(name.encode() + seen, self.digest)
        return record

    def put_back(self, count: int) -> None:
        """Has the last samples of the batch that was read last come again, as a batch of their own."""
        batch, self.digest = self._batch, self._before
        self._noted(batch[:-count])
        self._rest = batch[-count:]


@dataclass(frozen=True)
class StreamHead:
    """The first records of a stream as a digest, to compare among ranks and with a later run."""

    kind: StreamWords
    records: int  # that were read
    digest: str  # of what was the same when they were read again, in hex
    unstable: frozenset[str]  # names of the parts that were not


def head(begin: Callable[[], Iterator[Any]], count: int = HEAD, kind: StreamWords = STREAM) -> StreamHead:
    """Returns the head of a stream from its first `count` records, or samples of batches; `begin` is called twice.

    Raises:
        ConfigError: the two readings differ in all parts that distinguish one record from another.
    """

    def samples() -> Iterator[Any]:
        return chain.from_iterable(begin()) if kind.batches else begin()

    first, second = (list(islice(samples(), count)) for _ in range(2))
    seen = [[dict(same_data.glance(record)) for record in records] for records in (first, second)]
    unstable = {name for a, b in zip(*seen, strict=False) for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
    names = {name for record in seen[0] for name in record}
    # a part that is equal in all records (such as their shard) shows no order; in few records it may be so by chance
    telling = {name for name in names - unstable if len(first) < HEAD or len({r.get(name) for r in seen[0]}) > 1}
    if len(first) != len(second) or (unstable and not telling):
        raise ConfigError(
            f"{kind.name} must give the same {kind.many} in the same order each time it is read for an epoch",
            f"read twice, it began with different {kind.many}",
            kind.again,
        )
    digest = 0
    for record in seen[0]:
        for name, glance in record.items():
            digest = zlib.crc32(name.encode() + glance, digest) if name not in unstable else digest
    return StreamHead(kind, len(first), f"{digest:08x}", frozenset(unstable))


def check_heads(world: World, mine: StreamHead) -> None:
    """Refuses ranks whose streams do not begin alike; collective."""
    _refuse_different(world, mine.kind, (mine.records, mine.digest), f"its first {{}} {mine.kind.many}: digest {{}}")


def check_ends(world: World, samples: int, digest: int, kind: StreamWords = STREAM) -> None:
    """Refuses ranks whose streams did not have the same records, at the end of an epoch; collective."""
    _refuse_different(world, kind, (samples, f"{digest:08x}"), "an epoch of {} samples: digest {}")


def _refuse_different(world: World, kind: StreamWords, mine: tuple[int, str], text: str) -> None:
    found = world.gather(mine)
    if any(other != found[0] for other in found):
        raise ReplicaError(
            f"{kind.name} must be the same on every rank: the same {kind.many}, one after another",
            by_rank([text.format(*its) for its in found]),
            kind.whole,
            shared=True,
        )
