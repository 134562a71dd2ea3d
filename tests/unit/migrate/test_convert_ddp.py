"""Horovod scripts in, scripts of plain PyTorch out: text to text; and what is refused, each line with its reason."""

from __future__ import annotations

import copy
import functools
import pickle
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvdtrain.migrate.convert import Conversion, convert
from hvdtrain.migrate.ddp.calls import FUNCTIONS, MODEL
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
WRAPPED = "model = DistributedModel(model, broadcast_buffers=False)\n"


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

        import copy
        import os
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        import torch
        from torch import nn


        CLASS
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
                torch.save(model.state_dict(), f"{int(os.environ['LOCAL_RANK'])}.pt")


        def main():
            dist.init_process_group("gloo")
            model = nn.Linear(3, 1)  # plain
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
            # Horovod: wrap optimizer with DistributedOptimizer.
            model = DistributedModel(model, broadcast_buffers=False)
            broadcast_state(model.state_dict())  # rank 0's
            optimizer.load_state_dict(broadcast_value(optimizer.state_dict()))
            for x in loader( ):
                model.train()
                optimizer.zero_grad()
                model(x).mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            save(model)
            print(model.weight, int(os.environ["LOCAL_WORLD_SIZE"]))
            dist.destroy_process_group()
        '''
    assert moved(text) == textwrap.dedent(new).replace("CLASS\n", f"{FUNCTIONS[MODEL].lstrip()}\n\n")


@pytest.mark.parametrize(
    "old, new",
    [
        ("hvd.allreduce(x.detach())", "reduce_tensor(x.detach())"),
        ("hvd.allreduce(x.detach(), op=hvd.Max)", 'reduce_tensor(x.detach(), "max")'),
        ("hvd.allreduce_(x)", "x.data.copy_(reduce_tensor(x))"),
        ("hvd.broadcast_(x, 0)", "x.data.copy_(broadcast_tensor(x.data))"),
        ("hvd.allgather_object(hvd.rank())", "gather_values(dist.get_rank())"),
        ("hvd.is_initialized()", "dist.is_initialized()"),
        ("hvd.SyncBatchNorm(4)", "torch.nn.SyncBatchNorm(4)"),
    ],
)
def test_metrics_and_objects(old: str, new: str) -> None:
    assert moved(f"import horovod.torch as hvd\nhvd.init()\ny = {old}\n").endswith(f"\ny = {new}\n")


# -- the wrapped model --------------------------------------------------------------------------------------------
class Net(nn.Module):
    """A plain model with attributes, methods and buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.classes = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.head(x))

    def doubled(self, x: int) -> int:
        return 2 * x * self.classes


@pytest.fixture
def wraps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[nn.Module], Any]]:
    """Makes the class of the new script, in a world of one process."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # DistributedDataParallel sets it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    names: dict[str, Any] = {"DistributedDataParallel": DistributedDataParallel, "copy": copy}
    exec(FUNCTIONS[MODEL], names)
    yield functools.partial(names[MODEL], broadcast_buffers=False)
    dist.destroy_process_group()


def test_the_wrapped_model_is_asked_as_the_plain_one(wraps: Callable[[nn.Module], Any]) -> None:
    plain = Net()
    model = wraps(plain)
    assert model.classes == 3 and model.doubled(2) == 12 and model.head is plain.head
    assert wraps(nn.Sequential(plain))[0] is plain
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
        model.nothing  # noqa: B018
    for of in ("named_parameters", "named_buffers", "named_modules"):
        assert [name for name, _ in getattr(model, of)()] == [name for name, _ in getattr(plain, of)()]
    both = nn.ModuleDict({"a": model})
    assert list(both.state_dict()) == [f"a.{name}" for name in plain.state_dict()]
    model(torch.ones(4, 2)).sum().backward()
    assert plain.head.weight.grad is not None


def test_checkpoints_and_copies_are_the_plain_models(wraps: Callable[[nn.Module], Any]) -> None:
    plain = Net()
    model = wraps(plain)
    state = {name: torch.full_like(tensor, 2) for name, tensor in plain.state_dict().items()}
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state)
    assert torch.equal(plain.head.weight, torch.full((3, 2), 2.0))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied) is Net and copied.head.weight is not plain.head.weight
        assert torch.equal(copied.head.weight, plain.head.weight)


def test_it_is_asked_for_its_class_as_the_plain_one() -> None:
    early, late = "print(isinstance(model, torch.nn.Linear))\n", 'isinstance(getattr(model, "module", model), torch'
    new = moved(WRAP.replace("optimizer = hvd", f"{early}optimizer = hvd") + early + LOOP)
    assert early in new and new.count(late) == 1 and new.index(late) > new.index(WRAPPED)


@pytest.mark.parametrize(
    "name", ["HOROVOD_RANK", "HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK"]
)
def test_variables_of_horovodruns_are_refused(name: str) -> None:
    [(line, reason)] = refused(f"{WRAP}{LOOP}rank = int(os.environ['{name}'])\n")
    assert line == 12 and name in reason and "LOCAL_RANK" in reason
    moved(f"{WRAP}{LOOP}rank = int(os.environ['MY_{name}'])\nuses = 'no {name}'\n")


# -- arguments ----------------------------------------------------------------------------------------------------
def with_arguments(arguments: str) -> str:
    return WRAP.replace("named_parameters())", f"named_parameters(), {arguments})") + LOOP


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


@pytest.mark.parametrize(
    "line, reason",
    [
        ("hvd.join()", "join.Join([model])"),
        ("hvd.elastic.run(f)", "torchrun --max-restarts"),
        ("s = hvd.add_process_set([0])", "dist.new_group"),
        ("import horovod\nhorovod.run(f, np=2)", "torchrun starts the ranks"),
        ("a = hvd.alltoall(t)", "hvd.alltoall has no counterpart in torch.distributed"),
        ("hvd.broadcast_parameters(dict(model.named_parameters()), 0)", "model.state_dict()"),
        ("def f():\n    import horovod.torch as hvd", "at the top of the script"),
    ],
)
def test_what_cannot_be_moved_is_told_with_its_line(line: str, reason: str) -> None:
    found = refused(f"{WRAP}{line}\n")
    assert any(at == 8 + line.count("\n") and reason in said for at, said in found), found
