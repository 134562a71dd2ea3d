"""Checkpoints to and from DCP and safetensors. usage: exchange.py FOLDER

FOLDER/ddp and FOLDER/fsdp hold what plain scripts saved (plain_dcp.py); FOLDER/out/dcp is left for one to load.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from cases import refused, run_cases
from torch import nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.__main__ import main as hvdtrain_main
from hvdtrain.torch import exchange
from hvdtrain.torch.plain_files import _plain, read

FOLDER = Path(sys.argv[1])
EVIL = FOLDER / "code_has_run"


class Tied(nn.Module):
    """With running statistics, and two names for a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.middle, self.last = (
            nn.Linear(6, 16),
            nn.BatchNorm1d(16),
            nn.Linear(16, 16),
            nn.Linear(16, 3),
        )
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
    batches = iter(data)
    for _ in range(updates):
        x, y = next(batches)
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
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


def case_there_and_back_is_the_same_bit_for_bit(world: hvdtrain.World) -> None:
    """Every file; and the run goes on as it would have: optimizer, place in the data, random numbers."""
    model, optimizer, data = job(Tied())
    trained(model, optimizer, data, 3)
    checkpoints = hvdtrain.Checkpointer(FOLDER / "run" / "checkpoints")
    state = hvt.model_state(model, optimizer, extra={"table": torch.arange(3.0), "note": "x"})
    path = checkpoints.save(state, progress=optimizer.progress, metrics={"val_loss": 0.5})
    checkpoints.wait()
    assert hvdtrain_main(["checkpoint", "export", str(FOLDER / "run"), "--to", "dcp", str(FOLDER / "there")]) == 0
    assert hvdtrain_main(["checkpoint", "import", str(FOLDER / "there"), "--into", str(FOLDER / "back")]) == 0
    (back,) = hvdtrain.Checkpointer(FOLDER / "back" / "checkpoints").list()
    assert back.ok and back.path.name == path.name and back.metrics == {"val_loss": 0.5}
    for name in ("model.safetensors", "extra.pt"):
        assert (back.path / name).read_bytes() == (path / name).read_bytes(), name
    assert same(read(back.path / "training.pt"), read(path / "training.pt"))
    expected = trained(model, optimizer, data, 2)
    again, optimizer_again, data_again, progress = restored(FOLDER / "back", Tied())
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


TOLD = {
    "by_layer": {3: [None], 1.5: {}, "3.": (1, {2: np.float32(0.1)}), (0, "b"): {True: {}}},
    "with_gaps": [{}, torch.ones(2), [{}], [], [[1], (2,)], {}],
    "left_out": [{}, {}],
    "nothing": {},
    "lr": np.float64(0.1),
}


