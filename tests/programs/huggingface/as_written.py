"""Hugging Face trainings as users write them, on ranks: weights and logs of one process of plain transformers."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "torch"))

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from cases import folder, gap, refused, shown
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain.core.errors import ConfigError, ReplicaError
from hvdtrain.integrations.huggingface import Trainer, TrainingArguments, deal

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_default_dtype(torch.float64)
WORDS, KINDS, TRAIN, VALID, BATCH = 40, 3, 37, 13, 12  # 37 = 3 x 12 + 1: all but one rank have no sample in the last
MADE = torch.Generator().manual_seed(0)
TINY = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"intermediate_size": 16, "max_position_embeddings": 16}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LAUNCHED = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
Samples = list[dict[str, Any]]


def sentences(count: int, label: Callable[[Tensor], Any]) -> Samples:
    """Sentences of 3 to 9 words, each with its label."""
    lengths = torch.randint(3, 10, (count,), generator=MADE).tolist()
    words = [torch.randint(1, WORDS, (length,), generator=MADE) for length in lengths]
    return [{"input_ids": its, "labels": label(its)} for its in words]


def masked(words: Tensor) -> Tensor:
    return torch.where(torch.rand(len(words), generator=MADE) < 0.5, -100, words)


def tags(words: Tensor) -> Tensor:
    return torch.where(torch.rand(len(words), generator=MADE) < 0.3, -100, words % KINDS)


def padded(samples: Samples) -> dict[str, Tensor]:
    """Pads sentences to the longest of the batch."""

    def pad(rows: list[Any], value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    words, labels = [its["input_ids"] for its in samples], [torch.as_tensor(its["labels"]) for its in samples]
    made = {"input_ids": pad(words, 0), "attention_mask": pad([torch.ones_like(its) for its in words], 0)}
    return made | {"labels": pad(labels, -100) if labels[0].dim() else torch.stack(labels)}


SORTED = sentences(TRAIN, lambda words: int(words[0]) % KINDS)
SORTED_VALID = sentences(VALID, lambda words: int(words[0]) % KINDS)
TEXT, TEXT_VALID = sentences(TRAIN, masked), sentences(VALID, masked)
TAGGED = sentences(TRAIN, tags)
PIXELS = [{"pixel_values": torch.randn(3, 8, 8, generator=MADE), "labels": i % KINDS} for i in range(TRAIN)]


def bert(kind: Any = transformers.BertForSequenceClassification) -> Any:
    torch.manual_seed(3)
    return kind(transformers.BertConfig(**TINY, **STILL, num_labels=KINDS))


def tagger() -> Any:
    return bert(transformers.BertForTokenClassification)


def gpt2() -> Any:
    torch.manual_seed(3)
    sizes = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout))


def vit() -> Any:
    torch.manual_seed(3)
    sizes = {name: size for name, size in TINY.items() if "vocab" not in name and "position" not in name}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, **STILL, image_size=8, patch_size=4, num_labels=KINDS)
    )


def t5() -> Any:
    torch.manual_seed(3)
    sizes = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    )


class Plain(nn.Module):
    """A user's own module, which returns a loss and outputs."""

    def __init__(self, loss_of: Callable[..., Tensor] = F.cross_entropy) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.head, self.loss_of = nn.Embedding(WORDS, 8), nn.Linear(8, KINDS), loss_of
        self.unused = nn.Linear(2, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        outputs = self.head(self.words(input_ids))
        if labels.dim() == 1:
            outputs = (outputs * attention_mask[..., None]).sum(1)
        return self.loss_of(outputs.reshape(-1, KINDS), labels.reshape(-1)), outputs


def arguments(
    world: hvdtrain.World | None, out: Path, batch: int = BATCH, kind: Any = None, **options: Any
) -> Any:  # fmt: skip
    given: dict[str, Any] = {
        "output_dir": str(out),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "log_level_replica": "error",
    }
    given |= {"save_strategy": "no", "logging_steps": 1, "num_train_epochs": 1, "optim": "sgd", "learning_rate": 0.1}
    size = world.size if world else 1
    given |= {"per_device_train_batch_size": batch // size, "per_device_eval_batch_size": BATCH // size}
    if world:
        return (kind or TrainingArguments)(**given | options)
    hidden = {name: os.environ.pop(name) for name in LAUNCHED if name in os.environ}  # else it would join the ranks
    try:
        return (kind or transformers.TrainingArguments)(**given | options)
    finally:
        os.environ.update(hidden)


def trainer(
    world: hvdtrain.World | None, out: Path, model: Any, train: Any = None, *, mixin: Any = None, valid: Any = None,
    data_collator: Any = padded, **options: Any,
) -> Any:  # fmt: skip
    """Returns a trainer, ours or theirs, with the methods of `mixin` over it."""
    names = ("compute_metrics", "compute_loss_func", "callbacks", "preprocess_logits_for_metrics", "optimizers")
    parts = {name: options.pop(name) for name in names if name in options}
    base = Trainer if world else transformers.Trainer
    made = type("Mine", (mixin, base), {}) if mixin else base
    args = arguments(world, out, **options)
    made = made(model, args, data_collator, train, valid, **parts)
    made.remove_callback(transformers.PrinterCallback)
    return made


def history(found: Any) -> list[dict[str, Any]]:
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "step", "epoch", "train_loss")
    return [{name: its[name] for name in names if name in its} for its in found.state.log_history]


def logs_gap(found: Any, wanted: Any) -> float:
    pairs = list(zip(history(found), history(wanted), strict=True))
    assert pairs and all(one.keys() == other.keys() for one, other in pairs), pairs
    return max(abs(one[name] - other[name]) for one, other in pairs for name in one)


def compare(
    world: hvdtrain.World, row: str, make: Callable[[], Any], train: Any, limit: float = 1e-10, **options: Any
) -> Any:
    """Trains on ranks and, on rank 0, in one process with the batch of all ranks; shows the largest difference."""

    def gap_to_one_process() -> float:
        theirs = trainer(None, own, make(), train, **options)
        theirs.train()
        return max(gap(ours.model, theirs.model), logs_gap(ours, theirs))

    with folder(world, own=True) as own, folder(world, own=False) as shared:
        ours = trainer(world, shared, make(), train, **options)
        ours.train()
        largest = world.on_main(gap_to_one_process)
    assert largest < limit, (largest, history(ours))
    world.agree("what was logged, and the weights", [history(ours), hvt.fingerprint(ours.model)])
    shown(row, largest)
    return ours


def accuracy(found: Any) -> dict[str, float]:
    outputs = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    known = found.label_ids != -100
    return {"accuracy": float((outputs.argmax(-1) == found.label_ids)[known].mean()), "count": float(known.sum())}


# -- losses --------------------------------------------------------------------------------------------------------
def case_classification_with_an_uneven_end(world: hvdtrain.World) -> None:
    options: dict[str, Any] = {"valid": SORTED_VALID, "compute_metrics": accuracy, "eval_strategy": "epoch"}
    options["num_train_epochs"] = 2
    ours = compare(world, "H1a", bert, SORTED, **options)
    assert ours.args.world_size == world.size and ours.is_world_process_zero() == world.is_main
    assert ours.accelerator.num_processes == 1
    world.agree("floating point operations", ours.state.total_flos)
    compare(world, "H1b", bert, SORTED, gradient_accumulation_steps=2, optim="adamw_torch", **options)


def case_weights_that_differ_at_first(world: hvdtrain.World) -> None:
    with folder(world, own=False) as shared:
        wanted, model = bert(), bert()
        with torch.no_grad():
            model.classifier.weight += world.rank
        found = trainer(world, shared, model, SORTED, valid=SORTED_VALID)
        world.agree("the loss of an evaluation", found.evaluate()["eval_loss"])
        assert gap(model, wanted) == 0
        with torch.no_grad():
            model.classifier.weight += world.rank
        found.train()


def case_token_losses_with_accumulation(world: hvdtrain.World) -> None:
    options: dict[str, Any] = {"valid": TEXT_VALID, "eval_strategy": "epoch", "num_train_epochs": 2}
    compare(world, "H2a", gpt2, TEXT, gradient_accumulation_steps=3, max_grad_norm=0.1, **options)
    compare(world, "H2c", gpt2, TEXT, batch=world.size, max_steps=3)


def case_losses_that_ignore_the_number_of_items(world: hvdtrain.World) -> None:
    options: dict[str, Any] = {"valid": TEXT_VALID, "eval_strategy": "epoch", "compute_metrics": accuracy}
    compare(world, "H3a", lambda: bert(transformers.BertForMaskedLM), TEXT, gradient_accumulation_steps=2, **options)


def case_losses_of_the_users_own(world: hvdtrain.World) -> None:
    class Mine:
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = F.cross_entropy(outputs.logits.reshape(-1, KINDS), labels.reshape(-1)) + outputs.logits.sum() * 0
            return (loss, outputs) if return_outputs else loss

    def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        total = F.cross_entropy(outputs.logits.reshape(-1, KINDS), labels.reshape(-1), reduction="sum")
        return total / (num_items_in_batch if num_items_in_batch is not None else (labels != -100).sum())

    options: dict[str, Any] = {"valid": SORTED_VALID, "eval_strategy": "epoch"}
    compare(world, "H4a", bert, SORTED, mixin=Mine, **options)
    compare(world, "H4b", tagger, TAGGED, mixin=Mine)
    compare(world, "H4c", tagger, TAGGED, compute_loss_func=summed, gradient_accumulation_steps=2)
    compare(world, "H4f", bert, SORTED, 1e-5, label_smoothing_factor=0.1)


def case_rare_labels(world: hvdtrain.World) -> None:
    """The third batch alone, which no schedule of trials tries, has fewer labels than samples."""
    rare = [row | {"labels": -100} if at in (27, 29) else row for at, row in enumerate(SORTED)]

    def over_samples(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels, reduction="none").mean()

    options: dict[str, Any] = {"train_sampling_strategy": "sequential"}
    compare(world, "H4g", lambda: Plain(over_samples), rare, **options)
    compare(world, "H4i", Plain, rare, **options)
    compare(world, "H4h", Plain, TAGGED)


def case_images(world: hvdtrain.World) -> None:
    compare(world, "H5a", vit, PIXELS, data_collator=None, dataloader_drop_last=True, dataloader_num_workers=1)

    def resnet() -> Any:
        torch.manual_seed(3)
        sizes = {"embedding_size": 8, "hidden_sizes": [8], "depths": [1], "num_labels": KINDS}
        return transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes, layer_type="basic"))

    with folder(world, own=False) as shared:
        found = trainer(world, shared, resnet(), PIXELS, data_collator=None)
        found.train()
    world.agree("the model and its running statistics", [
        hvt.fingerprint(nn.ParameterList(found.model.parameters())),
        [buffer.tolist() for name, buffer in found.model.named_buffers() if "running" in name],
    ])  # fmt: skip


