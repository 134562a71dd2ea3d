"""Tries whether samples meet in a loss: records the operations between the model's outputs and the loss, and runs them
again with other outputs for a half of the samples.

The gradient of a sample's outputs must not change when other samples have other outputs. The test needs no knowledge of
an operation, of its derivative, or of what was computed without gradients.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvdtrain.core.decomposition import bound
from hvdtrain.private.torch import TorchDispatchMode, current_autograd_node, dispatch_modes
from hvdtrain.torch.losses.loss_graph import nodes_of

_LONGEST = 5000  # operations
_SMALL = 1 << 20  # bytes of what an operation gives before the model is called
_COUNTED = 1e-6  # of gradients: an epsilon beside a count is below
_TERMS = 8  # of a loop over samples, that are looked at
_TRIED, _LEAST_TRIED = 4, 64  # rows of a sample, and of a batch, to find out whose they are
_READS = torch.ops.aten._local_scalar_dense.default
_SEEDED = torch.Tag.nondeterministic_seeded


_State = tuple[torch.Generator, Tensor]


class CannotTry(Exception):
    """Raised if the loss cannot be computed again from other outputs; the text is the reason."""


@dataclass(frozen=True)
class _Operation:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Any]
    changed: list[Tensor]
    drawn: _State | None  # of what it draws from, before
    with_gradient: bool
    differentiates: bool  # of a backward pass, which reads what the forward pass has saved

    @functools.cached_property
    def given(self) -> list[Any]:
        return list(_leaves((self.args, self.kwargs)))


class Recording:
    """Records operations of one thread, from `start` to `pause`."""

    def __init__(self) -> None:
        self._mode: _Mode | None = None
        self._before = True
        self.operations: list[_Operation] = []

    def called(self) -> None:
        """The model was called: all that follows is the loss's. What wrote into the batch before makes a recording of
        what came before useless."""
        if self._before and any(operation.changed for operation in self.operations):
            self.operations.clear()
        self._before = False

    def start(self) -> None:
        """Begins, or continues after `pause`."""
        if self._mode is None:
            self._mode = _Mode.of_this_thread()
            self._mode.begin(self)

    def pause(self) -> None:
        if self._mode is not None:
            self._mode.end(self)
            self._mode = None

    @staticmethod
    def leave() -> None:
        """Leaves the thread's stack of modes if nothing is recorded: below another mode, `pause` could not."""
        _Mode.of_this_thread().leave()

    @property
    def is_full(self) -> bool:
        """Returns True if the recording is longer than what is tried."""
        return len(self.operations) > _LONGEST

    def add(self, operation: _Operation) -> None:
        if self.is_full:
            return
        if self._before and sum(one.nbytes for one in _tensors(operation.results)) > _SMALL:
            return  # a picture that is augmented: held for nothing
        self.operations.append(operation)


class _Mode(TorchDispatchMode):
    """The mode that shows operations to a thread's recordings: once on its mode stack, however many models train."""

    _of = threading.local()

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._thread = threading.get_ident()
        self._recordings: list[Recording] = []
        self._entered = False

    @classmethod
    def of_this_thread(cls) -> _Mode:
        if not hasattr(cls._of, "mode"):
            cls._of.mode = cls()
        mode: _Mode = cls._of.mode
        return mode

    def begin(self, recording: Recording) -> None:
        self._recordings.append(recording)
        if not self._entered:
            self._entered = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, recording: Recording) -> None:
        """Leaves the stack with the last recording, if it can."""
        self._recordings.remove(recording)
        if self._thread == threading.get_ident():  # another thread's stack cannot be reached
            self.leave()

    def leave(self) -> None:
        """Leaves the stack where nothing is recorded; stays there, idle, until it is the top one."""
        if not self._entered or self._recordings:
            return
        # not in the stack: a mode of the program's that was entered before has left in our place, and is there for us
        if (stack := dispatch_modes()) and (stack[-1] is self or self not in stack):
            self._entered = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: `torch._dynamo` is not imported for it, which takes a second."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True: compiled code runs as it is, and is not seen."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drawn = _drawn(args, kwargs) if _SEEDED in func.tags else None
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if "Expected a value of type 'Tensor'" not in str(error):
                raise
            # a tensor that autograd made of a number arrives as that number
            args = tuple(torch.as_tensor(one) if isinstance(one, (int, float, complex)) else one for one in args)
            result = func(*args, **kwargs)
        if all(recording.is_full for recording in self._recordings):
            return result
        changed = _changed(func, args, kwargs) if func._schema.is_mutable else []
        results = list(_leaves(result))
        differentiates = current_autograd_node() is not None
        operation = _Operation(func, args, kwargs, results, changed, drawn, torch.is_grad_enabled(), differentiates)
        for recording in self._recordings:
            recording.add(operation)
        return result


