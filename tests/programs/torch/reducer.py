"""The reducer on real ranks: what comes out of the buckets is the sum over ranks, whatever the gradients look like.

Prints "passed NAME" for each case; a case that fails ends the job. All are tried with gradients that are copied into
buckets, and again with gradients that are summed where they lie, however small.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hvdtrain
from hvdtrain.torch.engines import reducer as its_module
from hvdtrain.torch.engines.base import Pass
from hvdtrain.torch.engines.reducer import Reducer, Wait, bucketize

WORLD = hvdtrain.init("torch", device="cpu")
ENGINE = WORLD.comm
RANK, SIZE = WORLD.rank, WORLD.size
LYING = False


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def data(rank: int) -> Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def expected(module: nn.Module, losses: list[Tensor]) -> list[Tensor | None]:
    """Gradients of the sum of losses, by autograd alone."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return list(torch.autograd.grad(sum(losses), parameters, allow_unused=True))  # type: ignore[arg-type]


def check(module: nn.Module, wanted: list[Tensor | None], bound: float = 1e-14) -> None:
    parameters = [p for p in module.parameters() if p.requires_grad]
    for parameter, gradient in zip(parameters, wanted, strict=True):
        assert (parameter.grad is None) == (gradient is None), (RANK, parameter.shape, parameter.grad, gradient)
        if gradient is not None:
            gap = (parameter.grad - gradient).abs().max().item()
            assert gap <= bound * SIZE, (RANK, parameter.shape, gap)


def reducer(module: nn.Module, **kw: object) -> Reducer:
    settings: dict[str, Any] = {"bucket_bytes": 200, "where_they_lie": lambda: LYING, **kw}
    return Reducer(module, settings.pop("sum_async", ENGINE.sum_async), **settings)


def squares(module: nn.Module, rank: int) -> Tensor:
    return module(data(rank)).pow(2).sum()


def reduced(
    reduce: Reducer, module: nn.Module, loss: Callable[[nn.Module, int], Tensor] = squares, bound: float = 1e-14
) -> list[Tensor | None]:
    """Runs a backward pass of this rank's loss; the gradients must be those of the sum of all ranks'."""
    wanted = expected(module, [loss(module, rank) for rank in range(SIZE)])
    module.zero_grad()
    reduce.backward(loss(module, RANK), Pass(reduce=True))
    reduce.finish()
    check(module, wanted, bound)
    return wanted


def at_once(tensor: Tensor, name: str) -> Wait:
    """Sums before it returns."""
    ENGINE.sum_async(tensor, name)()
    return lambda: None


def case_sums_over_ranks() -> None:
    module = net()
    places: dict[int, int] = {}
    for parameter in module.parameters():  # before the reducer's own hooks
        parameter.register_post_accumulate_grad_hook(lambda p: places.update({id(p): p.grad.data_ptr()}))
    reduce = reducer(module)
    assert len(reduce.buckets) > 2
    for _ in range(3):
        wanted = expected(module, [module(data(rank)).pow(2).sum() for rank in range(SIZE)])
        module.zero_grad()
        extras = torch.tensor([float(RANK), 1.0], dtype=torch.float64)
        reduce.backward(module(data(RANK)).pow(2).sum(), Pass(reduce=True, extras=extras))
        reduce.finish()
        check(module, wanted)
        assert {places[id(p)] == p.grad.data_ptr() for p in module.parameters()} == {LYING}
        assert extras.tolist() == [sum(range(SIZE)), SIZE]


