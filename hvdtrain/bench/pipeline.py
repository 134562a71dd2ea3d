"""A split model on CPU stages of one core each, against the naive split and other pipelines, in rounds that take turns.

Every way trains the same model on the same batch, forward and backward, cut at the same place. Those that have no use
for a core for each stage are also given all cores at once, as they would use them best. `--ours` leaves out all but the
pipeline: what its simulator tells of any number of stages, and (`--against`) what other cuts take.

Prints a table and writes a JSON file with every sample. Give the machine nothing else to do.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.bench.train import check_writable, tell
from hvdtrain.core import stats
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.flags import whole
from hvdtrain.core.launchers import detect
from hvdtrain.core.resources import keep_freed_memory
from hvdtrain.core.startup import share_cores
from hvdtrain.pipeline.plan.schedule import SCHEDULES

if TYPE_CHECKING:
    import torch

    from hvdtrain.pipeline.runtime import Pipeline

# targets, as ratios of time; and of the time that the schedule's bubble leaves
NAIVE_TARGET, RIVAL_TARGET, ONE_STAGE_TARGET, EFFICIENCY_TARGET, PREDICTION_TARGET = 1 / 1.6, 1.0, 1.02, 0.93, 0.10
CUT_TARGET = 1.0
NAIVE, PLAIN, ALL_CORES = "naive split", "plain model, 1 core", "plain model, all cores"
ONE_STAGE = "pipeline of 1 stage, 1 core"
BY_HAND = "cut by hand"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``hvdtrain bench pipeline``."""
    count = whole(1)
    add = parser.add_argument
    add("--model", default="resnet50", metavar="NAME", help="of torchvision (default: %(default)s)")
    add("--batch", type=count, default=64, metavar="N", help="pictures (default: %(default)s)")
    add("--image-size", type=count, default=128, metavar="N", help="(default: %(default)s)")
    add("--stages", type=count, default=2, metavar="N", help="(default: %(default)s)")
    add("--micro-batches", type=count, nargs="+", default=[4, 8], metavar="N", help="(default: 4 8)")
    add("--schedules", choices=SCHEDULES, nargs="+", default=list(SCHEDULES), help="(default: all)")
    add("--balance", type=count, nargs="+", metavar="N", help="segments of each stage (default: by measured time)")
    add("--against", type=count, nargs="+", action="append", default=[], metavar="N",
        help="another cut by hand, as for --balance, to compare with; may be given again")  # fmt: skip
    add("--ours", action="store_true", help="only pipelines of hvdtrain; any number of stages")
    add("--rounds", type=count, default=6, metavar="N", help="(default: %(default)s)")
    add("--out", type=Path, default=Path("bench-pipeline.json"), metavar="FILE", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; returns 0, whatever the figures are."""
    detected = detect(os.environ)
    if detected.launcher != "none":
        raise ConfigError("this benchmark is one process", "started by a launcher", "hvdtrain bench pipeline")
    cores = sorted(os.sched_getaffinity(0))
    used = cores[: args.stages]
    if not args.ours and not 2 <= args.stages == len(used):
        came = f"{len(cores)} core(s) for {args.stages} stage(s)"
        remedy = f"--stages {len(cores)}, or --ours to leave out all but the pipeline"
        raise ConfigError("each of several stages has a core of its own, as the others' have", came, remedy)
    check_writable(args.out)
    share_cores(detected)  # before PyTorch is imported
    keep_freed_memory()  # before a model is built, as `hvdtrain.init` does for programs
    import torch

    torch.set_num_threads(len(used))
    os.sched_setaffinity(0, used)
    try:
        result = measure(args, used)
    finally:
        os.sched_setaffinity(0, cores)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(report(result))
    print(f"every sample: {args.out}", flush=True)
    return 0


def measure(args: argparse.Namespace, cores: Sequence[int]) -> dict[str, Any]:
    """Builds the ways, runs them in turns."""
    import torch

    import hvdtrain.pipeline
    from hvdtrain.pipeline.plan.schedule import micro_batch_sizes
    from hvdtrain.pipeline.tuning.predict import from_profile, predict
    from hvdtrain.vision import classifiers

    result: dict[str, Any] = {
        "format": 1, "bench": "pipeline", "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "machine": stats.machine(),
        "settings": {key: value for key, value in vars(args).items() if isinstance(value, (int, str, list))},
    }  # fmt: skip
    result["machine"]["versions"] |= stats.versions("torchgpipe")
    torch.manual_seed(0)
    model = classifiers.build(args.model, 1000, image_size=args.image_size).train()
    x = torch.randn(args.batch, 3, args.image_size, args.image_size)
    y = torch.randint(1000, (args.batch,))
    tell("measuring the segments, to cut the model")
    pipe = hvdtrain.pipeline.split(
        copy.deepcopy(model), x, ["cpu"] * args.stages, micro_batches=args.micro_batches[0],
        balance=args.balance or "time",
    )  # fmt: skip
    result["cut"] = [{"name": stage.name, "segments": len(stage.segments)} for stage in pipe.stages]
    ways = all_ways(args, pipe, model, x, y, cores)
    tell(f"{len(ways)} ways, {args.rounds} rounds")
    result["predicted_s"], result["predicted_by_profile_s"] = {}, {}
    by_profile = from_profile(pipe)

    def foretell() -> None:
        prediction = predict(pipe, x, y, torch.nn.functional.cross_entropy)
        for schedule, count in itertools.product(args.schedules, args.micro_batches):
            pipe.schedule, sizes = schedule, micro_batch_sizes(args.batch, count)
            name = pipeline_name(schedule, count)
            result["predicted_s"].setdefault(name, []).append(prediction(sizes))
            if by_profile:
                result["predicted_by_profile_s"][name] = [by_profile(sizes)]

    result["seconds"] = in_turns(ways, args.rounds, foretell)
    result["load_after"] = round(os.getloadavg()[0], 2)
    return result


def all_ways(
    args: argparse.Namespace, pipe: Pipeline, model: torch.nn.Module, x: Any, y: Any, cores: Sequence[int]
) -> dict[str, Callable[[], Any]]:
    """Each way to do the step, by name; gradients are new each time."""
    import torch

    import hvdtrain.pipeline
    from hvdtrain.pipeline.tuning.unsplit import Unsplit

    loss = torch.nn.functional.cross_entropy

    def stepping(model: Any, cores: Sequence[int] | None = None, **change: Any) -> Callable[[], Any]:
        from hvdtrain.pipeline.tuning.unsplit import on_cores

        weights = list((model.model if isinstance(model, Unsplit) else model).parameters())

        def step() -> None:
            for weight in weights:
                weight.grad = None
            for name, value in change.items():
                setattr(model, name, value)
            with on_cores(cores):
                model.step(x, y, loss)

        return step

    ways = {}
    if not args.ours:
        segments = len(pipe.segments)
        one = hvdtrain.pipeline.split(copy.deepcopy(model), x, ["cpu"], micro_batches=1, balance=[segments])
        alone, both = Unsplit(model, "cpu", cores=cores[:1]), Unsplit(model, "cpu", cores=cores)
        ways = {PLAIN: stepping(alone), ONE_STAGE: stepping(one, cores[:1]), ALL_CORES: stepping(both)}
    ways[NAIVE] = stepping(pipe, micro_batches=1, overlap=False)
    for schedule, count in itertools.product(args.schedules, args.micro_batches):
        change = {"micro_batches": count, "schedule": schedule, "overlap": True}
        ways[pipeline_name(schedule, count)] = stepping(pipe, **change)
    for balance in args.against:
        other = hvdtrain.pipeline.split(
            copy.deepcopy(model), x, ["cpu"] * args.stages, micro_batches=1, balance=balance
        )  # fmt: skip
        for schedule, count in itertools.product(args.schedules, args.micro_batches):
            name = f"{pipeline_name(schedule, count)}, {BY_HAND} {'|'.join(map(str, balance))}"
            ways[name] = stepping(other, micro_batches=count, schedule=schedule)
    for count in () if args.ours else args.micro_batches:
        ways |= rivals(pipe, x, y, loss, count, cores)
    return ways


def pipeline_name(schedule: str, micro_batches: int) -> str:
    """What ours is called."""
    return f"hvdtrain, {schedule}, {micro_batches} micro-batches"


def rivals(pipe: Pipeline, x: Any, y: Any, loss: Any, count: int, cores: Sequence[int]) -> dict[str, Callable[[], Any]]:
    """The other pipelines, over the same stages: PyTorch's tutorial, and torchgpipe if it is there."""
    from hvdtrain.pipeline.tuning.unsplit import on_cores

    forwards: dict[str, Callable[[Any], Any]] = {}
    if len(pipe.stages) == 2:
        forwards["tutorial pattern"] = lambda x: tutorial(pipe.stages, x, count)
    try:
        forwards["torchgpipe"] = gpipe(pipe.stages, count)
    except ImportError:
        tell("torchgpipe is not installed: left out")

    def way(forward: Callable[[Any], Any], threads: int) -> Callable[[], Any]:
        def step() -> None:
            for weight in pipe.parameters():
                weight.grad = None
            with on_cores(cores, threads=threads):
                loss(forward(x), y).backward()

        return step

    ways = {}
    for name, forward in forwards.items():
        ways[f"{name}, {count} micro-batches"] = way(forward, 1)
        ways[f"{name}, {count} micro-batches, {len(cores)} threads an operation"] = way(forward, len(cores))
    return ways


def tutorial(stages: Sequence[Any], x: Any, count: int) -> Any:
    """What PyTorch's model-parallel tutorial does: the second stage is asked for the last split before the first one
    for the next; on devices that do not return before they are done, nothing overlaps."""
    import torch

    first, second = stages
    splits = iter(x.tensor_split(count))
    between = first((next(splits),))
    outputs = []
    for split in splits:
        outputs.append(second(between)[0])
        between = first((split,))
    outputs.append(second(between)[0])
    return torch.cat(outputs)


def gpipe(stages: Sequence[Any], count: int) -> Callable[[Any], Any]:
    """torchgpipe over the same stages, keeping its activations as ours do.

    Raises:
        ImportError: it is not installed.
    """
    import torch
    import torchgpipe

    class Part(torch.nn.Module):
        """A stage as a module; its parameters stay with the pipeline."""

        def __init__(self, stage: Any) -> None:
            super().__init__()
            self._stage = [stage]  # in a list: not registered

        def forward(self, values: Any) -> Any:
            given = self._stage[0](values if isinstance(values, tuple) else (values,))
            return given[0] if len(given) == 1 else given

    parts = torch.nn.Sequential(*map(Part, stages))
    return torchgpipe.GPipe(parts, [1] * len(stages), devices=["cpu"] * len(stages), chunks=count, checkpoint="never")


def in_turns(
    ways: Mapping[str, Callable[[], Any]], rounds: int, foretell: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of each way by round; who comes first changes. One run of each before does not count.

    Args:
        foretell: called before each round: a prediction is of the machine as it is then.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for turn in range(rounds):
        foretell()
        names = list(ways)
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            started = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - started)
    return seconds


# ---- the tables


def report(result: Mapping[str, Any]) -> str:
    """The tables of a result."""
    its, machine, seconds = result["settings"], result["machine"], result["seconds"]
    known = " ".join(f"{name} {machine['versions'].get(name, '-')}" for name in ("torch", "torchgpipe"))
    cut = " | ".join(f"{stage['name']} ({stage['segments']} segments)" for stage in result["cut"])
    rows = [("one step", "median", f"x {NAIVE}, 95 %", "predicted", "by profile", "efficiency")]
    for name, samples in seconds.items():
        ratio = stats.ratio_of_medians(samples, seconds[NAIVE], paired=True)
        predicted, by_profile = (result[key].get(name) for key in ("predicted_s", "predicted_by_profile_s"))
        rows.append((
            name, stats.milliseconds(samples), str(ratio) if name != NAIVE else "1",
            f"{stats.median(predicted) / stats.median(samples):.2f} x" if predicted else "",
            f"{stats.median(by_profile) / stats.median(samples):.2f} x" if by_profile else "",
            f"{efficiency(result, name):.3f}" if predicted else "",
        ))  # fmt: skip
    return "\n\n".join(
        [
            f"{its['model']}, batch {its['batch']} of {its['image_size']}x{its['image_size']},"
            f" {its['stages']} stage(s) on {min(its['stages'], machine['cores_usable'])} core(s): {cut}\n"
            f"{machine['processor']}, {machine['cores_usable']} cores,"
            f" load {machine['load_1min']} before, {result['load_after']} after; {known}",
            stats.table(rows),
            "efficiency: (naive split / stages) / pipeline / (m / (m + stages - 1)), m micro-batches",
            "\n".join(verdicts(result)),
        ]
    )


def efficiency(result: Mapping[str, Any], name: str) -> float:
    """How much of what the schedule's bubble leaves is reached."""
    stages, count = result["settings"]["stages"], count_of(name)
    ratio = stats.ratio_of_medians(result["seconds"][NAIVE], result["seconds"][name], paired=True).value
    return ratio / stages / (count / (count + stages - 1))


def count_of(name: str) -> int:
    """The micro-batches in a way's name."""
    words = name.replace(",", "").split()
    return int(words[words.index("micro-batches") - 1])


def verdicts(result: Mapping[str, Any]) -> list[str]:
    """The targets, and whether they are kept."""
    seconds = result["seconds"]
    ours = {name: its for name, its in seconds.items() if name.startswith("hvdtrain") and BY_HAND not in name}
    best = min(ours, key=lambda name: stats.median(ours[name]))
    lines = []
    if not result["settings"].get("ours"):
        lines.append(judged(f"{best} / {NAIVE}", seconds[best], seconds[NAIVE], NAIVE_TARGET))
        lines.append(judged(f"{ONE_STAGE} / {PLAIN}", seconds[ONE_STAGE], seconds[PLAIN], ONE_STAGE_TARGET))
    for name, its in seconds.items():
        if BY_HAND in name:
            mine = name[: name.index(f", {BY_HAND}")]
            lines.append(judged(f"{mine} / {name}", seconds[mine], its, CUT_TARGET))
        if name.startswith(("torchgpipe", "tutorial")):
            same = [n for n in ours if count_of(n) == count_of(name)]
            mine = min(same, key=lambda n: stats.median(ours[n]))
            lines.append(judged(f"{mine} / {name}", seconds[mine], its, RIVAL_TARGET))
    if not result["settings"].get("ours"):
        reached = max(efficiency(result, name) for name in ours)
        told = _kept(reached >= EFFICIENCY_TARGET)
        lines.append(f"efficiency: {reached:.3f} (target >= {EFFICIENCY_TARGET}: {told})")
    for key, what in (("predicted_s", "from a few short steps"), ("predicted_by_profile_s", "from the profile")):
        if result[key]:
            off = max(abs(stats.median(its) / stats.median(seconds[name]) - 1) for name, its in result[key].items())
            told = _kept(off <= PREDICTION_TARGET)
            lines.append(f"prediction {what}: at most {off:.1%} off (target <= {PREDICTION_TARGET:.0%}: {told})")
    if ALL_CORES in seconds:
        ratio = stats.ratio_of_medians(seconds[best], seconds[ALL_CORES], paired=True)
        lines.append(f"{best} / {ALL_CORES}: {ratio} (no target: one process with all cores)")
    return lines


def judged(what: str, above: Sequence[float], below: Sequence[float], target: float) -> str:
    """A ratio against its target."""
    ratio = stats.ratio_of_medians(above, below, paired=True)
    verdict = _kept(ratio.value <= target) if ratio.low > target or ratio.high <= target else (
        f"{_kept(ratio.value <= target)}, within the noise")  # fmt: skip
    return f"{what}: {ratio} (target <= {target:.3g}: {verdict})"


def _kept(it: bool) -> str:
    return "kept" if it else "MISSED"
