"""What to train with: for each data set the settings that are known, or were measured, to be right.

Pure: no framework. `Recipe` is what belongs to a data set; `Settings` is what follows from it, from the flags and from
the number of ranks.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Literal

from hvdtrain.core.lr import LR


@dataclass(frozen=True)
class Stem:
    """The replacement for the first layers of a ResNet (7x7 with stride 2, then a max-pool with stride 2) on small
    pictures: 3x3 with `stride`, and the max-pool only if `pool`."""

    stride: int = 1
    pool: bool = False


@dataclass(frozen=True)
class Recipe:
    """The right settings for a data set: `lr` (SGD with momentum) and `adamw_lr` belong to updates of `reference_batch`
    samples. `stem` None leaves the model as it is."""

    epochs: int
    per_rank_batch: int
    lr: float
    reference_batch: int
    weight_decay: float
    schedule: Literal["step", "cosine"] = "cosine"
    warmup_epochs: float = 5
    optimizer: Literal["sgd", "nesterov", "adamw"] = "nesterov"
    adamw_lr: float = 1e-3
    stem: Stem | None = None


# Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (arXiv 1706.02677), section 5.1. AdamW's
# rate is that of torchvision's references (ConvNeXt: 1e-3 at batch 1024), brought to 256 by the square root.
IMAGENET = Recipe(
    epochs=90, per_rank_batch=32, lr=0.1, reference_batch=256, weight_decay=1e-4, schedule="step", optimizer="sgd",
    adamw_lr=5e-4,
)  # fmt: skip
RECIPES = {
    "imagenet": IMAGENET,
    "synthetic": replace(IMAGENET, epochs=1),  # there is nothing to learn
    # He et al. (arXiv 1512.03385, section 4.2): 0.1 at batch 128, 3x3 first layer, no max-pool
    "cifar10": Recipe(30, 128, lr=0.1, reference_batch=128, weight_decay=5e-4, stem=Stem()),
    # the max-pool: MNIST's strokes are 3 pixels wide
    "mnist": Recipe(3, 64, lr=0.05, reference_batch=64, weight_decay=5e-4, warmup_epochs=1, stem=Stem(pool=True)),
    # The pictures were 8x8 once: feature maps of 8x8 see all there is, at a sixteenth of the work of 32x32. On 1, 2 and
    # 4 ranks, 32 a rank, one training gives 0.98 to 0.99 (360 test pictures).
    "digits": Recipe(
        8, 32, lr=0.025, reference_batch=32, weight_decay=5e-4, warmup_epochs=1, stem=Stem(stride=2, pool=True)
    ),
}
# after each, "step" divides the rate by 10: the paper's 30, 60 and 80 of 90 epochs
MILESTONES = (30 / 90, 60 / 90, 80 / 90)
# a warm-up that is not asked for takes no more than this part of the training
LONGEST_WARMUP = 1 / 4
# Loshchilov & Hutter (arXiv 1711.05101): AdamW's decay is not the one of SGD; torchvision's references use 0.05
ADAMW_WEIGHT_DECAY = 0.05


@dataclass(frozen=True)
class Settings:
    """The settings that follow from the flags, the data and the number of ranks; `str()` describes them."""

    epochs: int
    ranks: int
    per_rank_batch: int
    accumulate: int
    global_batch: int  # samples of an update: ranks x per-rank batch x accumulation
    total_samples: int  # of the whole training, all ranks together
    optimizer: Literal["sgd", "nesterov", "adamw"]
    weight_decay: float
    lr: LR

    @classmethod
    def of(cls, args: argparse.Namespace, ranks: int, recipe: Recipe, *, samples: int) -> Settings:
        """`samples`: in the training set. Flags that were not given (None) follow the recipe.

        Raises:
            ConfigError: a warm-up longer than the training, or than the first part of its schedule.
        """
        epochs = args.epochs or recipe.epochs
        per_rank_batch = args.per_rank_batch or recipe.per_rank_batch
        optimizer = args.optimizer or recipe.optimizer
        adamw = optimizer == "adamw"
        decay = ADAMW_WEIGHT_DECAY if adamw else recipe.weight_decay
        schedule = args.schedule or recipe.schedule
        warmup_epochs = args.warmup_epochs
        if warmup_epochs is None:
            warmup_epochs = min(recipe.warmup_epochs, LONGEST_WARMUP * epochs)
        # two milestones may fall on one sample when there are hardly any
        milestones = sorted({max(1, round(part * epochs * samples)) for part in MILESTONES})
        return cls(
            epochs=epochs,
            ranks=ranks,
            per_rank_batch=per_rank_batch,
            accumulate=args.accumulate,
            global_batch=ranks * per_rank_batch * args.accumulate,
            total_samples=epochs * samples,
            optimizer=optimizer,
            weight_decay=decay if args.weight_decay is None else args.weight_decay,
            lr=LR(
                args.lr or (recipe.adamw_lr if adamw else recipe.lr),
                recipe.reference_batch,
                "sqrt" if adamw else "linear",
                warmup_samples=round(warmup_epochs * samples),
                schedule=schedule,
                total_samples=epochs * samples if schedule == "cosine" else None,
                milestones=tuple(milestones) if schedule == "step" else (),
            ),
        )

    def in_parts(self, parts: int) -> Settings:
        """Returns settings for the same updates, with a rank's batch taken in so many parts one after another."""
        each = -(-self.per_rank_batch // parts)
        accumulate = self.accumulate * parts
        return replace(self, per_rank_batch=each, accumulate=accumulate, global_batch=self.ranks * each * accumulate)

    def __str__(self) -> str:
        lr, peak = self.lr, self.lr.peak(self.global_batch)
        parts = f"{self.ranks} x {self.per_rank_batch}" + f" x {self.accumulate} batches" * (self.accumulate > 1)
        scaled = f" ({lr.base:g} at batch {lr.reference_batch}, scaled by {lr.scale})"
        return (
            f"batch: {self.global_batch} an update ({parts}); {self.epochs} epoch{'s' * (self.epochs > 1)}\n"
            f"{self.optimizer}: learning rate {peak:.4g}{scaled * (peak != lr.base)}, {lr.schedule};"
            f" weight decay {self.weight_decay:g}, none on batch-norm and biases"
        )
