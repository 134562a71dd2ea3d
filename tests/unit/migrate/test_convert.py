"""Horovod scripts in, hvdtrain scripts out: text to text; and what is refused, each line with its reason."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from horovod_scripts import FOLDER

from hvdtrain.migrate.convert import convert
from hvdtrain.migrate.script.plan import DDP, HVDTRAIN, Target

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


@pytest.mark.parametrize(
    "head, of",
    [
        ("import horovod.torch as hvd", "hvd."),
        ("import horovod.torch as H", "H."),
        ("import horovod.torch", "horovod.torch."),
        ("from horovod import torch as hv", "hv."),
        ("from horovod.torch import init, rank, size, allreduce", ""),
    ],
)
def test_aliases(head: str, of: str) -> None:
    text = f"{head}\n{of}init()\nprint({of}rank(), {of}allreduce(x.detach(), name='x') / {of}size())\n"
    assert moved(text) == (
        "import hvdtrain\nimport hvdtrain.torch as hvt\n"
        'world = hvdtrain.init("torch")\nprint(world.rank, hvt.reduce(x.detach()) / world.size)\n'
    )


def test_names_that_are_not_horovods_are_left() -> None:
    text = "import horovod.torch as hvd\nhvd.init()\n\n\ndef show(hvd):\n    return hvd.rank()\n"
    assert moved(text).endswith("def show(hvd):\n    return hvd.rank()\n")


def test_the_world_is_named_where_it_can_be() -> None:
    text = "import horovod.torch as hvd\n\n\ndef lead():\n    return hvd.rank() == 0\n\n\ndef main():\n    hvd.init()\n"
    nested = "    print([hvd.size() for _ in range(2)], (lambda: hvd.rank())())\n"
    new = moved(text + nested)
    assert "return hvdtrain.current().rank == 0" in new
    assert 'world = hvdtrain.init("torch")\n    print([world.size for _ in range(2)], (lambda: world.rank)())' in new
    taken = moved("world = 3\n" + text + nested)
    assert '    hvdtrain.init("torch")\n    print([hvdtrain.current().size for' in taken
    assert "world = hvdtrain" not in moved(text)


# -- hvt.prepare stands where the last broadcast was --------------------------------------------------------------
BROADCASTS = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\nhvd.broadcast_optimizer_state(optimizer, 0)\n"


@pytest.mark.parametrize("between", ["", "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n", "print(3)\n"])
def test_prepare_takes_the_place_of_wrap_and_broadcasts(between: str) -> None:
    new = moved(WRAP + between + BROADCASTS)
    assert f"lr=0.1 * world.size)\nmodel, optimizer = hvt.prepare(model, optimizer)\n{between}" in new
    assert "broadcast" not in new


def test_prepare_comes_after_what_rank_0_loads() -> None:
    load = "if hvd.rank() == 0:\n    model.load_state_dict(torch.load('m.pt'))\n"
    new = moved(WRAP + load + BROADCASTS)
    assert new.endswith("torch.load('m.pt'))\nmodel, optimizer = hvt.prepare(model, optimizer)\n")
    inline = WRAP.replace(
        "optimizer = hvd.DistributedOptimizer(optimizer,", "opt = hvd.DistributedOptimizer(optimizer,"
    )
    new = moved(inline + load + BROADCASTS.replace("(optimizer", "(opt"))
    assert "opt = optimizer\nif world.rank == 0:" in new and new.endswith("model, opt = hvt.prepare(model, opt)\n")


def test_a_broadcast_after_training_stays_one() -> None:
    loop = "for x in data:\n    model(x).mean().backward()\n    optimizer.step()\n"
    new = moved(WRAP + loop + BROADCASTS)
    assert "    optimizer.backward(model(x).mean())\n    optimizer.step()\n" in new
    assert new.endswith(
        "model.load_state_dict(world.broadcast(model.state_dict()))\n"
        "optimizer.load_state_dict(world.broadcast(optimizer.state_dict()))\n"
    )
    inner = "def train():\n    optimizer.step()\n\n\ntrain()\n"
    assert "model.load_state_dict(world.broadcast" in moved(WRAP + inner + BROADCASTS)
    assert "broadcast(model.state_dict(), 1)" in moved(WRAP + BROADCASTS.replace("root_rank=0", "root_rank=1"))


def test_an_optimizer_that_is_returned() -> None:
    text = """\
        import horovod.torch as hvd
        import torch

        class Trainer:
            def __init__(self, model):
                hvd.init()
                self.model = model
                self.opt = self.build(0.1)

            def build(self, lr):
                return hvd.DistributedOptimizer(
                    torch.optim.SGD(self.model.parameters(), lr=lr), named_parameters=self.model.named_parameters())

            def step(self, loss):
                loss.backward()
                self.opt.step()
        """
    new = moved(text)
    assert "self.model, optimizer = hvt.prepare(self.model, torch.optim.SGD(self.model.parameters(), lr=lr))" in new
    assert "        return optimizer\n" in new and "        self.opt.backward(loss)\n" in new


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


@pytest.mark.parametrize(
    "loop",
    [
        "for part in parts:\n    f(part).backward()\noptimizer.step()\n",
        "for i in range(4):\n    f(i).backward()\n    i += 1\noptimizer.step()\n",
        "for x in d:\n    f(x).backward()\n    n += 1\n    if n % 2 == 0:\n        optimizer.step()\n",
        "for i in range(4):\n    if i == 2:\n        break\n    f(i).backward()\noptimizer.step()\n",
    ],
)
def test_passes_of_which_the_last_cannot_be_told(loop: str) -> None:
    [(line, reason)] = refused(TWO + loop)
    assert "backward()" in (TWO + loop).splitlines()[line - 1] and "which pass is the last" in reason


def test_clipping_and_scaling() -> None:
    loop = """\
