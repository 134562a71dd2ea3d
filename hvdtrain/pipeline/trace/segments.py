"""A model as a chain of segments: between two of them only a few values cross, so that a stage may end there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.trace import code
from hvdtrain.pipeline.trace.cuts import Cut, Different, Facts, find_cuts, look
from hvdtrain.pipeline.trace.reference import Reference, refer, same
from hvdtrain.pipeline.trace.restore import all_training, device_of, preserved_state, resized, to_device
from hvdtrain.pipeline.trace.tracer import Program, make_leaf, parted, refuse_around, trace
from hvdtrain.pipeline.values.rng import draws_by_name, may_draw

# names that do not tell where a segment is
_DULL = {"getitem", "getattr", "same", "size", "OrderedDict", "is_autocast_enabled", "get_autocast_dtype"}


@dataclass
class Chain:
    """A traced model and the cuts that make it a chain."""

    program: Program
    facts: Facts
    cuts: list[Cut]  # the first before the first operation, the last behind the last

    @cached_property
    def nodes(self) -> list[fx.Node]:
        return list(self.program.graph.nodes)

    def work(self, first: int, last: int) -> list[fx.Node]:
        """The operations from cut `first` to cut `last`."""
        begin, end = self.cuts[first].place + 1, self.cuts[last].place + 1
        return [node for node in self.nodes[begin:end] if node.op.startswith("call")]

    def used(self, first: int, last: int) -> list[fx.Node]:
        """Returns every node that names a module, parameter or buffer used between two cuts."""
        found: dict[fx.Node, None] = {}
        for node in self.work(first, last):
            for used in (node, *node.all_input_nodes):
                if used.op == "get_attr" or (used is node and node.op == "call_module"):
                    found[used] = None
        if last == len(self.cuts) - 1:
            found |= dict.fromkeys(n for n in self.nodes[-1].all_input_nodes if n.op == "get_attr")
        return list(found)

    def function(
        self, first: int, last: int, bind: code.Binder, name: str, moved: code.Moved | None = None
    ) -> Callable[..., tuple[Any, ...]]:
        """Returns a function from the values at cut `first` to those at cut `last`; `moved`: see `code.function`."""
        is_last = last == len(self.cuts) - 1
        outputs = self.nodes[-1].args[0] if is_last else self.cuts[last].values
        work, inputs = self.work(first, last), self.cuts[first].values
        return code.function(work, inputs, outputs, bind, name=name, is_last=is_last, moved=moved)

    def changes_input(self, first: int) -> bool:
        """Returns True if a value that comes in at this cut is changed in place after it."""
        cut = self.cuts[first]
        return any(self.facts.changed_at.get(node, -1) > cut.place for node in cut.values)


class Stretch:
    """The operations between cuts `first` and `end`, as one function.

    `bind`, `moved`: other objects for its modules and parameters, on another device; see `code.function`.
    """

    def __init__(
        self, chain: Chain, first: int, end: int, bind: code.Binder | None = None, moved: code.Moved | None = None
    ) -> None:
        self.chain, self.first, self.end = chain, first, end
        self._bind, self._moved = bind or chain.program.bind, moved
        work = chain.work(first, end)
        self.name = span_name([label(chain.program, node) for node in work])
        self.draws = any(node in chain.facts.draws for node in work)
        self.may_draw = self.draws or any(_may_draw(chain.program, node) for node in work)
        self.repeats = any(node in chain.facts.repeats for node in work)
        self.mutates = chain.changes_input(first)

    @cached_property
    def function(self) -> Callable[..., tuple[Any, ...]]:
        """A function from the values that come in to those that go out."""
        return self.chain.function(self.first, self.end, self._bind, self.name, self._moved)

    def modules(self) -> Iterator[nn.Module]:
        """The modules that it calls, and what is in them, each once."""
        used = self.chain.used(self.first, self.end)
        called = [self._bind(node)[0] for node in used if node.op == "call_module"]
        return iter(dict.fromkeys(part for module in called for part in module.modules()))

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that it uses, each once."""
        used = tensors_used(self.chain, self.first, self.end, self._bind)
        return iter(dict.fromkeys(tensor for tensor in used if isinstance(tensor, nn.Parameter)))

    def buffers(self) -> Iterator[Tensor]:
        """The buffers and constants that it uses, each once."""
        used = tensors_used(self.chain, self.first, self.end, self._bind)
        return iter(dict.fromkeys(tensor for tensor in used if not isinstance(tensor, nn.Parameter)))