def case_frozen_and_unused_parameters(world: hvdtrain.World) -> None:
    def frozen() -> Any:
        made = Plain()
        made.words.requires_grad_(False)
        return made

    options: dict[str, Any] = {"optim": "adamw_torch", "eval_strategy": "steps", "eval_steps": 3, "num_train_epochs": 2}
    ours = compare(world, "H6", frozen, SORTED, valid=SORTED_VALID, gradient_accumulation_steps=2, **options)
    assert torch.equal(ours.model.words.weight, frozen().words.weight)


# -- decisions -----------------------------------------------------------------------------------------------------
def case_early_stopping_and_the_best_checkpoint(world: hvdtrain.World) -> None:
    options: dict[str, Any] = {"valid": SORTED_VALID, "num_train_epochs": 3, "learning_rate": 2.0}
    options |= {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options |= {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}}
    options |= {"load_best_model_at_end": True, "save_total_limit": 1}
    stopping = [transformers.EarlyStoppingCallback(early_stopping_patience=2)]
    ours = compare(world, "H7a", bert, SORTED, callbacks=stopping, **options)
    losses = [its["eval_loss"] for its in ours.state.log_history if "eval_loss" in its]
    assert ours.state.best_metric == min(losses) != losses[-1] and ours.lr_scheduler.get_last_lr()[0] < 2.0
    assert ours.state.global_step < 12, "it has stopped early"
    assert abs(ours.evaluate()["eval_loss"] - min(losses)) < 1e-10, "with the best weights"


