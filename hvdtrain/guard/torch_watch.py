"""What is watched of a script that trains with horovod.torch."""

from __future__ import annotations

import hashlib
import sys
import warnings
import weakref
from types import ModuleType
from typing import Any

from hvdtrain.comm.lines import user_line
from hvdtrain.guard.hooks import Hook, wrap
from hvdtrain.guard.session import GuardSession
from hvdtrain.world import same_data

_BATCHES = 2  # of each optimizer, whose contents are compared
_SEEN = 64  # pieces of an update, at most
_LOOKS = 16  # updates after which no more batches are expected of an optimizer that has none yet, as a GAN's second


class BatchWatch:
    """Notes the batches that loaders hand out while gradients are on; without a loader, what models are called with."""

    def __init__(self, session: GuardSession) -> None:
        self._session = session
        self._loader: Any = None
        self._batches: dict[int, tuple[int, int]] = {}  # by optimizer: those reported, and updates so far
        # since the last update: what, and where it came from; of loaders, and what models were called with
        self._loaded: list[tuple[str, str]] = []
        self._inputs: list[tuple[str, str]] = []
        self._looking: Any = None

    def loaders(self, module: ModuleType) -> None:
        def made(original: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
            loader.__dict__["_guard_line"] = user_line()
            return original(loader, *args, **kwargs)

        def iterated(original: Any, loader: Any) -> Any:
            iterator = original(loader)
            iterator._guard_loader = weakref.ref(loader)
            return iterator

        def advanced(original: Any, iterator: Any) -> Any:
            import torch

            self._loader = getattr(iterator, "_guard_loader", None)
            batch = original(iterator)
            if self._looks and torch.is_grad_enabled() and len(self._loaded) < _SEEN and (seen := _digest(batch)):
                loader = self._loader() if self._loader is not None else None
                self._loaded.append((seen, getattr(loader, "_guard_line", None) or user_line()))
                self._stop_looking()  # at what models are called with
            return batch

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

    @property
    def _looks(self) -> bool:
        """Batches are noted: those of some optimizer's first updates are not all known yet, and may still come."""
        wanted = [number < _BATCHES and steps < _LOOKS for number, steps in self._batches.values()]
        return self._session.on and (not wanted or any(wanted))

    def look(self) -> None:
        """Notes what models are called with, where no loader hands it out."""
        if self._looking is not None or self._loaded or not self._looks:
            return
        import torch

        # it would name the hook that is set here, for a few calls
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")

        def called(module: Any, inputs: Any) -> None:
            # the outermost call alone: what a layer gets depends on weights, and on noise of this rank's own
            wanted = torch.is_grad_enabled() and module.training and len(self._inputs) < _SEEN
            if wanted and not _within_a_module() and (seen := _digest(list(inputs))):
                self._inputs.append((seen, user_line()))

        self._looking = torch.nn.modules.module.register_module_forward_pre_hook(called)

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.remove()
            self._looking = None

    def of_update(self, optimizer: Any, number: int, steps: int) -> None:
        """Reports the samples of the update that an optimizer is about to do after `steps` others, and their order."""
        loader = self._loader() if self._loader is not None else None
        sampler = getattr(loader, "sampler", None)
        now = getattr(sampler, "_guard_pass", None)
        if now is not None and not now[2]:
            now[2] = True
            self._of_sampler(optimizer, sampler, now)
        noted, self._loaded, self._inputs = self._loaded or self._inputs, [], []
        before = self._batches[number][0] if steps else 0
        reported = bool(noted) and before < _BATCHES
        self._batches[number] = before + reported, steps
        if reported:
            value = hashlib.blake2b("".join(seen for seen, _ in noted).encode(), digest_size=8).hexdigest()
            ranks = ranks_of(optimizer, self._session.size)
            self._session.report(kind="data", ranks=ranks, key=[number, before + 1], value=value, line=noted[0][1])
        if not self._looks:
            self._stop_looking()
        elif not noted:
            self.look()

    def _of_sampler(self, optimizer: Any, sampler: Any, now: list[Any]) -> None:
        session = self._session
        ranks = ranks_of(optimizer, session.size)
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


def ranks_of(optimizer: Any, size: int) -> list[int]:
    """The ranks that hold replicas of what this optimizer updates."""
    ranks = getattr(getattr(optimizer, "process_set", None), "ranks", None)
    return sorted(ranks) if ranks else list(range(size))


def _digest(batch: Any) -> str:
    """Returns a digest of a batch's tensors and arrays; "" if it has none."""
    from hvdtrain.private.torch import pytree

    arrays = [
        leaf for leaf in pytree.tree_leaves(batch) if hasattr(leaf, "dtype") and hasattr(leaf, "ndim") and leaf.ndim
    ]
    return str(tuple(same_data.of_arrays(arrays))) if arrays else ""


def _within_a_module() -> bool:
    """Returns True if another module calls the module that the hook is called for."""
    calls, frame = 0, sys._getframe(1)
    while frame is not None and calls < 2:
        calls += frame.f_code.co_name == "_wrapped_call_impl"  # Module.__call__
        frame = frame.f_back  # type: ignore[assignment]
    return calls > 1


_COLLECTIVE = (
    "allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_", "allgather", "grouped_allgather", "broadcast",
    "broadcast_", "alltoall", "reducescatter", "barrier", "synchronize",
)  # fmt: skip


def hooks(session: GuardSession) -> dict[str, Hook]:
    """Returns what is to be done to each module when it is imported."""
    watch = TorchWatch(session)
    return {
        "torch.optim.optimizer": watch.optimizers,
        "torch.nn.utils.clip_grad": watch.clipping,
        "torch.utils.data.dataloader": watch.batches.loaders,
        "torch.utils.data.distributed": watch.batches.samplers,
        "horovod.torch.functions": watch.functions,
        "horovod.torch.optimizer": watch.wrapped,
        "horovod.torch": watch.horovod,
    }


class TorchWatch:
    """Reports an optimizer's weights before and after its updates."""

    def __init__(self, session: GuardSession) -> None:
        self._session = session
        self._made: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._distributed: weakref.WeakSet[Any] = weakref.WeakSet()
        self._clipped: weakref.WeakSet[Any] = weakref.WeakSet()  # before the average
        self._reached: weakref.WeakSet[Any] = weakref.WeakSet()  # whose gradients were looked at
        self._steps: dict[int, tuple[int, int]] = {}  # joins, and updates since
        self._count = self._depth = 0
        self._compared: dict[int, tuple[int, int]] = {}  # `_steps` at each optimizer's last comparison
        self.batches = BatchWatch(session)
        session.at_end.append(self._last)

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
                ours = {id(parameter) for parameter in parameters}
                early = {o for o in self._distributed if any(id(part) in ours for part in getattr(o, "_handles", ()))}
                self._clipped.update(early)
                if early:
                    self._session.find(
                        "clipped-before-average", "gradients must be averaged before they are clipped",
                        f"{original.__name__} of gradients that Horovod has not yet averaged",
                        "optimizer.synchronize(); clip; then `with optimizer.skip_synchronize(): optimizer.step()`",
                    )  # fmt: skip
            return original(parameters, *args, **kwargs)

        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrap(module, name, clipped)

    def wrapped(self, module: ModuleType) -> None:
        session = self._session

        def synchronized(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._look_at_gradients(optimizer)
            if ranks_of(optimizer, session.size) != list(range(session.size)):
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
            self.batches.look()
            return result

        def distributed(original: Any, *args: Any, **kwargs: Any) -> Any:
            optimizer = original(*args, **kwargs)
            self._distributed.add(optimizer)
            return optimizer

        broadcast_object = module.broadcast_object
        wrap(module, "init", init)
        wrap(module, "join", self._session.joined)
        wrap(module, "DistributedOptimizer", distributed)
        for name in _COLLECTIVE:
            wrap(module, name, session.wrapped_collective)

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
        self.batches.of_update(optimizer, number, steps)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        session = self._session
        if self._depth or not session.on:
            return
        number = self._numbers[optimizer]
        joins, steps = self._steps[number]
        steps += 1
        self._steps[number] = (joins, steps)
        session.stepped(f"optimizer {number}")
        if steps <= 2 or steps % session.every == 0:
            self._compare(optimizer, number)

    def _compare(self, optimizer: Any, number: int, line: str = "") -> None:
        self._compared[number] = self._steps[number]
        self._report(optimizer, number, self._steps[number][1], "after", line or user_line())

    def _last(self) -> None:
        """Compares what has been updated since the last time."""
        for optimizer, number in list(self._numbers.items()):
            if self._steps[number][0] == self._session.joins and self._steps[number] != self._compared.get(number):
                self._compare(optimizer, number, "at the end")

    def _look_at_gradients(self, optimizer: Any) -> None:
        """Reports an optimizer without any gradient; runs before Horovod, which replaces missing gradients by zeros."""
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
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state, settings = "", ""
        if when == "before":
            states = [sorted(optimizer.state.get(parameter, {}).items()) for parameter in parameters]
            state = _fingerprint([value for items in states for _, value in items if hasattr(value, "detach")])
            numbers = [
                {name: float(value) for name, value in sorted(group.items()) if isinstance(value, (int, float))}
                for group in optimizer.param_groups
            ]
            settings = str(numbers)
        self._session.report(
            kind="weights", ranks=ranks_of(optimizer, self._session.size),
            key=[number, self._session.joins, step, when], value=_fingerprint([its.detach() for its in parameters]),
            state=state, settings=settings, line=line, made=self._made.get(optimizer, "?"),
            averaged=optimizer in self._distributed, clipped=optimizer in self._clipped, framework="torch",
        )  # fmt: skip


def _fingerprint(tensors: list[Any]) -> str:
    """Returns a hash of the tensors' bits, in their order; waits for the device once."""
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
