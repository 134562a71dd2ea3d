"""Who am I, and what ranks say to each other."""

from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest

from hvdtrain.comm.engines import SoloEngine
from hvdtrain.core.errors import ReplicaError
from hvdtrain.world.world import World


class TestSolo:
    def test_collectives_are_the_identity(self) -> None:
        alone = World.solo(seed=3)
        assert (alone.rank, alone.size, alone.is_main, alone.seed, alone.engine) == (0, 1, True, 3, "solo")
        assert alone.broadcast("x") == "x"
        assert alone.gather({"a": 1}) == [{"a": 1}]
        assert alone.mean({"loss": 2.0}, weight=7) == {"loss": 2.0}
        assert alone.sum({"n": 2}) == {"n": 2.0}
        assert alone.on_main(lambda a, b: a + b, 1, b=2) == 3
        alone.agree("anything", object)
        alone.barrier()


class Among(SoloEngine):
    """Rank 0 of several, who say what the test has them say."""

    def __init__(self, *others: object) -> None:
        super().__init__()
        object.__setattr__(self, "others", others)

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        return [data, *(pickle.dumps(other) for other in self.others)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("odd", range(1, 5))
def test_every_rank_is_asked_whether_it_agrees(odd: int) -> None:
    others = [7] * 4
    many = dataclasses.replace(World.solo(), size=5, comm=Among(*others))
    many.agree("batch", 7)
    others[odd - 1] = 8
    many = dataclasses.replace(World.solo(), size=5, comm=Among(*others))
    with pytest.raises(ReplicaError, match="batch must be the same") as caught:
        many.agree("batch", 7)
    assert f"rank {odd}: 8" in caught.value.received


@pytest.mark.parametrize(
    ("value", "another"),
    [
        (math.nan, 1.0),
        (np.arange(3), np.arange(4)),
        (np.array([1.0, math.nan]), np.array([2.0, math.nan])),
        ({"mean": np.zeros(2), "std": math.nan}, {"mean": np.ones(2), "std": math.nan}),
    ],
)
def test_ranks_agree_on_values_that_have_no_single_answer_to_equals(value: object, another: object) -> None:
    dataclasses.replace(World.solo(), size=2, comm=Among(value)).agree("statistics", value)
    with pytest.raises(ReplicaError, match="statistics must be the same"):
        dataclasses.replace(World.solo(), size=2, comm=Among(another)).agree("statistics", value)


@pytest.mark.parametrize("odd", range(1, 5))
def test_of_all_that_ranks_must_have_alike_the_first_that_differs_is_named(
    odd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine: dict[str, object] = {"lr": 0.1, "seed": 3, "batch": 8}
    everybody = [mine] * 5
    monkeypatch.setattr(World, "gather", lambda _, obj: [type(obj)(its) for its in everybody])
    World.solo().agree_all(mine, "{} differs", str)
    everybody[odd] = {"seed": 4, "lr": 0.1, "more": 1}
    with pytest.raises(ReplicaError, match="seed differs") as caught:
        World.solo().agree_all(mine, "{} differs", lambda name: f"the same {name}")
    others = {1: ("rank 0", "ranks 2-4"), 2: ("ranks 0-1", "ranks 3-4"), 3: ("ranks 0-2", "rank 4"), 4: ("ranks 0-3",)}
    first, *last = [f"{who}: 3" for who in others[odd]]
    assert caught.value.received.splitlines() == [first, f"rank {odd}: 4", *last]
    assert caught.value.remedy == "the same seed" and caught.value.shared
