"""`hvdtrain scale`: what data-parallel training will do on 8 ... 4096 ranks, from what a step and a link cost.

The step is a run's (`hvdtrain scale runs/mnist`), or given (`--step 0.31 --gradients 170MB`); the link is given, or
what `hvdtrain bench comm` measured. What it prints is a prediction, never a result.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from hvdtrain.commands.plan import GIGABIT, LATENCY_US, LINK_GBPS, NETWORK_GBPS, computable, json_of
from hvdtrain.core import flags
from hvdtrain.core.errors import ConfigError, install_command
from hvdtrain.pipeline.plan.costs import Link
from hvdtrain.pipeline.plan.scaling import (
    BACKWARD,
    MOST_RANKS,
    BucketTiming,
    MeasuredStep,
    Network,
    StepCost,
    Way,
    first_below,
    predict,
    remedies,
)
from hvdtrain.record import stats
from hvdtrain.record.bottleneck import BETWEEN, STEP, TRAIN_STEP, phases_per_rank
from hvdtrain.record.log import read_events, read_run
from hvdtrain.world import startup

EFFICIENCIES = (0.90, 0.75, 0.50)
UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
GIGABYTE = 8 * GIGABIT
MOST_BUCKETS = 10_000


def size_bytes(text: str) -> float:
    """A type for flags: 97.5MB, 64MiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|k|M|G|Ki|Mi|Gi)B?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"must be a size, as 97.5MB or 64MiB, not {text!r}")
    return float(match[1]) * UNITS[match[2]]


