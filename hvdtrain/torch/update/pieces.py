"""`check`: runs a step on a whole batch and on two pieces of it, and names what differs.

Takes gradients with `torch.autograd.grad`: no `.grad`, buffer, optimizer or random state changes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvdtrain.core.decomposition import LossGradients, bound, compared, judge
from hvdtrain.core.errors import ConfigError, HvdtrainError
from hvdtrain.torch.engines.shell import unwrap
from hvdtrain.torch.engines.sync_batchnorm import sync_batchnorm_mode
from hvdtrain.torch.losses.loss_graph import Reader, Term, leaves_of
from hvdtrain.torch.losses.replay import CannotTry
from hvdtrain.torch.losses.tally import Weight, weight_of
from hvdtrain.torch.update.gradients import check_loss
from hvdtrain.torch.update.session import Session, session_of
from hvdtrain.values.generators import of_all_gpus
from hvdtrain.values.nested import batch_size, cut, moves_itself, parts_of, tensors_of
from hvdtrain.values.preserved import kept_buffers, kept_modes

_ROUNDING = 8.0  # times what the last digits of the weights change: a loss that is next to nothing is made of them
_FITTED: Any = object()  # weights, of which only their sum is known
_NORMS = (nn.modules.batchnorm._BatchNorm,)
_DROPOUTS = (nn.modules.dropout._DropoutNd,)


@dataclass(frozen=True)
class Check:
    """The result of `check`.

    Attributes:
        exact: True if the whole batch's loss and gradient are those of its pieces, weighed.
        weight: the quantity that the pieces were weighed by, in words.
        loss, gradient: the largest differences, as part of the largest value.
        parameter: the one whose gradient differs most; "" if all agree.
        draws: True if random numbers are drawn that differ from one pass to the next.
        notes: further remarks.
    """

    exact: bool
    weight: str
    loss: float
    gradient: float
    parameter: str
    draws: bool
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        verdict = f"the batch is {'' if self.exact else 'not '}the sum of its pieces, weighed by {self.weight}"
        gaps = f"loss off by {self.loss:.1e}, gradient by {self.gradient:.1e} of the largest"
        where = f" (most in {self.parameter})" if self.parameter else ""
        return "; ".join([f"{verdict}: {gaps}{where}", *self.notes])


def check(step: Callable[[Any], Tensor], batch: Any, *, weight: Weight = None) -> Check:
    """Checks if N ranks can train with this step as one process does: runs it on a batch and on two pieces of it.

    Dropout and batch normalisation are in evaluation mode during the check. It leaves the training unchanged.

    Example:
        print(hvt.check(lambda batch: loss_fn(model(batch[0]), batch[1]), (x, y)))

    Args:
        step: takes a batch and returns the loss, a scalar; calls the model, prepared or plain, but no backward().
        batch: as from the loader; tensors in it, in tuples, lists and dicts, are cut along dimension 0.
        weight: the divisor of the mean loss: a function of the batch. None: the samples, and if those do not fit, the
            divisor that the loss's graph shows.

    Raises:
        ConfigError: a batch of fewer than two samples, or of another kind; or a step that returns no scalar.
    """
    if (opaque := _opaque(batch)) is not None:
        raise ConfigError(
            "a check needs a batch that can be cut into samples: tensors in tuples, lists and dicts",
            f"a {type(opaque).__name__}",
            "give it tensors with a row for each sample (padded), and make the object within the step",
        )
    samples = batch_size(batch)
    if samples < 2:
        raise ConfigError(
            "a check needs a batch of at least two samples in tensors",
            f"a batch of {samples} samples in tensors",
            "pass a larger batch, such as one from the loader",
        )
    if weight is not None and not callable(weight):
        raise ConfigError(
            "weight= of a check must be a function of the batch: it is called for each piece",
            repr(weight),
            "weight=lambda batch: (batch[1] != -100).sum()",
        )
    modules = list(dict.fromkeys(map(unwrap, _modules(step))))
    with _unchanged(modules):
        return _Trial(step, batch, weight, samples, modules).check()


def _opaque(values: Any) -> Any:
    """Returns the first object in nested values whose tensors are its own: a batch of graphs, a packed sequence."""
    if moves_itself(values):
        return values
    return next((found for part in (parts_of(values) or {}).values() if (found := _opaque(part)) is not None), None)


class _Run(NamedTuple):
    """A loss, the gradients of the parameters that it depends on, and the terms of its graph."""

    loss: Tensor
    gradients: dict[nn.Parameter, Tensor]
    terms: list[Term]

    @property
    def numbers(self) -> LossGradients:
        return LossGradients(float(self.loss), self.gradients)


@dataclass
class _Trial:
    """A step on a batch of `samples`, with the models that it refers to, and `weight` as of `check`, or `_FITTED`."""

    step: Any
    batch: Any
    weight: Any
    samples: int
    modules: list[nn.Module]
    draws: bool = False
    notes: list[str] = field(default_factory=list)

    def check(self) -> Check:
        layers = [layer for module in self.modules for layer in module.modules()]
        if any(isinstance(layer, _NORMS) and layer.training for layer in layers):
            self.notes.append(
                "batch normalisation sees each rank's own batch (sync_batchnorm=True normalises over all ranks)"
            )
        self.draws = self._draws()
        for layer in layers:
            layer.training = layer.training and not isinstance(layer, _NORMS + _DROPOUTS)
        if self.draws:
            self.notes.append("random numbers are drawn: dropout, or noise of the step's own")
            still = self._draws()
            for module in self.modules if still else ():
                module.eval()
            if still and self._draws():
                self.notes.append(
                    "numbers drawn beside dropout differ between a batch and its pieces: the difference may be theirs"
                )
        best = self._compare()
        read = best if best.exact or self.weight is not None else self._compare(read=True)
        return read if read.exact else best

    def _compare(self, *, read: bool = False) -> Check:
        """Compares the whole with pieces of two thirds and one third; `read`: weighed by what the graph divides by."""
        first = self.samples - max(self.samples // 3, 1)
        ends = ((0, first), (first, self.samples))
        pieces = [cut(self.batch, self.samples, *end) for end in ends]
        whole, runs = self._run(self.batch), [self._run(piece) for piece in pieces]
        words, notes, amounts = "samples", self.notes, [float(stop - start) for start, stop in ends]
        if read:
            if any(len(run.terms) != 1 for run in runs):
                return Check(False, "nothing", math.nan, math.nan, "", self.draws, tuple(notes))
            amounts = [float(run.terms[0].divisor) for run in runs]
            words, notes = runs[-1].terms[0].what, [*notes, f"give {runs[0].terms[0].weight}"]
        elif self.weight is _FITTED:
            words, amounts = "any numbers", _fitted(whole.gradients, *(run.gradients for run in runs))
        elif self.weight is not None:
            words = "weight="
            amounts = [float(weight_of(self.weight(piece), torch.device("cpu"))) for piece in pieces]
        if 0 in amounts and self.weight is not _FITTED and whole.loss.isfinite():
            start, stop = ends[amounts.index(0)]  # then the other piece is the whole, which proves nothing
            raise ConfigError(
                "a check needs two pieces of a batch with weights above 0",
                f"samples {start} to {stop - 1} of {self.samples} weigh 0, by {words}",
                "pass another batch, or a larger batch",
            )
        if not sum(amounts):
            return Check(False, words, math.nan, math.nan, "", self.draws, tuple(notes))
        return self._judged(whole, runs, [amount / sum(amounts) for amount in amounts], words, notes)

    def _judged(self, whole: _Run, runs: list[_Run], shares: list[float], words: str, notes: list[str]) -> Check:
        gaps = compared(whole.numbers, [run.numbers for run in runs], shares)
        kinds = {str(gradient.dtype).removeprefix("torch.") for gradient in whole.gradients.values()}
        mixed = any(session.options.amp is not None for session in filter(None, map(session_of, self.modules)))
        autocast = mixed or torch.is_autocast_enabled(whole.loss.device.type)
        tolerance = bound("model", {"bfloat16"} if autocast else kinds)
        largest, scale = (
            gaps.largest or 1.0,
            max(abs(float(whole.loss)), 1e-12),
        )  # NaN where no label of the batch counts
        exact = judge(gaps, gradient=tolerance * largest, loss=tolerance * scale) == "holds"
        if not exact and math.isfinite(gaps.loss + gaps.gradient):
            of_loss, of_gradient = (_ROUNDING * noise for noise in self._noise(whole))
            limits = max(tolerance * largest, of_gradient), max(tolerance * scale, of_loss)
            exact = judge(gaps, gradient=limits[0], loss=limits[1]) == "holds"
        where = ""
        if gaps.gradient > tolerance * largest:
            names = {id(p): name for module in self.modules for name, p in module.named_parameters()}
            worst: Any = max(gaps.gradients, key=lambda p: gaps.gradients[p])
            where = names.get(id(worst), f"a parameter of shape {tuple(worst.shape)}")
        return Check(exact, words, gaps.loss / scale, gaps.gradient / largest, where, self.draws, tuple(notes))

    def _noise(self, whole: _Run) -> tuple[float, float]:
        """Returns by how much loss and gradient change where the last digits of the weights do."""
        kept = [(parameter, parameter.detach().clone()) for parameter in whole.gradients]
        made = torch.Generator().manual_seed(1)
        try:
            # `data`: the user's graph needs them as they are, and has them again at its pass
            for parameter, before in kept:
                drawn = torch.randn(before.shape, generator=made).to(before) * torch.finfo(before.dtype).eps
                parameter.data.addcmul_(before, drawn)
            run = self._run(self.batch)
        finally:
            for parameter, before in kept:
                parameter.data.copy_(before)
        both = [(own, run.gradients[p]) for p, own in whole.gradients.items() if p in run.gradients and p.numel()]
        gaps = (float((now - own).abs().max()) for own, now in both)
        return float((run.loss - whole.loss).abs()), max(gaps, default=0.0)

    def _loss(self, batch: Any, seed: int) -> Tensor:
        of_all_gpus().seed_everything(seed)
        loss: Tensor = self.step(batch)
        check_loss(loss)
        return loss

    def _run(self, batch: Any) -> _Run:
        loss = self._loss(batch, seed=1)
        leaves = [leaf for leaf in leaves_of(loss) if isinstance(leaf, nn.Parameter)]
        terms = Reader().read(loss, 0).terms
        gradients = torch.autograd.grad(loss.reshape(()), leaves, allow_unused=True)
        found = {p: g.detach() for p, g in zip(leaves, gradients, strict=True) if g is not None}
        return _Run(loss.detach().double(), found, terms)

    def _draws(self) -> bool:
        """Returns True if the loss depends on the seed."""
        first, second = (self._loss(self.batch, seed).detach().double() for seed in (1, 2))
        return not bool(torch.isclose(first, second, rtol=1e-6, atol=0.0, equal_nan=True).all())


def _fitted(wanted: Mapping[nn.Parameter, Tensor], *pieces: Mapping[nn.Parameter, Tensor]) -> list[float]:
    """Returns the shares of two pieces that bring their gradients nearest to the whole's."""
    over = [p for p in wanted if all(p in piece for piece in pieces)]
    first, second = pieces
    apart = sum(float(((wanted[p] - second[p]) * (first[p] - second[p])).sum()) for p in over)
    length = sum(float((first[p] - second[p]).square().sum()) for p in over)
    share = min(max(apart / length, 0.0), 1.0) if length else 0.5
    return [share, 1.0 - share]


