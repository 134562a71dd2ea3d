"""DeepSpeed, which carries the gradients and steps the optimizer; the data, the schedule and the files are hvdtrain's.

ZeRO stage 0 leaves the optimizer whole on every rank; stages 1 and 2 leave each rank a part (`zero`). Checkpoints are
those of the other engines. Written against DeepSpeed 0.19.8: its `engine.py` is the reference for the comments here.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvdtrain.core.errors import ConfigError, LauncherError, install_command
from hvdtrain.core.launchers import Detected
from hvdtrain.torch.engines.base import HALVES, Pass, Piece, Transport, as_parameters
from hvdtrain.torch.engines.group import GroupEngine, join, rank_losses
from hvdtrain.torch.engines.shell import trainable
from hvdtrain.torch.engines.zero import Elsewhere, InOrder, Parts, twin_of

_REDUCIBLE = (torch.float32, torch.bfloat16, torch.float16)
_BUCKET_BYTES = 100 << 20
_TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# no copies of gradients in buffers of its own, no hooks that send them, no norm: clipping is ours
_ZERO = {"contiguous_gradients": False, "overlap_comm": False, "compute_grad_norm": False}
_NEVER = 2**62  # steps between DeepSpeed's own progress lines


def attach(detected: Detected, *, device: str, gpus_per_rank: int) -> GroupEngine:
    """Joins the ranks of torch.distributed and hands the group to DeepSpeed; raises `LauncherError` if it cannot be
    loaded."""
    # read when it is imported; without it DeepSpeed takes a GPU that was not asked for
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device == "cpu" or not torch.cuda.is_available() else "cuda")
    deepspeed = _import()
    engine = join("deepspeed", _bind, detected, device=device, gpus_per_rank=gpus_per_rank)
    # on CPUs it would compile an extension of its own for small messages, on every machine, at the first start
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False, auto_mpi_discovery=False, verbose=False)
    return engine


def _bind(
    engine: GroupEngine, module: nn.Module, optimizer: torch.optim.Optimizer, settings: Transport
) -> DeepSpeedModel:
    return (ZeroModel if settings.zero else DeepSpeedModel)(engine, module, optimizer, settings)


# what `destroy` imports: the garbage collector may call it within another import, whose lock it would break then
# (CPython issue 91351: a KeyError in importlib)
_AT_THE_END = ("module_inject.auto_ep_comm", "utils.pin_memory")


def _import() -> Any:
    """Imports DeepSpeed, quietly: a module of PyTorch's that it takes in warns where there is no GPU."""
    with _quiet("torch.utils.cpp_extension"):
        try:
            deepspeed = importlib.import_module("deepspeed")
            for name in _AT_THE_END:
                importlib.import_module(f"deepspeed.{name}")
            return deepspeed
        except Exception as error:  # it probes compilers and drivers while it is imported
            raise LauncherError(
                "the deepspeed engine needs DeepSpeed", f"{type(error).__name__}: {error}", install_command("deepspeed")
            ) from error


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Limits that logger to errors while the context is open."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class DeepSpeedModel:
    """A model and its optimizer in DeepSpeed's hands, which reduces gradients after the backward pass: in `finish`."""

    def __init__(
        self, engine: GroupEngine, module: nn.Module, optimizer: torch.optim.Optimizer, settings: Transport
    ) -> None:
        self.call: Callable[..., Any] = module
        self._module = module
        self._device = engine.device
        _check_types(module, settings.zero)
        self._bucket_elements = (settings.bucket_bytes or _BUCKET_BYTES) // 4
        self._engine = _initialize(module, optimizer, engine, settings, _wire_type(module, settings))
        self._extras: Tensor | None = None
        self._used: list[bool] | None = None  # where the pass tells no more

    def backward(self, loss: Tensor, sent: Pass) -> None:
        self._used = None if sent.counts else [p.grad is not None for p in trainable(self._module)]
        with self._engine.no_sync():
            self._engine.backward(loss, retain_graph=sent.retain_graph)
        self._extras = sent.extras if sent.reduce else None

    def finish(self) -> None:
        parameters = trainable(self._module)
        used = self._sum_used(self._used or [p.grad is not None for p in parameters], self._sum_gradients)
        for parameter, uses in zip(parameters, used, strict=True):
            if not uses:  # DeepSpeed made zeros: an optimizer would decay these weights and move their momentum
                parameter.grad = None

    def _sum_gradients(self) -> None:
        self._engine.buffered_allreduce_fallback(elements_per_buffer=self._bucket_elements)

    def _sum_used(self, used: list[bool], meanwhile: Callable[[], None] = lambda: None) -> list[float]:
        """Returns how many ranks have a gradient of each parameter; the extras travel along."""
        flags = torch.tensor(used, dtype=torch.float64).to(self._device)
        tail = flags if self._extras is None else torch.cat([flags, self._extras])
        with rank_losses():
            work = dist.all_reduce(tail, async_op=True)
            meanwhile()
            work.wait()
        if self._extras is not None:
            self._extras.copy_(tail[len(used) :])
            self._extras = None
        found: list[float] = tail[: len(used)].tolist()
        return found

    def step(self, closure: Callable[[], object] | None = None) -> None:
        refuse_closure(closure)
        self._engine.step()

    def close(self) -> None:
        self._engine.module_forward_pre_hook.remove()
        self._engine.module_forward_post_hook.remove()
        self._engine.destroy()


