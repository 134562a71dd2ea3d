"""A strategy that makes Lightning's `Trainer` train on hvdtrain: N ranks train like one process.

::

    trainer = lightning.Trainer(strategy=HorovodStrategy(), max_epochs=10)
    trainer.fit(model, DataLoader(dataset, batch_size=32, shuffle=True))  # under hvdtrain launch, horovodrun, srun

Automatic optimization goes through `hvdtrain.torch.prepare`; manual optimization is averaged here, after each backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torchmetrics import Metric

import hvdtrain.torch as hvt
from hvdtrain import ConfigError, Step, World
from hvdtrain.integrations.ranks import (
    Collectives,
    LightningRanks,
    LoaderFollower,
    deal,
    join_metrics,
    joined,
    refuse_whole,
    uncounted,
)
from hvdtrain.integrations.summing import GradientSums, share_buffers, share_weights

_ABSENT = object()


class HorovodStrategy(Collectives, ParallelStrategy):
    """Trains on the ranks that a launcher started: `Trainer(strategy=HorovodStrategy())`.

    It joins the ranks when it is made, or takes those of `hvdtrain.init`.

    Args:
        engine, device: as of `hvdtrain.init`.
        options: of `hvdtrain.torch.prepare`: `compression`, `verify`, `watch_every`.

    Raises:
        ConfigError: the module or its data cannot train the same on several ranks.
        ReplicaError: gradients are not averaged, or replicas differ.
    """

    def __init__(self, *, engine: str = "auto", device: str = "auto", **options: Any) -> None:
        world, place = joined(engine, device)
        super().__init__(parallel_devices=[place], cluster_environment=LightningRanks(world))
        self.world: World = world
        self._options = options
        self._loaders: list[hvt.Loader] = []
        self._train: TrainingData | None = None
        self._step: Step | None = None  # of the batch whose training_step or validation_step runs
        self.evaluated: Step | None = None  # of the batch that an evaluation read last
        self._log_weight: float | None = None  # samples of a value that is being logged
        self._prepared: Any = None  # the module, as hvdtrain prepared it
        self._optimizer: Any = None
        self._accumulate = 1
        self._loss: tuple[Any, Any] = (None, None)  # of the batch at hand, with its weight
        self._updating = False
        self._sums = GradientSums(world, verify=options.get("verify", True))  # of manual optimization
        self._compared = -1  # the epoch in which replicas were compared last

    # -- the ranks -------------------------------------------------------------------------------------------------
    @property
    def is_distributed(self) -> bool:
        """True only within `self.log`, which then honours sync_dist: Lightning must not cut the data a second time."""
        return self._log_weight is not None

    def model_to_device(self) -> None:
        self._module.to(self.root_device)

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns the reduction over ranks; of a value that a step logs, the mean weighed by samples."""
        if not isinstance(tensor, Tensor):
            return tensor
        return self.reduced(tensor, reduce_op, self._log_weight, group)

    def gather_to_differentiate(self, tensor: Tensor) -> Tensor:
        if not self._module.automatic_optimization:
            return super().gather_to_differentiate(tensor)
        rows = tensor if tensor.dim() else tensor.reshape(1)
        return hvt.whole(rows, world=self.world).reshape(self.world.size, *tensor.shape)

    def same_on_all(self, value: Tensor, reduce_op: Any = None, group: Any = None) -> Tensor:
        """Returns a value that was logged after an evaluation's batches; raises `ConfigError` if ranks differ."""
        values = self.world.gather(value.detach().cpu())
        if any(not torch.equal(its, values[0]) for its in values):
            raise ConfigError(
                "a value that is logged outside of validation_step must be the same on every rank",
                f"by rank: {[its.tolist() for its in values]}",
                "log it in validation_step: hvdtrain weighs it by samples; or a torchmetrics.Metric;\n"
                "or compute it of all outputs (self.all_gather); or sync_dist=True for the mean of the ranks",
                shared=True,
            )
        return value

    # -- setting up ------------------------------------------------------------------------------------------------
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        if self.world.size > 1 and "log" not in vars(model):
            vars(model)["log"] = _logs(self, model.log)

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        join_metrics(self._module)
        if trainer.state.fn == "fit":
            self._check_module(trainer)
        else:
            share_weights(self._module, self.world)

    def _check_module(self, trainer: pl.Trainer) -> None:
        module, received, fix = self._module, "", ""
        if module.automatic_optimization and is_overridden("backward", module):
            received, fix = "LightningModule.backward is overridden", "automatic_optimization = False, manual_backward"
        elif "dataloader_iter" in inspect.signature(module.training_step).parameters:
            received, fix = "training_step(dataloader_iter)", "training_step(batch, batch_idx)"
        elif not module.automatic_optimization and self._layer_sync is not None:
            received, fix = "sync_batchnorm=True with manual optimization", "nn.GroupNorm, or another norm"
        elif not module.automatic_optimization and any(isinstance(its, nn.SyncBatchNorm) for its in module.modules()):
            received, fix = "nn.SyncBatchNorm with manual optimization", "nn.GroupNorm, or another norm"
        if received:
            raise ConfigError("hvdtrain cannot average the gradients of this module", received, fix)

    def process_dataloader(self, dataloader: object) -> object:
        """Deals a loader's samples to the ranks, each sample once."""
        trainer = self._module.trainer
        trains = trainer.training
        dealt = deal(dataloader, self.world, trains=trains)
        loader, steps = dealt.loader, dealt.steps
        self._loaders += [] if loader is dataloader else [loader]
        if not trains:
            return EvaluationData(loader, steps, self)
        progress: Any = trainer.fit_loop.epoch_progress.current
        done = progress.processed  # a checkpoint's current_epoch lags behind
        if done:
            loader.go_on(done, 0)
        again, self._train = self._prepared is not None, TrainingData(loader, steps, trainer)
        if again:
            self._prepare()
        return self._train

    def on_train_start(self) -> None:
        given: Any = self._module.trainer.train_dataloader
        if self._train is None or given is not self._train:
            raise ConfigError(
                "training needs one data loader", f"a {type(given).__name__} of several loaders",
                "one data set that gives all parts of a sample: torch.utils.data.StackDataset(a=..., b=...)",
            )  # fmt: skip
        if self._module.automatic_optimization:
            self._prepare()
            return
        share_weights(self._module, self.world)
        self._train.loader.followers.add(self._train)  # it then serves as many batches on every rank

    def _prepare(self) -> None:
        assert self._train is not None
        self._close()
        self._accumulate = self._module.trainer.accumulate_grad_batches
        self._prepared, self._optimizer = hvt.prepare(
            self._module, self.optimizers[0], self._train.loader, world=self.world, accumulate=self._accumulate,
            sync_batchnorm=self._layer_sync is not None, **self._options,
        )  # fmt: skip

    def _share_buffers(self) -> None:
        """Gives every rank the mean of running statistics, and rank 0's other buffers."""
        assert self._train is not None
        self._train.finish()
        share_buffers(self._module, self.world)

    def on_validation_start(self) -> None:
        if self._train is not None:
            self._share_buffers()

    on_train_end = on_validation_start

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._train is not None:
            self._share_buffers()
        return super().lightning_module_state_dict()

    def _close(self) -> None:
        if self._optimizer is not None:
            self._optimizer.close()
        self._prepared = self._optimizer = None

    def teardown(self) -> None:
        self._close()
        for loader in self._loaders:
            loader.close()
        self._loaders, self._train, self._compared = [], None, -1
        if self.lightning_module is not None:
            vars(self.lightning_module).pop("log", None)
        super().teardown()

    # -- steps -----------------------------------------------------------------------------------------------------
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module, data = self._module, self._train
        assert data is not None
        step = data.loader.step
        assert step is not None
        with self._in_step(step), self.precision_plugin.train_step_context(), self._uncounted(step):
            if module.automatic_optimization:
                with _forward_through(module, self._prepared):
                    return self._note_loss(module.training_step(*args, **kwargs))
            output = module.training_step(*args, **kwargs)
        data.loader.differentiated = step
        if self._compared != step.epoch:
            self._compared = step.epoch
            weights = nn.ParameterList(module.parameters())
            self.world.agree("the model's weights after the epoch's first batch", hvt.fingerprint(weights))
        return output

    def _uncounted(self, step: Step) -> AbstractContextManager[None]:
        """Restores what a padding batch changes; the prepared module of automatic optimization restores buffers."""
        return uncounted([self._module], step, self.world, buffers=not self._module.automatic_optimization)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_step(self.evaluated):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_step(self.evaluated):
            return super().test_step(*args, **kwargs)

    @contextmanager
    def _in_step(self, step: Step | None) -> Iterator[None]:
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def _note_loss(self, output: Any) -> Any:
        """Keeps the loss as hvdtrain takes it, with its weight; returns what Lightning takes."""
        loss, weight = (output.get("loss"), output.get("weight")) if isinstance(output, Mapping) else (output, None)
        self._loss = loss, weight
        if isinstance(loss, (list, tuple)):
            return {**output, "loss": sum(mean for mean, _ in loss)}
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not self._module.automatic_optimization:
            return self._backward_by_hand(closure_loss, *args, **kwargs)
        (given, weight), step = self._loss, None if self._train is None else self._train.loader.step
        assert step is not None
        terms = given if isinstance(given, (list, tuple)) else None
        whole = given if terms is None else closure_loss * self._accumulate  # undivided
        scaled: Any = self.precision_plugin.pre_backward(whole, self._module)
        if terms is not None and scaled is not whole:
            raise ConfigError("a list of means needs precision without a scaler", "16-mixed", 'use "bf16-mixed"')
        self._optimizer.backward(scaled if terms is None else terms, weight=weight)
        found = self.precision_plugin.post_backward(whole, self._module)
        completes, self._loss = step.update(self._accumulate)[1], (None, None)
        if completes != self._updating:
            raise ConfigError(
                "an update must have accumulate_grad_batches batches, or end with its epoch",
                f"Lightning ends it elsewhere than after {self._accumulate} batches: limit_train_batches,"
                " overfit_batches,\nGradientAccumulationScheduler, or a checkpoint that was saved within an update",
                "one accumulate_grad_batches, and limits that are multiples of it",
            )
        if not completes:
            self._optimizer.step()
        return found

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        if self._optimizer is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        steps: Any = _Steps(optimizer, self._optimizer)
        self._updating = True
        try:
            found = super().optimizer_step(steps, closure, model, **kwargs)
        finally:
            self._updating = False
        if not steps.stepped:
            self._optimizer.skip()  # a gradient scaler has found an infinite gradient
        return found

    # -- manual optimization ---------------------------------------------------------------------------------------
    def _backward_by_hand(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Differentiates this rank's share of the loss, and adds the sum over ranks to `p.grad`."""
        step = self._step
        if step is None:
            raise ConfigError("manual_backward() must be called in training_step()", "a call elsewhere", "move it")
        parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        refuse_whole(loss)
        part = loss * (step.samples / step.global_samples)
        backward = super().backward
        return self._sums.backward(parameters, lambda: backward(part, None, *args, **kwargs), counts=not step.padding)

    # -- predictions -----------------------------------------------------------------------------------------------
    def on_predict_end(self) -> None:
        """Gives every rank the predictions of all samples, in the order of the data."""
        loop = self._module.trainer.predict_loop
        if not loop.return_predictions or self.world.size == 1:
            return
        every = [loop.predictions] if loop.num_dataloaders == 1 else loop.predictions
        for kept in every:
            rounds = zip_longest(*self.world.gather(kept), fillvalue=_ABSENT)
            kept[:] = [batch for batches in rounds for batch in batches if batch is not _ABSENT]


# ---- data


class TrainingData(LoaderFollower):
    """A rank's training batches, as Lightning's loops read them: `steps` in each epoch, on every rank."""

    def __init__(self, loader: hvt.Loader, steps: int, trainer: pl.Trainer) -> None:
        self.loader, self._steps, self._trainer = loader, steps, trainer
        self._loop: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        """Begins a loop with its first batch: Lightning may restore a checkpoint in between."""
        if self.loader.position == (0, 0):
            self._go_on()
        self._loop = iter(self.loader)
        yield from self._loop

    def _go_on(self) -> None:
        """Finds a checkpoint's place in the data, if this was made before Lightning restored the checkpoint.

        `trainer.estimated_stepping_batches` in configure_optimizers makes it so early; Lightning then starts the epoch
        again.
        """
        fit: Any = self._trainer.fit_loop
        epochs, batches = fit.epoch_progress.current, fit.epoch_loop.batch_progress.current.processed
        within = epochs.ready > epochs.processed
        if within and batches >= self._steps:
            self.loader.go_on(epochs.processed + 1, 0)
        elif epochs.processed or (within and batches):
            self.loader.go_on(epochs.processed, batches * self.loader.global_batch if within else 0)

    def _done(self) -> int:
        step = self.loader.step
        return 0 if step is None else -(-step.samples_done // self.loader.global_batch)

    def finish(self) -> None:
        """Ends the loop after the last batch: Lightning counts batches, and does not ask for another."""
        if self.loader.running and self._done() >= self._steps:
            next(self._loop, None)

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the data, which Lightning saves in its checkpoints."""
        over = self.loader.running and self._done() >= self._trainer.num_training_batches
        return self.loader.state_of_next_loop() if over else self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


class EvaluationData:
    """A rank's batches of an evaluation: each sample once over all ranks; the last steps may have no batch here."""

    def __init__(self, loader: hvt.Loader, steps: int, strategy: HorovodStrategy) -> None:
        self._loader, self._steps, self._strategy = loader, steps, strategy

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        for batch, step in self._loader.one_pass():
            self._strategy.evaluated = step
            yield batch


# ---- steps


class _Steps:
    """The user's optimizer, whose step is that of the prepared one, after the closure."""

    def __init__(self, own: torch.optim.Optimizer, prepared: Any) -> None:
        self._own, self._prepared, self.stepped = own, prepared, False

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        self.stepped = True
        if closure is not None and isinstance(self._own, torch.optim.LBFGS):
            return self._prepared.step(closure)
        found = None if closure is None else closure()
        self._prepared.step()
        return found


@contextmanager
def _forward_through(module: pl.LightningModule, prepared: Any) -> Iterator[None]:
    """Sends `self(x)` of a step through the prepared module, which sees the outputs that a loss is made of."""
    given = vars(module).get("forward")
    vars(module)["hvdtrain_forward"] = module.forward
    vars(module)["forward"] = lambda *args, **kwargs: prepared.hvdtrain_forward(*args, **kwargs)
    try:
        yield
    finally:
        for name, value in (("forward", given), ("hvdtrain_forward", None)):
            vars(module).pop(name)
            if value is not None:
                vars(module)[name] = value


def _logs(strategy: HorovodStrategy, log: Callable[..., None]) -> Callable[..., None]:
    """Returns `self.log` for ranks: epoch values of steps are those of all ranks' samples."""
    signature = inspect.signature(log)

    def logs(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        trainer, step = strategy._module.trainer, strategy._step
        strategy._log_weight = 1.0
        if step is not None and not call.arguments.get("rank_zero_only"):
            strategy._log_weight = _synchronised(call.arguments, step, trainer)
        elif trainer.evaluating and not call.arguments.get("sync_dist"):
            call.arguments["sync_dist"], vars(strategy)["reduce"] = True, strategy.same_on_all
        try:
            log(*call.args, **call.kwargs)
        finally:
            strategy._log_weight = None
            vars(strategy).pop("reduce", None)

    return logs


def _synchronised(given: dict[str, Any], step: Step, trainer: pl.Trainer) -> float:
    """Changes the arguments of `self.log` for ranks; returns how many samples the value is of."""
    if trainer.evaluating and given.get("on_step"):
        raise ConfigError(
            "on_step=True is not supported in an evaluation: ranks may have different numbers of batches",
            f"self.log({given['name']!r}, ..., on_step=True)", "on_step=False, on_epoch=True",
        )  # fmt: skip
    given["sync_dist"] = given.get("sync_dist") or trainer.evaluating or bool(given.get("on_epoch"))
    if given.get("batch_size") is None:
        given["batch_size"] = step.samples
    if step.padding and not isinstance(given["value"], Metric):
        given["batch_size"] = 0
        name = getattr(given["reduce_fx"], "__name__", given["reduce_fx"])
        value, neutral = given["value"], {"min": float("inf"), "max": float("-inf")}.get(name, 0.0)
        given["value"] = torch.full_like(value, neutral) if isinstance(value, Tensor) else neutral
    return float(given["batch_size"])
