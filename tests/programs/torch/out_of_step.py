"""Two ranks that are not in step; usage: out_of_step.py ENGINE WAY... Rank 1 is the one that strays.

One way ends the program as it does. Several are ways that raise: each prints a line of JSON. The lines where ranks are
named to be end in "# here".
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from unittest import mock

import beacon
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
    return hvt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), verify=False)  # here


def train(world: World, *, batches: int = STEPS, stop: int = 0, skip: int = 0, end: int = 0) -> None:
    """A loop over a loader of the user's own; the arguments say what rank 1 does otherwise, and at which batch."""
    model, optimizer = prepared()
    strays = world.rank == 1
    for number, (x, y) in enumerate(DataLoader(data(batches * BATCH), batch_size=BATCH), 1):
        if strays and number in (stop, skip, end):
            beacon.parts()
            if number == skip:
                continue
            if number == stop:
                break
            sys.exit(0)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.backward(loss)  # here
        optimizer.step()


def evaluate_on_rank_0(world: World) -> None:
    model, _ = prepared()
    beacon.parts()
    if world.is_main:
        hvt.evaluate(model, data(), hvt.classification(top=(1,)), per_rank_batch=4, world=world)  # here
    world.barrier()  # here


def evaluate_within_on_main(world: World) -> None:
    model, _ = prepared()
    beacon.parts()
    world.on_main(hvt.evaluate, model, data(), hvt.classification(top=(1,)), per_rank_batch=4)  # here


def save_on_rank_0(world: World) -> None:
    model, optimizer = prepared()
    beacon.parts()
    if world.is_main:
        checkpoints = Checkpointer(tempfile.mkdtemp())
        checkpoints.save(hvt.model_state(model, optimizer), progress=optimizer.progress)  # here
    for x, y in DataLoader(data(), batch_size=4):
        optimizer.backward(torch.nn.functional.cross_entropy(model(x), y))  # here
        optimizer.step()


def collective_in_on_main(world: World) -> None:
    beacon.parts()
    world.on_main(lambda: world.sum({"n": 1.0}))  # here


def training_in_on_main(world: World) -> None:
    model, optimizer = prepared()
    loss = model(torch.ones(4, 3)).square().mean()
    beacon.parts()
    world.on_main(optimizer.backward, loss)  # here


def one_continues(world: World) -> None:
    train(world, skip=3)
    # here


def one_breaks(world: World) -> None:
    train(world, stop=3)
    world.mean({"loss": 1.0})  # here


def uneven_loader(world: World) -> None:
    train(world, batches=STEPS - world.rank)
    beacon.parts()


def one_ends_early(world: World) -> None:
    train(world, end=4)


def other_order(world: World) -> None:
    beacon.parts()
    if world.is_main:
        world.gather("a"), world.gather("b")  # here
    else:
        world.gather("b"), world.gather("a")  # here


def barrier_against_gather(world: World) -> None:
    beacon.parts()
    if world.is_main:
        world.barrier()  # here
    else:
        world.gather(1)  # here


def one_joins_again(world: World) -> None:
    beacon.parts()
    if world.is_main:
        world.gather(1)  # here
    else:
        hvdtrain.init("torch", engine=world.engine, device="cpu")  # here


def one_trains_more(world: World) -> None:
    train(world, batches=STEPS + world.rank)
    beacon.parts()


def one_prepares_more(world: World) -> None:
    """Rank 0 is at its end, where the engine goes down, and rank 1 has another model."""
    train(world)
    beacon.parts()
    if world.rank == 1:
        prepared()
    # here


def gather_in_a_worker(world: World) -> None:
    """A worker is forked, and the threads of the engine are not."""
    beacon.parts()
    next(iter(DataLoader(data(), num_workers=1, worker_init_fn=lambda _: world.gather(1))))


def gather_in_two_threads(world: World) -> None:
    """A second thread comes while each rank's first is in `on_main`, where its result is about to go to the others."""
    inside, asked, send = Event(), Event(), world.comm.broadcast_bytes

    def send_late(data: bytes | None, root: int) -> bytes:
        inside.set()
        assert asked.wait(60)
        return send(data, root)

    def second_thread() -> None:
        assert inside.wait(60)
        try:
            world.gather(1)
        finally:
            asked.set()

    beacon.parts()
    with mock.patch.object(world.comm, "broadcast_bytes", send_late), ThreadPoolExecutor(1) as pool:
        found = pool.submit(second_thread)
        world.on_main(lambda: None)
        found.result()


def branches_that_broadcast(world: World) -> None:
    """Nothing is wrong: who gives None receives, on another line; the other way round, it is not the root's."""
    if world.is_main:
        world.broadcast("it")
    else:
        assert world.broadcast(None) == "it"
    beacon.parts()
    if world.is_main:
        world.broadcast("it")  # here
    else:
        world.broadcast("another")  # here


def leaves_the_loader(world: World) -> None:
    """The loader is hvdtrain's, so that a batch that is not the others' is seen in the very update."""
    loader = hvt.loader(data(), per_rank_batch=2)
    model = torch.nn.Linear(3, 2)
    model, optimizer = hvt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, verify=False)
    for number, (x, y) in enumerate(loader):
        if number == 2:
            beacon.parts()
            if world.rank == 1:
                continue
        optimizer.backward(torch.nn.functional.cross_entropy(model(x), y))  # here
        optimizer.step()


def two_models(world: World) -> None:
    """As in a GAN: the ranks update their models in another order."""
    models = [prepared(), prepared()]
    beacon.parts()
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
    engine, *ways = sys.argv[1:]
    torch.set_num_threads(1)
    beacon.start()
    if ways[0].endswith(".atexit"):  # the program leaves no world: the interpreter's end does
        world = hvdtrain.init("torch", engine=engine, device="cpu")
        globals()[ways[0].removesuffix(".atexit")](world)
        return
    with hvdtrain.init("torch", engine=engine, device="cpu") as world:
        if len(ways) == 1:
            globals()[ways[0]](world)
        for way in ways if len(ways) > 1 else ():
            beacon.report(way, lambda way=way: globals()[way](world))


if __name__ == "__main__":
    main()
