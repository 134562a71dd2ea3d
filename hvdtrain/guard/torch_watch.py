"""What is watched of a script that trains with horovod.torch."""

from __future__ import annotations

import hashlib
import sys
import weakref
from types import ModuleType
from typing import Any

from hvdtrain.core.in_step.meeting import user_line
from hvdtrain.guard.hooks import Hook, wrap
from hvdtrain.guard.session import Session

_COLLECTIVE = (
    "allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_", "allgather", "grouped_allgather", "broadcast",
    "broadcast_", "alltoall", "reducescatter", "barrier", "synchronize",
)  # fmt: skip
_BATCHES = 2  # whose contents are compared
_MEANS = ("Nll", "Mse", "Mean", "BinaryCrossEntropy", "SmoothL1", "Huber", "KlDiv", "L1Loss", "SoftMarginLoss")


def hooks(session: Session) -> dict[str, Hook]:
    """Returns what is to be done to each module when it is imported."""
    watch = TorchWatch(session)
    return {
        "torch.optim.optimizer": watch.optimizers,
        "torch.nn.utils.clip_grad": watch.clipping,
        "torch.utils.data.dataloader": watch.loaders,
        "torch.utils.data.distributed": watch.samplers,
        "horovod.torch.functions": watch.functions,
        "horovod.torch.optimizer": watch.wrapped,
        "horovod.torch": watch.horovod,
    }