def case_lists_and_the_types_of_keys_come_back(world: hvdtrain.World) -> None:
    """LBFGS, with options of every kind; and it goes on as it would have."""
    model, optimizer, data = lbfgs(1, TOLD)
    lbfgs_trained(model, optimizer, data, 2)
    path = saved("lists", model, optimizer)
    exchange.export(FOLDER / "lists", FOLDER / "lists-there", "dcp", model="model", optimizer="optim")
    back = exchange.import_(FOLDER / "lists-there", FOLDER / "lists-back")
    assert (back / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()
    assert same(read(path / "training.pt"), read(back / "training.pt"))
    assert len(read(back / "training.pt")["optimizer"]["state"][0]["old_dirs"]) > 1
    expected = lbfgs_trained(model, optimizer, data, 2)
    model, optimizer, data = lbfgs(2, {})
    hvdtrain.Checkpointer(FOLDER / "lists-back" / "checkpoints").restore(hvt.model_state(model, optimizer, data))
    assert all(map(torch.equal, lbfgs_trained(model, optimizer, data, 2), expected))


def case_what_another_program_added_since_stays(world: hvdtrain.World) -> None:
    """One that loads what was exported, ours with it, goes on, and saves it all: what it has counts."""
    told = {name: value for name, value in TOLD.items() if name != "with_gaps"}  # which no dcp.load reads
    model, optimizer, data = lbfgs(1, told)
    lbfgs_trained(model, optimizer, data, 1)
    directions = len(optimizer.wrapped.state_dict()["state"][0]["old_dirs"])
    saved("changed", model, optimizer)
    exchange.export(FOLDER / "changed", FOLDER / "changed-there", "dcp", model="model", optimizer="optim")
    state: dict[str, Any] = {}
    dcp.state_dict_loader._load_state_dict(  # all of it, as torch.distributed.checkpoint.format_utils does
        state, dcp.FileSystemReader(FOLDER / "changed-there"), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    group, (its,) = state["optim"]["param_groups"][0], state["optim"]["state"].values()
    group["lr"], group["more"] = 0.5, [torch.zeros(1), {"new": 2}]
    its["old_dirs"].append(torch.full((15,), 7.0))
    dcp.save(state, checkpoint_id=FOLDER / "changed-again", no_dist=True)
    back = exchange.import_(FOLDER / "changed-again", FOLDER / "changed-back")
    found = read(back / "training.pt")["optimizer"]
    assert same(found["param_groups"][0]["by_layer"], plain_file(TOLD["by_layer"]))
    assert same(found["param_groups"][0]["more"], [torch.zeros(1), {"new": 2}])
    assert float(found["param_groups"][0]["lr"]["numpy.generic"]) == 0.5
    assert len(found["state"][0]["old_dirs"]) == directions + 1 and found["state"][0]["old_dirs"][-1][0] == 7


def plain_file(value: Any) -> Any:
    torch.save(_plain(value, "x"), packed := io.BytesIO())
    packed.seek(0)
    return torch.load(packed, weights_only=True)


def case_lists_that_plain_torch_wrote_are_lists(world: hvdtrain.World) -> None:
    """As its index says: lists and tuples; keys of dicts are text there, and empty dicts are in lists alone."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=4)
    optimizer.param_groups[0].update(kinds={3: [1], "t": (1, {2: []})}, gaps=[{}, torch.ones(1), {5: "x"}], nothing={})

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.eye(4)) - 1).pow(4).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp.save({"all": [state]}, checkpoint_id=FOLDER / "plain-lists", no_dist=True)
    back = exchange.import_(
        FOLDER / "plain-lists", FOLDER / "plain-back", model="all.0.model", optimizer="all.0.optim",
        optimizer_class="LBFGS",
    )  # fmt: skip
    found = read(back / "training.pt")["optimizer"]
    assert same(found["state"], optimizer.state_dict()["state"])
    (group,) = found["param_groups"]
    assert same(group["kinds"], {"3": [1], "t": (1, {2: []})})
    assert same(group["gaps"], [{}, torch.ones(1), {"5": "x"}]) and "nothing" not in group
    again = torch.optim.LBFGS((twin := copy.deepcopy(model)).parameters())
    again.load_state_dict(found)
    optimizer.step(closure)
    model, optimizer, expected = twin, again, model
    optimizer.step(closure)
    assert torch.equal(model.weight, expected.weight)


def case_what_dcp_would_lose_is_refused_on_the_way_out(world: hvdtrain.World) -> None:
    for number, (option, text) in enumerate(
        (
            ({3: 1, "3": 2}, "optim.param_groups.0.option.3"),
            ({"a.b": 1, "a": {"b": 2}}, "optim.param_groups.0.option.a.b"),
            ([{1: np.ones(2)}], "['param_groups'][0]['option'][0][1] is an array of numpy"),
            ((torch.ones(1, requires_grad=True),), "['option'][0] is a Tensor that requires a gradient"),
            ({"p": nn.Parameter(torch.ones(1), requires_grad=False)}, "['option']['p'] is a Parameter"),
        )
    ):
        run, out = FOLDER / f"lost{number}", FOLDER / f"lost{number}-there"
        model, optimizer, _ = lbfgs(1, {"option": option})
        saved(run.name, model, optimizer)
        with refused(text, "--to safetensors", kind=hvdtrain.ConfigError):
            exchange.export(run, out, "dcp", model="model", optimizer="optim")
        assert not out.exists()
        exchange.export(run, out, "safetensors", model="model", optimizer="optim")


def case_weights_go_as_safetensors(world: hvdtrain.World) -> None:
    """Out: a file that anybody loads; in: that, or several files with parts."""
    model, optimizer, data = job(Tied())
    checkpoints = hvdtrain.Checkpointer(FOLDER / "weights" / "checkpoints")
    checkpoints.save(hvt.model_state(model, optimizer), progress=hvdtrain.Progress(step=4))
    checkpoints.wait()
    out = FOLDER / "plain"
    exchange.export(FOLDER / "weights", out, "safetensors", model="", optimizer="")
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
        exchange.import_(source, run)
        other = Tied()
        found = hvdtrain.Checkpointer(run / "checkpoints").restore(hvt.model_state(other))
        assert found == hvdtrain.Progress() and hvt.fingerprint(other) == hvt.fingerprint(model)


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def from_a_plain_script(engine: str) -> None:
    run, source = FOLDER / f"run-{engine}", FOLDER / engine
    with refused("which that was", "--optimizer AdamW"):
        exchange.import_(source / "dcp", run)
    told = ["checkpoint", "import", str(source / "dcp"), "--into", str(run), "--optimizer", "AdamW", "--epoch", "2"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert hvdtrain_main(told) == 0
    assert "goes on with epoch 2, counted from 0, after 3 updates of 0 samples" in said.getvalue()
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
        exchange.export(run, FOLDER / "out" / "dcp", "dcp", model="model", optimizer="optim")


def case_what_two_processes_of_ddp_saved(world: hvdtrain.World) -> None:
    from_a_plain_script("ddp")


def case_what_two_processes_of_fsdp_saved(world: hvdtrain.World) -> None:
    from_a_plain_script("fsdp")


def case_other_keys_and_numbered_parameters(world: hvdtrain.World) -> None:
    """As a script has them that saves model.state_dict() and optimizer.state_dict() of a wrapped model."""
    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    weights = {f"module.{name}": value for name, value in model.state_dict().items()}
    source = FOLDER / "keys"
    dcp.save(
        {"app": {"net": weights, "how": optimizer.state_dict()}, "rng": {"x": {1, 2}}},
        checkpoint_id=source,
        no_dist=True,
    )
    with refused("app, rng", "--model-key"):
        exchange.import_(source, FOLDER / "run-keys")
    exchange.import_(
        source, FOLDER / "run-keys", model="app.net", optimizer="app.how", optimizer_class="AdamW", progress={"step": 9}
    )
    found, its_optimizer, _, progress = restored(FOLDER / "run-keys", plain_model())
    assert progress.step == 9
    assert all(map(torch.equal, found.state_dict().values(), model.state_dict().values()))
    for mine, its in zip(its_optimizer.wrapped.state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(mine["exp_avg_sq"], its["exp_avg_sq"]) and float(mine["step"]) == 1


class Evil:
    def __reduce__(self) -> Any:
        return open, (str(EVIL), "w")


def case_what_would_run_code_is_refused(world: hvdtrain.World) -> None:
    """In the index, in a value; and an index that points elsewhere. The twin: PyTorch's own reader runs it."""
    good = FOLDER / "ddp" / "dcp"
    for number, bad in enumerate((Evil(), print, {"a": Evil()}, "text")):
        source = FOLDER / f"evil{number}"
        shutil.copytree(good, source)
        (source / ".metadata").write_bytes(pickle.dumps(bad))
        with refused("without running code", kind=hvdtrain.CheckpointError):
            exchange.import_(source, FOLDER / "none", optimizer_class="AdamW")
    source = FOLDER / "evil-value"
    dcp.save({"model": {"w": torch.ones(2)}, "optim": {"state": Evil()}}, checkpoint_id=source, no_dist=True)
    with refused("without running code", kind=hvdtrain.CheckpointError):
        exchange.import_(source, FOLDER / "none", optimizer_class="AdamW")
    source = FOLDER / "evil-place"
    shutil.copytree(good, source)
    index = pickle.loads((source / ".metadata").read_bytes())
    next(iter(index.storage_data.values())).relative_path = "../secret"
    (source / ".metadata").write_bytes(pickle.dumps(index))
    with refused("it points to ../secret", kind=hvdtrain.CheckpointError):
        exchange.import_(source, FOLDER / "none", optimizer_class="AdamW")
    assert not EVIL.exists() and not (FOLDER / "none").exists()
    dcp.FileSystemReader(FOLDER / "evil0")
    pickle.loads(io.BytesIO((FOLDER / "evil0" / ".metadata").read_bytes()).read())
    assert EVIL.exists()


def case_what_is_there_stays(world: hvdtrain.World) -> None:
    with refused("a directory of its own"):
        exchange.export(FOLDER / "run", FOLDER / "there", "dcp", model="model", optimizer="optim")
    with refused("a checkpoint to export"):
        exchange.export(FOLDER / "nowhere", FOLDER / "new", "dcp", model="model", optimizer="optim")
    with refused("a checkpoint to read"):
        exchange.import_(FOLDER / "run", FOLDER / "none")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with hvdtrain.init("torch", engine="solo", device="cpu", seed=5) as the_world:
        failures = run_cases(globals().copy(), the_world)
    sys.exit(3 if failures else 0)
