"""What a model does, as a list of operations (torch.fx), and nothing that a trace would get wrong.

A trace is one run with stand-ins for tensors: what Python decides in that run is fixed. Therefore:

* the model is traced in training and in evaluation mode; a submodule that does different things in the two is not
  opened but called (a leaf), as are those that cannot be traced, have hooks, change attributes, or draw from Python's
  or NumPy's random numbers; the model's own forward must do the same in both;
* functions that make tensors out of nothing, and `len`, are recorded, not their result; `no_grad` is recorded;
* in-place operators stay in place.
"""

from __future__ import annotations

import collections
import inspect
import operator
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.trace import recording
from hvdtrain.pipeline.trace.modes import Call, dependent, differently_wired, key, opened, skeleton
from hvdtrain.pipeline.trace.recording import Proxy
from hvdtrain.pipeline.trace.restore import all_training, attributes_of, device_of, preserved_state, redrawn, restored
from hvdtrain.pipeline.trace.shadow import Shadow, same, truth
from hvdtrain.pipeline.values.microbatch import FixedArguments, is_named, known_to_pytree
from hvdtrain.private.torch import canonical_mask, detect_is_causal_mask, sequence_length
from hvdtrain.values.generators import HOST

# what depends on no stand-in is computed once, when the model is traced
_DRAWN = "draws random numbers that a trace would fix (Python's, NumPy's, PyTorch's from a tensor of its own)"
_OPENED = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, torch.jit.ScriptModule)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


Value = TypeVar("Value")
WORTH_OPENING = 64  # a module that calls no more than one in so many of the layers is called as a whole


class Untraceable(Exception):
    """A module cannot be followed."""

    def __init__(self, path: str, reason: str, line: str = "") -> None:
        super().__init__(path, reason, line)
        self.path, self.reason, self.line = path, reason, line


@dataclass
class Program:
    """A traced model."""

    model: nn.Module
    # the same in training and in evaluation. Nodes carry in `meta` "path" (of the module whose forward made it) and
    # "grad" (False: under `torch.no_grad`)
    graph: fx.Graph
    attributes: dict[str, Any] = field(default_factory=dict)  # what targets of nodes name and the model does not
    leaves: dict[str, str] = field(default_factory=dict)  # paths of modules that were not opened, and why
    followed: set[str] = field(default_factory=lambda: {""})  # paths of all modules that were opened; the root is ""
    names: tuple[str, ...] = ()  # of its last arguments, which are given by keyword
    odd: bool = False  # a model's decision is another one for one sample alone
    read: frozenset[tuple[nn.Module, str]] = frozenset()  # attributes that forwards looked at, of any module
    fixed: FixedArguments | None = None  # what the trace takes for granted of the arguments; None: nothing

    def call(self, arguments: Sequence[Any]) -> Any:
        """The model itself."""
        positional, keywords = parted(arguments, self.names)
        return self.model(*positional, **keywords)

    @property
    def doubtful(self) -> set[str]:
        """Paths of modules that were opened, but for the root and PyTorch's own."""
        opened = ((path, type(self.model.get_submodule(path))) for path in self.followed - {""})
        return {path for path, kind in opened if not kind.__module__.startswith("torch.nn.")}

    def named(self, target: Any) -> Any:
        """The module, parameter, buffer or constant that a node's target names."""
        return self.attributes[target] if target in self.attributes else operator.attrgetter(target)(self.model)

    def bind(self, node: fx.Node) -> tuple[Any, str]:
        """The model's own objects, looked up as the model would; see `code.Binder`."""
        owner, _, name = str(node.target).rpartition(".")
        if node.op == "call_module" or node.target in self.attributes:
            return self.named(node.target), ""
        return self.model.get_submodule(owner), name


