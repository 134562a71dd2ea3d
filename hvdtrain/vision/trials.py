"""Variants of a training that take turns, and what `hvdtrain.pipeline_resnet` makes of them: bars, the curve over the
split size, tuning."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hvdtrain.core.errors import ConfigError, is_out_of_memory
from hvdtrain.pipeline.tuning import plots
from hvdtrain.pipeline.tuning.search_size import micro_batches_for, split_size
from hvdtrain.record import stats

if TYPE_CHECKING:
    import torch

    from hvdtrain.pipeline.run.runtime import Pipeline

NAIVE = "naive split"
Variant = Callable[..., None]
Variants = dict[str, Variant]
Loss = Callable[[Any, Any], "torch.Tensor"]
SHARE = 0.25  # of a sweep's time, for tuning after it


@dataclass(frozen=True)
class TrialSettings:
    """The settings of the trials: what they train, and how often."""

    batch: int
    image_size: int
    classes: int
    batches: int  # of one repeat
    repeats: int
    loss: str
    micro_batches: int | None  # None: the best that is known


@dataclass
class SplitJob:
    """The model, cut, and the batches it is trained on; `result` becomes the JSON file."""

    name: str
    settings: TrialSettings
    pipe: Pipeline
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    loss: Loss
    out: Path = Path()
    machine: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    curve: plots.SplitCurve | None = None

    @classmethod
    def made(cls, name: str, its: TrialSettings, devices: Sequence[str], **cut: Any) -> SplitJob:
        """Returns a classifier of torchvision with random weights, cut by `split(..., **cut)`, and random batches."""
        import torch

        import hvdtrain.pipeline
        from hvdtrain.vision import classifiers

        torch.manual_seed(0)
        model = classifiers.build(name, its.classes, image_size=its.image_size).train()
        batches = [
            (torch.randn(its.batch, 3, its.image_size, its.image_size), torch.randint(its.classes, (its.batch,)))
            for _ in range(its.batches)
        ]
        loss: Loss = torch.nn.functional.cross_entropy
        if its.loss == "mse":
            loss = torch.nn.functional.mse_loss
            batches = [(x, torch.nn.functional.one_hot(y, its.classes).float()) for x, y in batches]
        return cls(name, its, hvdtrain.pipeline.split(model, batches[0][0], devices, **cut), batches, loss)

    def title(self) -> str:
        """Returns the title of the pictures: what ran, on what."""
        its = self.settings
        where = ", ".join(map(str, self.pipe.devices))
        what = f"{self.name}, batch {its.batch} of {its.image_size}×{its.image_size}, {its.classes} classes"
        return f"{what}\n{where} ({self.machine})"

    @property
    def of(self) -> str:
        """The work of one repeat, in words."""
        return "a batch" if self.settings.batches == 1 else f"{self.settings.batches} batches"

    def variant(self, model: Any, *, cores: Sequence[int] | None = None, **change: Any) -> Variant:
        """Returns one repeat of a training: every batch forward and backward, new gradients each time, and a plain SGD
        step after each; a function of how many of the batches (all). `change` is set on the model before; `cores` are
        as in `hvdtrain.pipeline.tuning.unsplit.on_cores`."""
        import torch

        from hvdtrain.pipeline.tuning.unsplit import on_cores

        optimizer = torch.optim.SGD(list(model.parameters()), lr=0.001)
        if hasattr(model, "proofs"):
            model.proofs = False  # they double a training's steps 1, 2, 4, 8 ..., which are measured here

        def train(count: int = len(self.batches)) -> None:
            for name, value in change.items():
                setattr(model, name, value)
            for x, y in self.batches[:count]:
                optimizer.zero_grad()
                with on_cores(cores):
                    model.step(x, y, self.loss)
                optimizer.step()

        return train

    def cut(self, micro_batches: int) -> Variant:
        """The one through the pipeline, in so many micro-batches."""
        return self.variant(self.pipe, micro_batches=micro_batches)

    def interleaved(self, variants: Mapping[Any, Variant], what: str) -> dict[str, Any]:
        """Runs the variants in rounds, in which all take turns, after an uncounted batch each.

        Returns {"seconds": seconds by variant, "failed": reason by variant, "spent_s": in all}.
        """
        from tqdm import tqdm

        from hvdtrain.pipeline import StageError
        from hvdtrain.pipeline.tuning.unsplit import seconds_of

        class Bar(tqdm):  # type: ignore[type-arg]
            monitor_interval = 0  # no thread that watches over it

        def turn(train: Variant, *count: int) -> float:
            seconds = seconds_of(partial(train, *count), self.pipe.devices)  # until the devices are done
            bar.update()
            return seconds

        started, repeats = time.perf_counter(), self.settings.repeats
        arms: dict[Any, Callable[[], float]] = {}
        failed: dict[Any, str] = {}
        with Bar(total=(repeats + 1) * len(variants), desc=what, unit="turn", leave=False, disable=None) as bar:
            for name, train in variants.items():
                try:
                    turn(train, 1)
                    arms[name] = partial(turn, train)
                except Exception as error:  # memory, batch-norm over a single value
                    if not isinstance(error, (StageError, ValueError)) and not is_out_of_memory(error):
                        raise
                    failed[name] = str(error)
            seconds = stats.in_turns(arms, repeats)
        return {"seconds": seconds, "failed": failed, "spent_s": time.perf_counter() - started}

    def update_s(self) -> float:
        """Returns the seconds that the optimizer takes after a step."""
        import torch

        from hvdtrain.pipeline.tuning.unsplit import seconds_of

        optimizer = torch.optim.SGD(self.pipe.parameters(), lr=0.0)
        for weight in self.pipe.parameters():
            weight.grad = torch.zeros_like(weight)
        seconds = min(seconds_of(optimizer.step, self.pipe.devices) for _ in range(3))
        optimizer.zero_grad()
        return seconds

    def save(self) -> None:
        """Writes what there is so far: an interrupted run keeps it."""
        (self.out / "result.json").write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")


# ---- bars


def compare(job: SplitJob, micro_batches: int) -> None:
    """Compares one device, the naive split and the pipeline; on CPUs also the unsplit model on all their cores."""
    size = split_size(job.settings.batch, micro_batches)
    pipeline = f"pipeline, split size {size} ({micro_batches} micro-batches)"
    measured = job.interleaved({**usual(job), pipeline: job.cut(micro_batches)}, "compare")
    seconds = measured["seconds"]
    ratios = ratios_of(seconds, pipeline) if pipeline in seconds else {}
    job.result["compare"] = {
        **measured, "of": job.of, "micro_batches": micro_batches, "pipeline": pipeline,
        "pipeline_over": {name: asdict(ratio) for name, ratio in ratios.items()},
    }  # fmt: skip
    print(f"\ncompare: seconds for {job.of}, {job.settings.repeats} repeats in turns\n{table(seconds, ratios)}")
    print_failed(measured["failed"])
    print(plots.plot(plots.Bars(job.title(), seconds, job.of), job.out / "bars.png"), flush=True)
    if job.curve is not None:  # once more, with what there is to compare with
        lines = {name: fmean(its) for name, its in seconds.items() if name != pipeline}
        plots.plot(replace(job.curve, lines=lines), job.out / "split_size.png")


def usual(job: SplitJob) -> Variants:
    """Returns what a pipeline is compared with: the model on the first stage's device, and on CPUs also on the cores of
    all stages, where it fits; and the naive split."""
    from hvdtrain.pipeline.tuning import unsplit

    found: Variants = {}
    try:
        single = unsplit.on_first_device(job.pipe)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print_failed({f"single device ({job.pipe.devices[0]})": str(error)})
    else:
        found[f"single device ({single})"] = job.variant(single)
        every = unsplit.unsplit(job.pipe)[:1] if single.device.type == "cpu" else []
        found |= {f"unsplit ({one})": job.variant(one) for one in every if str(one) != str(single)}
    return found | {NAIVE: job.cut(1)}


def ratios_of(seconds: Mapping[str, Sequence[float]], name: str) -> dict[str, stats.Interval]:
    """Returns the time of the variant `name` over that of each other one."""
    return {other: stats.ratio_of_medians(seconds[name], its) for other, its in seconds.items() if other != name}


def table(seconds: Mapping[str, Sequence[float]], ratios: Mapping[str, stats.Interval]) -> str:
    """Returns a row for each variant; `ratios` as of `ratios_of`."""
    rows = [("", "mean", "standard deviation", "the pipeline takes, 95 %")]
    rows += [
        (name, f"{fmean(its):.3f}", f"{stats.spread(its):.3f}", str(ratios.get(name, "")))
        for name, its in seconds.items()
    ]
    return stats.table(rows)


# ---- the curve over the split size


def sweep(job: SplitJob, sizes: Sequence[int]) -> int:
    """Measures every split size in turns, and predicts it; returns the micro-batch count of the fastest."""
    from hvdtrain.pipeline.plan.schedule import micro_batch_sizes
    from hvdtrain.pipeline.tuning.predict import predict

    batch, its = job.settings.batch, job.settings
    counts, left_out = counts_of(sizes, batch)
    if left_out:
        print(f"\nsweep: skipped {'; '.join(left_out)}", flush=True)
    if not counts:
        raise ConfigError("--sweep needs a split size that the batch can have", ", ".join(map(str, sizes)), "--sweep")
    began = time.perf_counter()
    prediction, update_s = predict(job.pipe, *job.batches[0], job.loss), job.update_s()
    predicting_s = time.perf_counter() - began
    predicted = {n: its.batches * (prediction(micro_batch_sizes(batch, n)) + update_s) for n in range(1, batch + 1)}
    measured = job.interleaved({n: job.cut(n) for n in counts}, "sweep")
    seconds = measured["seconds"]
    if not seconds:
        raise ConfigError("--sweep needs a split size that trains", next(iter(measured["failed"].values())), "--sweep")
    best = min(seconds, key=lambda n: fmean(seconds[n]))
    job.result["sweep"] = {
        "of": job.of, "batch": batch, "best": best, "spent_s": measured["spent_s"], "left_out": left_out,
        "predicting_s": predicting_s,
        "by_micro_batches": {
            str(n): {"split_size": counts[n], "seconds": seconds[n], "predicted_s": predicted[n]} for n in seconds
        },
        "failed": {str(n): reason for n, reason in measured["failed"].items()},
    }  # fmt: skip
    print(f"\nsweep: seconds for {job.of}, {its.repeats} repeats in turns, {measured['spent_s']:.0f} s in all")
    rows = [("split size", "micro-batches", "mean", "standard deviation", "predicted", "predicted/measured")]
    for n, its_seconds in sorted(seconds.items(), reverse=True):
        cells = (f"{fmean(its_seconds):.3f}", f"{stats.spread(its_seconds):.3f}", f"{predicted[n]:.3f}")
        name = f"{counts[n]}{' *' if n == best else ''}"
        rows.append((name, str(n), *cells, f"{predicted[n] / fmean(its_seconds):.2f}"))
    print(stats.table(rows))
    print_failed({f"split size {counts[n]}": reason for n, reason in measured["failed"].items()})
    largest = max(counts[n] for n in seconds)
    every = {split_size(batch, n): predicted[n] for n in range(batch, 0, -1)}
    job.curve = plots.SplitCurve(
        job.title(), batch, {counts[n]: its_seconds for n, its_seconds in seconds.items()},
        {size: s for size, s in every.items() if size <= largest}, counts[best], of=job.of,
    )  # fmt: skip
    print(plots.plot(job.curve, job.out / "split_size.png"), flush=True)
    return best


def counts_of(sizes: Sequence[int], batch: int) -> tuple[dict[int, int], list[str]]:
    """Returns micro-batch counts, each with the samples of its largest micro-batch (a batch is divided evenly: size 12
    of 32 gives 11, 11, 10), and the sizes that are skipped, with the reason."""
    counts: dict[int, int] = {}
    left_out = []
    for size in sorted(set(sizes)):
        count = micro_batches_for(batch, size)
        if size > batch:
            left_out.append(f"{size} (more than the batch of {batch})")
        elif count in counts:
            left_out.append(f"{size} (makes {count} micro-batches, as a smaller one)")
        else:
            counts[count] = split_size(batch, count)
    return counts, left_out


# ---- tuning


def tune(job: SplitJob) -> int:
    """Finds the split size, after a sweep in a quarter of its time; returns the micro-batch count."""
    import hvdtrain.pipeline

    swept = job.result.get("sweep")
    budget_s = SHARE * swept["spent_s"] if swept else None
    tuning = hvdtrain.pipeline.tune(job.pipe, *job.batches[0], job.loss, budget_s=budget_s)
    job.result["tune"] = tuning.as_dict()
    print(f"\ntune: {tuning.spent_s:.1f} s", *tuning.trials, sep="\n  ")
    print(f"  verdict: {tuning.verdict}" + ("" if tuning.settled else " (the rounds did not settle everything)"))
    if swept:
        print(f"  the sweep's best: {swept['best']} micro-batches, in {swept['spent_s']:.1f} s", flush=True)
    else:
        print(plots.plot(tuning, job.out / "split_size.png"), flush=True)
    return tuning.best.micro_batches


def print_failed(failed: Mapping[Any, str]) -> None:
    """Prints what could not be run, and why."""
    for name, reason in failed.items():
        print(f"not run: {name}: {reason}", flush=True)