for x in data:
    scaler.scale(model(x).mean()).backward()
    # average first
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)  # no second average
    torch.cuda.synchronize()
"""
    assert moved(WRAP + loop).endswith(
        """\
for x in data:
    optimizer.backward(scaler.scale(model(x).mean()))
    # average first
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)  # no second average
    torch.cuda.synchronize()
"""
    )


# -- metrics ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "old, new",
    [
        ("hvd.allreduce(x.detach())", "hvt.reduce(x.detach())"),
        ("hvd.allreduce(x.detach(), average=False)", 'hvt.reduce(x.detach(), "sum")'),
        ("hvd.allreduce(x.detach(), op=hvd.Max, name='m')", 'hvt.reduce(x.detach(), "max")'),
        ("hvd.allreduce(a + b).item()", "hvt.reduce((a + b).detach()).item()"),
        ("hvd.allreduce(torch.tensor(3)).item()", "hvt.reduce(torch.tensor(3)).item()"),
        ("f'{hvd.rank()} of {hvd.size():>3}'", "f'{world.rank} of {world.size:>3}'"),
        ("hvd.allreduce_(x)", "x.data.copy_(hvt.reduce(x))"),
        ("hvd.grouped_allreduce([a, b])", "[hvt.reduce(tensor) for tensor in [a, b]]"),
        ("hvd.allgather(x)", "hvt.gather(x)"),
        ("hvd.broadcast(x, root_rank=1)", "hvt.broadcast(x, 1)"),
        ("hvd.broadcast_(x, 0)", "x.data.copy_(hvt.broadcast(x.data))"),
        ("hvd.broadcast_object(x, root_rank=0, name='o')", "world.broadcast(x)"),
        ("hvd.allgather_object(hvd.rank())", "world.gather(world.rank)"),
        ("hvd.barrier()", "world.barrier()"),
        ("hvd.is_initialized()", "(hvdtrain.current() is not None)"),
    ],
)
def test_metrics_and_objects(old: str, new: str) -> None:
    assert moved(f"import horovod.torch as hvd\nhvd.init()\ny = {old}\n").endswith(f"\ny = {new}\n")


def test_a_loss_that_is_logged_after_its_pass_is_detached() -> None:
    loop = "loss = f(x)\nloss.backward()\noptimizer.step()\nlogged = hvd.allreduce(loss)\n"
    assert moved(WRAP + loop).endswith("logged = hvt.reduce(loss.detach())\n")


def test_no_gradient_is_cut_off_in_a_loss() -> None:
    """`hvt.reduce` raises an error if a gradient would have to go through it."""
    new = moved(WRAP + "loss = hvd.allreduce(f(x))\nloss.backward()\noptimizer.step()\n")
    assert "loss = hvt.reduce(f(x))\noptimizer.backward(loss)\n" in new


# -- refusals -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "line, reason",
    [
        ("hvd.join()", "gives each rank as many batches"),
        ("hvd.elastic.run(f)", "hvdtrain.Checkpointer"),
        ("s = hvd.add_process_set([0])", "process sets"),
        ("b = hvd.SyncBatchNorm(4)", "sync_batchnorm=True"),
        ("h = hvd.allreduce_async_(p.grad)", "the call that waits"),
        ("hvd.synchronize(h)", "the call that waits"),
        ("a = hvd.alltoall(t)", "hvd.alltoall has no counterpart"),
        ("f(hvd)", "hvd as a value"),
        ("Trainer(strategy='horovod')", "a library that trains on Horovod by itself"),
        ("import horovod\nhorovod.run(f, min_np=2)", "horovod.run must be called"),
        ("import horovod\ng = horovod.run", "horovod.run must be called"),
        ("g = hvd.allreduce", "hvd.allreduce has no counterpart"),
        ("hvd.allreduce(*args)", "the arguments of hvd.allreduce are not known"),
        ("hvd.allreduce(t, prescale_factor=2.0)", "prescale_factor"),
        ("hvd.allreduce(t, op=hvd.Product)", "op=hvd.Product"),
        ("hvd.allreduce(t, average=a)", "whether this is a mean or a sum"),
        ("hvd.allreduce(t, process_set=s)", "process sets"),
        ("hvd.broadcast_parameters(dict(model.named_parameters()), 0)", "model.state_dict()"),
        ("hvd.init()", "a second hvd.init()"),
        ("x = hvd.shutdown()", "a line of its own"),
        ("o = hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)", "op=Adasum"),
        ("o = hvd.DistributedOptimizer(optimizer, op=hvd.Sum)", "op=hvd.Sum"),
        ("o = hvd.DistributedOptimizer(optimizer, process_set=s)", "a process set"),
        ("o = hvd.DistributedOptimizer(optimizer, named_parameters=chain(a, b))", "the model of these parameters"),
        ("o = hvd.DistributedOptimizer(optimizer) if d else optimizer", "assigned to one name, or returned"),
        ("f(hvd.DistributedOptimizer(optimizer))", "assigned to one name, or returned"),
        ("if d: o = hvd.DistributedOptimizer(optimizer)", "assigned to one name, or returned"),
        ("if d:\n    o = hvd.DistributedOptimizer(optimizer)", "within `if`"),
        ("import horovod.tensorflow as tfhvd", "only what is imported from horovod.torch"),
        ("from horovod.torch import *", "import *"),
        ("hvt = hvd.allreduce(t.detach())", "the name hvt"),
        ("d['o'] = hvd.DistributedOptimizer(optimizer)", "assigned to one name, or returned"),
        ("from horovod.torch.mpi_ops import allgather", "horovod.torch.mpi_ops cannot be converted"),
    ],
)
def test_what_cannot_be_moved_is_told_with_its_line(line: str, reason: str) -> None:
    text = MODEL + line + "\n"
    found = refused(text)
    wanted = 1 if "the name" in reason and "hvt" in line else 7 + line.count("\n")
    assert any(at == wanted and reason in said for at, said in found), found


@pytest.mark.parametrize(
    "loop, reason",
    [
        ("loss.backward(create_graph=True)\noptimizer.step()\n", "create_graph"),
        (
            "b = hvd.DistributedOptimizer(optimizer, model.named_parameters())\n\n\ndef f(a):\n    a.backward()\n",
            "no step() of a wrapped optimizer",
        ),
    ],
)
def test_passes_that_cannot_be_moved(loop: str, reason: str) -> None:
    [(line, said)] = refused(WRAP + loop)
    assert reason in said and ".backward(" in (WRAP + loop).splitlines()[line - 1]


def test_one_pass_for_two_optimizers_is_refused() -> None:
    second = (
        "other = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters()), named_parameters=net.named_parameters())\n"
    )
    [(line, reason)] = refused(WRAP + second + "loss.backward()\noptimizer.step()\nother.step()\n")
    assert line == 9 and "[optimizer, other]" in reason


def test_init_under_a_condition_or_with_arguments() -> None:
    assert "under a condition" in refused("import horovod.torch as hvd\nif d:\n    hvd.init()\n")[0][1]
    assert "with arguments" in refused("import horovod.torch as hvd\nhvd.init(comm=c)\n")[0][1]
    main = "import horovod.torch as hvd\nif __name__ == '__main__':\n    hvd.init()\n    print(hvd.rank())\n"
    assert "print(world.rank)" in moved(main)


def test_what_is_no_script_of_horovods() -> None:
    assert refused("import torch\n") == [(1, "nothing here imports horovod.torch, or Horovod's Keras")]
    [(line, reason)] = refused("import horovod.torch as hvd\nhvd.init(\nx = = 3\n")
    assert line == 3 and "does not compile" in reason


def test_notes() -> None:
    [note] = convert("import horovod.torch as hvd\nimport torch\ntorch.manual_seed(1)\nhvd.init()\n").notes
    assert note.line == 3 and "seeds" in note.text
    [note] = convert("import horovod.torch as hvd\nprint(hvd.rank())\nloss.backward()\n").notes
    assert note.line == 3 and "no optimizer is wrapped" in note.text


def test_horovod_that_may_be_absent_is_refused() -> None:
    text = (
        "try:\n    import horovod.torch as hvd\nexcept ImportError:\n    hvd = None\nrank = hvd.rank() if hvd else 0\n"
    )
    assert {line for line, reason in refused(text) if "is not Horovod's only" in reason} >= {5}


def test_a_caller_that_keeps_the_plain_model_is_noted() -> None:
    [note] = convert(
        "def build(model):\n    " + WRAP.replace("\n", "\n    ").replace("    model = torch.nn.Linear(2, 1)\n", "")
    ).notes
    assert "whose caller keeps the plain one" in note.text


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


def test_a_split_of_each_ranks_own_is_noted() -> None:
    text = WRAP + "def data(x):\n    return torch.utils.data.random_split(x, [2, 1])\n"
    [note] = convert(text).notes
    assert note.line == 9 and "give it a generator" in note.text
    assert not convert(text.replace("[2, 1]", "[2, 1], generator=g")).notes


def test_ranks_started_from_python() -> None:
    text = "import horovod\nimport horovod.torch as hvd\nhorovod.run(f, (1,), np=2, hosts=h, use_gloo=True)\n"
    assert moved(text) == "import hvdtrain\nhvdtrain.run(f, args=(1,), np=2, hosts=h)\n"


def test_what_asks_for_adasum_need_not_ask_for_nccl() -> None:
    wrap = WRAP.replace("named_parameters())", "named_parameters(), op=hvd.Adasum if args.a else hvd.Average)")
    assert "if args.a:\n    s = world.local_size\n" in moved(
        wrap + "if args.a and hvd.nccl_built():\n    s = hvd.local_size()\n"
    )
    assert "hvd.nccl_built has no counterpart" in refused(wrap + "if args.b and hvd.nccl_built():\n    pass\n")[0][1]


@pytest.mark.parametrize(
    "op, test",
    [("hvd.Adasum if args.a else hvd.Average", "args.a"), ("hvd.Average if args.a else hvd.Adasum", "not (args.a)")],
)
def test_where_adasum_is_asked_for_the_new_script_ends(op: str, test: str) -> None:
    text = WRAP.replace("named_parameters())", f"named_parameters(), op={op})")
    guard = f'if {test}:\n    raise SystemExit("hvdtrain averages gradients, and has no Adasum")\n'
    assert guard + "model, optimizer = hvt.prepare(model, optimizer)\n" in moved(text)


def test_batch_norm_over_all_ranks_under_a_condition() -> None:
    text = WRAP.replace("model =", "Norm = hvd.SyncBatchNorm if gpu else torch.nn.BatchNorm1d\nmodel =")
    new = moved(text)
    assert "\nNorm = torch.nn.BatchNorm1d\n" in new and "hvt.prepare(model, optimizer, sync_batchnorm=gpu)" in new


def test_a_helper_differentiates_for_the_one_optimizer() -> None:
    text = WRAP + "def back(loss):\n    loss.backward()\n\n\nfor x in data:\n    back(f(x))\n    optimizer.step()\n"
    assert "def back(loss):\n    optimizer.backward(loss)\n" in moved(text)


# -- the scripts of tests/horovod_scripts -------------------------------------------------------------------------
REFUSED = {
    "torch_elastic": [13, 26, 43], "torch_join": [27], "torch_process_sets": [9, 12, 13, 26, 28],
    "tensorflow_gradient_tape": [33, 39, 40, 47],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "target"),
    [
        pytest.param(path, target, id=f"{path.stem}-{name}")
        for name, target, kind in (("hvdtrain", HVDTRAIN, "*.py"), ("ddp", DDP, "torch_*.py"))
        for path in sorted(FOLDER.glob(kind))
    ],
)
def test_the_twenty_scripts(path: Path, target: Target) -> None:
    found = convert(path.read_text(), target)
    assert [finding.line for finding in found.refused] == REFUSED.get(path.stem, [])
    if path.stem not in REFUSED:
        compile(found.text, "new.py", "exec")


SENT = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"
WRAPPED = "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())"
MADE = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
LOADED = "if hvd.rank() == 0:\n    model.load_state_dict(torch.load('old.pt'))"


@pytest.mark.parametrize(
    "lines",
    [
        [SENT, "teacher = copy.deepcopy(model)", MADE, WRAPPED],
        [MADE, SENT, "teacher = copied()", WRAPPED],
        [
            MADE,
            WRAPPED,
            SENT,
            "start = copy.deepcopy(model.state_dict())",
            "hvd.broadcast_optimizer_state(optimizer, 0)",
        ],
    ],
    ids=["a copy", "a function of the script's", "between two broadcasts"],
)
def test_what_reads_a_model_that_was_broadcast_reads_what_was_sent(lines: list[str]) -> None:
    """`hvt.prepare`, below, would send rank 0's weights too late for it."""
    head = "import copy, torch\nimport horovod.torch as hvd\nhvd.init()\nmodel = torch.nn.Linear(1, 1)\n"
    made = "def copied():\n    return copy.deepcopy(model)\n"
    text = convert("\n".join([head + made + LOADED, *lines, "optimizer.zero_grad()", "model(x).mean().backward()", ""]))
    assert not text.refused, text.refused
    assert "model.load_state_dict(world.broadcast(model.state_dict()))\n" in text.text


