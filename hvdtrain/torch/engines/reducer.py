"""Sums gradients over ranks while the backward pass is still running.

Gradients are copied, as they come, into flat buckets; a bucket that is full is sent at once. One copy in, none out:
afterwards `p.grad` is a view of the bucket. (Buckets: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.)
With Horovod this also means a handful of tensors to negotiate instead of one a parameter, and no fusion buffer.

Where the engine adds up through shared memory there is nothing to win by a copy: a bucket's large gradients are summed
where autograd has put them, and small ones alone are copied together.

A model that is cut into stages adds up the gradients of many micro-batches, one stage after the other. Its buckets hold
gradients of one stage, and are filled by the stage's last backward pass alone: those of the last stage are under way
while the first ones still run theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from hvdtrain.core.errors import ConfigError
from hvdtrain.private.torch import storage_use_count
from hvdtrain.torch.engines.base import HALVES, Pass, Staged
from hvdtrain.torch.engines.shell import trainable, trains_others

Wait = Callable[[], object]
# Sums a tensor over ranks, in place; returns what waits for it.
SumAsync = Callable[[Tensor, str], Wait]

_SMALL_BUCKET_BYTES, _DUST_BYTES = 1 << 20, 1 << 16
OWN_REFERENCES = 3  # to a view while they are counted: the list's, the loop's, the call's
# of the memory of a gradient that nobody else has: by `p.grad`, and by the Python object of whoever counts
_OWN_USES = 2

Layout = tuple[int, ...]  # strides


class Bucket:
    """Gradients that travel together: one flat tensor, and a view of it for each parameter, in layouts that are the
    same on every rank; `where_they_lie`: large gradients do not go into the flat tensor."""

    def __init__(
        self, name: str, parameters: Sequence[nn.Parameter], layouts: Sequence[Layout], where_they_lie: bool = False
    ) -> None:
        self.name = name
        self.parameters, self._layouts = list(parameters), layouts
        self._lies = [where_they_lie and _is_large(parameter) for parameter in parameters]
        self._allocate()
        self.missing = len(self.parameters)
        self.filled = [False] * len(self.parameters)
        self.waits: list[Wait] = []

    def _allocate(self) -> None:
        first = self.parameters[0]
        sizes = [0 if lies else p.numel() for p, lies in zip(self.parameters, self._lies, strict=True)]
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.gradients: list[Tensor | None] = [
            None if lies else piece.as_strided(p.shape, layout)
            for piece, p, layout, lies in zip(
                self.flat.split(sizes), self.parameters, self._layouts, self._lies, strict=True
            )
        ]
        self.wire = self.flat

    def begin(self) -> None:
        """Forgets the last update; if the user has kept `p.grad` of it, that memory stays the user's."""
        if any(view is not None and sys.getrefcount(view) > OWN_REFERENCES for view in self.gradients):
            self._allocate()
        self.missing = len(self.parameters)
        self.filled = [False] * self.missing
        self.waits = []

    def fill(self, index: int) -> None:
        """Takes the gradient of one parameter; zeros where it has none."""
        if not self.filled[index]:
            self.filled[index] = True
            self.missing -= 1
        parameter, view = self.parameters[index], self.gradients[index]
        if self._lies[index]:
            layout = self._layouts[index]
            if parameter.grad is None:
                self.gradients[index] = torch.empty_strided(parameter.shape, layout, dtype=parameter.dtype).zero_()
            else:
                if not _is_its_own(parameter.grad, parameter, layout):
                    copied = torch.empty_strided(parameter.shape, layout, dtype=parameter.dtype)
                    parameter.grad = copied.copy_(parameter.grad)
                self.gradients[index] = parameter.grad
        elif parameter.grad is None:
            assert view is not None
            view.zero_()
        else:
            assert view is not None
            view.copy_(parameter.grad)
            parameter.grad = view  # lets go of the memory now: the next layer's gradient takes it, still warm

    def send(self, sum_async: SumAsync, wire_type: torch.dtype | None) -> None:
        self.wire = self.flat if wire_type is None else self.flat.to(wire_type)
        self.waits = [sum_async(self.wire, self.name)]
        for index, gradient in enumerate(self.gradients):
            if self._lies[index]:
                assert gradient is not None
                whole = gradient.as_strided((gradient.numel(),), (1,))
                self.waits.append(sum_async(whole, f"{self.name}.{index}"))

    def receive(self) -> list[Tensor | None]:
        """Waits for the sum; returns each parameter's gradient."""
        for wait in self.waits:
            wait()
        self.waits = []  # which hold what was sent
        if self.wire is not self.flat:
            self.flat.copy_(self.wire)
            self.wire = self.flat
        received = list(self.gradients)
        for index, lies in enumerate(self._lies):
            if lies:
                self.gradients[index] = None  # it is the user's now
        return received


