"""What Lightning 1.9 tested of its own Horovod strategy (tests_pytorch/models/test_horovod.py), on ours, by meaning.

Left out: what needs two GPUs, and Apex, which its tests skip. Its schedule of accumulate_grad_batches is row L15e, its
metric of all ranks row L1.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from as_written import GAN, TRAIN, X, compare, trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

import hvdtrain

ITEMS = 67  # of 2 and of 3 ranks: uneven
PARTS = (torch.randn(ITEMS, 32, generator=torch.Generator().manual_seed(2)),)


class Boring(BoringModel):
    """Lightning's own model, whose batch is the only part of our data set."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[0], batch_idx)


class Validated(Boring):
    def val_dataloader(self) -> Any:
        torch.manual_seed(3)
        return DataLoader(RandomDataset(32, 13))


class TwoOptimizers(GAN):
    """Two optimizers, each with a scheduler that steps at each epoch's end."""

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(part.parameters(), 0.1) for part in (self.generator, self.discriminator)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(its, 1, gamma=0.1) for its in optimizers]

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()


# test_horovod_cpu, test_horovod_cpu_clip_grad_by_value
def case_clipping_and_parts_of_the_data(world: hvdtrain.World) -> None:
    parts: dict[str, Any] = {"limit_train_batches": 0.4, "limit_val_batches": 0.2, "gradient_clip_val": 1.0}
    compare(world, "L21a", Validated, *PARTS, valid=False, **parts)
    compare(world, "L21b", Validated, *PARTS, valid=False, gradient_clip_algorithm="value", **parts)


# test_horovod_cpu_accumulate_grad_batches
def case_accumulation(world: hvdtrain.World) -> None:
    _, ours = compare(
        world, "L21c", Boring, *PARTS, valid=False, accumulate_grad_batches=2, limit_val_batches=0, max_epochs=1
    )
    assert ours.global_step == -(-ITEMS // 12)


# test_horovod_multi_optimizer, test_horovod_multi_optimizer_with_scheduling_stepping
def case_two_optimizers_with_schedulers(world: hvdtrain.World) -> None:
    noise = torch.randn(TRAIN, 2, generator=torch.Generator().manual_seed(1))
    _, ours = compare(world, "L21d", TwoOptimizers, X, noise, valid=False, max_epochs=3)
    assert [its.param_groups[0]["lr"] for its in ours.optimizers] == [0.1 * 0.1**3] * 2


# test_result_reduce_horovod
def case_a_logged_sum_is_of_all_ranks(world: hvdtrain.World) -> None:
    class Logs(Boring):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            one = torch.tensor([1.0])
            self.log("one", one, sync_dist=True, reduce_fx="sum", on_step=True, on_epoch=False)
            return super().training_step(batch, batch_idx)

    made = trainer(world, max_epochs=1, limit_train_batches=2)
    made.fit(Logs(), DataLoader(torch.utils.data.TensorDataset(*PARTS), batch_size=2))
    assert made.callback_metrics["one"].item() == world.size


if __name__ == "__main__":
    from cases import run_cases

    torch.set_num_threads(1)
    with hvdtrain.init("torch", device="cpu", seed=5) as ranks:
        failed = run_cases(globals(), ranks)
    sys.exit(3 if failed else 0)