def case_gradients_on_some_ranks_only() -> None:
    """Layer 2 is used by rank 0 alone; the last one by nobody."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.second, self.third = (nn.Linear(6, 6).double() for _ in range(3))

        def forward(self, x: Tensor, rank: int) -> Tensor:
            return (self.second(self.first(x)) if rank == 0 else self.first(x)).pow(2).sum()

    module = Branches()
    reduce = reducer(module)
    for _ in range(2):
        wanted = reduced(reduce, module, lambda module, rank: module(data(rank), rank))
        assert wanted[-1] is None and wanted[2] is not None


def case_used_in_an_earlier_micro_batch_only() -> None:
    module = net()
    head = nn.Linear(6, 1).double()
    both = nn.ModuleList([module, head])
    ENGINE.broadcast_(head.weight.data), ENGINE.broadcast_(head.bias.data)
    reduce = reducer(both)
    losses = [head(data(rank)).sum() + module(data(rank)).sum() for rank in range(SIZE)]
    wanted = expected(both, losses)
    reduce.backward(head(data(RANK)).sum(), Pass(reduce=False))
    reduce.backward(module(data(RANK)).sum(), Pass(reduce=True))
    reduce.finish()
    check(both, wanted)


def case_freezing_and_unfreezing_is_noticed() -> None:
    module = net()
    module[0].requires_grad_(False)
    reduce = reducer(module)
    for frozen in (True, False, True):
        module[0].requires_grad_(not frozen)
        reduced(reduce, module, lambda module, rank: module(data(rank)).sum())


SHARED = 2  # the group of what both stages use


class TwoStages:
    """A model in two stages, run by hand: per micro-batch the whole backward pass, the last stage's first.

    `done` are the stages that are in the pass that completes them.
    """

    def __init__(self, module: nn.Sequential) -> None:
        self.module, self.devices, self.micro_batches = module, [torch.device("cpu")] * 2, 3
        self.done: set[int] = set()

    def owned_parameters(self) -> list[list[nn.Parameter]]:
        first, second, last = self.module[0], self.module[2], self.module[4]
        return [[*first.parameters()], [*last.parameters()], [*second.parameters()]]  # the second is of both

    def finishing(self, group: int) -> bool:
        return group in self.done

    def step(self, x: Tensor, events: list[str]) -> None:
        pieces = x.tensor_split(self.micro_batches)
        for number, piece in enumerate(pieces):
            self.done = {0, 1} if number == len(pieces) - 1 else set()
            self.module(piece).pow(2).sum().backward()
            events.append(f"pass {number}")
        self.done = set()


def case_stages_send_in_their_last_pass() -> None:
    module = net()
    staged, events = TwoStages(module), []

    def sum_async(tensor: Tensor, name: str) -> Wait:
        events.append("sent")
        return ENGINE.sum_async(tensor, name)

    reduce = Reducer(module, sum_async, bucket_bytes=200, staged=staged)  # type: ignore[arg-type]
    stage_of = {id(p): stage for stage, group in enumerate(staged.owned_parameters()) for p in group}
    stages = [{stage_of[id(p)] for p in bucket.parameters} for bucket in reduce.buckets]
    assert all(len(of) == 1 for of in stages) and stages[0] == {SHARED} and stages[-1] == {0}, stages
    shared = stages.count({SHARED})
    for _ in range(2):
        module.zero_grad()
        events.clear()
        wanted = expected(module, [module(data(rank)).pow(2).sum() for rank in range(SIZE)])
        reduce.run(lambda: staged.step(data(RANK), events), Pass(reduce=True))
        reduce.finish()
        check(module, wanted)
        # nothing before the last pass; in it the stages' own; after it the shared ones, and which were used
        at_once = ["sent"] * (len(stages) - shared)
        assert events == ["pass 0", "pass 1", *at_once, "pass 2", *["sent"] * (shared + 1)], events


def case_shared_weights_and_other_layouts() -> None:
    torch.manual_seed(2)
    conv = nn.Conv2d(3, 3, 3, padding=1).double().to(memory_format=torch.channels_last)
    module = nn.Sequential(conv, nn.Tanh(), conv)
    made = [torch.Generator().manual_seed(rank) for rank in range(SIZE)]
    pictures = [torch.randn(2, 3, 5, 5, dtype=torch.float64, generator=its) for its in made]
    reduced(reducer(module), module, lambda module, rank: module(pictures[rank]).pow(2).sum(), bound=1e-12)
    assert conv.weight.grad.stride() == conv.weight.stride()


def case_gradients_that_share_memory() -> None:
    """A sum that is there at once must not change what the rest of the backward pass, or the user, still reads."""

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.before = nn.Linear(6, 6).double()
            self.table, self.more, self.rest = (nn.Parameter(torch.randn(4, 6, dtype=torch.float64)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            added = self.before(x).view(-1) + self.table.view(-1)  # autograd gives the table a view of the sum's
            joined = torch.cat([self.more, self.rest]) * added.view(4, 6).repeat(2, 1)
            return joined.pow(2).sum()

    module = Added()
    reduce = reducer(module, sum_async=at_once)
    for _ in range(2):
        wanted = reduced(reduce, module, lambda module, rank: module(data(rank)), bound=1e-12)
    assert len({p.grad.untyped_storage().data_ptr() for p in module.parameters()}) >= (len(wanted) if LYING else 1)


def case_gradients_in_memory_of_others() -> None:
    """numpy's, a buffer's; or memory that Python code has kept without the tensor: later nodes of the pass read it."""
    buffer = np.zeros((4, 6))
    kept: list[Any] = []

    class Handed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, way: str, earlier: Tensor, weight: Tensor) -> Tensor:
            ctx.way = way
            return earlier + weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor]:
            mine = gradient.clone()
            if ctx.way == "numpy":
                buffer[:] = gradient
                mine = torch.from_numpy(buffer)
            elif ctx.way == "storage":
                kept[:] = [mine.untyped_storage()]
            return None, gradient, mine

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, way: str, x: Tensor) -> Tensor:
            ctx.way = way
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
            there = torch.from_numpy(buffer).clone()
            if ctx.way == "storage":
                there = torch.empty(0, dtype=torch.float64).set_(kept[0], 0, (4, 6)).clone()
            return None, there

    for way in ("numpy", "storage"):
        torch.manual_seed(4)
        module = nn.ParameterList([torch.randn(4, 6, dtype=torch.float64) for _ in range(2)])
        first, second = module
        wanted = expected(module, [((first * data(r)) + second).pow(2).sum() for r in range(SIZE)])
        reduce = reducer(module, sum_async=at_once)
        out = Handed.apply(way, Reads.apply(way, first * data(RANK)), second)
        reduce.backward(out.pow(2).sum(), Pass(reduce=True))
        reduce.finish()
        check(module, wanted, bound=1e-13)


def case_a_layout_that_one_rank_changes() -> None:
    module = net()
    reduce = reducer(module)
    if RANK == 1:
        for parameter in module.parameters():
            parameter.data = parameter.data.t().contiguous().t()
    for frozen in (True, False, False):  # buckets are made again
        reduced(reduce, module)
        module[0].weight.requires_grad_(not frozen)
    module[0] = nn.Linear(6, 5).double()  # another one, which every rank lays out as it is
    ENGINE.broadcast_(module[0].weight.data), ENGINE.broadcast_(module[0].bias.data)
    reduced(reduce, module)
    assert len(reduce._layouts) == len([*module.parameters()]), "nothing is known of those that are gone"


def case_a_gradient_that_lies_otherwise() -> None:
    module = net()
    reduce = reducer(module)
    wanted = expected(module, [module(data(rank)).pow(2).sum() for rank in range(SIZE)])
    if RANK == 1:  # what is there already is what autograd adds to
        for parameter in module.parameters():
            strides = (1, len(parameter))[: parameter.dim()]
            parameter.grad = torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype).zero_()
    reduce.backward(module(data(RANK)).pow(2).sum(), Pass(reduce=True))
    reduce.finish()
    check(module, wanted)


def case_what_the_user_keeps_stays() -> None:
    module = net()
    reduce = reducer(module)
    kept: list[list[Tensor]] = []
    for turn in range(3):
        module.zero_grad(set_to_none=turn != 1)  # zeros in what was kept, as in plain PyTorch
        wanted = expected(module, [module(data(rank)).pow(2).sum() for rank in range(SIZE)])
        reduce.backward(module(data(RANK)).pow(2).sum(), Pass(reduce=True))
        reduce.finish()
        check(module, wanted)
        kept.append([p.grad for p in module.parameters() if p.grad is not None])
        if turn == 2:
            assert all(torch.allclose(a, b) for a, b in zip(kept[1], kept[2], strict=True))
            assert all(a.data_ptr() != b.data_ptr() for a, b in zip(kept[1], kept[2], strict=True))
    of_last = [weakref.ref(gradient) for gradient in kept.pop()]
    module.zero_grad()
    assert not LYING or not any(gone() for gone in of_last), "nobody needs them any more"


def case_mixed_types_and_half_precision_on_the_way() -> None:
    module = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3).double(), nn.Linear(3, 3).bfloat16()])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.5)
    x = torch.full((1, 3), float(RANK + 1))
    reduce = reducer(module)
    reduce.backward(sum(m(x.to(m.weight.dtype)).sum().double() for m in module), Pass(reduce=True))
    reduce.finish()
    for layer in module:
        assert layer.weight.grad.eq(sum(range(1, SIZE + 1))).all() and layer.weight.grad.dtype == layer.weight.dtype
    narrow = nn.Linear(3, 1)
    reduce = reducer(narrow, compression="fp16")
    reduce.backward(narrow(torch.full((1, 3), 1.0 + 2.0**-12)).sum(), Pass(reduce=True))
    reduce.finish()
    # 1 + 2^-12 is not a float16: it was rounded on the way, and without compression it would not have been
    assert narrow.weight.grad.eq(SIZE).all() and narrow.weight.grad.dtype == torch.float32


def case_buckets() -> None:
    def sizes(numbers: list[int], bucket_bytes: int) -> list[int]:
        parameters = [nn.Parameter(torch.empty(number)) for number in numbers]
        groups = bucketize(parameters, bucket_bytes)
        assert [p for group in groups for p in group] == parameters[::-1], "in the order of the backward pass"
        return [sum(p.numel() for p in group) for group in groups]

    quarter = 1 << 18  # floats of a megabyte
    # two small ones first; then no larger than asked for; then each at most half of the rest, so the last is small
    wanted = [1, 1, 4, 4, 3, 1.5, 1, 0.5]
    assert sizes([quarter // 4] * 64, 4 << 20) == [int(megabytes * quarter) for megabytes in wanted]
    assert sizes([30_000, 5_000_000, 40_000], 1 << 20) == [40_000, 5_000_000, 30_000], "a larger one has its own"
    assert sizes([10, 5_000_000, 20], 1 << 20) == [5_000_020, 10], "but for a bias or the like"
    assert sizes([], 100) == []


if __name__ == "__main__":
    with WORLD:
        for LYING in (False, True):
            its_module._DUST_BYTES = 0 if LYING else 1 << 16
            for name, case in list(globals().items()):
                if name.startswith("case_"):
                    if name != "case_buckets" or not LYING:
                        case()
                    print(f"passed {name}{', where they lie' * LYING}", flush=True)