def case_resumed_from_a_checkpoint(world: hvdtrain.World) -> None:
    options: dict[str, Any] = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}
    options["gradient_accumulation_steps"] = 2
    unsaved = options | {"save_strategy": "no"}
    with folder(world, own=False) as shared, folder(world, own=True) as own:
        first = trainer(world, shared, gpt2(), TEXT, **options)
        first.train()
        again = {}
        for step in (2, 3):  # after an epoch, and within the next
            again[step] = trainer(world, own, gpt2_of_other_weights(), TEXT, **unsaved)
            again[step].train(resume_from_checkpoint=f"{shared}/checkpoint-{step}")
        last = trainer(world, shared, gpt2(), TEXT, **options | {"num_train_epochs": 3})
        last.train(resume_from_checkpoint=True)
        assert (first.state.global_step, last.state.global_step) == (4, 6)

        def gap_to_one_process() -> float:
            whole, alone = (trainer(None, own, make(), TEXT, **unsaved) for make in (gpt2, gpt2_of_other_weights))
            whole.train()
            alone.train(resume_from_checkpoint=f"{shared}/checkpoint-3")
            return max(gap(its.model, whole.model) for its in (first, *again.values(), alone))

        largest = world.on_main(gap_to_one_process)
    assert largest < 1e-10, largest
    shown("H8", largest)


