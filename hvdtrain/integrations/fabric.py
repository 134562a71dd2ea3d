"""A strategy that makes a loop on Lightning Fabric train on hvdtrain: N ranks train like one process.

::

    fabric = lightning.Fabric(strategy=HorovodFabricStrategy())
    fabric.launch()  # under hvdtrain launch, horovodrun, srun, which have started the ranks
    model, optimizer = fabric.setup(model, optimizer)
    train = fabric.setup_dataloaders(DataLoader(dataset, batch_size=32, shuffle=True))
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.strategies import ParallelStrategy  # type: ignore[attr-defined]
from torch import Tensor, nn
from torchmetrics import Metric

import hvdtrain.torch as hvt
from hvdtrain import ConfigError, Step
from hvdtrain.integrations import ranks
from hvdtrain.integrations.summing import GradientSums, share_buffers, share_weights


class HorovodFabricStrategy(ranks.Collectives, ParallelStrategy):
    """Trains on the ranks that a launcher started: `Fabric(strategy=HorovodFabricStrategy())`.

    It joins the ranks when it is made, or takes those of `hvdtrain.init`.

    Args:
        engine, device: as of `hvdtrain.init`.
        verify: False skips the proof of the first sum of gradients.

    Attributes:
        samples: this rank's samples in the batch that a loader handed out last, 0 in a padding batch; after a loop
            those of the loop; None before the first.

    Raises:
        ConfigError: the loop cannot train the same on several ranks.
        ReplicaError: gradients are not summed, or replicas differ.
    """

    def __init__(self, *, engine: str = "auto", device: str = "auto", verify: bool = True) -> None:
        world, place = ranks.joined(engine, device)
        super().__init__(parallel_devices=[place], cluster_environment=ranks.LightningRanks(world))
        self.world = world
        self.samples: int | None = None
        self._sums = GradientSums(world, verify=verify)
        self._modules: list[nn.Module] = []
        self._metrics: list[Metric] = []
        self._apart: list[nn.Module] = []  # modules within no_backward_sync
        self._steps: dict[FabricData, Step] = {}  # of the batches of training loops
        self._padding = False  # the batch of now counts as nothing
        self._uneven = ""  # why ranks have no equal numbers of batches in the evaluation that runs
        # Fabric looks for no_backward_sync under this name, which is private. Without it each backward pass is summed.
        self._backward_sync_control: Any = self

    @property
    def preempted(self) -> bool:
        """Returns True, on all ranks, if a rank got SIGTERM before the last sum of gradients.

        The loop can save then. The job ends with exit code 85 when it asks for the next batch.
        """
        return self._sums.preempted

    # -- setting up ------------------------------------------------------------------------------------------------
    distributed_sampler_kwargs = None  # the samples are dealt here

    def module_to_device(self, module: nn.Module) -> None:
        module.to(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
            raise ConfigError(
                "nn.SyncBatchNorm is not supported under Fabric: it does not know Horovod's ranks",
                f"a {type(module).__name__} with nn.SyncBatchNorm",
                "nn.GroupNorm; or hvdtrain.torch.prepare(..., sync_batchnorm=True) in a loop of your own",
            )
        share_weights(module, self.world)
        ranks.join_metrics(module)
        self._modules.append(module)
        return module

    def join_metric(self, metric: Metric) -> Metric:
        """Lets a metric that is no part of a module compute over all ranks' samples; returns it."""
        ranks.join_metrics(metric)
        self._metrics.append(metric)
        return metric

    def process_dataloader(self, dataloader: Any) -> Any:
        """Deals a loader's samples to the ranks, each sample once; collective."""
        return FabricData(ranks.deal(dataloader, self.world, trains=True), self)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        self.compare()
        return super().get_module_state_dict(module)

    # -- steps -----------------------------------------------------------------------------------------------------
    def backward(
        self, tensor: Tensor, module: nn.Module | None, *args: Any, weight: Tensor | float | None = None, **kwargs: Any
    ) -> None:
        """Adds the gradient of the mean over all ranks' samples to `p.grad`; collective.

        Args:
            tensor: the mean loss of this rank's batch.
            weight: its divisor on this rank, if that is not the number of samples.
        """
        ranks.refuse_whole(tensor)
        step, differentiate = self._step(), super().backward
        own, total = float(step.samples), float(step.global_samples)
        if weight is not None:
            own = 0.0 if step.padding else float(weight)
            total = sum(self.world.gather(own)) or 1.0
        self._sums.backward(
            self._parameters(self._modules), lambda: differentiate(tensor * (own / total), module, *args, **kwargs),
            counts=own > 0, apart=set(self._parameters(self._apart)),
        )  # fmt: skip
        for data, its_step in self._steps.items():
            data.loader.differentiated = its_step

    def _parameters(self, modules: list[nn.Module]) -> list[nn.Parameter]:
        every = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
        return [parameter for parameter in every if parameter.requires_grad]

    def _step(self) -> Step:
        """Returns the step of the batch that the training loop has now."""
        if not self._steps:
            raise ConfigError(
                "fabric.backward() needs a training loop over a loader that was set up", "no such loop runs",
                "for batch in fabric.setup_dataloaders(loader); call model.train() before the loop",
            )  # fmt: skip
        parts = {(step.samples, step.global_samples) for step in self._steps.values()}
        if len({own / total for own, total in parts}) > 1:
            raise ConfigError(
                "loaders that are read together must give a rank the same part of their batches",
                f"(samples of this rank, of all ranks): {sorted(parts)}",
                "torch.utils.data.StackDataset(a=..., b=...), or drop_last=True",
            )
        return list(self._steps.values())[-1]

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """Lets the gradients of a module wait for the next backward pass outside, which sums all of them."""
        before, self._apart = self._apart, [*self._apart, module] if enabled else self._apart
        try:
            yield
        finally:
            self._apart = before

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        if "closure" in kwargs:
            closure = kwargs["closure"]
            kwargs["closure"] = lambda: self.reduced(closure(), "mean", self._step().samples)  # LBFGS compares losses
        else:
            self._check_summed(optimizer)
        return super().optimizer_step(optimizer, **kwargs)

    def clip_gradients_norm(self, module: nn.Module, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        self._check_summed(optimizer)
        return super().clip_gradients_norm(module, optimizer, *args, **kwargs)

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        self._check_summed(optimizer)
        super().clip_gradients_value(module, optimizer, clip_val)

    def _check_summed(self, optimizer: Any) -> None:
        parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        received = fix = ""
        if not parameters <= {parameter for module in self._modules for parameter in module.parameters()}:
            received, fix = (
                "parameters of no module that was set up",
                "model, optimizer = fabric.setup(model, optimizer)",
            )
        elif any(parameter.grad is not None for parameter in parameters & self._sums.unsummed):
            received = "gradients that wait since no_backward_sync()"
            fix = "no_backward_sync(model, enabled=False) for the last backward pass before the update"
        if received:
            raise ConfigError("an update needs gradients that are summed over ranks", received, fix)

    # -- loops -----------------------------------------------------------------------------------------------------
    def trains(self) -> bool:
        """Returns True if a loop that begins now trains."""
        modes = (part.training for module in self._modules for part in module.modules())
        return torch.is_grad_enabled() and any(modes)

    @contextmanager
    def in_batch(self, data: FabricData, step: Step, *, trains: bool) -> Iterator[None]:
        """A loop's body, for the batch that it got."""
        self.samples = step.samples
        self._padding, self._uneven = step.padding, "" if trains else data.uneven
        if trains:
            self._steps[data] = step
        try:
            with ranks.uncounted([*self._modules, *self._metrics], step, self.world):
                yield
        finally:
            self._steps.pop(data, None)
            self._padding, self._uneven = False, ""

    def compare(self) -> None:
        """Raises `ReplicaError` unless replicas are equal; gives them the same buffers; collective."""
        weights = nn.ParameterList(parameter for module in self._modules for parameter in module.parameters())
        self.world.agree("model weights", hvt.fingerprint(weights))
        self.share_buffers()

    def share_buffers(self) -> None:
        for module in self._modules:
            share_buffers(module, self.world)

    # -- collectives -----------------------------------------------------------------------------------------------
    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over ranks, in place as Fabric does; a padding batch adds nothing.

        The mean of floating-point numbers is weighed by `samples`. The mean of integers, which are counts, is that of
        the ranks.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        self._check_even("all_reduce")
        skipped = self._padding and ranks.operation(reduce_op) in ("mean", "sum")
        own = torch.zeros_like(tensor) if skipped else tensor
        found = self.reduced(own, reduce_op, self.samples if tensor.is_floating_point() else None, group)
        return tensor.detach().copy_(found) if found.dtype == tensor.dtype else found

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        self._check_even("all_gather")
        return super().all_gather(tensor, group, sync_grads)

    def _check_even(self, name: str) -> None:
        if self._uneven:
            raise ConfigError(
                f"fabric.{name}() in an evaluation loop needs a batch on every rank in every step", self._uneven,
                f"add up in the loop, and call fabric.{name}() after it",
            )  # fmt: skip


class SavedByLoop:
    """Stands for a loop that saves when it is preempted."""

    order = 0

    def save(self) -> str:
        return "the loop could save while fabric.strategy.preempted"


class FabricData(ranks.LoaderFollower):
    """A loader's batches: in a training loop equally many on every rank, in an evaluation each sample once."""

    saver: Any = SavedByLoop()

    def __init__(self, dealt: ranks.Deal, strategy: HorovodFabricStrategy) -> None:
        self.loader, self._steps, self._strategy, size = dealt.loader, dealt.steps, strategy, strategy.world.size
        few = f"the last step has {dealt.last} sample(s) for {size} ranks"
        self.uneven = few if dealt.last < size else ""

    @property
    def preempted(self) -> bool:
        return self._strategy.preempted

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        strategy, trains, samples = self._strategy, self._strategy.trains(), 0
        if trains:
            self.loader.followers.add(self)
        else:
            strategy.share_buffers()
        batches: Any = self._training() if trains else self.loader.one_pass()
        try:
            for batch, step in batches:
                samples += step.samples
                with strategy.in_batch(self, step, trains=trains):
                    yield batch
        finally:
            strategy.samples = samples
        if trains:
            strategy.compare()

    def _training(self) -> Iterator[tuple[Any, Step | None]]:
        for batch in self.loader:
            yield batch, self.loader.step

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the data: with `fabric.save`, training continues with the next sample."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
