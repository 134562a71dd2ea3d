"""A model in two stages on every rank: the weights, losses and checkpoints of one process with the whole model.

usage: pipeline.py [ENGINE]
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from cases import gap, main, plainly, quietly, refused, windows
from staged import GLOBAL_BATCH, by_hand, cut, loader_of, on_ranks, plain, points, run, same, settled, sgd, tied
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, one_hot

import hvdtrain
import hvdtrain.pipeline
import hvdtrain.torch as hvt
from hvdtrain import torch_resnet
from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.pipeline.tuning import planner
from hvdtrain.pipeline.tuning.planner import ParallelPlan
from hvdtrain.pipeline.values import places
from hvdtrain.torch.engines.dataparallel import DataParallelEngine
from hvdtrain.torch.engines.group import GroupEngine
from hvdtrain.torch.engines.horovod import HorovodEngine
from hvdtrain.vision import classifiers, pipelines
from hvdtrain.vision.recipes import RECIPES, Settings

# ---- parity


def case_stages_on_ranks_equal_one_process(world: hvdtrain.World) -> None:
    ways = (
        (plain, "1f1b", 1), (plain, "gpipe", 2), (tied, "1f1b", 2), (tied, "gpipe", 1), (settled, "1f1b", 1),
        (settled, "gpipe", 2),
    )  # fmt: skip
    for number, (make, schedule, accumulate) in enumerate(ways):
        remat = ("never", "all", "except_last")[number % 3]
        micro_batches = (2, 3, 4)[number // 2 % 3]
        whole, model = make(), make()
        wanted = by_hand(whole, accumulate=accumulate)
        pipe = cut(model, micro_batches, schedule=schedule, remat=remat)
        same(model, whole, on_ranks(pipe, world, accumulate=accumulate), wanted)
        assert pipe.micro_batches == micro_batches, "a tail's few samples changed it for good"
        distance = gap(model, make())
        assert distance > 0.01, "nothing was trained"


def case_a_rank_without_samples_does_not_count(world: hvdtrain.World) -> None:
    """9 samples: in the tail one rank has none, on batches that are not a number at that."""
    whole, model = tied(), tied()
    x, y = points(9)
    data = hvt.loader((x, y), GLOBAL_BATCH // world.size, world=world, shuffle=False)
    pipe = cut(model, 2)
    _, optimizer = quietly(pipe, sgd(pipe), data)
    reference = sgd(whole)
    paddings = 0
    for (inputs, labels), window in zip(data, (slice(0, 8), slice(8, 9)), strict=True):
        padding = optimizer.session.batches.now().padding
        paddings += padding
        loss = optimizer.forward_backward(inputs * float("nan") if padding else inputs, labels, cross_entropy)
        assert not padding or loss == 0
        optimizer.step()
        reference.zero_grad()
        cross_entropy(whole(x[window]), y[window]).backward()
        reference.step()
    assert sum(world.gather(paddings)) == world.size - 1
    assert gap(model, whole) <= 1e-10


def case_labels_left_out_weigh_over_ranks_and_micro_batches(world: hvdtrain.World) -> None:
    x, y = points()
    y[: GLOBAL_BATCH // world.size] = -100  # in the first update no label of rank 0 counts
    whole, model = plain(), plain()
    data = hvt.loader((x, y), GLOBAL_BATCH // world.size, world=world, shuffle=False)
    _, optimizer = quietly(pipe := cut(model, 3), sgd(pipe), data)
    for inputs, labels in data:
        optimizer.zero_grad()
        optimizer.forward_backward(inputs, labels, cross_entropy, weight=lambda labels: (labels != -100).sum())
        optimizer.step()
    plainly(whole, sgd(whole), windows(GLOBAL_BATCH, x, y), lambda model, x, y: cross_entropy(model(x), y))
    assert gap(model, whole) <= 1e-10


def case_a_loss_of_the_whole_batch(world: hvdtrain.World) -> None:
    """21 samples: samples meet in the loss, which also reads a temperature of the model's that no stage uses."""

    def contrast(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(outputs: Tensor, labels: Tensor) -> Tensor:
            near = normalize(outputs, dim=1)
            return cross_entropy(near @ near.T * model.scale.exp(), torch.arange(len(near))) + cross_entropy(
                outputs, labels
            )

        return loss

    x, y = points(21)
    for accumulate, micro_batches, make in ((1, 1, plain), (1, 3, settled), (3, 2, tied)):
        whole, model = make(), make()
        for net in (whole, model):
            net.register_parameter("scale", nn.Parameter(torch.tensor(0.3)))
        data = hvt.loader((x, y), GLOBAL_BATCH // world.size, world=world, shuffle=False)
        pipe = cut(model, micro_batches)
        _, optimizer = quietly(pipe, sgd(pipe), data, accumulate=accumulate)
        reference, means = sgd(whole), []
        for inputs, labels in data:
            mean = optimizer.forward_backward(inputs, labels, contrast(model), whole=True)
            if mean is not None:
                means.append(float(mean))
            optimizer.step()
            optimizer.zero_grad()
        samples = GLOBAL_BATCH * accumulate
        for number, start in enumerate(range(0, len(x), samples)):
            reference.zero_grad()
            wanted = contrast(whole)(whole(x[start : start + samples]), y[start : start + samples])
            wanted.backward()
            reference.step()
            assert abs(means[number] - float(wanted.detach())) <= 1e-10, (accumulate, number)
        assert gap(model, whole) <= 1e-10, (accumulate, micro_batches, gap(model, whole))
        optimizer.close()


def case_whole_models_take_the_same_call(world: hvdtrain.World) -> None:
    whole, model = settled(), settled()
    same(model, whole, on_ranks(model, world, accumulate=2), by_hand(whole, accumulate=2))


def case_mixed_precision_is_that_of_the_whole_model(world: hvdtrain.World) -> None:
    for amp, bound in (("bf16", 1e-6), ("fp16", 1e-6)):
        models = [plain().float(), plain().float()]
        float_points = tuple(part.float() if part.is_floating_point() else part for part in points(16))
        losses = []
        for arranged in (models[0], cut(models[1], 1)):
            data = hvt.loader(float_points, GLOBAL_BATCH // world.size, world=world, shuffle=False)
            _, optimizer = quietly(arranged, sgd(arranged), data, amp=amp)
            losses += run(optimizer, data, wants_float)
            optimizer.close()
        assert gap(*models) <= bound and losses[:2] == losses[2:], (amp, gap(*models), losses)
        exact = plain().float()
        _, optimizer = quietly(exact, sgd(exact), data)
        run(optimizer, data)
        assert gap(models[1], exact) > 1e-5, f"{amp} rounds nothing"


def wants_float(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss is computed outside of autocast, from float32."""
    assert outputs.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return cross_entropy(outputs, targets)


# ---- what travels when


def sends_and_gradients(world: hvdtrain.World, gate: Callable[[int], bool] | None = None) -> tuple[list[str], int]:
    """What happens in the last update: "stage 1" for a gradient of the first stage, "sent" for a bucket."""
    model = plain()
    pipe = cut(model, 4)
    first, last = pipe.owned_parameters()[0], pipe.owned_parameters()[1]
    assert first and last
    events: list[str] = []
    real = HorovodEngine.sum_async

    def sum_async(engine: Any, tensor: Tensor, name: str) -> Any:
        events.append("sent" if "gradients" in name else "other")
        return real(engine, tensor, name)

    first[0].register_post_accumulate_grad_hook(lambda _: events.append("stage 1"))
    with (
        mock.patch.object(HorovodEngine, "sum_async", sum_async),
        mock.patch.object(pipe, "finishing", gate or pipe.finishing),
    ):
        data = loader_of(world, GLOBAL_BATCH)
        _, optimizer = quietly(pipe, sgd(pipe), data)
        for x, y in data:
            events.clear()
            optimizer.forward_backward(x, y, cross_entropy)
            optimizer.step()
        optimizer.close()
    buckets = optimizer.session.engine_model._engine_model.buckets
    return [event for event in events if event != "other"], len(buckets)


def case_the_last_stage_sends_while_the_first_computes(world: hvdtrain.World) -> None:
    if world.size == 1:
        return
    events, buckets = sends_and_gradients(world)
    assert events.count("stage 1") == 4 and events.count("sent") == buckets == 2, events
    assert events.index("sent") < len(events) - 1 - events[::-1].index("stage 1"), events
    assert events[-1] == "sent", events


def case_ranks_of_a_host_take_cores_of_their_own(world: hvdtrain.World) -> None:
    with mock.patch("os.sched_getaffinity", lambda _: set(range(8))), mock.patch("torch.get_num_threads", lambda: 4):
        blocks = places.core_blocks(2)
    assert world.gather(blocks) == [[(0, 1), (2, 3)], [(4, 5), (6, 7)]][: world.size]


# ---- the program's flags


def case_rank_0_plans_and_all_obey(world: hvdtrain.World) -> None:
    args = torch_resnet.parser().parse_args(["--plan", "auto", "--pipeline", "cpu,cpu,cpu", "--per-rank-batch", "8"])
    settings = Settings.of(args, world.size, RECIPES["digits"], samples=100)
    planned = ParallelPlan(2, 1, 2, 3, "gpipe", "except_last", 8, sizes=(30, 5))
    asked: list[tuple[Any, ...]] = []

    def applied(plan: ParallelPlan) -> tuple[Any, Settings]:
        def choose(model: Any, example: Tensor, *, devices: Any, batch: int, optimizer_copies: float) -> ParallelPlan:
            asked.append((tuple(example.shape), list(devices), batch, optimizer_copies))
            return plan

        network = classifiers.build("resnet18", 3, image_size=32)
        with mock.patch.object(planner, "choose", choose), contextlib.redirect_stdout(io.StringIO()):
            return pipelines.apply(args, settings, network, 32, world)

    pipe, parts = applied(planned)
    assert [len(stage.segments) for stage in pipe.stages] == [30, 5] and len(pipe.devices) == 2
    assert (pipe.micro_batches, pipe.schedule, pipe.remat) == (3, "gpipe", "except_last")
    assert (parts.per_rank_batch, parts.accumulate, parts.global_batch) == (4, 2, settings.global_batch)
    whole, parts = applied(replace(planned, stages=1, accumulate=4, micro_batches=1, sizes=(35,)))
    assert whole is None and (parts.per_rank_batch, parts.accumulate) == (2, 4)
    assert asked == [((8, 3, 32, 32), ["cpu"] * 3, 8, 1.0)] * (2 * world.is_main)


def case_rank_0_cuts_and_all_follow(world: hvdtrain.World) -> None:
    """Its micro-batches and its cut; what it measures, and so what the others would find, differs."""
    args = torch_resnet.parser().parse_args(["--pipeline", "2", "--per-rank-batch", "8", "--remat", "all"])
    settings = Settings.of(args, world.size, RECIPES["digits"], samples=100)
    real, asked = hvdtrain.pipeline.split, []

    def split(*given: Any, **how: Any) -> Any:
        asked.append((how.get("balance"), how["micro_batches"]))
        return real(*given, **{**how, "balance": how.get("balance", [20, 15]), "micro_batches": 4})

    network = classifiers.build("resnet18", 3, image_size=32)
    with mock.patch.object(hvdtrain.pipeline, "split", split):
        pipe, same = pipelines.apply(args, settings, network, 32, world)
    assert asked == [(None, "auto")] if world.is_main else [([20, 15], 4)], asked
    assert same == settings and pipe.remat == "all" and [len(s.segments) for s in pipe.stages] == [20, 15]


# ---- the rest of the adapter


def case_evaluation_is_that_of_the_whole_model(world: hvdtrain.World) -> None:
    whole, model = settled(), settled()
    pipe = cut(model, 3)
    data = loader_of(world)
    prepared, optimizer = quietly(pipe, sgd(pipe), data)
    metrics = hvt.classification(top=(1,))
    modes = [layer.training for layer in model.modules()]
    received = hvt.evaluate(prepared, points(), metrics, per_rank_batch=5)
    assert received == hvt.evaluate(whole, points(), metrics, per_rank_batch=5)
    assert [layer.training for layer in model.modules()] == modes and prepared.training
    assert hvt.unwrap(prepared) is model and hvt.unwrap(pipe) is model
    assert hvt.fingerprint(prepared) == hvt.fingerprint(whole) and list(prepared.state_dict()) == list(
        whole.state_dict()
    )


def case_checkpoints_pass_between_whole_and_split(world: hvdtrain.World) -> None:
    folder = world.broadcast(tempfile.mkdtemp() if world.is_main else "")
    straight = tied()
    wanted = by_hand(straight, epochs=3)
    losses: list[float] = []
    for epoch in range(3):  # whole, split, whole
        model: Any = tied()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        arranged = cut(model, 2) if epoch == 1 else model
        data = loader_of(world)
        prepared, optimizer = quietly(arranged, sgd(arranged), data)
        checkpoints = hvdtrain.Checkpointer(folder, world=world)
        if epoch == 0:
            model.load_state_dict(tied().state_dict())
        else:
            progress = checkpoints.restore(hvt.model_state(prepared, optimizer, data))
            assert progress is not None and progress.epoch == epoch
        losses += run(optimizer, data)
        checkpoints.save(hvt.model_state(prepared, optimizer, data), progress=optimizer.progress)
        optimizer.close()
    same(model, straight, losses, wanted)


def case_a_pipeline_is_prepared_again(world: hvdtrain.World) -> None:
    model = plain()
    pipe = cut(model, 2)
    for arranged in (pipe, pipe):
        data = loader_of(world)
        prepared, optimizer = quietly(arranged, sgd(model), data)
        run(optimizer, data)
    proof = hvt.verify(prepared, optimizer)
    assert proof.ranks == world.size and proof.parameters == 8


def case_refusals(world: hvdtrain.World) -> None:
    model = plain()
    pipe = cut(model, 2)
    for option in ("compile", "sync_batchnorm"):
        with refused(f"{option}=True", kind=ConfigError):
            quietly(pipe, sgd(pipe), loader_of(world), **{option: True})
    assert not DataParallelEngine.runs_stages and not GroupEngine.runs_stages
    with (
        mock.patch.object(type(world.comm), "runs_stages", False),
        refused(world.engine, "horovodrun", kind=ConfigError),
    ):
        quietly(pipe, sgd(pipe), loader_of(world))
    with mock.patch.object(pipe, "devices", [torch.device("cuda:7")] * 2), refused("cuda:7", "cpu", kind=ConfigError):
        quietly(pipe, sgd(pipe), loader_of(world))
    data = loader_of(world)
    prepared, optimizer = quietly(pipe, sgd(pipe), data)
    x, y = next(iter(data))
    with refused("optimizer.forward_backward(x, y, loss_fn)", kind=ConfigError):
        optimizer.backward(torch.zeros((), requires_grad=True))
    with refused("optimizer.forward_backward(x, y, loss_fn)", kind=ConfigError):
        prepared(x)
    with refused("one number with a gradient"):
        optimizer.forward_backward(x, y, lambda outputs, targets: outputs)
    if world.size > 1:
        with refused("optimizer.forward_backward(x, y, loss_fn)"):
            pipe.step(x, y, cross_entropy)


def case_what_one_ranks_labels_show_is_refused_on_all(world: hvdtrain.World) -> None:
    data = loader_of(world)
    _, optimizer = quietly(pipe := cut(plain(), 2), sgd(pipe), data)
    x, y = next(iter(data))
    if world.rank == world.size - 1:
        y = torch.where(torch.arange(len(y)) < 1, -100, y)
    named = f"rank {world.size - 1}: " if world.size > 1 else ""
    with refused(f"{named}weight= must equal the denominator", "(y != -100).sum()", kind=ConfigError):
        optimizer.forward_backward(x, y, cross_entropy)


def case_samples_that_meet_on_a_rank_are_refused_without_micro_batches(world: hvdtrain.World) -> None:
    if world.size == 1:
        return  # the whole batch is there
    data = loader_of(world)
    _, optimizer = quietly(pipe := cut(plain(), 1), sgd(pipe), data)
    x, y = next(iter(data))

    def dice(outputs: Tensor, y: Tensor) -> Tensor:
        chance, wanted = outputs.sigmoid(), one_hot(y, 3)
        return 1 - 2 * (chance * wanted).sum() / (chance.sum() + wanted.sum())

    with refused("samples are compared with each other", kind=ConfigError):
        optimizer.forward_backward(x, y, dice)


class Centres(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def case_samples_that_meet_in_the_model_are_refused_without_micro_batches(world: hvdtrain.World) -> None:
    data = loader_of(world)
    model = nn.Sequential(*plain(), Centres())
    _, optimizer = quietly(pipe := cut(model, 1), sgd(pipe), data)
    x, y = next(iter(data))
    if world.size > 1:
        with refused("not depend on other samples", "micro_batches=1, accumulate=1 and one rank", kind=ConfigError):
            optimizer.forward_backward(x, y, cross_entropy)
        optimizer.close()
        pipe.step(x, y, cross_entropy)  # of its own, on the whole batch that it is given
        return
    optimizer.forward_backward(x, y, cross_entropy)  # the whole batch is there


def case_what_one_ranks_stages_refuse_is_refused_on_all(world: hvdtrain.World) -> None:
    if world.size == 1:
        return  # raised as it is
    data = loader_of(world)
    _, optimizer = quietly(pipe := cut(plain(), 2), sgd(pipe), data)
    x, y = next(iter(data))
    refuses = ConfigError("stages take such samples", "others", "leave them out") if world.rank else None
    with (
        mock.patch("hvdtrain.torch.update.passes.run_step", side_effect=refuses),
        refused("rank 1: stages take such samples", kind=ConfigError),
    ):
        optimizer.forward_backward(x, y, cross_entropy, whole=True)


def case_ranks_that_cut_in_different_places_are_told(world: hvdtrain.World) -> None:
    if world.size == 1:
        return
    model = plain()
    segments = len(cut(plain()).segments)
    pipe = cut(model, 2, balance=[1, segments - 1] if world.is_main else [segments - 1, 1])
    with refused("stage 1 of the pipeline", "world.broadcast", kind=ReplicaError):
        quietly(pipe, sgd(pipe), loader_of(world))
    pipe = cut(plain(), 2 + world.rank)
    with refused("micro_batches", "world.broadcast", kind=ReplicaError):
        quietly(pipe, sgd(pipe), loader_of(world))


def case_zz_a_gate_that_is_always_open_is_noticed(world: hvdtrain.World) -> None:
    """The twin of parity: gradients sent after the first micro-batch lack the others'. The last case: it leaves sums
    half done."""
    if world.size == 1:
        return
    with refused("a parameter cannot get two gradients in one backward pass", "a second gradient of a parameter"):
        sends_and_gradients(world, lambda group: True)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    main(globals())
