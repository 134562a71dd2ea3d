"""A strategy that makes Lightning's `Trainer` train on hvdtrain: N ranks train like one process.

::

    trainer = lightning.Trainer(strategy=HorovodStrategy(), max_epochs=10)
    trainer.fit(model, DataLoader(dataset, batch_size=32, shuffle=True))  # under hvdtrain launch, horovodrun, srun

Automatic optimization goes through `hvdtrain.torch.prepare`; manual optimization is averaged here, after each backward.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment  # type: ignore[attr-defined]
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils import data as torch_data
from torchmetrics import Metric

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain import ConfigError, Step, World
from hvdtrain.integrations.summing import GradientSums

_STATISTICS = ("running_mean", "running_var")
_ABSENT = object()


class HorovodStrategy(ParallelStrategy):
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
        seed = int(os.environ["PL_GLOBAL_SEED"]) if "PL_GLOBAL_SEED" in os.environ else None
        world = hvdtrain.current() or hvdtrain.init("torch", engine=engine, device=device, seed=seed)
        place = torch.device("cuda", world.devices[0]) if world.devices else torch.device("cpu")
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
    def root_device(self) -> torch.device:
        assert self.parallel_devices
        return self.parallel_devices[0]

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

    def barrier(self, name: str | None = None) -> None:
        self.world.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.world.broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        decisions = self.world.gather(bool(decision))
        return min(decisions) if all else max(decisions)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns the reduction over ranks; of a value that a step logs, the mean weighed by samples."""
        if not isinstance(tensor, Tensor):
            return tensor
        self._check_group(group)
        op: Any = getattr(reduce_op, "name", str(reduce_op)).lower().replace("avg", "mean")
        tensor = tensor.detach()
        if op == "mean" and not tensor.is_floating_point():
            tensor = tensor.double()  # Lightning's own mean of integers is rounded down
        if op != "mean" or self._log_weight is None:
            return hvt.reduce(tensor, op, world=self.world)
        weight = torch.full_like(tensor, self._log_weight)
        total, weights = hvt.reduce(torch.stack([tensor * weight, weight]), "sum", world=self.world)
        return total / weights

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns [size, ...] of all ranks' tensors; with `sync_grads` they have a gradient."""
        self._check_group(group)
        if self.world.size == 1:
            return tensor
        shapes = self.world.gather(tuple(tensor.shape))
        if len(set(shapes)) > 1:
            raise ConfigError(
                "all_gather() needs tensors of one shape", f"by rank: {shapes}",
                "hvdtrain.torch.whole(values) joins rows of any number, with their gradient", shared=True,
            )  # fmt: skip
        if not (sync_grads and tensor.requires_grad and torch.is_grad_enabled()):
            flat = hvt.gather(tensor.detach().reshape(1, -1), world=self.world)
            return flat.reshape(self.world.size, *tensor.shape)
        if self._module.automatic_optimization:
            rows = tensor if tensor.dim() else tensor.reshape(1)
            return hvt.whole(rows, world=self.world).reshape(self.world.size, *tensor.shape)
        gathered: Tensor = _Gather.apply(tensor, self.world)
        return gathered

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

    def _check_group(self, group: Any) -> None:
        if group is not None and group is not torch.distributed.group.WORLD:
            raise ConfigError(
                "collectives must be of all ranks", f"group={group!r}", "remove group= and sync_dist_group="
            )

    # -- setting up ------------------------------------------------------------------------------------------------
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        if self.world.size > 1 and "log" not in vars(model):
            vars(model)["log"] = _logs(self, model.log)

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        for metric in _metrics(self._module):
            if metric.dist_sync_fn is None:
                metric.dist_sync_fn, metric.distributed_available_fn = _of_all_ranks, _several_ranks
        if trainer.state.fn == "fit":
            self._check_module(trainer)
        else:
            self._share_weights()

    def _check_module(self, trainer: pl.Trainer) -> None:
        module, received, fix = self._module, "", ""
        if module.automatic_optimization and is_overridden("backward", module):
            received, fix = "LightningModule.backward is overridden", "automatic_optimization = False, manual_backward"
        elif "dataloader_iter" in inspect.signature(module.training_step).parameters:
            received, fix = "training_step(dataloader_iter)", "training_step(batch, batch_idx)"
        elif not module.automatic_optimization and self._layer_sync is not None:
            received, fix = "sync_batchnorm=True with manual optimization", "nn.SyncBatchNorm, or another norm"
        if received:
            raise ConfigError("hvdtrain cannot average the gradients of this module", received, fix)

    def process_dataloader(self, dataloader: object) -> object:
        """Deals a loader's samples to the ranks, each sample once."""
        trainer = self._module.trainer
        trains = trainer.training
        loader, steps = _dealt(dataloader, self.world, trains=trains)
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
        self._share_weights()
        self._train.loader.followers.add(self._train)  # it then serves as many batches on every rank

    def _prepare(self) -> None:
        assert self._train is not None
        self._close()
        self._accumulate = self._module.trainer.accumulate_grad_batches
        self._prepared, self._optimizer = hvt.prepare(
            self._module, self.optimizers[0], self._train.loader, world=self.world, accumulate=self._accumulate,
            sync_batchnorm=self._layer_sync is not None, **self._options,
        )  # fmt: skip

    def _share_weights(self) -> None:
        with torch.no_grad():
            for tensor in (*self._module.parameters(), *self._module.buffers()) if self.world.size > 1 else ():
                tensor.copy_(hvt.broadcast(tensor, world=self.world))

    def _share_buffers(self) -> None:
        """Gives every rank the mean of running statistics, and rank 0's other buffers."""
        assert self._train is not None
        self._train.finish()
        with torch.no_grad():
            for name, buffer in self._module.named_buffers() if self.world.size > 1 else ():
                combine = hvt.reduce if name.endswith(_STATISTICS) else hvt.broadcast
                buffer.copy_(combine(buffer, world=self.world))

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
        with self._in_step(step), self.precision_plugin.train_step_context(), _uncounted(module, step, self.world):
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
        earlier = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        found = super().backward(loss * (step.samples / step.global_samples), None, *args, **kwargs)
        fresh = [None if step.padding or p.grad is None else p.grad.detach() for p in parameters]
        for parameter, gradient, before in zip(parameters, self._sums.of(parameters, fresh), earlier, strict=True):
            parameter.grad = gradient if before is None else before if gradient is None else before + gradient
        return found

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


