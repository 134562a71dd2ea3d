"""What a loss divides by, read off the graph that autograd keeps of it: labels that count, class weights, a mask's sum.

A mean over a batch is a sum over samples, tokens or pixels, divided by a count. Only the sum adds up over ranks and
micro-batches, so the count must be known; the graph's last operations hold it. Nothing is computed and nothing waits
for a GPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

# what changes neither a number nor how many are added up
_PASS = {
    "Neg", "Rsub", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Clone", "Alias", "ToCopy",
    "Transpose", "Permute", "T", "MaskedFill", "Add", "Sub", "Stack", "Cat", "Where", "Slice", "Select", "Unbind",
    "Split", "Expand",
}  # fmt: skip
# of a whole batch: no sum over samples, whatever it is divided by
_ACROSS = {
    "Sqrt", "Rsqrt", "Log", "Log1P", "Log2", "Exp", "Expm1", "Pow", "Square", "Reciprocal", "Sigmoid", "Tanh",
    "Abs", "Max", "Min", "Maximum", "Minimum", "Fmax", "Fmin", "Kthvalue", "Amax", "Amin", "Median", "Logsumexp",
    "Norm", "LinalgVectorNorm", "Prod", "Std", "Var", "Mul", "Div", "Clamp", "Relu", "Softplus",
}  # fmt: skip
_BY_ELEMENT = {"Mul", "Div", "Pow", "Sub", "Add", "Where"}
_CHOICES = {"Topk", "Sort"}  # among the values of a vector
_PRODUCTS = {"Dot", "Vdot", "Mv", "Mm", "Bmm"}  # sums, where they give one number
# to type, where nothing says where it comes from
UNNAMED = "weight=that number before any clamp(min=1) or epsilon, 0 where nothing counts"
_LOOKED_AT = 200  # nodes, until a term is taken to depend on data


@dataclass(frozen=True)
class Term:
    """A part of the loss.

    Attributes:
        numbers: given in the loss, that divide it; of one that it is multiplied with, one by it, if that is a count.
        element: it is one number of several that were stacked: a factor of it is its own, as one of a vector's is.
    """

    divisor: float | Tensor = 1.0  # what its sum is divided by
    what: str = "a sum that nothing divides"  # that number in words
    weight: str = ""  # the argument to type, of the targets `y`
    mean: bool = False  # it is a mean over samples, or divided by a number that a GPU computes
    reduced: bool = False  # numbers of several samples are added up in it
    numbers: tuple[float, ...] = ()
    values: int = 0  # how many its sum adds up
    means: tuple[float, ...] = ()  # of how many values each mean is that was taken of it, the outermost first
    element: bool = False

    def over(self, divisor: float | Tensor, what: str, weight: str, values: float) -> Term:
        means, divisor = (*self.means, values), self.divisor * divisor
        return replace(self, divisor=divisor, what=what, weight=weight, means=means, mean=True, reduced=True)

    def added_up(self, values: int, samples: int, *, over: bool = True) -> Term:
        """Returns the term where `values` values were added up: a mean that is taken of the sums (`over` all samples
        of the batch) is none over samples."""
        mean = self.mean and not (over and samples and self.means and not _is_multiple(math.prod(self.means), samples))
        return replace(self, reduced=True, values=values, mean=mean)

    def by(self, number: Any, counts: tuple[float, ...] = ()) -> Term:
        """Divided by a number; one that it is multiplied with (0.05 is no twentieth) is in `counts`, or a factor."""
        number = number.detach() if isinstance(number, Tensor) else number
        if isinstance(number, Tensor) and number.device.type != "cpu":
            return replace(self, divisor=self.divisor * number, mean=True)  # it may count anything; nothing waits
        value = float(number)
        known = next((count for count in counts if math.isclose(count, value)), None if counts else value)
        numbers = self.numbers if known is None else (*self.numbers, known)
        return replace(self, divisor=self.divisor * value, numbers=numbers)

    def counts(self, samples: int) -> list[float]:
        """Returns the divisors that may be the number of samples, or a multiple of it (such as that of their values,
        or the double). It excludes the number of one sample's values."""
        each = self.values / samples
        given = [number for number in self.numbers if number != each or each == samples]
        return [number for number in (*given, math.prod(self.means)) if _is_multiple(abs(number), samples)]

    def is_part(self, samples: int) -> bool:
        """Returns True if it may be one sample's part of a mean over them, with a divisor of its own."""
        return samples == 1 or samples in self.numbers or samples in self.means[:-1]


