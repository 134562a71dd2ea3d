"""What `hvdtrain verify` concludes from the numbers of all ranks. Pure; every check also shows that it can fail."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdtrain.cluster.verify.toy import STEPS, Measured, one_process, squared_error

if TYPE_CHECKING:
    from numpy import ndarray as Array

# of the largest change of a weight: float32 is off by 1e-6, GPUs that compute with 10 bits (TF32) by 1e-3; ranks that
# do not average are off by 0.1 and more
TOLERANCE = 5e-3


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: of it.
        ok: whether it holds, and would have been missed if it did not.
        told: the numbers.
    """

    name: str
    ok: bool
    told: str


def checks(ranks: Sequence[Measured], expected_size: int | None = None) -> list[Check]:
    """Return all checks of one framework; `ranks` in rank order, `expected_size` as the user asked for."""
    return [distinct(ranks, expected_size), broadcast(ranks), averaging(ranks), training(ranks), replicas(ranks)]


def distinct(ranks: Sequence[Measured], expected_size: int | None = None) -> Check:
    """Every rank is another process, knows its place, and has devices of its own."""
    cards = [rank.card for rank in ranks]
    size = len(cards) if expected_size is None else expected_size
    wrong = [f"rank {card['rank']} says {card['size']} ranks" for card in cards if card["size"] != size]
    numbers = [card["rank"] for card in cards]
    wrong += [f"the ranks are {numbers}"] * (numbers != list(range(size)))
    processes = {(card["host"], card["pid"]) for card in cards}
    wrong += [f"{len(processes)} processes"] * (len(processes) != size)
    hosts = defaultdict(list)
    for card in cards:
        hosts[card["host"]].append(card)
    for host, its in hosts.items():
        local = [card["local_rank"] for card in its]
        if sorted(local) != list(range(len(its))) or any(card["local_size"] != len(its) for card in its):
            wrong.append(f"on {host} the local ranks are {local} of {[card['local_size'] for card in its]}")
        devices = [device for card in its for device in card["devices"]]
        if len(set(devices)) != len(devices):
            wrong.append(f"on {host} ranks share GPUs: {devices}")
    places = ", ".join(f"{host}: {len(its)}" for host, its in hosts.items())
    told = f"{len(cards)} on {len(hosts)} host(s) ({places}), each a process of its own"
    return Check("ranks", not wrong, "; ".join(wrong) or told)


def broadcast(ranks: Sequence[Measured]) -> Check:
    """All ranks begin with rank 0's weights, though they had others."""
    import numpy as np

    root = ranks[0].own_start
    wrong = [str(rank) for rank, its in enumerate(ranks) if not np.array_equal(its.start, root)]
    seen = sum(not np.array_equal(its.own_start, root) for its in ranks)
    if wrong:
        return Check("broadcast", False, f"rank(s) {', '.join(wrong)} did not begin with rank 0's weights")
    if seen != len(ranks) - 1:
        return Check("broadcast", False, "ranks had the same weights before: nothing could be seen")
    return Check("broadcast", True, f"{seen} rank(s) had other weights, and began with rank 0's, bit for bit")


def averaging(ranks: Sequence[Measured]) -> Check:
    """The first step uses the mean of all ranks' gradients; a step that does not would be seen."""
    root = ranks[0].own_start
    mean = one_process(root, range(len(ranks)), 1)
    off = [_off(its.first, mean, root) for its in ranks]
    skipped = [_off(its.skipped, mean, root) for its in ranks]
    told = f"off by {max(off):.1g} of the mean of the ranks' gradients, computed apart"
    if len(ranks) == 1:
        return Check("averaging", off[0] <= TOLERANCE, f"{told}; one rank: nothing to average")
    if not all(value <= TOLERANCE for value in off):  # NaN is not <=
        each = ", ".join(f"rank {rank}: {value:.2g}" for rank, value in enumerate(off))
        own = all(_off(its.first, its.skipped, root) <= TOLERANCE for its in ranks)
        return Check("averaging", False, f"off the mean by {each}" + "; every rank used its own gradient" * own)
    if not all(value > TOLERANCE for value in skipped):
        return Check("averaging", False, f"a step without averaging is off by {min(skipped):.1g} only: not seen")
    return Check("averaging", True, f"{told}; a step that skips the averaging is off by {min(skipped):.2g}: seen")


def training(ranks: Sequence[Measured]) -> Check:
    """The whole training is that of one process with the batches of all ranks together; and the loss falls."""
    root = ranks[0].own_start
    wanted = one_process(root, range(len(ranks)), STEPS)
    off = [_off(its.last, wanted, root) for its in ranks]
    first, last = (squared_error(weights, range(len(ranks))) for weights in (root, ranks[0].last))
    told = f"{STEPS} steps, off by {max(off):.1g} of one process with the whole batch; loss {first:.2f} -> {last:.2f}"
    return Check("training", all(value <= TOLERANCE for value in off) and last < first / 2, told)


def replicas(ranks: Sequence[Measured]) -> Check:
    """All ranks end with the same weights, bit for bit; one changed bit would be seen."""
    last = [its.last for its in ranks]
    wrong = unequal(last)
    if wrong:
        return Check("replicas", False, f"rank(s) {', '.join(map(str, wrong))} ended with other weights than rank 0")
    changed = last[-1].copy()
    changed.view("uint8").flat[0] ^= 1
    if unequal([last[0], changed]) != [1]:
        return Check("replicas", False, "one changed bit was not seen")
    return Check("replicas", True, f"equal on {len(ranks)} rank(s), bit for bit; one changed bit is seen")


def unequal(weights: Sequence[Array]) -> list[int]:
    """Return the ranks whose weights differ from rank 0's, in any bit."""
    return [rank for rank, its in enumerate(weights) if its.tobytes() != weights[0].tobytes()]


def _off(weights: Array, wanted: Array, start: Array) -> float:
    """Largest difference from `wanted`, as part of the largest change that it makes to a weight."""
    import numpy as np

    change = float(np.abs(wanted.astype(np.float64) - start).max())
    gap = np.abs(weights.astype(np.float64) - wanted)
    return float(gap.max()) / change if np.isfinite(gap).all() and change else float("nan")