def _drawn(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _State:
    """Returns the generator that an operation draws from, and its state."""
    given = list(_leaves((args, kwargs)))
    generator = next((one for one in given if isinstance(one, torch.Generator)), None)
    if generator is None:
        device = kwargs.get("device") or next((one.device for one in given if isinstance(one, Tensor)), "cpu")
        on_gpu = torch.device(device).type == "cuda"
        index = torch.device(device).index if on_gpu else None
        generator = torch.cuda.default_generators[index or 0] if on_gpu else torch.default_generator
    return generator, generator.get_state()


@contextmanager
def _as_then(drawn: _State | None) -> Iterator[None]:
    """Has an operation draw what it drew, and leaves its generator as it is."""
    if drawn is None:
        yield
        return
    generator, state = drawn
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)


def _numbers(operations: Sequence[_Operation]) -> set[float]:
    """Returns the numbers that were read from tensors (`.item()`, `float()`) and cannot be taken for others."""
    read = [op.results[0] for op in operations if op.function is _READS]
    drawn = [one for one in read if isinstance(one, float) and math.isfinite(one)]
    return {one for one in drawn if not math.isclose(1000 * one, round(1000 * one))}


def weights_like(recording: Recording, weight: object) -> list[object]:
    """Returns what a weight may follow: itself, tensors that its number was read from (`int(n)`), or nothing."""
    if isinstance(weight, Tensor):
        return [weight, None]
    read = [op for op in recording.operations if op.function is _READS and op.results[0] == weight]
    return [*(op.args[0] for op in read), None]


def _changed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    named = zip(func._schema.arguments, args, strict=False)
    given = [(spec, value) for spec, value in named] + [
        (spec, kwargs[spec.name]) for spec in func._schema.arguments if spec.name in kwargs
    ]
    written = [value for spec, value in given if spec.alias_info is not None and spec.alias_info.is_write]
    return [tensor for value in written for tensor in _tensors(value)]


def _leaves(values: Any) -> Iterator[Any]:
    """Yields what an operation takes or returns. PyTorch's pytree, in Python, would take most of the time of a try."""
    if isinstance(values, (tuple, list)):
        for value in values:
            yield from _leaves(value)
    elif isinstance(values, Mapping):
        yield from _leaves(tuple(values.values()))
    else:
        yield values


def _replaced(values: Any, by: Callable[[Any], Any]) -> Any:
    """Returns arguments of an operation with `by(leaf)` in place of each leaf."""
    if isinstance(values, (tuple, list)):
        return [_replaced(value, by) for value in values]
    return by(values)


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in _leaves(values) if isinstance(value, Tensor))


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)


class Output(NamedTuple):
    """A tensor that the model returned, its version then, and which one of its call's it is."""

    tensor: Tensor
    version: int
    head: int


