"""A communicator of mpi4py's and Horovod in one process, taking turns and at once; sums written with it."""

import sys

import numpy as np
import torch
from mpi_ways import compare_sums

import hvdtrain
import hvdtrain.torch as hvt

mode = sys.argv[1]
if mode == "mpi-first":
    from mpi4py import MPI  # noqa: F401  (starts MPI)

world = hvdtrain.init("torch", device="cpu")
comm = world.mpi
assert (comm.rank, comm.size) == (world.rank, world.size)
if mode == "horovod-first":
    compare_sums(world)
model = torch.nn.Linear(4, 1)
data = hvt.loader((torch.randn(18, 4), torch.randn(18, 1)), per_rank_batch=2)
model, optimizer = hvt.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
for epoch in data.epochs(2):
    for x, y in data:
        optimizer.zero_grad()
        mine, total = np.full(1000, world.rank + 1.0), np.empty(1000)
        request = comm.Iallreduce(mine, total)  # under way while Horovod sums
        optimizer.backward(((model(x) - y) ** 2).mean())
        optimizer.step()
        request.Wait()
        assert (total == world.size * (world.size + 1) / 2).all(), (epoch, total[:5], total[-5:], comm)
    assert comm.allreduce(epoch) == epoch * world.size
if mode != "never-left":
    with world:
        pass
    try:
        world.mpi.Barrier()
    except hvdtrain.ConfigError as error:
        assert "World.mpi needs a world" in str(error)
    else:
        assert mode == "mpi-first", "Horovod ended the MPI that it had started"
    try:
        with hvdtrain.init("torch", device="cpu") as again:
            assert again.size == world.size
    except hvdtrain.LauncherError as error:
        assert mode != "mpi-first" and "MPI cannot start twice in a process" in str(error)
    else:
        assert mode == "mpi-first", "the program holds MPI"
print(f"rank {world.rank} done")
