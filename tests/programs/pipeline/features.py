"""What other pipelines have: keyword arguments, outputs, whole losses, copies, gradients of inputs, models of other
libraries. A line of JSON a check; references are plain PyTorch in float64.
"""

from __future__ import annotations

import copy
import json
import sys
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers as hf
from outcome import outcome
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import hvdtrain.pipeline
from hvdtrain.pipeline.run.runtime import Pipeline
from hvdtrain.pipeline.trace.segments import segments
from hvdtrain.pipeline.tuning.search_size import tune

torch.set_default_dtype(torch.float64)
torch.set_num_threads(2)
BATCH, WIDTH, LENGTH, WORDS, PIECE = 7, 16, 6, 11, 3
MSE = nn.MSELoss()
Make = Callable[[], nn.Module]


def split(model: nn.Module, x: Any, stages: int = 2, **options: Any) -> Pipeline:
    options = {"micro_batches": 3, "balance": "memory"} | options
    return hvdtrain.pipeline.split(model.train(), x, ["cpu"] * stages, **options)


def gap(one: Any, other: Any) -> float:
    return max((float((a - b).abs().max()) for a, b in zip(one, other, strict=True)), default=0.0)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


# -- models of other libraries -----------------------------------------------------------------------------------------
def token_loss(output: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, -2), y.flatten())


def models() -> dict[str, Any]:
    """Of transformers, as they are, against the whole model: losses, gradients, outputs of their own class; and
    segments, which are no fewer than their layers."""
    ids, labels = torch.randint(1, WORDS, (BATCH, LENGTH)), torch.randint(WORDS, (BATCH, LENGTH))
    mask = (torch.arange(LENGTH)[None] < torch.randint(2, LENGTH + 1, (BATCH, 1))).long()
    sizes = {
        "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2,
        "intermediate_size": 2 * WIDTH, "max_position_embeddings": 8, "num_labels": WORDS,
    }  # fmt: skip
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    gpt2 = {"n_layer": 3, "n_head": 2, "n_embd": WIDTH, "vocab_size": WORDS, "n_positions": 8, "use_cache": False}
    gpt2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    t5 = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 8, "d_ff": WIDTH, "num_layers": 2, "num_heads": 2}
    t5 |= {"dropout_rate": 0.0, "use_cache": False}
    tokens = {"input_ids": ids, "attention_mask": mask}
    pictures = {"pixel_values": torch.randn(BATCH, 3, 8, 8)}
    cases: dict[str, tuple[Make, Any, Mapping[str, Any], Tensor]] = {
        "gpt2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)), ids, {"attention_mask": mask}, labels),
        "llama": (
            lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=1, use_cache=False)),
            (), {"input_ids": ids}, labels,
        ),
        "vit": (
            lambda: hf.ViTForImageClassification(hf.ViTConfig(**sizes, **still, image_size=8, patch_size=4)),
            (), pictures, labels[:, 0],
        ),
        "t5": (
            lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5)),
            (), tokens | {"decoder_input_ids": ids.roll(1, 1)}, labels,
        ),
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name, (make, x, kwargs, y) in cases.items():
        torch.manual_seed(1)
        model = make().train()
        positional = x if isinstance(x, tuple) else (x,)
        wanted = model(*positional, **kwargs)
        loss = token_loss(wanted, y)
        loss.backward()
        whole = gradients(model)
        model.zero_grad()
        # single samples, for which a model may decide otherwise
        pipe = split(model, x, 4, kwargs=kwargs, micro_batches=BATCH)
        value, output = pipe.step(x, y, token_loss, kwargs=kwargs, outputs=True)
        assert type(output) is type(wanted) and not output.logits.requires_grad
        worst = max(
            gap(gradients(model), whole), abs(value.item() - loss.item()), gap([output.logits], [wanted.logits])
        )
        pipe.micro_batches = 3
        with torch.no_grad():
            worst = max(worst, gap([pipe(*positional, **kwargs).logits], [wanted.logits]))
        found[name] = {"difference": worst, "segments": len(pipe.segments)}
    cached = hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2 | {"use_cache": True}))
    return {"models": found, "cached": outcome(lambda: split(cached, ids))}


