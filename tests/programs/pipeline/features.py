"""What other pipelines have: keyword arguments, outputs, whole losses, copies, gradients of inputs, activations
in the host's memory, models of other libraries. A line of JSON a check; references are plain PyTorch in float64.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import sys
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers as hf
from recorded_streams import CPU, Recorder, gpu
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hvdtrain.pipeline
from hvdtrain.core.errors import HvdtrainError
from hvdtrain.pipeline.run.runtime import Pipeline
from hvdtrain.pipeline.run.worker import StageCall
from hvdtrain.pipeline.trace.parted import inputs_first
from hvdtrain.pipeline.trace.segments import segments
from hvdtrain.pipeline.tuning.search_size import tune
from hvdtrain.pipeline.values.places import Places
from hvdtrain.values.nested import tensors_of

torch.set_default_dtype(torch.float64)
torch.set_num_threads(2)
BATCH, WIDTH, LENGTH, WORDS, PIECE = 7, 16, 6, 11, 3
MSE = nn.MSELoss()
Make = Callable[[], nn.Module]


def said(act: Callable[[], Any]) -> str:
    try:
        return f"nothing raised: {act()}"
    except HvdtrainError as error:
        return str(error)


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
    """Of transformers, as they are, against the whole model, by two schedules each: losses, gradients, outputs of their
    own class; and segments, which are no fewer than their layers."""
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
        "bert": (lambda: hf.BertForMaskedLM(hf.BertConfig(**sizes, **still)), (), tokens, labels),
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
    others = itertools.cycle([("1f1b", 2, 3), ("zb-h1", 2, 2), ("interleaved", 2, 3)])
    for name, (make, x, kwargs, y) in cases.items():
        torch.manual_seed(1)
        model = make().train()
        positional = x if isinstance(x, tuple) else (x,)
        wanted = model(*positional, **kwargs)
        loss = token_loss(wanted, y)
        loss.backward()
        whole = gradients(model)
        worst, counts = 0.0, []
        # 7: single samples, for which a model may decide otherwise
        for schedule, stages, pieces in (("gpipe", 4, 7), next(others)):
            model.zero_grad()
            pipe = split(model, x, stages, kwargs=kwargs, schedule=schedule, micro_batches=pieces)
            value, output = pipe.step(x, y, token_loss, kwargs=kwargs, outputs=True)
            assert type(output) is type(wanted) and not output.logits.requires_grad
            worst = max(
                worst,
                gap(gradients(model), whole),
                abs(value.item() - loss.item()),
                gap([output.logits], [wanted.logits]),
            )
            counts.append(len(pipe.segments))
        with torch.no_grad():
            worst = max(worst, gap([pipe(*positional, **kwargs).logits], [wanted.logits]))
        found[name] = {"difference": worst, "segments": min(counts)}
    cached = hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2 | {"use_cache": True}))
    return {"models": found, "cached": said(lambda: split(cached, ids))}


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
    found["otherwise"] = said(lambda: pipe.step(x.float(), x, MSE))
    words = torch.randn(BATCH, 2 * PIECE, WIDTH)
    for how in ("looped over", "counted", "unpacked"):
        pieces = split(nn.Sequential(nn.Linear(WIDTH, WIDTH), Pieces(how), nn.Linear(WIDTH, WIDTH)), words)
        with torch.no_grad():
            found[how] = [gap([pieces(words)], [pieces.module(words)])]
            found[how] += [said(partial(pieces, torch.randn(BATCH, length, WIDTH))) for length in (3 * PIECE, PIECE)]
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
    return {name: said(step) for name, step in found.items()}


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
        "blind": said(lambda: split(Keyed(), x, kwargs=kwargs)),
        "other_names": said(lambda: pipe.step(x, y, MSE, kwargs={"mask": mask})),
        "other_value": said(lambda: split(Keyed(), x, kwargs=kwargs | {"how": "none"}, chunk=chunk).step(
            x, y, MSE, kwargs=kwargs | {"how": "add"})),
        "bad_chunk": said(lambda: split(Keyed(), x, kwargs=kwargs, chunk={"masc": None})),
        "bad_part": said(lambda: split(Keyed(), x, kwargs=kwargs, chunk={"extra": {"tables": None}})),
        "bad_dimension": said(lambda: split(Keyed(), x, kwargs=kwargs, chunk={"mask": 1})),
    }  # fmt: skip


# -- losses of the whole batch, gradients of inputs, copies ------------------------------------------------------------
def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]).train()


def contrastive(output: Tensor, y: Tensor) -> Tensor:
    """Every sample against all others: no mean over samples."""
    return F.cross_entropy(output @ y.T, torch.arange(len(y)))


def whole_losses() -> dict[str, Any]:
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    model = net()
    loss = contrastive(model(x), y) * 0.5
    loss.backward()
    wanted, worst = gradients(model), 0.0
    for stages, remat, schedule in ((1, "all", "gpipe"), (2, "never", "1f1b"), (3, "except_last", "gpipe")):
        model.zero_grad()
        pipe = split(model, x, stages, remat=remat, schedule=schedule)
        received, outputs = pipe.step(x, y, contrastive, whole=True, factor=0.5, outputs=True)
        worst = max(
            worst, gap(gradients(model), wanted), abs(received.item() * 0.5 - loss.item()), gap([outputs], [model(x)])
        )
    return {
        "whole": worst,
        "parts": said(lambda: pipe.step(x, y, contrastive)),
        "weight": said(lambda: pipe.step(x, y, contrastive, whole=True, weight=len)),
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
    for stages, remat, schedule in ((1, "never", "1f1b"), (2, "never", "zb-h1"), (2, "all", "gpipe")):
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


# -- backward passes in two -------------------------------------------------------------------------------------------
class Twice(nn.Module):
    """One weight twice in a row, one beside itself, one that is computed, one that the input does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.beside, self.alone = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.tanh(self.row(torch.tanh(self.row(x)))) + self.frozen(x)
        y = self.beside(y) * self.beside(y.exp()) + self.normed(y)
        y = checkpoint(self.alone, y, use_reentrant=False) + torch.relu(y)
        return y, self.alone.weight * 2, x


