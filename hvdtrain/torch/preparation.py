"""`prepare`: ties the user's model and optimizer to the ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from weakref import ref

import torch
from torch import nn

from hvdtrain.comm import elastic
from hvdtrain.core import variables
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.keywords import refuses_other_keywords
from hvdtrain.core.lr import LR, NOT_LR
from hvdtrain.torch.engines import unprepared
from hvdtrain.torch.engines.base import Staged, Transport, staged_or_none
from hvdtrain.torch.engines.engine import engine_of
from hvdtrain.torch.engines.shell import ModelShell, is_compiled, unwrap
from hvdtrain.torch.engines.sync_batchnorm import convert, count_unsynchronized, revert
from hvdtrain.torch.engines.zero import ZeroModel
from hvdtrain.torch.losses.loss_proof import LossProof
from hvdtrain.torch.trained import Trained
from hvdtrain.torch.update import start
from hvdtrain.torch.update.amp import MixedPrecision
from hvdtrain.torch.update.averaging import prove
from hvdtrain.torch.update.batches import Batches
from hvdtrain.torch.update.gradients import Gradients
from hvdtrain.torch.update.in_step import TrackedModel
from hvdtrain.torch.update.model import Model
from hvdtrain.torch.update.nonfinite import Losses
from hvdtrain.torch.update.optimizer import Optimizer
from hvdtrain.torch.update.refusals import check_model, check_optimizer, check_plain
from hvdtrain.torch.update.regroup import check_elastic
from hvdtrain.torch.update.session import Options, Rates, Session, prepared_optimizers
from hvdtrain.torch.update.several import Several
from hvdtrain.torch.update.staged import check_staged
from hvdtrain.torch.values.clock import CLOCK
from hvdtrain.values.coupled import refuse_coupled_layers
from hvdtrain.world.world import World, given_or_current

if TYPE_CHECKING:
    from hvdtrain.torch.data.loader import Loader


_NO_LOADER = (
    "hvdtrain: prepare() was given no loader: hvdtrain cannot check that each rank reads its own samples, and each"
    " sample once an epoch; hvdtrain.torch.loader(dataset, per_rank_batch) does both"
)

_OWN_RATE = "hvdtrain: global batch {}; the learning rate is the optimizer's (no lr=)"

_OWN_BATCH = (
    "hvdtrain: {} batch-norm layer(s) use each rank's own batch;"
    " for the global batch: prepare(..., sync_batchnorm=True)"
)


@refuses_other_keywords(
    backward_passes_per_step="accumulate=",
    gradient_accumulation_steps="accumulate=",
    max_grad_norm="clip=",
    mixed_precision='amp="bf16", or amp="fp16"',
    precision='amp="bf16", or amp="fp16"',
    named_parameters="prepare(model, optimizer, data): it reads the names from the model",
)
def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    data: Loader | None = None,
    *,
    world: World | None = None,
    lr: LR | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    amp: Literal["bf16", "fp16"] | None = None,
    compression: Literal["fp16", "bf16"] | None = None,
    sync_batchnorm: bool = False,
    channels_last: bool = False,
    verify: bool = True,
    watch_every: int = 0,
    zero: Literal[0, 1] = 0,
) -> tuple[Model, Optimizer]:
    """Makes a model and its optimizer train on all ranks, and returns both; collective.

    Moves the model to this rank's device, checks that the ranks train the same, broadcasts rank 0's parameters, buffers
    and optimizer state, and proves that gradients are averaged. Prepare again with `unwrap(model)`,
    `optimizer.wrapped`.

    Example:
        train = hvt.loader(dataset, per_rank_batch=32)
        model, optimizer = hvt.prepare(model, optimizer, train, accumulate=2, clip=1.0)

    Args:
        model: plain, complete; the same on every rank, except for its values. Or the result of `torch.compile`. Or a
            `hvdtrain.pipeline.Pipeline`, cut in the same places on every rank: it stays on its devices and trains with
            `Optimizer.forward_backward`.
        optimizer: plain; holds the model's trainable parameters. Or several, `[muon, adamw]`, which step as one.
        data: the training loader; it sets the weight of each rank's batch. Without it all batches have the same weight,
            and samples are not counted.
        world: the ranks; default: those of `hvdtrain.init`.
        lr: the learning rate as a function of samples seen; `step` sets it. Each group keeps its ratio to the base.
        accumulate: micro-batches of an update; their gradients are reduced once.
        clip: the largest norm of an update's averaged gradient.
        amp: "bf16" or "fp16" for the forward pass, "fp16" with a gradient scaler; parameters keep their dtype.
        compression: sends gradients as "fp16" or "bf16"; default: the value of HVDTRAIN_COMPRESSION.
        sync_batchnorm: batch normalisation over the batches of all ranks.
        channels_last: images and weights in the memory format that GPUs prefer for convolutions.
        verify: prove before the first step that gradients are averaged (see `verify`).
        watch_every: compare the replicas every so many updates; 0: never.
        zero: 1 for ZeRO stage 1, on the engines ddp and deepspeed: each rank keeps the optimizer's state of a part of
            the parameters. For torch.optim's optimizers that update each parameter independently.

    Raises:
        ConfigError: the model is already wrapped, parameters and optimizer do not match, an option is wrong, or the
            learning rate is scaled twice.
        ReplicaError: on every rank, if the ranks differ in model, optimizer or options, or gradients are not averaged.
    """
    wire: Any = compression or variables.without_none(os.environ.get(variables.COMPRESSION))
    options = Options(accumulate, clip, amp, wire, sync_batchnorm, channels_last, verify, watch_every, zero)
    _check_options(options, lr, data)
    world = given_or_current(world, "torch")
    unprepared.watch(reports=verify)
    _check_zero(options, world)
    compiled = model if is_compiled(model) else None
    model, optimizer, staged = _checked(model, optimizer, options, world)
    if model in prepared_optimizers and (earlier := prepared_optimizers.pop(model)()) is not None:
        earlier.close()
    restored = lr is None and start.is_restored_on_main(optimizer, world)
    start.check_agreement(start.signature(model, optimizer, options, lr, data, staged, restored=restored), world)
    rates = None if lr is None or data is None else Rates(optimizer, lr, data.plan.update_samples(accumulate))
    _place(model, optimizer, options, world, staged)
    start.broadcast_state(model, optimizer, world)
    call: Any = staged if staged is not None else compiled  # whose truth would be its length
    session = _bind(model, optimizer, options, data, world, staged, call)
    session.rates = rates
    check_elastic(session)
    if data is not None:
        data.followers.add(session)
    wrapped_model, wrapped_optimizer = Model(session), Optimizer(session)
    prepared_optimizers[model] = ref(wrapped_optimizer)
    its = elastic.ranks()
    if its.may_change:
        its.member = Trained(wrapped_optimizer, its.member)
    if verify:
        proof = prove(session)
        if world.is_main and world.size > 1:
            print(f"hvdtrain: {proof}", flush=True)
            if rates is not None:
                print(f"hvdtrain: learning rate {rates.lr.described(rates.global_batch)}", flush=True)
            elif data is not None:
                print(_OWN_RATE.format(data.plan.update_samples(accumulate)), flush=True)
            if data is None:
                print(_NO_LOADER, flush=True)
            if layers := count_unsynchronized(model):
                print(_OWN_BATCH.format(layers), flush=True)
    start.split_streams(world)
    if world.size > 1:
        world.tracker.phase = lambda: CLOCK.phase
    CLOCK.use(session.engine.device)
    CLOCK.take()  # setting up is no part of a step
    return _Prepared((wrapped_model, wrapped_optimizer))


class _Prepared(tuple[Any, Any]):
    """The prepared model and optimizer; not a model, which is what one name for both would take them for."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.__getattr__("()")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        what = name if name == "()" else f".{name}"
        fix = "model, optimizer = hvdtrain.torch.prepare(model, optimizer, ...)"
        raise ConfigError("prepare() returns two values, which need two names", f"prepare(...){what}", fix)


