"""The ResNet program, killed before it has copied its n-th checkpoint (the environment's DIES_AT_SAVE)."""

from __future__ import annotations

import os
import sys

from hvdtrain import torch_resnet
from hvdtrain.checkpoint import checkpoint

saves = 0
submit = checkpoint.Checkpointer._submit


def dying(self: checkpoint.Checkpointer, *args: object) -> object:
    global saves
    saves += 1
    if saves == int(os.environ["DIES_AT_SAVE"]):
        print(f"dying at save {saves}", flush=True)
        os._exit(9)
    return submit(self, *args)


checkpoint.Checkpointer._submit = dying  # type: ignore[assignment]

if __name__ == "__main__":
    sys.exit(torch_resnet.main())
