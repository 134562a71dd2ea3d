"""PyTorch on every engine: gradients averaged and proven to be, uneven batches weighted exactly, one loop for all.

::

    with hvdtrain.init("torch") as world:
        train = hvt.loader(dataset, per_rank_batch=32)
        model, optimizer = hvt.prepare(model, optimizer, train, lr=hvdtrain.LR(base=0.1, reference_batch=256))
        for epoch in train.epochs(90):
            for images, labels in train:
                optimizer.zero_grad()
                loss = loss_fn(model(images), labels)
                optimizer.backward(loss)
                optimizer.step()

The model stays the user's: what is saved has plain names and loads without hvdtrain. One that was cut into stages
(`hvdtrain.pipeline.split`) is prepared like any other, and trained with ``optimizer.forward_backward(x, y, loss_fn)``,
which models that are whole take as well.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# looked up on first use: `init("torch")` needs none of them, and evaluation alone needs no training parts
_HOME_OF = {
    "CIFAR10_MEAN": "_augment",
    "CIFAR10_STD": "_augment",
    "CLOCK": "_clock",
    "Check": "_check",
    "IMAGENET_MEAN": "_augment",
    "IMAGENET_STD": "_augment",
    "ImageFiles": "_folder",
    "Live": "_epoch",
    "Loader": "_loader",
    "Model": "_model",
    "Optimizer": "_optimizer",
    "Proof": "_verify",
    "Unreadable": "_workers",
    "check": "_check",
    "classification": "_evaluate",
    "crop_flip": "_augment",
    "evaluate": "_evaluate",
    "fingerprint": "_watch",
    "loader": "_loader",
    "model_state": "_parts",
    "normalise": "_augment",
    "prepare": "_prepare",
    "unwrap": "_inner",
    "verify": "_verify",
}

__all__ = sorted(_HOME_OF)

if TYPE_CHECKING:
    from hvdtrain.torch._augment import CIFAR10_MEAN as CIFAR10_MEAN
    from hvdtrain.torch._augment import CIFAR10_STD as CIFAR10_STD
    from hvdtrain.torch._augment import IMAGENET_MEAN as IMAGENET_MEAN
    from hvdtrain.torch._augment import IMAGENET_STD as IMAGENET_STD
    from hvdtrain.torch._augment import crop_flip as crop_flip
    from hvdtrain.torch._augment import normalise as normalise
    from hvdtrain.torch._check import Check as Check
    from hvdtrain.torch._check import check as check
    from hvdtrain.torch._clock import CLOCK as CLOCK
    from hvdtrain.torch._epoch import Live as Live
    from hvdtrain.torch._evaluate import classification as classification
    from hvdtrain.torch._evaluate import evaluate as evaluate
    from hvdtrain.torch._folder import ImageFiles as ImageFiles
    from hvdtrain.torch._inner import unwrap as unwrap
    from hvdtrain.torch._loader import Loader as Loader
    from hvdtrain.torch._loader import loader as loader
    from hvdtrain.torch._model import Model as Model
    from hvdtrain.torch._optimizer import Optimizer as Optimizer
    from hvdtrain.torch._parts import model_state as model_state
    from hvdtrain.torch._prepare import prepare as prepare
    from hvdtrain.torch._verify import Proof as Proof
    from hvdtrain.torch._verify import verify as verify
    from hvdtrain.torch._watch import fingerprint as fingerprint
    from hvdtrain.torch._workers import Unreadable as Unreadable


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hvdtrain.torch' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hvdtrain.torch.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
