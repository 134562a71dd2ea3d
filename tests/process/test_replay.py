"""Where samples meet in a loss: the loss on other outputs, against finite differences of two halves of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hvdtrain.torch.losses.replay import CannotTry, Output, Recording, Replay, meet, rows_of

N, WIDE, HALF = 12, 3, 6
MADE = torch.Generator().manual_seed(2)
REAL = torch.randn(N, WIDE, generator=MADE, dtype=torch.float64)
LABELS = torch.randint(0, WIDE, (N,), generator=MADE)
LATE = LABELS > 0

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "differences of sorted values": lambda o: o[:, 0].sort().values.diff().abs().mean(),
    "running maximum": lambda o: o.cummax(0)[0].mean(),
    "turned round": lambda o: (o - o.flip(0)).abs().mean(),
    "rolled": lambda o: F.relu(o - o.roll(HALF, 0)).mean(),
    "halves, absolute": lambda o: F.l1_loss(o[:HALF], o[HALF:]),
    "three thirds": lambda o: F.triplet_margin_loss(o[:4], o[4:8], o[8:], p=1.0),
    "neighbours": lambda o: (o[1:] - o[:-1]).abs().mean(),
    "all distances": lambda o: torch.cdist(o, o).mean(),
    "pairs": lambda o: F.pdist(o).mean(),
    "all differences, ranked": lambda o: F.relu(1 - (o[None, :, 0] - o[:, None, 0])).mean(),
    "from the mean": lambda o: (o - o.mean(0)).abs().mean(),
    "softmax over samples": lambda o: o.softmax(0).square().mean(),
    "by the mean of another column": lambda o: (o[:, 0].abs() * o[:, 1].abs().mean()).mean(),
    # none of these
    "cross-entropy": lambda o: F.cross_entropy(o, LABELS),
    "its own class": lambda o: -o.log_softmax(1)[torch.arange(N), LABELS].mean(),
    "squares": lambda o: F.mse_loss(o, REAL),
    "two parts": lambda o: F.cross_entropy(o[:4], LABELS[:4]) + 0.5 * F.mse_loss(o[4:], REAL[4:]),
    "one by one": lambda o: torch.stack([F.cross_entropy(o[i : i + 1], LABELS[i : i + 1]) for i in range(N)]).mean(),
    "transposed": lambda o: (o.T - REAL.T).abs().mean(),
    "neighbours in a sample": lambda o: (o[:, 1:] - o[:, :-1]).abs().mean(),
    "sorted in a sample": lambda o: o.sort(1).values.diff().abs().mean() + o.max(1).values.mean(),
    "distances in a sample": lambda o: torch.cdist(o[:, :, None], o[:, :, None] * 2, p=1.0).mean(),
    "masked": lambda o: (o[LATE] - REAL[LATE]).abs().mean() + (o[LATE] - 2 * o[LATE].relu()).abs().mean(),
    "a mean added to each": lambda o: ((o - REAL).abs().mean(1) + F.l1_loss(o, REAL)).mean(),
    "cosine": lambda o: (1 - F.cosine_similarity(o, REAL)).mean(),
    "side by side": lambda o: (o[0::2] - o[1::2]).abs().mean(),
    "clipped ratio": lambda o: -torch.min(o * REAL, o.clamp(0.8, 1.2) * REAL).mean(),
}


def adds_up(loss: Callable[[Tensor], Tensor]) -> bool:
    """Whether a change of both halves does what the changes of each do, wherever they begin and end."""
    first = (torch.arange(N) < HALF)[:, None]
    for _ in range(20):
        one, other = (3 * torch.randn(N, WIDE, generator=MADE, dtype=torch.float64) for _ in range(2))
        apart = loss(torch.where(first, other, one)) + loss(torch.where(first, one, other))
        if abs(loss(one) + loss(other) - apart) > 1e-9:
            return False
    return True


def tried(loss: Callable[[Tensor], Tensor], rows: Tensor = REAL, samples: int = N) -> float:
    """Returns how much samples' gradients depend on other samples' outputs."""
    outputs = (rows + 0.1 * rows.roll(1, 0)) * torch.ones_like(rows[:1], requires_grad=True)
    version = outputs._version
    recording = Recording()
    recording.start()
    try:
        value = loss(outputs)
    finally:
        recording.pause()
    return meet(Replay(recording, value, [Output(outputs, version, 0)]), [outputs], samples)


@pytest.mark.parametrize("name", LOSSES)
def test_samples_meet_where_halves_do_not_add_up(name: str) -> None:
    assert (tried(LOSSES[name]) > 1e-9) == (not adds_up(LOSSES[name]))


def test_samples_that_lie_side_by_side_may_meet() -> None:
    """Groups of four are on one rank, though half of the batch is no number of them; one with a fifth is not."""
    four = lambda o: (o.view(3, 4, WIDE)[:, :1] - o.view(3, 4, WIDE)).abs().mean()  # noqa: E731
    assert tried(four) <= 1e-9
    assert tried(lambda o: four(o.roll(1, 0))) > 1e-9


def without_gradient(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns the same loss; what it computes first has no gradient."""

    def detached(o: Tensor) -> Tensor:
        with torch.no_grad():
            others = loss(o)
        return ((o - REAL) * others).mean()

    return detached