class Segment(Stretch):
    """A stretch between two neighbouring cuts; called with the values that cross, it returns the next."""

    def __init__(
        self, chain: Chain, index: int, bind: code.Binder | None = None, moved: code.Moved | None = None
    ) -> None:
        super().__init__(chain, index, index + 1, bind, moved)
        self.index = index

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        return self.function(*values)

    def __repr__(self) -> str:
        return f"<segment {self.index}: {self.name}>"


def segments(model: nn.Module, example: Any, names: tuple[str, ...] = ()) -> list[Segment]:
    """Returns a model as a chain of segments, by tracing it; the model ends as it was.

    The first segment takes the example's arguments (`names`: of the last ones, given by keyword), the last returns a
    tuple of one: the model's output, of any structure. Raises `ConfigError` if the model cannot be traced, does not
    take the example, or a trace does not do what the model does.
    """
    arguments = example if isinstance(example, tuple) else (example,)
    _refuse_unmade(model)
    refuse_around(model)
    reference = refer(Program(model, fx.Graph(), names=names), arguments)
    leaves: dict[str, str] = {}
    for path in reference.keepers:
        make_leaf(leaves, path, "its forward puts what it computes into an object outside of the model", model)
    while True:
        program = trace(model, arguments, leaves, reference.layers, names)
        try:
            return _checked(program, reference)
        except Different as error:
            # for example it asks whether its argument is a tensor, which a stand-in is not: call instead, from inside
            if not (doubtful := program.doubtful):
                raise _not_the_same(error) from error
            inside = {path for path in doubtful if not any(other.startswith(f"{path}.") for other in doubtful)}
            leaves |= dict.fromkeys(inside, f"a trace does something else: {error}")


def from_modules(
    modules: Sequence[nn.Module | str], model: nn.Module, example: Any, names: tuple[str, ...] = ()
) -> list[Segment]:
    """Returns a model as a chain of segments given by hand: each module is called with what the one before returns.

    Strings name submodules; the first gets the example's arguments (`names`: of the last ones, given by keyword).
    Raises `ConfigError` if there is no such submodule, parameters are not the model's, or the parts in a row do not
    compute what the model computes for the example.
    """
    arguments = example if isinstance(example, tuple) else (example,)
    _refuse_unmade(model)
    own = {id(p) for p in model.parameters()}
    graph = fx.Graph()
    program = Program(model, graph, names=names)
    paths = {module: path for path, module in model.named_modules()}
    values = [graph.placeholder(f"input_{index}") for index in range(len(arguments))]
    for index, given in enumerate(modules):
        part = _part(given, model)
        if any(id(p) not in own for p in part.parameters()):
            raise ConfigError("modules=[...] must be parts of the model", f"part {index} has parameters of its own")
        target = f"_part_{index}"
        program.attributes[target] = part
        positional, keywords = parted(values, names if index == 0 else ())
        values = [graph.call_module(target, tuple(positional), keywords)]
        values[0].meta = {"path": paths.get(part) or type(part).__name__.lower(), "grad": True}
    graph.output(values[0])
    try:
        return _checked(program, refer(program, arguments), everywhere=True)
    except Different as error:
        raise _not_the_same(error) from error


def _refuse_unmade(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                "a model must have its parameters before it is split",
                f"{name} is made in the first forward pass (a lazy layer)",
                "call the model once with a batch: model(x)",
            )
        if tensor.is_meta:
            raise ConfigError(
                "a model must have its parameters in memory before it is split",
                f"{name} is on the meta device",
                "model.to_empty(device='cpu'), then load a state dict, or initialise the model",
            )


def _part(given: nn.Module | str, model: nn.Module) -> nn.Module:
    if not isinstance(given, str):
        return given
    try:
        return model.get_submodule(given)
    except AttributeError as error:
        names = ", ".join(name for name, _ in model.named_children())
        raise ConfigError("modules=[...] must name submodules of the model", given, f"the model has {names}") from error