class ZeroModel(DeepSpeedModel):
    """A model whose ranks keep parts: of the optimizer's state (stage 1), and of the gradients (stage 2, `parted`):
    then `p.grad` has none after `finish`, and `parts` have. DeepSpeed cuts, steps and gathers; backward passes are
    PyTorch's own, and gradients are sent in one order."""

    def __init__(
        self, engine: GroupEngine, module: nn.Module, optimizer: torch.optim.Optimizer, settings: Transport
    ) -> None:
        twin = twin_of(optimizer)
        self._attributes = [(p, set(vars(p))) for p in module.parameters()]
        super().__init__(engine, module, twin, settings)
        # they follow DeepSpeed's own backward(); the passes here are PyTorch's
        self._engine.module_forward_pre_hook.remove()
        self._engine.module_forward_post_hook.remove()
        zero = self._zero = self._engine.optimizer
        for hook in zero._grad_acc_hooks:
            hook.remove()
        self.parted = settings.zero == 2
        self._size, self._rank = engine.size, engine.rank
        self._drop_attributes(("param_idx_in_group", "grad_accum"))  # all that is needed here
        self.parts = Parts(optimizer, twin, zero, engine.rank, self._gather)
        self._names = {id(p): name.removeprefix("module.") for name, p in module.named_parameters()}  # the shell's
        send = zero.reduce_independent_p_g_buckets_and_remove_grads
        self._in_order = InOrder(self.parts.parameters, send) if self.parted else None

    def backward(self, loss: Tensor, sent: Pass) -> None:
        """See `EngineModel.backward`; raises `ConfigError` if weights were put elsewhere, or others are trained than
        at first."""
        self.parts.check()
        if self._in_order is not None:
            (self._in_order.begin if sent.reduce else self._in_order.stop)()
        with rank_losses():
            loss.backward(retain_graph=sent.retain_graph)
        self._extras = sent.extras if sent.reduce else None

    def finish(self) -> None:
        """See `EngineModel.finish`. Raises `ConfigError`, on every rank, where no rank has a gradient of a
        parameter: the others' would still step it."""
        parameters = [parameter for its in self.parts.parameters for parameter in its]
        if self._in_order is None:
            used = self._sum_used([p.grad is not None for p in parameters], self._sum_gradients)
        else:
            with rank_losses():
                here = self._in_order.finish()
                self._zero.reduce_ipg_grads()
            used = self._sum_used(here)
            self._zero.params_already_reduced[:] = [False] * len(self._zero.params_already_reduced)
            for index, pieces in enumerate(self.parts.pieces):  # this rank keeps the gradients of its part
                self.parts.give(index, [_cut(piece) for piece in pieces])
            for parameter in parameters:
                parameter.grad = Elsewhere.of(parameter)
        unused = [self._names[id(p)] for p, uses in zip(parameters, used, strict=True) if not uses]
        if unused:
            raise ConfigError(
                "every trainable parameter needs a gradient in each update with zero=",
                f"no rank has a gradient of {', '.join(unused[:3])}{' ...' if len(unused) > 3 else ''}",
                "freeze what the loss does not use before prepare(): parameter.requires_grad_(False); or zero=0;\n"
                "parameters that were replaced after prepare() (load_state_dict(assign=True)) are not trained",
                shared=True,
            )

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> Tensor:
        """Clips the gradients over the parts of all ranks, as torch does, and returns their norm before; collective."""
        gradients = [gradient for _, gradient in self.parts.held()]
        norms = torch.zeros(self._size, device=self._device)
        norms[self._rank] = torch.nn.utils.get_total_norm(gradients, norm_type)
        dist.all_reduce(norms)
        total = torch.linalg.vector_norm(norms, norm_type)
        torch.nn.utils.clip_grads_with_norm_(as_parameters(gradients), max_norm, total)
        return total

    def spread_infinity(self) -> None:
        """Puts an infinity into every rank's part if one has one: a gradient scaler looks at its own; collective."""
        tensors = self.parts.tensors()
        bad = (~torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all()).float()
        dist.all_reduce(bad)
        tensors[0][:1] = torch.where(bad > 0, torch.inf, tensors[0][:1])

    def step(self, closure: Callable[[], object] | None = None) -> None:
        """Steps this rank's part; then every rank has all weights. Raises `ConfigError` if a gradient was taken
        away, or (parted) replaced, and for a closure."""
        refuse_closure(closure)
        parameters = [parameter for its in self.parts.parameters for parameter in its]
        self.parts.call_hooks("pre")
        self._check_gradients(parameters)
        kept = [parameter.grad for parameter in parameters]  # DeepSpeed drops them; other engines leave them
        if not self.parted:
            self.parts.fill()
        with rank_losses():
            self.parts.step()
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
        self.parts.call_hooks("post")

    def _check_gradients(self, parameters: list[nn.Parameter]) -> None:
        strange = [p for p in parameters if p.grad is None or (self.parted and not isinstance(p.grad, Elsewhere))]
        if strange:
            names = ", ".join(self._names[id(parameter)] for parameter in strange[:3])
            raise ConfigError(
                "p.grad cannot be removed" + (" or replaced with zero=2" if self.parted else " with zero=1"),
                f"p.grad of {names} was set between backward() and step()",
                "keep the loss's gradients, or change them in place (zero=1); to skip weights in an update: zero=0",
            )

    def _gather(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(self._size)]
        with rank_losses():
            dist.all_gather(parts, part)
        return torch.cat(parts)

    def close(self) -> None:
        if self._in_order is not None:
            self._in_order.close()
        self._engine.destroy()
        self._drop_attributes(())

    def _drop_attributes(self, kept: Sequence[str]) -> None:
        """Takes from the parameters what DeepSpeed has put there, for readers of its states; much cannot be pickled."""
        for parameter, own in self._attributes:
            for name in vars(parameter).keys() - own - set(kept):
                delattr(parameter, name)