def _modules(step: Any, depth: int = 3) -> Iterator[nn.Module]:
    """The models that a function refers to: in its closure, its globals, its defaults, or as its object."""
    if isinstance(step, nn.Module):
        yield step
    if depth == 0:
        return
    inner: list[Any] = []
    if isinstance(step, functools.partial):
        inner = [step.func, *step.args, *step.keywords.values()]
    elif isinstance(step, MethodType):
        inner = [step.__self__, step.__func__]
    elif isinstance(step, FunctionType):
        for cell in step.__closure__ or ():
            with suppress(ValueError):  # nothing is in it yet
                inner.append(cell.cell_contents)
        inner += [step.__globals__[name] for name in step.__code__.co_names if name in step.__globals__]
        inner += step.__defaults__ or ()
    elif isinstance(step, (list, tuple)):
        inner = list(step)
    elif not isinstance(step, (nn.Module, type, ModuleType)) and type(step).__module__ not in ("builtins", "torch"):
        inner = [value for value in getattr(step, "__dict__", {}).values() if isinstance(value, nn.Module)]
    for value in inner:
        yield from _modules(value, depth - 1)


@contextmanager
def _unchanged(modules: list[nn.Module]) -> Iterator[None]:
    """Puts buffers, modes, random streams and what a prepared model notes of its calls back at the end."""
    sessions = [session for module in modules if (session := session_of(module)) is not None]
    noted = [(s, s.last_call, s.last_method, s.proof.outputs) for s in sessions]
    for session in sessions:
        session.proof.pause()
    layers = [layer for module in modules for layer in module.modules()]
    # a forward pass scales them
    scaled: list[Any] = [layer.weight for layer in layers if getattr(layer, "max_norm", None) is not None]
    rows = [(weight, weight.detach().clone()) for weight in scaled]
    modes, kept = kept_modes(layers), kept_buffers(layers)
    # alone: the other ranks do not take part in this
    with of_all_gpus().preserved(), modes, kept, torch.enable_grad(), sync_batchnorm_mode("alone"):
        try:
            for session in sessions:
                session.proof.outputs = None
            yield
        finally:
            for session, call, method, outputs in noted:
                session.last_call, session.last_method, session.proof.outputs = call, method, outputs
            for row, before in rows:
                row.data.copy_(before)