def parted(arguments: Sequence[Any], names: Sequence[str]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Returns positional and keyword arguments."""
    count = len(arguments) - len(names)
    return arguments[:count], dict(zip(names, arguments[count:], strict=True))


def trace(
    model: nn.Module,
    example: tuple[Any, ...],
    leaves: dict[str, str],
    layers: Mapping[str, float],
    names: tuple[str, ...] = (),
) -> Program:
    """Traces a model in both modes; it ends as it was. `layers`: see `Reference.layers`.

    Modules at `leaves` (path -> reason) are not opened; those that cannot be are added. Of the example only what is no
    tensor is looked at (None, True and strings are fixed). Raises `ConfigError` if the model's own forward cannot be
    traced, or differs between the modes.
    """
    while True:
        runs = {}
        try:
            for training in (True, False):
                tracer = _Tracer(model, leaves, layers, example, names)
                runs[training] = tracer.follow(model, training)
        except Untraceable as error:
            make_leaf(leaves, error.path, error.reason, model, error.line)
            continue
        calls = [runs[training].calls[0] for training in (True, False)]
        differing = dependent(*calls) or differently_wired(runs[True].graph, runs[False].graph)
        for path in differing:
            make_leaf(leaves, path, "does different things in training and evaluation", model)
        if differing:
            continue
        attributes = runs[False].attributes | runs[True].attributes
        followed = opened(calls[0]) | {""}
        odd = any(run.shadow.odd for run in runs.values())
        read = frozenset(runs[True].read | runs[False].read)
        fixed = FixedArguments.of(example)
        return Program(model, runs[True].graph, attributes, leaves, followed, names, odd, read, fixed)


def refuse_around(model: nn.Module) -> None:
    """Refuses what is around a model and would be lost."""
    refuse_everywhere()
    if any(getattr(model, name) for name in HOOKS):
        raise ConfigError(
            "a pipeline cannot call hooks of the model itself: it runs the parts of the model",
            f"{type(model).__name__} has forward or backward hooks",
            "remove them, put them on a submodule, or register them on the pipeline that split() returns",
        )
    if isinstance(model, _WRAPPERS) or type(model).__module__.startswith("torch._dynamo"):
        raise ConfigError(
            "a wrapped or compiled model cannot be split",
            type(model).__name__,
            "split the model inside; each rank then has its own pipeline: hvdtrain.torch.prepare(pipe, ...)",
        )


def refuse_everywhere() -> None:
    """Raises `ConfigError` if a hook of the user's is called for every module."""
    held = [h for name in HOOKS for h in list(getattr(torch.nn.modules.module, f"_global{name}").values())]
    # PyTorch's own count operations (FlopCounterMode), which does not depend on modules
    if any(not str(getattr(h, "__module__", "")).startswith(("hvdtrain.", "torch.")) for h in held):
        raise ConfigError(
            "a pipeline cannot call a hook of all modules: it runs the operations of those that it has traced",
            "register_module_forward_hook(...), or another hook of torch.nn.modules.module",
            "remove it, or register it on the modules that you look at",
        )


def is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("hvdtrain.")


def make_leaf(leaves: dict[str, str], path: str, reason: str, model: nn.Module, line: str = "") -> None:
    """Has a module called as a whole; raises `ConfigError` for the model itself."""
    if path == "" or path in leaves:
        where = f"\n{line}" if line else ""
        name = f"{type(model).__name__}.forward" if path == "" else f"{path} of {type(model).__name__}"
        raise ConfigError(
            "split() cannot trace this model: its own forward must not depend on the data",
            f"{name}: {reason}{where}",
            "give its parts in order: split(..., modules=[...]) (modules or names, each called with what the one\n"
            "before returns); or move what cannot be traced into a submodule. Models that return objects of their\n"
            "own: modules=[...] of parts that return tensors",
        )
    leaves[path] = reason


def is_torchs(module: nn.Module) -> bool:
    """Returns True for PyTorch's own layers, which are never opened."""
    return module.__module__.startswith(("torch.nn.", "torch.ao.")) and not isinstance(module, _OPENED)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(
        self,
        model: nn.Module,
        leaves: dict[str, str],
        layers: Mapping[str, float],
        example: tuple[Any, ...],
        names: tuple[str, ...],
    ) -> None:
        super().__init__()
        self._leaves, self._example, self._names = leaves, example, names
        self._layers, self._few = layers, max(1, layers[""] // WORTH_OPENING)
        self._buffer_ids = {id(tensor) for tensor in model.buffers()}
        self.calls = [Call("")]
        self.attributes: dict[str, Any] = {}
        self.shadow = Shadow(model, example)
        self._thread = threading.get_ident()
        self._pauses = False
        self._fixed = set[tuple[fx.Node, str]]()
        self._autocast = _autocast_state()
        self.read = set[tuple[nn.Module, str]]()

    def follow(self, model: nn.Module, training: bool) -> _Tracer:
        """Traces the model in one mode; it ends as it was."""
        draws = HOST.everything()
        with preserved_state(model, device_of(model)):  # of what is looked up meanwhile
            before = attributes_of(model)
            try:
                with all_training(model, training), torch.enable_grad(), recording.patched(self):
                    self.graph = self.trace(model)
            except Untraceable:
                raise
            except Exception as error:
                raise Untraceable("", message_of(error), _line(error)) from error
            finally:
                drawn = redrawn(draws)
                changed = restored(before)
        if drawn:
            raise Untraceable("", _DRAWN)
        if changed:
            path = next(path for path, module in model.named_modules() if module is changed[0])
            raise Untraceable(path, f"its forward changes {changed[1]!r} of its own")
        return self

    @property
    def records(self) -> bool:
        """Returns True if the current call is an operation of the model's: not the shadow's, nor another thread's."""
        return not self.shadow.running and not self._pauses and threading.get_ident() == self._thread

    def _unrecorded(self, act: Callable[[], Value]) -> Value:
        self._pauses = True
        try:
            return act()
        finally:
            self._pauses = False

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Proxy(node, self)

    def _named(self, target: Any) -> Any:
        return self.attributes[target] if target in self.attributes else operator.attrgetter(target)(self.root)

    def to_bool(self, obj: fx.Proxy) -> bool:
        decided = self.asked(obj, truth)
        return super().to_bool(obj) if decided is None else decided

    def asked(self, obj: fx.Proxy, read: Callable[[Any], Any]) -> Any:
        """Returns what `read` (see `Shadow.ask`) gives, if shapes and types decide it; each pass asks again."""
        found = self.shadow.ask(obj.node, self._named, read)
        if found is None:
            return None
        answer, always = found
        self.shadow.odd |= not always  # whether that matters, one sample is tried for
        return self.fixed(obj, answer) if always else answer

    def is_a(self, obj: fx.Proxy, kinds: Any) -> bool:
        return self.shadow.is_a(obj.node, kinds, self._named)

    def fixed(self, obj: fx.Proxy, as_it_is: int) -> int:
        """A decision by a value, or its length; each pass asks again."""
        known = obj.node, repr(as_it_is)
        if known not in self._fixed:
            self._fixed.add(known)
            self.create_proxy("call_function", same, (obj, as_it_is, recording.users_line()), {})
        return as_it_is

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if not self.records:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        # only what the example gives: an argument left out keeps its default
        given: list[Any] = [self.create_proxy("placeholder", f"input_{i}", (), {}) for i in range(len(self._example))]
        for index, value in FixedArguments.of(self._example).values.items():
            given[index] = value
        own = vars(self.root).get("forward")  # put in the place of its class's: fx would not look at it
        positional, keywords = parted(given, self._names)

        function = root_fn if own is None else lambda _, *arguments, **named: own(*arguments, **named)
        return (lambda *arguments: function(*arguments, **keywords)), [self.root, *positional]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self._leaves or any(getattr(m, name) for name in HOOKS):
            return True
        if self._layers.get(module_qualified_name, 0) <= self._few:  # nothing worth a cut
            return True
        if isinstance(m, (torch.jit.ScriptModule, fx.GraphModule)) or type(m).__module__.startswith("torch._dynamo"):
            return True
        return is_torchs(m)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self.records:
            return forward(*args, **kwargs)
        path = (self.submodule_paths or {}).get(m)
        if path is None:  # made in a forward, `nn.Softmax(1)(x)`: kept as a function
            if any(True for _ in (*m.parameters(), *m.buffers())):
                raise ValueError(f"calls a {type(m).__name__} with weights that is no submodule of the model")
            return self.create_proxy("call_function", m, args, kwargs, name=type(m).__name__.lower())
        if path not in self._leaves and _is_open_encoder(m, args, kwargs):
            forward = partial(self._encode, m)
        elif self.is_leaf_module(m, path):
            return self.create_proxy("call_module", path, args, kwargs)
        call = Call(path)
        self.calls[-1].items.append(call)
        self.calls.append(call)
        draws = self._unrecorded(HOST.everything)
        try:
            result = forward(*args, **kwargs)
            returned = skeleton(self.create_arg(result))
        except Untraceable:
            raise
        except Exception as error:
            raise Untraceable(path, message_of(error), _line(error)) from error
        if self._unrecorded(lambda: redrawn(draws)):
            raise Untraceable(path, _DRAWN)
        self.calls.pop()
        call.items.append(("return", returned))
        return result

    def _encode(self, encoder: Any, src: Any, mask: Any = None, is_causal: Any = None, **_: Any) -> Any:
        """`nn.TransformerEncoder.forward` without padding: its mask, its layers, its norm."""
        causal: Any = is_causal is True
        if mask is not None:
            given = (src, mask, is_causal, encoder.layers[0].self_attn.batch_first)
            mask_and_causal: Any = self.create_proxy("call_function", _encoder_mask, given, {})
            mask, causal = mask_and_causal[0], mask_and_causal[1]
        for layer in encoder.layers:
            src = layer(src, src_mask=mask, is_causal=causal, src_key_padding_mask=None)
        return src if encoder.norm is None else encoder.norm(src)

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None
    ) -> Any:
        if _autocast_state() != self._autocast:
            raise ValueError("switches autocast on or off")
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        node.meta = {"path": self.calls[-1].path, "grad": torch.is_grad_enabled()}
        if kind.startswith("call"):
            self.calls[-1].items.append(key(node))
        return node

    def create_arg(self, a: Any) -> Any:
        if type(a) is collections.OrderedDict:
            pairs = [(key, self.create_arg(value)) for key, value in a.items()]
            return self.create_node("call_function", collections.OrderedDict, (pairs,), {})
        if isinstance(a, dict) and type(a) not in (dict, fx.immutable_collections.immutable_dict):
            if not is_named(a):
                raise ValueError(f"a {type(a).__name__}: a dict of a class of its own would become a plain one")
            known_to_pytree(type(a))
            return self.create_node("call_function", type(a), (), {k: self.create_arg(v) for k, v in a.items()})
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter) and id(a) not in self._buffer_ids:
            # fx would set a constant, neither parameter nor buffer, as an attribute of the user's model
            self.attributes[f"_constant_{id(a)}"] = a
            return self.create_node("get_attr", f"_constant_{id(a)}", (), {})
        return super().create_arg(a)