@dataclass
class Reading:
    """The terms of a loss, read from its graph; `one_by_one` are the names of operations `across` samples if each may
    be of one sample."""

    samples: int  # in the batch; 0: not known
    given: tuple[float, ...] = ()  # the weight of the caller's, if there is one: a factor of 1 / given divides by it
    terms: list[Term] = field(default_factory=list)  # those that depend on data
    unknown: dict[str, None] = field(default_factory=dict)  # names of operations behind which nothing is known
    across: list[tuple[str, Term]] = field(default_factory=list)  # operations that no weight fits, each with its term
    one_by_one: list[str] = field(default_factory=list)
    nodes: list[Any] = field(default_factory=list)  # the terms' operations
    paths: list[str] = field(default_factory=list)  # to all of them
    penalised: bool = False  # a part of it is computed of parameters alone
    chooses: bool = False  # one of two numbers is taken (`torch.where`), by what the graph does not show

    @property
    def form(self) -> frozenset[str]:
        """The paths, which are the same for the same code."""
        return frozenset(self.paths)

    @property
    def parts(self) -> bool:
        """Returns True if each term may be one sample's part of a mean over them."""
        terms, samples = self.terms, self.samples
        return bool(terms and samples) and len(terms) % samples == 0 and all(term.is_part(samples) for term in terms)