class Reducer:
    """Buckets, and the hooks on a module's trainable parameters that fill them; the next update notices freezing and
    unfreezing. `sum_async` is called with the same names on every rank. A parameter that is larger than a bucket has
    a bucket of its own. `where_they_lie` is asked whenever buckets are made, and returns True if large gradients are
    summed without a copy."""

    def __init__(
        self,
        module: nn.Module,
        sum_async: SumAsync,
        *,
        bucket_bytes: int,
        compression: str | None = None,
        staged: Staged | None = None,
        where_they_lie: Callable[[], bool] = lambda: False,
    ) -> None:
        self._module = module
        self._staged = staged
        self._sum_async = sum_async
        self._bucket_bytes = bucket_bytes
        self._wire_type = HALVES[compression] if compression else None
        self._where_they_lie = where_they_lie
        self._layouts = WeakTensorKeyDictionary()  # by parameter, not by its id, which another may have once it is gone
        for parameter in module.parameters():
            self._layouts[parameter] = layout_of(parameter)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._state = "outside"  # of a backward pass of ours; "adding up"; "reducing"; "reducing stages"
        self._generation = 0
        self._build()

    # -- buckets and hooks -----------------------------------------------------------------------------------
    def _build(self) -> None:
        self.close()
        self._parameters = trainable(self._module)
        self._generation += 1
        self.buckets: list[Bucket] = []
        lying = self._wire_type is None and self._where_they_lie()
        for parameters, is_last_pass in by_stage(self._parameters, self._staged):
            for group in bucketize(parameters, self._bucket_bytes):
                # as they were at first: what one rank alone does to its parameters later must not part the ranks
                layouts = [self._layouts.setdefault(parameter, layout_of(parameter)) for parameter in group]
                bucket = Bucket(f"hvdtrain.gradients.{self._generation}.{len(self.buckets)}", group, layouts, lying)
                self.buckets.append(bucket)
                for index, parameter in enumerate(group):
                    hook = self._on_gradient(bucket, index, is_last_pass)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        self._used = torch.ones(len(self._parameters), dtype=torch.float64)
        self._tail: Tensor | None = None

    def _on_gradient(self, bucket: Bucket, index: int, is_last_pass: Callable[[], bool]) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if self._state == "reducing" or (self._state == "reducing stages" and is_last_pass()):
                _check_dense(parameter.grad)
                if bucket.waits:
                    raise ConfigError(
                        "a parameter cannot get two gradients in one backward pass",
                        f"a second gradient of a parameter, shape {tuple(parameter.shape)}, after the first was sent",
                        "use torch.utils.checkpoint with use_reentrant=False",
                    )
                bucket.fill(index)
                if bucket.missing == 0:
                    bucket.send(self._sum_async, self._wire_type)

        return hook

    def begin_again(self) -> None:
        """The ranks have changed: what is under way is forgotten, and all count alike from here on."""
        self._generation = 0
        self._build()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # -- one backward pass -----------------------------------------------------------------------------------
    def backward(self, loss: Tensor, sent: Pass) -> None:
        passes = partial(loss.backward, retain_graph=sent.retain_graph)
        self._run(passes, "adding up" if sent.afterwards else "reducing", sent)

    def run(self, passes: Callable[[], None], sent: Pass) -> None:
        self._run(passes, "reducing stages", sent)

    def _run(self, passes: Callable[[], object], state: str, sent: Pass) -> None:
        if sent.reduce:
            if trains_others(self._module, self._parameters):
                self._build()
            for bucket in self.buckets:
                bucket.begin()
        used = None if sent.counts else [float(p.grad is not None) for b in self.buckets for p in b.parameters]
        self._state = state if sent.reduce else "adding up"
        try:
            passes()
        finally:
            self._state = "outside"
        if sent.reduce:
            self._send_rest(sent.extras, used)

    def _send_rest(self, extras: Tensor | None, known: list[float] | None) -> None:
        """Sends buckets that wait for gradients that did not come, then which parameters had one (if not `known`)."""
        self._complete = known is None
        used = self._used if known is None else torch.tensor(known, dtype=torch.float64)
        position = 0
        for bucket in self.buckets:
            if bucket.missing:
                self._complete = False
                used = used.clone() if used is self._used else used
                for index, filled in enumerate(bucket.filled):
                    if not filled:
                        if known is None:
                            used[position + index] = float(bucket.parameters[index].grad is not None)
                        bucket.fill(index)  # with what earlier micro-batches left, or zeros
            if not bucket.waits:
                bucket.send(self._sum_async, self._wire_type)
            position += len(bucket.parameters)
        self._extras = extras
        device = self.buckets[0].flat.device if self.buckets else torch.device("cpu")
        parts = [used.to(device, non_blocking=True)] + ([extras.to(device)] if extras is not None else [])
        self._tail = torch.cat(parts)
        self._wait_tail = self._sum_async(self._tail, f"hvdtrain.tail.{self._generation}")

    def finish(self) -> None:
        assert self._tail is not None, "finish() follows a pass that reduces"
        received = [bucket.receive() for bucket in self.buckets]
        self._wait_tail()
        if self._extras is not None:
            self._extras.copy_(self._tail[len(self._parameters) :])
        # a rank that had all its gradients knows that all were used; only one that lacks some has to look
        used = [True] * len(self._parameters)
        if not self._complete:
            used = (self._tail[: len(used)] > 0).tolist()
        position = 0
        for bucket, gradients in zip(self.buckets, received, strict=True):
            for parameter, gradient in zip(bucket.parameters, gradients, strict=True):
                parameter.grad = gradient if used[position] else None
                position += 1
        self._tail = None


