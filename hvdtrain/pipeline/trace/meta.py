"""A model on the meta device: followed with numbers that stand for its weights, then given memory stage by stage."""

from __future__ import annotations

import gc
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.version import add_note
from hvdtrain.pipeline.values.microbatch import is_differentiable

Initialise = Callable[[nn.Module], object]


@contextmanager
def made_by_stages(model: nn.Module) -> Iterator[Unmade]:
    """Gives the model's tensors on the meta device stand-ins, until `Unmade.fill`; an error puts the meta device back.
    Parameters of one size class share one memory: enough to see what the model does, not to train it."""
    unmade = Unmade(model)
    try:
        unmade.stand_in()
        yield unmade
    except BaseException as error:
        unmade.back(error)
        raise


class Unmade:
    """The tensors of a model that are on the meta device; they stay the same objects throughout.

    (`torch.utils.swap_tensors` changes a tensor's content and keeps all references to it: shared weights and optimizers
    that hold them need no change.)
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._pairs: list[tuple[Tensor, Tensor]] = []  # the model's tensor, and what it is not at the moment
        self._memory: dict[tuple[torch.dtype, int], Tensor] = {}

    def stand_in(self) -> None:
        """Puts numbers in the place of all of them, on the CPU."""
        for parameter in self._model.parameters():
            if parameter.is_meta:
                self._swap(parameter, nn.Parameter(self._numbers(parameter), requires_grad=parameter.requires_grad))
        for buffer in self._model.buffers():
            if buffer.is_meta:
                # variances and masks that do no harm, indices that exist
                whole = not buffer.is_floating_point() and buffer.dtype != torch.bool
                self._swap(buffer, torch.full_like(buffer, 0 if whole else 1, device="cpu"))

    def _swap(self, tensor: Tensor, other: Tensor) -> None:
        try:
            torch.utils.swap_tensors(tensor, other)
        except RuntimeError as error:
            raise ConfigError(
                "a model on the meta device must be split before anything else refers to its tensors",
                str(error).splitlines()[0],
                "split it before a forward pass, and before weak references to its parameters",
            ) from error
        self._pairs.append((tensor, other))

    def _numbers(self, parameter: Tensor) -> Tensor:
        """Returns numbers that give layers outputs of the usual size: else any two outputs would look the same."""
        inputs = parameter[0].numel() if parameter.dim() > 1 else 1
        key = (parameter.dtype, round(math.log2(max(1, inputs)) / 2))
        count = parameter.numel()
        if key not in self._memory or self._memory[key].numel() < count:
            seeded = torch.Generator().manual_seed(count)
            drawn = torch.randn(count, generator=seeded) * 2.0 ** -key[1]
            self._memory[key] = drawn.to(parameter.dtype)
        return self._memory[key][:count].view(parameter.shape)

    def back(self, error: BaseException) -> None:
        """Puts all tensors back on the meta device, or adds a note to the error."""
        one: BaseException | None = error
        while one is not None:  # what frames hold of graphs holds the tensors' inside
            traceback.clear_frames(one.__traceback__)
            one = one.__cause__ or one.__context__
        gc.collect()  # and what circles of frames and graphs hold
        try:
            while self._pairs:
                torch.utils.swap_tensors(*self._pairs.pop())
        except RuntimeError:
            add_note(error, "  note: not all of the model could be put back on the meta device: build it again")

    def fill(self, initialise: Initialise | None) -> None:
        """Gives each tensor memory of its own where it is now, and values; raises `ConfigError` for those without.

        `initialise` is called with each module that has some of them, children first, as constructors do; None: their
        `reset_parameters()`.
        """
        if not self._pairs:
            if initialise is not None:
                raise ConfigError(
                    "initialise= needs a model on the meta device", "the model has its parameters in memory"
                )
            return
        for tensor, meta in self._pairs:
            tensor.data = torch.empty_like(meta, device=tensor.device)
            tensor.data.fill_(math.nan if is_differentiable(tensor) else 0)
        before = {id(tensor): tensor._version for tensor, _ in self._pairs}
        waiting = set(before)
        with torch.no_grad():
            for module in _children_first(self._model):
                if mine := {id(tensor) for _, tensor in _own(module)} & waiting:  # shared ones are their first module's
                    (initialise or _reset)(module)
                    waiting -= mine
        there = {id(tensor) for module in self._model.modules() for _, tensor in _own(module)}
        if not before.keys() <= there:
            raise ConfigError(
                "initialise= must fill tensors in place", "tensors were replaced by others", "module.weight.copy_(...)"
            )
        empty = [
            f"{path}.{name}".lstrip(".")
            for path, module in self._model.named_modules()
            for name, tensor in _own(module)
            if id(tensor) in before and _is_empty(tensor, before[id(tensor)])
        ]
        if empty:
            raise ConfigError(
                "a model on the meta device needs values for all parameters and buffers",
                f"{', '.join(empty[:8])}{f' and {len(empty) - 8} more' if len(empty) > 8 else ''}: without a value",
                "initialise=function, which fills a module's in place (default: its reset_parameters());\n"
                "load a state dict afterwards, with model.load_state_dict",
            )


def _is_empty(tensor: Tensor, version: int) -> bool:
    """Returns True if part of it was not written. Types without NaN: if all is zero, and nothing has changed it."""
    if is_differentiable(tensor):
        return bool(tensor.isnan().any())
    return tensor._version == version and not bool(tensor.any())


def _own(module: nn.Module) -> list[tuple[str, Any]]:
    both = {**module._parameters, **module._buffers}
    return [(name, tensor) for name, tensor in both.items() if tensor is not None]


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()

    def walk(one: nn.Module) -> Iterator[nn.Module]:
        if one in seen:
            return
        seen.add(one)
        for child in one.children():
            yield from walk(child)
        yield one

    return walk(module)


def _reset(module: nn.Module) -> None:
    """Resets a module's parameters; `nn.MultiheadAttention` has the method under another name."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None:
        reset()