class Choosing(nn.Module):
    """Asks for forms (which a trace may fix), for numbers, and for how many samples there are (which it may not)."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by, self.linear = by, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.half = torch.tensor(0.5)  # no buffer: what is drawn with it needs no stand-in

    def forward(self, x: Tensor) -> Tensor:
        asked = {
            "form": lambda: x.ndim == 2 and x.dtype == torch.float64 and len(x.shape) == 2,
            "length": lambda: x.shape[1] > 4,
            "numbers": lambda: x.sum().item() > 0, "list": lambda: len(x.tolist()) > 4,
            "count": lambda: len(x[x > 0].shape) + x.nonzero().shape[0] > 3, "samples": lambda: x.shape[0] > 2,
            "len": lambda: len(x) > 2,
            "numpy": lambda: np.random.rand() > 2, "drawn": lambda: bool(torch.bernoulli(self.half) > 2),
        }  # fmt: skip
        return self.linear(x) if asked[self.by]() else self.linear(x) * 2


class Pieces(nn.Module):
    """Words [batch, S, W] in pieces, as many as S makes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        pieces = self.last(self.first(x)).split(PIECE, 1)
        if self.how == "unpacked":
            first, last = pieces
            return first + last
        return sum(piece.tanh() for piece in pieces) if self.how == "looped over" else pieces[0] / len(pieces)


def decisions() -> dict[str, Any]:
    x = torch.randn(BATCH, WIDTH)
    found: dict[str, Any] = {}
    for by in ("form", "length", "numbers", "list", "count", "samples", "len", "numpy", "drawn"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Choosing(by), nn.Linear(WIDTH, WIDTH))
        found[by] = "1" not in segments(model, (x,))[0].chain.program.leaves
    pipe = split(nn.Sequential(Choosing("form"), nn.Linear(WIDTH, WIDTH)), x)
    found["otherwise"] = outcome(lambda: pipe.step(x.float(), x, MSE))
    words = torch.randn(BATCH, 2 * PIECE, WIDTH)
    for how in ("looped over", "counted", "unpacked"):
        pieces = split(nn.Sequential(nn.Linear(WIDTH, WIDTH), Pieces(how), nn.Linear(WIDTH, WIDTH)), words)
        with torch.no_grad():
            found[how] = [gap([pieces(words)], [pieces.module(words)])]
            found[how] += [outcome(partial(pieces, torch.randn(BATCH, length, WIDTH))) for length in (3 * PIECE, PIECE)]
    return found


# -- keyword arguments, chunks -----------------------------------------------------------------------------------------
class Keyed(nn.Module):
    """x [batch, S, W], a mask [S, S], nested values of which one (in a deque) has samples, a number and a word."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor, extra: dict[str, Any], how: str = "add", times: int = 1) -> Tensor:
        x = self.a(x) * times
        x = self.b((x @ x.transpose(1, 2) + mask).softmax(-1) @ x)
        return x + extra["shift"][0] + extra["table"][0] if how == "add" else x


class Asking(nn.Module):
    """Whether there is a mask; what is in it is for others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None, extra: dict[str, Any]) -> Tensor:
        x = self.a(x)
        return self.b(x if mask is None and extra["mask"] is None else x * 2)


def none_or_not() -> dict[str, Any]:
    x = torch.randn(BATCH, WIDTH)
    there, no, inside = {"mask": x, "extra": {"mask": 1}}, {"mask": None}, {"extra": {"mask": None}}
    pipe, without = split(Asking(), x, kwargs=there), split(Asking(), x, kwargs=there | no)
    found = {
        "none_later": lambda: pipe.step(x, x, MSE, kwargs=there | no),
        "none_within": lambda: pipe.step(x, x, MSE, kwargs=there | inside),
        "none_called": lambda: pipe.eval()(x, **there | no),
        "given_later": lambda: without.step(x, x, MSE, kwargs=there),
    }
    return {name: outcome(step) for name, step in found.items()}