def some_bytes(text: str) -> float:
    """Parses a size as `size_bytes` does; raises ArgumentTypeError if it is 0."""
    if not (size := size_bytes(text)):
        raise argparse.ArgumentTypeError(f"must be a size > 0, not {text!r}")
    return size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain scale`."""
    parser.description = __doc__
    add, seconds = parser.add_argument, flags.positive
    # fmt: off
    add("run_dir", nargs="?", type=Path, metavar="RUN",
        help="directory of a run, with the seconds by phase, rank and step")
    add("--step", type=seconds, metavar="S", help="seconds of one step of one rank alone, instead of RUN")
    add("--backward", type=seconds, metavar="S",
        help="seconds of its backward pass (default: as logged, or two thirds of the step)")
    add("--gradients", type=some_bytes, metavar="SIZE",
        help="size of all gradients, for example 97.5MB; they arrive evenly")
    add("--model", metavar="NAME", help="a model of torchvision: its gradients arrive in the order of its layers")
    add("--samples", type=seconds, metavar="N", help="samples of one rank in a step (default: as logged)")
    add("--link", nargs=2, type=seconds, metavar=("GB/S", "US"),
        help=f"bandwidth between hosts, and latency of a message (default: {NETWORK_GBPS / 8:g} {LATENCY_US:g}, as "
        "in hvdtrain plan)")
    add("--host-link", nargs=2, type=seconds, metavar=("GB/S", "US"),
        help=f"the same inside a host (default: {LINK_GBPS / 8:g} {LATENCY_US:g})")
    add("--comm", type=Path, metavar="FILE", help="JSON of hvdtrain bench comm; its ring gives the link inside a host")
    add("--per-host", type=flags.whole(1), default=8, metavar="N", help="ranks a host (default: 8)")
    add("--ranks", type=flags.whole(1), nargs="+", default=[8, 64, 512, 4096], metavar="N",
        help="numbers of ranks to predict (default: 8 64 512 4096)")
    add("--way", choices=get_args(Way), default="ring", help="algorithm of the sum (default: ring)")
    add("--bucket", type=some_bytes, default=25 * 2.0**20, metavar="SIZE",
        help="size of a bucket of gradients (default: 25MiB)")
    add("--fusion", type=size_bytes, default=0.0, metavar="SIZE",
        help="size up to which Horovod fuses buckets (default: 0, as hvdtrain sets it)")
    add("--cycle-ms", type=flags.at_least_0, default=1.0, metavar="X", help="HOROVOD_CYCLE_TIME (default: 1)")
    add("--coordinator-us", type=flags.at_least_0, default=1.0, metavar="X",
        help="microseconds of the coordinator for one rank in a cycle (default: 1, a guess)")
    add("--json", action="store_true", help="print everything as JSON")
    # fmt: on


def run(args: argparse.Namespace) -> int:
    """Predicts and prints; returns 0."""
    sources: dict[str, list[str]] = {"measured": [], "given": [], "assumed": []}
    with computable(args):
        training, network = _training(args, sources), _network(args, sources)
        counts = sorted(set(args.ranks))
        steps = [predict(training, network, ranks) for ranks in counts]
        below = {f"{share:.0%}": first_below(training, network, share) for share in EFFICIENCIES}
        others = remedies(training, network, counts[-1])
        if not all(math.isfinite(value) for step in (*steps, *others.values()) for value in as_json(step).values()):
            raise OverflowError("a step without an end")
        text = _report(steps, below, others, args.samples)
    if args.json:
        print(json_of(args, **sources, network=asdict(network), buckets=training.buckets,
                      backward_s=training.backward_s, predicted=[as_json(step) for step in steps], below=below,
                      remedies={name: as_json(step) for name, step in others.items()}))  # fmt: skip
        return 0
    print(text)
    print("\n".join(f"{name}: {'; '.join(its)}" for name, its in sources.items() if its))
    return 0


def as_json(step: StepCost) -> dict[str, float]:
    """A predicted step, with what follows from it."""
    return asdict(step) | {name: getattr(step, name) for name in ("step_s", "efficiency", "samples_per_s")}


# ---- what a step is


def _training(args: argparse.Namespace, sources: dict[str, list[str]]) -> MeasuredStep:
    if (args.run_dir is None) == (args.step is None):
        remedy = "hvdtrain scale RUN, or --step 0.31 --gradients 170MB"
        raise ConfigError("hvdtrain scale needs either RUN or --step", "both" if args.run_dir else "neither", remedy)
    kind = "given" if args.gradients else "measured"
    if args.run_dir is None:
        compute_s, share = [args.step], BACKWARD
        sources["given"].append(f"a step of {args.step:g} s; no spread: no stragglers")
    else:
        compute_s, share, logged = of_run(args.run_dir, sources)
        args.samples = args.samples or logged.get("samples")
        if args.gradients is None and args.model is None:
            args.gradients, args.model = logged.get("gradient_bytes"), logged.get("model")
    backward_s = args.backward or share * fmean(compute_s)
    if backward_s > fmean(compute_s):
        raise ConfigError("the backward pass cannot exceed the step", f"{backward_s:g} of {fmean(compute_s):g} s")
    if args.backward:
        sources["given"].append(f"a backward pass of {args.backward:g} s")
    elif share == BACKWARD:
        sources["assumed"].append("two thirds of a step are its backward pass")
    return MeasuredStep(tuple(compute_s), backward_s, _buckets(args, sources[kind], sources), args.samples or 1.0)


def of_run(path: Path, sources: dict[str, list[str]]) -> tuple[list[float], float, dict[str, Any]]:
    """Returns the seconds of steps without communication, the backward pass's share, and other facts from the log.

    It skips the first event (a first step starts and compiles) and the events with an evaluation or a checkpoint.
    Rank 0 logs windows of 0.1 s or of one step; the other ranks' totals show how much slower each of them is.

    Raises:
        ConfigError: the directory has no run, or the run has no steps, or no seconds of its steps.
    """
    record, events = read_run(path), read_events(path)
    begun = max((at for at, its in enumerate(events) if its.get("kind") in ("start", "resume")), default=0)
    windows = [its for its in events[begun:] if its.get("kind") == "step" and its.get("steps")]
    if record is None or not windows:
        raise ConfigError("hvdtrain scale needs a run's directory, with steps", f"{path}: none", "--step 0.31")
    windows = [its for its in windows[1:] if not BETWEEN.keys() & its["seconds"].keys()] or windows
    totals = phases_per_rank(events) or [{}]
    ratios = [_computed(its) / _computed(totals[0]) for its in totals] if all(map(_computed, totals)) else [1.0]
    means_s = [_computed(its["seconds"]) / its["steps"] for its in windows for _ in range(its["steps"])]
    compute_s = [mean_s * ratio for mean_s in means_s for ratio in ratios]
    if not all(compute_s):
        raise ConfigError("the log must have the seconds of each step", f"{path}: 0 s", "--step 0.31")
    spent = [its["seconds"] for its in windows]
    backward = sum(its.get("backward", 0.0) for its in spent) / sum(map(_computed, spent))
    size = record["world"]["size"]
    steps = len(means_s)
    sources["measured"].append(f"{steps} steps of {size} rank(s) in {path}, in {len(windows)} windows")
    if max(its["steps"] for its in windows) > 1:
        sources["assumed"].append("steps vary as windows do (means of some): the least that stragglers cost")
    if size > 1 and any(its.get(TRAIN_STEP) for its in spent):
        sources["assumed"].append("Keras' steps compute only: what they waited for others is in them (run 1 rank)")
    logged = {"samples": sum(its["samples"] for its in windows) / steps / size, "model": record["config"].get("model")}
    return compute_s, backward or BACKWARD, logged | next((its for its in events if its.get("kind") == "model"), {})


def _computed(seconds: dict[str, float]) -> float:
    return sum(seconds.get(phase, 0.0) for phase in STEP if phase != "communication")


def _buckets(args: argparse.Namespace, known: list[str], sources: dict[str, list[str]]) -> tuple[BucketTiming, ...]:
    if args.gradients:
        count = math.ceil(args.gradients / args.bucket)
        if count > MOST_BUCKETS:
            raise ConfigError(f"gradients cannot have over {MOST_BUCKETS:,} buckets", f"{count:,}", "--bucket 25MiB")
        known.append(f"{args.gradients / 1e6:.1f} MB of gradients")
        sources["assumed"].append("they become ready evenly over the backward pass")
        return tuple(BucketTiming(args.gradients / count, (n + 1) / count) for n in range(count))
    if args.model is None:
        raise ConfigError("gradients must have a size", "no --gradients", "--gradients 97.5MB, or --model resnet50")
    startup.find_modules(dict.fromkeys(("torch", "torchvision"), install_command("torch")))
    from hvdtrain.vision.classifiers import buckets_of

    buckets = buckets_of(args.model, args.bucket)
    total = sum(its.size_bytes for its in buckets)
    known.append(f"{total / 1e6:.1f} MB of {args.model}'s gradients, ready as its operations are counted")
    return buckets


# ---- what a network is


def _network(args: argparse.Namespace, sources: dict[str, list[str]]) -> Network:
    measured = _measured_link(args.comm) if args.comm else {}
    links = []
    for where, given, usual_gbps in (
        ("between hosts", args.link, NETWORK_GBPS),
        ("inside a host", args.host_link, LINK_GBPS),
    ):
        kind = "given" if given else "measured" if where in measured else "assumed"
        rate, latency_us = given or (usual_gbps / 8, LATENCY_US)
        if given and math.isinf(rate * GIGABYTE):
            raise OverflowError(f"{rate:g} GB/s {where}")
        link = measured[where] if kind == "measured" else Link(latency_us * 1e-6, rate * GIGABYTE)
        sources[kind].append(f"{link.bytes_per_s / GIGABYTE:.3g} GB/s and {link.latency_s * 1e6:.3g} us {where}")
        links.append(link)
    kind = "assumed" if args.coordinator_us == 1.0 else "given"
    sources[kind].append(f"{args.coordinator_us:g} us a rank for the coordinator, in cycles of {args.cycle_ms:g} ms")
    between, inside = links
    cycle_s, coordinator_s = args.cycle_ms * 1e-3, args.coordinator_us * 1e-6
    return Network(between, inside, args.per_host, args.way, cycle_s, coordinator_s, args.fusion)


def _measured_link(path: Path) -> dict[str, Link]:
    """Returns the link inside a host, as `hvdtrain bench comm` measured it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        cost = found["links"]["ring"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("--comm must be JSON of hvdtrain bench comm, with a ring", f"{path}: {error!r}") from None
    link = Link(cost["latency_s"], 1 / cost["s_per_byte"] if cost["s_per_byte"] else math.inf)
    return {"inside a host": link}


# ---- the report


def _report(
    steps: Sequence[StepCost], below: dict[str, int | None], others: dict[str, StepCost], samples: float | None
) -> str:
    rows = [
        ["ranks", "step", "samples/s", "efficiency", "compute", "stragglers", "exposed communication", "negotiation"]
    ]
    for its in steps:
        spent = (its.compute_s, its.straggler_s, its.exposed_communication_s, its.negotiation_s)
        rate = f"{its.samples_per_s:,.0f}" if samples else ""
        parts = [f"{part_s * 1e3:.2f} ms" for part_s in spent]
        rows.append([str(its.ranks), f"{its.step_s:.4g} s", rate, f"{its.efficiency:.1%}", *parts])
    limits = [f"{share} from {ranks} ranks on" for share, ranks in below.items() if ranks]
    changes = ", ".join(f"{name} {its.efficiency:.1%}" for name, its in others.items())
    return (
        f"predicted, not measured\n\n{stats.table(rows)}\n\n"
        f"efficiency is below {', '.join(limits) or f'90% at no size up to {MOST_RANKS} ranks'}\n"
        f"at {steps[-1].ranks} ranks, {steps[-1].efficiency:.1%}, one change would give: {changes}"
    )
