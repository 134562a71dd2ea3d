"""Do all ranks hold the same data in the same order? A cheap digest, compared before anything is dealt.

A loader deals one global order: it is right only where sample i is the same sample on every rank. Small data is
digested whole; of large data the first and last rows and a fixed sample of those between, a few milliseconds
whatever the size.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.core.errors import ReplicaError, by_rank
from hvdtrain.core.generators import Generators
from hvdtrain.world.world import World

if TYPE_CHECKING:
    import numpy as np

ALL_THE_DATA = "give every rank all the data, not a part such as x[rank::size]: hvdtrain deals the samples itself"
_WHOLE_BYTES = 1 << 22  # up to here everything is digested
_ROWS = 64  # else so many rows
_ITEMS = 8  # of a data set that is read by index
_ROW_BYTES = 1 << 12  # and of a long row so many bytes, spread over it
# of each part of each record of a stream so many bytes are looked at whole; of longer ones both ends, and so many
# between, of which each costs a line of the cache
_GLANCE, _ENDS, _BETWEEN = 1 << 12, 1 << 10, 1 << 8
_PIXELS = 32  # of a picture


class Digest(NamedTuple):
    """A digest of a rank's data, small enough to send: its arrays, each with what follows."""

    names: tuple[str, ...]  # as a user would write them ("[0]", "['image']")
    lengths: tuple[int, ...]  # samples
    kinds: tuple[str, ...]  # dtype and shape of a sample
    hashes: tuple[str, ...]  # of the contents with their order, in hex


def of_arrays(data: Any) -> Digest:
    """Returns the digest of nested arrays, memory maps or tensors on any device (`None` counts); local."""
    leaves = list(_leaves(data))
    arrays = [leaf for _, leaf in leaves]
    whole = sum(int(getattr(leaf, "nbytes", _WHOLE_BYTES + 1)) for leaf in arrays if leaf is not None) <= _WHOLE_BYTES
    names = tuple(name for name, _ in leaves)
    lengths = tuple(0 if leaf is None else len(leaf) for leaf in arrays)
    hashes = tuple(_hash(leaf, whole) for leaf in arrays)
    return Digest(names, lengths, tuple(map(_kind, arrays)), hashes)


def of_items(dataset: Any, length: int | None = None) -> Digest:
    """Returns the digest of a data set that gives a sample for an index, from some of its samples; local.

    It reads each sample twice, with Python's and numpy's generators set alike on all ranks and restored afterwards. It
    does not compare parts that differ between the two reads (augmentation with another generator).

    Args:
        dataset: with `len` and an item (nested arrays, numbers, images, text) for an index.
        length: by default its `len`.
    """
    length = len(dataset) if length is None else length
    chosen = _positions(length, _ITEMS)
    with Generators().preserved(0):
        rows = []
        for index in chosen:
            first, second = ([_whole(leaf) for _, leaf in _leaves(dataset[index])] for _ in range(2))
            rows.append(b"|".join(a for a, b in zip(first, second, strict=False) if a == b))
    digest = hashlib.blake2b(b"\n".join(rows), digest_size=16).hexdigest()
    return Digest(("",), (length,), (type(dataset).__name__,), (digest,))


def check(world: World, mine: Digest) -> None:
    """Refuses ranks that hold other data, or the same in another order; collective.

    Args:
        world: the ranks.
        mine: this rank's digest.

    Raises:
        ReplicaError: on every rank: lengths, kinds, contents or order differ.
    """
    if world.size == 1:
        return
    digests = world.gather(mine)
    if all(digest == digests[0] for digest in digests):
        return
    received, fix = _diagnose(digests)
    raise ReplicaError(
        "the data must be the same on every rank, in the same order", received, fix, shared=True, code=11
    )


