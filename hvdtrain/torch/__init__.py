"""PyTorch: a training loop whose N ranks train like one process, on every engine.

::

    with hvdtrain.init("torch") as world:
        train = hvt.loader(dataset, per_rank_batch=32)
        model, optimizer = hvt.prepare(model, optimizer, train, lr=hvdtrain.LR(base=0.1, reference_batch=32))
        for epoch in train.epochs(90):
            for images, labels in train:
                optimizer.zero_grad()
                loss = loss_fn(model(images), labels)
                optimizer.backward(loss)
                optimizer.step()

The saved model has plain names and loads without hvdtrain. A pipeline (`hvdtrain.pipeline.split`) trains with
`optimizer.forward_backward(x, y, loss_fn)`, which takes any other model as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain.core import public

# looked up on first use: `init("torch")` needs none of them, and evaluation alone needs no training parts
__getattr__, __dir__, __all__ = public(__name__, {
    "checkpoint": "model_state",
    "update.averaging": "Proof verify",
    "update.pieces": "Check check",
    "engines.replicas": "fingerprint",
    "collectives": "broadcast gather gather_in_order reduce",
    "data.augment": "CIFAR10_MEAN CIFAR10_STD IMAGENET_MEAN IMAGENET_STD crop_flip normalise",
    "data.create": "loader",
    "data.images": "ImageFiles",
    "data.loader": "Loader",
    "data.workers": "Unreadable",
    "evaluation": "classification corpus_metrics evaluate predict update_bn",
    "update.model": "Model",
    "update.optimizer": "Optimizer",
    "update.whole": "whole",
    "preparation": "prepare",
    "engines.shell": "unwrap",
})  # fmt: skip


if TYPE_CHECKING:
    from hvdtrain.core.proof import Proof as Proof
    from hvdtrain.torch.checkpoint import model_state as model_state
    from hvdtrain.torch.collectives import broadcast as broadcast
    from hvdtrain.torch.collectives import gather as gather
    from hvdtrain.torch.collectives import gather_in_order as gather_in_order
    from hvdtrain.torch.collectives import reduce as reduce
    from hvdtrain.torch.data.augment import CIFAR10_MEAN as CIFAR10_MEAN
    from hvdtrain.torch.data.augment import CIFAR10_STD as CIFAR10_STD
    from hvdtrain.torch.data.augment import IMAGENET_MEAN as IMAGENET_MEAN
    from hvdtrain.torch.data.augment import IMAGENET_STD as IMAGENET_STD
    from hvdtrain.torch.data.augment import crop_flip as crop_flip
    from hvdtrain.torch.data.augment import normalise as normalise
    from hvdtrain.torch.data.create import loader as loader
    from hvdtrain.torch.data.images import ImageFiles as ImageFiles
    from hvdtrain.torch.data.loader import Loader as Loader
    from hvdtrain.torch.data.workers import Unreadable as Unreadable
    from hvdtrain.torch.engines.replicas import fingerprint as fingerprint
    from hvdtrain.torch.engines.shell import unwrap as unwrap
    from hvdtrain.torch.evaluation import classification as classification
    from hvdtrain.torch.evaluation import corpus_metrics as corpus_metrics
    from hvdtrain.torch.evaluation import evaluate as evaluate
    from hvdtrain.torch.evaluation import predict as predict
    from hvdtrain.torch.evaluation import update_bn as update_bn
    from hvdtrain.torch.preparation import prepare as prepare
    from hvdtrain.torch.update.averaging import verify as verify
    from hvdtrain.torch.update.model import Model as Model
    from hvdtrain.torch.update.optimizer import Optimizer as Optimizer
    from hvdtrain.torch.update.pieces import Check as Check
    from hvdtrain.torch.update.pieces import check as check
    from hvdtrain.torch.update.whole import whole as whole
