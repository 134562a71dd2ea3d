"""Any classification model of torchvision, made ready: its name checked, its stem and its start as the recipe wants."""

from __future__ import annotations

import difflib
from typing import Any

import torchvision
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from hvdtrain.core.errors import ConfigError
from hvdtrain.vision.recipes import Stem


def names() -> list[str]:
    """The models there are."""
    return torchvision.models.list_models(module=torchvision.models)


def check_name(name: str) -> None:
    """Refuses a model that torchvision does not have.

    Raises:
        ConfigError: names those that are spelled alike.
    """
    known = names()
    if name in known:
        return
    close = difflib.get_close_matches(name.lower(), known, n=4, cutoff=0.5)
    meant = f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(known)}"
    rule = f"--model must be one of the {len(known)} classification models of torchvision {torchvision.__version__}"
    raise ConfigError(rule, repr(name), meant, shared=True)


def build(name: str, classes: int, *, image_size: int, stem: Stem | None = None) -> nn.Module:
    """A new model with random weights.

    Args:
        name: torchvision's.
        classes: outputs.
        image_size: pixels on a side of the pictures that will come.
        stem: for small pictures; it changes ResNets, and leaves other models alone.

    Raises:
        ConfigError: no such model.
    """
    check_name(name)
    model = torchvision.models.get_model(name, weights=None, num_classes=classes, **_keywords(name, image_size))
    if isinstance(model, torchvision.models.ResNet):
        if stem is not None:
            _put_stem(model, stem)
        _zero_last_scales(model)
    return model


def _keywords(name: str, image_size: int) -> dict[str, Any]:
    """Returns arguments that some models need; those of the two Inceptions turn off their side outputs."""
    if name in ("googlenet", "inception_v3"):
        return {"aux_logits": False, "init_weights": True}
    if name.startswith("vit_"):
        return {"image_size": image_size}
    return {"input_size": (image_size, image_size)} if name.startswith("maxvit") else {}


def _put_stem(model: torchvision.models.ResNet, stem: Stem) -> None:
    old = model.conv1
    model.conv1 = nn.Conv2d(old.in_channels, old.out_channels, 3, stride=stem.stride, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's own layers
    if not stem.pool:
        model.maxpool = nn.Identity()


def _zero_last_scales(model: nn.Module) -> None:
    """Makes every residual block start as the identity (arXiv 1706.02677, section 5.1)."""
    for block in model.modules():
        if isinstance(block, Bottleneck):
            nn.init.zeros_(block.bn3.weight)
        elif isinstance(block, BasicBlock):
            nn.init.zeros_(block.bn2.weight)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The groups for an optimizer: no decay on batch-norm and biases (arXiv 1706.02677, section 5.3), which are the
    parameters with less than two dimensions."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