def _checked(program: Program, reference: Reference, *, everywhere: bool = False) -> list[Segment]:
    facts = look(program, reference.example)
    facts.counts = reference.counts
    chain = Chain(program, facts, find_cuts(program, facts, everywhere=everywhere))
    for index, cut in enumerate(chain.cuts[1:-1] if everywhere else ()):
        if not facts.may_cross.issuperset(cut.values):
            raise ConfigError(
                "parts in modules=[...] must return tensors, numbers and None, in tuples, lists and dicts",
                f"part {index} returns something else, which would carry its graph into another stage",
                "parts that return their tensors: for example a module whose forward ends with .last_hidden_state",
            )
    _check(chain, reference)
    if own := [name for owner, name in facts.counts if owner is program.model]:  # else the trace has refused it
        raise ConfigError(
            "with modules=[...] the model's own forward is not called, so it must not change attributes",
            f"it changes {', '.join(own)} in each pass",
            "count outside of the model, or in one of its parts",
        )
    return [Segment(chain, index) for index in range(len(chain.cuts) - 1)]


def _not_the_same(error: Different) -> ConfigError:
    return ConfigError(
        "the parts in modules=[...], called in order, must compute what the model computes",
        str(error),
        "list all parts, in the order in which the model calls them: modules=[...]",
    )


def _may_draw(program: Program, node: fx.Node) -> bool:
    if node.op == "call_module":
        return may_draw(program.named(node.target))
    if isinstance(node.target, str):
        return draws_by_name(node.target)
    home = str(getattr(node.target, "__module__", None) or "torch").split(".")[0]
    known = home in ("torch", "operator", "_operator", "builtins", "math", "collections", "hvdtrain")
    return not known or draws_by_name(getattr(node.target, "__name__", ""))


def tensors_used(chain: Chain, first: int, last: int, bind: code.Binder) -> Iterator[Tensor]:
    """Yields parameters, buffers and constants used between two cuts; a tensor may come more than once."""
    for node in chain.used(first, last):
        value, attribute = bind(node)
        if node.op == "call_module":
            yield from value.parameters()
            yield from value.buffers()
            continue
        value = getattr(value, attribute) if attribute else value
        if isinstance(value, Tensor):
            yield value


def label(program: Program, node: fx.Node) -> str:
    """Returns the name of an operation: its module's path, or its function within the module that does it."""
    path = node.meta.get("path", "")
    if node.op == "call_module":
        return path if str(node.target) in program.attributes else str(node.target)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", type(node.target).__name__)
    return f"{path}.{name}" if path else str(name)


def span_name(labels: Sequence[str]) -> str:
    """Returns "first .. last" of the labels that are informative."""
    labels = [label for label in labels if label.rpartition(".")[2] not in _DULL] or labels
    if not labels:
        return "nothing"
    return labels[0] if labels[0] == labels[-1] else f"{labels[0]} .. {labels[-1]}"


def _check(chain: Chain, reference: Reference) -> None:
    """Raises `Different` unless in both modes the chain computes what the model computes."""
    model = chain.program.model
    device = device_of(model)
    whole = chain.function(0, len(chain.cuts) - 1, chain.program.bind, type(model).__name__)
    for training, wanted in reference.outputs.items():
        with all_training(model, training), torch.no_grad(), preserved_state(model, device):
            received = whole(*to_device(reference.example, device))[0]
        if not same(wanted, received):
            mode = "training" if training else "evaluation"
            raise Different(f"other results in {mode} mode, for the example's first samples")
    if chain.program.odd:
        _check_one(chain, reference, whole)


def _check_one(chain: Chain, reference: Reference, whole: Callable[..., tuple[Any, ...]]) -> None:
    """A decision of the model is another one for a single sample: it is to come to the same."""
    model = chain.program.model
    device, one = device_of(model), resized(reference.example, 1)
    for training in (True, False):
        found = []
        calls: list[Callable[[], Any]] = [
            lambda: chain.program.call(to_device(one, device)), lambda: whole(*to_device(one, device))[0],
        ]  # fmt: skip
        for call in calls:
            with all_training(model, training), torch.no_grad(), preserved_state(model, device):
                try:
                    found.append(call())
                except Exception:
                    if not found:
                        break  # nor does the model itself take one
                    raise Different("it cannot do what the model does for one sample") from None
        if found and not same(*found):
            raise Different("other results for one sample")
