"""What a batch of a loader counts, and who is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, eq=False)
class Live:
    """What the batch last handed out counts. A new object for every batch.

    Attributes:
        samples: samples of this rank that are in the batch and count; 0 in a ghost.
        ghost: this rank has no sample left: the batch keeps the step in step, and counts nothing.
        epoch: counted from 0.
        begin: samples of all ranks that were done in the epoch when the loop over it began.
        number: of the batch in that loop, counted from 0.
        consumed: samples of all ranks that are done in the epoch after it.
        global_samples: samples of all ranks in this step, as planned.
    """

    samples: int
    ghost: bool
    epoch: int
    begin: int
    number: int
    consumed: int
    global_samples: int


class Follower(Protocol):
    """Is told what each batch counts as it is handed out; None at the end."""

    def handed_out(self, live: Live | None) -> None: ...