class TorchWatch:
    """Reports an optimizer's weights before and after its updates, and what the batches before them were.

    Args:
        session: takes the reports.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._made: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._distributed: weakref.WeakSet[Any] = weakref.WeakSet()
        self._reached: weakref.WeakSet[Any] = weakref.WeakSet()  # whose gradients were looked at
        self._steps: dict[int, tuple[int, int]] = {}  # joins, and updates since
        self._count = self._depth = 0
        self._loader: Any = None
        self._batches: dict[int, int] = {}  # of each optimizer, so far
        self._inputs: list[tuple[str, str]] = []  # since the last update: what, and where the model was called
        self._looking: Any = None

    # -- PyTorch ---------------------------------------------------------------------------------------------------
    def optimizers(self, module: ModuleType) -> None:
        def made(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(optimizer, *args, **kwargs)
            self._made[optimizer] = user_line()
            return result

        wrap(module.Optimizer, "__init__", made)
        module.register_optimizer_step_pre_hook(self._before)
        module.register_optimizer_step_post_hook(self._after)

    def clipping(self, module: ModuleType) -> None:
        def clipped(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if self._session.on:
                import torch

                parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
                waiting = [
                    parameter for optimizer in self._distributed for parameter in getattr(optimizer, "_handles", ())
                    if not isinstance(parameter, tuple)
                ]  # fmt: skip
                ours = {id(parameter) for parameter in parameters}
                if any(id(parameter) in ours for parameter in waiting):
                    self._session.find(
                        "clipped-before-average", "gradients must be averaged before they are clipped",
                        f"{original.__name__} of gradients that Horovod has not yet averaged",
                        "optimizer.synchronize(); clip; then `with optimizer.skip_synchronize(): optimizer.step()`",
                    )  # fmt: skip
            return original(parameters, *args, **kwargs)

        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrap(module, name, clipped)

    def loaders(self, module: ModuleType) -> None:
        def made(original: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
            loader.__dict__["_guard_line"] = user_line()
            return original(loader, *args, **kwargs)

        def iterated(original: Any, loader: Any) -> Any:
            iterator = original(loader)
            iterator._guard_loader = weakref.ref(loader)
            return iterator

        def advanced(original: Any, iterator: Any) -> Any:
            self._loader = getattr(iterator, "_guard_loader", None)
            return original(iterator)

        wrap(module.DataLoader, "__init__", made)
        wrap(module.DataLoader, "__iter__", iterated)
        wrap(module._BaseDataLoaderIter, "__next__", advanced)

    def samplers(self, module: ModuleType) -> None:
        def made(original: Any, sampler: Any, *args: Any, **kwargs: Any) -> Any:
            sampler._guard_line = user_line()
            return original(sampler, *args, **kwargs)

        def iterated(original: Any, sampler: Any) -> Any:
            # epochs of the passes in which the weights were updated; this pass's, and its line
            trained = sampler.__dict__.setdefault("_guard_trained", set())
            before = getattr(sampler, "_guard_pass", None)
            if before is not None and before[2]:
                trained.add(before[0])
            sampler._guard_pass = [sampler.epoch, user_line(), False]
            return original(sampler)

        wrap(module.DistributedSampler, "__init__", made)
        wrap(module.DistributedSampler, "__iter__", iterated)

    # -- Horovod ---------------------------------------------------------------------------------------------------
    def wrapped(self, module: ModuleType) -> None:
        session = self._session

        def synchronized(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._look_at_gradients(optimizer)
            if _ranks(optimizer, session.size) != list(range(session.size)):
                return original(optimizer, *args, **kwargs)
            with session.collective("optimizer.synchronize()"):
                return original(optimizer, *args, **kwargs)

        for name in ("_DistributedOptimizer", "_DistributedAdasumOptimizer"):
            if "synchronize" in vars(getattr(module, name)):
                wrap(getattr(module, name), "synchronize", synchronized)

    def functions(self, module: ModuleType) -> None:
        def set_up(original: Any, *args: Any, **kwargs: Any) -> Any:
            self._depth += 2  # it steps an optimizer, with gradients of zero, so that there is a state
            try:
                return self._session.wrapped_collective(original, *args, **kwargs)
            finally:
                self._depth -= 2

        wrap(module, "broadcast_optimizer_state", set_up)
        for name in ("broadcast_parameters", "broadcast_object", "allgather_object"):
            wrap(module, name, self._session.wrapped_collective)

    def horovod(self, module: ModuleType) -> None:
        session = self._session

        def init(original: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            session.meet(module.rank(), module.size(), lambda x: broadcast_object(x, 0, name="hvdtrain.guard"))
            self._look()
            return result

        def join(original: Any, *args: Any, **kwargs: Any) -> Any:
            with session.collective("join"):
                result = original(*args, **kwargs)
            session.joined()
            return result

        def distributed(original: Any, *args: Any, **kwargs: Any) -> Any:
            optimizer = original(*args, **kwargs)
            self._distributed.add(optimizer)
            return optimizer

        broadcast_object = module.broadcast_object
        wrap(module, "init", init)
        wrap(module, "join", join)
        wrap(module, "DistributedOptimizer", distributed)
        for name in _COLLECTIVE:
            wrap(module, name, session.wrapped_collective)
        wrap(sys.modules["torch"].Tensor, "backward", self._backward)

    def _backward(self, original: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Several passes an update are summed: a loss that is a mean, and nothing else, was not divided by them."""
        name = type(loss.grad_fn).__name__
        result = original(loss, *args, **kwargs)
        if self._session.on and name.startswith(_MEANS):
            # those with gradients on their way, which this pass has made
            passes = [getattr(o, "backward_passes_per_step", 1) for o in self._distributed if o._handles]
            if max(passes, default=1) > 1:
                self._session.find(
                    "summed-passes", f"the gradients of backward_passes_per_step={max(passes)} passes are summed, not"
                    " averaged", "the loss is not divided by their number",
                    f"(loss / {max(passes)}).backward(), or a rate that allows it", note=True,
                )  # fmt: skip
        return result

    # -- each update -----------------------------------------------------------------------------------------------
    def _look(self) -> None:
        """Notes what models are called with, until it is known of two updates of each optimizer."""
        if self._looking is not None or not self._session.on:
            return
        from torch.nn.modules.module import register_module_forward_pre_hook

        def called(module: Any, inputs: Any) -> None:
            import torch

            if torch.is_grad_enabled() and module.training and len(self._inputs) < 64:
                seen = [_digest(each) for each in inputs if isinstance(each, torch.Tensor)]
                if seen:
                    self._inputs.append(("".join(seen), user_line()))

        self._looking = register_module_forward_pre_hook(called)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth += 1
        session = self._session
        if self._depth > 1 or not session.on:
            return
        if optimizer not in self._numbers:
            self._numbers[optimizer] = self._count
            self._count += 1
        number = self._numbers[optimizer]
        joins, steps = self._steps.get(number, (0, 0))
        if joins != session.joins:
            joins, steps = session.joins, 0
        self._steps[number] = (joins, steps)
        if steps == 0:
            self._report(optimizer, number, 1, "before", user_line())
            self._look()
            self._batches[number] = 0
        self._of_data(optimizer, number)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        session = self._session
        if self._depth or not session.on:
            return
        number = self._numbers[optimizer]
        joins, steps = self._steps[number]
        steps += 1
        self._steps[number] = (joins, steps)
        name = f"optimizer {number}"
        session.steps[name] = session.steps.get(name, 0) + 1
        if steps <= 2 or steps % session.every == 0:
            self._report(optimizer, number, steps, "after", user_line())

    def _look_at_gradients(self, optimizer: Any) -> None:
        """Before Horovod, which makes zeros of gradients that there are none of, first has them."""
        if optimizer in self._reached or self._depth > 1 or not self._session.on:
            return
        self._reached.add(optimizer)
        if all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"]):
            self._session.find(
                "no-gradients", "the parameters that DistributedOptimizer was given must be those that are trained",
                "no gradient has reached any of them: the model's were made, or replaced, after it was wrapped",
                "make the model whole (layers, .to(device)) before the optimizer, and wrap that",
                line=self._made.get(optimizer),
            )  # fmt: skip

    def _report(self, optimizer: Any, number: int, step: int, when: str, line: str) -> None:
        first = when == "before"
        self._session.report(
            kind="weights", ranks=_ranks(optimizer, self._session.size),
            key=[number, self._session.joins, step, when], value=_fingerprint(_weights(optimizer)),
            state=_fingerprint(_state(optimizer)) if first else "", settings=_settings(optimizer) if first else "",
            line=line, made=self._made.get(optimizer, "?"), averaged=optimizer in self._distributed, framework="torch",
        )  # fmt: skip

    def _of_data(self, optimizer: Any, number: int) -> None:
        """What the update is made of: whose samples, in which order, and are they other ranks' too."""
        loader = self._loader() if self._loader is not None else None
        sampler = getattr(loader, "sampler", None)
        now = getattr(sampler, "_guard_pass", None)
        if now is not None and not now[2]:
            now[2] = True
            self._of_sampler(optimizer, sampler, now)
        inputs, self._inputs = self._inputs, []
        if self._looking is None or not inputs or self._batches[number] == _BATCHES:
            return
        self._batches[number] += 1
        line = getattr(loader, "_guard_line", None) or inputs[0][1]
        value = hashlib.blake2b("".join(seen for seen, _ in inputs).encode(), digest_size=8).hexdigest()
        ranks = _ranks(optimizer, self._session.size)
        self._session.report(kind="data", ranks=ranks, key=[number, self._batches[number]], value=value, line=line)
        if min(self._batches.values()) == _BATCHES:
            self._looking.remove()
            self._looking = None

    def _of_sampler(self, optimizer: Any, sampler: Any, now: list[Any]) -> None:
        session = self._session
        ranks = _ranks(optimizer, session.size)
        wanted = {(session.size, session.rank), (len(ranks), ranks.index(session.rank) if session.rank in ranks else 0)}
        if (sampler.num_replicas, sampler.rank) not in wanted:
            session.find(
                "sampler", f"DistributedSampler must deal to {session.size} ranks, and know which this one is",
                f"num_replicas={sampler.num_replicas}, rank={sampler.rank} on rank {session.rank}",
                "DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())", line=sampler._guard_line,
            )  # fmt: skip
        if sampler.shuffle and now[0] in sampler._guard_trained:
            session.find(
                "set-epoch", "each epoch must have an order of its own",
                f"the sampler's second pass in the order of epoch {now[0]}",
                "sampler.set_epoch(epoch) before the loader is iterated", line=now[1],
            )  # fmt: skip


