"""Two ranks that are not in step, each in one way; usage: out_of_step.py ENGINE WAY. Rank 1 is the one that strays.

Prints "at T" (seconds since the epoch) when the ranks part. The lines where they are then end in "# here".
"""

from __future__ import annotations

import sys
import tempfile
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain import Checkpointer, World

STEPS, BATCH = 6, 4


def data(samples: int = STEPS * BATCH) -> TensorDataset:
    return TensorDataset(torch.ones(samples, 3), torch.zeros(samples, dtype=torch.long))


def prepared() -> tuple[torch.nn.Module, hvt.Optimizer]:
    model = torch.nn.Linear(3, 2)
    return hvt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), verify=False)


def train(world: World, *, batches: int = STEPS, stop: int = 0, skip: int = 0, end: int = 0, no_step: int = 0) -> None:
    """A loop over a loader of the user's own; the arguments say what rank 1 does otherwise, and at which batch."""
    model, optimizer = prepared()
    strays = world.rank == 1
    if strays:
        world.comm.name  # noqa: B018 - a place for a breakpoint
    for number, (x, y) in enumerate(DataLoader(data(batches * BATCH), batch_size=BATCH), 1):
        if strays and number in (stop, skip, end):
            parts()
            if number == skip:
                continue
            if number == stop:
                break
            sys.exit(0)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.backward(loss)  # here
        optimizer.step()


def parts() -> None:
    print(f"at {time.time()}", flush=True)


def evaluate_on_rank_0(world: World) -> None:
    model, _ = prepared()
    parts()
    if world.is_main:
        hvt.evaluate(model, data(), hvt.classification(top=(1,)), per_rank_batch=4, world=world)  # here
    world.barrier()  # here


def save_on_rank_0(world: World) -> None:
    model, optimizer = prepared()
    parts()
    if world.is_main:
        checkpoints = Checkpointer(tempfile.mkdtemp())
        checkpoints.save(hvt.model_state(model, optimizer), progress=optimizer.progress)  # here
    for x, y in DataLoader(data(), batch_size=4):
        optimizer.backward(torch.nn.functional.cross_entropy(model(x), y))  # here
        optimizer.step()


def collective_in_on_main(world: World) -> None:
    parts()
    world.on_main(lambda: world.sum({"n": 1.0}))  # here


def training_in_on_main(world: World) -> None:
    parts()
    world.on_main(hvt.evaluate, prepared()[0], data(), hvt.classification(top=(1,)), per_rank_batch=4)  # here


def one_continues(world: World) -> None:
    train(world, skip=3)
    # here


def one_breaks(world: World) -> None:
    train(world, stop=3)
    world.mean({"loss": 1.0})  # here


def uneven_loader(world: World) -> None:
    train(world, batches=STEPS - world.rank)
    parts()


def one_ends_early(world: World) -> None:
    train(world, end=4)


def other_order(world: World) -> None:
    parts()
    if world.is_main:
        print(world.gather("a"), flush=True)  # here
        print(world.gather("b"), flush=True)
    else:
        print(world.gather("b"), flush=True)  # here
        print(world.gather("a"), flush=True)


def barrier_against_gather(world: World) -> None:
    parts()
    if world.is_main:
        world.barrier()  # here
    else:
        world.gather(1)  # here


def one_trains_more(world: World) -> None:
    """Rank 0 is at its end, where the engine goes down, and rank 1 takes another step."""
    train(world)
    if world.rank == 1:
        parts()
        train_again(world)


def train_again(world: World) -> None:
    model = torch.nn.Linear(3, 2)
    del world
    hvt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), verify=False)  # here


def two_models(world: World) -> None:
    """As in a GAN: the ranks update their models in another order."""
    models = [prepared(), prepared()]
    parts()
    for model, optimizer in models if world.is_main else reversed(models):
        loss = model(torch.ones(4, 3)).square().mean()
        optimizer.backward(loss)  # here


def slow(world: World) -> None:
    """Nothing is wrong: rank 1 takes its time, in its own code, and in on_main."""
    model, optimizer = prepared()
    for _ in range(2):
        if world.rank == 1:
            time.sleep(12)
        optimizer.backward(model(torch.ones(4, 3)).square().mean())
        optimizer.step()
    assert world.gather(world.rank) == [0, 1]
    world.on_main(time.sleep, 8)
    if world.rank == 0:
        time.sleep(8)
    world.barrier()
    if world.rank == 1:
        time.sleep(8)
    print("done", flush=True)


def main() -> None:
    engine, way = sys.argv[1:3]
    torch.set_num_threads(1)
    if way.endswith(".atexit"):  # the program leaves no world: the interpreter's end does
        world = hvdtrain.init("torch", engine=engine, device="cpu")
        globals()[way.removesuffix(".atexit")](world)
        return
    with hvdtrain.init("torch", engine=engine, device="cpu") as world:
        globals()[way](world)


if __name__ == "__main__":
    main()
