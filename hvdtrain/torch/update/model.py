"""The user's module as training calls it: through the engine, under autocast."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hvdtrain.core.errors import ConfigError
from hvdtrain.torch.update.session import Session, begins, prepared_optimizers
from hvdtrain.torch.update.staged import channels_last, in_one_call
from hvdtrain.torch.values.clock import CLOCK
from hvdtrain.torch.values.out_of_memory import explained

# the module's own methods: names in state dicts, in parameter lists and in printed text are those of the plain module
_DELEGATED = (
    "state_dict", "load_state_dict", "parameters", "named_parameters", "buffers", "named_buffers", "children",
    "named_children", "modules", "named_modules", "get_parameter", "get_buffer", "get_submodule", "extra_repr",
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook", "register_state_dict_pre_hook", "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook", "register_load_state_dict_post_hook",
)  # fmt: skip
_DELEGATED_CHAINED = ("train", "requires_grad_", "apply")  # these return the model
_OWN = ("module", "session", "training")


class Model(nn.Module):
    """The model that `prepare` returns: call, train and save it like the module that it holds.

    Attributes, methods, parameter names and state dicts are those of your module, without any prefix.

    Example:
        outputs = model(images)
        world.on_main(torch.save, model.state_dict(), "model.pt")

    Attributes:
        module: your module, or the pipeline that it was cut into.
    """

    holds_users_module = True
    module: nn.Module
    session: Session

    def __init__(self, session: Session) -> None:
        # past nn.Module's bookkeeping: the module must not appear as a child, under a prefix
        module = session.module if session.staged is None else session.staged
        vars(self).update(module=module, session=session)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module on a batch, through the engine; float outputs come in float32 under mixed precision."""
        if torch.is_grad_enabled() and self.session.staged is not None and self.session.module.training:
            raise in_one_call(
                "model(x) in training mode",
                "loss = optimizer.forward_backward(x, y, loss_fn); or model.eval() and torch.no_grad() for its outputs",
            )
        return self._enter(None, args, kwargs)

    def _enter(self, call: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session, trains = self.session, torch.is_grad_enabled()
        if trains and CLOCK.phase == "other":  # no loader has set a phase
            CLOCK.enter("forward")
        if trains:
            begins(session)
            session.batches.called((args, kwargs))
        if trains and (call is None or args or kwargs):  # to find the layer where a NaN began
            session.last_call, session.last_method = (args, kwargs), call
        if session.options.channels_last:
            args = tuple(map(channels_last, args))
        batch = session.batches.now() if trains else None
        session.proof.pause()
        with explained("forward pass", session.sizes), session.precision.autocast():
            out = session.precision.outputs((call or session.engine_model.call)(*args, **kwargs))
        if trains:
            session.entered = True
            session.proof.saw(out, None if batch is session.gradients.batch else batch)
        return out

    forward = __call__

    def check_entered(self) -> None:
        """Raises `ConfigError` if mixed precision is on and no forward pass went through this model."""
        if self.session.precision.amp is not None and not self.session.entered:
            raise ConfigError(
                "mixed precision needs a call of the prepared model, or of one of its methods",
                "a backward pass without such a call: only parts of the model were called",
                "put those calls into forward() or a method of the model: model.training_step(x, y)",
            )
        self.session.entered = False

    @property
    def training(self) -> bool:
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.module.train(mode)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes gradients like the optimizer's `zero_grad`."""
        optimizer = prepared_optimizers[self.session.module]()
        if optimizer is not None:
            optimizer.before_zero_grad()
        self.module.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        module = vars(self)["module"]
        value = getattr(module, name)
        # the user's own methods see what forward sees: mixed precision, and a batch that does not count
        own = inspect.ismethod(value) and value.__self__ is module and not hasattr(nn.Module, name)
        if not own or self.session.staged is not None:
            return value

        @functools.wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            return self._enter(value, args, kwargs)

        return method

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        elif isinstance(value, (nn.Module, nn.Parameter)) or name == "forward":
            raise _complete(f"{name} = {type(value).__name__}(...)")
        else:
            setattr(self.module, name, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, nn.Module):
            raise _complete(f"model[{key!r}] = {type(value).__name__}(...)")
        self.module[key] = value  # type: ignore[operator]  # of a user's class that has one

    def __delitem__(self, key: Any) -> None:
        raise _complete(f"del model[{key!r}]")

    def __bool__(self) -> bool:
        return True  # not the length of a container

    def __dir__(self) -> list[str]:
        return sorted({*nn.Module.__dir__(self), *dir(self.module)})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Model:
        """Handles `to`, `cuda`, `half` and the like: raises ConfigError unless nothing changes."""
        for name, tensor in self.module.named_parameters():
            after = fn(tensor.detach())
            if (after.device, after.dtype) != (tensor.device, tensor.dtype):
                raise ConfigError(
                    "a prepared model cannot be moved or cast",
                    f"{name} would go from {tensor.dtype} on {tensor.device} to {after.dtype} on {after.device}",
                    "move or cast the model before prepare(), which moves it to hvdtrain.init(..., device=);\n"
                    'for mixed precision: prepare(..., amp="bf16")',
                )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the user's module, plain: for averages of weights, and for export."""
        return copy.deepcopy(self.session.module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "a prepared model cannot be pickled",
            "torch.save(model), or the model was sent to another process",
            "save hvdtrain.torch.unwrap(model).state_dict();\nor use hvdtrain.torch.model_state with a Checkpointer",
        )


_OPERATORS: dict[str, Callable[..., Any]] = {
    "__repr__": repr,
    "__getitem__": operator.getitem,
    "__len__": len,
    "__iter__": iter,
    "__contains__": operator.contains,
    "__reversed__": reversed,
    "__str__": str,
}


def _complete(received: str) -> ConfigError:
    return ConfigError(
        "the structure of a model cannot change after prepare()",
        f"{received} after prepare()",
        "build (and compile) the whole model, make its optimizer, then call prepare()",
    )


def _delegate(name: str) -> Callable[..., Any]:
    operation = _OPERATORS.get(name)  # which raises Python's error if the module has none

    def method(self: Model, *args: Any, **kwargs: Any) -> Any:
        found = operation(self.module, *args) if operation else getattr(self.module, name)(*args, **kwargs)
        return self if name in _DELEGATED_CHAINED else found

    method.__name__ = name
    method.__doc__ = f"The module's own `{name}`."
    return method


def _refuse(name: str) -> Callable[..., Any]:
    def method(self: Model, *args: Any, **kwargs: Any) -> NoReturn:
        given = args[0] if args else kwargs.get("name")
        raise _complete(f"model.{name}()" if given is None else f"{name}({given!r}, ...)")

    method.__name__ = name
    method.__doc__ = "As for any change of the model: before `prepare`."
    return method


for _name in (*_DELEGATED, *_DELEGATED_CHAINED, *_OPERATORS):
    setattr(Model, _name, _delegate(_name))
for _name in ("compile", "register_buffer", "register_parameter", "add_module", "register_module"):
    setattr(Model, _name, _refuse(_name))
