"""Hard models cut wherever they can be, against the whole; prints a JSON line a case.

Each stage runs alone, as a pipeline would run it: on detached values, backward from the gradients of the next one.
"""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from split_models import CASES
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hvdtrain.pipeline.run.stage import Stage, build_stages
from hvdtrain.pipeline.trace.restore import all_training
from hvdtrain.pipeline.trace.segments import Segment, segments
from hvdtrain.values.nested import map_tensors, tensors_of

TOLERANCE = 1e-12


def run(stages: Sequence[Stage], arguments: tuple[Any, ...]) -> Any:
    """Forward and backward of one batch, stage by stage; returns the output."""
    values, kept = arguments, []
    for stage in stages:
        stage.refresh()
    for stage in stages:
        leaves = map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), values)
        given = map_tensors(torch.clone, leaves) if stage.mutates else leaves
        values = stage(given)
        kept.append((leaves, values))
    output = values[0]
    given_back: list[Tensor | None] = [torch.ones_like(t) for t in tensors_of(values)]
    for leaves, outputs in reversed(kept):
        pairs = [
            (t, g) for t, g in zip(tensors_of(outputs), given_back, strict=True) if t.requires_grad and g is not None
        ]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        given_back = [leaf.grad for leaf in tensors_of(leaves)]
    for stage in stages:
        stage.return_gradients()
    return output


def difference(a: Any, b: Any) -> float:
    """Of two nested values; infinite where their structure differs."""
    (one, how), (other, also) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    if how != also:
        return float("inf")
    most = 0.0
    for x, y in zip(one, other, strict=True):
        if isinstance(x, Tensor):
            most = max(most, float((x - y).detach().abs().max())) if x.shape == y.shape else float("inf")
        elif x != y:
            return float("inf")
    return most


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def whole(model: nn.Module, arguments: tuple[Any, ...]) -> Any:
    output = model(*arguments)
    torch.autograd.backward([t for t in tensors_of((output,)) if t.requires_grad],
                            [torch.ones_like(t) for t in tensors_of((output,)) if t.requires_grad])  # fmt: skip
    return output


def compared(name: str) -> dict[str, Any]:
    """Compares the model, cut at every place it can be, in both modes."""
    torch.manual_seed(0)
    model, arguments = CASES[name]()
    plain = copy.deepcopy(model)
    before = state_of(model)
    parts = segments(model, arguments)
    found: dict[str, Any] = {"segments": len(parts), "left_alone": before == state_of(model)}
    found["names"] = [part.name for part in parts]
    found["draws"] = [part.index for part in parts if part.draws]
    found["leaves"] = parts[0].chain.program.leaves
    stages = build_stages(model, parts, [1] * len(parts), ["cpu"] * len(parts))
    one = build_stages(model, parts, [len(parts)], ["cpu"])
    found["buffers"] = [len(list(one[0].buffers())), len(list(one[0].changing_buffers()))]
    found["proxies"] = sum(len(stage.proxies) for stage in stages)
    for training in (True, False):
        for subject, its in (("parts", stages), ("one", one)):
            with all_training(model, training), all_training(plain, training):
                for each in (model, plain):
                    each.zero_grad()
                torch.manual_seed(1)
                wanted = whole(plain, copied(arguments))
                torch.manual_seed(1)
                received = run(its, copied(arguments))
            key = f"{subject} {'training' if training else 'evaluation'}"
            found[key] = max(
                difference(wanted, received),
                difference(gradients(plain), gradients(model)),
                difference(dict(plain.named_buffers()), dict(model.named_buffers())),
            )
    found["state_dict"] = list(model.state_dict()) == list(plain.state_dict())
    return found


def compared_stages(model: nn.Module, parts: list[Segment], arguments: tuple[Any, ...]) -> float:
    """Parts that were given by hand, each a stage, against the whole."""
    plain = copy.deepcopy(model)
    stages = build_stages(model, parts, [1] * len(parts), ["cpu"] * len(parts))
    wanted, received = whole(plain, copied(arguments)), run(stages, copied(arguments))
    return max(difference(wanted, received), difference(gradients(plain), gradients(model)))


def copied(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return map_tensors(torch.clone, arguments)


def state_of(model: nn.Module) -> str:
    """Everything that splitting must leave as it is."""
    tensors = [t.tolist() for t in model.state_dict().values()]
    # module by module its mode and all that is set on it, by identity
    holds = [(m.training, sorted((name, id(value)) for name, value in m.__dict__.items())) for m in model.modules()]
    grads = [p.grad for p in model.parameters()]
    return repr((tensors, holds, grads, torch.get_rng_state().tolist(), random.getstate()))


def main() -> None:
    torch.set_default_dtype(torch.float64)
    for name in sys.argv[1:] or CASES:
        try:
            found = compared(name)
        except Exception as error:
            if len(sys.argv) > 1:
                raise
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"case": name, **found}), flush=True)


if __name__ == "__main__":
    main()
