"""What travels with an update's gradients: its loss, what it is divided by, and whether the loss divides by the same.

The gradient of an update is sum(w g) / sum(w) over ranks and micro-batches, where g is the gradient of a mean and w
what that mean divides by. Numbers on the CPU are Python's; those that a GPU computes stay there, so that nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hvdtrain.core.errors import ConfigError, HvdtrainError, ReplicaError
from hvdtrain.core.sharding import weight_number
from hvdtrain.torch.losses.loss_graph import UNNAMED, Term

Number = float | Tensor
Weight = float | Tensor | Callable[[Any], Any] | None
SIZE = 14  # of what travels
# squared relative deviation of divisor / weight: rounding of float32 is far below, one label of ten thousand above
_UNEVEN = 1e-9
_SHARE = 1e-6
_EXAMPLES = "weight=(y != -100).sum() for ignore_index, weight=class_weights[y].sum() for class weights"


@dataclass(eq=False)
class Tally:
    """The sums of one update on this rank; a batch of weight 0 adds nothing.

    By the Cauchy-Schwarz inequality, (sum d)^2 = sum w x sum d^2 / w only if d / w is the same everywhere. Here w is
    the weight, and d the divisor of the loss (NaN: unknown).
    """

    loss: Number = 0.0  # sum of weight x mean loss, divided like the gradients
    weight: Number = 0.0  # sum of w
    divisors: Number = 0.0  # sum of d
    squares: Number = 0.0  # sum of d^2 / w
    given: bool | None = None  # weights are the caller's; None before the first batch
    problems: Number = 0.0  # losses that no weight makes right
    rates: Number = 0.0  # the learning rates that the update begins with, as one number: that of all ranks
    whole: Number = 0.0  # of losses of the whole batch, which every rank computes alike, as one number
    place: float = 0.0  # a digest of which update this is; 0: not compared
    preempted: float = 0.0  # 1 where this rank was preempted
    leaves: float = 0.0  # 1 where this rank knows that the ranks are about to change
    text: Callable[[], str] = lambda: "nothing was differentiated"  # what the loss divides by, called when needed
    _of_batch: list[Number] = field(default_factory=list)  # what the losses of the batch at hand divide by

    def count(self, mean: Number, weight: Number, coefficient: Number) -> None:
        """Adds a batch's mean loss; of weight 0 it may be NaN."""
        if isinstance(weight, Tensor):
            part = torch.as_tensor(mean * coefficient)
            self.loss = self.loss + torch.where(weight != 0, part, torch.zeros_like(part))
        elif weight:
            self.loss = self.loss + mean * coefficient

    def count_whole(self, loss: Tensor) -> None:
        """Adds a loss of the whole batch, by a number above 0 that is off as much as the loss is, as part of it or
        (of a small loss) as it is."""
        found = loss.detach()  # the text is kept, and not the graph
        value = double(found)
        if isinstance(value, Tensor):
            self.whole = self.whole + torch.exp(torch.asinh(value))
        else:
            self.whole = self.whole + math.exp(math.asinh(min(value, 1e300)))
        self.text = lambda: f"its loss of the whole batch is {float(found):.9g}"

    def compare(self, terms: Sequence[Term], weight: Number, samples: int, *, more: bool = False) -> None:
        """Adds what the terms of a batch's loss divide by, unless the weight is 0. `more`: another loss of that batch
        was compared just before."""
        before = _together(self._of_batch) if more else 0.0
        its = _together(_shared([(term.what, double(term.divisor)) for term in terms], weight, samples))
        self._of_batch = [*self._of_batch, its] if more else [its]
        divisor = _together(self._of_batch)
        if isinstance(weight, Tensor) or isinstance(divisor, Tensor):
            on: Any = weight if isinstance(weight, Tensor) else divisor
            zero = torch.zeros((), dtype=torch.float64, device=on.device)
            w, d, b = zero + weight, zero + divisor, zero + before
            self.divisors = self.divisors + torch.where(w == 0, zero, d - b)
            self.squares = self.squares + torch.where((w == 0) | (d == 0), zero, (d.square() - b.square()) / w)
        elif weight:
            self.divisors = self.divisors + divisor - before
            self.squares = self.squares + (divisor**2 - before**2) / weight

        def text() -> str:
            divided = [term for term in terms if term.what != Term.what]
            shown = "; ".join(dict.fromkeys(f"it divides by {term.what} = {float(term.divisor):g}" for term in divided))
            known = f"{shown}; " if shown else ""
            return f"{known}weighed by {float(weight):g}, {samples or 'an unknown number of'} samples"

        first = self.text
        self.text = (lambda: f"first loss: {first()}; next: {text()}") if more else text

    def tensor(self, device: torch.device) -> Tensor:
        """Returns float64 [SIZE], to be summed over ranks."""
        given = float(bool(self.given))
        weighed, words = (self.loss, self.weight, self.divisors, self.squares), (self.leaves, self.preempted)
        alike = [power for number in (self.place, self.rates, self.whole) for power in (number, number**2)]
        parts = (*weighed, given, self.problems, *alike, *words)
        if not any(isinstance(part, Tensor) for part in parts):
            return torch.tensor(parts, dtype=torch.float64, device=device)
        full = [
            part.detach().to(device, torch.float64).reshape(())
            if isinstance(part, Tensor)
            else torch.full((), part, dtype=torch.float64, device=device)
            for part in parts
        ]
        return torch.stack(full)