def refuse_closure(closure: object) -> None:
    if closure is not None:
        raise ConfigError(
            "step(closure) is not supported with engine='deepspeed'",
            "step(closure)",
            'optimizer.backward(loss) and step(), or engine="ddp" or "horovod"',
        )


def _cut(piece: Piece) -> Tensor:
    """A copy of a gradient's elements: the whole one's memory is free then."""
    gradient = piece.parameter.grad
    assert gradient is not None
    whole = piece.stop - piece.start == gradient.numel()
    flat = gradient.contiguous().view(-1)
    return flat if whole else flat[piece.start : piece.stop].clone()


def _check_types(module: nn.Module, zero: int) -> None:
    taken = (torch.float32,) if zero else _REDUCIBLE
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in taken:
            raise ConfigError(
                "trainable parameters must be float32 with zero="
                if zero
                else "trainable parameters must be float32, bfloat16 or float16 with engine='deepspeed'",
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}",
                'keep them float32 and use mixed precision: prepare(..., amp="bf16"); or use zero=0'
                if zero
                else 'convert the model, or use engine="ddp" or "horovod"',
            )


def _wire_type(module: nn.Module, settings: Transport) -> torch.dtype:
    """Returns the type gradients travel in: the parameters' own where they share one, or float32."""
    if settings.compression:
        return HALVES[settings.compression]
    own = {parameter.dtype for parameter in trainable(module)}
    return own.pop() if len(own) == 1 else torch.float32


def _initialize(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    engine: GroupEngine,
    settings: Transport,
    wire_type: torch.dtype,
) -> Any:
    """Returns DeepSpeed's engine: no precision, clipping, accumulation or schedule of its own; sums, not means."""
    deepspeed = importlib.import_module("deepspeed")  # not `import`: this module has the same name
    config = {
        "train_micro_batch_size_per_gpu": 1,  # only its own throughput figures would use it
        "gradient_accumulation_steps": 1,
        "gradient_allreduce_op": "sum",
        "gradient_clipping": 0.0,  # by default it would clip at 1
        "communication_data_type": _TYPE_NAMES[wire_type],
        "zero_optimization": {"stage": settings.zero}
        | (_ZERO if settings.zero else {})
        | {"reduce_bucket_size": (settings.bucket_bytes or _BUCKET_BYTES) // 4},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": _NEVER,
        "wall_clock_breakdown": False,
    }
    # it wants LOCAL_RANK, which not every launcher sets, and takes it for the index of the GPU to use
    local_rank = str(engine.devices[0] if engine.devices else engine.local_rank)
    with (
        mock.patch.dict(os.environ, {"LOCAL_RANK": local_rank}),
        # parameters are the same already, and it views them as bytes, which channels-last ones and scalars do not allow
        mock.patch.object(deepspeed.DeepSpeedEngine, "_broadcast_model", lambda self: None),
        _quiet("DeepSpeed"),  # it warns of optimizers it has not tried; `zero.flat_twin` has
    ):
        started, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    return started