def _checked(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    options: Options,
    world: World,
) -> tuple[nn.Module, torch.optim.Optimizer, Staged | None]:
    """Returns the user's own module, one optimizer, and the pipeline if the model is one; refuses what cannot train."""
    model = unwrap(model) if is_compiled(model) else model
    check_model(model)
    several = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    for each in several:
        check_plain(each)
    parts = world.size * options.accumulate * getattr(engine_of(world), "pieces", 1)
    if parts > 1 or elastic.ranks().may_change:
        refuse_coupled_layers(unwrap(model))
    staged = staged_or_none(model)
    if staged is not None:
        check_staged(staged, options, engine_of(world))
        model = unwrap(model)
    one = Several(several) if len(several) > 1 else several[0]
    check_optimizer(model, one)
    return model, one, staged


def _check_options(options: Options, lr: LR | None, data: Loader | None) -> None:
    for name, least in (("accumulate", 1), ("watch_every", 0)):
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} must be a whole number >= {least}", f"{name}={value!r}")
    if options.clip is not None and not (options.clip > 0 and math.isfinite(options.clip)):
        raise ConfigError("clip must be a norm > 0, or None", f"clip={options.clip!r}")
    if options.amp not in (None, "bf16", "fp16"):
        raise ConfigError('amp must be None, "bf16" or "fp16"', f"amp={options.amp!r}")
    if options.compression not in (None, "fp16", "bf16"):
        raise ConfigError('compression must be None, "fp16" or "bf16"', f"compression={options.compression!r}")
    if data is not None and not hasattr(data, "followers"):
        raise ConfigError(
            "prepare() needs a loader that hvdtrain.torch.loader() made",
            f"a {type(data).__name__}",
            "train = hvdtrain.torch.loader(dataset, per_rank_batch);\n"
            "or omit the loader, and give each rank as many batches of its own samples, of the same size",
            code=13,
        )
    if lr is not None and not isinstance(lr, LR):
        raise ConfigError("lr= must be an hvdtrain.LR", f"lr={lr!r}", NOT_LR)
    if lr is not None and data is None:
        raise ConfigError(
            "lr= needs a loader, which counts the samples that the learning rate depends on",
            "lr= without a loader",
            "prepare(model, optimizer, train, lr=...), with train = hvdtrain.torch.loader(...)",
        )


