"""Models that run their own passes (`Staged`): what training needs to know about them, and what they cannot do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.sharding import tail_pieces
from hvdtrain.torch.engines.base import Staged, TorchEngine
from hvdtrain.torch.engines.sync_batchnorm import is_synchronized
from hvdtrain.torch.losses.loss_proof import Looked
from hvdtrain.torch.losses.tally import Number, Weight, weight_of
from hvdtrain.torch.update.amp import widened
from hvdtrain.torch.update.gradients import check_loss
from hvdtrain.torch.update.session import Options, Session
from hvdtrain.values.nested import map_tensors, tensors_of

Loss = Callable[[Any, Any], Tensor]
# what helps when a stage is out of memory
SMALLER_STAGES = (
    'more micro_batches, schedule="1f1b", remat="all", or balance="memory" of hvdtrain.pipeline.split();'
    ' or halve per_rank_batch and double accumulate, amp="bf16", more devices'
)


def check_staged(staged: Staged, options: Options, engine: TorchEngine) -> None:
    """Raises `ConfigError` for what a model in stages cannot do, before anything is sent: an engine that runs the
    passes itself, options that change the model, or devices of other ranks."""
    if not engine.runs_stages:
        raise ConfigError(
            "a pipeline needs engine='horovod' or engine='solo'",
            f"engine={engine.name!r}",
            'hvdtrain.init("torch", engine="horovod"), started with horovodrun, mpirun or srun',
        )
    if options.sync_batchnorm or any(is_synchronized(layer) for layer in staged.module.modules()):
        raise ConfigError(
            "sync_batchnorm is not supported in a pipeline: each stage is at another micro-batch",
            "sync_batchnorm=True" if options.sync_batchnorm else "layers that an earlier prepare() synchronised",
            'remove sync_batchnorm; batch_norm="batch" of split() keeps the statistics of a rank\'s whole batch',
        )
    _check_devices(staged, engine)


def _check_devices(staged: Staged, engine: TorchEngine) -> None:
    """A rank computes on its own devices: on another's, both would wait for memory and time."""
    own = [torch.device("cuda", index) for index in engine.devices] or [torch.device("cpu")]
    strange = [device for device in map(_numbered, staged.devices) if device not in own]
    if not strange:
        return
    count = len(dict.fromkeys(map(str, staged.devices)))
    of_type = own[0].type == strange[0].type
    raise ConfigError(
        "a rank's pipeline must run on the rank's own devices",
        f"stages on {', '.join(map(str, staged.devices))}; rank {engine.rank} has {', '.join(map(str, own))}",
        f'world = hvdtrain.init("torch", gpus_per_rank={max(count, 2)})\n'
        'split over [f"cuda:{index}" for index in world.devices]'
        if of_type
        else f"split(model, example, {[str(own[0])] * 2}), or hvdtrain.init(device={strange[0].type!r})",
    )


def _numbered(device: torch.device) -> torch.device:
    """A GPU without a number is the current one, which is a rank's first."""
    if device.type != "cuda":
        return torch.device(device.type)
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def signature(staged: Staged) -> dict[str, str]:
    """Returns the settings that must be the same on every rank, because gradients travel by stage."""
    names = {id(parameter): name for name, parameter in staged.module.named_parameters()}
    groups = [", ".join(names[id(p)] for p in owned) for owned in staged.owned_parameters()]
    found = {f"the parameters of stage {index + 1} of the pipeline": owned for index, owned in enumerate(groups)}
    return found | {"the pipeline's micro_batches": str(staged.micro_batches)}


class Arguments(NamedTuple):
    """The arguments of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def pieces_for(session: Session, arguments: Arguments) -> Iterator[None]:
    """Cuts a tail's few samples into micro-batches of the usual size, not number, while the context is open."""
    staged, full = session.staged, session.per_rank_batch
    samples = next((len(tensor) for tensor in tensors_of(arguments) if tensor.dim()), 0)
    if staged is None or not full or not 0 < samples < full:
        yield
        return
    usual = staged.micro_batches
    staged.micro_batches = tail_pieces(samples, full, usual)
    try:
        yield
    finally:
        staged.micro_batches = usual


