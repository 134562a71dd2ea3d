"""The adapter in one process: the loop's rules, model and optimizer as users see them, what is refused, and trouble:
mixed precision, losses that are not finite, memory that runs out, and time.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from cases import main, refused
from small import data, distance, loss_of, mlp, prepared, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import ConfigError, NonFiniteError
from hvdtrain.torch.losses.tally import SIZE, Tally, wrong
from hvdtrain.torch.update.nonfinite import Losses, PendingLosses
from hvdtrain.torch.values.clock import TorchClock


# -- the loop -----------------------------------------------------------------------------------------------------
def case_steps_in_the_wrong_order_are_refused(world: hvdtrain.World) -> None:
    model, optimizer, train = prepared()
    with refused("no batch was read from the loader", kind=ConfigError):
        optimizer.backward(model(data()[0]).sum())
    batches = iter(train)
    batch = next(batches)
    with refused("without a backward() before it", kind=ConfigError):
        optimizer.clip_grad_norm_(1.0)
    with refused("no backward() since", kind=ConfigError):
        optimizer.step()
    optimizer.backward(loss_of(model, batch))
    for zero in (optimizer.zero_grad, model.zero_grad):
        with refused("zero_grad() cannot be called between", "again=True", "more=True", kind=ConfigError):
            zero()
    with refused("backward() was called again", "again=True", "more=True", kind=ConfigError):
        optimizer.backward(loss_of(model, batch))
    optimizer.step()
    with refused("no backward() since", kind=ConfigError):
        optimizer.step()
    with refused("a second backward() on the same batch", kind=ConfigError):
        optimizer.backward(loss_of(model, (batch[0] * 1.0, batch[1])))
    batch = next(batches)
    with refused("write optimizer.backward(loss) instead", kind=ConfigError):
        cross_entropy(model(batch[0]), batch[1]).backward()
    with refused("write optimizer.backward(loss) instead of loss.backward()", kind=ConfigError):
        optimizer.step()
    optimizer.backward(loss_of(model, batch), more=True)
    with refused("more=True", kind=ConfigError):
        optimizer.step()
    optimizer.backward(loss_of(model, batch))
    hvt.unwrap(model).zero_grad()  # behind our back
    with refused("cannot be zeroed between backward() and step()", kind=ConfigError):
        optimizer.step()


def case_loops_of_plain_pytorch_are_told_the_option(world: hvdtrain.World) -> None:
    """Gradients gathered by hand."""
    for divided in (1, 4):
        model, optimizer, train = prepared()
        with refused("the next batch", "prepare(..., accumulate=", "undivided", kind=ConfigError):
            for number, batch in enumerate(train):
                optimizer.backward(loss_of(model, batch) / divided)
                if number % 4 == 3:
                    optimizer.step()


def case_a_list_of_the_loaders_batches_is_none_of_its_loops(world: hvdtrain.World) -> None:
    model, optimizer, train = prepared()
    with refused("called on an earlier batch", "not loop over list(train)", kind=ConfigError):
        for batch in list(train):
            optimizer.backward(loss_of(model, batch))
            optimizer.step()


def case_what_reads_ahead_without_end_is_refused_on_its_first_batch(world: hvdtrain.World) -> None:
    model, optimizer, train = prepared()
    kept = [batch for _, batch in zip(range(2), train, strict=False)]
    loss_of(model, kept[0])  # looked at only
    for batch in train:  # an earlier batch beside the one at hand
        optimizer.backward(loss_of(model, batch) + loss_of(model, kept[0]))
        optimizer.step()

    def endless() -> Any:
        while True:
            yield from train

    batches = endless()
    ahead = [next(batches)]
    for batch in batches:
        ahead.append(batch)
        done = optimizer.progress.step
        with refused("called on an earlier batch", "a prefetcher", kind=ConfigError):
            optimizer.backward(loss_of(model, ahead.pop(0)))
        assert optimizer.progress.step == done
        break


def case_a_loss_is_one_number_with_a_graph(world: hvdtrain.World) -> None:
    model, optimizer, train = prepared()
    x, y = next(iter(train))
    with refused("shape (8,)", kind=ConfigError):
        optimizer.backward(cross_entropy(model(x), y, reduction="none"))
    with refused("requires_grad=False", kind=ConfigError), torch.no_grad():
        optimizer.backward(cross_entropy(model(x), y))
    with refused("float", kind=ConfigError):
        optimizer.backward(1.0)
    optimizer.backward(cross_entropy(model(x), y))
    optimizer.step()


def case_skipped_micro_batches_are_refused(world: hvdtrain.World) -> None:
    model, optimizer, train = prepared(accumulate=2)
    batches = iter(train)
    next(batches)
    with refused("8 of 16 samples", kind=ConfigError):
        optimizer.backward(loss_of(model, next(batches)))


def case_an_epoch_may_be_left_in_mid_update(world: hvdtrain.World) -> None:
    model, optimizer, train = prepared(accumulate=2)
    before = hvt.fingerprint(model)
    for batch in train:
        optimizer.backward(loss_of(model, batch))
        optimizer.step()
        break
    assert hvt.fingerprint(model) == before and optimizer.progress.step == 0
    for batch in train:  # the partial sum of the last epoch is not in the first update of this one
        optimizer.backward(loss_of(model, batch))
        optimizer.step()
    assert optimizer.progress == hvdtrain.Progress(2, 2, 32, 0)


def case_gradients_are_absent_within_an_update_and_final_after_it(world: hvdtrain.World) -> None:
    model, optimizer, train = prepared(accumulate=4, clip=0.01)
    x, y = data()
    wanted = torch.autograd.grad(cross_entropy(hvt.unwrap(model)(x), y), list(model.parameters()))
    for number, batch in enumerate(train):
        optimizer.backward(loss_of(model, batch))
        if number < 3:
            assert all(p.grad is None for p in model.parameters()) and optimizer.clip_grad_norm_(1.0) is None
            optimizer.step()
            assert optimizer.record()["samples"] == 0
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    change = distance(model, before)
    assert abs(change - 0.1 * 0.01) < 1e-6, "clip= is the norm of the update's gradient"


def case_record_is_what_the_run_log_takes(world: hvdtrain.World) -> None:
    model, optimizer, train = prepared()
    losses = []
    for batch in train:
        loss = loss_of(model, batch)
        losses.append(float(loss.detach()))
        optimizer.backward(loss)
        optimizer.step()
        record = optimizer.record()
        assert abs(record["loss"] - losses[-1]) < 1e-6
    assert (record["step"], record["epoch"], record["samples_seen"], record["samples"]) == (4, 0, 32, 8)
    assert {"input", "forward", "backward", "optimizer"} <= set(record["seconds"])
    assert optimizer.progress == hvdtrain.Progress(1, 4, 32, 0)


# -- the model ----------------------------------------------------------------------------------------------------
def case_the_model_looks_like_the_users(world: hvdtrain.World) -> None:
    plain = mlp(norm=True)
    model, optimizer, _ = prepared(plain)
    assert hvt.unwrap(model) is plain and hvt.unwrap(plain) is plain and model.module is plain
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert repr(model) == repr(plain) and len(list(model.modules())) == 4 and isinstance(model, nn.Module)
    model.eval()
    assert not plain.training and not model.training and not plain[1].training
    model.train()
    assert plain[1].training
    plain.note = "here"
    model.other = "there"
    assert model.note == "here" and plain.other == "there"
    changes: list[Callable[[], object]] = [
        lambda: setattr(model, "head", nn.Linear(2, 2)),
        lambda: setattr(model, "forward", lambda x: x),
        lambda: model.__setitem__(0, nn.Linear(2, 2)),
        lambda: model.__delitem__(0),
        lambda: model.compile(backend="eager"),
        lambda: model.register_buffer(name="more", tensor=torch.zeros(1)),
        lambda: model.add_module("more", nn.Linear(2, 2)),
    ]
    for change in changes:
        with refused("cannot change after prepare()", kind=ConfigError):
            change()
    assert plain[0] in model and len(model) == len(plain) and [*reversed(model)] == [*reversed(plain)]
    other = copy.deepcopy(model)
    assert type(other) is nn.Sequential and hvt.fingerprint(other) == hvt.fingerprint(model)
    with refused("a prepared model cannot be pickled", kind=ConfigError):
        pickle.dumps(model)
    assert model.to("cpu") is model and model.float() is model
    with refused("0.weight would go from torch.float32", kind=ConfigError):
        model.half()
    model.load_state_dict(mlp(norm=True).state_dict())
    torch.testing.assert_close(model(data()[0]), plain(data()[0]))
    torch.optim.swa_utils.AveragedModel(model).update_parameters(model)


def case_the_optimizer_looks_like_the_users(world: hvdtrain.World) -> None:
    model, optimizer, train = prepared()
    assert isinstance(optimizer, torch.optim.Optimizer) and repr(optimizer) == repr(optimizer.wrapped)
    assert optimizer.param_groups is optimizer.wrapped.param_groups and optimizer.state is optimizer.wrapped.state
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the scheduler warns when it believes that step() was not called
        for batch in train:
            optimizer.backward(loss_of(model, batch))
            optimizer.step()
            schedule.step()
            rates.append(optimizer.lr)
    assert rates == [0.1, 0.05, 0.05, 0.025]
    hooked: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    optimizer.backward(loss_of(model, next(iter(train))))
    optimizer.step()
    assert hooked == [1]


def case_a_model_can_be_prepared_again(world: hvdtrain.World) -> None:
    model, optimizer, train = prepared()
    again, other = hvt.prepare(hvt.unwrap(model), optimizer.wrapped, train, clip=1.0)
    other.backward(loss_of(again, next(iter(train))))
    other.step()
    assert not optimizer.wrapped._optimizer_step_pre_hooks


# -- what is refused ----------------------------------------------------------------------------------------------
def case_wrapped_models_and_optimizers_are_refused(world: hvdtrain.World) -> None:
    model = mlp()
    optimizer = sgd(model)
    with refused("DataParallel", "model.module", kind=ConfigError):
        hvt.prepare(nn.DataParallel(model), optimizer)
    done, wrapped = hvt.prepare(model, optimizer)
    with refused("unwrap(model)", kind=ConfigError):
        hvt.prepare(done, optimizer)
    with refused("optimizer.wrapped", kind=ConfigError):
        hvt.prepare(model, wrapped)


def case_models_that_cannot_be_trained_are_refused(world: hvdtrain.World) -> None:
    model = mlp()
    with refused("0.weight", "requires_grad_(False)", kind=ConfigError):
        hvt.prepare(model, sgd(model[2]))
    with refused("first of shape (8, 4)", kind=ConfigError):
        hvt.prepare(mlp(), sgd(mlp()))
    sparse = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    with refused("sparse=False", "0 is Embedding", kind=ConfigError):
        hvt.prepare(sparse, sgd(sparse))
    lazy = nn.Sequential(nn.LazyLinear(3))
    with refused("lazy", kind=ConfigError):
        hvt.prepare(lazy, torch.optim.SGD(mlp().parameters(), lr=0.1))
    frozen = mlp().requires_grad_(False)
    with refused("something to train", kind=ConfigError):
        hvt.prepare(frozen, torch.optim.SGD(frozen.parameters(), lr=0.1))
    with refused("prepare() needs a torch.nn.Module", kind=ConfigError):
        hvt.prepare(lambda x: x, sgd(model))
    with refused("prepare() needs a torch.optim.Optimizer", kind=ConfigError):
        hvt.prepare(model, model)


def case_wrong_options_are_refused(world: hvdtrain.World) -> None:
    model = mlp()
    for options, part in (
        ({"accumulate": 0}, "accumulate=0"), ({"clip": 0.0}, "clip=0.0"), ({"clip": float("nan")}, "clip=nan"),
        ({"amp": "half"}, "amp='half'"), ({"compression": "int8"}, "compression='int8'"),
        ({"watch_every": -1}, "watch_every=-1"), ({"lr": hvdtrain.LR(0.1, 8)}, "without a loader"),
    ):  # fmt: skip
        with refused(part, kind=ConfigError):
            hvt.prepare(model, sgd(model), **options)


def case_learning_rates_are_scaled_once_and_by_one_hand(world: hvdtrain.World) -> None:
    train = hvt.loader(data(), 8)
    model = mlp()
    with refused("scaled twice", kind=ConfigError):
        hvt.prepare(model, sgd(model, lr=0.4), train, lr=hvdtrain.LR(0.1, 2))
    with refused("must be the base", kind=ConfigError):
        hvt.prepare(model, sgd(model, lr=0.3), train, lr=hvdtrain.LR(0.1, 2))
    model, optimizer = hvt.prepare(model, sgd(model), train, lr=hvdtrain.LR(0.1, 2))
    batches = iter(train)
    optimizer.backward(loss_of(model, next(batches)))
    optimizer.step()
    assert abs(optimizer.lr - 0.4) < 1e-12
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.backward(loss_of(model, next(batches)))
    with refused("cannot be set elsewhere with lr=", kind=ConfigError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.4
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)  # which would not touch the rate for a long time
    with refused("a scheduler of torch.optim.lr_scheduler", kind=ConfigError):
        optimizer.step()
    model = mlp()
    plain = sgd(model)
    torch.optim.lr_scheduler.StepLR(plain, step_size=1000)
    with refused("a scheduler of torch.optim.lr_scheduler", kind=ConfigError):
        hvt.prepare(model, plain, train, lr=hvdtrain.LR(0.1, 2))


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
