"""What the ResNet program makes of torchvision's models; prints the name of each case that passed."""

from __future__ import annotations

import torch
from torch import nn

from hvdtrain.core.errors import ConfigError
from hvdtrain.vision import classifiers
from hvdtrain.vision.recipes import RECIPES, Stem


def refused(*parts: str, name: str) -> None:
    try:
        classifiers.build(name, 10, image_size=32)
    except ConfigError as error:
        assert error.shared and all(part in str(error) for part in parts), str(error)
    else:
        raise AssertionError(f"{name} was not refused")


def the_stem_sets_the_size_of_the_feature_maps() -> None:
    """`seen` is what the first block gets: 32x32 as it is, 8x8 for the digits, 8x8 with torchvision's own stem."""
    for stem, side in ((RECIPES["cifar10"].stem, 32), (RECIPES["digits"].stem, 8), (None, 8), (Stem(2, False), 16)):
        model = classifiers.build("resnet18", 10, image_size=32, stem=stem)
        seen: list[torch.Size] = []
        model.layer1.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0].shape))
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
        assert seen[0] == (2, 64, side, side), (stem, seen)


def residual_blocks_start_as_the_identity() -> None:
    for name, last in (("resnet18", "bn2"), ("resnet50", "bn3"), ("resnext50_32x4d", "bn3")):
        model = classifiers.build(name, 4, image_size=64)
        blocks = [block for layer in (model.layer1, model.layer4) for block in layer]
        assert blocks and all(not getattr(block, last).weight.any() for block in blocks), name
        assert all(block.bn1.weight.all() for block in blocks), "only the last one of a block"


def no_decay_on_batch_norm_and_biases() -> None:
    model = classifiers.build("resnet18", 10, image_size=32)
    decayed, spared = classifiers.parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    norms = [p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
    assert {id(p) for p in spared["params"]} == {id(p) for p in [*norms, model.fc.bias]}
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))
    model.requires_grad_(False)
    model.fc.requires_grad_(True)
    assert [len(group["params"]) for group in classifiers.parameter_groups(model, 0.1)] == [1, 1]


def other_families_of_models() -> None:
    """One of each kind that must be told something, or that starts in another way."""
    for name, size in (("googlenet", 32), ("regnet_y_400mf", 32)):
        model = classifiers.build(name, 7, image_size=size, stem=Stem())
        assert model(torch.zeros(2, 3, size, size)).shape == (2, 7), name
    for name, size in (("vit_b_16", 32), ("maxvit_t", 224), ("inception_v3", 96)):  # large ones: their shapes only
        with torch.device("meta"):
            model = classifiers.build(name, 7, image_size=size, stem=Stem())
            assert model(torch.zeros(2, 3, size, size)).shape == (2, 7), name


def refusals() -> None:
    refused("'resnet51'", "did you mean", "resnet50", name="resnet51")
    refused("did you mean", "resnet50", name="ResNet-50")
    refused("there are alexnet, ", "wide_resnet50_2", name="qqqqqqqq")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in (
        the_stem_sets_the_size_of_the_feature_maps, residual_blocks_start_as_the_identity,
        no_decay_on_batch_norm_and_biases, other_families_of_models, refusals,
    ):  # fmt: skip
        case()
        print("passed", case.__name__)
