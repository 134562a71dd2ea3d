"""What a start of a process group says when it cannot be. Usage: engine_refusals.py; prints a JSON object."""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

import torch
from torch import nn

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.torch.engines.base import Transport
from hvdtrain.torch.engines.dataparallel import DataParallelEngine
from hvdtrain.torch.engines.sync_batchnorm import convert

RANK_0 = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
RANK_1 = {**RANK_0, "RANK": "1", "LOCAL_RANK": "1"}


class Without:
    """Makes imports of a package fail, as where it is not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == "deepspeed":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def said(engine: str, variables: dict[str, str]) -> str:
    """What `init` raises in this environment."""
    before = dict(os.environ)
    os.environ.update(variables, HVDTRAIN_START_TIMEOUT_S="1")
    try:
        hvdtrain.init("torch", engine=engine)
    except hvdtrain.HvdtrainError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.clear()
        os.environ.update(before)
    return "nothing"


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def taken() -> str:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        return said("ddp", RANK_0 | {"MASTER_PORT": str(listener.getsockname()[1])})


def bind_says(engine: Any, module: nn.Module) -> str:
    try:
        engine.bind(module, torch.optim.SGD(module.parameters(), lr=0.1), Transport())
    except hvdtrain.ConfigError as error:
        return str(error)
    return "nothing"


def prepare_says(module: nn.Module, **options: Any) -> str:
    with hvdtrain.init("torch", engine="dataparallel"):
        try:
            hvt.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1), **options)
        except hvdtrain.ConfigError as error:
            return str(error)
    return "nothing"


def main() -> None:
    found = {
        "taken": taken(),
        "unreachable": said("ddp", RANK_1 | {"MASTER_PORT": free_port()}),
        "unknown host": said("ddp", RANK_1 | {"MASTER_PORT": "1", "MASTER_ADDR": "nowhere.invalid"}),
        "absent": said("ddp", RANK_0 | {"MASTER_PORT": free_port()}),
        "no port": said("ddp", RANK_0),
    }
    pieces = DataParallelEngine(name="dataparallel", pieces=2)
    try:
        convert(nn.BatchNorm1d(2), pieces)
    except hvdtrain.ConfigError as error:
        found["sync over pieces"] = str(error)
    found["compiled pieces"] = bind_says(pieces, nn.Sequential(torch.compile(nn.Linear(2, 2))))
    found["compiled by prepare"] = prepare_says(torch.compile(nn.Linear(2, 2)))
    found["counts rows"] = prepare_says(nn.Embedding(3, 2, scale_grad_by_freq=True))
    frozen = nn.Embedding(3, 2, scale_grad_by_freq=True).requires_grad_(False)
    found["counts frozen rows"] = prepare_says(nn.Sequential(frozen, nn.Linear(2, 2)))
    with hvdtrain.init("torch", engine="deepspeed") as world:  # one process: no launcher is needed
        found["float64"] = bind_says(world.comm, nn.Linear(2, 2).double())
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        del sys.modules[name]
    sys.meta_path.insert(0, Without())
    found["no deepspeed"] = said("deepspeed", {})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
