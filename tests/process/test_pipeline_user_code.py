"""Models and losses as users write them, split: names, checkpointing of their own, other precisions, a refused step."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from limits import Limit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hvdtrain.pipeline as hp
from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.run.runtime import Pipeline
from hvdtrain.pipeline.run.worker import StageError

DOUBLE = torch.float64
WAYS = [("1f1b", "all"), ("gpipe", "never")]


@pytest.fixture(autouse=True)
def inductors_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's checkpointing imports torch._inductor, which sets this variable where it is not set."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def inputs(samples: int = 6) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(samples, 4, generator=made, dtype=DOUBLE), torch.randint(0, 3, (samples,), generator=made)


def split(model: nn.Module, x: Tensor, **options: Any) -> Pipeline:
    settings: dict[str, Any] = {"micro_batches": 3, "balance": "memory", **options}
    return hp.split(model, x, "cpu,cpu", **settings)


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


# -- names ---------------------------------------------------------------------------------------------------------
class Named(nn.Module):
    """Has parts, parameters and buffers of given names."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, dtype=DOUBLE), nn.Linear(4, 3, dtype=DOUBLE)
        self._of = [names[0::3], names[1::3], names[2::3]]
        for part, parameter, buffer in itertools.zip_longest(*self._of):
            self.add_module(part, nn.Linear(4, 4, dtype=DOUBLE))
            if parameter is not None:
                self.register_parameter(parameter, nn.Parameter(torch.randn(4, dtype=DOUBLE)))
            if buffer is not None:
                self.register_buffer(buffer, torch.randn(4, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        parts, parameters, buffers = self._of
        x = self.first(x)
        for name in parts:
            x = torch.tanh(self._modules[name](x))  # type: ignore[misc]
        for name in parameters:
            x = x + self._parameters[name]  # type: ignore[operator]
        for name in buffers:
            x = x + self._buffers[name]  # type: ignore[operator]
        return self.last(x)


def test_a_model_may_use_any_name_of_the_pipelines(limit: Limit) -> None:
    x, y = inputs()
    pipe = split(nn.Sequential(nn.Linear(4, 4, dtype=DOUBLE), nn.Linear(4, 3, dtype=DOUBLE)), x)
    names = {name for name in (*vars(pipe), *dir(Pipeline)) if name not in dir(nn.Module) and not name.startswith("_")}
    pipe.close()
    assert {"stages", "devices", "schedule", "chunk"} <= names
    for turn in range(3):  # each of them a part, a parameter and a buffer
        listed = sorted(names - {"training"})
        model = Named(listed[turn:] + listed[:turn])
        plain = copy.deepcopy(model)
        pipe = split(model, x)
        pipe.step(x, y, F.cross_entropy)
        pipe.micro_batches = 2  # the pipeline's, whatever the model has
        F.cross_entropy(plain(x), y).backward()
        wanted = {key: gradient(value) for key, value in plain.named_parameters()}
        found = {key: gradient(value) for key, value in pipe.named_parameters()}
        assert list(pipe.state_dict()) == list(plain.state_dict()) and found.keys() == wanted.keys()
        gap = max(float((found[key] - wanted[key]).abs().max()) for key in wanted)
        assert gap < 1e-12
        pipe.close()
    limit("P13", f"parts, parameters or buffers called as the pipeline's {len(names)} attributes are", exact=gap)


# -- checkpointing of the user's own ---------------------------------------------------------------------------------
class Checkpointed(nn.Module):
    """Repeats a part in the backward pass, with weights that show what was drawn: gradient x weight is the output."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.weight = part, nn.Parameter(torch.ones(4, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.part(x * self.weight), x, use_reentrant=False)


@pytest.mark.parametrize(("schedule", "remat"), WAYS)
def test_what_a_checkpointed_part_draws_is_drawn_again(schedule: str, remat: str) -> None:
    """The twin are other numbers in the second pass: the gradients are those of another mask."""
    x, _ = inputs()
    blocks = [Checkpointed(nn.Dropout(0.5)) for _ in range(2)]
    model = nn.Sequential(nn.Identity(), *blocks)
    pipe = split(model, x, schedule=schedule, remat=remat, balance=[1, 1])
    seen = set()
    for _ in range(5):
        loss = pipe.step(x, x, lambda out, y: out.sum(1).mean())
        for block in blocks:
            assert float((gradient(block.weight) * block.weight).detach().sum() - loss) == pytest.approx(0.0, abs=1e-12)
            block.weight.grad = None
        seen.add(float(loss))
    assert len(seen) == 5
    pipe.close()


@pytest.mark.parametrize(("schedule", "remat"), WAYS)
def test_batch_norm_in_a_checkpointed_part_moves_as_in_the_unsplit_model(
    schedule: str, remat: str, limit: Limit
) -> None:
    x, y = inputs()
    norms: list[Any] = [nn.BatchNorm1d(4, dtype=DOUBLE) for _ in range(2)]
    model = nn.Sequential(
        nn.Linear(4, 4, dtype=DOUBLE), Checkpointed(norms[0]), Checkpointed(norms[1]), nn.Linear(4, 3, dtype=DOUBLE)
    )
    plain: Any = copy.deepcopy(model)
    pipe = split(model, x, schedule=schedule, remat=remat)
    pipe.step(x, y, F.cross_entropy)
    F.cross_entropy(plain(x), y).backward()
    assert [int(norm.num_batches_tracked) for norm in norms] == [2, 2]
    gap = float((norms[0].running_mean - plain[1].part.running_mean).abs().max())
    assert gap < 1e-12
    pipe.close()
    how = f"{schedule}, remat={remat!r}"
    limit("P14", f"statistics of batch normalisation in torch.utils.checkpoint, {how}", exact=gap)


# -- losses ----------------------------------------------------------------------------------------------------------
HOLES = torch.tensor([-100, 1, -100, 2, 0, 1])
CLASSES = torch.tensor([1.0, 2.0, 0.5])
FLOATS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "float()": (lambda out, y: F.cross_entropy(out.float(), y), True),
    "bfloat16": (lambda out, y: F.cross_entropy(out.bfloat16(), y), True),
    "float(), class weights": (lambda out, y: F.cross_entropy(out.float(), y, weight=CLASSES), False),
}


@pytest.mark.parametrize("name", FLOATS)
def test_a_loss_is_tried_in_the_precision_that_it_computes_in(name: str, limit: Limit) -> None:
    loss, right = FLOATS[name]
    x, y = inputs()
    model = nn.Sequential(nn.Linear(4, 4, dtype=DOUBLE), nn.Linear(4, 3, dtype=DOUBLE))
    wanted = float(loss(model(x), y))
    pipe = split(model, x)
    if right:
        assert float(pipe.step(x, y, loss)) == pytest.approx(wanted, rel=1e-2)
        limit("P12a", f"a loss in another precision: {name}", mended="it trains; the loss is the unsplit model's")
    else:
        with pytest.raises(ConfigError) as refusal:
            pipe.step(x, y, loss)
        limit("P12b", f"a wrong loss in another precision: {name}", refused=refusal.value)
    pipe.close()


def test_a_refused_step_is_refused_as_often_as_it_is_tried(limit: Limit) -> None:
    x, y = inputs()
    pipe = split(nn.Sequential(nn.Linear(4, 4, dtype=DOUBLE), nn.Linear(4, 3, dtype=DOUBLE)), x)
    for targets in (y, y, y, y, y):
        pipe.step(x, targets, F.cross_entropy)
    for _ in range(4):  # steps 6 to 9
        with pytest.raises(ConfigError) as refusal:
            pipe.step(x, HOLES, F.cross_entropy)
    limit("P11", "a refused step, tried again four times", refused=refusal.value)
    pipe.step(x, HOLES, F.cross_entropy, weight=lambda y: (y != -100).sum())
    pipe.step(x, y, F.cross_entropy)
    pipe.close()


def test_a_model_is_measured_at_sizes_that_it_takes(limit: Limit) -> None:
    x, y = inputs(4)
    parts = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)]
    model = nn.Sequential(*(part.to(DOUBLE) for part in parts))
    pipe = split(model, x, micro_batches=2, balance="time")
    pipe.step(x, y, F.cross_entropy)
    pipe.close()
    limit("P15", "batch normalisation and batches of 4, of which one sample is a micro-batch", mended="it is split")


# -- what is outside of the model --------------------------------------------------------------------------------------
class Outside:
    """What a forward may reach and no module holds."""

    listed: list[Any] = []
    tables: dict[Any, Tensor] = {}
    last: Any = None


OUTSIDE, COUNT = Outside(), [0]


@functools.lru_cache
def table(width: int) -> Tensor:
    return torch.arange(width, dtype=DOUBLE)


def counts(x: Tensor) -> Tensor:
    COUNT[0] += 1
    return x


def is_listed(x: Tensor) -> Tensor:
    OUTSIDE.listed.append(("mean", x.detach().mean()))
    return x


def is_kept(x: Tensor) -> Tensor:
    OUTSIDE.last = x.detach()
    return x


def is_differentiated(x: Tensor) -> Tensor:
    OUTSIDE.last = x.square().mean()
    return x


def is_tabled(x: Tensor) -> Tensor:
    if "table" not in OUTSIDE.tables:
        OUTSIDE.tables["table"] = torch.arange(x.shape[1], dtype=DOUBLE)
    return x + OUTSIDE.tables["table"]


def is_cast(x: Tensor) -> Tensor:
    return x * 2 if torch.is_autocast_enabled("cpu") else x


def is_cast_to(x: Tensor) -> Tensor:
    return x.to(torch.get_autocast_dtype("cpu")).to(x.dtype) if torch.is_autocast_enabled("cpu") else x


def is_looped(x: Tensor) -> Tensor:
    return torch.stack([x[:, column] * column for column in range(x.shape[1])], 1)


def is_a_tensor(x: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError("a tensor is needed")
    return x * 2


class Does(nn.Module):
    """With one layer there is nothing to cut: it is called as it is. With two it is opened."""

    def __init__(self, does: Callable[[Tensor], Tensor] | None, layers: int = 2) -> None:
        super().__init__()
        self.layers, self.does = nn.ModuleList(nn.Linear(4, 4, dtype=DOUBLE) for _ in range(layers)), does

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if self.does is None else self.does(x)


class Net(nn.Module):
    """Does something itself, or in a part."""

    def __init__(self, does: Callable[[Tensor], Tensor], *, itself: bool, layers: int = 2) -> None:
        super().__init__()
        self.a, self.b, self.c = Does(None if itself else does, layers), nn.Linear(4, 4, dtype=DOUBLE), Does(None)
        self.does = does if itself else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.c(self.b(self.a(x)))
        return x if self.does is None else self.does(x)


@pytest.fixture
def outside() -> Iterator[None]:
    yield
    OUTSIDE.listed.clear()
    OUTSIDE.tables.clear()
    table.cache_clear()
    OUTSIDE.last, COUNT[0] = None, 0


def check_equal(model: nn.Module, context: Callable[[], Any] = torch.enable_grad) -> None:
    """Splits, changes nothing, and compares; `context` only lasts while the parts run."""
    x, y = inputs()
    plain = copy.deepcopy(model)
    pipe = split(model, x)
    with context():
        loss = pipe.step(x, y, F.cross_entropy)
        wanted = F.cross_entropy(plain(x), y)
    wanted.backward()
    assert float(loss) == pytest.approx(float(wanted.detach()), abs=1e-12)
    for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(gradient(one), gradient(other), atol=1e-12)
    pipe.close()


@pytest.mark.parametrize("itself", [True, False])
@pytest.mark.parametrize("does", [table, is_tabled, is_looped, is_a_tensor])
@pytest.mark.usefixtures("outside")
def test_a_model_computes_what_it_does_unsplit(does: Callable[..., Tensor], itself: bool, limit: Limit) -> None:
    """Tables that its first call fills, Python's own loops over columns, a question for a type."""
    model = Net((lambda x: x + table(x.shape[1])) if does is table else does, itself=itself)
    check_equal(model)
    x, _ = inputs()
    model(x)  # no stand-in was left for it
    assert all(type(one) is Tensor for one in OUTSIDE.tables.values())
    if itself and does is is_tabled:
        limit(
            "P18", "a table that the model's first call fills", mended="numbers are in it, and the model works unsplit"
        )


@pytest.mark.parametrize(("does", "layers"), [(counts, 1), (is_listed, 1), (is_listed, 2), (is_kept, 2)])
@pytest.mark.usefixtures("outside")
def test_a_part_that_writes_outside_of_the_model_is_called(
    does: Callable[[Tensor], Tensor], layers: int, limit: Limit
) -> None:
    """The twin is one that is traced: nothing would be written any more. Of what is no tensor, only a part with one
    layer is called."""
    x, y = inputs()
    model = Net(does, itself=False, layers=layers)
    pipe = split(model, x)
    COUNT[0], OUTSIDE.last = 0, None
    OUTSIDE.listed.clear()
    pipe.step(x, y, F.cross_entropy)
    pipe.close()
    found = {"counts": COUNT[0] > 0, "is_listed": len(OUTSIDE.listed) > 0, "is_kept": OUTSIDE.last is not None}
    assert found[does.__name__] and all(type(mean) is Tensor for _, mean in OUTSIDE.listed)
    if does is is_listed and layers == 2:
        limit("P16", "a layer that puts an auxiliary loss into a registry outside of the model", mended="it is called")


@pytest.mark.parametrize("does", [is_listed, is_kept])
@pytest.mark.usefixtures("outside")
def test_a_forward_that_puts_stand_ins_outside_is_refused(does: Callable[[Tensor], Tensor]) -> None:
    x, _ = inputs()
    with pytest.raises(ConfigError, match="puts what it computes into an object outside of the model"):
        split(Net(does, itself=True), x)
    assert all(type(mean) is Tensor for _, mean in OUTSIDE.listed) and type(OUTSIDE.last) in (Tensor, type(None))


@pytest.mark.usefixtures("outside")
def test_what_a_part_returned_is_kept_by_the_model() -> None:
    """The part itself is opened: it keeps nothing."""

    class Keeps(Net):
        def forward(self, x: Tensor) -> Tensor:
            OUTSIDE.last = self.a(x).detach()
            return self.c(self.b(self.a(x)))

    class Holds(Keeps):
        """What its frozen part returns."""

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                OUTSIDE.last = self.a(x)
            return self.c(self.b(OUTSIDE.last))

    x, _ = inputs()
    for kind in (Keeps, Holds):
        with pytest.raises(ConfigError, match=f"{kind.__name__}.forward: its forward puts"):
            split(kind(is_looped, itself=True), x)


@pytest.mark.parametrize("itself", [True, False])
@pytest.mark.usefixtures("outside")
def test_a_graph_that_is_kept_outside_of_the_model_is_refused(itself: bool) -> None:
    x, _ = inputs()
    with pytest.raises(ConfigError) as refused:
        split(Net(is_differentiated, itself=itself), x)
    assert "must leave the model through its outputs" in str(refused.value) or itself
    assert type(OUTSIDE.last) in (Tensor, type(None))


@pytest.mark.parametrize("does", [is_cast, is_cast_to])
def test_a_setting_is_asked_for_in_each_pass(does: Callable[[Tensor], Tensor], limit: Limit) -> None:
    """Of a part: both answers are right. Of the model's own forward: another answer is refused."""

    def other() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    check_equal(Net(does, itself=False))
    check_equal(Net(does, itself=False), other)
    check_equal(Net(does, itself=True))
    with pytest.raises(StageError, match="when the model was split") as refused:
        check_equal(Net(does, itself=True), other)
    if does is is_cast:
        limit("P17a", "a part that asks whether autocast is on", mended="it asks in each pass")
        limit("P17b", "a model's own forward that asks so, after the split", refused=refused.value)


@pytest.mark.parametrize("how", ["scripted", "compiled"])
def test_a_scripted_or_compiled_part_is_called_as_it_is(how: str, limit: Limit) -> None:
    x, y = inputs()
    inner = nn.Sequential(nn.Linear(4, 4, dtype=DOUBLE), nn.Tanh(), nn.Linear(4, 4, dtype=DOUBLE))
    part: Any = torch.jit.script(inner) if how == "scripted" else torch.compile(inner, backend="eager")
    model = nn.Sequential(nn.Linear(4, 4, dtype=DOUBLE), part, nn.Linear(4, 3, dtype=DOUBLE))
    F.cross_entropy(model(x), y).backward()
    wanted = [gradient(parameter).clone() for parameter in model.parameters()]
    model.zero_grad()
    pipe = split(model, x)
    assert len(pipe.segments) == 3
    pipe.step(x, y, F.cross_entropy)
    assert all(torch.allclose(gradient(p), g, atol=1e-12) for p, g in zip(model.parameters(), wanted, strict=True))
    pipe.close()
    with pytest.raises(ConfigError, match="a wrapped or compiled model cannot be split") as refused:
        split(part, x)
    if how == "scripted":
        limit("P19a", "a part compiled by torch.jit.script", mended="it is called as it is")
        limit("P19b", "a model that is one such part", refused=refused.value)


class Assigns(nn.Module):
    """Keeps the largest value it has seen."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros((), dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return x


class Centres(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.training else x


def test_a_buffer_that_is_assigned_is_refused() -> None:
    x, _ = inputs()
    part = Assigns()
    model = nn.Sequential(nn.Linear(4, 4, dtype=DOUBLE), part, nn.Linear(4, 3, dtype=DOUBLE))
    with pytest.raises(ConfigError, match="1.largest: assigned in a forward pass"):
        split(model, x)
    assert float(part.largest) == 0


class Initialises(nn.Module):
    """Scales by what its first batch had."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = 1 / x.detach().std(0)
        return x * self.scale


@pytest.mark.parametrize(
    ("part", "where"), [(Centres, "in training mode"), (Initialises, "")], ids=["in_training_alone", "in_first_samples"]
)
def test_samples_that_meet_in_a_part_are_refused(part: type[nn.Module], where: str) -> None:
    x, _ = inputs()
    model = nn.Sequential(nn.Linear(4, 4, dtype=DOUBLE), part(), nn.Linear(4, 3, dtype=DOUBLE))
    with pytest.raises(ConfigError, match=f"than the whole batch {where}".strip()):
        split(model, x)


class Gated(nn.Module):
    """A block that adds what it makes of all samples, behind a gate that starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4, dtype=DOUBLE), nn.Tanh(), nn.Linear(4, 4, dtype=DOUBLE))
        self.gate, self.last = nn.Parameter(torch.zeros((), dtype=DOUBLE)), nn.Linear(4, 3, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        made = self.layers(x)
        return self.last(x + self.gate * made.softmax(0))


def test_samples_that_meet_behind_a_closed_gate_are_refused() -> None:
    x, _ = inputs()
    model = Gated()
    with pytest.raises(ConfigError, match="than the whole batch"):
        split(model, x)
    assert float(model.gate.detach()) == 0


class Opens(nn.Module):
    """Compares samples from the moment that a buffer of it is no longer 0."""

    share: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("share", torch.zeros((), dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.share * x.mean(0)


def test_samples_that_meet_later_are_refused_at_one_of_the_next_steps() -> None:
    x, y = inputs()
    part = Opens()
    pipe = split(nn.Sequential(nn.Linear(4, 4, dtype=DOUBLE), part, nn.Linear(4, 3, dtype=DOUBLE)), x)
    pipe.step(x, y, F.cross_entropy)
    part.share.fill_(1)
    for again in range(2):  # the third step, and the fourth as the third has not passed
        if again == 0:
            pipe.step(x, y, F.cross_entropy)
        with pytest.raises(ConfigError, match="than the whole batch"):
            pipe.step(x, y, F.cross_entropy)
    pipe.close()


def test_an_embedding_that_counts_its_batch_needs_the_whole() -> None:
    class Counts(nn.Sequential):
        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(rows)

    rows, y = torch.tensor([0, 1, 1, 2, 1, 0]), inputs()[1]
    made = [nn.Embedding(3, 4, dtype=DOUBLE, scale_grad_by_freq=True), nn.Linear(4, 3, dtype=DOUBLE)]
    with pytest.raises(ConfigError, match="scale_grad_by_freq=True needs the whole batch"):
        split(Counts(*made), rows)
    pipe = split(Counts(*made), rows, micro_batches=1)
    pipe.step(rows, y, F.cross_entropy)
    pipe.close()


# -- what forwards read ----------------------------------------------------------------------------------------------


class Factor:
    factor = 2.0

    def __init__(self) -> None:
        self.own = 2.0

    def get(self) -> float:
        return self.own


class Derived(Factor):
    pass


KEPT = Factor()


class Reads(nn.Module):
    """Multiplies by what it reads from an attribute."""

    held: Any
    _read: Callable[[Any], Any]

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, dtype=DOUBLE) for _ in range(3))
        self.held, self._read = held, read

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(torch.tanh(self.a(x))) * self._read(self))


def _set(model: Any, value: float) -> None:
    model.held = value


READS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "an array": (lambda: np.array([2.0]), lambda m: float(m.held[0]), lambda m: m.held.fill(5)),
    "__dict__": (lambda: 2.0, lambda m: m.__dict__["held"], lambda m: _set(m, 5.0)),
    "a partial": (
        lambda: functools.partial(pow, 2.0),
        lambda m: m.held(1),
        lambda m: _set(m, functools.partial(pow, 5.0)),  # type: ignore[arg-type]
    ),
    "a class": (lambda: Factor, lambda m: m.held.factor, lambda m: setattr(Factor, "factor", 5.0)),
    "a class attribute": (Derived, lambda m: m.held.factor, lambda m: setattr(Factor, "factor", 5.0)),
    "a bound method": (lambda: KEPT.get, lambda m: m.held(), lambda m: setattr(KEPT, "own", 5.0)),
    "a weak reference": (lambda: weakref.ref(KEPT), lambda m: m.held().own, lambda m: setattr(KEPT, "own", 5.0)),
    "an object in an object": (
        lambda: SimpleNamespace(of=SimpleNamespace(factor=2.0)),
        lambda m: m.held.of.factor,
        lambda m: setattr(m.held.of, "factor", 5.0),
    ),
}


@pytest.mark.parametrize("how", READS)
def test_what_a_forward_reads_is_compared_by_its_values(how: str) -> None:
    """The twin is the same value, made again."""
    x, y = inputs()
    make, read, change = READS[how]
    Factor.factor = KEPT.own = 2.0
    model = Reads(make(), read)
    pipe = split(model, x)
    model.held = make()
    pipe.step(x, y, F.cross_entropy)
    change(model)
    with pytest.raises(ConfigError, match="held is "):
        pipe.step(x, y, F.cross_entropy)
    pipe.close()


class Depends(nn.Module):
    """Multiplies by what a function makes of its parameters, its buffer and its plain tensor."""

    plain: Tensor
    buffer: Tensor
    listed: list[Tensor]
    _does: Callable[[Any], Any]

    def __init__(self, does: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, dtype=DOUBLE) for _ in range(3))
        self.register_buffer("buffer", torch.tensor(2.0, dtype=DOUBLE))
        self.plain, self.listed, self._does = torch.tensor(3.0, dtype=DOUBLE), [torch.ones(4, dtype=DOUBLE)], does

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))) * self._does(self))


def _with_data(weight: Tensor) -> float:
    weight.data = weight.data * 2
    return 1.0


LIVE: dict[str, Callable[[Any], Any]] = {
    "a gradient through parameters()": lambda m: 1 + 0.1 * sum(p.sum() for p in m.parameters()),
    "state_dict()": lambda m: m.state_dict()["b.weight"].norm(),
    "item() of a parameter": lambda m: dict(m.named_parameters())["b.weight"].norm().item(),
    "item() of a plain tensor": lambda m: m.plain.item(),
    "data": lambda m: next(m.b.parameters()).data.norm(),
    "a tensor in a list": lambda m: m.listed[0].sum().item(),
}


@pytest.mark.parametrize("how", LIVE)
def test_operations_on_tensors_are_done_again_in_each_pass(how: str) -> None:
    """Three steps of SGD, between which the loop changes a buffer and plain tensors in place."""
    x, y = inputs()
    model = Depends(LIVE[how])
    plain = copy.deepcopy(model)
    plain.listed = [tensor.clone() for tensor in model.listed]
    pipe = split(model, x)
    for net, step in ((plain, None), (model, pipe.step)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            if step is None:
                F.cross_entropy(net(x), y).backward()
            else:
                step(x, y, F.cross_entropy)
            optimizer.step()
            for tensor in (net.buffer, net.plain, *net.listed):
                tensor.fill_(1 + number / 4)
    pipe.close()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        (lambda m: float(m.plain), "float"),
        (lambda m: range(int(m.plain))[1], "int|number"),
        (lambda m: 1.0 if m.plain > 2 else 0.5, "control flow"),
        (lambda m: _with_data(m.b.weight), "sets `.data`"),
        (lambda m: _with_data(next(m.b.parameters())), "sets a tensor's data"),
    ],
)
def test_what_python_decides_by_a_tensors_numbers_is_refused(does: Callable[[Any], Any], reason: str) -> None:
    x, _ = inputs()
    with pytest.raises(ConfigError, match=reason):
        split(Depends(does), x)


def test_what_cannot_be_compared_by_its_values_is_itself() -> None:
    """A random state gives another tensor each time; a lock cannot be written at all; an object may hold itself."""
    x, y = inputs()
    itself: list[Any] = [2.0]
    itself.append(itself)
    held = [torch.Generator(), threading.Lock(), itself]
    model = Reads(held, lambda m: m.held[2][0])
    pipe = split(model, x)
    pipe.step(x, y, F.cross_entropy)
    model.held = [torch.Generator(), *held[1:]]
    with pytest.raises(ConfigError, match="held is "):
        pipe.step(x, y, F.cross_entropy)
    pipe.close()


def test_hooks_of_all_modules_are_refused() -> None:
    x, y = inputs()
    every: Any = torch.nn.modules.module
    pipe = split(nn.Sequential(nn.Linear(4, 4, dtype=DOUBLE), nn.Linear(4, 3, dtype=DOUBLE)), x)
    hook = every.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(ConfigError, match="cannot call a hook of all modules"):
            pipe.step(x, y, F.cross_entropy)
    finally:
        hook.remove()
    pipe.step(x, y, F.cross_entropy)
    pipe.close()


# -- beside other threads --------------------------------------------------------------------------------------------
def test_what_another_thread_does_is_no_part_of_the_model() -> None:
    """Each kind of call that tracing records, of a thread that runs in the middle of the trace."""
    other, answers = nn.Linear(4, 4, dtype=DOUBLE), list[tuple[type, ...]]()

    def elsewhere() -> None:
        try:
            cast, rows = torch.is_autocast_enabled("cpu"), torch.arange(2)
            answers.append((type(cast), type(rows), type(other(torch.ones(1, 4, dtype=DOUBLE))), type(other.weight)))
        except Exception as error:
            answers.append((type(error),))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4, dtype=DOUBLE), nn.Linear(4, 3, dtype=DOUBLE)

        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            return self.last(torch.tanh(self.first(x)))

    x, _ = inputs()
    model = Model()
    wanted = model(x)
    pipe = split(copy.deepcopy(model), x)
    assert set(answers) == {(bool, Tensor, Tensor, nn.Parameter)}
    with torch.no_grad():
        assert torch.equal(pipe(x), wanted)
