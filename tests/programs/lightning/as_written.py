"""LightningModules as users write them, on ranks: weights and logged values of one process of plain Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from samples import BATCH, HOLES, KINDS, TRAIN, WIDE, XV, YV, X, Y  # isort: skip (makes cases.py importable)

import cases
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from cases import close, folder, gap, refused, shown
from lightning.pytorch.callbacks import Callback, EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, WeightedRandomSampler

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import ConfigError
from hvdtrain.integrations.lightning import HorovodStrategy


class Classifier(pl.LightningModule):
    """The module of Lightning's first lesson, with validation, test and predict."""

    def __init__(self, lr: float = 0.1, optimizer: Any = torch.optim.Adam) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, KINDS))
        self.lr, self.optimizer = lr, optimizer
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=KINDS)
        self.train_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=KINDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        outputs = self(x)
        loss = F.cross_entropy(outputs, y)
        self.train_accuracy(outputs, y)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("seen", float(len(y)), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        outputs = self(x)
        self.accuracy(outputs, y)
        self.log("accuracy", self.accuracy)
        self.log_dict({"val_loss": F.cross_entropy(outputs, y), "size": outputs.square().sum(1).mean()}, prog_bar=True)
        self.log("worst", F.cross_entropy(outputs, y, reduction="none").max(), reduce_fx="max")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=self.lr)


def trainer(world: hvdtrain.World | None, **options: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet |= {"enable_checkpointing": False, "max_epochs": 2, "accelerator": "cpu", "num_sanity_val_steps": 1}
    if world is not None:
        options["strategy"] = HorovodStrategy()
    else:
        options["devices"] = 1
    return pl.Trainer(**quiet | options)


def data(batch: int, *parts: Tensor, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*parts), batch_size=batch, **options)


def numbers(found: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in found.callback_metrics.items()}


def metrics_gap(one: dict[str, float], other: dict[str, float]) -> float:
    assert one.keys() == other.keys() != set(), (one, other)
    gaps = {name: abs(one[name] - other[name]) for name in one}
    assert max(gaps.values()) < 1e-10, gaps
    return max(gaps.values())