def random_targets(o: Tensor) -> Tensor:
    """Draws noise for each sample, and writes into what it drew."""
    noise = torch.empty_like(o).bernoulli_(0.5)
    noise[:, 0] += torch.rand(N)
    return F.dropout(o * noise, 0.3).square().mean()


def attention(rows: Tensor) -> Tensor:
    """Lets the rows attend to each other: PyTorch counts that among what draws, for its dropout."""
    return F.scaled_dot_product_attention(rows, rows, rows)


# what autograd's graph does not show
UNSEEN: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "advantages": (without_gradient(lambda o: (o - o.mean()) / o.std()), True),
    "targets of the sample": (without_gradient(lambda o: o.softmax(1)), False),
    "noise": (random_targets, False),
    "attention among samples": (lambda o: (attention(o[None])[0] - REAL).square().mean(), True),
    "attention in a sample": (lambda o: (attention(o[:, None])[:, 0] - REAL).square().mean(), False),
    "in place": (lambda o: (o * 1).mul_(2).index_add_(1, torch.tensor([0]), o[:, :1]).abs().mean(), False),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_has_no_gradient_is_seen(name: str) -> None:
    loss, meets = UNSEEN[name]
    assert (tried(loss) > 1e-9) is meets


def clamped_in_place(o: Tensor) -> Tensor:
    """Changes the outputs."""
    return o.clamp_(min=-1).square().mean()


def by_numpy(o: Tensor) -> Tensor:
    """Leaves PyTorch: its gradient is that of a constant."""
    return torch.from_numpy(o.detach().numpy().mean(0)).sum() * torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "why"), [(clamped_in_place, "changed in place"), (by_numpy, "gradient"), (lambda o: o.sum(), "rows")]
)
def test_what_cannot_be_tried_is_said(loss: Callable[[Tensor], Tensor], why: str) -> None:
    rows = torch.randn(N - 1, WIDE, dtype=torch.float64) if why == "rows" else REAL
    with pytest.raises(CannotTry, match=why):
        tried(loss, rows)


def test_a_tensor_that_was_there_is_not_written_into_again() -> None:
    """A queue, or weights that another model's optimizer moves: also through a view."""
    queue = torch.zeros(2 * N, WIDE, dtype=torch.float64)

    def loss(o: Tensor) -> Tensor:
        queue[N:].add_(o.detach())
        return (o * queue[N:]).mean()

    with pytest.raises(CannotTry, match="was there before"):
        tried(loss)
    assert torch.allclose(queue[N:], REAL + 0.1 * REAL.roll(1, 0))  # once