def _ranks(optimizer: Any, size: int) -> list[int]:
    """The ranks that hold replicas of what this optimizer updates."""
    ranks = getattr(getattr(optimizer, "process_set", None), "ranks", None)
    return sorted(ranks) if ranks else list(range(size))


def _weights(optimizer: Any) -> list[Any]:
    return [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]


def _state(optimizer: Any) -> list[Any]:
    """Tensors of the optimizer's state, in the order of its parameters."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            found += [value for _, value in sorted(state.items()) if hasattr(value, "detach")]
    return found


def _settings(optimizer: Any) -> str:
    """Rates and the like of each group, as text."""
    numbers = [
        {name: float(value) for name, value in sorted(group.items()) if isinstance(value, (int, float))}
        for group in optimizer.param_groups
    ]
    return str(numbers)


def _fingerprint(tensors: list[Any]) -> str:
    """Of tensors' bits, in their order; one wait for the device."""
    import torch

    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for tensor in tensors:
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        bits = tensor.contiguous().view(kinds[tensor.element_size()])
        sums.append(bits.sum(dtype=torch.int64))
    values = [value for device in {s.device for s in sums} for value in torch.stack([s for s in sums if s.device == device]).tolist()]  # fmt: skip # noqa: E501
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()


def _digest(tensor: Any) -> str:
    """Of a batch's first and last numbers."""
    flat = tensor.detach().reshape(-1)
    return f"{tuple(tensor.shape)}{flat[:64].tolist()}{flat[-64:].tolist()}"