# -------------------------------------------------------------------- what differs
def _diagnose(digests: Sequence[Digest]) -> tuple[str, str]:
    if len({(digest.names, digest.kinds) for digest in digests}) > 1:
        arrays = [
            ", ".join(f"{name or 'data'} {kind}" for name, kind in zip(digest.names, digest.kinds, strict=True))
            for digest in digests
        ]
        return by_rank(arrays), "give every rank the same arrays, with the same types and shapes"
    held = [
        f"{max(digest.lengths, default=0)} samples, digest {' '.join(its[:8] for its in digest.hashes) or 'of nothing'}"
        for digest in digests
    ]
    hashes = zip(digests[0].names, zip(*(digest.hashes for digest in digests), strict=True), strict=True)
    differing = [name or "data" for name, of_ranks in hashes if len(set(of_ranks)) > 1]
    return f"{by_rank(held)}\nthe contents of {', '.join(differing)} differ", (
        f"{ALL_THE_DATA};\n"
        "sort lists of files, whose order may differ from machine to machine: sorted(os.listdir(folder));\n"
        "make and shuffle data with the same seed on every rank: torch.manual_seed(0), default_rng(0)"
    )


# -------------------------------------------------------------------- digests
def _leaves(data: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(data, Mapping):
        for key in sorted(data, key=repr):  # of a dict made of a set, another order in each process
            yield from _leaves(data[key], f"{name}[{key!r}]")
    elif isinstance(data, (list, tuple)):
        for index, item in enumerate(data):
            yield from _leaves(item, f"{name}[{index}]")
    else:
        yield name, data


def glance(record: Any) -> Iterator[tuple[str, bytes]]:
    """Yields the parts of a record by name, each with a little of it, cheaply enough for every record of a stream.

    Of an object these are its attributes; of a picture its file's name, or some of its pixels. Objects that show
    nothing of what they hold, such as those of a C library, count by their type alone.
    """
    return _parts(record, "", ())


def _parts(data: Any, name: str, within: tuple[int, ...]) -> Iterator[tuple[str, bytes]]:
    inner: Iterable[tuple[str, Any]] | None = None
    if id(data) in within:
        yield name, b"within itself"
    elif isinstance(data, Mapping):
        inner = ((f"[{key!r}]", data[key]) for key in sorted(data, key=repr))
    elif isinstance(data, (list, tuple, deque)):
        inner = ((f"[{index}]", item) for index, item in enumerate(data))
    elif isinstance(data, (bytes, bytearray, str)):
        yield name, _some_of(data)
    elif data is None or isinstance(data, (bool, int, float, complex)):
        yield name, repr(data).encode()
    elif hasattr(data, "dtype") and hasattr(data, "shape"):
        if getattr(data.dtype, "hasobject", False):
            inner = ((f"[{index}]", item) for index, item in enumerate(_on_host(data).reshape(-1).tolist()))
        else:
            yield name, _bytes(data, _ENDS) + _bytes(getattr(data, "mask", None), _ENDS)
    elif isinstance(data, (set, frozenset)):
        yield name, _some_of(repr(sorted(map(repr, data))))
    elif (held := _buffer(data)) is not None:
        yield name, _some_of(held)
    elif hasattr(data, "getpixel") and hasattr(data, "size"):
        yield name, _of_picture(data)
    elif not isinstance(data, type) and (attributes := _attributes(data)):
        inner = ((f".{attribute}", value) for attribute, value in attributes.items())
        yield name, type(data).__name__.encode()
    else:
        yield name, _some_of(_described(data))
    for key, value in inner or ():
        yield from _parts(value, f"{name}{key}", (*within, id(data)))


def _some_of(text: bytes | bytearray | str) -> bytes:
    part = text
    if len(text) > _GLANCE:
        part = text[:_ENDS] + text[:: len(text) // _BETWEEN] + text[-_ENDS:]  # type: ignore[operator]
    return f"{len(text)}".encode() + (part.encode(errors="replace") if isinstance(part, str) else bytes(part))


def _buffer(data: Any) -> bytes | None:
    """Returns the bytes of an array of the standard library or of ctypes, or of a file in memory; None without any."""
    try:
        return memoryview(data.getbuffer() if hasattr(data, "getbuffer") else data).cast("B").tobytes()
    except (TypeError, ValueError):  # holds no bytes, or none that lie together
        return None


def _of_picture(picture: Any) -> bytes:
    """Returns the file name and size of a picture, because reading pixels would decode it; without a file, pixels."""
    wide, high = picture.size
    file = os.path.basename(getattr(picture, "filename", ""))  # each host may have its folder
    if file or not wide or not high:
        return f"{file} {wide} {high}".encode()
    places = [(wide * i // _PIXELS, high * (i * 7 % _PIXELS) // _PIXELS) for i in range(_PIXELS)]
    return f"{wide} {high} {[picture.getpixel(place) for place in places]}".encode()


def _attributes(data: Any) -> dict[str, Any]:
    """Returns an object's attributes by name, except those that Python fills in; a table's columns and values."""
    slots = [name for kind in type(data).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
    if hasattr(data, "to_numpy"):  # a table
        return {"columns": list(getattr(data, "columns", ())), "values": data.to_numpy()}
    found = {name: getattr(data, name) for name in (*slots, "args") if hasattr(data, name)}  # of an exception, and such
    found |= getattr(data, "__dict__", {})
    return {name: found[name] for name in sorted(found) if not (name.startswith("__") and name.endswith("__"))}


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _described(data: Any) -> str:
    """Returns an object's repr if its class defines one without an address, else its name or that of its class."""
    kind = type(data)
    has_text = any("__repr__" in vars(base) for base in kind.__mro__[:-1])
    text = repr(data) if has_text and kind.__module__ != "builtins" else getattr(data, "__qualname__", kind.__name__)
    return kind.__name__ if " at 0x" in text else text


def _positions(length: int, count: int) -> list[int]:
    """Indices of first, last and some between, in growing order; a function of the numbers alone."""
    if length <= count:
        return list(range(length))
    between = random.Random(length).sample(range(1, length - 1), count - 2)
    return [0, *sorted(between), length - 1]


def _kind(leaf: Any) -> str:
    return "None" if leaf is None else f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(leaf.shape[1:])}"


def _hash(leaf: Any, whole: bool) -> str:
    digest = hashlib.blake2b(digest_size=16)
    if leaf is not None and len(leaf):
        rows = [leaf] if whole else (leaf[index] for index in _positions(len(leaf), _ROWS))
        for row in rows:
            digest.update(_bytes(row, _WHOLE_BYTES if whole else _ROW_BYTES))
    return digest.hexdigest()


def _whole(leaf: Any) -> bytes:
    """Contents of a picture, array, number or text; a glance at any other object."""
    known = leaf is None or isinstance(leaf, (str, bytes, int, float)) or hasattr(leaf, "__array_interface__")
    if known or (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
        return _bytes(leaf)
    return b"|".join(name.encode() + seen for name, seen in glance(leaf))


def _bytes(value: Any, limit: int = 1 << 62) -> bytes:
    """Contents of an array, number, image or text; of a long one a spread sample."""
    import numpy as np

    if value is None or isinstance(value, (str, bytes, int, float, bool)):
        return repr(value).encode()
    array = _on_host(value)
    if array.dtype.hasobject:
        return b"|".join(seen for _, seen in glance(array.tolist()))
    flat = array.reshape(-1)
    step = max(1, -(-array.nbytes // limit))
    return f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(flat[::step]).tobytes()


def as_array(value: Any) -> np.ndarray:
    """Returns a tensor of any framework, an array or a number as numpy's; TypeError for a type that it lacks."""
    import numpy as np

    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def _on_host(value: Any) -> np.ndarray:
    """Returns `as_array`, or the text of what is no array: enough for a digest."""
    import numpy as np

    try:
        return as_array(value)
    except (TypeError, ValueError):
        return np.asarray(repr(value))


# A tensor's checksum is the sum of its elements' bits, as integers, each times an odd number made of its place and this
# one, modulo 2**64: unlike a plain sum it sees the order. (2**64 over the golden ratio, as a signed number: Knuth's
# multiplier.)
PRIME = -7046029254386353131


def is_statistic(name: str) -> bool:
    """Returns True for a running mean or variance, by its name: then a mean over ranks has a meaning.

    Other state that is not trained (a queue, a centre) has none, and is made equal by taking rank 0's.
    """
    return name.replace("/", ".").rpartition(".")[2].startswith(("running_", "moving_"))