def test_recordings_share_one_mode_and_leave_the_stack_beside_other_modes() -> None:
    """Two models that are trained in turns; a mode of the program's that is entered first or last."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as stack

    class Theirs(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    first, second = Recording(), Recording()
    first.start()
    second.start()
    assert len(stack()) == 1
    first.pause()
    torch.ones(2)
    seen = len(second.operations)
    assert seen and not first.operations
    with Theirs():
        second.pause()  # it is not the top one
        torch.ones(2)
    assert len(second.operations) == seen and len(stack()) == 1
    Recording.leave()
    assert not stack()
    with Theirs():
        first.start()
    first.pause()
    assert not stack()


@pytest.mark.parametrize(
    ("shapes", "ways"),
    [
        ([(4, 2)], [[0, 1, 2, 3]]),
        ([(4,), (4, 3)], [[0, 1, 2, 3] * 2]),
        ([(8, 2)], [[0, 1, 2, 3, 0, 1, 2, 3], [0, 0, 1, 1, 2, 2, 3, 3]]),
        ([(2, 4)], []),
        ([(1, 2)] * 4, [[0, 1, 2, 3]]),
        ([(3, 2), (1, 2)], [[0, 1, 2, 3]]),
        ([(14, 4)], []),
        ([(4, 4, 2)], [[0, 1, 2, 3], [0, 1, 2, 3]]),  # the batch may be either
        ([(8, 4, 2)], [[0, 1, 2, 3, 0, 1, 2, 3], [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3]]),  # 8 steps of 4 samples
        ([(4, 2), (3, 2), (1, 2)], [[0, 1, 2, 3, 0, 1, 2, 3]]),
        ([(3, 2), (3, 2)], []),
    ],
)
def test_rows_are_samples_where_their_number_says_so(shapes: list[tuple[int, ...]], ways: list[list[int]]) -> None:
    found = rows_of([torch.zeros(shape) for shape in shapes], [0] * len(shapes), 4)
    assert [torch.cat([rows.samples for rows in way if rows is not None]).tolist() for way in found] == ways


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("is_coupled", [False, True])
def test_two_outputs_of_a_batch_in_halves(width: int, is_coupled: bool) -> None:
    """A model of two heads that is called for each half: `width` 3 makes its outputs alike."""
    drawn = torch.Generator().manual_seed(0)
    heads = [torch.randn(4, size, generator=drawn, dtype=torch.float64, requires_grad=True) for size in (3, width) * 2]
    noted = [Output(tensor, tensor._version, at % 2) for at, tensor in enumerate(heads)]
    recording = Recording()
    recording.start()
    try:
        first, second = torch.cat(heads[::2]), torch.cat(heads[1::2])
        loss = first.square().mean() + (second - first.sum(1, keepdim=True)).pow(2).mean()
        loss = loss + (second - second.mean(0)).pow(2).mean() if is_coupled else loss
    finally:
        recording.pause()
    assert (meet(Replay(recording, loss, noted), heads, 8) > 1e-6) == is_coupled


@pytest.mark.parametrize("name", ["right", "all meet", "two meet", "meet far from here"])
def test_samples_with_different_numbers_of_rows(name: str) -> None:
    """Eight nodes of four graphs: their number says nothing of whose they are."""
    drawn = torch.Generator().manual_seed(0)
    nodes = 0.1 * torch.randn(8, 1, generator=drawn, dtype=torch.float64) - 1
    nodes[0] = 1
    far = float(nodes.sum()) + 3  # more than one node can add
    nodes.requires_grad_()
    recording = Recording()
    recording.start()
    try:
        whose = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3])
        graphs = torch.zeros(4, dtype=torch.float64).index_add(0, whose, nodes[:, 0])
        loss = (graphs - graphs.mean()).pow(2).mean() if name == "all meet" else graphs.pow(2).mean()
        loss = loss + graphs[0] * graphs[3] if name == "two meet" else loss
        loss = loss + (graphs.sum() - far).relu() if name == "meet far from here" else loss
    finally:
        recording.pause()
    replay = Replay(recording, loss, [Output(nodes, nodes._version, 0)])
    assert (meet(replay, [nodes], 4) > 1e-6) == (name != "right")
