"""What a PyTorch script's updates are made of: are the samples other ranks' too, and does each epoch have its order?"""

from __future__ import annotations

import hashlib
import sys
import warnings
import weakref
from types import ModuleType
from typing import Any

from hvdtrain.comm.lines import user_line
from hvdtrain.guard.hooks import wrap
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