def keywords() -> dict[str, Any]:
    torch.manual_seed(2)
    x, mask = torch.randn(BATCH, BATCH, WIDTH), torch.randn(BATCH, BATCH)
    kwargs = {
        "mask": mask,
        "extra": {"shift": deque([torch.randn(BATCH, 1, 1)]), "table": [torch.randn(BATCH, WIDTH)]},
        "times": 2,
    }
    y = torch.randn(BATCH, BATCH, WIDTH)
    model = Keyed()
    MSE(model(x, **kwargs), y).backward()
    whole, found = gradients(model), {}
    chunk = {"mask": None, "extra": {"table": None}}
    for name, how in {"by_name": chunk, "in_order": [0, None, {"table": [None]}, 0]}.items():
        model.zero_grad()
        pipe = split(model, x, kwargs=kwargs, chunk=how)
        pipe.step(x, y, MSE, kwargs=kwargs)
        found[name] = gap(gradients(model), whole)
    tuned = tune(pipe, x, y, MSE, kwargs=kwargs, candidates=[1, 2], budget_s=0.01)
    return found | none_or_not() | {
        "tuned": [tuned.best.micro_batches, len(tuned.unsplit_s)],
        "blind": outcome(lambda: split(Keyed(), x, kwargs=kwargs)),
        "other_names": outcome(lambda: pipe.step(x, y, MSE, kwargs={"mask": mask})),
        "other_value": outcome(lambda: split(Keyed(), x, kwargs=kwargs | {"how": "none"}, chunk=chunk).step(
            x, y, MSE, kwargs=kwargs | {"how": "add"})),
        "bad_chunk": outcome(lambda: split(Keyed(), x, kwargs=kwargs, chunk={"masc": None})),
        "bad_part": outcome(lambda: split(Keyed(), x, kwargs=kwargs, chunk={"extra": {"tables": None}})),
        "bad_dimension": outcome(lambda: split(Keyed(), x, kwargs=kwargs, chunk={"mask": 1})),
    }  # fmt: skip


# -- losses of the whole batch, gradients of inputs, copies ------------------------------------------------------------
def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]).train()


def contrastive(output: Tensor, y: Tensor) -> Tensor:
    """Every sample against all others: no mean over samples."""
    return F.cross_entropy(output @ y.T, torch.arange(len(y)))


def whole_losses() -> dict[str, str]:
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    pipe = split(net(), x)
    return {
        "parts": outcome(lambda: pipe.step(x, y, contrastive)),
        "weight": outcome(lambda: pipe.step(x, y, contrastive, whole=True, weight=len)),
    }


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x + prompt))) * prompt.mean()


def input_gradients() -> float:
    """Of leaves and of what an encoder before the pipeline has made; of arguments with and without samples."""
    worst = 0.0
    for stages, remat, schedule in ((1, "never", "1f1b"), (2, "never", "1f1b"), (2, "all", "gpipe")):
        torch.manual_seed(4)
        model, before = Two().train(), nn.Linear(WIDTH, WIDTH)
        data, prompt, y = (
            torch.randn(BATCH, WIDTH),
            torch.randn(1, WIDTH, requires_grad=True),
            torch.randn(BATCH, WIDTH),
        )
        leaf = torch.randn(BATCH, WIDTH, requires_grad=True)
        everything = [*before.parameters(), prompt, leaf]
        found = []
        pipe = split(copy.deepcopy(model), (data, prompt.detach()), stages, remat=remat, schedule=schedule)
        for split_up in (False, True):
            for tensor in everything:
                tensor.grad = None
            for x in (before(data), leaf):
                if split_up:
                    pipe.step((x, prompt), y, MSE)
                else:
                    MSE(model(x, prompt), y).backward()
            found.append([tensor.grad.clone() for tensor in everything])
        worst = max(worst, gap(*found), gap(gradients(model), gradients(pipe.module)))
    return worst


def copies() -> dict[str, Any]:
    x, y, pipe = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH), split(net(), torch.randn(BATCH, WIDTH))
    average = AveragedModel(pipe, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    before = [p.detach().clone() for p in pipe.parameters()]
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    average.update_parameters(pipe)
    pipe.step(x, y, MSE)
    optimizer.step()
    average.update_parameters(pipe)
    wanted = [(a + b) / 2 for a, b in zip(before, pipe.parameters(), strict=True)]
    twin = copy.deepcopy(pipe)
    return {
        "average": gap(average.module.parameters(), wanted),
        "same_class": type(twin) is nn.Sequential and twin is not pipe.module,
        "runs": gap([twin(x)], [pipe.module(x)]),
        "own": twin[0][0].weight is not pipe.module[0][0].weight,
    }


if __name__ == "__main__":
    for check in (models, decisions, keywords, whole_losses, input_gradients, copies):
        if len(sys.argv) == 1 or check.__name__ in sys.argv:
            result = check()
            line = result if isinstance(result, dict) else {"difference": result}
            print(json.dumps({"check": check.__name__, **line}), flush=True)
