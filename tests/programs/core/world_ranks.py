"""What two ranks say to each other; usage: world_ranks.py SCENARIO... . Prints "SCENARIO: passed" on every
rank."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch_engine  # noqa: F401 (takes the adapter's place)

from hvdtrain import ConfigError, MainRankError, ReplicaError, World, exit_with, init


def raised(kind: type[BaseException], call: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    try:
        call(*args, **kw)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def fail_with(error: BaseException) -> None:
    raise error


def identity(world: World) -> None:
    assert world.size == 2 and world.local_size == 2 and world.rank == world.local_rank
    assert world.gather(world.rank) == [0, 1]
    assert world.node == 0 and world.is_main == (world.rank == 0)
    assert world.comm.sum_floats([world.rank, 0.5]) == [1.0, 1.0]
    print(f"launcher: {world.launcher}", flush=True)


def broadcast(world: World) -> None:
    assert world.broadcast({"from": world.rank}) == {"from": 0}
    assert world.broadcast({"from": world.rank}, root=1) == {"from": 1}
    assert world.broadcast(b"" if world.is_main else b"x") == b""


def gather(world: World) -> None:
    texts = world.gather("x" * 1000 * world.rank)
    assert [len(text) for text in texts] == [0, 1000]


def mean(world: World) -> None:
    # 3 samples of loss 1 and 1 sample of loss 5: 2, not the mean of means 3
    values, weight = ({"loss": 1.0}, 3) if world.is_main else ({"loss": 5.0}, 1)
    assert world.mean(values, weight) == {"loss": 2.0}
    assert world.mean(values) == {"loss": 3.0}
    nothing = {} if world.rank else {"loss": 4.0}
    assert world.mean(nothing, weight=1 - world.rank) == {"loss": 4.0}
    assert world.mean({"loss": 1.0 if world.is_main else math.nan}, 1 - world.rank) == {"loss": 1.0}
    assert math.isnan(world.mean({"loss": 1.0}, 0)["loss"])
    thirds = world.mean({"x": 0.1 + world.rank / 3}, 1 / 3 + world.rank)
    assert len({value["x"].hex() for value in world.gather(thirds)}) == 1


def mean_of_names_that_differ(world: World) -> None:
    error = raised(ReplicaError, world.mean, {"loss": 1.0} if world.is_main else {"Loss": 1.0})
    assert "rank 0: ['loss']" in str(error) and "rank 1: ['Loss']" in str(error)


def sum(world: World) -> None:
    assert world.sum({"n": 1 + world.rank, "tiny": 1e-30}) == {"n": 3.0, "tiny": 2e-30}


def agree(world: World) -> None:
    world.agree("batch", 32)
    error = raised(ReplicaError, world.agree, "batch", 32 + world.rank)
    assert "rank 0: 32" in str(error) and "rank 1: 33" in str(error) and error.shared


def on_main(world: World) -> None:
    ran = []
    assert world.on_main(lambda: ran.append(1) or {"value": 3}) == {"value": 3}
    assert ran == ([1] if world.is_main else [])


def on_main_error(world: World) -> None:
    error = raised(KeyError if world.is_main else MainRankError, world.on_main, fail_with, KeyError("lost"))
    if not world.is_main:
        assert "KeyError on rank 0: 'lost'" in str(error)
        assert error.error_type == "KeyError" and "fail_with" in error.main_traceback
    world.barrier()  # and they can still talk


def on_main_hvdtrain_error(world: World) -> None:
    kind = ConfigError if world.is_main else MainRankError
    error = raised(kind, world.on_main, fail_with, ConfigError("rule", "came", "remedy"))
    assert (error.rule, error.received, error.remedy) == ("rule", "came", "remedy")


def on_main_result_that_cannot_travel(world: World) -> None:
    raised(Exception if world.is_main else MainRankError, world.on_main, lambda: lambda: 0)


def on_main_system_exit(world: World) -> None:
    raised(SystemExit if world.is_main else MainRankError, world.on_main, fail_with, SystemExit(3))


def main_fails(world: World) -> None:
    world.on_main(fail_with, ConfigError("the data must be there", "/nowhere", "give --data"))


def one_fails(world: World) -> None:
    if world.rank == 1:
        raise ConfigError("only here")
    world.barrier()
    print("past the barrier", flush=True)


def other_seed() -> None:
    import os

    from hvdtrain.core.launchers import detect

    error = raised(ReplicaError, init, "torch", seed=7 + detect(os.environ).rank)
    print(error, flush=True)


def main() -> None:
    if sys.argv[1] == "other_seed":
        return other_seed()
    world = init("torch", seed=1)
    try:
        with world:
            for scenario in sys.argv[1:]:
                globals()[scenario](world)
                print(f"{scenario}: passed", flush=True)
    except Exception as error:
        exit_with("world_ranks", error, world.rank)


if __name__ == "__main__":
    main()
