"""A plain Horovod script in which ranks wait for one another in vain: `deadlocks.py WAY`; without one it is clean.

The lines at which they part are marked: "# here" that of the rank (or ranks) that others wait for, "# there" theirs.
"""

from __future__ import annotations

import sys
import threading

import horovod.torch as hvd
import torch

WAYS = (
    "rank_0_averages", "rank_0_sends", "two_orders", "fewer_batches", "stops_early", "catches", "saves_together",
    "lock", "skips_bad_loss", "other_branch",
)  # fmt: skip
way = [*sys.argv[1:], ""][0]

hvd.init()
rank, others = hvd.rank(), hvd.rank() != 1
torch.manual_seed(0)
model = torch.nn.Linear(4, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
draw = torch.Generator().manual_seed(rank)
batches = 7 if way == "fewer_batches" and not others else 12

for step in range(batches):
    x = torch.randn(8, 4, generator=draw, dtype=torch.float64)
    late = step == 4
    if way == "catches" and late:
        try:
            if not others:
                raise ValueError("a bad sample")
        except ValueError:
            hvd.allgather(torch.ones(1), name="bad")  # here
    while way == "all_loop" and late:
        pass
    if way == "lock" and late and not others:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # here
    if way == "stops_early" and late and not others:
        break
    if way == "skips_bad_loss" and late and not others:
        hvd.allreduce(torch.zeros(1), name="skipped")  # here
        continue
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()  # there
    if way == "rank_0_averages" and late and rank == 0:
        hvd.allreduce(loss.detach(), name="loss")  # here
    if way == "rank_0_sends" and late and rank == 0:
        hvd.broadcast_object({"step": step}, root_rank=0, name="word")  # here
    if way == "two_orders" and late:
        if others:
            hvd.allreduce(torch.ones(1), name="first")  # there too
        hvd.allgather(torch.ones(1), name="second")  # here
    if way == "saves_together" and late and rank == 0:
        hvd.barrier()  # here
    if way == "other_branch" and late:
        if others:
            hvd.allreduce(torch.ones(2), name="a")  # there too
        else:
            hvd.allreduce(torch.ones(2), name="b")  # here

numbers = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()
print(rank, numbers.tobytes().hex(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), flush=True)
