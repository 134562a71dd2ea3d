"""What was found when it was proven that gradients are averaged, in either adapter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Proof:
    """The result of `verify`.

    Attributes:
        ranks, parameters: how many took part.
        largest_difference: max over parameters and ranks of `|gradient - mean gradient|` (Keras: of the updates that
            they make), as part of the largest that the mean has.
        sha256: fingerprint of the model, equal on all ranks (None in a world of one).
        seconds: wall time.
    """

    ranks: int
    parameters: int
    largest_difference: float = 0.0
    sha256: str | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.ranks == 1:
            return "averaging: nothing to prove, 1 rank"
        return (
            f"averaging proven: {self.ranks} ranks, {self.parameters} parameters, max |gradient - mean| ="
            f" {self.largest_difference:.3g} of the largest, replicas equal (sha256 {str(self.sha256)[:12]}),"
            f" {self.seconds:.2f} s"
        )