# files that are no user's
_OWN = tuple(map(inspect.getsourcefile, (_Tracer, Proxy, fx.Proxy)))


def _is_open_encoder(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """The library's own stack of layers, worth opening; what is derived from it may do anything, and with a padding
    mask it may go over to nested tensors, by what is in the mask."""
    without_padding = len(args) <= 2 and kwargs.get("src_key_padding_mask") is None
    return type(module) is nn.TransformerEncoder and without_padding and not any(getattr(module, h) for h in HOOKS)


def _encoder_mask(src: Tensor, mask: Any, is_causal: bool | None, batch_first: bool) -> tuple[Any, bool]:
    """Returns the mask as `nn.TransformerEncoder.forward` makes it, by the library's own functions."""
    mask = canonical_mask(mask, "mask", None, "", src.dtype, check_other=False)
    return mask, detect_is_causal_mask(mask, is_causal, sequence_length(src, batch_first))


def _autocast_state() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def message_of(error: BaseException) -> str:
    """Returns the type of an error and the beginning of its text."""
    return f"{type(error).__name__}: {str(error).strip()[:600]}"


def _line(error: BaseException) -> str:
    """Returns the line of the user's code that failed: the innermost line outside of PyTorch."""
    inside = ("/torch/fx/", "/torch/nn/modules/module.py", "/torch/overrides.py", "/torch/_tensor.py", "/checkpoint.py")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename not in _OWN and not any(part in frame.filename for part in inside):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""
