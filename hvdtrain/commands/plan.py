"""`hvdtrain plan`: which way to train a model on these devices is predicted to be fastest, and which do not fit.

The model's parts are measured on this machine, then every plan is computed: data parallel, pipeline, or both, with
micro-batches, recomputation and accumulation. What it prints is a prediction, never a result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.core import flags
from hvdtrain.core.errors import ConfigError, install_command
from hvdtrain.pipeline.plan.costs import Device, Link, SegmentCost
from hvdtrain.pipeline.plan.partition import in_words
from hvdtrain.pipeline.tuning.planner import Cluster, ParallelPlan, as_json, at_speed, described, forward_flops, plans
from hvdtrain.record import stats
from hvdtrain.world import startup

if TYPE_CHECKING:
    import torch

    from hvdtrain.pipeline import Profile

MEASURED_SAMPLES = 2  # in a micro-batch: with 1, batch-norm at the end of some models has nothing to average
# what is taken for granted of devices that are only described; a flag for each
TFLOPS, LAUNCH_US, LINK_GBPS, NETWORK_GBPS, LATENCY_US, RESERVE_GIB = 10.0, 10.0, 100.0, 10.0, 30.0, 1.0
TRAINING_FLOPS = 3.0  # times those of the forward pass: the backward pass computes two gradients
GIGABIT = 1e9 / 8
OPTIMIZER_COPIES = {"sgd": 1.0, "adamw": 2.0}  # momentum; two moments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain plan`."""
    parser.description = __doc__
    count, number = flags.whole(1), flags.positive
    add = parser.add_argument
    # fmt: off
    add("--model", default="resnet50", metavar="NAME", help="any classifier of torchvision (default: %(default)s)")
    add("--batch", type=count, default=256, metavar="N", help="samples in an update, over all devices (default: 256)")
    add("--devices", default="4x24GiB", metavar="LIST",
        help="devices of one node: 4x24GiB; unequal ones 2x24GiB,2x80GiB@2.5 (@: times as fast); or devices of this "
        "machine: cuda:0,cuda:1 or cpu,cpu (default: %(default)s)")
    add("--nodes", type=count, default=1, metavar="N", help="number of such nodes (default: 1)")
    add("--image-size", type=flags.whole(8), default=224, metavar="N", help="(default: 224)")
    add("--classes", type=count, default=1000, metavar="N", help="(default: 1000)")
    add("--optimizer", choices=sorted(OPTIMIZER_COPIES), default="sgd", help="optimizer, for its memory (default: sgd)")
    add("--samples-per-s", type=number, metavar="X",
        help="measured training speed of one device (default: from --tflops)")
    add("--tflops", type=number, default=TFLOPS, metavar="X",
        help="sustained speed of one device (default: %(default)s)")
    add("--launch-us", type=flags.at_least_0, default=LAUNCH_US, metavar="X",
        help="microseconds to start one forward pass of a part (default: %(default)s)")
    add("--link-gbps", type=number, metavar="X",
        help=f"gigabits a second between the devices of a node (default: measured, or {LINK_GBPS:g})")
    add("--all-reduce-gbps", type=number, default=NETWORK_GBPS, metavar="X",
        help="gigabits a second between nodes (default: 10)")
    add("--latency-us", type=flags.at_least_0, default=LATENCY_US, metavar="X",
        help="latency of a message in microseconds (default: 30)")
    add("--reserve-gib", type=flags.at_least_0, default=RESERVE_GIB, metavar="X",
        help="memory of each described device for driver, libraries and fragmentation (default: %(default)s)")
    add("--profile", type=Path, metavar="FILE", help="file with measured costs: read if it exists, else written")
    add("--top", type=count, default=15, metavar="N", help="number of fitting plans to print (default: %(default)s)")
    add("--json", action="store_true", help="print everything as JSON")
    # fmt: on