def gpt2_of_other_weights() -> Any:
    made = gpt2()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1)
    return made


def case_predictions_in_order(world: hvdtrain.World) -> None:
    with folder(world, own=True) as own:
        seen: list[Any] = []

        def noted(found: Any) -> dict[str, float]:
            seen.append((found.inputs, found.losses))
            return accuracy(found)

        options: dict[str, Any] = {"compute_metrics": noted, "include_for_metrics": ["inputs", "loss"]}
        ours, theirs = (trainer(ranks, own, tagger(), None, **options) for ranks in (world, None))
        found, wanted = ours.predict(TAGGED), theirs.predict(TAGGED)
        known = wanted.label_ids != -100
        largest = float(np.abs(found.predictions - wanted.predictions)[known].max())
        assert np.array_equal(found.label_ids, wanted.label_ids) and found.predictions.shape == wanted.predictions.shape
        assert np.array_equal(*(np.maximum(inputs, 0) for inputs, _ in seen))  # padded with -100, or with 0
        assert np.abs(seen[0][1] - seen[1][1]).max() < 1e-10
        names = ("test_loss", "test_accuracy", "test_count")
        largest = max(largest, *(abs(found.metrics[name] - wanted.metrics[name]) for name in names))
        assert largest < 1e-10, largest
        shown("H9", largest)
        last = trainer(world, own, tagger(), None, compute_metrics=Last(), batch_eval_metrics=True).predict(TAGGED)
        assert last.metrics["test_rows"] == TRAIN


def case_generated_sequences(world: hvdtrain.World) -> None:
    class Arguments(TrainingArguments, transformers.Seq2SeqTrainingArguments):
        pass

    class Ours(Trainer, transformers.Seq2SeqTrainer):
        pass

    options: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 6}
    with folder(world, own=True) as own:
        ours = Ours(t5(), arguments(world, own, kind=Arguments, **options), padded, TEXT, TEXT_VALID)
        kind = transformers.Seq2SeqTrainingArguments
        theirs = transformers.Seq2SeqTrainer(t5(), arguments(None, own, kind=kind, **options), padded, TEXT, TEXT_VALID)
        pairs = []
        for its in (ours, theirs):
            its.remove_callback(transformers.PrinterCallback)
            its.train()
            pairs.append(its.predict(TEXT_VALID))
    assert np.array_equal(pairs[0].predictions, pairs[1].predictions)
    losses = [its.predict(TEXT_VALID[:BATCH]).metrics["test_loss"] for its in (ours, theirs)]  # theirs ignores tails
    largest = max(gap(ours.model, theirs.model), abs(losses[0] - losses[1]))
    assert largest < 1e-10, largest
    shown("H11", largest)


