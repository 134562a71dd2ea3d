"""torchvision's classifiers as chains: bit for bit the unsplit model's output, cut at every place.

Usage: split_classifiers.py: a JSON line a model, a small one of each kind.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torchvision
from torch import nn
from torch.utils import _pytree as pytree

from hvdtrain.pipeline.run.stage import Stage, build_stages
from hvdtrain.pipeline.trace.restore import all_training
from hvdtrain.pipeline.trace.segments import segments

SMALL = ("mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t")
TWIN = "resnet18"


def make(name: str) -> tuple[nn.Module, torch.Tensor]:
    size = 64 if name == "squeezenet1_1" else 32
    return torchvision.models.get_model(name, weights=None, num_classes=10), torch.randn(2, 3, size, size)


def equal(a: Any, b: Any) -> bool:
    (one, how), (other, also) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return how == also and all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def compared(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = make(name)
    parts = segments(model, x)
    found: dict[str, Any] = {"segments": len(parts)}
    used = {id(p) for part in parts for p in part.parameters()}
    found["unused"] = [path for path, p in model.named_parameters() if id(p) not in used]
    stages = build_stages(model, parts, [1] * len(parts), ["cpu"] * len(parts))
    found["proxies"] = sum(len(stage.proxies) for stage in stages)
    found["most_crossing"] = 0
    for training in (True, False):
        with all_training(model, training), torch.no_grad():
            torch.manual_seed(1)
            wanted = model(x)
            torch.manual_seed(1)
            output, found["most_crossing"] = run(stages, x)
            found["training" if training else "evaluation"] = equal(wanted, output)
            found["finite"] = all(torch.isfinite(leaf).all().item() for leaf in pytree.tree_leaves(wanted))
    if name == TWIN:  # one number of one weight is another one: the comparison must see it
        next(stages[0].parameters()).data.view(-1)[0] += 1e-2
        with torch.no_grad():
            found["twin"] = equal(wanted, run(stages, x)[0])
    return found


def run(stages: Sequence[Stage], x: torch.Tensor) -> tuple[Any, int]:
    """The output, and the most values that cross a cut."""
    values: tuple[Any, ...] = (x,)
    most = 0
    for stage in stages:
        values = stage(values)
        most = max(most, len(values))
    return values[0], most


if __name__ == "__main__":
    for name in SMALL:
        print(json.dumps({"case": name, **compared(name)}), flush=True)