def run(args: argparse.Namespace) -> int:
    """Measures, ranks and prints; returns 0."""
    if args.profile is not None and not args.profile.exists():  # else it is read
        flags.check_file("--profile", args.profile)
    devices = described(args.devices, reserve_bytes=args.reserve_gib * 2**30)
    startup.find_modules(dict.fromkeys(("torch", "torchvision"), install_command("torch")))
    started = time.perf_counter()
    with computable(args):
        inputs = _given(args, devices) if devices else _real(args)
        found = plans(inputs.costs, batch=args.batch, cluster=inputs.cluster)
        text = _report(args, inputs, found)
    print(json_of(args, **inputs.sources, plans=[as_json(plan) for plan in found]) if args.json else text)
    print(f"planned in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return 0


@dataclass
class PlanInputs:
    """The inputs of the plans, with the source of each number."""

    costs: Sequence[SegmentCost]
    cluster: Cluster
    sources: dict[str, list[str]] = field(default_factory=lambda: {"measured": [], "given": [], "assumed": []})

    def note(self, text: str, *, is_given: bool) -> None:
        """Notes a number that the user gave (`is_given`), or that is assumed."""
        self.sources["given" if is_given else "assumed"].append(text)


def _given(args: argparse.Namespace, devices: tuple[Device, ...]) -> PlanInputs:
    """Devices that are not here: the shares of the parts are those of this processor, the speed is given."""
    model, example = _model(args)
    profile = _profile(args, model, example, ["cpu"], [MEASURED_SAMPLES])
    samples = profile.samples[0]
    if args.samples_per_s:
        sample_s, what = 1 / args.samples_per_s, f"{args.samples_per_s:g} samples/s on one device"
    else:
        flops = TRAINING_FLOPS * forward_flops(model, example) / len(example)
        sample_s = flops / (args.tflops * 1e12)
        what = f"{args.tflops:g} TFLOP/s on one device ({flops / 1e9:.1f} GFLOP a sample: {1 / sample_s:.0f} samples/s)"
    costs = at_speed(profile.costs, sample_s, samples, args.launch_us * 1e-6)
    network, link = _network(args), Link(args.latency_us * 1e-6, (args.link_gbps or LINK_GBPS) * GIGABIT)
    inputs = PlanInputs(costs, Cluster(devices, args.nodes, link, network))
    inputs.sources["measured"].append(
        f"bytes, and each part's share of the time, of {len(profile.costs)} parts on this processor"
    )
    inputs.note(what, is_given=bool(args.samples_per_s) or args.tflops != TFLOPS)
    if args.launch_us:
        inputs.note(f"{args.launch_us:g} us to begin a pass of a part", is_given=args.launch_us != LAUNCH_US)
    inputs.note(f"{args.link_gbps or LINK_GBPS:g} Gbit/s within a node", is_given=args.link_gbps is not None)
    inputs.note(f"{args.reserve_gib:g} GiB of each device not for training", is_given=args.reserve_gib != RESERVE_GIB)
    return _with_network(args, inputs)


def _real(args: argparse.Namespace) -> PlanInputs:
    """Devices of this machine: everything within a node is measured."""
    model, example = _model(args)
    names = [name.strip() for name in args.devices.split(",")]
    profile = _profile(args, model, example, names, [MEASURED_SAMPLES, 4 * MEASURED_SAMPLES])
    links: Any = profile.links or Link()
    if args.link_gbps:
        links = Link(args.latency_us * 1e-6, args.link_gbps * GIGABIT)
    cluster = Cluster(profile.devices, args.nodes, links, _network(args))
    inputs = PlanInputs(profile.costs, cluster)
    inputs.sources["measured"].append(f"times and bytes of {len(profile.costs)} parts, and links, on {args.devices}")
    if args.link_gbps:
        inputs.note(f"{args.link_gbps:g} Gbit/s within a node", is_given=True)
    return _with_network(args, inputs)


def _network(args: argparse.Namespace) -> Link:
    return Link(args.latency_us * 1e-6, args.all_reduce_gbps * GIGABIT)


def _with_network(args: argparse.Namespace, inputs: PlanInputs) -> PlanInputs:
    if args.nodes > 1:
        inputs.note(f"{args.all_reduce_gbps:g} Gbit/s between nodes", is_given=args.all_reduce_gbps != NETWORK_GBPS)
    if args.nodes > 1 or len(inputs.cluster.devices) > 1:
        inputs.note(f"{args.latency_us:g} us a message", is_given=args.latency_us != LATENCY_US)
    return inputs


def _model(args: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor]:
    import torch

    from hvdtrain.vision import classifiers

    classifiers.check_name(args.model)
    model = classifiers.build(args.model, args.classes, image_size=args.image_size)
    return model, torch.randn(4 * MEASURED_SAMPLES, 3, args.image_size, args.image_size)


def _profile(
    args: argparse.Namespace, model: torch.nn.Module, example: torch.Tensor, devices: list[str], sizes: list[int]
) -> Profile:
    """Measured, or read from --profile."""
    from hvdtrain.pipeline import Profile, profile

    of = {name: getattr(args, name) for name in ("model", "image_size", "classes", "optimizer")} | {"devices": devices}
    if args.profile is not None and args.profile.exists():
        found = Profile.load(args.profile)
        _check_profile(args.profile, of)
        print(f"costs: read from {args.profile}", file=sys.stderr)
        return found
    started = time.perf_counter()
    print(f"measuring {args.model} on {', '.join(devices)} ...", file=sys.stderr, flush=True)
    copies = OPTIMIZER_COPIES[args.optimizer]
    found = profile(model, example, devices, sizes=sizes, optimizer_copies=copies, repeats=1)
    print(f"measured {len(found.costs)} parts in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    if args.profile is not None:
        content = asdict(found) | {"of": of}
        flags.write_file("--profile", args.profile, json.dumps(content, indent=1, default=str))
    return found


def _check_profile(path: Path, wanted: Mapping[str, Any]) -> None:
    """Refuses the costs of something else."""
    of = json.loads(path.read_text(encoding="utf-8")).get("of", {})
    wrong = [f"{name} {of.get(name, 'unknown')}, not {its}" for name, its in wanted.items() if of.get(name) != its]
    if wrong:
        raise ConfigError("--profile must be of the planned job", f"{path}: {'; '.join(wrong)}", "name another profile")


def _report(args: argparse.Namespace, inputs: PlanInputs, found: Sequence[ParallelPlan]) -> str:
    """The tables, and where the numbers come from."""
    fitting, others = [plan for plan in found if not plan.reason], [plan for plan in found if plan.reason]
    nodes = f"{args.nodes} nodes of {args.devices}" if args.nodes > 1 else args.devices
    job = f"{args.model}, {args.image_size} x {args.image_size}, batch {args.batch}, {args.optimizer}, on {nodes}"
    parts = [f"{job}: predicted, not measured\n"]
    parts.append(stats.table(_rows(fitting[: args.top])) if fitting else "no plan fits")
    if len(fitting) > args.top:
        parts.append(f"and {len(fitting) - args.top} slower ones (--top {len(fitting)})")
    if others:
        parts.append("\ndoes not fit:\n" + "\n".join(f"  {plan}: {plan.reason}" for plan in others))
    parts.append("")
    parts += [f"{name}: {'; '.join(notes)}" for name, notes in inputs.sources.items() if notes]
    return "\n".join(parts)


def _rows(found: Sequence[ParallelPlan]) -> list[list[str]]:
    rows = [["plan", "samples/s", "of best", "bubble", "all-reduce", "memory", "limit"]]
    best = found[0].predicted_samples_per_s
    for plan in found:
        # of the device that is fullest
        share, need, limit = max(
            (need / limit, need, limit) for need, limit in zip(plan.memory_bytes, plan.limit_bytes, strict=True)
        )
        if not share:
            need = max(plan.memory_bytes)
        rows.append([
            str(plan), f"{plan.predicted_samples_per_s:.1f}", f"{plan.predicted_samples_per_s / best:.0%}",
            f"{plan.bubble:.0%}", f"{plan.all_reduce_s / plan.step_s:.0%}", in_words(need),
            "none" if math.isinf(limit) else in_words(limit),
        ])  # fmt: skip
    return rows


@contextlib.contextmanager
def computable(args: argparse.Namespace) -> Iterator[None]:
    """Raises ConfigError for numbers from which nothing can be computed: too large, or too small, for a float."""
    try:
        yield
    except (ArithmeticError, ValueError) as error:
        if isinstance(error, ValueError) and not str(error).startswith("cannot convert float"):
            raise
        numbers = {name: value for name, value in vars(args).items() if type(value) in (int, float, list)}
        received = f"{error}, from {', '.join(f'{name} {value!r:.50}' for name, value in numbers.items())}"
        rule = "a prediction needs numbers that a step, a link and a device can have"
        raise ConfigError(rule, received, "remove the flag with the extreme value") from None


def json_of(args: argparse.Namespace, **found: Any) -> str:
    """Returns the result of a command as --json prints it."""
    settings = {name: value for name, value in vars(args).items() if isinstance(value, (int, float, str, list))}
    result = {"format": 1, "command": args.command, "machine": stats.machine(), "settings": settings, **found}
    return json.dumps(result, indent=1)