class Counting(TorchDispatchMode):
    """How many matrix products there are."""

    products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func._schema.name in ("aten::mm", "aten::addmm")
        return func(*args, **kwargs or {})


def parted() -> dict[str, Any]:
    """Gradients of inputs first, those of weights later: the same, by as many products, hooks once each."""
    found: dict[str, Any] = {}
    x = torch.randn(BATCH, WIDTH)
    torch.manual_seed(6)
    attention = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True)
    cases: dict[str, tuple[nn.Module, Tensor]] = {
        "twice": (Twice(), x), "linear": (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)), x),
        "attention": (attention, torch.randn(BATCH, 4, WIDTH)), "gru": (nn.GRU(WIDTH, WIDTH), x[None]),
        "convolution": (nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Conv1d(3, 2, 3)),
                        torch.randn(BATCH, 2, WIDTH)),
    }  # fmt: skip
    for name, (module, value) in cases.items():
        runs, calls = [], [0]
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, calls=calls: calls.__setitem__(0, calls[0] + 1))
        for apart in (False, True):
            module.zero_grad()
            leaf, calls[0] = value.clone().requires_grad_(), 0
            roots = [root for root in tensors_of(module(leaf)) if root.requires_grad]
            given = [torch.ones_like(root) for root in roots]
            early = 0
            with Counting() as counted:
                if apart:
                    later = inputs_first(roots, given, [leaf])
                    early, first = calls[0], leaf.grad.clone()
                    for act in reversed(later):
                        act()
                else:
                    torch.autograd.backward(roots, given)
                    first = leaf.grad
            runs.append([first, leaf.grad, *gradients(module)])
            found.setdefault(name, {}).update({
                f"products {apart}": counted.products, f"calls {apart}": calls[0], "early": early,
            })  # fmt: skip
        found[name]["gap"] = gap(*runs)
    return found


def hooks() -> dict[str, Any]:
    """Gradient hooks see when a stage's weights have all they get in a step, also of weights that are not parted."""
    seen: dict[str, list[bool]] = {}
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Twin(), nn.Linear(WIDTH, WIDTH)).train()
    pipe = split(model, torch.randn(BATCH, WIDTH), 2, balance=[2, 2], modules=list(model), schedule="zb-h1")
    pipe.proofs = False
    for group, parameters in enumerate(pipe.owned_parameters()):
        for number, parameter in enumerate(parameters):
            its = seen.setdefault(f"{group} {number}", [])
            parameter.register_post_accumulate_grad_hook(lambda _, g=group, its=its: its.append(pipe.finishing(g)))
    pipe.step(torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH), MSE)
    return {"seen": seen}


class Twin(nn.Module):
    """A weight twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.weight


# -- activations in the host's memory ----------------------------------------------------------------------------------
RUN = StageCall.run


def offload() -> dict[str, Any]:
    """On GPUs that are recorded: in order, exact, and less that stays on the device than without."""
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    model = net()
    MSE(model(x), y).backward()
    wanted, worst, problems, kept, crossed = gradients(model), 0.0, [], {}, {}
    for off, remat, data in itertools.product((True, False), ("never", "except_last"), (CPU, gpu(3))):
        model.zero_grad()
        pipe = split(model, x, 2, offload=off, remat=remat, schedule="gpipe", micro_batches=4)
        pipe.proofs = False
        pipe.close()
        recorder = Recorder()
        most = [0]

        def recorded(call: StageCall, recorder: Recorder = recorder) -> Any:
            with recorder:
                return RUN(call)

        def dispatch(recorder: Recorder, *given: Any, most: list[int] = most) -> Any:
            outputs = DISPATCH(recorder, *given)
            alive = [one for one in recorder.memory.values() if not one.alive.expired()]
            most[0] = max(most[0], sum(one.device.type == "cuda" for one in alive))
            return outputs

        with (
            recorder.patched(), mock.patch.object(StageCall, "run", recorded),
            mock.patch.object(Recorder, "__torch_dispatch__", dispatch),
        ):  # fmt: skip
            pipe._places = Places([gpu(0), gpu(1)])
            gc.collect()
            pipe.step(recorder.put(x.clone(), data, "x"), recorder.put(y.clone(), data, "y"), MSE)
        worst = max(worst, gap(gradients(model), wanted))
        problems += recorder.problems
        kept[f"{off} {remat}"] = most[0]
        crossed[f"{off} {remat}"] = recorder.to_host
    return {"difference": worst, "problems": problems[:3], "kept": kept, "to_host": crossed}


DISPATCH = Recorder.__torch_dispatch__

if __name__ == "__main__":
    for check in (models, decisions, keywords, whole_losses, input_gradients, copies, parted, hooks, offload):
        if len(sys.argv) == 1 or check.__name__ in sys.argv:
            result = check()
            line = result if isinstance(result, dict) else {"difference": result}
            print(json.dumps({"check": check.__name__, **line}), flush=True)
