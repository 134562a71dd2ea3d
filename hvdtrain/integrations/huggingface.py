"""Hugging Face's `Trainer` on hvdtrain: N ranks with batch B train like one process with batch N·B.

::

    from hvdtrain.integrations.huggingface import Trainer, TrainingArguments  # in place of transformers'

    trainer = Trainer(model, TrainingArguments("out"), train_dataset=train, eval_dataset=validation)
    trainer.train()  # under hvdtrain launch, horovodrun, mpirun; or python alone

Accelerate sees one process. A micro-batch of all ranks is one of theirs: dealt by samples, its loss weighed by what its
mean divides by, its gradients added up after the last backward of an update.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
import transformers
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils import data as torch_data
from transformers.trainer_pt_utils import nested_concat
from transformers.trainer_utils import get_last_checkpoint

import hvdtrain
import hvdtrain.torch as hvt
from hvdtrain import ConfigError, Plan, Step, World
from hvdtrain.integrations.mean_kinds import ITEMS, KINDS, SAMPLES, SHARE, kinds_of, undisturbed
from hvdtrain.integrations.summing import GradientSums, share_statistics, share_weights

# by these Accelerate would take the ranks for its own, and start torch.distributed
_RANKS = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_LOADING = (
    "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers",
)  # fmt: skip


class TrainingArguments(transformers.TrainingArguments):
    """Transformers' arguments, for the ranks of hvdtrain: those of `hvdtrain.init`, else joined here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        received = ", ".join(name for name, given in _unsupported(self).items() if given)
        if self.world.size > 1 and received:
            raise ConfigError(
                "these options cannot be used on hvdtrain's ranks", received, "remove them; docs/how-huggingface.md"
            )

    @property
    def world(self) -> World:
        """The ranks; not an attribute, for Trainer saves these arguments."""
        device = "cpu" if self.use_cpu else "auto"
        return hvdtrain.current() or hvdtrain.init("torch", device=device, seed=self.seed)

    @property
    def world_size(self) -> int:
        return self.world.size

    @property
    def process_index(self) -> int:
        return self.world.rank

    @property
    def local_process_index(self) -> int:
        return self.world.local_rank

    @property
    def device(self) -> torch.device:
        on_gpu = self.world.devices and not self.use_cpu
        place = torch.device("cuda", self.world.devices[0]) if on_gpu else torch.device("cpu")
        if "distributed_state" not in vars(self):
            with _one_process(place):
                super().device  # noqa: B018  it makes Accelerate's state
            if on_gpu:
                torch.cuda.set_device(place)
        return place

    @property
    def n_gpu(self) -> int:
        return int(self.device.type == "cuda")

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Runs the block on rank 0 (with `local`, on each host's first rank) before the other ranks."""
        first = (self.local_process_index if local else self.process_index) == 0
        if not first:
            self.world.barrier()
        try:
            yield
        finally:
            if first:
                self.world.barrier()


def _unsupported(args: TrainingArguments) -> dict[str, bool]:
    config: Any = args.accelerator_config
    return {
        "deepspeed": args.deepspeed_plugin is not None,
        "fsdp": bool(args.fsdp),
        "parallelism_config": args.parallelism_config is not None,
        "auto_find_batch_size": args.auto_find_batch_size,
        "enable_jit_checkpoint": args.enable_jit_checkpoint,
        "average_tokens_across_devices=False": not args.average_tokens_across_devices,
        "dataloader_in_order=False": not args.dataloader_in_order,
        "include_num_input_tokens_seen": args.include_num_input_tokens_seen != "no",
        f"train_sampling_strategy={args.train_sampling_strategy!r}": args.train_sampling_strategy
        not in ("random", "sequential"),
        "accelerator_config.split_batches": bool(config.split_batches),
        "accelerator_config.dispatch_batches": bool(config.dispatch_batches),
        f"optim={str(args.optim)!r}": any(name in str(args.optim).lower() for name in ("lomo", "layerwise")),
        'batch_eval_metrics with include_for_metrics=["inputs"]': args.batch_eval_metrics
        and "inputs" in args.include_for_metrics,
    }


@contextmanager
def _one_process(place: torch.device) -> Iterator[None]:
    """Hides the launcher's ranks from Accelerate, and gives it this rank's device."""
    hidden = {name: os.environ.pop(name) for name in _RANKS if name in os.environ}
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(place)
    try:
        yield
    finally:
        del os.environ["ACCELERATE_TORCH_DEVICE"]
        os.environ.update(hidden)


# ---- data


class DealtBatches(torch_data.BatchSampler):
    """A rank's part of each batch of all ranks, in the order of the given sampler.

    A rank without samples in the last batch gets one sample, so that all ranks have as many batches.
    """

    def __init__(self, data: torch_data.DataLoader[Any], world: World) -> None:
        batches: Any = data.batch_sampler
        super().__init__(batches.sampler, batches.batch_size * world.size, batches.drop_last)
        self.order_checksum = 0
        plan = Plan(
            len(batches.sampler), world.size, batches.batch_size, shuffle=False,
            tail="drop" if batches.drop_last else "weighted",
        )  # fmt: skip
        self.steps = plan.step_slices(0, rank=world.rank)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        self.order_checksum = zlib.crc32(np.asarray(order).tobytes())
        for step in self.steps:
            yield order[step.first : step.first + step.dealt] or order[:1]


def deal(data: Any, world: World) -> Any:
    """Returns a loader of this rank's part of each batch of N·B samples; `data` has batches of B samples.

    For a `get_train_dataloader` of your own: `return deal(DataLoader(dataset, batch_size=8), self.args.world)`.

    Raises:
        ConfigError: the data is not a `DataLoader` whose sampler gives single samples, of a known number.
    """
    batches = getattr(data, "batch_sampler", None)
    if world.size == 1 or isinstance(batches, DealtBatches):
        return data
    received = ""
    if not isinstance(data, torch_data.DataLoader):
        received = f"a {type(data).__name__}"
    elif isinstance(data.dataset, torch_data.IterableDataset):
        received = f"{type(data.dataset).__name__}, whose end is not known"
    elif type(batches) is not torch_data.BatchSampler:
        received = f"batch_sampler={type(batches).__name__}(...)"
    if received:
        raise ConfigError(
            "data must be a DataLoader of samples that can be dealt to the ranks", received,
            "a data set with len(), and at most a sampler of your own",
        )  # fmt: skip
    loading = {name: getattr(data, name) for name in _LOADING}
    return DataLoaderShard(data.dataset, batch_sampler=DealtBatches(data, world), **loading)


# ---- training and evaluation


class Trainer(transformers.Trainer):
    """Transformers' `Trainer` on the ranks of hvdtrain; subclass it as theirs.

    Raises:
        ConfigError: the data, the loss or an option cannot train the same on several ranks.
        ReplicaError: gradients are not averaged, or replicas or the order of the data differ.
    """

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **options: Any) -> None:
        args = TrainingArguments("tmp_trainer") if args is None else args
        if not isinstance(args, TrainingArguments):
            raise ConfigError(
                "args must be the TrainingArguments of hvdtrain.integrations.huggingface", f"a {type(args)}",
                "from hvdtrain.integrations.huggingface import Trainer, TrainingArguments",
            )  # fmt: skip
        self.world, self._sums = args.world, GradientSums(args.world)
        self._ranks = RanksCallback(self)
        # each with the items of this rank and of all, and True if the loss is tried on it
        self._micro_batches: deque[tuple[Step, float, float, bool]] = deque()
        self._kinds, self._reported = KINDS, False
        self._evaluated: Step | None = None
        super().__init__(model, args, *rest, **options)
        trained: Any = self.model
        share_weights(trained, self.world)
        self.add_callback(self._ranks)

    def get_train_dataloader(self) -> Any:
        return deal(super().get_train_dataloader(), self.world)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return deal(super().get_eval_dataloader(*args, **kwargs), self.world)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return deal(super().get_test_dataloader(*args, **kwargs), self.world)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.world.size > 1 and resume_from_checkpoint:
            folder = resume_from_checkpoint
            if folder is True:
                folder = self.world.on_main(get_last_checkpoint, self.args.output_dir)
            seen = self.world.gather(folder is not None and os.path.isdir(folder))
            if not all(seen):
                raise ConfigError(
                    "every rank must see the checkpoint to resume from", f"{folder}, by rank: {seen}",
                    "an output_dir that all hosts share", shared=True,
                )  # fmt: skip
            resume_from_checkpoint = folder
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Returns this rank's micro-batches of an update, and the items (labels) of all ranks in it."""
        items: Any
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.world.size == 1:
            return batches, items
        steps, due = self._ranks.next_steps(len(batches))
        counts = [
            0.0 if step.padding else self._items_of(batch) or 0.0 for step, batch in zip(steps, batches, strict=True)
        ]
        own = torch.tensor(counts, dtype=torch.float64, device=device)
        every, tells = self._items_of_all(own, steps)
        ambiguous = len(self._kinds) > 1  # a trial takes three forward passes
        tried = (is_due or (ambiguous and tells_kinds) for is_due, tells_kinds in zip(due, tells, strict=True))
        self._micro_batches = deque(zip(steps, own.tolist(), every.tolist(), tried, strict=True))
        return batches, None if items is None else every.sum().to(items.dtype)

    def _items_of_all(self, own: Tensor, steps: Sequence[Step]) -> tuple[Tensor, list[bool]]:
        """Returns each batch's items of all ranks; True if it tells means over labels and over samples apart.

        It does unless all ranks have as many items a sample: sum(items²/samples) is then sum(items)²/sum(samples).
        """
        samples = own.new_tensor([max(step.samples, 1) for step in steps])
        every, squares = hvt.reduce(torch.stack([own, own**2 / samples]), "sum", world=self.world)
        least = every**2 / own.new_tensor([step.global_samples for step in steps])
        return every, (squares > least * (1 + 1e-9)).tolist()

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Differentiates this rank's share of a micro-batch's loss, and returns the loss of all ranks."""
        if self.world.size == 1:
            return super().training_step(model, inputs, num_items_in_batch)
        step, own, every, tried = self._micro_batches.popleft()
        if tried:
            self._try_loss(model, inputs, num_items_in_batch, step)
        weights = {SHARE: float(not step.padding), ITEMS: own / max(every, 1.0)}
        weight = weights.get(self._kind, step.samples / step.global_samples)
        loss = torch.zeros((), device=self.args.device)
        if weight:  # without samples or items the loss has no part of the mean, and may be NaN
            with _replaced(self, compute_loss=partial(_weighed, self.compute_loss, weight)):
                loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            sums = self._sums.of(parameters, [parameter.grad for parameter in parameters])
            for parameter, gradient in zip(parameters, sums, strict=True):
                parameter.grad = gradient
            share_statistics(model, self.world)
        return hvt.reduce(loss.detach().double(), "sum", world=self.world)

    @property
    def _kind(self) -> str:
        return next(kind for kind in (SHARE, ITEMS, SAMPLES) if kind in self._kinds)

    def _try_loss(self, model: nn.Module, inputs: Any, items: Any, step: Step) -> None:
        """Finds what the loss divides by, as far as this batch shows it; collective."""

        def loss_of(part: Any, items: Any) -> Tensor:
            with self.compute_loss_context_manager():
                loss: Any = self.compute_loss(model, part, num_items_in_batch=items)
                return loss.mean()

        found, divided = KINDS, False
        if not step.padding:
            full = all(parameter.dtype.itemsize >= 4 for parameter in model.parameters())
            exact = full and self.args.mixed_precision == "no"
            batch, count = send_to_device(dict(inputs), self.args.device), self._items_of
            with undisturbed(model):
                found, divided = kinds_of(loss_of, batch, step.samples, items, count, exact=exact)
        reports = self.world.gather((sorted(found), divided))
        allowed = self._kinds.intersection(*(kinds for kinds, _ in reports))
        if not allowed:
            by_rank = [
                f"rank {rank}: {' or '.join(kinds) or 'none of these'}" for rank, (kinds, _) in enumerate(reports)
            ]
            raise ConfigError(
                "the loss must be a mean over samples or labels, or a sum divided by num_items_in_batch",
                "\n".join(by_rank),
                "compute_loss_func=lambda outputs, labels, num_items_in_batch: sum_of_losses / num_items_in_batch",
                shared=True,
            )  # fmt: skip
        self._kinds = allowed
        if not self._reported and not any(divided for _, divided in reports) and self.world.is_main:
            print("hvdtrain: the loss is not checked on parts of a batch: no first batch can be divided", flush=True)
        self._reported = True

    def _items_of(self, batch: Any) -> float | None:
        """Returns the labels of a batch that count, as Trainer counts them, or those that are not -100; None: none."""
        items, labels = self._given_items(batch), batch.get("labels") if isinstance(batch, Mapping) else None
        if items is None and isinstance(labels, Tensor):
            items = (labels != -100).sum()
        return None if items is None else float(items)

    def _given_items(self, batch: Any) -> Any:
        """Returns the labels as Trainer counts them; None if it gives the loss no number."""
        return super().get_batch_samples(iter([batch]), 1, self.args.device)[1]

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluates each sample once over all ranks; every rank has all outputs and the same metrics."""
        dataloader = deal(dataloader, self.world)
        batches = getattr(dataloader, "batch_sampler", None)
        if not isinstance(batches, DealtBatches):
            return super().evaluation_loop(dataloader, *args, **kwargs)  # one rank
        self.gather_function = self._joined
        with _replaced(self, prediction_step=partial(self._predicted, self.prediction_step, iter(batches.steps))):
            return super().evaluation_loop(dataloader, *args, **kwargs)

    def _predicted(
        self, prediction_step: Callable[..., Any], steps: Iterator[Step], model: nn.Module, inputs: Any, *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        """Returns the loss of all ranks' batch, and this rank's outputs and labels."""
        self._evaluated = step = next(steps)
        items = self._items_of(inputs)
        loss, outputs, labels = prediction_step(model, inputs, *args, **kwargs)
        if loss is not None:
            own = torch.tensor([0.0 if items is None or step.padding else float(items)], dtype=torch.float64)
            ambiguous = len(self._kinds) > 1
            if self._kinds == KINDS or (ambiguous and self._items_of_all(own.to(self.args.device), [step])[1][0]):
                self._try_loss(model, inputs, self._given_items(inputs), step)
            weight = 0 if step.padding else step.samples if items is None or self._kind == SAMPLES else int(items)
            terms = [float(loss.mean()) * weight if weight else 0.0, weight]  # a loss of no items may be NaN
            pair = torch.tensor(terms, dtype=torch.float64, device=self.args.device)
            total, weights = hvt.reduce(pair, "sum", world=self.world)
            loss = (total / weights).to(loss)
        return loss, outputs, labels

    def _joined(self, values: Any) -> Any:
        """Returns the rows of all ranks' samples; Trainer calls it with losses, inputs, outputs and labels."""
        assert self._evaluated is not None
        pieces = self.world.gather(_rows_of(values, self._evaluated.samples, self.args.eval_batch_size))
        return reduce(nested_concat, pieces)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        super().save_model(*args, **kwargs)
        if self.is_in_train:
            self.world.barrier()  # the other ranks then look for the best checkpoint

    def store_flos(self) -> None:
        self.current_flos: float = int(self.world.sum({"flos": self.current_flos})["flos"])
        super().store_flos()

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        if self.world.size > 1:
            raise ConfigError("hyperparameter_search() needs one process", f"{self.world.size} ranks", "python alone")
        return super().hyperparameter_search(*args, **kwargs)


class RanksCallback(transformers.TrainerCallback):
    """Follows a training: its place in the dealt data, and equal replicas."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._world = trainer, trainer.world
        self._batches: DealtBatches | None = None
        self._position = self._skipped = 0
        self.trained = 0  # batches in this epoch
        self._compares = False

    def next_steps(self, count: int) -> tuple[list[Step], list[bool]]:
        """Returns this rank's parts of the next batches; True for the 1st, 2nd, 4th, 8th ... that an epoch trains."""
        assert self._batches is not None
        if self.trained == 0:
            self._world.agree("the order of the training data", self._batches.order_checksum)
        numbers = range(self.trained + 1, self.trained + count + 1)
        self.trained += count
        self._position += count
        return self._batches.steps[self._position - count : self._position], [not n & (n - 1) for n in numbers]

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        if self._world.size == 1:
            return
        batches = getattr(train_dataloader, "batch_sampler", None)
        if not isinstance(batches, DealtBatches):
            raise ConfigError(
                "training data must be dealt to the ranks", "get_train_dataloader() overridden",
                "return hvdtrain.integrations.huggingface.deal(loader, self.args.world)",
            )  # fmt: skip
        pieces = args.gradient_accumulation_steps
        updates = max(-(-len(batches) // pieces), 1)
        self._batches = batches
        self._skipped = 0 if args.ignore_data_skip else state.global_step % updates * pieces
        share_weights(self._model, self._world)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._position, self._skipped = self._skipped, 0
        self.trained, self._compares = 0, self._world.size > 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._compares:
            self._compares = False
            self._compare()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._compare()

    @property
    def _model(self) -> nn.Module:
        model: Any = self._trainer.model
        return model

    def _compare(self) -> None:
        if self._world.size > 1:
            self._world.agree("the model's weights", hvt.fingerprint(nn.ParameterList(self._model.parameters())))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._world.barrier()  # rank 0 has written

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.load_best_model_at_end:
            share_weights(self._model, self._world)  # a host without the checkpoint has not loaded it


def _weighed(compute_loss: Callable[..., Any], weight: float, *args: Any, **kwargs: Any) -> Any:
    found = compute_loss(*args, **kwargs)
    return (found[0] * weight, *found[1:]) if isinstance(found, tuple) else found * weight


@contextmanager
def _replaced(trainer: Trainer, **methods: Callable[..., Any]) -> Iterator[None]:
    """Puts other functions in the place of a trainer's methods, also of those that a subclass has overridden."""
    own = trainer.__dict__
    before = {name: value for name, value in own.items() if name in methods}
    own.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del own[name]
        own.update(before)


def _rows_of(values: Any, samples: int, batch: int) -> Any:
    """Returns the rows of a rank's samples, on the CPU; a padding batch has none."""
    if isinstance(values, Tensor):
        if not values.dim() or len(values) not in (max(samples, 1), batch):
            raise ConfigError(
                "outputs must have one row for each sample", f"{tuple(values.shape)} of {samples} samples",
                "ignore_keys=[...] or ignore_keys_for_eval=[...], with the output's name",
            )  # fmt: skip
        return values[:samples].detach().cpu().clone()
    if isinstance(values, Mapping):
        return {name: _rows_of(value, samples, batch) for name, value in values.items()}
    return tuple(_rows_of(value, samples, batch) for value in values)
