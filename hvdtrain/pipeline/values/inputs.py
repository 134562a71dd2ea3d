"""What a step is given: arguments cut into micro-batches, and gradients for those that want some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.pipeline.values.microbatch import pieces_of, unmarked
from hvdtrain.values.nested import map_tensors, tensors_of


class Inputs:
    """The arguments of a batch.

    Args:
        arguments: of the model, those without samples as `Whole`.
        sizes: samples of each micro-batch.

    Attributes:
        pieces: arguments of each micro-batch; tensors that want gradients are leaves of their own.
        gradients: of the tensors of each piece, in order; filled by the first stage.
    """

    def __init__(self, arguments: tuple[Any, ...], sizes: Sequence[int]) -> None:
        self._tensors = tensors_of(unmarked(arguments))
        with torch.no_grad():
            self.pieces = pieces_of(arguments, sizes)
        self.gradients: list[list[Tensor | None]] = [[] for _ in sizes]
        self.wanted = any(tensor.requires_grad for tensor in self._tensors)
        if self.wanted:
            self.pieces = [self._leaves(piece) for piece in self.pieces]

    def _leaves(self, piece: Any) -> Any:
        wants = iter([tensor.requires_grad for tensor in self._tensors])
        return map_tensors(lambda tensor: tensor.detach().requires_grad_(next(wants)), piece)

    def return_gradients(self) -> None:
        """Adds them to the arguments' own, or goes on with the backward pass of what has made the arguments."""
        pieces = [tensors_of(piece) for piece in self.pieces] if self.wanted else []
        found: list[tuple[Tensor, Tensor]] = []
        for index, tensor in enumerate(self._tensors):
            parts = [one[index] if one else None for one in self.gradients]
            if not tensor.requires_grad or not any(part is not None for part in parts):
                continue
            parts = [None if part is None else part.to(tensor.device) for part in parts]
            if pieces[0][index].shape == tensor.shape:  # it went to every micro-batch whole
                found.append((tensor, torch.stack([part for part in parts if part is not None]).sum(0)))
                continue
            filled = [
                torch.zeros_like(piece[index], device=tensor.device) if part is None else part
                for part, piece in zip(parts, pieces, strict=True)
            ]
            found.append((tensor, torch.cat(filled)))
        if found:
            torch.autograd.backward([tensor for tensor, _ in found], [gradient for _, gradient in found])