class Last:
    """A metric that is added up batch by batch."""

    rows = 0

    def __call__(self, found: Any, compute_result: bool = False) -> dict[str, float]:
        self.rows += len(found.predictions)
        return {"rows": float(self.rows)} if compute_result else {}


def case_loaders_of_the_users_own(world: hvdtrain.World) -> None:
    class Own:
        def get_train_dataloader(self) -> Any:
            loader = DataLoader(SORTED, self.args.train_batch_size, collate_fn=padded)
            return deal(loader, self.args.world) if isinstance(self, Trainer) else loader

    compare(world, "H10", bert, SORTED, mixin=Own)
    with folder(world, own=False) as shared:
        args = arguments(world, shared)
        with args.main_process_first(local=False):
            if world.is_main:
                Path(shared, "made").touch()
            assert Path(shared, "made").exists()


# -- what is refused -----------------------------------------------------------------------------------------------
def case_what_is_refused(world: hvdtrain.World) -> None:
    def contrastive(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        rows = F.normalize(outputs.logits)
        return F.cross_entropy(rows @ rows.T / 0.5, torch.arange(len(rows)))

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(SORTED)

    class Differs:
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if model.training:
                with torch.no_grad():
                    model.classifier.weight += world.rank
            return super().compute_loss(model, inputs, *args, **kwargs)

    class Alone:
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = self.compute_loss(model, {name: its.to(self.args.device) for name, its in inputs.items()})
            loss.backward()
            return loss.detach()

    class Undealt:
        def get_train_dataloader(self) -> Any:
            return DataLoader(SORTED, 2, collate_fn=padded)

    with folder(world, own=False) as out:
        with refused("must be a mean over samples or labels", row="H12"):
            trainer(world, out, bert(), SORTED, compute_loss_func=contrastive).train()
        with refused("whose end is not known", kind=ConfigError, row="H13a"):
            trainer(world, out, bert(), Stream(), max_steps=3).train()
        with refused("must be dealt", "deal(loader", row="H13b"):
            trainer(world, out, bert(), SORTED, mixin=Undealt).train()
        with refused("weights must be the same", kind=ReplicaError, row="H14a"):
            trainer(world, out, bert(), SORTED, mixin=Differs).train()
        with refused("weights must be the same", kind=ReplicaError, row="H14b"):
            trainer(world, out, bert(), SORTED, mixin=Alone).train()
        with refused("order of the training data", kind=ReplicaError, row="H14c"):
            made = trainer(world, out, bert(), SORTED, accelerator_config={"use_seedable_sampler": False})
            torch.manual_seed(world.rank)
            made.train()
        with refused("TrainingArguments of hvdtrain", row="H15a"):
            Trainer(bert(), arguments(None, out))
        with refused("cannot be used", "auto_find_batch_size", "batch_rebalance", row="H15b"):
            arguments(world, out, auto_find_batch_size=True, train_sampling_strategy="batch_rebalance")
        with refused("must see the checkpoint", row="H16"):
            trainer(world, out, bert(), SORTED).train(resume_from_checkpoint=f"{out}/nowhere")


if __name__ == "__main__":
    from cases import run_cases

    torch.set_num_threads(1)
    gc.freeze()  # accelerate collects garbage at the start of each training; the libraries' million objects are none
    torch.Tensor.float = torch.Tensor.double  # the losses of transformers convert to float32, which hides small gaps
    cases = {name: its for name, its in globals().items() if name in sys.argv[2:]} or globals()
    with hvdtrain.init("torch", engine=sys.argv[1] if len(sys.argv) > 1 else "auto", device="cpu", seed=5) as ranks:
        os.environ |= {"WORLD_SIZE": str(ranks.size), "OMPI_COMM_WORLD_SIZE": str(ranks.size)}  # as launchers set them
        failed = run_cases(cases, ranks)
    sys.exit(3 if failed else 0)
