"""What a script is moved to: the names that take the place of Horovod's, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """What a script is moved to.

    Attributes:
        name: as `--to` has it.
        title: what averages gradients there.
        wrap: what an optimizer's wrapping becomes.
        init: what starts it.
        alone: why that is called without a condition.
        loss: what becomes of a loss, for who averages it within.
        words: its functions of tensors, by what they do.
    """

    name: str
    title: str
    wrap: str
    init: str
    alone: str
    loss: str
    words: Mapping[str, str]


HVDTRAIN = Target(
    "hvdtrain",
    title="hvdtrain",
    wrap="hvt.prepare",
    init="hvdtrain.init",
    alone="one process is a world of one",
    loss="optimizer.backward(loss)",
    words={"reduce": "hvt.reduce", "gather": "hvt.gather", "broadcast": "hvt.broadcast", "fp16": '"fp16"'},
)
DDP = Target(
    "ddp",
    title="DistributedDataParallel",
    wrap="DistributedDataParallel",
    init="dist.init_process_group",
    alone="torchrun --nproc-per-node 1 starts one process",
    loss="loss.backward()",
    words={
        "reduce": "reduce_tensor", "gather": "gather_tensors", "broadcast": "broadcast_tensor",
        "fp16": "fp16_compress_hook",
    },
)  # fmt: skip
TARGETS = {target.name: target for target in (HVDTRAIN, DDP)}
