"""The adapter in one process: mixed precision, losses that are not finite, memory that runs out, and time."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from cases import main, refused
from small import distance, loss_of, mlp, prepared
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import ConfigError, NonFiniteError
from hvdtrain.torch.losses.tally import SIZE, Tally, wrong
from hvdtrain.torch.update.nonfinite import Losses, PendingLosses
from hvdtrain.torch.values.clock import TorchClock


# -- precision ----------------------------------------------------------------------------------------------------
def case_bf16_trains_on_cpu(world: hvdtrain.World) -> None:
    seen: list[torch.dtype] = []
    model, optimizer, train = prepared(amp="bf16")
    model[0].register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    losses = []
    for _ in range(10):
        for x, y in train:
            out = model(x)
            assert out.dtype == torch.float32, "a loss is computed in float32"
            optimizer.backward(cross_entropy(out, y))
            optimizer.step()
            losses.append(optimizer.record()["loss"])
    assert set(seen) == {torch.bfloat16} and all(p.dtype == torch.float32 for p in model.parameters())
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4]), losses


def case_fp16_unscales_before_it_clips(world: hvdtrain.World) -> None:
    model, optimizer, train = prepared(amp="fp16", clip=0.01)
    batch = next(iter(train))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.backward(loss_of(model, batch))
    assert all(float(p.grad.abs().max()) < 10 for p in model.parameters()), "unscaled (the scale is 65536)"
    optimizer.step()
    change = distance(model, before)
    assert abs(change - 0.1 * 0.01) < 1e-5 and optimizer.skipped_steps == 0


# -- NaN, memory, time --------------------------------------------------------------------------------------------
class Breaks(nn.Module):
    """Gives NaN from its `after`-th call on."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        return x if self.left >= 0 else x * float("nan")


def case_a_nan_is_traced_to_its_layer(world: hvdtrain.World) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Tanh(), Breaks(2)), nn.Linear(8, 3))
    model, optimizer, train = prepared(model)
    batches = iter(train)
    for _ in range(2):
        optimizer.backward(loss_of(model, next(batches)))
        optimizer.step()
    before = hvt.fingerprint(model)
    with refused("nan at step 3 (epoch 0)", "rank 0: nan", "first bad layer: 1.1 (Breaks)", kind=NonFiniteError):
        optimizer.backward(loss_of(model, next(batches)))
    assert hvt.fingerprint(model) == before


def case_a_nan_from_elsewhere_is_told_so(world: hvdtrain.World) -> None:
    for spoil, part in (
        (lambda m, x, y: cross_entropy(m(x * float("inf")), y), "the input batch itself"),
        (lambda m, x, y: cross_entropy(m(x), y) * float("nan"), "look at the loss function"),
        (lambda m, x, y: (m[0].bias.data.fill_(float("nan")), cross_entropy(m(x), y))[1], "whose bias is not finite"),
    ):
        model, optimizer, train = prepared()
        x, y = next(iter(train))
        with refused(part, kind=NonFiniteError):
            optimizer.backward(spoil(model, x, y))


def case_a_gradient_that_is_not_finite_is_named(world: hvdtrain.World) -> None:
    model, optimizer, train = prepared(clip=1.0)
    model[2].bias.register_hook(lambda gradient: gradient * float("inf"))
    optimizer.backward(loss_of(model, next(iter(train))))
    with refused("gradient norm", "2.bias", kind=NonFiniteError):
        optimizer.step()


def case_out_of_memory_says_batch_and_remedy(world: hvdtrain.World) -> None:
    class Greedy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.empty(2**60, dtype=torch.uint8)  # what the allocator says to that is real

    model, optimizer, train = prepared(nn.Sequential(mlp(), Greedy()), accumulate=2)
    with refused("out of memory in the forward pass", "per_rank_batch 8, accumulate 2", "halve per_rank_batch"):
        model(next(iter(train))[0])
    model, optimizer, train = prepared()
    loss = loss_of(model, next(iter(train)))
    with (
        mock.patch.object(
            optimizer.session.engine_model, "backward", side_effect=torch.OutOfMemoryError("CUDA out of memory")
        ),
        refused("out of memory in the backward pass", "CUDA out of memory"),
    ):
        optimizer.backward(loss)


