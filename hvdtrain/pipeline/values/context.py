"""What the calling thread has set, for threads of our own."""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hvdtrain.core.errors import ConfigError


class Context:
    """Gradients, autocast, context variables, hooks of saved tensors, the default device.

    Raises:
        ConfigError: `torch` modes that only the calling thread would be in (a FLOP counter), with `threads`.
    """

    def __init__(self, *, threads: bool) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        kinds = ["cpu"] + ["cuda"] * torch.cuda.is_available()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in kinds
            if torch.is_autocast_enabled(kind)
        ]
        self._threads = threads
        modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()] if threads else []
        self._devices = [mode.device for mode in modes if isinstance(mode, DeviceContext)]
        self._variables = contextvars.copy_context()
        self._saving = torch._C._autograd._top_saved_tensors_default_hooks(True) if threads else None
        _refuse([mode for mode in modes if not isinstance(mode, DeviceContext)])
        if threads and torch.autograd._profiler_enabled():
            warnings.warn(
                "torch.profiler sees only the thread that started it, not the stages of a pipeline, unless it was given"
                " experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)",
                stacklevel=4,
            )

    def run(self, work: Callable[[], None]) -> None:
        """Runs it as the calling thread would; in any thread."""
        if self._threads:
            self._variables.copy().run(self._run, work)
        else:
            self._run(work)

    def _run(self, work: Callable[[], None]) -> None:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            if self._threads:
                for device in self._devices:
                    stack.enter_context(device)
                if self._saving is not None:
                    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saving))
            work()

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Around each forward pass, not around the thread: weights cast for one pass may not be kept for another."""
        with ExitStack() as stack:
            for kind, dtype, cache in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            yield


def _refuse(modes: list[Any]) -> None:
    if modes:
        raise ConfigError(
            "the stages of a pipeline work in threads of their own, which this mode does not reach",
            f"a call inside of {', '.join(type(mode).__name__ for mode in modes)}",
            "leave the mode out; or look at the unsplit model, or at a pipeline of one device, with it",
        )
