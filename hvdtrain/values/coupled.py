"""Layers whose gradient for one sample depends on the other samples of the batch."""

from __future__ import annotations

from torch import nn

from hvdtrain.core.errors import ConfigError


def refuse_coupled_layers(model: nn.Module) -> None:
    """Raises `ConfigError` for embeddings that divide each row's gradient by how often the batch has it.

    In a part of a batch a row has another count, so the parts' gradients do not add up to the batch's.
    """
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or not module.weight.requires_grad:
            continue
        if module.scale_grad_by_freq:
            raise ConfigError(
                "scale_grad_by_freq=True needs the whole batch in one pass: it counts the rows of that batch",
                f"{type(module).__name__} {name or 'as the model'}, with the batch in parts (ranks, accumulation or"
                " micro-batches)",
                "scale_grad_by_freq=False; or one process, accumulate=1 and micro_batches=1",
            )