def pieces_differ(session: Session, model: Any, arguments: Any, y: Any, loss: Any, weight: Weight) -> str:
    """Returns why the pieces of a batch do not make up a model and a loss that training calls; "" if they do, or if
    that is unknown: a batch that cannot be cut, random numbers that are not dropout, a loss of another shape.
    `arguments` are (args, kwargs) of the prepared model; the others as of `forward_backward`."""
    samples = batch_size(arguments)
    if samples < 2 or batch_size(y) != samples:
        return ""
    ofs = None if weight is None else lambda batch: weight(batch[1])  # type: ignore[operator]

    def step(batch: Any) -> Tensor:
        return loss(model(*batch[0][0], **batch[0][1]), batch[1])

    with _unchanged([session.module]):
        try:
            found = _Trial(step, (tuple(arguments), y), ofs, samples, [session.module]).check()
        except Exception:  # this model may not take a batch of another size: the real pass reports what is wrong
            return ""
    return _refused(found)


def model_differs(session: Session, loss: Tensor, *, given: bool) -> str:
    """Returns why a loss that the model of the session gave last cannot be put together of pieces; "" where it can.
    `given`: the batch counts by a weight of the caller's, of which the pieces' parts are not known. Raises
    `CannotTry` if the model gives several numbers, or its batch cannot be cut."""
    module, arguments, method = session.module, session.last_call, session.last_method
    samples = batch_size(arguments)
    if arguments is None:
        raise CannotTry("parts of the model were called, and not the model")
    if samples < 2:
        raise CannotTry("the model was called on nothing that can be cut")

    def step(batch: Any) -> Tensor:
        call = method or module._call_impl  # without what torch.compile made of it, which would be compiled again
        with session.precision.autocast():
            out = call(*batch[0], **batch[1])
        numbers = [tensor for tensor in tensors_of(out) if tensor.numel() == 1 and tensor.requires_grad]
        if len(numbers) != 1:
            raise CannotTry(f"the model gives {len(numbers)} numbers that have a gradient")
        return numbers[0].reshape(())

    with _unchanged([module]):
        try:
            found = _Trial(step, tuple(arguments), _FITTED if given else None, samples, [module]).check()
        except ConfigError as error:  # a piece has no label that counts, and the whole has
            return f"model and loss of this batch: {error.received}"
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError, AssertionError, HvdtrainError) as error:
            raise CannotTry(f"the model refuses a part of the batch: {str(error).splitlines()[0]}") from error
    return _refused(found)


def _refused(found: Check) -> str:
    if found.exact or not math.isfinite(found.loss) or any("may be theirs" in note for note in found.notes):
        return ""
    return f"model and loss of this batch: {found}"