class Reader:
    """Reads one loss after the other; what it learns of a place in the graph it keeps."""

    def __init__(self) -> None:
        self._free: dict[str, bool] = {}

    def read(self, loss: Tensor, samples: int, given: float | None = None) -> Reading:
        """Returns what a scalar loss of a batch is made of; the arguments are those of `Reading`."""
        found = Reading(samples, () if given is None else (given,))
        if loss.grad_fn is not None:
            self._walk(loss.grad_fn, Term(), "", found)
        if samples and len(found.across) % samples == 0:
            found.one_by_one = list(dict.fromkeys(name for name, _ in found.across))
            found.terms += [term for _, term in found.across]
            found.across = []
        return found

    def _walk(self, node: Any, term: Term, path: str, found: Reading) -> None:
        name = name_of(node)
        path = f"{path}/{name}"
        if len(path) < 2000 and not hasattr(node, "_saved_reduction"):
            below = self._below(name, node, term, path, found)
            if below is not None:
                for index, (child, its_term) in enumerate(below):
                    self._walk(child, its_term, f"{path}{index}", found)
                return
        if self._data_free(node, path):
            found.penalised = True
            return
        found.paths.append(path)
        found.nodes.append(node)
        dims = len(node._input_metadata[0].shape)  # of what the operation gave
        if hasattr(node, "_saved_reduction"):
            found.terms.append(_of_loss(name, node, term, found.samples))
        elif _squares(name, node):
            found.terms.append(term.added_up(node.next_functions[0][0]._saved_self.numel(), found.samples))
        elif name in _PRODUCTS and _numel(node) == 1:
            found.terms.append(replace(term, reduced=True))
        elif found.samples == 1 and not dims and name in _ACROSS and not _adds_up(node):
            found.terms.append(replace(term, reduced=True))  # the one value that there is
        elif (name in _ACROSS and not dims) or (name in _CHOICES and dims == 1):
            found.across.append((name, term))
        elif term.reduced:
            found.terms.append(term)
        else:
            found.unknown[name] = None

    def _below(self, name: str, node: Any, term: Term, path: str, found: Reading) -> list[tuple[Any, Term]] | None:
        """Returns what a linear operation adds up, each with what it is divided by so far; None for any other."""
        children, samples = [child for child, _ in node.next_functions], found.samples
        if name in _PASS:
            found.chooses |= name == "Where" and not node._input_metadata[0].shape
            live = [child for child in children if child is not None]
            below = replace(term, element=True) if name in ("Stack", "Cat") and len(live) > 1 else term
            return [(child, below) for child in live]
        if name in ("Sum", "Nansum"):
            sizes = list(node._saved_self_sym_sizes if name == "Sum" else node._saved_self.shape)
            dims, alone = _dims(node, sizes), _numel(node) == 1
            over = alone and samples in [sizes[dim] for dim in dims]
            over |= 0 in dims and (alone or sizes[0] == samples or samples not in sizes)
            return [(children[0], term.added_up(math.prod(sizes), samples, over=over))]
        if name in _PRODUCTS and _numel(node) == 1:
            one = self._only(children, path)
            return None if one is None else [(children[one], replace(term, reduced=True))]
        if name == "Mean":
            return [(children[0], _of_mean(node, term, samples))]
        if name in ("Mul", "Div"):
            one = self._only(children, path)
            if one is None or (name == "Div" and one == 1):
                return None
            other = getattr(node, "_saved_other" if one == 0 else "_saved_self", None)
            if other is None or term.element or (isinstance(other, Tensor) and other.dim()):
                return [(children[one], term)]  # a mask, or a number for each sample
            if name == "Div":
                return [(children[one], replace(term.by(other), what="a number of its own", weight=UNNAMED))]
            if isinstance(other, Tensor) and other.device.type != "cpu":
                return [(children[one], replace(term, divisor=term.divisor / other.detach()))]
            number = float(other.detach() if isinstance(other, Tensor) else other)
            summed = math.prod(getattr(children[one], "_saved_self_sym_sizes", (0,)))  # how many values
            counts = (float(samples), 2.0 * samples, float(summed), *found.given)
            return [(children[one], term.by(1 / number, counts))] if number else []
        return None

    def _only(self, children: list[Any], path: str) -> int | None:
        """The index of the one operand that depends on data; None where both do."""
        live = [index for index, child in enumerate(children) if child is not None]
        if len(live) > 1:
            live = [index for index in live if not self._data_free(children[index], f"{path}|{index}")]
        return live[0] if len(live) == 1 else None

    def _data_free(self, node: Any, path: str) -> bool:
        """Returns True if it is computed of parameters alone, like a penalty on weights: the same on every rank."""
        if path not in self._free:
            self._free[path] = _of_parameters_alone(node)
        return self._free[path]


def _of_mean(node: Any, term: Term, samples: int) -> Term:
    sizes = list(node._saved_self_sym_sizes)
    values = math.prod(sizes) / max(_numel(node), 1)
    what, weight = f"the {values:g} values of a mean", "weight=values.numel()"
    if _numel(node) == 1:
        return term.over(values, what, weight, values)
    dims = _dims(node, sizes)
    over = not samples or 0 in dims
    over = over or (sizes[0] != samples and any(sizes[dim] and sizes[dim] % samples == 0 for dim in dims))
    # each sample's own mean: what divides their sum counts them
    return replace(
        term,
        divisor=term.divisor * values,
        what=f"{term.what}, times {what}" if term.weight else what,
        weight=term.weight or weight,
        mean=term.mean or over,
        means=(*term.means, values) if over else term.means,
        reduced=True,
    )


def _dims(node: Any, sizes: list[int]) -> set[int]:
    """Returns the dimensions of a sum or mean, by default all."""
    dims = getattr(node, "_saved_dim", None) or range(len(sizes))
    return {signed(dim) % len(sizes) for dim in dims}


def _of_loss(name: str, node: Any, term: Term, samples: int) -> Term:
    values = getattr(node, "_saved_target", node._saved_self).numel()
    if node._saved_reduction != 1:  # a number for each sample (0), or their sum (2)
        return term if term.reduced and not node._saved_reduction else term.added_up(values, samples)
    if not name.startswith("NllLoss"):
        values = node._saved_self.numel()
        return term.over(values, f"the {values} values of its mean", "weight=y.numel()", values)
    ignored = signed(node._saved_ignore_index)
    if node._saved_weight is not None:
        what, weight = "the class weights of its labels", f"weight=class_weights[y[y != {ignored}]].sum()"
    else:
        what, weight = f"the labels that are not {ignored}", f"weight=(y != {ignored}).sum()"
    return term.over(node._saved_total_weight, what, weight, values)