def test_a_broadcast_that_nobody_reads_goes() -> None:
    head = "import torch\nimport horovod.torch as hvd\nhvd.init()\nmodel = torch.nn.Linear(1, 1)\n"
    assert "world.broadcast(" not in convert(head + "\n".join([LOADED, SENT, MADE, WRAPPED, ""])).text


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("hvd.broadcast_(next(parts), 0)", "has a name"),
        ("hvd.allreduce_(parts.pop())", "has a name"),
        ("hvd.allreduce_(parts[take()])", "has a name"),
        ("with optimizer.skip_synchronize() if late else null(): optimizer.step()", "all that a `with` has"),
    ],
)
def test_what_would_train_otherwise_is_refused(line: str, reason: str) -> None:
    head = f"import torch\nimport horovod.torch as hvd\nhvd.init()\nmodel = torch.nn.Linear(1, 1)\n{MADE}\n{WRAPPED}\n"
    [found] = convert(f"{head}{line}\n").refused
    assert found.line == 7 and reason in found.text


@pytest.mark.parametrize("maker", ["torch.optim.SGD", "chosen"])
def test_the_inner_optimizer_that_steps_by_itself_is_refused(maker: str) -> None:
    text = (
        "import torch\nimport horovod.torch as hvd\nhvd.init()\nmodel = torch.nn.Linear(1, 1)\n"
        f"base = {maker}(model.parameters(), lr=0.1)\n"
        "dist = hvd.DistributedOptimizer(base, named_parameters=model.named_parameters())\n"
        "for x in data:\n    loss = model(x).mean()\n    loss.backward()\n    dist.synchronize()\n    base.step()\n"
    )
    assert any(one.line == 9 and "under another name" in one.text for one in convert(text).refused)


@pytest.mark.parametrize("leave", ["continue", "break"])
def test_passes_that_may_end_without_a_step_are_refused(leave: str) -> None:
    head = "import torch\nimport horovod.torch as hvd\nhvd.init()\nmodel = torch.nn.Linear(1, 1)\n"
    wrapped = WRAPPED.replace("())", "(), backward_passes_per_step=2)")
    loop = "for i, x in enumerate(data):\n    model(x).mean().backward()\n"
    loop += f"    if i % 2:\n        {leave}\n    optimizer.step()\n"
    [found] = convert(f"{head}{MADE}\n{wrapped}\n{loop}").refused
    assert "the step may be skipped" in found.text
