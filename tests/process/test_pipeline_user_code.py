"""Models and losses as users write them, split: names, checkpointing of their own, other precisions, a refused step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hvdtrain.pipeline as hp
from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.runtime import Pipeline

DOUBLE = torch.float64
WAYS = [(schedule, remat) for schedule in ("1f1b", "gpipe", "zb-h1") for remat in ("never", "all")]


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
    """Has a part, a parameter or a buffer of a given name."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, dtype=DOUBLE), nn.Linear(4, 3, dtype=DOUBLE)
        self._where = name, {"part": "_modules", "parameter": "_parameters", "buffer": "_buffers"}[kind]
        value = torch.randn(4, dtype=DOUBLE)
        if kind == "part":
            self.add_module(name, nn.Linear(4, 4, dtype=DOUBLE))
        elif kind == "parameter":
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        name, where = self._where
        own = getattr(self, where)[name]
        x = torch.tanh(self.first(x))
        return self.last(own(x) if isinstance(own, nn.Module) else x * own)


@pytest.mark.parametrize("kind", ["part", "parameter", "buffer"])
def test_a_model_may_use_any_name_of_the_pipelines(kind: str) -> None:
    x, y = inputs()
    pipe = split(Named("other", kind), x)
    names = {name for name in (*vars(pipe), *dir(Pipeline)) if name not in dir(nn.Module) and not name.startswith("_")}
    pipe.close()
    assert {"stages", "devices", "schedule", "chunk", "timeline"} <= names
    for name in sorted(names - {"training"}):
        model = Named(name, kind)
        plain = copy.deepcopy(model)
        pipe = split(model, x)
        pipe.step(x, y, F.cross_entropy)
        pipe.micro_batches = 2  # the pipeline's, whatever the model has
        F.cross_entropy(plain(x), y).backward()
        wanted = {key: gradient(value) for key, value in plain.named_parameters()}
        found = {key: gradient(value) for key, value in pipe.named_parameters()}
        assert list(pipe.state_dict()) == list(plain.state_dict()) and found.keys() == wanted.keys(), name
        assert all(torch.allclose(found[key], wanted[key], atol=1e-12) for key in wanted), name
        pipe.close()


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
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_batch_norm_in_a_checkpointed_part_moves_as_in_the_unsplit_model(
    schedule: str, remat: str, micro_batches: int
) -> None:
    x, y = inputs()
    norms: list[Any] = [nn.BatchNorm1d(4, dtype=DOUBLE) for _ in range(2)]
    model = nn.Sequential(
        nn.Linear(4, 4, dtype=DOUBLE), Checkpointed(norms[0]), Checkpointed(norms[1]), nn.Linear(4, 3, dtype=DOUBLE)
    )
    plain: Any = copy.deepcopy(model)
    pipe = split(model, x, schedule=schedule, remat=remat, micro_batches=micro_batches)
    pipe.step(x, y, F.cross_entropy)
    F.cross_entropy(plain(x), y).backward()
    assert [int(norm.num_batches_tracked) for norm in norms] == [2, 2]
    assert torch.allclose(norms[0].running_mean, plain[1].part.running_mean, atol=1e-12)
    pipe.close()


# -- losses ----------------------------------------------------------------------------------------------------------
HOLES = torch.tensor([-100, 1, -100, 2, 0, 1])
CLASSES = torch.tensor([1.0, 2.0, 0.5])
FLOATS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "float()": (lambda out, y: F.cross_entropy(out.float(), y), True),
    "log_softmax(dtype=)": (lambda out, y: F.nll_loss(F.log_softmax(out, 1, dtype=torch.float32), y), True),
    "bfloat16": (lambda out, y: F.cross_entropy(out.bfloat16(), y), True),
    "float(), class weights": (lambda out, y: F.cross_entropy(out.float(), y, weight=CLASSES), False),
    "float(), dice": (lambda out, y: 1 - out.float().softmax(1).sum() / (out.float().square().sum() + 1), False),
}


@pytest.mark.parametrize("name", FLOATS)
def test_a_loss_is_tried_in_the_precision_that_it_computes_in(name: str) -> None:
    loss, right = FLOATS[name]
    x, y = inputs()
    model = nn.Sequential(nn.Linear(4, 4, dtype=DOUBLE), nn.Linear(4, 3, dtype=DOUBLE))
    wanted = float(loss(model(x), y))
    pipe = split(model, x)
    if right:
        assert float(pipe.step(x, y, loss)) == pytest.approx(wanted, rel=1e-2)
    else:
        with pytest.raises(ConfigError):
            pipe.step(x, y, loss)
    pipe.close()


def test_a_refused_step_is_refused_as_often_as_it_is_tried() -> None:
    x, y = inputs()
    pipe = split(nn.Sequential(nn.Linear(4, 4, dtype=DOUBLE), nn.Linear(4, 3, dtype=DOUBLE)), x)
    for targets in (y, y, y, y, y):
        pipe.step(x, targets, F.cross_entropy)
    for _ in range(4):  # steps 6 to 9
        with pytest.raises(ConfigError):
            pipe.step(x, HOLES, F.cross_entropy)
    pipe.step(x, HOLES, F.cross_entropy, weight=lambda y: (y != -100).sum())
    pipe.step(x, y, F.cross_entropy)
    pipe.close()


def test_a_model_is_measured_at_sizes_that_it_takes() -> None:
    x, y = inputs(4)
    parts = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)]
    model = nn.Sequential(*(part.to(DOUBLE) for part in parts))
    pipe = split(model, x, micro_batches=2, balance="time")
    pipe.step(x, y, F.cross_entropy)
    pipe.close()