def whole_loss(session: Session, loss: Loss, weight: Weight = None) -> Loss:
    """Returns the loss as the pipeline calls it, with a micro-batch's outputs: outside of autocast, checked for
    being a scalar, and wide enough, like that of a model that is whole."""

    device_type = session.engine.device.type

    def compute(outputs: Any, targets: Any) -> Tensor:
        if torch.is_grad_enabled():
            session.proof.saw(outputs, session.batches.now())
        with torch.autocast(device_type, enabled=False):
            value = loss(session.precision.outputs(outputs), targets)
        check_loss(value, untracked=not torch.is_grad_enabled())  # a pass whose activations are computed again
        if value.requires_grad:  # once a micro-batch; and by the last stage alone
            _look(session, value, outputs, targets, weight)
        return widened(value).reshape(())

    compute.__wrapped__ = loss  # type: ignore[attr-defined]  # a pipeline looks once at each loss
    return compute


def _look(session: Session, value: Tensor, outputs: Any, targets: Any, weight: Weight) -> None:
    """Compares what the loss of a micro-batch divides by with what the micro-batch weighs."""
    proof, tally = session.proof, session.gradients.tally
    samples = next((len(part) for part in (targets, outputs) if isinstance(part, Tensor) and part.dim()), 0)
    amount: Number = samples
    if weight is not None:
        amount = weight_of(weight(targets) if callable(weight) else weight, session.engine.device)
    assert session.staged is not None
    pieces = session.world.size * session.options.accumulate * session.staged.micro_batches  # which may change
    if not samples or pieces == 1:
        proof.forget()
        return
    proof.look(Looked(value, amount, samples), tally)
    proof.close_batch()


def run_step(
    session: Session,
    arguments: Arguments,
    y: Any,
    loss: Loss,
    coefficient: Number,
    weight: Weight,
    outputs: list[Any] | None,
    *,
    whole: bool = False,
) -> Tensor:
    """Runs forward and backward of a batch through the stages; returns its mean loss, on the session's device. The
    arguments are those of `Optimizer.forward_backward`; `coefficient` is of the batch's mean loss in its update, and
    the model's outputs are added to `outputs`. With `whole` the loss is called as it is, once, with all outputs."""
    assert session.staged is not None
    staged = session.staged
    if session.options.channels_last:
        arguments = Arguments(*map_tensors(channels_last, tuple(arguments)))
    factor = session.precision.factor(coefficient, torch.device(staged.devices[-1]))
    with _as_part(session, staged), pieces_for(session, arguments), session.precision.autocast():
        computed = loss if whole else whole_loss(session, loss, weight)
        keep = outputs is not None
        found = staged.step(
            arguments.args, y, computed, kwargs=arguments.kwargs, weight=weight, factor=factor, outputs=keep,
            whole=whole,
        )  # fmt: skip
        if outputs is not None:
            found, out = found
            outputs.append(out)
        return found.to(session.engine.device)


@contextmanager
def _as_part(session: Session, staged: Staged) -> Iterator[None]:
    """Sets whether the pipeline's batch is one of several of an update, while the context is open."""
    staged.batch_is_part = session.world.size * session.options.accumulate > 1
    try:
        yield
    finally:
        staged.batch_is_part = False


def in_one_call(received: str, remedy: str) -> ConfigError:
    """The error for a pipeline that is trained in any other way."""
    return ConfigError("a pipeline must compute loss and gradients in one call, per micro-batch", received, remedy)


def channels_last(value: Any) -> Any:
    """Returns pictures in the memory format that convolutions on GPUs like; anything else as it is."""
    four = isinstance(value, Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if four else value
