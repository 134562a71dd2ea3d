"""LightningModules as users write them, on ranks: weights and logged values of one process of plain Lightning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from samples import (  # isort: skip (makes cases.py importable)
    BATCH, HOLES, KINDS, NOISE, TRAIN, WIDE, XV, YV, Stream, X, Y, adversaries, contrast, data, judged, network,
)  # fmt: skip

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
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import ConfigError
from hvdtrain.integrations.lightning import HorovodStrategy


class Classifier(pl.LightningModule):
    """The module of Lightning's first lesson, with validation, test and predict."""

    def __init__(self, lr: float = 0.1, optimizer: Any = torch.optim.Adam) -> None:
        super().__init__()
        self.net = network()
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
    quiet |= {"enable_checkpointing": False, "max_epochs": 1, "accelerator": "cpu", "num_sanity_val_steps": 0}
    if world is not None:
        options["strategy"] = HorovodStrategy()
    else:
        options["devices"] = 1
    return pl.Trainer(**quiet | options)


def numbers(found: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in found.callback_metrics.items()}


def metrics_gap(one: dict[str, float], other: dict[str, float]) -> float:
    assert one.keys() == other.keys() != set(), (one, other)
    gaps = {name: abs(one[name] - other[name]) for name in one}
    assert max(gaps.values()) < 1e-10, gaps
    return max(gaps.values())


def validated(batch: int, *parts: Tensor) -> dict[str, Any]:
    """Loaders for `fit`."""
    return {"train_dataloaders": data(batch, *(parts or (X, Y))), "val_dataloaders": data(batch, XV, YV)}