class Replay:
    """Computes a loss again from other outputs, of a recording of what computed it; raises `CannotTry` if it was not
    recorded, or what it was computed from has been changed since.

    Args:
        outputs: of the model.
        given: tensors of the batch, each with its version when the loader returned it.
        weight: what the loss is weighed by: gradients are those of weight x loss, as parts of the weight now.
    """

    def __init__(
        self, recording: Recording, loss: Tensor, outputs: Sequence[Output],
        given: Sequence[tuple[Tensor, int]] = (), weight: object = None,
    ) -> None:  # fmt: skip
        if len(recording.operations) > _LONGEST:
            raise CannotTry(f"it has more than {_LONGEST} operations")
        if any(one.tensor._version != one.version for one in outputs):
            raise CannotTry("an output of the model was changed in place")
        self._loss, self._outputs = loss, [one.tensor for one in outputs]
        self.heads = [one.head for one in outputs]
        self._compiled = False
        self.way: list[Rows | None] = []  # in which samples lie in the outputs, where that was found out
        self._weight, self._numbers = weight, _numbers(recording.operations)
        self._operations = self._needed(recording.operations)
        self.weighs = isinstance(weight, Tensor) and any(weight is one for op in self._operations for one in op.results)
        read = {id(one) for its in self._operations for one in its.given}
        self.targets = [one for one, version in given if id(one) in read and one._version == version]
        # instance norm is batch norm of one row
        norms = [op for op in self._operations if "batch_norm" in op.function.__name__]
        self.normalises = any(len(tensor) > 1 for op in norms for tensor in _tensors(op.args[:1]) if tensor.dim() > 1)

    def _needed(self, operations: Sequence[_Operation]) -> list[_Operation]:
        needed, kept = {_place(self._loss)}, list[_Operation]()
        if isinstance(self._weight, Tensor):
            needed.add(_place(self._weight))
        numbers = set[float]()  # that were read from tensors
        for operation in reversed(operations):
            places = set(map(_place, _tensors([operation.results, operation.changed])))
            if places & needed or (operation.function is _READS and operation.results[0] in numbers):
                kept.append(operation)
                needed |= set(map(_place, _tensors(operation.given)))
                numbers |= {value for value in operation.given if isinstance(value, float) and value in self._numbers}
        if not any(result is self._loss for operation in kept for result in operation.results):
            raise CannotTry("it is computed by compiled code, by NumPy, or within the model")
        made = set[int]()
        for operation in reversed(kept):  # in the order of the program
            if any(_place(tensor) not in made for tensor in operation.changed):
                raise CannotTry("it writes into a tensor that was there before")
            there = set(map(_place, _tensors(operation.given)))  # a view makes no memory
            made.update(set(map(_place, _tensors(operation.results))) - (there - made))
        return kept[::-1]

    def table(self, samples: int) -> str:
        """Returns where an output of shape `[samples, 1]` and a tensor of shape `[samples]` give a table of every
        sample with every other: more often a slip than meant; "" if nowhere."""
        column, row, table = [samples, 1], [samples], [samples, samples]
        outputs = {id(output) for output in self._outputs if list(output.shape) == column}
        shaped = [op for op in self._operations if any(list(one.shape) == table for one in _tensors(op.results))]
        given = [one for op in shaped for one in _tensors(op.given)]
        if any(id(one) in outputs for one in given) and any(list(one.shape) == row for one in given):
            return f"outputs {column} meet a tensor {row} and give {table}; outputs.squeeze(1) pairs them"
        return ""

    def features(self, samples: int) -> list[Tensor]:
        """Returns what the model computed of a batch, a row for each sample, and the loss reads from attributes and
        hooks: beside its outputs."""
        own = [op for op in self._operations if not op.differentiates]
        read = {id(one): one for op in own for one in _tensors(op.given)}
        made = {id(one) for op in self._operations for one in op.results} | {id(output) for output in self._outputs}
        given = [one for key, one in read.items() if key not in made]
        return [one for one in given if one.dim() and len(one) == samples and _of_a_batch(one)]

    def gradients(self, outputs: Sequence[Tensor], targets: Sequence[Tensor] = ()) -> list[Tensor]:
        """Returns the gradients of the loss by these outputs in place of the model's, with these targets in place of
        `self.targets`; raises `CannotTry` if an operation refuses them."""
        leaves = [output.detach().clone().requires_grad_() for output in outputs]
        now: dict[int, Any] = {id(old): new.view_as(new) for old, new in zip(self._outputs, leaves, strict=True)}
        now.update((id(old), new) for old, new in zip(self.targets, targets, strict=False))

        try:
            with torch.autocast(outputs[0].device.type, enabled=False):
                self._run(now)
                loss = now[id(self._loss)]
                if not loss.requires_grad and not self._compiled:
                    self._compiled = True  # whose operations run without gradients
                    return self.gradients(outputs, targets)
                if not loss.requires_grad:
                    raise CannotTry("its gradient is not that of the operations that computed it")
                found = torch.autograd.grad(loss.reshape(()), leaves, allow_unused=True)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, AttributeError) as error:
            raise CannotTry(f"its operations refuse other outputs: {str(error).splitlines()[0]}") from error
        factor = 1.0  # what the weight is now, as part of what it was
        if self.weighs:
            assert isinstance(self._weight, Tensor)
            factor = float(now[id(self._weight)].detach()) / float(self._weight.detach())
        return [
            torch.zeros_like(leaf) if one is None or not factor else one * factor
            for leaf, one in zip(leaves, found, strict=True)
        ]

    def _run(self, now: dict[int, Any]) -> None:
        """Runs the operations again, on the tensors that `now` has for the recorded ones, and adds their results."""
        numbers = dict[float, float]()

        def given(value: Any) -> Any:
            if isinstance(value, Tensor):
                return now.get(id(value), value)
            return numbers.get(value, value) if isinstance(value, float) else value

        for operation in self._operations:
            args = _replaced(operation.args, given)
            kwargs = {name: _replaced(value, given) for name, value in operation.kwargs.items()}
            grad = torch.set_grad_enabled(operation.with_gradient or self._compiled)
            with grad, _as_then(operation.drawn):
                results = list(_leaves(operation.function(*args, **kwargs)))
            if operation.function is _READS:
                numbers[operation.results[0]] = float(results[0])
                continue
            pairs = zip(operation.results, results, strict=True)
            now.update((id(old), new) for old, new in pairs if new is not None)

    def counts_nothing(self, outputs: Sequence[Tensor]) -> bool:
        """Returns True if no outputs give a gradient, for example because all targets are masked."""
        other = [[times * output.detach() for output in outputs] for times in (1.0, -1.0, 1e4, -1e4)]
        return not any(bool(one.any()) for values in other for one in self.gradients(values))