def uneven(weight: Any, divisors: Any, squares: Any) -> Any:
    """Returns True if batches are not weighed by what their losses divide by, of sums as in `Tally`; not for NaN."""
    product = weight * squares
    return product - divisors**2 > _UNEVEN * product


def differ(total: Any, squares: Any, ranks: int) -> Any:
    """Returns True if a number differs between ranks, of the sums of the numbers and of their squares."""
    return ranks * squares - total**2 > _UNEVEN * total**2


def out_of_step(sums: Any, ranks: int) -> Any:
    """Returns True if ranks were not in the same update (Cauchy and Schwarz), of sums as `Tally.tensor` gives them."""
    place, place_squares = sums[6], sums[7]
    return ranks * place_squares != place * place


def wrong(sums: Tensor, ranks: int) -> Number:
    """Returns, of what `Tally.tensor` gave summed over ranks, 1 where the weights are not right, else 0; a scalar."""
    on_cpu = sums.device.type == "cpu"  # where numbers cost less than tensors
    values: Any = sums.tolist() if on_cpu else sums
    _, weight, divisors, squares, given, problems, _, _, rates, rate_squares, whole, whole_squares, *_ = values
    mixed = (given != 0) & (given != ranks)
    apart = differ(rates, rate_squares, ranks) | differ(whole, whole_squares, ranks) | out_of_step(values, ranks)
    found = uneven(weight, divisors, squares) | mixed | (problems > 0) | apart
    return float(found) if on_cpu else found.double()


def refusal(
    texts: list[str], sums: list[float], ranks: int, problems: list[str], types: list[str], rates: list[float]
) -> HvdtrainError:
    """Returns the error for an update whose weights are not right, of every rank's `Tally.text`, reason why no
    weight makes the loss right ("" for none), and first group's learning rate; `types` is what to type."""
    mixed = 0 < sums[4] < ranks
    if not mixed and differ(sums[8], sums[9], ranks):
        return ReplicaError(
            "all ranks must train with the same learning rates",
            "\n".join(f"rank {rank}: {rate:g}" for rank, rate in enumerate(rates)),
            "give the scheduler a value that is the same on every rank: the loss of hvdtrain.torch.evaluate(),\n"
            'or world.mean({"loss": loss}, weight=samples)["loss"]',
            shared=True,
            code=36,
        )
    pairs = enumerate(zip(problems, texts, strict=True))
    received, code = "\n".join(f"rank {rank}: {'; '.join(filter(None, pair))}" for rank, pair in pairs), 0
    if mixed:
        rule, remedy = "weight= must be given on all ranks, or on none", "give weight= on every rank"
        received = f"weight= was given on {sums[4]:g} of {ranks} ranks"
    elif differ(sums[10], sums[11], ranks):
        rule = "a loss of the whole batch must be the same on every rank"
        received = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        remedy = (
            "give hvt.whole(...) everything that the loss reads: outputs, targets, masks, weights;\n"
            "for a loss that draws random numbers: optimizer.forward_backward(x, y, loss_fn, whole=True)"
        )
    elif any(problems):
        rule, code = "the loss of a batch must be the weighted mean of the losses of its pieces", 50
        remedy = (
            "divide a sum by what it adds up (loss / len(x), (each * w).sum() / w.sum(), or reduction='mean');\n"
            f"several means, each with its own divisor: {_SEVERAL};\n"
            "any other loss, of the global batch: optimizer.forward_backward(x, y, loss_fn, whole=True), or of"
            " hvt.whole(model(x), y);\nhvdtrain.torch.check(step, batch) shows what differs; prepare(..., verify=False)"
            " trains on each rank's own comparisons"
        )
    else:
        rule, code = "weight= must equal the denominator of the mean loss (default: the number of samples)", 35
        remedy = _weight_to_type(types)
    return ConfigError(rule, received, remedy, shared=True, code=code)