def by_stage(
    parameters: Sequence[nn.Parameter], staged: Staged | None
) -> list[tuple[list[nn.Parameter], Callable[[], bool]]]:
    """Splits parameters by the stage that computes their gradients, each with a function that returns True in a stage's
    last backward pass. The last stage comes first: its gradients are complete first. Last come parameters that no
    stage owns, or several do."""
    if staged is None:
        return [(list(parameters), lambda: True)]
    left = {id(parameter): parameter for parameter in parameters}
    groups: list[tuple[list[nn.Parameter], Callable[[], bool]]] = []
    for index, owned in enumerate(staged.owned_parameters()):
        mine = [left.pop(id(parameter)) for parameter in owned if id(parameter) in left]
        groups.append((mine, partial(staged.finishing, index)))
    return [*reversed(groups), (list(left.values()), lambda: False)]


def bucketize(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Groups parameters in the order in which gradients come (the reverse of registration); pure.

    A bucket holds one dtype on one device, and at most `bucket_bytes` or a single larger parameter. The first ones are
    small, so that something is under way early; and each is at most half of what is still to come, because nothing
    hides the way of the last one. Next to nothing (a bias, a batch-norm) does not travel alone.
    """
    groups: list[list[nn.Parameter]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    room: dict[int, int] = {}
    filled: dict[int, int] = {}
    dust_bytes = min(_DUST_BYTES, bucket_bytes // 8)
    to_come = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    for parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        size = parameter.numel() * parameter.element_size()
        group = open_groups.get(kind)
        if group is None or (room[id(group)] < size and filled[id(group)] > dust_bytes):
            group = open_groups[kind] = []
            groups.append(group)
            most = _SMALL_BUCKET_BYTES if len(groups) < 3 else max(to_come // 2, _SMALL_BUCKET_BYTES)
            room[id(group)], filled[id(group)] = min(bucket_bytes, most), 0
        group.append(parameter)
        room[id(group)] -= size
        filled[id(group)] += size
        to_come -= size
    return groups


def layout_of(parameter: Tensor) -> Layout:
    """Returns the strides of a parameter's gradient: the parameter's, if it is dense: optimizers are faster then."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return tuple(parameter.stride())
    return tuple(torch.empty(parameter.shape, device="meta").stride())


def _is_large(parameter: nn.Parameter) -> bool:
    """Returns True if its gradient may be summed where it lies, if it lies there as it should."""
    size = parameter.numel() * parameter.element_size()
    return size >= _DUST_BYTES and parameter.dtype in (torch.float32, torch.float64)


def _is_its_own(gradient: Tensor, parameter: nn.Parameter, layout: Layout) -> bool:
    """Returns True if a gradient lies as it does on every rank, in memory that is PyTorch's and not used elsewhere:
    autograd may hand out a view of memory that another layer still needs (it checks the tensor's references, not
    those to its memory)."""
    lies = zip(gradient.shape, gradient.stride(), layout, strict=True)
    references = _references(gradient)  # before there is another one here
    memory = gradient.untyped_storage()
    return (
        gradient.dtype == parameter.dtype
        and not gradient.requires_grad
        and all(its == wanted for size, its, wanted in lies if size > 1)
        and memory.resizable()  # numpy's, for one, is not
        and references <= _OWN_REFERENCES
        and storage_use_count(memory._cdata) <= _OWN_USES
    )


def _references(tensor: Tensor) -> int:
    """Returns the number of references to the Python object of a tensor's memory."""
    return sys.getrefcount(tensor.untyped_storage())


_OWN_REFERENCES = _references(torch.empty(1))  # PyTorch's own, which differ with its version


def _check_dense(gradient: Tensor | None) -> None:
    if gradient is not None and gradient.layout != torch.strided:
        raise ConfigError(
            "gradients must be dense to be summed over ranks",
            f"a gradient of layout {gradient.layout} and shape {tuple(gradient.shape)}",
            "make the layer with sparse=False (nn.Embedding, nn.EmbeddingBag)",
        )
