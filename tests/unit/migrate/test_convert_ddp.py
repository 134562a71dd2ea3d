"""Horovod scripts in, scripts of plain PyTorch out: text to text; and what is refused, each line with its reason."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from horovod_scripts import FOLDER

from hvdtrain.migrate.convert import Conversion, convert
from hvdtrain.migrate.script.plan import DDP

HEAD = """\
import horovod.torch as hvd
import torch

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
"""
WRAP = HEAD + "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n"
LOOP = "for x in data:\n    optimizer.zero_grad()\n    model(x).mean().backward()\n    optimizer.step()\n"
WRAPPED = "model = DistributedDataParallel(model, broadcast_buffers=False)\n"


def moved(text: str) -> str:
    """The new script; it compiles, and has nothing of Horovod's or hvdtrain's left."""
    found = convert(textwrap.dedent(text), DDP)
    assert not found.refused, found.refused
    compile(found.text, "new.py", "exec")
    assert not re.search("horovod|hvd|hvt", re.sub('#.*|"[^"]*"', "", found.text))
    return found.text


def refused(text: str) -> list[tuple[int, str]]:
    """Line and reason of what is refused; the script is as it was."""
    found: Conversion = convert(text, DDP)
    assert found.refused and found.text == text
    return [(finding.line, finding.text) for finding in found.refused]


def test_a_whole_script() -> None:
    text = '''\
        """Trains."""

        import horovod.torch as hvd  # as ever
        import torch
        from torch import nn


        def save(model):
            if hvd.rank() == 0:
                torch.save(model.state_dict(), f"{hvd.local_rank()}.pt")


        def main():
            hvd.init()
            model = nn.Linear(3, 1)  # plain
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
            # Horovod: wrap optimizer with DistributedOptimizer.
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # rank 0's
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            for x in loader( ):
                model.train()
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                with optimizer.skip_synchronize():
                    optimizer.step()
            save(model)
            print(model.weight, hvd.local_size())
            hvd.shutdown()
        '''
    new = '''\
        """Trains."""

        import os
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        import torch
        from torch import nn


        def broadcast_state(state, source=0):
            """Gives one rank's weights and buffers to all ranks, in place."""
            for tensor in state.values():
                sent = tensor.detach().clone(memory_format=torch.contiguous_format)
                dist.broadcast(sent, source)
                tensor.copy_(sent)


        def broadcast_value(value, source=0):
            """Returns one rank's object, on all ranks."""
            values = [value]
            dist.broadcast_object_list(values, source)
            return values[0]


        def save(model):
            if dist.get_rank() == 0:
                torch.save(model.module.state_dict(), f"{int(os.environ['LOCAL_RANK'])}.pt")


        def main():
            dist.init_process_group("gloo")
            model = nn.Linear(3, 1)  # plain
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
            # Horovod: wrap optimizer with DistributedOptimizer.
            model = DistributedDataParallel(model, broadcast_buffers=False)
            broadcast_state(model.module.state_dict())  # rank 0's
            optimizer.load_state_dict(broadcast_value(optimizer.state_dict()))
            for x in loader( ):
                model.train()
                optimizer.zero_grad()
                model(x).mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            save(model)
            print(model.module.weight, int(os.environ["LOCAL_WORLD_SIZE"]))
            dist.destroy_process_group()
        '''
    assert moved(text) == textwrap.dedent(new)


@pytest.mark.parametrize(
    "old, new",
    [
        ("hvd.allreduce(x.detach())", "reduce_tensor(x.detach())"),
        ("hvd.allreduce(x.detach(), op=hvd.Max)", 'reduce_tensor(x.detach(), "max")'),
        ("hvd.allreduce(a + b).item()", "reduce_tensor((a + b).detach()).item()"),
        ("hvd.allreduce_(x)", "x.data.copy_(reduce_tensor(x))"),
        ("hvd.grouped_allreduce([a, b])", "[reduce_tensor(tensor) for tensor in [a, b]]"),
        ("hvd.allgather(x)", "gather_tensors(x)"),
        ("hvd.broadcast(x, root_rank=1)", "broadcast_tensor(x, 1)"),
        ("hvd.broadcast_(x, 0)", "x.data.copy_(broadcast_tensor(x.data))"),
        ("hvd.broadcast_object(x, root_rank=2)", "broadcast_value(x, 2)"),
        ("hvd.allgather_object(hvd.rank())", "gather_values(dist.get_rank())"),
        ("hvd.barrier()", "dist.barrier()"),
        ("hvd.is_initialized()", "dist.is_initialized()"),
        ("hvd.SyncBatchNorm(4)", "torch.nn.SyncBatchNorm(4)"),
    ],
)
def test_metrics_and_objects(old: str, new: str) -> None:
    assert moved(f"import horovod.torch as hvd\nhvd.init()\ny = {old}\n").endswith(f"\ny = {new}\n")


def test_a_script_that_uses_gpus() -> None:
    new = moved(HEAD.replace("Linear(2, 1)", "Linear(2, 1).cuda()"))
    assert 'init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")\n' in new
    assert '    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n' in new
    new = moved(HEAD.replace("model =", "torch.cuda.set_device(hvd.local_rank())\nmodel ="))
    assert new.count("set_device") == 1 and 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\nmodel =' in new


# -- where the wrapped model goes ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "old, new",
    [
        ("model.state_dict()", "model.module.state_dict()"),
        ("model.load_state_dict(x)", "model.module.load_state_dict(x)"),
        ("model.named_parameters()", "model.module.named_parameters()"),
        ("model.weight", "model.module.weight"),
        ("model[0].weight", "model.module[0].weight"),
        ("copy(model.fc.state_dict())", "copy(model.module.fc.state_dict())"),
        ("isinstance(model, torch.nn.Linear)", "isinstance(model.module, torch.nn.Linear)"),
        ("torch.save(model, 'm.pt')", "torch.save(model.module, 'm.pt')"),
        ("list(model.parameters())", "list(model.parameters())"),
        ("model.eval()", "model.eval()"),
        ("model is None", "model is None"),
    ],
)
def test_the_plain_model_is_asked_for_what_is_its_own(old: str, new: str) -> None:
    text = moved(f"{WRAP}{LOOP}y = {old}\n")
    assert WRAPPED in text and text.endswith(f"\ny = {new}\n")
    # before it is wrapped the model is the plain one
    early = moved(WRAP.replace("optimizer = hvd", f"y = {old}\noptimizer = hvd") + LOOP)
    assert f"\ny = {old}\n{WRAPPED}" in early


def test_it_is_followed_into_functions_attributes_and_what_is_returned() -> None:
    text = """\
        import horovod.torch as hvd
        import torch


        class Trainer:
            def __init__(self, net):
                hvd.init()
                self.net = net
                self.optimizer = self.build(0.1)

            def build(self, lr):
                optimizer = torch.optim.SGD(self.net.parameters(), lr=lr)
                return hvd.DistributedOptimizer(optimizer, named_parameters=self.net.named_parameters())

            def step(self, x):
                loss = self.net(x).mean()
                loss.backward()
                self.optimizer.step()

            def save(self):
                return store(self.net, "m.pt")


        def store(module, path):
            torch.save(module.state_dict(), path)
            return module


        plain = torch.nn.Linear(1, 1)
        trainer = Trainer(plain)
        trainer.step(x)
        same = trainer.save()
        print(same.weight, plain.weight)
        """
    new = moved(text)
    wrapped = "self.net = DistributedDataParallel(self.net, broadcast_buffers=False)\n        return optimizer\n"
    assert wrapped in new and "torch.save(module.module.state_dict(), path)" in new
    assert "print(same.module.weight, plain.weight)" in new


AGAIN = "def save(m):\n    torch.save(m.state_dict(), 'm.pt')\n\n\n"
BUILD = """\
import horovod.torch as hvd
import torch


def build(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())


hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = build(model)
"""


@pytest.mark.parametrize(
    "text, at, reason",
    [
        # the plain model would be called, and nobody would average
        (BUILD + LOOP, "    model(x)", "may be the plain model here"),
        (WRAP.replace("optimizer = torch", "other = model\noptimizer = torch") + LOOP.replace("model(", "other("),
         "    other(x)", "may be the plain model here"),
        (WRAP + "models = [model]\n" + LOOP, "models = [model]", "goes where it cannot be followed"),
        (WRAP.replace("optimizer = torch", "m = Both(model)\noptimizer = torch") + LOOP.replace("model(", "m("),
         "m = Both(model)", "Both is given model, and may call it"),
        (WRAP + LOOP.replace("model(x)", "model.body(x)"), "model.body(x)", "model.body() may run a part of the model"),
        (WRAP + LOOP.replace("model(x)", "model[0](x)"), "model[0](x)", "model[0]() may run a part of the model"),
        (WRAP + LOOP.replace("model(x)", "run(model, x)"), "run(model, x)", "run is given model, and may call it"),
        (WRAP + LOOP.replace("model(x)", "f(x)"), "f(x).mean().backward()", "no call of a wrapped model stands before"),
        (WRAP + "out = model(x)\nfor loss in losses(out):\n    loss.backward()\noptimizer.step()\n",
         "    loss.backward()", "no call of a wrapped model stands before"),
        (WRAP + "a = model(x)\nb = model(y)\na.backward()\nb.backward()\noptimizer.step()\n", "b.backward()",
         "no call of a wrapped model stands before"),
        (WRAP + "first = model[0]\n" + LOOP, "first = model[0]", "a part of the model under another name"),
        (WRAP.replace("optimizer = torch", "body = model.body\noptimizer = torch") + LOOP, "body = model.body",
         "a part of the model under another name"),
        (WRAP + LOOP.replace("model(x)", "go(model.body, model(x))"), "go(model.body", "under another name"),
        (WRAP + LOOP + "for layer in model.children():\n    x = layer(x)\n", "in model.children()",
         "under another name"),
        (WRAP + LOOP.replace("model(x)", "model.forward(x)"), "model.forward(x)", "may run a part"),
        (WRAP + "model.training = False\n" + LOOP, "model.training", "changes the model after it is wrapped"),
        # what would be looked for in the wrapped one, and found under another name
        (WRAP + "pair = (model, optimizer)\n" + LOOP + "f(pair[0].state_dict())\n", "pair =", "cannot be followed"),
        (WRAP + LOOP + "f((model if a else b).state_dict())\n", "if a else b", "cannot be followed"),
        (WRAP + "def get():\n    return model\n" + LOOP + "f(get().state_dict())\n", "f(get()",
         "get() returns a model"),
        (WRAP + "def get():\n    return model, 3\n" + LOOP + "both = get()\n", "both =", "get() returns a model"),
        (WRAP + "def get():\n    return model\n" + LOOP.replace("model(x)", "get()(x)"), "get()(x)", "returns a model"),
        (WRAP.replace("optimizer = torch", "save = lambda: f(model.state_dict())\noptimizer = torch") + LOOP, "save =",
         "at one time, and not at another"),
        (WRAP.replace("optimizer = torch", "def save():\n    f(model.state_dict())\nsave()\noptimizer = torch") + LOOP
         + "at_exit(save)\n", "    f(model", "at one time, and not at another"),
        # and where it is one at one time, and not at another
        (WRAP.replace("optimizer = torch", f"{AGAIN}save(model)\noptimizer = torch") + LOOP + "save(model)\n",
         "torch.save(m.state_dict()", "m.state_dict is asked of what is the wrapped model at one time"),
        (WRAP + AGAIN + LOOP + "save(model)\nsave(teacher)\n", "torch.save(m.state_dict()", "at one time"),
        # what would be changed behind DistributedDataParallel's back
        (WRAP + "model = model.cuda()\n" + LOOP, "model = model.cuda()", "assigned anew"),
        (WRAP + "model.half()\n" + LOOP, "model.half()", "changes the model after it is wrapped"),
        (WRAP + "model.fc = torch.nn.Linear(1, 1)\n" + LOOP, "model.fc =", "changes the model after it is wrapped"),
        (WRAP + "model.requires_grad_(False)\n" + LOOP, "model.requires_grad_", "frozen after they are wrapped"),
        (WRAP + "for p in model.parameters():\n    p.requires_grad = False\n" + LOOP, "    p.requires_grad", "frozen"),
        (WRAP + "other = hvd.DistributedOptimizer(optimizer, model.named_parameters())\n" + LOOP, "other = hvd",
         "a second optimizer of model"),
    ],
)  # fmt: skip
def test_what_would_be_wrong_and_say_nothing_is_refused(text: str, at: str, reason: str) -> None:
    found = refused(text)
    lines = text.splitlines()
    assert any(at in lines[line - 1] and reason in said for line, said in found), found


def test_the_plain_model_may_be_called_where_nothing_is_differentiated() -> None:
    watch = "with torch.no_grad():\n    print(plain(x), model.body(x))\n"
    new = moved(WRAP.replace("optimizer = torch", "plain = model\noptimizer = torch") + LOOP + watch)
    assert "print(plain(x), model.module.body(x))" in new


def test_methods_of_the_scripts_own_that_run_no_part() -> None:
    net = (
        "class Net(torch.nn.Module):\n    def count(self):\n        return sum(p.numel() for p in self.parameters())\n"
    )
    net += "    def encode(self, x):\n        return self.body(x)\n\n\n"
    text = WRAP.replace("hvd.init()\nmodel = torch.nn.Linear(2, 1)", f"{net}hvd.init()\nmodel = Net()")
    assert "print(model.module.count())" in moved(text + LOOP + "print(model.count())\n")
    assert "may run a part" in refused(text + LOOP + "print(model.encode(x))\n")[0][1]


def test_attributes_of_one_name_in_two_classes_are_refused() -> None:
    text = """\
import horovod.torch as hvd


class Trainer:
    def __init__(self, net):
        self.net = net
        self.opt = hvd.DistributedOptimizer(SGD(self.net.parameters()), named_parameters=self.net.named_parameters())


class Average:
    def __init__(self, net):
        self.net = net
"""
    [(line, reason)] = refused(text)
    assert line == 7 and "attributes net of several classes" in reason


def test_settings_are_no_models() -> None:
    new = moved(
        f"{WRAP}{LOOP}print(args.model, build(args.model))\n".replace("model", "self.model").replace(
            "args.self.", "args."
        )
    )
    assert "print(args.model, build(args.model))" in new and "self.model = Dist" in new


def test_layers_that_are_looked_at_are_no_passes() -> None:
    loop = "for layer in model.modules():\n    if isinstance(layer, torch.nn.BatchNorm1d):\n        layer.eval()\n"
    assert loop.replace("model.", "model.module.") in moved(WRAP + LOOP + loop)


def test_a_model_that_is_built_elsewhere() -> None:
    build = "def build():\n    return torch.nn.Linear(2, 1)\n\n\n"
    for made in ("model = build().to(gpu)", "model, other = build(), 3"):
        new = moved(
            WRAP.replace("model = torch.nn.Linear(2, 1)", made).replace("hvd.init()", f"{build}hvd.init()") + LOOP
        )
        assert WRAPPED in new and made in new


def test_the_model_within_another_is_called_as_the_plain_one() -> None:
    both = "class Both(torch.nn.Module):\n    def __init__(self, inner):\n        self.inner = inner\n"
    both += "    def forward(self, x):\n        return self.inner(x)\n\n\n"
    text = WRAP.replace("hvd.init()", f"{both}hvd.init()").replace(
        "optimizer = torch", "m = Both(model)\noptimizer = torch"
    )
    assert (8, "self.inner may be the plain model here") in [
        (line, reason.split(",")[0]) for line, reason in refused(text + LOOP.replace("model(x)", "m(x)"))
    ]


def test_two_models() -> None:
    text = WRAP + WRAP.split("\n", 4)[4].replace("model", "critic").replace("optimizer", "other")
    loop = "for x in data:\n    critic(model(x).detach()).mean().backward()\n    other.step()\n"
    loop += "    critic(model(x)).mean().backward()\n    optimizer.step()\n"
    new = moved(text + loop + "f(model.state_dict())\n")
    assert (
        WRAPPED in new and WRAPPED.replace("model", "critic") in new and new.endswith("f(model.module.state_dict())\n")
    )


def test_an_average_of_weights_is_a_copy() -> None:
    text = WRAP + "average = copy.deepcopy(model)\n" + LOOP + "def show(m):\n    with torch.no_grad():\n"
    new = moved(text + "        print(m(x))\n\n\nshow(model)\nshow(average)\n")
    assert "average = copy.deepcopy(model.module)\n" in new and "print(m(x))" in new


def test_two_branches_each_with_a_pass() -> None:
    loop = (
        "loss = model(x)\nif half:\n    scaler.scale(loss).backward()\nelse:\n    loss.backward()\noptimizer.step()\n"
    )
    assert loop in moved(WRAP + loop)


# -- arguments ----------------------------------------------------------------------------------------------------
def with_arguments(arguments: str) -> str:
    return WRAP.replace("named_parameters())", f"named_parameters(), {arguments})") + LOOP


@pytest.mark.parametrize(
    "arguments, new",
    [
        ("compression=hvd.Compression.none", ""),
        ("compression=hvd.Compression.fp16", "model.register_comm_hook(None, fp16_compress_hook)\n"),
        ("compression=hvd.Compression.fp16 if args.half else hvd.Compression.none",
         "if args.half:\n    model.register_comm_hook(None, fp16_compress_hook)\n"),
        ("op=hvd.Average, num_groups=2, gradient_predivide_factor=2.0", ""),
    ],
)  # fmt: skip
def test_arguments_that_are_moved(arguments: str, new: str) -> None:
    text = moved(with_arguments(arguments))
    assert f"{WRAPPED}{new}for x" in text
    notes = convert(with_arguments(arguments), DDP).notes
    assert [note.line for note in notes if "nothing broadcasts" not in note.text] == (
        [7] if "fp16" in arguments else []
    )


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ("op=hvd.Sum", "op=hvd.Sum"),
        ("op=hvd.Adasum", "op=Adasum"),
        ("process_set=s", "process set"),
        ("sparse_as_dense=True", "sparse gradients"),
    ],
)
def test_arguments_that_are_refused(arguments: str, reason: str) -> None:
    assert any(line == 7 and reason in said for line, said in refused(with_arguments(arguments)))


TWO = WRAP.replace("named_parameters())", "named_parameters(), backward_passes_per_step=2)")
MAY = " else contextlib.nullcontext():\n"


@pytest.mark.parametrize(
    "loop, new",
    [
        ("for i in range(0, len(x), 8):\n    # a part\n    y = model(x[i])\n    f(y).backward()\noptimizer.step()\n",
         f"    # a part\n    with model.no_sync() if i + 8 < len(x){MAY}        y = model(x[i])\n        f(y).back"),
        ("for i, x in d:\n    print(i)\n    model(x).backward()\n    if (i + 1) % 2 == 0:\n        optimizer.step()\n",
         f"    print(i)\n    with model.no_sync() if (i + 1) % 2 != 0{MAY}        model(x).backward()\n    if (i"),
        ("model(a).backward()\nmodel(b).backward()\noptimizer.step()\n",
         "with model.no_sync():\n    model(a).backward()\nmodel(b).backward()\noptimizer.step()\n"),
    ],
)  # fmt: skip
def test_passes_of_an_update_are_kept_back_but_for_the_last(loop: str, new: str) -> None:
    assert new in moved(TWO + loop)
    assert new in moved(TWO.replace("_step=2", "_step=2, compression=hvd.Compression.fp16") + loop)


@pytest.mark.parametrize(
    "loop",
    [
        "for x in data:\n    model(x).mean().backward()\noptimizer.step()\n",
        "for x in d:\n    y = model(x)\n    i = y + 1\n    y.backward()\n    if i % 2:\n        optimizer.step()\n",
    ],
)
def test_passes_of_which_the_last_cannot_be_told_are_averaged_one_by_one(loop: str) -> None:
    found = convert(TWO + loop, DDP)
    assert found.text.endswith(loop) and len(found.notes) == 2 and "no_sync" in found.notes[1].text
    [(line, reason)] = refused(TWO.replace("_step=2", "_step=2, compression=hvd.Compression.fp16") + loop)
    assert line == found.notes[-1].line and "Horovod rounds their sum" in reason


@pytest.mark.parametrize(
    "line, reason",
    [
        ("hvd.join()", "join.Join([model])"),
        ("hvd.elastic.run(f)", "torchrun --max-restarts"),
        ("s = hvd.add_process_set([0])", "dist.new_group"),
        ("import horovod\nhorovod.run(f, np=2)", "torchrun starts the ranks"),
        ("a = hvd.alltoall(t)", "hvd.alltoall has no counterpart in torch.distributed"),
        ("h = hvd.allreduce_async_(p.grad)", "the call that waits"),
        ("hvd.broadcast_parameters(dict(model.named_parameters()), 0)", "model.state_dict()"),
        ("hvd.allreduce(model(x)).backward()", "hvd.allreduce within a loss has a gradient, which reduce_tensor has"),
        ("optimizer.step(again)", "step(closure)"),
        ("loss.backward(create_graph=True)", "create_graph"),
        ("torch.autograd.backward(loss)", "what is moved is loss.backward()"),
        ("def f():\n    import horovod.torch as hvd", "at the top of the script"),
    ],
)
def test_what_cannot_be_moved_is_told_with_its_line(line: str, reason: str) -> None:
    found = refused(f"{WRAP}{line}\n")
    assert any(at == 8 + line.count("\n") and reason in said for at, said in found), found


def test_names_that_the_script_has_itself() -> None:
    assert refused(WRAP + "dist = 3\n") == [(1, "the script has a name dist of its own")]
    own = moved("import torch.distributed as dist\n" + WRAP + "print(dist.is_available())\n")
    assert own.count("import torch.distributed as dist") == 1


def test_a_script_of_keras_is_refused() -> None:
    text = "import horovod.keras as hvd\nhvd.init()\nprint(hvd.rank())\n"
    [(line, reason)] = refused(text)
    assert line == 1 and "--to hvdtrain" in reason


REFUSED = {
    "torch_elastic.py": [13, 26, 43, 43],
    "torch_gan.py": [50, 51, 52, 53, 57, 59, 60, 68, 68],
    "torch_join.py": [27, 29],
    "torch_process_sets.py": [9, 12, 13, 26, 28],
}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("torch_*.py")), ids=lambda path: path.stem)
def test_the_fifteen_scripts(path: Path) -> None:
    text = path.read_text()
    if path.name in REFUSED:
        assert [line for line, _ in refused(text)] == REFUSED[path.name]
    else:
        moved(text)
