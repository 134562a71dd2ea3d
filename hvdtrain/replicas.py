"""What both adapters mean by equal replicas: how they are compared, and what is averaged where they differ."""

from __future__ import annotations

# A tensor's checksum is the sum of its elements' bits, as integers, each times an odd number made of its place and this
# one, modulo 2**64: unlike a plain sum it sees the order. (2**64 over the golden ratio, as a signed number: Knuth's
# multiplier.)
PRIME = -7046029254386353131


def is_statistic(name: str) -> bool:
    """Whether state that is not trained is a running mean or variance, by the names that the frameworks' normalisation
    layers (and others) give them: then the mean over ranks has a meaning. Other state (a queue, a centre, the vector of
    a power iteration) has none, and is made equal by taking rank 0's.

    Args:
        name: of a buffer or variable, its layers' names before it or not.
    """
    return name.replace("/", ".").rpartition(".")[2].startswith(("running_", "moving_"))
