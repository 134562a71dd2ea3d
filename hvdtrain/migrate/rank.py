"""What each rank of a proof runs: a script, up to an update, and then what its models hold.

usage: python -m hvdtrain.migrate.rank TEXT SCRIPT FOLDER UPDATES ARGS...

TEXT is run as if it were SCRIPT, with ARGS. FOLDER/RANK.npz gets the tensors, FOLDER/RANK.json their names, and how
many updates there were.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

SEED = 0


class _Enough(BaseException):
    """So many updates were made; nothing of the script's is to catch it."""


class _Watch:
    """Counts updates, and knows the models.

    Attributes:
        updates: steps of optimizers that the script asked for.
        left_out: of Horovod's own updates with gradients of zero, those that would have changed something.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._paused, self._depth = limit, False, Counter[int]()
        self._modules: list[nn.Module] = []  # held: at the script's end they are still to be read
        self.updates, self.left_out = 0, 0
        register_optimizer_step_pre_hook(self._begins)
        register_optimizer_step_post_hook(self._ends)
        plain = nn.Module.__init__

        @functools.wraps(plain)
        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            self._modules.append(module)
            plain(module, *args, **kwargs)

        setattr(nn.Module, "__init__", init)  # noqa: B010 - mypy has it that methods stay

    def _begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth[id(optimizer)] += 1

    def _ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth[id(optimizer)] -= 1  # Horovod's step calls the one that it has inherited
        if self._paused or self._depth[id(optimizer)]:
            return
        self.updates += 1
        if self.updates == self._limit:
            raise _Enough

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of the script's models, in the order in which these were made."""
        own = [m for m in self._modules if not type(m).__module__.startswith(("hvdtrain.", "horovod."))]
        parts = {id(part) for module in own for part in module.modules() if part is not module}
        roots = [m for m in own if id(m) not in parts and any(True for _ in m.state_dict())]
        found = {}
        for number, root in enumerate(roots, 1):
            name = type(root).__name__ if len(roots) == 1 else f"{type(root).__name__} {number}"
            for key, tensor in (*root.named_parameters(), *root.named_buffers()):
                found[f"{name}: {key}"] = tensor.detach().cpu().clone()
        return found


@contextmanager
def _kept_streams() -> Iterator[None]:
    """Random numbers go on as if what is within had drawn and seeded nothing."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.cuda.get_rng_state_all()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.cuda.set_rng_state_all(states[3])


def _seed() -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(functools.partial(around, original)))


def _alike_in_hvdtrain() -> None:
    """The streams of random numbers stay the script's own: hvdtrain gives each rank others."""
    import hvdtrain
    import hvdtrain.torch

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _kept_streams():
            return original(*args, **kwargs)

    _wrap(hvdtrain, "init", around)
    _wrap(hvdtrain.torch, "prepare", around)


def _alike_in_horovod(watch: _Watch) -> None:
    """The update with gradients of zero, by which Horovod makes an optimizer's state before it sends it, is undone."""
    import horovod.torch

    def around(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in parameters]
        empty = horovod.torch.broadcast_object(not optimizer.state_dict()["state"], root_rank=0)
        with watch.paused():
            result = original(optimizer, *args, **kwargs)
        moved = any(not torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
        steps = any("step" in state for state in optimizer.state.values())
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old)
        if empty:
            watch.left_out += moved or steps
            optimizer.state.clear()
        return result

    _wrap(horovod.torch, "broadcast_optimizer_state", around)


def main() -> None:
    text, script, folder, updates, *args = sys.argv[1:]
    watch = _Watch(int(updates))
    _alike_in_horovod(watch)
    _alike_in_hvdtrain()
    sys.argv, sys.path[0] = [script, *args], os.path.dirname(script)
    module = types.ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    _seed()
    try:
        exec(compile(Path(text).read_bytes(), script, "exec"), vars(module))
    except _Enough:
        pass
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    _leave(watch, Path(folder))


def _leave(watch: _Watch, folder: Path) -> None:
    """Writes what was found, waits for the others, and ends at once: the script may be in the middle of a loop."""
    import horovod.torch as hvd

    rank, tensors = hvd.rank(), watch.tensors()
    # numpy has no bfloat16
    arrays = [t.float() if t.is_floating_point() and t.element_size() < 4 else t for t in tensors.values()]
    np.savez(folder / f"{rank}.npz", *(array.numpy() for array in arrays))
    kinds = [t.dtype if t.is_floating_point() or t.is_complex() else torch.float64 for t in tensors.values()]
    record = {
        "updates": watch.updates, "left_out": watch.left_out,
        "eps": {name: torch.finfo(kind).eps for name, kind in zip(tensors, kinds, strict=True)},
    }  # fmt: skip
    (folder / f"{rank}.json").write_text(json.dumps(record))
    hvd.barrier()
    hvd.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
