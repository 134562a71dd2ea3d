"""Sums over ranks by every way of `hvdtrain bench comm`, against sums that numpy makes of all ranks' arrays."""

import numpy as np

import hvdtrain
from hvdtrain.bench.comm import ways


def compare_sums(world: hvdtrain.World) -> None:
    ways.CHUNK_BYTES = 1 << 12
    links = ways.CountedLinks(world.mpi)
    most = 2 * (world.size - 1) / world.size
    rule = {"ring": most, "server": world.size - 1, "servers": most}
    for length in (0, 1, 2, 3, 5, 1000, 12_288, 100_003):
        every = [np.random.default_rng([length, rank]).standard_normal(length) for rank in range(world.size)]
        for name, way in ways.WAYS.items():
            links.sent.clear()
            result = np.array(way(links, every[world.rank].copy()))
            wanted = np.sum(every, axis=0)
            error = float(np.abs(result - wanted).max(initial=0))
            digests = world.gather(result.tobytes())
            assert error < 1e-12, (name, length, error)
            assert name == "mpi" or len(set(digests)) == 1, f"{name} of {length}: ranks have other bits"
            sent = world.gather(dict(links.sent))
            if length == 12_288 and name in rule:
                out = [sum(its.values()) for its in sent]
                back = [sum(its.get(rank, 0) for its in sent) for rank in range(world.size)]
                ratio = max(out + back) / (8 * length)
                assert ratio == rule[name], (name, ratio)
                if name == "ring":
                    assert all(set(its) == {(rank + 1) % world.size} for rank, its in enumerate(sent))
                if name == "server":
                    assert all(set(its) == {0} for its in sent[1:])
    if world.is_main:
        print("all sums are numpy's")
