"""A split model: runs its stages side by side over micro-batches, and looks like the unsplit model."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.plan import schedule as plan
from hvdtrain.pipeline.run.batchnorm import Moving, Pooled
from hvdtrain.pipeline.run.passes import Head
from hvdtrain.pipeline.run.proof import CutProof, loss_key
from hvdtrain.pipeline.run.stage import Stage
from hvdtrain.pipeline.run.worker import StageCall, StageError
from hvdtrain.pipeline.trace.fixed import FrozenModelCheck
from hvdtrain.pipeline.trace.segments import Segment
from hvdtrain.pipeline.values import rng
from hvdtrain.pipeline.values.microbatch import (
    Chunk,
    Inputs,
    Weight,
    flat,
    marked,
    not_joined,
    pieces_of,
    samples_of,
    shares,
)
from hvdtrain.pipeline.values.places import Places
from hvdtrain.values.nested import join, map_tensors

__all__ = ["Pipeline", "StageError"]

Loss = Callable[[Any, Any], Tensor]
# what makes a module's parts and names; a split model shares them with the module
_PARTS = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


class Pipeline(nn.Module):
    """A model that `hvdtrain.pipeline.split` has cut into stages.

    Parameters, buffers, their names and state dicts are those of the unsplit model.

    Example:
        loss = pipe.step(x, y, loss_fn)
        with torch.no_grad():
            outputs = pipe(x)

    Attributes:
        module: the unsplit model; its parts are on the stages' devices.
        stages, segments: the parts that it was cut into.
        devices: of the stages.
        micro_batches, schedule, remat: how a batch passes through; they may be changed between steps.
        batch_norm: "batch": running statistics follow whole batches; "micro": micro-batches.
        chunk: which arguments have samples; see `split`.
        names: of the arguments that are given by keyword.
        counts: attributes of modules that each training pass changes, with their modules.
        proofs: False skips the check in a loss's first steps that its mean is that of micro-batches.
        batch_is_part: True if a batch is one of several of an update, of ranks or of an accumulation.
    """

    holds_users_module = True

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[Stage],
        *,
        segments: Sequence[Segment],
        micro_batches: int,
        schedule: plan.Schedule = "1f1b",
        remat: plan.Remat = "never",
        batch_norm: Literal["batch", "micro"] = "batch",
        chunk: Chunk = None,
    ) -> None:
        super().__init__()
        self.stages, self.segments = list(stages), list(segments)
        self.devices = [stage.device for stage in self.stages]
        self.micro_batches, self.schedule, self.remat, self.batch_norm = micro_batches, schedule, remat, batch_norm
        self.chunk = chunk
        self.proofs, self.batch_is_part = True, False
        program = self.segments[0].chain.program
        self.names = program.names
        paths = {module: path for path, module in model.named_modules()}
        self.counts = [(f"{paths[owner]}.{name}", owner) for owner, name in self.segments[0].chain.facts.counts]
        changing = {id(buffer) for stage in self.stages for buffer in stage.changing_buffers()}
        self._finishing = [False] * len(self.stages)
        self._drawing: dict[Hashable, rng.Seen] = {}  # by segment
        self._moving = Moving(model, changing, self.counts)
        self._busy = threading.Lock()
        self._fixed = FrozenModelCheck(program)
        self._places = Places(self.devices)
        self._proof = CutProof(weakref.proxy(self))  # no circle: threads end with the last reference
        # past nn.Module's bookkeeping: the model must not appear as a child, under a prefix, and parts of it may have
        # any name, the pipeline's too
        vars(self).update(module=model, training=model.training, **{name: getattr(model, name) for name in _PARTS})

    # -- one batch -------------------------------------------------------------------------------------------
    def step(
        self,
        x: Any,
        y: Any,
        loss: Loss,
        *,
        kwargs: Mapping[str, Any] | None = None,
        weight: Weight = None,
        factor: float | Tensor = 1.0,
        whole: bool = False,
        outputs: bool = False,
    ) -> Any:
        """Runs a batch forward and backward, in micro-batches, and returns its mean loss.

        Adds `factor * sum(w_i * g_i) / sum(w_i)` to `p.grad`, and to the gradients of arguments with `requires_grad`:
        the gradient of `factor` times the mean loss over the batch, where w_i is the divisor of micro-batch i's mean
        loss.

        Args:
            x: the model's argument, or a tuple of its arguments. Tensors [batch, ...] are cut; tensors of another
                length go to every micro-batch whole.
            y: the targets, nested in any way; every tensor is [batch, ...].
            loss: `loss(output, target)`: the mean over its samples.
            kwargs: the model's keyword arguments: those that it was split with.
            weight: the divisor of that mean. None: samples. Else a function of the targets that adds up over
                micro-batches: `lambda y: (y != -100).sum()`. A micro-batch of weight 0 does not count, and its loss is
                not called. With one micro-batch a number is enough. A step waits for weights that a GPU computes.
            factor: of the gradient.
            whole: the loss is called once, with the outputs and targets of the whole batch (a contrastive loss), after
                all forward passes, as in "gpipe".
            outputs: True also returns the model's outputs, for metrics.

        Returns:
            The mean loss, detached, without the factor; on the last stage's device. With `outputs` a tuple of it and
            the outputs, detached.

        Raises:
            ConfigError: fewer samples than micro-batches, targets of another length, a loss that is not a scalar, a
                weight that is not a number >= 0, or one for several micro-batches; other keyword arguments.
            StageError: a stage failed. The gradients are those from before this step.
        """
        if not torch.is_grad_enabled():
            raise ConfigError("step() needs gradients", "step() under torch.no_grad()", "call the pipeline: pipe(x)")
        arguments = self._arguments(x, kwargs)
        batch = samples_of(arguments)
        sizes = plan.micro_batch_sizes(batch, max(1, min(self.micro_batches, batch)))
        self._moving.check(self.remat, len(sizes) if self.batch_norm == "batch" else 1)
        head = self._head(loss, y, sizes, weight, factor, whole, outputs)
        orders = plan.stage_orders("gpipe" if whole else self.schedule, len(self.stages), len(sizes))
        again = [plan.recomputed(self.remat, order) for order in orders]
        with self._alone(training=True), self._gradients_or_as_before():
            if self.proofs and (len(sizes) > 1 or self.batch_is_part):
                self._proof.of_model(arguments)
                if not whole and len(sizes) > 1:
                    self._proof.of_loss(arguments, y, loss, weight)
            for stage in self.stages:
                stage.refresh()
            inputs = Inputs(arguments, sizes)
            losses = self._call(inputs, orders, again, head)
            for stage in self.stages:
                stage.return_gradients()
            inputs.return_gradients()
        counted = [loss * share for loss, share in zip(losses, head.weights, strict=False) if share]
        mean = torch.stack(counted).sum() if counted else torch.zeros((), device=self.devices[-1])
        return (mean, join(head.outputs, sizes, not_joined)) if outputs else mean

    def _arguments(self, x: Any, kwargs: Mapping[str, Any] | None) -> tuple[Any, ...]:
        arguments = flat(x, kwargs, self.names)
        if fixed := self.segments[0].chain.program.fixed:
            fixed.check(self.module, self.names, arguments)
        return marked(arguments, self.chunk, self.names)

    @staticmethod
    def _head(
        loss: Loss, y: Any, sizes: Sequence[int], weight: Weight, factor: Any, whole: bool, outputs: bool
    ) -> Head:
        kept = [None] * len(sizes) if outputs else []
        if not whole:
            targets = pieces_of(y, sizes, every="targets")
            return Head(loss, targets, shares(weight, targets, sizes), factor, loss_key(loss), outputs=kept)
        if weight is not None:
            raise ConfigError("weight= cannot be combined with whole=True", "a weight for a loss of the whole batch")
        return Head(loss, [y], [1.0], factor, loss_key(loss), outputs=kept, sizes=sizes)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the outputs for a batch, without gradients.

        Args:
            args, kwargs: the model's; see `step`. A batch smaller than the number of micro-batches is cut into single
                samples.

        Raises:
            ConfigError: in training with gradients enabled (use `step`), or for other keyword arguments.
            StageError: a stage failed.
        """
        if torch.is_grad_enabled() and self.module.training:
            raise ConfigError(
                "a pipeline must be trained by step(), which runs forward and backward passes in parallel",
                "the pipeline was called in training mode, with gradients",
                "loss = pipe.step(x, y, loss_fn); to look at outputs: with torch.no_grad(), or pipe.eval()",
            )
        arguments = self._arguments(*map_tensors(torch.detach, (args, kwargs)))
        batch = samples_of(arguments)
        sizes = plan.micro_batch_sizes(batch, min(self.micro_batches, batch)) if batch else (0,)
        with self._alone():
            return join(self._outputs(pieces_of(arguments, sizes)), sizes, not_joined)

    def check_example(self, arguments: tuple[Any, ...]) -> None:
        """Refuses a model whose outputs for two halves of a batch are not those of the whole; changes nothing."""
        with self._alone():
            self._proof.of_model(arguments)

    def _outputs(self, pieces: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Returns the outputs of micro-batches, without gradients."""
        order = [plan.Action("forward", i) for i in range(len(pieces))]
        for stage in self.stages:
            stage.refresh()
        with torch.inference_mode() if torch.is_inference_mode_enabled() else torch.no_grad():
            return self._call(pieces, [order] * len(self.stages), [frozenset()] * len(self.stages), None)

    def _call(
        self,
        given: Inputs | Sequence[tuple[Any, ...]],
        orders: Sequence[Sequence[plan.Action]],
        again: Sequence[frozenset[int]],
        head: Head | None,
    ) -> list[Any]:
        inputs, gradients = (given.pieces, given.gradients) if isinstance(given, Inputs) else (given, [])
        several = len(inputs) > 1
        training = any(module.training for module in self.module.modules())
        # with one micro-batch the layers themselves do what is right, unless parts are repeated
        repeats = any(stage.repeats for stage in self.stages)
        draws = rng.Draws(self._drawing, self.devices) if several and (head is not None or training) else None
        gather = self.batch_norm == "batch" and (several or repeats) and training
        pooled = Pooled(module for stage in self.stages for module in stage.modules()) if gather else None
        call = StageCall(
            stages=self.stages,
            places=self._places,
            orders=orders,
            recompute=again,
            inputs=inputs,
            gradients=gradients if isinstance(given, Inputs) and given.wanted else None,
            head=head,
            pooled=pooled,
            draws=draws,
            finishing=self._finishing,
        )
        try:
            with pooled.gathering() if pooled else nullcontext():
                results = call.run()
                if draws is not None:
                    draws.check(repeats=any(again))
            return results
        finally:
            if draws is not None:
                draws.close()

    @contextmanager
    def _alone(self, *, training: bool = False) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise ConfigError(
                "a pipeline cannot work on two batches at once",
                "a call within its own loss, or from a second thread",
                "a pipeline for each thread, of a model of its own; or calls one after the other (threading.Lock)",
            )
        try:
            self._fixed.check(training=training)
            yield
        finally:
            self._finishing[:] = [False] * len(self._finishing)
            self._busy.release()

    @contextmanager
    def _gradients_or_as_before(self) -> Iterator[None]:
        """Puts the gradients from before back, from a copy (gradients add up in place), if a step ends halfway."""
        before = [(p, None if p.grad is None else p.grad.detach().clone()) for p in self.module.parameters()]
        try:
            yield
        except BaseException:
            for parameter, gradient in before:
                parameter.grad = gradient
            for stage in self.stages:
                for _, proxy in stage.proxies:
                    proxy.grad = None
            raise

    # -- who owns what ---------------------------------------------------------------------------------------
    def owned_parameters(self) -> list[list[nn.Parameter]]:
        """The model's parameters by stage, and at the end those that several stages use; each once."""
        shared = {id(owner) for stage in self.stages for owner, _ in stage.proxies}
        proxies = {id(proxy) for stage in self.stages for _, proxy in stage.proxies}
        seen: set[int] = set()
        groups: list[list[nn.Parameter]] = []
        for stage in self.stages:
            mine = [p for p in stage.parameters() if id(p) not in shared | proxies | seen]
            seen |= {id(p) for p in mine}
            groups.append(mine)
        # parameters that no stage uses get no gradient
        return [*groups, [p for p in self.module.parameters() if id(p) not in seen]]

    def finishing(self, group: int) -> bool:
        """Returns True if a stage (see `owned_parameters`) completes its gradients; shared ones' only after a step."""
        return group < len(self._finishing) and self._finishing[group]

    def close(self) -> None:
        """Ends the threads of the stages; the next call starts new ones. Raises `ConfigError` during a call."""
        if not self._busy.acquire(blocking=False):
            raise ConfigError(
                "a pipeline that is at work cannot be closed",
                "close() in its own loss, or while another thread calls it",
                "close() after the step; in another thread: thread.join() first",
            )
        try:
            self._places.close()
        finally:
            self._busy.release()

    # -- like the unsplit model ------------------------------------------------------------------------------
    def train(self, mode: bool = True) -> Pipeline:
        self.training = mode
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Returns a copy of the unsplit model on its devices, as `torch.optim.swa_utils.AveragedModel` needs."""
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "a pipeline cannot be pickled: it needs the devices and objects of the model that was split",
            "copy.copy, pickle or torch.save of a pipeline",
            "save pipe.state_dict(), or pipe.module; copy.deepcopy(pipe) is a copy of the unsplit model",
        )

    def extra_repr(self) -> str:
        where = ", ".join(f"{stage.name} on {stage.device}" for stage in self.stages)
        return f"{where}; {self.micro_batches} micro-batches, {self.schedule}, remat={self.remat}"

    def _apply(self, fn: Any, recurse: bool = True) -> Pipeline:
        raise ConfigError(
            "a split model cannot change its devices or data types",
            "to(), cuda(), half() or the like on a pipeline",
            "change the model before hvdtrain.pipeline.split(model, ...)",
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not there yet
                raise
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        check_setting(name, value)
        if isinstance(value, (nn.Module, nn.Parameter)):
            raise ConfigError(
                "a part cannot be added after split(): no stage would use it",
                f"{name} = {type(value).__name__}(...) on a pipeline",
                "add it to the model, and split again",
            )
        model = vars(self).get("module")
        if model is not None and name not in vars(self) and name in vars(model):
            setattr(model, name, value)
        elif name in vars(self):  # the pipeline's own, whatever a part of the model is called
            vars(self)[name] = value
        else:
            super().__setattr__(name, value)


def check_setting(name: str, value: Any) -> None:
    """Raises `ConfigError` for a value that the schedule, remat or another setting of a pipeline cannot have."""
    words = {"schedule": plan.SCHEDULES, "remat": plan.REMATS, "batch_norm": ("batch", "micro")}.get(name)
    if words is not None and value not in words:
        raise ConfigError(f"{name}= must be one of {', '.join(words)}", f"{name}={value!r}")
    if name == "micro_batches" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError("micro_batches= must be a whole number >= 1", f"micro_batches={value!r}")