def compare(
    world: hvdtrain.World, row: str, make: Callable[[], pl.LightningModule], *parts: Tensor,
    skip: tuple[str, ...] = (), plain: Any = None, load: Callable[[int], dict[str, Any]] | None = None, **options: Any,
) -> tuple[pl.LightningModule, pl.Trainer]:  # fmt: skip
    """Trains on ranks and, on rank 0, in one process, whose batch is an update's; shows the largest difference.

    `load` makes the loaders for a size of batches; `plain` the module of one process; `skip` names logged values.
    """
    load = load or (lambda batch: validated(batch, *parts))
    pieces = options.pop("accumulate_grad_batches", 1)

    def kept(its: pl.Trainer) -> dict[str, float]:
        return {name: value for name, value in numbers(its).items() if name not in skip}

    def gap_to_one_process() -> float:
        wanted, theirs = (plain or make)(), trainer(None, **options)
        theirs.fit(wanted, **load(BATCH))
        logged = metrics_gap(kept(ours), kept(theirs)) if kept(ours) or kept(theirs) else 0.0
        return max(gap(found, wanted), logged)

    found, ours = make(), trainer(world, accumulate_grad_batches=pieces, **options)
    ours.fit(found, **load(BATCH // world.size // pieces))
    largest = world.on_main(gap_to_one_process)
    assert largest < 1e-10, largest
    world.agree("weights and logged values", [hvt.fingerprint(nn.ParameterList(found.parameters())), kept(ours)])
    shown(row, largest)
    return found, ours


# -- automatic optimization ----------------------------------------------------------------------------------------
def case_classification_with_an_uneven_end(world: hvdtrain.World) -> None:
    # each step's own loss is rank 0's, unless it is logged with sync_dist=True or on_epoch=True
    found, ours = compare(world, "L1", Classifier, max_epochs=2, num_sanity_val_steps=1)
    assert ours.global_step == 8 and ours.world_size == world.size and ours.global_rank == world.rank
    tested = ours.test(found, data(BATCH // world.size, XV, YV), verbose=False)
    with torch.no_grad():
        assert abs(tested[0]["test_loss"] - float(F.cross_entropy(found(XV), YV))) < 1e-12
    checked = ours.validate(found, data(2, XV, YV), verbose=False)
    assert abs(checked[0]["accuracy"] - float((found(XV).argmax(1) == YV).double().mean())) < 1e-7


def case_accumulation_with_a_tail(world: hvdtrain.World) -> None:
    compare(world, "L2", Classifier, accumulate_grad_batches=2, max_epochs=2, skip=("train_loss_step", "train_loss"))


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

    compare(world, "L3a", Scheduled, gradient_clip_val=0.2, max_epochs=2)
    compare(world, "L3b", OnPlateau, gradient_clip_val=0.1, gradient_clip_algorithm="value", max_epochs=3)


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
    def run(its: Path, ranks: hvdtrain.World | None) -> list[Any]:
        best = ModelCheckpoint(its, monitor="val_loss", save_top_k=1)
        made = trainer(
            ranks, callbacks=[best, EarlyStopping("val_loss", patience=1)], enable_checkpointing=True, max_epochs=30,
            logger=CSVLogger(its), log_every_n_steps=1,
        )  # fmt: skip
        made.fit(Classifier(lr=0.3), **validated(BATCH // (ranks.size if ranks else 1)))
        assert made.current_epoch < 30
        saved = torch.load(best.best_model_path, weights_only=False)
        Classifier.load_from_checkpoint(best.best_model_path)
        return [float(best.best_model_score), made.current_epoch, saved["epoch"], saved["state_dict"]]

    with folder(world, own=False) as ours, folder(world, own=True) as theirs:
        found, wanted = run(ours, world), world.on_main(run, theirs, None)
        world.barrier()
        assert len(list(ours.rglob("metrics.csv"))) == 1, "rank 0 logs"
    assert found[1:3] == wanted[1:3], (found, wanted)
    apart = max(float((found[3][k] - wanted[3][k]).abs().max()) for k in wanted[3] if "net" in k)
    assert abs(found[0] - wanted[0]) < 1e-10 and apart < 1e-10
    shown("L6", max(abs(found[0] - wanted[0]), apart))


class Quiet(Classifier):
    """Logs nothing while it trains: each value of each step is summed over ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])


class Estimates(Quiet):
    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches  # makes the loaders before a checkpoint is restored
        return super().configure_optimizers()


def case_resume_after_and_within_an_epoch(world: hvdtrain.World) -> None:
    """All trainings end as one that was not stopped."""
    size = BATCH // world.size
    for row, make, checked in (("L7a", Quiet, data(size, XV, YV)), ("L7b", Estimates, None)):
        fit = {"train_dataloaders": data(size, X, Y, shuffle=True), "val_dataloaders": checked}
        whole, again = make(), []
        with folder(world) as its:
            saves = [ModelCheckpoint(its, save_top_k=-1, every_n_epochs=1)]
            saves.append(ModelCheckpoint(its, save_top_k=-1, every_n_train_steps=3))
            trainer(world, max_epochs=2, callbacks=saves, enable_checkpointing=True).fit(whole, **fit)
            for path in sorted(its.glob("*.ckpt")):
                again.append(make(lr=0.9))
                trainer(world, max_epochs=2, num_sanity_val_steps=1).fit(again[-1], **fit, ckpt_path=str(path))
        assert len(again) == 4, "after updates 3, 4, 6 and 8"
        close(row, *((one, whole) for one in again))


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
    found, _ = compare(
        world, "L9", Classifier, load=lambda batch: {"train_dataloaders": data(batch, X, Y, sampler=order)}
    )  # fmt: skip
    checked = trainer(world).validate(found, data(2, XV, YV, sampler=range(9)), verbose=False)
    with torch.no_grad():
        assert abs(checked[0]["val_loss"] - float(F.cross_entropy(found(XV[:9]), YV[:9]))) < 1e-12
    drawn = data(BATCH // world.size, X, Y, sampler=WeightedRandomSampler([1.0] * TRAIN, TRAIN))
    with folder(world, own=False) as its:
        whole, again = Classifier(), Classifier()
        saves = ModelCheckpoint(its, every_n_train_steps=3)
        trainer(world, callbacks=[saves], enable_checkpointing=True).fit(whole, drawn)
        trainer(world).fit(again, drawn, ckpt_path=saves.best_model_path)
        assert gap(again, whole) < 1e-10, gap(again, whole)


def case_limits_of_batches(world: hvdtrain.World) -> None:
    compare(world, "L10", Classifier, limit_train_batches=2, limit_val_batches=1)
    # as Lightning 1.9 tested its own Horovod strategy (test_horovod.py), which also tried L2, L3b, L13 and L15e
    compare(world, "L21a", Classifier, limit_train_batches=0.5, limit_val_batches=0.5, gradient_clip_val=1.0)
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
    compare(world, "L20", Classifier, load=lambda batch: {"datamodule": Digits(batch)}, num_sanity_val_steps=1)


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


def case_loaders_made_again_for_each_epoch(world: hvdtrain.World) -> None:
    class Reloaded(Classifier):
        def train_dataloader(self) -> Any:
            return data(BATCH // self.trainer.world_size, X, Y)

    compare(world, "L12", Reloaded, load=lambda _: {}, reload_dataloaders_every_n_epochs=1, max_epochs=2)


def case_ways_to_write_a_step(world: hvdtrain.World) -> None:
    class Parts(Classifier):
        """Calls a part of itself, changes its batch on the device, and logs from a callback."""

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] * 2, batch[1]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=False, on_epoch=True)
            self.log("ranks", 1.0, sync_dist=True, reduce_fx="sum")
            return {"loss": loss, "other": batch[0].detach()}

    class Logs(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert outputs["other"].shape == batch[0].shape

        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            self.log("epoch", float(trainer.current_epoch))

    class Lbfgs(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    _, ours = compare(world, "L16a", Parts, X[:36], Y[:36], callbacks=[Logs()], skip=("ranks",))
    assert numbers(ours)["ranks"] == world.size
    compare(world, "L16b", Lbfgs, X[:36], Y[:36], skip=("train_accuracy", "train_loss_epoch", "seen"))
    compare(world, "L16c", Classifier, precision="64-true")


def rows(samples: Any) -> dict[str, Tensor]:
    return {"x": torch.stack([its["x"] for its in samples]), "y": torch.stack([its["y"] for its in samples])}


def case_workers_and_a_collate_function(world: hvdtrain.World) -> None:
    class Named(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((batch["x"], batch["y"]), batch_idx)

    samples = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
    options: dict[str, Any] = {"collate_fn": rows, "drop_last": True}

    def load(batch: int) -> dict[str, Any]:
        return {"train_dataloaders": DataLoader(samples, batch, num_workers=0 if batch == BATCH else 2, **options)}

    compare(world, "L17", Named, load=load)


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
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = adversaries()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, z = batch
        for_g, for_d = self.optimizers()
        self.toggle_optimizer(for_g)
        loss = judged(self.discriminator(self.generator(z)), 1.0)
        self.log("g", loss, on_epoch=True)
        for_g.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(for_g, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        for_g.step()
        self.untoggle_optimizer(for_g)
        for_d.zero_grad()
        self.manual_backward(judged(self.discriminator(x), 1.0))
        self.manual_backward(judged(self.discriminator(self.generator(z).detach()), 0.0))
        for_d.step()

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers() or []:
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(part.parameters(), 0.05) for part in (self.generator, self.discriminator)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(its, 1, gamma=0.5) for its in optimizers]


def case_a_gan_with_manual_optimization(world: hvdtrain.World) -> None:
    def load(batch: int) -> dict[str, Any]:
        return {"train_dataloaders": data(batch, X, NOISE)}

    _, ours = compare(world, "L13", GAN, load=load, max_epochs=2)
    assert [its.param_groups[0]["lr"] for its in ours.optimizers] == [0.05 / 4] * 2


def case_manual_contrast_of_gathered_outputs(world: hvdtrain.World) -> None:
    class Gathered(GAN):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            outputs = self.all_gather((self.discriminator(batch[0]), batch[0]), sync_grads=True)
            scores, x = (its.reshape(-1, its.shape[-1]) for its in outputs)
            optimizer.zero_grad()
            self.manual_backward(contrast(scores, x))
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.discriminator.parameters(), 0.05)

    class Whole(Gathered):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(hvt.whole(self.discriminator(batch[0])).square().mean())

    compare(world, "L14", Gathered, load=lambda batch: {"train_dataloaders": data(batch, X[:24], Y[:24])})
    with refused("hvt.whole() needs", row="L14b"):
        trainer(world).fit(Whole(), data(BATCH // world.size, X[:24], Y[:24]))


# -- what is refused -----------------------------------------------------------------------------------------------
def case_what_is_refused(world: hvdtrain.World) -> None:
    class Own(Classifier):
        def backward(self, loss: Tensor) -> None:
            loss.backward()

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
        trainer(world, callbacks=[schedule], max_epochs=2).fit(Classifier(), small)
    with refused("replicas must be equal", row="L15f"):
        trainer(world).fit(Differs(), small)
    with refused("fewer than the", row="L15g"):
        trainer(world).validate(Classifier(), data(1, XV[:1], YV[:1]), verbose=False)


if __name__ == "__main__":
    cases.main(globals())
