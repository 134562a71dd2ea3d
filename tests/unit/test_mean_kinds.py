"""What a loss divides by, found by trial."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain.integrations.mean_kinds import ITEMS, KINDS, SAMPLES, SHARE, kinds_of, undisturbed

pytestmark = pytest.mark.unit
X = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0)).double()
Y = torch.tensor([[0, 1, 2, 3, -100]] * 3 + [[1, -100, -100, -100, -100]] * 3)
EVEN = torch.zeros(6, 5, dtype=torch.int64)


def tokens(part, items):
    return F.cross_entropy(part["x"].flatten(0, 1), part["y"].flatten())


def share(part, items):
    return F.cross_entropy(part["x"].flatten(0, 1), part["y"].flatten(), reduction="sum") / items


def samples(part, items):
    return part["x"].square().mean()


def contrastive(part, items):
    rows = part["x"].flatten(1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def both(part, items):
    return share(part, items) + samples(part, items)


def takes_out(part, items):
    return F.cross_entropy(part["x"].flatten(0, 1), part.pop("y").flatten())


def count(part):
    return part["y"].ne(-100).sum()


@pytest.mark.parametrize(
    ("loss_of", "labels", "kinds"),
    [
        (tokens, Y, {ITEMS}), (share, Y, {SHARE}), (samples, Y, {SAMPLES}), (contrastive, Y, set()), (both, Y, set()),
        (takes_out, Y, {ITEMS}), (tokens, EVEN, {ITEMS, SAMPLES}), (share, EVEN, {SHARE}),
    ],
)  # fmt: skip
def test_a_loss_has_the_kinds_by_which_its_parts_add_up(loss_of, labels, kinds) -> None:
    batch = {"x": X, "y": labels, "flag": True}
    assert kinds_of(loss_of, batch, 6, torch.tensor(20), count, exact=True) == (kinds, True)
    assert batch["y"] is labels and batch["x"] is X


@pytest.mark.parametrize(("loss_of", "kinds"), [(tokens, {ITEMS, SAMPLES}), (share, {SHARE}), (both, set())])
@pytest.mark.parametrize("batch", [{"x": X[:1], "y": Y[:1]}, {"x": X, "y": Y, "other": X[:2]}])
def test_a_batch_that_cannot_be_divided_shows_what_the_number_of_items_does(loss_of, kinds, batch) -> None:
    assert kinds_of(loss_of, batch, len(batch["x"]), torch.tensor(9), count, exact=True) == (kinds, False)


def test_no_labels_are_counted() -> None:
    batch = {"x": X, "y": Y}
    assert kinds_of(samples, batch, 6, None, count, exact=True) == (frozenset({SAMPLES}), True)
    assert kinds_of(tokens, batch, 6, None, count, exact=True) == (frozenset({ITEMS}), True)
    assert kinds_of(tokens, batch, 6, None, lambda part: None, exact=True) == (frozenset(), True)
    one = {"x": X[:1], "y": Y[:1]}
    assert kinds_of(samples, one, 1, None, count, exact=True) == (frozenset({ITEMS, SAMPLES}), False)
    assert kinds_of(samples, one, 1, None, lambda part: None, exact=True) == (frozenset({SAMPLES}), False)


def test_a_loss_that_is_no_number_shows_nothing() -> None:
    nothing = {"x": X, "y": torch.full_like(Y, -100)}
    assert kinds_of(tokens, nothing, 6, torch.tensor(0), count, exact=True) == (KINDS, True)
    some = {"x": X, "y": torch.cat([torch.full_like(Y[:2], -100), Y[2:]])}
    assert kinds_of(tokens, some, 6, torch.tensor(20), count, exact=True)[0] == {ITEMS}, "a part without labels"


def test_rounding_is_allowed_for() -> None:
    def rounded(part, items):
        return tokens(part, items) * (1 + 1e-3 * len(part["x"]))

    batch = {"x": X, "y": Y}
    assert kinds_of(rounded, batch, 6, torch.tensor(20), count, exact=True)[0] == set()
    assert kinds_of(rounded, batch, 6, torch.tensor(20), count, exact=False)[0] >= {ITEMS}


def test_a_trial_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(4))
    norm: Any = model[1].eval()
    before = {name: its.clone() for name, its in model.state_dict().items()}

    def states() -> list[Any]:
        numpy_state: Any = np.random.get_state()
        return [torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist()]

    drawn = states()
    with undisturbed(model):
        assert not model[0].training and not torch.is_grad_enabled()
        norm.running_mean.add_(torch.rand(4))
        random.random()
        np.random.rand()
    assert model[0].training and not norm.training and torch.is_grad_enabled()
    assert all(torch.equal(its, before[name]) for name, its in model.state_dict().items())
    assert states() == drawn
