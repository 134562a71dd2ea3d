"""What `hvdtrain plan` says, and what `planner.choose` chooses; a JSON line for each case. Argument: a folder."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from hvdtrain import __main__
from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline import split
from hvdtrain.pipeline.tuning import planner
from hvdtrain.pipeline.values import places

FOLDER = Path(sys.argv[1])


def tell(case: str, **what: object) -> None:
    print(json.dumps({"case": case, **what}), flush=True)


def command(case: str, *flags: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = __main__.main(["plan", *flags])
    tell(case, code=code, out=out.getvalue(), err=err.getvalue())


SMALL = ["--model", "resnet18", "--image-size", "32", "--batch", "64", "--classes", "10"]
SAVED = ["--profile", str(FOLDER / "profile.json"), "--reserve-gib", "0"]
GIVEN = [*SMALL, *SAVED, "--devices", "2x0.3GiB", "--nodes", "2", "--top", "50"]
command("json", *GIVEN, "--json")
command("tight", *SMALL, *SAVED, "--devices", "2x140MiB", "--samples-per-s", "500")
command("other", *SMALL, *SAVED, "--image-size", "64")
command("here", *SMALL, "--devices", "cpu,cpu")
command("model", "--model", "resnet19")
command("device", *SMALL, "--devices", "cpu,cuda:7")

torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())], nn.Linear(32, 4))
before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
x, y, loss = torch.randn(12, 32), torch.randint(4, (12,)), nn.CrossEntropyLoss()
chosen = planner.choose(model, x, devices=["cpu", "cpu"], batch=12, optimizer_copies=2.0)
expected = float(loss(model(x), y))
same = all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
planned = places.planned
places.planned = lambda device, speed=1.0: replace(planned(device, speed), memory_bytes=1000.0)
sys.modules["hvdtrain.pipeline.tuning.profiles"].planned = places.planned  # type: ignore[attr-defined]
try:
    planner.choose(model, x, devices=["cpu"], batch=12)
    nothing_fits = "it did"
except ConfigError as error:
    nothing_fits = str(error)
pipe = split(
    model, x, ["cpu", "cpu"][: chosen.stages], micro_batches=chosen.micro_batches, balance=list(chosen.sizes),
    schedule=chosen.schedule, remat=chosen.remat,
)  # fmt: skip
tell(
    "choice", told=str(chosen), stages=chosen.stages, sizes=chosen.sizes, segments=len(pipe.segments),
    reason=chosen.reason, predicted_samples_per_s=chosen.predicted_samples_per_s, state_is_untouched=same,
    loss=float(pipe.step(x, y, loss)), expected_loss=expected, nothing_fits=nothing_fits,
)  # fmt: skip
tell("flops", count=planner.forward_flops(nn.Linear(3, 7, bias=False), torch.empty(5, 3)))
