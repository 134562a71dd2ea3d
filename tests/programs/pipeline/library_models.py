"""Small models of the shapes that other libraries have: keyword arguments, ModelOutput, tied weights, masks that are
made of `arange`, rotary tables that cross cuts. `transformers` itself is not needed."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, WORDS, LENGTH = 16, 2, 11, 6


class ModelOutput(OrderedDict):
    """As in transformers: a data class and a dictionary of what is not None; read by name, key or number."""

    def __init_subclass__(cls) -> None:
        dataclass(cls)

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]
            if getattr(self, one.name) is not None:
                super().__setitem__(one.name, getattr(self, one.name))

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]


class BaseOutput(ModelOutput):
    last_hidden_state: Any = None
    hidden_states: Any = None


class HeadOutput(ModelOutput):
    logits: Any = None
    hidden_states: Any = None


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        batch, length, _ = x.size()
        parts = self.qkv(x).split(WIDTH, dim=2)
        q, k, v = (part.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2) for part in parts)
        if rotary is not None:
            cos, sin = rotary
            q, k = (one * cos + turned(one) * sin for one in (q, k))
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        if mask is not None:
            scores = scores + mask
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, WIDTH))


def turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class Layer(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.attention, self.first, self.second = Attention(), norm(WIDTH), norm(WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.0)

    def forward(self, x: Tensor, mask: Tensor | None = None, rotary: Any = None) -> tuple[Tensor]:
        x = x + self.drop(self.attention(self.first(x), mask, rotary=rotary))
        return (x + self.down(F.gelu(self.up(self.second(x)))),)


class BertModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.types = nn.Embedding(2, WIDTH)
        self.register_buffer("position_ids", torch.arange(LENGTH).expand((1, -1)), persistent=False)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None, output_hidden_states: bool = False,
    ) -> BaseOutput:  # fmt: skip
        if input_ids is None:
            raise ValueError("input_ids")
        length = input_ids.size()[1]
        if attention_mask is None:
            attention_mask = torch.ones(input_ids.shape, device=input_ids.device)
        if token_type_ids is None:
            token_type_ids = torch.zeros(input_ids.shape, dtype=torch.long, device=input_ids.device)
        x = self.words(input_ids) + self.places(self.position_ids[:, :length]) + self.types(token_type_ids)
        mask = (1.0 - attention_mask[:, None, None, :].to(dtype=self.words.weight.dtype)) * -1e9
        seen = (x,) if output_hidden_states else None
        for layer in self.layers:
            x = layer(x, mask)[0]
            seen = (*seen, x) if seen is not None else None
        return BaseOutput(last_hidden_state=x, hidden_states=seen)


class BertForMaskedLM(nn.Module):
    """The decoder's weight is that of the words."""

    def __init__(self) -> None:
        super().__init__()
        self.bert, self.decoder = BertModel(), nn.Linear(WIDTH, WORDS)
        self.decoder.weight = self.bert.words.weight

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> HeadOutput:
        outputs = self.bert(input_ids, **kwargs)
        return HeadOutput(logits=self.decoder(outputs[0]), hidden_states=outputs.hidden_states)


class GPT2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h, self.norm = nn.ModuleList(Layer() for _ in range(3)), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(
        self, input_ids: Tensor, *, attention_mask: Tensor | None = None, use_cache: bool = False
    ) -> HeadOutput:
        length = input_ids.shape[-1]
        places = torch.arange(0, length, dtype=torch.long, device=input_ids.device).unsqueeze(0)
        x = self.wte(input_ids) + self.wpe(places)
        rows = torch.arange(length, device=input_ids.device)
        mask = torch.where(rows[:, None] >= rows[None, :], 0.0, -1e9)[None, None]
        if attention_mask is not None:
            mask = mask + (1.0 - attention_mask[:, None, None, :]) * -1e9
        for block in self.h:
            x = block(x, mask=mask)[0]
        return HeadOutput(logits=self.lm_head(self.norm(x)))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(WORDS, WIDTH), RMSNorm(WIDTH)
        self.layers = nn.ModuleList(Layer(RMSNorm) for _ in range(3))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("inv_freq", 1.0 / 100 ** (torch.arange(0, 8, 2) / 8.0), persistent=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> HeadOutput:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        angles = position_ids[:, :, None].to(self.inv_freq.dtype) * self.inv_freq[None, None, :]
        both = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        x, rotary = self.embed_tokens(input_ids), (both.cos(), both.sin())
        mask = torch.full((input_ids.shape[1], input_ids.shape[1]), -1e9, device=x.device).triu(1)
        for layer in self.layers:
            x = layer(x, mask=mask, rotary=rotary)[0]
        return HeadOutput(logits=self.lm_head(self.norm(x)))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.cls = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.places, self.layers = nn.Parameter(torch.randn(1, 5, WIDTH)), nn.ModuleList(Layer() for _ in range(3))
        self.classifier = nn.Linear(WIDTH, WORDS)

    def forward(self, pixel_values: Tensor | None = None, interpolate: bool = False) -> HeadOutput:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1) + self.places
        for layer in self.layers:
            x = layer(x)[0]
        return HeadOutput(logits=self.classifier(x[:, 0]))