# with a number in place of a tensor, which has no edge
# of a tensor and a number, which has no edge
_WITH_NUMBERS = {f"{name}Backward0" for name in ("Mul", "Add", "Sub", "Div", "Pow")} | {"MulBackward1", "RsubBackward1"}


def _of_a_batch(tensor: Tensor) -> bool:
    """Returns True if a graph has other inputs than parameters."""
    for node in nodes_of(tensor):
        is_open = node.name() not in _WITH_NUMBERS and any(child is None for child, _ in node.next_functions)
        leaf = getattr(node, "variable", None)
        if is_open or (leaf is not None and not isinstance(leaf, torch.nn.Parameter)):
            return True
    return False


class Rows(NamedTuple):
    """The places of samples in an output: the sample's number at each place along a dimension."""

    dim: int
    samples: Tensor
    run: tuple[int, ...] = ()  # the outputs that together are the batch, if this one is a part of it


def rows_of(outputs: Sequence[Tensor], heads: Sequence[int], samples: int) -> list[list[Rows | None]]:
    """Returns the ways in which samples may lie in outputs; None for an output of which it is not known.

    The first dimension is the batch, or copies of it, one after the other or side by side; calls for parts of the batch
    give rows that come to the batch, of each of several outputs (`heads`: which one of its call's an output is). The
    second dimension may be the batch: of three, or where the first is longer (steps, samples).
    """
    lengths = [_length(output) for output in outputs]
    runs = _runs(outputs, heads, samples)
    ways: list[list[Rows | None]] = []
    for side_by_side, dim in ((False, 0), (True, 0), (False, 1)):
        way: list[Rows | None] = []
        for at, (output, length, run) in enumerate(zip(outputs, lengths, runs, strict=True)):
            places, copies = torch.arange(length), length // samples if samples else 0
            if run:
                way.append(Rows(0, places + sum(lengths[one] for one in run if one < at), run))
            elif not copies or length % samples:
                way.append(None)
            elif dim and output.dim() > 1 + (copies == 1) and output.shape[1] == samples:
                way.append(Rows(1, torch.arange(samples)))
            elif copies > 1:
                way.append(Rows(0, places // copies if side_by_side else places % samples))
            else:
                way.append(Rows(0, places))
        if any(one is not None for one in way) and not any(_same(way, other) for other in ways):
            ways.append(way)
    return ways


def _length(output: Tensor) -> int:
    return len(output) if output.dim() and not output.is_nested else 0  # whose rows no operation picks


def _runs(outputs: Sequence[Tensor], heads: Sequence[int], samples: int) -> list[tuple[int, ...]]:
    """Returns for each output the neighbours, of its head and kind, that together come to the batch; () without."""
    found: list[tuple[int, ...]] = [()] * len(outputs)
    for head in set(heads):
        run: list[int] = []
        total = 0
        for at in (place for place, each in enumerate(heads) if each == head):
            output = outputs[at]
            length = _length(output)
            is_part = 0 < length < samples
            first = outputs[run[0]] if run else output
            if not is_part or (output.shape[1:], output.dtype) != (first.shape[1:], first.dtype):
                run, total = [], 0
            if is_part:
                run, total = [*run, at], total + length
            if total == samples:
                found = [tuple(run) if place in run else each for place, each in enumerate(found)]
            if total >= samples:
                run, total = [], 0
    return found


def _same(way: Sequence[Rows | None], other: Sequence[Rows | None]) -> bool:
    pairs = zip(way, other, strict=True)
    return all(a is b or (a and b and a.dim == b.dim and torch.equal(a.samples, b.samples)) for a, b in pairs)


def meet(replay: Replay, outputs: Sequence[Tensor], samples: int) -> float:
    """Returns by how much the gradient of samples changes with other samples' outputs, as part of the largest.
    Raises `CannotTry` if the rows of the outputs are not samples, the operations draw conclusions from the outputs'
    values, or give another gradient than before."""
    ways = rows_of(outputs, replay.heads, samples)
    if not ways or samples < 2:
        raise CannotTry(f"rows of the outputs are not samples: {[tuple(one.shape) for one in outputs][:3]}")
    if replay.normalises:
        raise CannotTry("it is normalised over the batch")
    before = replay.gradients(outputs)
    again = replay.gradients(outputs)
    largest = max(float(one.abs().max()) for one in before if one.numel())
    if not 0 < largest < math.inf:  # nothing to compare, or not a number: another check's
        return 0.0
    if max(float((a - b).abs().max()) for a, b in zip(before, again, strict=True)) > 0.5 * tolerance(outputs) * largest:
        raise CannotTry("its operations give another gradient each time")
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(samples))
    other = torch.empty_like(order).scatter_(0, order, order.roll(1))  # each sample's place is taken by another
    mirrored = [float(o.detach().max()) + float(o.detach().min()) - o.detach() if o.numel() else o for o in outputs]

    unknown = [old for at, old in enumerate(before) if bool(old.any()) and all(way[at] is None for way in ways)]
    if unknown:
        raise CannotTry(f"rows of an output are not samples: {tuple(unknown[0].shape)}")

    def gap(cut: int, way: Sequence[Rows | None], samples: int = samples) -> float:
        found, numbers = 0.0, torch.arange(samples)
        for kept, values in product((numbers < cut, numbers >= cut), (outputs, mirrored)):
            given = replay.gradients(_exchanged(values, outputs, way, kept, other))
            for old, new, rows in zip(before, given, way, strict=True):
                if rows is not None and bool(kept[rows.samples].any()):
                    mine = torch.nonzero(kept[rows.samples]).flatten().to(old.device)
                    found = max(found, float((new - old).index_select(rows.dim, mine).abs().max()) / largest)
        return found

    least = min(gap(samples // 2, way) for way in ways)
    # samples that belong together, as pairs do, lie side by side and are on one rank
    groups = [size for size in range(2, samples // 2 + 1) if samples % size == 0] if least > tolerance(outputs) else []
    for size, way in product(groups, ways):
        cuts = {size, samples - size, samples // size // 2 * size}
        least = min(least, max(gap(cut, way) for cut in cuts))
    if least > tolerance(outputs) and (way := _belonging(replay, outputs, samples, mirrored, before)):
        count, other = 1 + max(int(rows.samples.max()) for rows in way if rows is not None), torch.empty(0)
        least, replay.way = min(least, gap(count // 2, way, count)), way if count == samples else []
    return least


def _belonging(
    replay: Replay, outputs: Sequence[Tensor], samples: int, mirrored: Sequence[Tensor], before: Sequence[Tensor]
) -> list[Rows | None]:
    """Finds out whose rows are whose where more rows than samples do not say it (nodes of graphs): rows whose gradients
    change with each other are one sample's. Returns [] if they are fewer than the samples."""
    lengths = [len(one) if bool(change.any()) else 0 for one, change in zip(outputs, before, strict=True)]
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    if max(lengths) <= samples:
        return []
    limit = tolerance(outputs) * max(float(one.abs().max()) for one in before if one.numel())
    read = [at for at, length in enumerate(lengths) if length]
    rolled = {at: outputs[at].detach().roll(1, 0) for at in read}
    # a sample's largest row may decide, or its smallest
    highest, lowest = ({at: one + sign * (one.abs().max() + 1) for at, one in rolled.items()} for sign in (1, -1))
    tried: Any = (rolled, mirrored, highest, lowest)
    whose, seen = torch.arange(sum(lengths)), torch.zeros(sum(lengths), dtype=torch.bool)
    for _ in range(max(_TRIED * samples, _LEAST_TRIED)):
        if bool(seen.all()):
            break
        row = int(seen.long().argmin())
        at = max(place for place in read if starts[place] <= row)
        together = torch.arange(len(whose)) == row
        for values in tried:
            given = [one.detach().clone() for one in outputs]
            given[at][row - starts[at]] = values[at][row - starts[at]]
            after = replay.gradients(given)
            changes = [(after[place] - before[place]).abs() > limit for place in read]
            together |= torch.cat([one.reshape(len(one), -1).any(1).cpu() for one in changes])
        whose[torch.isin(whose, whose[together])] = whose[together].min()
        seen |= together
        if len(whose.unique()) < samples:
            return []
    known = [its for its in whose.split(lengths) if len(its) == samples]
    if not bool(seen.all()) or any(len(its.unique()) < samples for its in known):
        return []
    return [Rows(0, its) if len(its) else None for its in whose.unique(return_inverse=True)[1].split(lengths)]


def reweighed(replay: Replay, outputs: Sequence[Tensor], samples: int, given: bool) -> bool:
    """Returns True if one sample's target changes what others count: weights of the batch's classes, or of their mean.

    Where samples are mixed at random (mixup) it changes one or two others, which a sample's own batch may do.
    `given`: the caller has given what divides the loss; then it may be one number for all samples, made of targets
    (of a weight that was not recorded). Raises as `meet`.
    """
    targets = [one for one in replay.targets if one.dim() and len(one) == samples]
    if not targets or len(targets) < len(replay.targets):
        return False
    before = replay.gradients(outputs, targets)
    for place in {0, samples // 3, 2 * samples // 3, samples - 1}:
        others = [one.clone() for one in targets]
        for one in others:
            one[place] = one[(place + samples // 2) % samples]
        after = replay.gradients(outputs, others)
        ways = [replay.way] if replay.way else rows_of(outputs, replay.heads, samples)
        if all(_changes_others(before, after, way, place, given and not replay.weighs) for way in ways):
            return True
    return False


def _changes_others(
    before: Sequence[Tensor], after: Sequence[Tensor], way: Sequence[Rows | None], place: int, given: bool
) -> bool:
    """Returns True if many samples other than that at `place` have changed gradients, and (if `given`) not all by the
    same factor."""
    bound = max(tolerance(before), _COUNTED) * max(float(one.abs().max()) for one in before if one.numel())
    changed, proportional, most = set[int](), given, 0
    for old, new, rows in zip(before, after, way, strict=True):
        if rows is None:
            continue
        most = max(most, 1 if int(rows.samples.max()) < 7 else 2)
        mine = rows.samples != place
        one, two = (g.movedim(rows.dim, 0).reshape(len(mine), -1)[mine.to(g.device)] for g in (old, new))
        apart = (two - one).abs() > bound
        changed |= set(rows.samples[mine][apart.any(1).cpu()].tolist())
        factor = (one * two).sum() / one.square().sum().clamp(min=torch.finfo(one.dtype).tiny)
        proportional = proportional and not bool(((two - factor * one).abs() > bound).any())
    return len(changed) > most and not proportional


def _exchanged(
    values: Sequence[Tensor], outputs: Sequence[Tensor], way: Sequence[Rows | None], kept: Tensor, other: Tensor
) -> list[Tensor]:
    """Returns the outputs with other samples' values in the places of those that are not kept."""
    found = []
    pieces: dict[int, Tensor] = {}  # of a batch that the model was called for in parts, by output
    for at, (output, rows) in enumerate(zip(outputs, way, strict=True)):
        if rows is None:
            found.append(output.detach())
            continue
        if not rows.run:
            taken = _of_others(values[at].detach(), rows, other)
        else:
            if at not in pieces:
                every = [values[place].detach() for place in rows.run]
                mixed = _of_others(torch.cat(every), Rows(0, torch.arange(len(other))), other)
                pieces.update(zip(rows.run, mixed.split([len(one) for one in every]), strict=True))
            taken = pieces[at]
        shape = [-1 if dim == rows.dim else 1 for dim in range(output.dim())]
        found.append(torch.where(kept[rows.samples].to(output.device).view(shape), output.detach(), taken))
    return found


def _of_others(values: Tensor, rows: Rows, other: Tensor) -> Tensor:
    """Returns in the place of each sample another one, of which there are as many rows."""
    if not len(other):  # samples have different numbers of rows
        return values.roll(1, rows.dim)
    places = torch.argsort(rows.samples, stable=True).view(len(other), -1)
    source = torch.empty_like(rows.samples)
    source[places.flatten()] = places[other].flatten()
    return values.index_select(rows.dim, source.to(values.device))


def tolerance(tensors: Sequence[Tensor]) -> float:
    """Returns the bound for differences of gradients: that of the coarsest type."""
    return bound("same operations", (str(tensor.dtype).removeprefix("torch.") for tensor in tensors))


def of_one_each(nodes: Sequence[Any], outputs: Sequence[Output], samples: int, way: Sequence[Rows | None] = ()) -> bool:
    """Returns True if none of a loss's terms depends on more than one sample; of many, eight are looked at."""
    ways = [way] if way else rows_of([one.tensor for one in outputs], [one.head for one in outputs], samples)
    placed = [(o.tensor, rows) for o, rows in zip(outputs, ways[0], strict=True) if rows is not None] if ways else []
    most = 0
    for node in nodes[:: -(-len(nodes) // _TERMS)] if placed else ():
        meta = node._input_metadata[0]
        one = torch.ones(meta.shape, dtype=meta.dtype, device=meta.device)
        edge = torch.autograd.graph.GradientEdge(node, 0)
        found = torch.autograd.grad([edge], [o for o, _ in placed], [one], retain_graph=True, allow_unused=True)
        on = [
            rows.samples[g.movedim(rows.dim, 0).reshape(len(rows.samples), -1).ne(0).any(1).cpu()].tolist()
            for g, (_, rows) in zip(found, placed, strict=True)
            if g is not None
        ]
        most = max(most, len({sample for some in on for sample in some}))
    return most == 1
