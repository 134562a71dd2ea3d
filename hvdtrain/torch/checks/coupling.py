"""Whether the samples of a batch meet in its loss: looked at by differentiating it, which waits for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from hvdtrain.torch.checks.loss_graph import name_of, nodes_of
from hvdtrain.torch.checks.sample_flow import Way, layouts

_SCATTERS = {"IndexAdd", "ScatterAdd", "ScatterReduce", "IndexReduce", "SegmentReduce", "IndexPut"}
_LAYOUTS = 8  # in which samples may lie in outputs
_TERMS = 8  # of a loop over samples, that are looked at


def of_one_each(nodes: Sequence[Any], outputs: list[Tensor], samples: int) -> bool:
    """Whether none of a loss's terms depends on more than one sample; of many, eight are looked at."""
    placed = [(o, ways[0]) for o, ways in layouts(outputs, samples) if len(ways) == 1 or ways[0].dim == 0]
    most = 0
    for node in nodes[:: -(-len(nodes) // _TERMS)] if placed else ():
        meta = node._input_metadata[0]
        one = torch.ones(meta.shape, dtype=meta.dtype, device=meta.device)
        edge = torch.autograd.graph.GradientEdge(node, 0)
        found = torch.autograd.grad([edge], [o for o, _ in placed], [one], retain_graph=True, allow_unused=True)
        on = [
            way.samples[gradient.movedim(way.dim, 0).reshape(len(way.samples), -1).ne(0).any(1).cpu()].tolist()
            for gradient, (_, way) in zip(found, placed, strict=True)
            if gradient is not None
        ]
        most = max(most, len({sample for some in on for sample in some}))
    return most == 1


def couples(loss: Tensor, outputs: list[Tensor], samples: int) -> bool | None:
    """Whether the loss compares samples with each other, so that no weights can put it together of pieces.

    A loss that adds up over samples has second derivatives within each sample only; those of the model's outputs of one
    half of the batch by the other half's are looked at. Nothing is added to any `.grad`, no random stream is used.

    Args:
        loss: a scalar, whose graph is kept.
        outputs: of the model, in the batch; those without a dimension of `samples` are left out.
        samples: in the batch.

    Returns:
        None where it cannot be told: behind batch normalisation (a discriminator's) samples meet, as they may.

    Raises:
        RuntimeError, NotImplementedError: of a loss that is differentiated once only.
    """
    placed = [(o, [_half(o, way, samples) for way in ways]) for o, ways in layouts(outputs, samples)]
    names = {name_of(node) for node in nodes_of(loss, [o for o, _ in placed])} if placed else set()
    if samples < 2 or not placed or any("BatchNorm" in name for name in names):
        return None
    if names & _SCATTERS and any(len(ways) > 1 for _, ways in placed):
        return None  # rows of a graph's nodes, of which each sample has its own number
    first = torch.autograd.grad(loss, [o for o, _ in placed], create_graph=True, allow_unused=True)
    if all(gradient is None for gradient in first):
        return None
    # samples may lie along several dimensions; a flat one may hold them one after the other, or copies of the batch
    choices = islice(product(*(halves for _, halves in placed)), _LAYOUTS)
    return all(_coupled(first, [o for o, _ in placed], halves) for halves in choices)


def _coupled(first: Any, outputs: list[Tensor], halves: Sequence[Tensor]) -> bool:
    made = torch.Generator().manual_seed(1)
    probe: Any = 0.0
    for gradient, half in zip(first, halves, strict=True):
        if gradient is not None and gradient.requires_grad:
            noise = torch.randn(gradient.shape, generator=made, dtype=torch.float64).to(gradient)
            probe = probe + (gradient * noise * half).sum()
    if not isinstance(probe, Tensor):
        return False  # linear in the outputs
    second = torch.autograd.grad(probe, outputs, retain_graph=True, allow_unused=True)
    pairs = [(s, half) for s, half in zip(second, halves, strict=True) if s is not None]
    if not pairs:
        return False
    own = max(float((s * half).abs().max()) for s, half in pairs)
    other = max(float((s * ~half).abs().max()) for s, half in pairs)
    return other > 1e-5 * max(own, other) > 0


def _half(output: Tensor, way: Way, samples: int) -> Tensor:
    """The mask of half the samples."""
    own = way.samples.to(output.device).view([-1 if dim == way.dim else 1 for dim in range(output.dim())])
    return (own < (samples + 1) // 2).expand(output.shape)