_SEVERAL = "optimizer.backward([(mean, divisor), ...])"
_FACTOR = "a factor that changes from batch to batch: (mean, divisor, factor) in that list"


def _weight_to_type(types: list[str]) -> str:
    if len(types) > 1:
        return (
            f"give each mean with its own divisor: {_SEVERAL};\n{_FACTOR};\n"
            "a product of means (a balance of experts) needs all samples: hvt.whole(...) of what it reads"
        )
    text = (
        f"optimizer.backward(loss, {types[0]}), or optimizer.forward_backward(x, y, loss_fn, weight=lambda y: ...);"
        f" a sum of means with other divisors: {_SEVERAL};\n{_FACTOR}"
    )
    if types[0] != UNNAMED:
        return text
    return (
        f"{text}; a sum over samples, and not over what that number counts, is divided by len(x); a loss that is not 0"
        " where nothing counts is one of hvt.whole(model(x), y)"
    )


def weight_of(weight: Weight, device: torch.device) -> Number:
    """Returns a weight as a number, or as a float64 scalar where a GPU computes it; raises `ConfigError` for no
    single number >= 0 (on a GPU: not looked at)."""
    if isinstance(weight, Tensor) and weight.numel() == 1 and weight.device.type != "cpu":
        return weight.detach().double().reshape(()).to(device)
    return weight_number(weight, _EXAMPLES)


def _shared(terms: list[tuple[str, Number]], weight: Number, samples: int) -> list[Number]:
    """Returns the divisors of terms; of terms of one kind that are shares of one mean over the samples (mixup's
    `part * loss(y) + (1 - part) * loss(other)`), the samples. What divides by the weight is right as it is."""
    found: list[Number] = []
    for what, divisor in terms:
        kin = [one for other, one in terms if other == what]
        shares = [1 / one if isinstance(one, Tensor) or one else math.inf for one in kin]
        total = sum(shares) * samples if len(kin) > 1 else 0.0
        if isinstance(total, Tensor):
            shares_one = ((total - 1).abs() < _SHARE) & torch.as_tensor(divisor != weight)
            found.append(torch.where(shares_one, float(samples), torch.as_tensor(divisor)))
        else:
            found.append(float(samples) if abs(total - 1) < _SHARE and divisor != weight else divisor)
    return found


def _together(divisors: list[Number]) -> Number:
    """Returns one number for what the terms of a loss divide by. Terms with equal divisors are one: a loop over samples
    has as many as there are samples."""
    if not any(isinstance(divisor, Tensor) for divisor in divisors):
        # times numbers that have nothing in common, so that no two terms make up for each other
        return sum((one * math.sqrt(index + 1) for index, one in enumerate(dict.fromkeys(divisors))), 0.0)
    on = next(divisor.device for divisor in divisors if isinstance(divisor, Tensor))
    each = torch.stack([torch.as_tensor(divisor, dtype=torch.float64, device=on) for divisor in divisors])
    new = ~torch.tril(each[:, None] == each, -1).any(1)  # nothing waits
    return (each * new * torch.cumsum(new, 0).sqrt()).sum()


def double(value: Number) -> Number:
    if not isinstance(value, Tensor):
        return float(value)
    return float(value) if value.device.type == "cpu" else value.detach().double().reshape(())
