"""torchvision's models for segmentation, video, and with auxiliary outputs, in pipelines and in plain PyTorch, float64.

A line of JSON a model: the largest difference of a parameter's gradient or of an output, of that parameter's or
output's own largest number.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from torchvision import models

import hvdtrain.pipeline
from hvdtrain.core.errors import HvdtrainError

BATCH, CLASSES = 4, 3
BARE: dict[str, Any] = {"weights": None, "weights_backbone": None, "num_classes": CLASSES}
AUX: dict[str, Any] = {"weights": None, "num_classes": CLASSES, "aux_logits": True, "init_weights": False}
# model, of which size a sample is, stages and schedule
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, str]] = {
    "lraspp": (lambda: models.segmentation.lraspp_mobilenet_v3_large(**BARE), (3, 32, 32), 2, "gpipe"),
    "r3d_18": (lambda: models.video.r3d_18(num_classes=CLASSES), (3, 2, 16, 16), 2, "zb-h1"),
    "googlenet": (lambda: models.googlenet(**AUX), (3, 64, 64), 2, "interleaved"),
}


def loss_of(out: Any, y: Tensor) -> Tensor:
    """Of all outputs, whatever holds them."""
    return torch.stack([F.cross_entropy(part, y) for part in pytree.tree_leaves(out)]).sum()


def largest_gap(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in zip(found, wanted, strict=True))


def calibrated(make: Callable[[], nn.Module], x: Tensor) -> nn.Module:
    """No draws; batch norm by the statistics of `x`, which are then left alone: else each micro-batch has its own."""
    torch.manual_seed(0)
    model = make().train()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        if isinstance(layer, _BatchNorm):
            layer.momentum = 1.0
    with torch.no_grad():
        model(x)
    for layer in model.modules():
        layer.training = layer.training and not isinstance(layer, _BatchNorm)
    return model


def compared(name: str) -> dict[str, Any]:
    make, size, stages, schedule = MODELS[name]
    x = torch.randn(BATCH, *size)
    model = calibrated(make, x)
    wanted_output = model(x)
    leaves, form = pytree.tree_flatten(wanted_output)
    y = torch.randint(CLASSES, (BATCH, *leaves[0].shape[2:]))
    value = loss_of(wanted_output, y)
    value.backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    options = {"balance": "memory", "micro_batches": 2, "schedule": schedule}
    pipe = hvdtrain.pipeline.split(model, x, ["cpu"] * stages, **options)
    mean, output = pipe.step(x, y, loss_of, outputs=True)
    outputs, its_form = pytree.tree_flatten(output)
    assert its_form == form and type(output) is type(wanted_output), (its_form, form)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    off = largest_gap([*gradients, *outputs, mean], [*wanted, *leaves, value])
    return {"model": name, "off": off, "output": type(wanted_output).__name__}


def detection() -> str:
    """A batch of theirs is a list of pictures, each [3, height, width]."""
    model = models.detection.fasterrcnn_resnet50_fpn(**BARE, min_size=64, max_size=64)
    pictures = [torch.randn(3, 64, 64) for _ in range(BATCH)]
    boxes = [{"boxes": torch.tensor([[1.0, 1.0, 20.0, 20.0]]), "labels": torch.tensor([1])} for _ in pictures]
    try:
        return repr(hvdtrain.pipeline.split(model, (pictures, boxes), ["cpu"] * 2))
    except HvdtrainError as error:
        return str(error)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    for name in MODELS:
        print(json.dumps(compared(name)), flush=True)
    print(json.dumps({"model": "detection", "said": detection()}), flush=True)


if __name__ == "__main__":
    main()
