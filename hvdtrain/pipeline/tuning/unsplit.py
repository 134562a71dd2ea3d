"""The model as it was before the split, on one device: what a pipeline has to beat."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hvdtrain.core.errors import is_out_of_memory
from hvdtrain.pipeline.values.places import core_blocks, kind_of
from hvdtrain.values.nested import map_tensors

if TYPE_CHECKING:
    from hvdtrain.pipeline.run.runtime import Pipeline


class Unsplit:
    """A copy of a pipeline's model on one device, trained by plain PyTorch; on a CPU on `cores` (None: any)."""

    def __init__(self, model: nn.Module, device: torch.device | str, *, cores: Sequence[int] | None = None) -> None:
        self.device, self.cores = torch.device(device), cores
        self.model = copy.deepcopy(model).to(self.device)
        self.model.train(model.training)
        for parameter in self.model.parameters():
            parameter.grad = None

    def step(
        self, x: Any, y: Any, loss: Callable[[Any, Any], Tensor], *, kwargs: Mapping[str, Any] | None = None
    ) -> Tensor:
        """Forward and backward pass of a batch; gradients add up, as in `Pipeline.step`; returns the detached loss."""
        given = (x if type(x) is tuple else (x,), dict(kwargs or {}), y)
        arguments, named, targets = map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), given)
        with on_cores(self.cores):
            result = loss(self.model(*arguments, **named), targets)
            result.backward()
        return result.detach()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The copy's."""
        return self.model.parameters()

    def __str__(self) -> str:
        if self.device.type != "cpu":
            return str(self.device)
        threads = len(self.cores) if self.cores is not None else torch.get_num_threads()
        return f"{self.device} with {threads} thread{'s' * (threads != 1)}"


def unsplit(pipe: Pipeline) -> list[Unsplit]:
    """Returns the model on one of each kind of device that the pipeline has, where it fits; on a CPU with all its
    cores. A copy lies beside the stages: on a GPU it has the memory less that of the device's own stage."""
    kinds: dict[str, torch.device] = {}
    for device in pipe.devices:
        kinds.setdefault(kind_of(device), device)
    fitting = []
    for device in kinds.values():
        try:
            fitting.append(Unsplit(pipe.module, device))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
    return fitting


def on_first_device(pipe: Pipeline) -> Unsplit:
    """Returns the model on the first stage's device alone; on a CPU with the cores that the first stage has."""
    on_cpu = [device.type == "cpu" for device in pipe.devices]
    cores = core_blocks(sum(on_cpu))[0] if on_cpu[0] else ()
    return Unsplit(pipe.module, pipe.devices[0], cores=cores or None)


@contextmanager
def on_cores(cores: Sequence[int] | None) -> Iterator[None]:
    """The calling thread, and those it starts, work on these cores, with a thread on each; None changes nothing."""
    if cores is None:
        yield
        return
    affinity, before = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, affinity)
        torch.set_num_threads(before)


def seconds_of(work: Callable[[], Any], devices: Sequence[torch.device]) -> float:
    """Returns the seconds that the work takes, until these devices are done with it."""
    gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
    for device in gpus:
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    for device in gpus:
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
