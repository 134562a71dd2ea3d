"""The ResNet program with little memory to take (the environment's SPARE_BYTES beyond what it needs to start)."""

from __future__ import annotations

import os
import resource
import sys

from hvdtrain import torch_resnet
from hvdtrain.vision.classifiers import build


def limited(*args: object, **named: object) -> object:
    """As if the machine had only so much memory: from the moment the model is built, when all is loaded."""
    model = build(*args, **named)  # type: ignore[arg-type]
    with open("/proc/self/statm", encoding="ascii") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    limit = in_use + int(os.environ["SPARE_BYTES"])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return model


if __name__ == "__main__":
    from hvdtrain.vision import classifiers

    classifiers.build = limited  # type: ignore[assignment]
    sys.exit(torch_resnet.main())