class LightningRanks(LightningEnvironment):
    """The ranks of an hvdtrain world, as Lightning asks for them."""

    creates_processes_externally = True

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.set_world_size(world.size)
        self.set_global_rank(world.rank)

    def local_rank(self) -> int:
        return self._world.local_rank

    def node_rank(self) -> int:
        return self._world.node

    def teardown(self) -> None:
        """Leaves the launcher's variables as they are."""


# ---- data


class TrainingData:
    """A rank's training batches, as Lightning's loops read them: `steps` in each epoch, on every rank."""

    preempted, leaves, saver, accumulate = False, False, None, 1  # as the loader asks what follows it

    def __init__(self, loader: hvt.Loader, steps: int, trainer: pl.Trainer) -> None:
        self.loader, self._steps, self._trainer = loader, steps, trainer
        self._loop: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        self._loop = iter(self.loader)
        return self._loop

    def handed_out(self, step: Step | None, batch: Any = None) -> None:
        """Follows the loader; there is nothing to note."""

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


def _dealt(data: Any, world: World, *, trains: bool) -> tuple[hvt.Loader, int]:
    """Returns hvdtrain's loader of the same samples, and its steps in an epoch."""
    if isinstance(data, hvt.Loader):
        return data, data.plan.steps()
    rule, fix = (
        "data must be a DataLoader of samples that can be dealt to the ranks",
        "DataLoader(dataset, batch_size=8)",
    )
    if not isinstance(data, torch_data.DataLoader):
        raise ConfigError(rule, f"a {type(data).__name__}", fix)
    batches: Any = data.batch_sampler
    batch, drop = getattr(batches, "batch_size", data.batch_size), trains and getattr(batches, "drop_last", False)
    sampler: Any = getattr(batches, "sampler", None)
    received = ""
    if isinstance(data.dataset, torch_data.IterableDataset) or not hasattr(sampler, "__len__"):
        received = f"{type(data.dataset).__name__}, whose end is not known"
    elif batch is None or (trains and type(batches) is not torch_data.BatchSampler):
        received = f"batch_sampler={type(batches).__name__}(...)"
    elif not trains and len(sampler) < world.size:
        received = f"{len(sampler)} samples, fewer than the {world.size} ranks"
    if received:
        raise ConfigError(rule, received, fix)
    shuffles = isinstance(sampler, torch_data.RandomSampler) and not sampler.replacement
    shuffles = shuffles and len(sampler) == len(data.dataset)  # type: ignore[arg-type]
    given = None if shuffles or isinstance(sampler, torch_data.SequentialSampler) else sampler
    loader = hvt.loader(
        data.dataset, batch, world=world, shuffle=shuffles and trains, tail="drop" if drop else "weighted",
        workers=data.num_workers, collate=None if data.collate_fn is torch_data.default_collate else data.collate_fn,
        sampler=given, worker_init_fn=data.worker_init_fn, prefetch_factor=data.prefetch_factor or 2,
        timeout_s=data.timeout,
    )  # fmt: skip
    every, whole = len(sampler), loader.global_batch
    return loader, every // whole if drop else -(-every // whole)


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


def _metrics(module: nn.Module) -> list[Metric]:
    return [part for part in module.modules() if isinstance(part, Metric)]


@contextmanager
def _uncounted(module: pl.LightningModule, step: Step, world: World) -> Iterator[None]:
    """Restores metrics after a padding batch; and buffers, unless the prepared module does so."""
    padding = step.padding and world.size > 1
    buffers = [] if module.automatic_optimization or not padding else list(module.buffers())
    kept = [(buffer, buffer.clone()) for buffer in buffers]
    states = [(metric, {k: _copied(v) for k, v in vars(metric).items()}) for metric in _metrics(module) if padding]
    yield
    for metric, state in states:
        vars(metric).update(state)
    for buffer, before in kept:
        buffer.copy_(before)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else list(value) if type(value) is list else value


def _of_all_ranks(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Returns each rank's state of a metric, of any shape; collective."""
    world = hvdtrain.current() or World.solo()
    return [its.to(tensor.device) for its in world.gather(tensor.detach().cpu())]


def _several_ranks() -> bool:
    world = hvdtrain.current()
    return world is not None and world.size > 1


class _Gather(torch.autograd.Function):
    """All ranks' tensors, stacked; a rank's gradient is the sum of all ranks' gradients by its tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: World) -> Tensor:
        ctx.world = world
        return hvt.gather(tensor.detach().reshape(1, -1), world=world).reshape(world.size, *tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return hvt.reduce(gradient.detach(), "sum", world=ctx.world)[ctx.world.rank], None
