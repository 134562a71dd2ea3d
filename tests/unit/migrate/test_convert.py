"""Horovod scripts in, hvdtrain scripts out: text to text; and what is refused, each line with its reason."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from horovod_scripts import FOLDER

from hvdtrain.migrate.convert import convert

MODEL = """\
import horovod.torch as hvd
import torch

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
"""
WRAP = MODEL + "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n"


def moved(text: str) -> str:
    """The new script; it compiles, and has nothing of Horovod's left."""
    found = convert(textwrap.dedent(text))
    assert not found.refused, found.refused
    compile(found.text, "new.py", "exec")
    assert "import horovod" not in found.text
    return found.text


def refused(text: str) -> list[tuple[int, str]]:
    """Line and reason of what is refused; the script is as it was."""
    found = convert(text)
    assert found.refused and found.text == text
    return [(finding.line, finding.text) for finding in found.refused]


def test_a_whole_script_keeps_its_form() -> None:
    text = '''\
        """Trains."""

        import torch
        import horovod.torch as hvd  # as ever


        def main():
            hvd.init()
            # one GPU a rank
            torch.cuda.set_device(hvd.local_rank())
            model = Net()  # plain
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1*hvd.size(),
                                        momentum=0.9)

            # Horovod: broadcast parameters.
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            # kept: it is the user's
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            # Horovod: wrap optimizer with DistributedOptimizer.
            optimizer = hvd.DistributedOptimizer(
                optimizer, named_parameters=model.named_parameters(),
                compression=hvd.Compression.fp16, op=hvd.Average)  # wrapped
            for x, y in loader( ):
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward(retain_graph = True)
                optimizer.step()
            if hvd.rank() == 0:
                torch.save(model.state_dict(), "m.pt")
        '''
    new = '''\
        """Trains."""

        import torch
        import hvdtrain
        import hvdtrain.torch as hvt


        def main():
            world = hvdtrain.init("torch")
            # one GPU a rank
            torch.cuda.set_device(world.local_rank)
            model = Net()  # plain
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1*world.size,
                                        momentum=0.9)

            # kept: it is the user's
            # Horovod: wrap optimizer with DistributedOptimizer.
            model, optimizer = hvt.prepare(model, optimizer, compression="fp16")  # wrapped
            for x, y in loader( ):
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                optimizer.backward(loss, retain_graph = True)
                optimizer.step()
            if world.rank == 0:
                torch.save(model.state_dict(), "m.pt")
        '''
    assert moved(text) == textwrap.dedent(new)


def test_the_world_is_named_where_it_can_be() -> None:
    text = "import horovod.torch as hvd\n\n\ndef lead():\n    return hvd.rank() == 0\n\n\ndef main():\n    hvd.init()\n"
    nested = "    print([hvd.size() for _ in range(2)], (lambda: hvd.rank())())\n"
    new = moved(text + nested)
    assert "return hvdtrain.current().rank == 0" in new
    assert 'world = hvdtrain.init("torch")\n    print([world.size for _ in range(2)], (lambda: world.rank)())' in new
    taken = moved("world = 3\n" + text + nested)
    assert '    hvdtrain.init("torch")\n    print([hvdtrain.current().size for' in taken
    assert "world = hvdtrain" not in moved(text)


# -- broadcasts ---------------------------------------------------------------------------------------------------
SENT = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\nhvd.broadcast_optimizer_state(optimizer, 0)\n"
STAYS = (
    "model.load_state_dict(world.broadcast(model.state_dict()))\n"
    "optimizer.load_state_dict(world.broadcast(optimizer.state_dict()))\n"
)
LOADS = "if hvd.rank() == 0:\n    model.load_state_dict(torch.load('m.pt'))\n"


@pytest.mark.parametrize("between", ["", "compression = hvd.Compression.fp16 if fast else hvd.Compression.none\n"])
def test_broadcasts_beside_the_wrap_go(between: str) -> None:
    for text in (WRAP + between + SENT, WRAP.replace("optimizer = hvd", f"{SENT}{between}optimizer = hvd")):
        new = moved(text)
        assert "model, optimizer = hvt.prepare(model, optimizer)\n" in new and "broadcast" not in new


@pytest.mark.parametrize(
    "text",
    [
        WRAP + LOADS + SENT,  # what rank 0 loads
        WRAP + "for x in data:\n    model(x).mean().backward()\n    optimizer.step()\n" + SENT,  # after training
        WRAP.replace("optimizer = hvd", f"{SENT}teacher = copy.deepcopy(model)\noptimizer = hvd"),  # read before
    ],
    ids=["loaded", "trained", "copied"],
)
def test_other_broadcasts_stay(text: str) -> None:
    assert STAYS in moved(text)


def test_another_ranks_broadcast_stays_one() -> None:
    assert "broadcast(model.state_dict(), 1)" in moved(WRAP + SENT.replace("root_rank=0", "root_rank=1"))


# -- passes -------------------------------------------------------------------------------------------------------
TWO = WRAP.replace("named_parameters())", "named_parameters(), backward_passes_per_step=2)")


@pytest.mark.parametrize(
    "loop, wanted",
    [
        ("for i in range(0, len(x), 8):\n    f(i).backward()\noptimizer.step()\n", "f(i), more=i + 8 < len(x))"),
        ("for i in range(n):\n    f(i).backward()\noptimizer.step()\n", "f(i), more=i + 1 < n)"),
        (
            "for i in d:\n    f(i).backward()\n    if (i + 1) % 2 == 0:\n        optimizer.step()\n",
            "more=(i + 1) % 2 != 0)",
        ),
        ("for i in d:\n    f(i).backward()\n    if i % 2:\n        optimizer.step()\n", "f(i), more=not (i % 2))"),
        ("a.backward()\nb.backward()\noptimizer.step()\n", "backward(a, more=True)\noptimizer.backward(b)"),
    ],
)
def test_passes_of_an_update(loop: str, wanted: str) -> None:
    assert wanted in moved(TWO + loop)


