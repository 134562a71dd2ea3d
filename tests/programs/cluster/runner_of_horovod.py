"""hvdtrain in a function that Horovod's own runner calls on 2 ranks: `ray` or `spark`. Against one plain process."""

from __future__ import annotations

import sys
from typing import Any

Weights = list[list[float]]


def samples() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.randn(17, 4, dtype=torch.float64), torch.randn(17, 1, dtype=torch.float64)


def model_and_optimizer(seed: int) -> Any:
    import torch

    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 1, dtype=torch.float64)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def on_ranks() -> tuple[int, int, Weights]:
    import torch

    import hvdtrain
    import hvdtrain.torch as hvt

    with hvdtrain.init("torch") as world:
        model, optimizer = model_and_optimizer(seed=world.rank)
        data = hvt.loader(samples(), per_rank_batch=4, shuffle=False)
        model, optimizer = hvt.prepare(model, optimizer, data)
        for _ in data.epochs(2):
            for x, y in data:
                optimizer.zero_grad()
                optimizer.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
        weights = [its.flatten().tolist() for its in hvt.unwrap(model).state_dict().values()]
        return world.rank, world.size, weights


def alone() -> Weights:
    import torch

    model, optimizer = model_and_optimizer(seed=0)
    x, y = samples()
    for _ in range(2):
        for start in range(0, len(x), 8):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x[start : start + 8]), y[start : start + 8]).backward()
            optimizer.step()
    return [its.flatten().tolist() for its in model.state_dict().values()]


def by_ray() -> list[Any]:
    import ray
    from horovod.ray import RayExecutor

    ray.init(num_cpus=2, include_dashboard=False)
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=2, cpus_per_worker=1)
    executor.start()
    found: list[Any] = executor.run(on_ranks)
    executor.shutdown()
    ray.shutdown()
    return found


def by_spark() -> list[Any]:
    import horovod.spark
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[2]").getOrCreate()
    found: list[Any] = horovod.spark.run(on_ranks, num_proc=2, use_gloo=True, start_timeout=120)
    spark.stop()
    return found


def main() -> None:
    found = {"ray": by_ray, "spark": by_spark}[sys.argv[1]]()
    assert [its[:2] for its in found] == [(0, 2), (1, 2)], found
    expected = [value for part in alone() for value in part]
    for rank, _, weights in found:
        got = [value for part in weights for value in part]
        off = max(abs(one - other) for one, other in zip(got, expected, strict=True))
        print(f"rank {rank}: {off:.1e} from one process")
        assert off < 1e-10


if __name__ == "__main__":
    main()