def _check_zero(options: Options, world: World) -> None:
    if options.zero not in (0, 1) or isinstance(options.zero, bool):
        raise ConfigError("zero must be 0 or 1: the stage of ZeRO", f"zero={options.zero!r}")
    if options.zero and world.engine not in ("ddp", "deepspeed"):
        raise ConfigError(
            "zero= needs engine='ddp' or engine='deepspeed'",
            f"zero={options.zero} on the engine {world.engine!r}",
            'hvdtrain.init("torch", engine="ddp"), or remove zero=',
        )


def _place(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: Options, world: World, staged: Staged | None
) -> None:
    """Puts model and optimizer state where they compute; parameters stay the same objects."""
    revert(model.modules())  # an earlier `prepare` may have asked for it
    convert(model, engine_of(world), every=options.sync_batchnorm)
    if staged is None:  # else each stage is where it belongs
        model.to(engine_of(world).device)
    if options.channels_last:
        model.to(memory_format=torch.channels_last)
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())  # which puts state where its parameters are


def _bind(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: Options,
    data: Loader | None,
    world: World,
    staged: Staged | None,
    call: Callable[..., Any] | None,
) -> Session:
    engine = engine_of(world)
    pieces = options.accumulate * (1 if staged is None else max(staged.micro_batches, 2))
    shell = ModelShell(model, call)
    batches = Batches(data, world.size, options.accumulate)
    bound = engine.bind(shell, optimizer, Transport(options.compression, staged=staged))
    zero = ZeroModel(bound, optimizer, world) if options.zero else None
    return Session(
        world=world,
        module=model,
        optimizer=optimizer,
        options=options,
        engine_model=TrackedModel(zero or bound, world, batches),
        batches=batches,
        per_rank_batch=None if data is None else data.per_rank_batch,
        precision=MixedPrecision(options.amp, engine.device),
        losses=Losses(world, engine.device, skips=options.amp == "fp16"),
        gradients=Gradients(model, engine.device, optimizer, staged=staged is not None),
        proof=LossProof(world, pieces, verify=options.verify, counted=data is not None),
        staged=staged,
        compiled=call is not None and staged is None,
        zero=zero,
    )