def compare(
    world: hvdtrain.World, row: str, make: Callable[[], pl.LightningModule], *parts: Tensor,
    per_update: int = 1, skip: tuple[str, ...] = (), valid: bool = True, plain: Any = None, **options: Any,
) -> tuple[pl.LightningModule, pl.Trainer]:  # fmt: skip
    """Trains on ranks and in one process, whose batch is an update's; shows the largest difference of both."""
    parts = parts or (X, Y)
    pieces = options.pop("accumulate_grad_batches", 1)
    found, wanted = make(), (plain or make)()
    ours = trainer(world, accumulate_grad_batches=pieces, **options)
    theirs = trainer(None, **options)
    checked = [data(BATCH // world.size, XV, YV)] if valid else []
    ours.fit(found, data(BATCH // world.size // pieces, *parts), *checked)
    theirs.fit(wanted, data(BATCH, *parts), *([data(BATCH, XV, YV)] if valid else []))
    largest = gap(found, wanted)
    assert largest < 1e-10, largest
    kept = [{name: v for name, v in numbers(its).items() if name not in skip} for its in (ours, theirs)]
    if any(kept):
        largest = max(largest, metrics_gap(*kept))
    world.agree("logged values", kept[0])
    shown(row, largest)
    return found, ours


# -- automatic optimization ----------------------------------------------------------------------------------------
def case_classification_with_an_uneven_end(world: hvdtrain.World) -> None:
    # each step's own loss is rank 0's, unless it is logged with sync_dist=True or on_epoch=True
    found, ours = compare(world, "L1", Classifier)
    assert ours.global_step == 8 and ours.world_size == world.size and ours.global_rank == world.rank
    tested = ours.test(found, data(BATCH // world.size, XV, YV), verbose=False)
    with torch.no_grad():
        assert abs(tested[0]["test_loss"] - float(F.cross_entropy(found(XV), YV))) < 1e-12
    checked = ours.validate(found, data(2, XV, YV), verbose=False)
    assert abs(checked[0]["accuracy"] - float((found(XV).argmax(1) == YV).double().mean())) < 1e-7


def case_accumulation_with_a_tail(world: hvdtrain.World) -> None:
    compare(world, "L2", Classifier, accumulate_grad_batches=2, skip=("train_loss_step", "train_loss"))


def case_clipping_and_schedulers(world: hvdtrain.World) -> None:
    class Scheduled(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class OnPlateau(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.9)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    compare(world, "L3a", Scheduled, gradient_clip_val=0.2, max_epochs=3)
    compare(world, "L3b", OnPlateau, gradient_clip_val=0.1, gradient_clip_algorithm="value", max_epochs=4)


def case_a_token_loss_with_its_weight(world: hvdtrain.World) -> None:
    class Tokens(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return {"loss": F.cross_entropy(self(x), y, ignore_index=-100), "weight": (y != -100).sum()}

    class Means(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            outputs = self(x)
            tokens = F.cross_entropy(outputs, y, ignore_index=-100)
            return {"loss": [(tokens, (y != -100).sum()), (outputs.square().mean(), len(x))]}

    class Summed(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            outputs = self(batch[0])
            return F.cross_entropy(outputs, batch[1], ignore_index=-100) + outputs.square().mean()

    class Wrong(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self(batch[0]), batch[1], ignore_index=-100)

    compare(world, "L4a", Tokens, X, HOLES)
    compare(world, "L4b", Means, X, HOLES, plain=Summed)
    with refused("weight=", row="L4c"):
        trainer(world).fit(Wrong(), data(BATCH // world.size, X, HOLES))


def contrastive(a: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(F.normalize(a) @ F.normalize(b).T / 0.5, torch.arange(len(a)))


def case_a_contrastive_loss_of_the_whole_batch(world: hvdtrain.World) -> None:
    class Alone(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return contrastive(self(batch[0]), self(batch[0] * 1.1))

    class Whole(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return contrastive(*hvt.whole(self(batch[0]), self(batch[0] * 1.1)))

    class Gathered(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            pair = self.all_gather((self(batch[0]), self(batch[0] * 1.1)), sync_grads=True)
            return contrastive(*(its.reshape(-1, KINDS) for its in pair))

    compare(world, "L5a", Whole, plain=Alone)
    compare(world, "L5b", Gathered, X[:24], Y[:24], plain=Alone)
    with refused("samples are compared with each other", kind=ConfigError, row="L5c"):
        trainer(world).fit(Alone(), data(BATCH // world.size, X, Y))


def case_early_stopping_and_the_best_checkpoint(world: hvdtrain.World) -> None:
    def run(its: Path, ranks: hvdtrain.World | None) -> tuple[pl.Trainer, float]:
        best = ModelCheckpoint(its, monitor="val_loss", save_top_k=1)
        stop = EarlyStopping("val_loss", patience=1)
        made = trainer(ranks, callbacks=[best, stop], enable_checkpointing=True, max_epochs=30)
        size = world.size if ranks else 1
        module = Classifier(lr=0.3)
        made.fit(module, data(BATCH // size, X, Y), data(BATCH // size, XV, YV))
        assert made.current_epoch < 30
        saved = torch.load(best.best_model_path, weights_only=False)
        Classifier.load_from_checkpoint(best.best_model_path)
        return made, [float(best.best_model_score), made.current_epoch, saved["epoch"], saved["state_dict"]]

    with folder(world, own=False) as ours, folder(world, own=True) as theirs:
        (_, found), (_, wanted) = run(ours, world), run(theirs, None)
    assert found[1:3] == wanted[1:3], (found, wanted)
    apart = max(float((found[3][k] - wanted[3][k]).abs().max()) for k in wanted[3] if "net" in k)
    assert abs(found[0] - wanted[0]) < 1e-10 and apart < 1e-10
    shown("L6", max(abs(found[0] - wanted[0]), apart))


class Estimates(Classifier):
    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches  # makes the loaders before a checkpoint is restored
        return super().configure_optimizers()


def resume(world: hvdtrain.World, row: str, make: type[Classifier], *every: dict[str, int], least: int) -> None:
    """Resumes from each checkpoint of a shuffled training, at least so many; all end as one that was not stopped."""
    fit, checked = data(BATCH // world.size, X, Y, shuffle=True), data(BATCH // world.size, XV, YV)
    whole, again = make(), []
    trainer(world, max_epochs=4).fit(whole, fit, checked)
    for options in every:
        with folder(world) as its:
            part = ModelCheckpoint(its, save_top_k=-1, **options)
            trainer(world, max_epochs=2, callbacks=[part], enable_checkpointing=True).fit(make(), fit, checked)
            for path in sorted(its.glob("*.ckpt")):
                again.append(make(lr=0.9))
                trainer(world, max_epochs=4).fit(again[-1], fit, checked, ckpt_path=str(path))
    assert len(again) >= least
    close(row, *((one, whole) for one in again))


def case_resume_after_and_within_an_epoch(world: hvdtrain.World) -> None:
    every = ({"every_n_epochs": 1}, {"every_n_train_steps": 3}, {"every_n_train_steps": 6})
    resume(world, "L7a", Classifier, *every, least=5)


def case_resume_with_an_estimate_of_the_steps(world: hvdtrain.World) -> None:
    resume(world, "L7b", Estimates, {"every_n_epochs": 1}, {"every_n_train_steps": 3}, least=3)


def case_predictions_are_in_order(world: hvdtrain.World) -> None:
    module = Classifier()
    found = trainer(world).predict(module, data(2, XV, YV))
    wanted = trainer(None).predict(Classifier(), data(4, XV, YV))
    several = trainer(world).predict(module, [data(2, XV, YV), data(3, X, Y)])
    apart = float((torch.cat(found) - torch.cat(wanted)).abs().max())
    assert apart < 1e-12 and len(torch.cat(several[1])) == TRAIN
    assert torch.equal(torch.cat(several[0]), torch.cat(found))
    shown("L8", apart)


def case_a_sampler_and_its_order(world: hvdtrain.World) -> None:
    order = [int(place) for place in torch.randperm(TRAIN, generator=torch.Generator().manual_seed(4))][:29]
    found, wanted = Classifier(), Classifier()
    trainer(world).fit(found, data(BATCH // world.size, X, Y, sampler=order))
    trainer(None).fit(wanted, data(BATCH, X, Y, sampler=order))
    close("L9", (found, wanted))
    checked = trainer(world).validate(found, data(2, XV, YV, sampler=range(9)), verbose=False)
    with torch.no_grad():
        assert abs(checked[0]["val_loss"] - float(F.cross_entropy(found(XV[:9]), YV[:9]))) < 1e-12
    drawn = data(BATCH // world.size, X, Y, sampler=WeightedRandomSampler([1.0] * TRAIN, TRAIN))
    with folder(world, own=False) as its:
        saves = ModelCheckpoint(its, save_top_k=-1, every_n_train_steps=3)
        whole = Classifier()
        trainer(world, callbacks=[saves], enable_checkpointing=True).fit(whole, drawn)
        for path in sorted(its.glob("*.ckpt")):
            again = Classifier()
            trainer(world).fit(again, drawn, ckpt_path=str(path))
            assert gap(again, whole) < 1e-10, (path, gap(again, whole))


def case_loggers_write_on_rank_0(world: hvdtrain.World) -> None:
    with folder(world, own=False) as its:
        made = trainer(world, logger=CSVLogger(its), log_every_n_steps=1)
        made.fit(Classifier(), data(BATCH // world.size, X, Y), data(BATCH // world.size, XV, YV))
        world.barrier()
        written = list(its.rglob("metrics.csv"))
        assert len(written) == 1, written


def case_limits_of_batches(world: hvdtrain.World) -> None:
    compare(world, "L10", Classifier, limit_train_batches=2, limit_val_batches=1)
    with refused("an update must have accumulate_grad_batches batches", row="L10b"):
        made = trainer(world, accumulate_grad_batches=2, limit_train_batches=3)
        made.fit(Classifier(), data(1, X, Y))


def case_other_lengths_of_a_training(world: hvdtrain.World) -> None:
    compare(world, "L19a", Classifier, fast_dev_run=True)
    compare(world, "L19b", Classifier, overfit_batches=2)
    compare(world, "L19c", Classifier, max_steps=6, max_epochs=-1)
    compare(world, "L19d", Classifier, val_check_interval=2)


class Digits(pl.LightningDataModule):
    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def train_dataloader(self) -> Any:
        return data(self.batch, X, Y)

    def val_dataloader(self) -> Any:
        return data(self.batch, XV, YV)


def case_a_data_module(world: hvdtrain.World) -> None:
    found, wanted = Classifier(), Classifier()
    trainer(world).fit(found, datamodule=Digits(BATCH // world.size))
    trainer(None).fit(wanted, datamodule=Digits(BATCH))
    close("L20", (found, wanted))


def case_batch_norm_over_all_ranks(world: hvdtrain.World) -> None:
    class Normed(Classifier):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(WIDE, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, KINDS))

        def configure_optimizers(self) -> Any:  # Adam makes large steps of a gradient that is rounding only
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    compare(world, "L11", Normed, X[:30], Y[:30], sync_batchnorm=True)
    module = Normed()
    made = trainer(world)
    made.fit(module, data(BATCH // world.size, X[:30], Y[:30]), data(BATCH // world.size, XV, YV))
    world.agree("values of a validation", numbers(made)["val_loss"])
    trainer(world).fit(module, data(BATCH // world.size, X[:30], Y[:30]))
    world.agree("running statistics after training", hvt.fingerprint(module))

    class Still(Normed):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.0)

    found, wanted = Still(), Still()
    trainer(world).fit(found, data(BATCH // world.size, X[:24], Y[:24]))
    trainer(None).fit(wanted, data(BATCH, X[:24], Y[:24]))
    assert float((found.net[1].running_mean - wanted.net[1].running_mean).abs().max()) < 1e-12


def case_training_in_place_of_another_trainer(world: hvdtrain.World) -> None:
    """`fit` twice with one trainer, and loaders that are made again for each epoch."""

    class Reloaded(Classifier):
        def train_dataloader(self) -> Any:
            return data(BATCH // (world.size if self.trainer.world_size > 1 else 1), X, Y)

    found, wanted = Reloaded(), Reloaded()
    trainer(world, reload_dataloaders_every_n_epochs=1, max_epochs=3).fit(found)
    trainer(None, reload_dataloaders_every_n_epochs=1, max_epochs=3).fit(wanted)
    close("L12", (found, wanted))


def case_ways_to_write_a_step(world: hvdtrain.World) -> None:
    class Parts(Classifier):
        """Calls a part of itself, changes its batch on the device, and logs from a callback."""

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] * 2, batch[1]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=False, on_epoch=True)
            return {"loss": loss, "other": batch[0].detach()}

    class Logs(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert outputs["other"].shape == batch[0].shape

        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            self.log("epoch", float(trainer.current_epoch))

    class Lbfgs(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    compare(world, "L16a", Parts, callbacks=[Logs()])
    compare(world, "L16b", Lbfgs, X[:36], Y[:36], skip=("train_accuracy", "train_loss_epoch", "seen"))
    compare(world, "L16c", Classifier, precision="64-true")


def rows(samples: Any) -> dict[str, Tensor]:
    return {"x": torch.stack([its["x"] for its in samples]), "y": torch.stack([its["y"] for its in samples])}


def case_workers_and_a_collate_function(world: hvdtrain.World) -> None:
    class Named(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((batch["x"], batch["y"]), batch_idx)

    samples = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
    found, wanted = Named(), Named()
    options: dict[str, Any] = {"collate_fn": rows, "drop_last": True}
    trainer(world).fit(found, DataLoader(samples, BATCH // world.size, num_workers=2, **options))
    trainer(None).fit(wanted, DataLoader(samples, BATCH, **options))
    close("L17", (found, wanted))


def case_mixed_precision(world: hvdtrain.World) -> None:
    for row, precision in (("L18a", "bf16-mixed"), ("L18b", "16-mixed")):
        plugin = MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu") if precision == "16-mixed" else None)
        found, wanted = Classifier(0.01, torch.optim.SGD).float(), Classifier(0.01, torch.optim.SGD).float()
        pair = (X.float(), Y)
        trainer(world, plugins=plugin).fit(found, data(BATCH // world.size, *pair))
        trainer(None, plugins=MixedPrecision(precision, "cpu", None)).fit(wanted, data(BATCH, *pair))
        close(row, (found, wanted), below=1e-3)


# -- manual optimization -------------------------------------------------------------------------------------------
class GAN(pl.LightningModule):
    def __init__(self, pieces: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(5)
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, WIDE))
        self.discriminator = nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, 1))
        self.pieces = pieces

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, z = batch
        for_g, for_d = self.optimizers()
        self.toggle_optimizer(for_g)
        judged = self.discriminator(self.generator(z))
        loss = F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
        self.log("g", loss, on_epoch=True)
        for_g.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(for_g, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        for_g.step()
        self.untoggle_optimizer(for_g)
        for_d.zero_grad()
        real, fake = self.discriminator(x), self.discriminator(self.generator(z).detach())
        self.manual_backward(F.binary_cross_entropy_with_logits(real, torch.ones_like(real)))
        self.manual_backward(F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake)))
        for_d.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), 0.05) for part in (self.generator, self.discriminator)]


def case_a_gan_with_manual_optimization(world: hvdtrain.World) -> None:
    noise = torch.randn(TRAIN, 2, generator=torch.Generator().manual_seed(1))
    compare(world, "L13", GAN, X, noise, valid=False, max_epochs=3)


def case_manual_contrast_of_gathered_outputs(world: hvdtrain.World) -> None:
    class Gathered(GAN):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            outputs = self.all_gather((self.discriminator(batch[0]), batch[0]), sync_grads=True)
            scores, x = (its.reshape(-1, its.shape[-1]) for its in outputs)
            optimizer.zero_grad()
            self.manual_backward(((scores - scores.T) - (x[:, :1] - x[:, :1].T)).square().mean())
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.discriminator.parameters(), 0.05)

    class Whole(Gathered):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(hvt.whole(self.discriminator(batch[0])).square().mean())

    compare(world, "L14", Gathered, X[:24], Y[:24], valid=False)
    with refused("hvt.whole() needs", row="L14b"):
        trainer(world).fit(Whole(), data(BATCH // world.size, X[:24], Y[:24]))


# -- what is refused -----------------------------------------------------------------------------------------------
def case_what_is_refused(world: hvdtrain.World) -> None:
    class Own(Classifier):
        def backward(self, loss: Tensor) -> None:
            loss.backward()

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(zip(X, Y, strict=True))

    class Differs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.no_grad():
                self.net[0].weight += world.rank
            return super().training_step(batch, batch_idx)

    class Outside(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.last = self(batch[0]).mean()

        def on_validation_epoch_end(self) -> None:
            self.log("mine", self.last)

    class Synced(GAN):
        def __init__(self) -> None:
            super().__init__()
            self.discriminator = nn.Sequential(nn.Linear(WIDE, 8), nn.SyncBatchNorm(8), nn.Linear(8, 1))

    small = data(BATCH // world.size, X, Y)
    pairs = TensorDataset(X, Y)
    with refused("a DistributedSampler", row="L15i"):
        sampler = DistributedSampler(pairs, world.size, world.rank)
        trainer(world).fit(Classifier(), DataLoader(pairs, batch_size=2, sampler=sampler))
    with refused("nn.SyncBatchNorm with manual optimization", row="L15j"):
        trainer(world).fit(Synced(), small)
    with refused("must be the same on every rank", row="L15h"):
        trainer(world).validate(Outside(), data(2, XV, YV), verbose=False)
    with refused("cannot average the gradients", "backward is overridden", row="L15a"):
        trainer(world).fit(Own(), small)
    with refused("whose end is not known", row="L15b"):
        trainer(world).fit(Classifier(), DataLoader(Stream(), batch_size=2))
    with refused("must be a DataLoader", "a Stream", row="L15c"):
        trainer(world).fit(Classifier(), Stream())
    with refused("training needs one data loader", row="L15d"):
        trainer(world).fit(Classifier(), {"a": small, "b": small})
    with refused("an update must have accumulate_grad_batches batches", row="L15e"):
        schedule = GradientAccumulationScheduler({0: 1, 1: 2})
        trainer(world, callbacks=[schedule]).fit(Classifier(), small)
    with refused("replicas must be equal", row="L15f"):
        trainer(world).fit(Differs(), small)
    with refused("fewer than the", row="L15g"):
        trainer(world).validate(Classifier(), data(1, XV[:1], YV[:1]), verbose=False)


if __name__ == "__main__":
    cases.main(globals())
