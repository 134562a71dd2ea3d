"""A training whose second rank raises an error in its third batch."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain.integrations.lightning import HorovodStrategy


class Breaks(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            raise ValueError("this rank breaks")
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


if __name__ == "__main__":
    pl.seed_everything(7)
    trainer = pl.Trainer(
        strategy=HorovodStrategy(device="cpu"), max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Breaks(), DataLoader(TensorDataset(torch.randn(40, 3), torch.randn(40, 1)), batch_size=4))