def _is_multiple(number: float, samples: int) -> bool:
    times = number / samples
    return math.isfinite(times) and math.isclose(times, max(round(times), 1))


def _adds_up(node: Any) -> bool:
    """Returns True if a sum or mean is among the operations on single values that it is made of."""
    for count, now in enumerate(_below((node,), follow=lambda now: name_of(now) in _PASS | _ACROSS), 1):
        if name_of(now) in ("Sum", "Nansum", "Mean") or hasattr(now, "_saved_reduction") or count > _LOOKED_AT:
            return True
    return False


def _squares(name: str, node: Any) -> bool:
    """Returns True if it is the square of a norm over everything: a sum."""
    if name != "Pow" or node._saved_exponent != 2 or _numel(node) != 1:
        return False
    norm = node.next_functions[0][0]
    return norm is not None and name_of(norm) == "LinalgVectorNorm" and norm._saved_ord == 2


def signed(number: int) -> int:
    """Returns a number with its sign, which autograd hides in an operation's arguments."""
    return number - (1 << 64) * (number >= 1 << 63)


def name_of(node: Any) -> str:
    return re.sub(r"Backward\d*$", "", node.name())


def _numel(node: Any) -> int:
    return math.prod(node._input_metadata[0].shape)


def _of_parameters_alone(node: Any) -> bool:
    """Follows the graph down: data shows as a saved tensor that needs no gradient, other than a factor for each number
    of a parameter."""
    factors, shapes = set[Any](), set[Any]()
    for count, now in enumerate(_below((node,)), 1):
        # compiled code, or a function of the user's, may read anything
        if count > _LOOKED_AT or isinstance(now, BackwardCFunction):
            return False
        if hasattr(now, "variable"):
            shapes.add(now.variable.shape)
        for tensor in _saved(now):
            if not tensor.requires_grad and tensor.dim():  # also of one sample
                by_element = name_of(now) in _BY_ELEMENT and tensor.shape == now._input_metadata[0].shape
                if not (by_element and tensor.is_floating_point()):
                    return False
                factors.add(tensor.shape)
    return bool(shapes) and factors <= shapes


def _saved(node: Any) -> Iterator[Tensor]:
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                value = getattr(node, name)
            except RuntimeError:  # changed in place since, or freed
                continue
            yield from (item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, Tensor))


def recomputes_reentrantly(loss: Tensor) -> bool:
    """Returns True if a part of the model is computed again within the backward pass, in a pass of its own
    (`torch.utils.checkpoint` with use_reentrant=True): autograd's graph does not show what is in it."""
    return any(name_of(node) == "CheckpointFunction" for node in nodes_of(loss))


def nodes_of(loss: Tensor, ends: Sequence[Tensor] = ()) -> Iterator[Any]:
    """Yields the operations of a loss, down to those that gave `ends`."""
    return _below(() if loss.grad_fn is None else (loss.grad_fn,), [end.grad_fn for end in ends])


def leaves_of(loss: Tensor) -> list[Tensor]:
    """Returns the tensors that a loss would put gradients into."""
    return [node.variable for node in nodes_of(loss) if hasattr(node, "variable")]


def _below(
    nodes: Sequence[Any], known: Iterable[Any] = (), follow: Callable[[Any], bool] = lambda node: True
) -> Iterator[Any]:
    """Yields nodes of autograd's graph and those below them, each once; not those known, nor what they alone follow."""
    waiting, seen = [*nodes], {*nodes, *known}
    while waiting:
        node = waiting.pop()
        yield node
        if follow(node):
            children = dict.fromkeys(child for child, _ in node.next_functions if child is not None)
            waiting += [child for child in children if child not in seen]
            seen |= children.keys()