def test_passes_of_which_the_last_is_not_known() -> None:
    loop = "for part in parts:\n    f(part).backward()\noptimizer.step()\n"
    [(line, reason)] = refused(TWO + loop)
    assert "backward()" in (TWO + loop).splitlines()[line - 1] and "which of several passes is the last" in reason


# -- metrics ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "old, new",
    [
        ("hvd.allreduce(x.detach())", "hvt.reduce(x.detach())"),
        ("hvd.allreduce(x.detach(), average=False)", 'hvt.reduce(x.detach(), "sum")'),
        ("hvd.allreduce(x.detach(), op=hvd.Max, name='m')", 'hvt.reduce(x.detach(), "max")'),
        ("f'{hvd.rank()} of {hvd.size():>3}'", "f'{world.rank} of {world.size:>3}'"),
        ("hvd.allreduce_(x)", "x.data.copy_(hvt.reduce(x))"),
        ("hvd.allgather(x)", "hvt.gather(x)"),
        ("hvd.broadcast_(x, 0)", "x.data.copy_(hvt.broadcast(x.data))"),
        ("hvd.broadcast_object(x, root_rank=0, name='o')", "world.broadcast(x)"),
        ("hvd.is_initialized()", "(hvdtrain.current() is not None)"),
    ],
)
def test_metrics_and_objects(old: str, new: str) -> None:
    assert moved(f"import horovod.torch as hvd\nhvd.init()\ny = {old}\n").endswith(f"\ny = {new}\n")


# -- refusals -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "line, reason",
    [
        ("hvd.join()", "gives each rank as many batches"),
        ("s = hvd.add_process_set([0])", "process sets"),
        ("b = hvd.SyncBatchNorm(4)", "sync_batchnorm=True"),
        ("h = hvd.allreduce_async_(p.grad)", "the call that waits"),
        ("a = hvd.alltoall(t)", "hvd.alltoall has no counterpart"),
        ("f(hvd)", "hvd as a value"),
        ("Trainer(strategy='horovod')", "a library that calls Horovod itself"),
        ("import horovod\nhorovod.run(f, min_np=2)", "hvdtrain.run"),
        ("hvd.allreduce(*args)", "the arguments of hvd.allreduce are not known"),
        ("hvd.allreduce(t, prescale_factor=2.0)", "prescale_factor"),
        ("hvd.allreduce(t, average=a)", "whether this is a mean or a sum"),
        ("hvd.broadcast_parameters(dict(model.named_parameters()), 0)", "model.state_dict()"),
        ("hvd.init()", "a second hvd.init()"),
        ("o = hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)", "op=Adasum"),
        ("o = hvd.DistributedOptimizer(optimizer, named_parameters=chain(a, b))", "the model of these parameters"),
        ("o = hvd.DistributedOptimizer(optimizer) if d else optimizer", "assigned to one name, or returned"),
        ("if d:\n    o = hvd.DistributedOptimizer(optimizer)", "within `if`"),
        ("import horovod.tensorflow as tfhvd", "only what is imported from horovod.torch"),
        ("hvt = hvd.allreduce(t.detach())", "the name hvt"),
        ("from horovod.torch.mpi_ops import allgather", "horovod.torch.mpi_ops cannot be converted"),
    ],
)
def test_what_cannot_be_moved_is_told_with_its_line(line: str, reason: str) -> None:
    text = MODEL + line + "\n"
    found = refused(text)
    wanted = 1 if "the name" in reason and "hvt" in line else 7 + line.count("\n")
    assert any(at == wanted and reason in said for at, said in found), found


def test_horovod_that_may_be_absent_is_refused() -> None:
    text = (
        "try:\n    import horovod.torch as hvd\nexcept ImportError:\n    hvd = None\nrank = hvd.rank() if hvd else 0\n"
    )
    assert {line for line, reason in refused(text) if "is not Horovod's only" in reason} >= {5}


@pytest.mark.parametrize("draw", ["torch.randperm(len(x))", "random.shuffle(rows)", "np.random.permutation(9)"])
def test_an_order_that_ranks_draw_alike_and_share_out(draw: str) -> None:
    head = "import random\nimport numpy as np\n" + WRAP
    loop = f"for epoch in range(2):\n    rows = {draw}\n    mine = rows[hvd.rank() :: hvd.size()]\n"
    [(line, reason)] = refused(head + loop)
    assert line == 11 and "each rank draws its own" in reason
    moved(head + loop.replace("[hvd.rank() :: hvd.size()]", ""))  # each rank's own part
    if "torch" in draw:
        moved(head + loop.replace("len(x))", "len(x), generator=g)"))
    lines = WRAP.splitlines(True)
    moved("".join(["import random\nimport numpy as np\n", *lines[:4], f"rows = {draw}[hvd.rank() :: 2]\n", *lines[4:]]))


# -- the scripts of tests/horovod_scripts -------------------------------------------------------------------------
REFUSED = {
    "torch_batchnorm": [12], "torch_elastic": [13, 26, 43],
    "torch_join": [27], "torch_process_sets": [9, 12, 13, 26, 28],
    "tensorflow_gradient_tape": [33, 39, 40, 47],
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_the_twenty_scripts(path: Path) -> None:
    found = convert(path.read_text())
    assert [finding.line for finding in found.refused] == REFUSED.get(path.stem, [])
    if path.stem not in REFUSED:
        compile(found.text, "new.py", "exec")
