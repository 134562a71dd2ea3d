"""A plain script with DCP checkpoints, which knows nothing of hvdtrain. usage: plain_dcp.py save|load ddp|fsdp FOLDER

save: trains, and leaves FOLDER/dcp, with everything whole in FOLDER/whole.pt. load: reads FOLDER/dcp into a fresh model
and optimizer, and leaves that in FOLDER/loaded.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def main(what: str, engine: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0 if what == "save" else 1)
    model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    if engine == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    if what == "save":
        for step in range(3):
            optimizer.zero_grad()
            made = torch.Generator().manual_seed(10 * step + dist.get_rank())
            model(torch.randn(8, 6, generator=made)).square().mean().backward()
            optimizer.step()
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    if what == "save":
        dcp.save(state, checkpoint_id=folder / "dcp")
    else:
        dcp.load(state, checkpoint_id=folder / "dcp")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(whole, folder / ("whole.pt" if what == "save" else "loaded.pt"))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # PyTorch 2.12 aborts now and then when such a process ends by itself ("terminate called without ...")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