def case_phases_sum_to_the_wall_time(world: hvdtrain.World) -> None:
    now = [0.0]
    clock = TorchClock(lambda: now[0])
    for phase, seconds in (("input", 1.0), ("forward", 2.0), ("forward", 0.5), ("other", 0.25)):
        clock.enter(phase)
        now[0] += seconds
    assert clock.take() == {"input": 1.0, "forward": 2.5, "other": 0.25} and clock.phase == "other"
    now[0] += 3.0
    assert clock.take() == {"other": 3.0} and clock.take() == {"other": 0.0}
    with refused("'lunch'", kind=ConfigError):
        clock.enter("lunch")


class Event:
    """A CUDA event on a time line that the test moves."""

    now, done = 0.0, 0.0

    def __init__(self, **_: Any) -> None:
        self.at = -1.0

    def record(self, stream: Any = None) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= Event.done

    def synchronize(self) -> None:
        assert self.query(), "this would have waited for the GPU"

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


def case_on_a_gpu_phases_are_read_when_they_are_over(world: hvdtrain.World) -> None:
    with mock.patch("torch.cuda.Event", Event), mock.patch("torch.cuda.current_stream", lambda *_: None):
        Event.now = Event.done = 0.0
        clock = TorchClock()
        clock.use(torch.device("cuda"))
        clock.take()
        for phase, until in (("input", 1.0), ("forward", 3.0), ("backward", 6.0)):
            clock.enter(phase)
            Event.now = until
        clock.enter("other")
        Event.done = 3.0
        seconds = clock.take()
        assert (seconds["input"], seconds["forward"]) == (1.0, 2.0) and "backward" not in seconds
        Event.done = 6.0
        assert clock.take()["backward"] == 3.0
        for _ in range(2000):
            clock.enter("input")
            clock.enter("other")
        assert clock._gpu is not None and len(clock._gpu._open) < 1100


def case_on_a_gpu_as_many_numbers_are_read_as_travel(world: hvdtrain.World) -> None:
    """On a device that knows shapes only, in a GPU's place."""
    sums = Tally().tensor(torch.device("cpu"))
    assert sums.shape == (SIZE,) and wrong(sums, 1) == 0.0
    found = wrong(sums.to("meta"), 1)
    assert isinstance(found, torch.Tensor) and found.shape == () and found.is_meta


def case_on_a_gpu_losses_are_read_two_updates_later(world: hvdtrain.World) -> None:
    """As often on every rank, however fast it is: all must stop at the same step."""
    empty = torch.empty

    def unpinned(*sizes: int, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        return empty(*sizes, dtype=dtype)

    with mock.patch("torch.cuda.Event", Event), mock.patch("torch.empty", unpinned):
        losses = Losses(world, torch.device("cuda"))
        for step, loss in enumerate((3.0, 2.0, 1.0, float("nan")), start=1):
            Event.now, Event.done = float(step), max(step - 2.0, 1.0)  # the GPU is two updates behind
            value = torch.tensor(loss, dtype=torch.float64)
            mine = value if step > 1 else 0.0  # of a rank that has only padding
            losses.add(PendingLosses(step, 0, value, mine, "", torch.zeros_like(value), AssertionError, torch.zeros(2)))
        assert losses.last == 2.0
        Event.done = 9.0
        with refused("nan at step 4", "HVDTRAIN_CHECK_EVERY_STEP=1", kind=NonFiniteError):
            losses.settle()
        assert losses.last == 1.0


if __name__ == "__main__":
    main(globals().copy())
