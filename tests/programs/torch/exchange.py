"""Checkpoints to and from plain PyTorch files and safetensors. usage: exchange.py FOLDER

FOLDER/ddp and FOLDER/fsdp hold what plain scripts saved (plain_dcp.py); FOLDER/out/dcp is left for one to load.
PyTorch's own tools turn the files into DCP and back.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from cases import main, refused, train
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.__main__ import main as hvdtrain_main
from hvdtrain.torch import exchange
from hvdtrain.torch.plain_files import read, revived

FOLDER = Path(sys.argv[1])
EVIL = FOLDER / "code_has_run"


class Tied(nn.Module):
    """With running statistics, and two names for a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16)
        self.middle, self.last = nn.Linear(16, 16), nn.Linear(16, 3)
        self.other = self.middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.other(self.norm(self.first(x))))


def job(model: nn.Module, seed: int = 1) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    made = torch.Generator().manual_seed(0)
    data = hvt.loader((torch.randn(26, 6, generator=made), torch.arange(26) % 3), 4, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return *hvt.prepare(model, optimizer, data, verify=False), data


def trained(model: nn.Module, optimizer: Any, data: Any, updates: int) -> list[torch.Tensor]:
    loss_of = lambda model, x, y: nn.functional.cross_entropy(model(x), y)  # noqa: E731
    train(model, optimizer, itertools.islice(data, updates), loss_of)
    return [value.clone() for value in hvt.unwrap(model).state_dict().values()]


def restored(run: Path, model: nn.Module) -> tuple[Any, Any, Any, hvdtrain.Progress]:
    model, optimizer, data = job(model, seed=2)
    progress = hvdtrain.Checkpointer(run / "checkpoints").restore(hvt.model_state(model, optimizer))
    assert progress is not None
    return model, optimizer, data, progress


def same(one: Any, other: Any) -> bool:
    """Whether both are the same, of the same types, in the same order."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def through_dcp(source: Path, target: Path) -> None:
    folder = target.with_suffix(".dcp")
    torch_save_to_dcp(source, folder)
    dcp_to_torch_save(folder, target)


def case_there_and_back_is_the_same_bit_for_bit(world: hvdtrain.World) -> None:
    """Every file; and the run goes on as it would have: optimizer, place in the data, random numbers."""
    model, optimizer, data = job(Tied())
    trained(model, optimizer, data, 3)
    checkpoints = hvdtrain.Checkpointer(FOLDER / "run" / "checkpoints")
    state = hvt.model_state(model, optimizer, extra={"table": torch.arange(3.0), "note": "x"})
    path = checkpoints.save(state, progress=optimizer.progress, metrics={"val_loss": 0.5})
    checkpoints.wait()
    assert hvdtrain_main(["checkpoint", "export", str(FOLDER / "run"), "--to", "torch", str(FOLDER / "there")]) == 0
    plain = FOLDER / "there" / "checkpoint.pt"
    through_dcp(plain, FOLDER / "there-again.pt")
    expected = trained(model, optimizer, data, 2)
    for name, source in (("back", plain), ("back-dcp", FOLDER / "there-again.pt")):
        assert hvdtrain_main(["checkpoint", "import", str(source), "--into", str(FOLDER / name)]) == 0
        (back,) = hvdtrain.Checkpointer(FOLDER / name / "checkpoints").list()
        assert back.ok and back.path.name == path.name and back.metrics == {"val_loss": 0.5}
        assert (back.path / "extra.pt").read_bytes() == (path / "extra.pt").read_bytes()
        if name == "back":  # DCP writes both names of a tensor
            weights = [(its / "model.safetensors").read_bytes() for its in (back.path, path)]
            assert weights[0] == weights[1]
        assert same(read(back.path / "training.pt"), read(path / "training.pt"))
        again, optimizer_again, data_again, progress = restored(FOLDER / name, Tied())
        assert progress.step == 3 and progress.samples_in_epoch == 12
        assert all(map(torch.equal, trained(again, optimizer_again, data_again, 2), expected))


def lbfgs(seed: int, told: dict[str, Any]) -> tuple[Any, Any, Any]:
    """What keeps lists of tensors in its state; `told` are options of its group."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)
    optimizer.param_groups[0].update(told)
    made = torch.Generator().manual_seed(0)
    data = hvt.loader((torch.randn(32, 4, generator=made), torch.arange(32) % 3), 8, seed=3)
    return *hvt.prepare(model, optimizer, data, verify=False), data


def lbfgs_trained(model: nn.Module, optimizer: Any, data: Any, updates: int) -> list[torch.Tensor]:
    batches = iter(data)
    for _ in range(updates):
        x, y = next(batches)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.backward(loss)
            return loss

        optimizer.step(closure)
    return [value.clone() for value in hvt.unwrap(model).state_dict().values()]


def saved(name: str, model: nn.Module, optimizer: Any) -> Path:
    checkpoints = hvdtrain.Checkpointer(FOLDER / name / "checkpoints")
    path = checkpoints.save(hvt.model_state(model, optimizer), progress=optimizer.progress)
    checkpoints.wait()
    return path


OPTIONS = {"by_layer": {3: [None], (0, "b"): {True: {}}}, "an_array": np.ones(2), "lr": np.float64(0.1), "none": {}}


def case_lists_numbers_and_the_types_of_keys_come_back(world: hvdtrain.World) -> None:
    """LBFGS, with options of every kind; and it goes on as it would have. Plain scripts get numbers of Python."""
    model, optimizer, data = lbfgs(1, OPTIONS)
    lbfgs_trained(model, optimizer, data, 2)
    path = saved("lists", model, optimizer)
    exchange.export(FOLDER / "lists", FOLDER / "lists-there", "torch")
    plain = read(FOLDER / "lists-there" / "checkpoint.pt")
    assert list(plain["optim"]["state"]) == ["weight"] and type(plain["optim"]["param_groups"][0]["lr"]) is float
    back = exchange.import_(FOLDER / "lists-there" / "checkpoint.pt", FOLDER / "lists-back", progress={})
    assert (back / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()
    was, found = (revived(read(its / "training.pt"), np.generic.item) for its in (path, back))
    arrays = [its["optimizer"]["param_groups"][0].pop("an_array") for its in (was, found)]
    assert same(was, found) and type(arrays[1]) is np.ndarray and np.array_equal(*arrays)
    assert len(found["optimizer"]["state"][0]["old_dirs"]) > 1
    expected = lbfgs_trained(model, optimizer, data, 2)
    model, optimizer, data = lbfgs(2, {})
    hvdtrain.Checkpointer(FOLDER / "lists-back" / "checkpoints").restore(hvt.model_state(model, optimizer, data))
    assert all(map(torch.equal, lbfgs_trained(model, optimizer, data, 2), expected))


def case_lists_of_dcp_are_lists(world: hvdtrain.World) -> None:
    """DCP has text for the numbers of parameters; the optimizer goes on."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.eye(4)) - 1).pow(4).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, FOLDER / "plain.pt")
    through_dcp(FOLDER / "plain.pt", FOLDER / "plain-again.pt")
    back = exchange.import_(FOLDER / "plain-again.pt", FOLDER / "plain-back", optimizer_class="LBFGS", progress={})
    found = read(back / "training.pt")["optimizer"]
    assert same(found["state"], optimizer.state_dict()["state"])
    again = torch.optim.LBFGS((twin := copy.deepcopy(model)).parameters())
    again.load_state_dict(found)
    optimizer.step(closure)
    model, optimizer, expected = twin, again, model
    optimizer.step(closure)
    assert torch.equal(model.weight, expected.weight)


def case_parameters_without_a_name_are_refused_on_the_way_out(world: hvdtrain.World) -> None:
    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, FOLDER / "numbers.pt")
    run, out = FOLDER / "numbers", FOLDER / "numbers-there"
    exchange.import_(FOLDER / "numbers.pt", run, optimizer_class="AdamW", progress={})
    with refused("4 of 4 have none", "--to safetensors", kind=hvdtrain.ConfigError):
        exchange.export(run, out, "torch")
    assert not out.exists()
    exchange.export(run, out, "safetensors")


def case_weights_go_as_safetensors(world: hvdtrain.World) -> None:
    """Out: a file that anybody loads; in: that, or several files with parts."""
    model, optimizer, data = job(Tied())
    saved("weights", model, optimizer)
    out = FOLDER / "plain"
    exchange.export(FOLDER / "weights", out, "safetensors")
    bystander = Tied()
    safetensors.torch.load_model(bystander, out / "model.safetensors")
    assert hvt.fingerprint(bystander) == hvt.fingerprint(model)
    parts = FOLDER / "parts"
    parts.mkdir()
    tensors = safetensors.torch.load_file(out / "model.safetensors")
    for number, name in enumerate(tensors):
        safetensors.torch.save_file({name: tensors[name]}, parts / f"model-{number}.safetensors")
    for source in (out, out / "model.safetensors", parts):
        run = FOLDER / f"from-{source.name}"
        path = exchange.import_(source, run, progress={})
        if source != parts:  # of which no file knows a tensor's other name
            assert (path / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
        other = Tied()
        found = hvdtrain.Checkpointer(run / "checkpoints").restore(hvt.model_state(other))
        assert found == hvdtrain.Progress() and hvt.fingerprint(other) == hvt.fingerprint(model)


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def from_a_plain_script(engine: str) -> None:
    run, source = FOLDER / f"run-{engine}", FOLDER / engine
    with refused("tensors by name", "dcp_to_torch_save"):
        exchange.import_(source / "dcp", run, progress={})
    dcp_to_torch_save(source / "dcp", source / "plain.pt")
    with refused("the optimizer's class", "--optimizer AdamW"):
        exchange.import_(source / "plain.pt", run, progress={})
    told = [
        "checkpoint",
        "import",
        str(source / "plain.pt"),
        "--into",
        str(run),
        "--optimizer",
        "AdamW",
        "--epoch",
        "2",
    ]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert hvdtrain_main(told) == 0
    assert "continues with epoch 2, counted from 0, after 3 updates of 0 samples" in said.getvalue()
    model, optimizer, _, progress = restored(run, plain_model())
    assert (progress.epoch, progress.step) == (2, 3)
    whole, of_optimizer = torch.load(source / "whole.pt", weights_only=True)
    assert all(torch.equal(value, whole[name]) for name, value in hvt.unwrap(model).state_dict().items())
    names = [name for name, _ in hvt.unwrap(model).named_parameters()]
    state = optimizer.wrapped.state_dict()
    for number, name in enumerate(names):
        for key, value in of_optimizer["state"][name].items():
            assert torch.equal(state["state"][number][key], value), (name, key)
    assert state["param_groups"][0]["weight_decay"] == 0.1
    if engine == "fsdp":  # and back, for a plain script to load
        exchange.export(run, FOLDER / "out", "torch")
        torch_save_to_dcp(FOLDER / "out" / "checkpoint.pt", FOLDER / "out" / "dcp")


def case_what_two_processes_of_ddp_and_of_fsdp_saved(world: hvdtrain.World) -> None:
    for engine in ("ddp", "fsdp"):
        from_a_plain_script(engine)


def case_other_names_and_numbered_parameters(world: hvdtrain.World) -> None:
    """As a script has them that saves model.state_dict() and optimizer.state_dict() of a wrapped model."""
    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    weights = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    source = FOLDER / "names.pt"
    for names in (("net", "how"), ("model", "how")):
        torch.save(dict(zip(names, ({"weights": weights}, optimizer.state_dict()), strict=True)), source)
        with refused("tensors by name", '"model": model.state_dict()', kind=hvdtrain.ConfigError):
            exchange.import_(source, FOLDER / "run-names", progress={})
    torch.save({"model": weights, "optim": {"state.0.step": 1}}, source)
    with refused("param_groups", "state.0.step", kind=hvdtrain.ConfigError):
        exchange.import_(source, FOLDER / "run-names", optimizer_class="AdamW", progress={})
    torch.save({"model_state_dict": weights, "optimizer_state_dict": optimizer.state_dict(), "epoch": 3}, source)
    exchange.import_(source, FOLDER / "run-names", optimizer_class="AdamW", progress={"step": 9})
    found, its_optimizer, _, progress = restored(FOLDER / "run-names", plain_model())
    assert progress.step == 9
    assert all(map(torch.equal, found.state_dict().values(), model.state_dict().values()))
    for mine, its in zip(its_optimizer.wrapped.state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(mine["exp_avg_sq"], its["exp_avg_sq"]) and float(mine["step"]) == 1
    torch.save(weights, source)
    path = exchange.import_(source, FOLDER / "run-bare", progress={})
    assert {file.name for file in path.iterdir()} == {"manifest.json", "model.safetensors"}


class Evil:
    def __reduce__(self) -> Any:
        return open, (str(EVIL), "w")


def case_what_would_run_code_is_refused(world: hvdtrain.World) -> None:
    """Or cannot be read at all. The twin: PyTorch's own reader runs it."""
    packed = io.BytesIO()
    torch.save(Evil(), packed)
    inner = torch.frombuffer(bytearray(packed.getvalue()), dtype=torch.uint8)
    source, weights = FOLDER / "evil.pt", {"w": torch.ones(2)}
    for bad in (Evil(), {"model": weights, "optim": Evil()}, {"model": weights, "hvdtrain": inner}):
        torch.save(bad, source)
        with refused("without running code", "open", kind=hvdtrain.CheckpointError):
            exchange.import_(source, FOLDER / "none", progress={})
    (FOLDER / "text.pt").write_text("text")
    for name in ("text.pt", "nowhere.pt", "text.safetensors"):
        with refused(name, kind=hvdtrain.CheckpointError):
            exchange.import_(FOLDER / name, FOLDER / "none", progress={})
    assert not EVIL.exists() and not (FOLDER / "none").exists()
    torch.save({"model": weights, "optim": Evil()}, source)
    torch.load(source, weights_only=False)
    assert EVIL.exists()


def case_what_is_there_stays(world: hvdtrain.World) -> None:
    with refused("a directory of its own"):
        exchange.export(FOLDER / "run", FOLDER / "there", "torch")
    with refused("an export needs a checkpoint"):
        exchange.export(FOLDER / "nowhere", FOLDER / "new", "torch")
    for source in (FOLDER / "run", FOLDER / "list.pt"):
        torch.save([1], FOLDER / "list.pt")
        with refused("no tensors"):
            exchange.import_(source, FOLDER / "none", progress={})


if __name__ == "__main__":
    main(globals().copy(), "solo")
