"""Ways to sum an array over ranks, written with messages between two ranks, so that every byte of a link is counted.

The ring is Patarasuk and Yuan's (J. Parallel Distrib. Comput. 69, 2009): reduce-scatter, then all-gather. The
parameter server is Li et al.'s (OSDI 2014), synchronous: ranks push their gradients, the server adds and sends the sum
back. Servers are ranks that train as well, as the documents have it for machines that are all alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

CHUNK_BYTES = 1 << 20  # of a message: while one is added, the next is on its way
PUSH, SUM = 0, 1 << 12  # tags of messages to a server, and back, less the number of the chunk


class CountedLinks:
    """Messages between two ranks of an MPI communicator, and the bytes that this rank sent to each.

    Args:
        comm: an mpi4py communicator.
    """

    def __init__(self, comm: Any) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.sent: Counter[int] = Counter()

    def send(self, values: Any, to: int, tag: int = 0) -> Any:
        """Starts to send a contiguous array; returns the request to wait for."""
        self.sent[to] += values.nbytes
        return self.comm.Isend(values, to, tag)

    def receive(self, values: Any, source: int, tag: int = 0) -> Any:
        """Starts to receive into a contiguous array; returns the request to wait for."""
        return self.comm.Irecv(values, source, tag)


def chunks(values: Any) -> list[Any]:
    """Views of an array, one a message."""
    length = max(1, CHUNK_BYTES // values.itemsize)
    return [values[start : start + length] for start in range(0, len(values), length)]


def ring(links: CountedLinks, values: Any) -> Any:
    """Sums a flat array over ranks, in place; every rank sends 2 (N-1)/N of it to its right neighbour.

    Returns:
        `values`, with the sum; each part is added up in one order, so it is bit-equal on every rank.
    """
    import numpy as np

    size, rank = links.size, links.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    parts = np.array_split(values, size)
    inbox = np.empty_like(parts[0])
    for step in range(size - 1):  # afterwards this rank has the whole sum of part rank + 1
        into = parts[(rank - step - 1) % size]
        coming = inbox[: len(into)]
        sending, arriving = _exchange(links, parts[(rank - step) % size], right, coming, left)
        for request, own, other in zip(arriving, chunks(into), chunks(coming), strict=True):
            request.Wait()
            own += other
        _wait(sending)
    for step in range(size - 1):
        sending, arriving = _exchange(links, parts[(rank + 1 - step) % size], right, parts[(rank - step) % size], left)
        _wait(arriving)
        _wait(sending)
    return values


def server(links: CountedLinks, values: Any) -> Any:
    """Sums a flat array over ranks at rank 0; its link carries N-1 times the array each way.

    Returns:
        A new array with the sum.
    """
    return _served(links, values, 1)


def servers(links: CountedLinks, values: Any) -> Any:
    """Sums like `server`, but every rank serves one of N parts: each link carries 2 (N-1)/N of the array each way."""
    return _served(links, values, links.size)


def _served(links: CountedLinks, values: Any, count: int) -> Any:
    import numpy as np

    result = np.empty_like(values)
    sending, arriving = [], []
    mine: tuple[list[Any], list[Any]] = ([], [])
    for owner, (part, into) in enumerate(
        zip(np.array_split(values, count), np.array_split(result, count), strict=True)
    ):
        pieces = chunks(part), chunks(into)
        if owner == links.rank:
            mine = pieces
            continue
        for tag, (piece, place) in enumerate(zip(*pieces, strict=True)):
            arriving.append(links.receive(place, owner, SUM + tag))
            sending.append(links.send(piece, owner, PUSH + tag))
    for tag, total in enumerate(_sums(links, *mine)):
        sending += [links.send(total, peer, SUM + tag) for peer in _others(links)]
    _wait(arriving)
    _wait(sending)
    return result


def _sums(links: CountedLinks, own: list[Any], totals: list[Any]) -> Iterator[Any]:
    """A server's part, chunk by chunk: adds what every rank pushes, in the order of ranks; the next is under way."""
    import numpy as np

    def expect(number: int) -> list[tuple[Any, Any]]:
        inboxes = [(peer, np.empty_like(own[number])) for peer in _others(links)]
        return [(inbox, links.receive(inbox, peer, PUSH + number)) for peer, inbox in inboxes]

    coming = expect(0) if own else []
    for number, (piece, total) in enumerate(zip(own, totals, strict=True)):
        here, coming = coming, expect(number + 1) if number + 1 < len(own) else []
        total[:] = piece
        for inbox, request in here:
            request.Wait()
            total += inbox
        yield total


def _others(links: CountedLinks) -> list[int]:
    return [peer for peer in range(links.size) if peer != links.rank]


def _exchange(links: CountedLinks, out: Any, right: int, into: Any, left: int) -> tuple[list[Any], list[Any]]:
    arriving = [links.receive(piece, left) for piece in chunks(into)]
    return [links.send(piece, right) for piece in chunks(out)], arriving


def _wait(requests: list[Any]) -> None:
    for request in requests:
        request.Wait()


def mpi(links: CountedLinks, values: Any) -> Any:
    """Sums with MPI's own all-reduce, in place; what MPI sends is not counted."""
    from mpi4py import MPI

    links.comm.Allreduce(MPI.IN_PLACE, values)
    return values


WAYS: dict[str, Callable[[CountedLinks, Any], Any]] = {"mpi": mpi, "ring": ring, "server": server, "servers": servers}
# bytes through the busiest link in one direction, as a multiple of the array's
RULES: dict[str, Callable[[int], float]] = {
    "ring": lambda ranks: 2 * (ranks - 1) / ranks,
    "server": lambda ranks: ranks - 1,
    "servers": lambda ranks: 2 * (ranks - 1) / ranks,
}
