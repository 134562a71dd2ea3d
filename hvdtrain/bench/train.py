"""How fast training is, in paired runs on this machine.

Ways to train one model take turns: plain PyTorch, hvdtrain, hand-written Horovod, DistributedDataParallel, Accelerate
and Lightning Fabric (--framework torch), or plain Keras and a prepared fit (--framework keras). Among them are as many
processes as ranks that do not talk, which is what this machine could do at most: efficiency is over their samples a
second. One thread and one core a rank on CPU.

Ways take turns in groups that fit into memory, each with its own references. --all: the ways of PyTorch and of Keras
with one model; with --models toy it shows in a minute or two whether all of them work here.

Settings (--tune [-- COMMAND ...]): threads, Horovod's cycle time, fusion, shared memory and controller, buckets and
(--allow-compression) float16 gradients, tried in turns for a program that trains through hvdtrain; what is faster
beyond noise goes into a file that HVDTRAIN_TUNED, or `hvdtrain launch --tuned`, names.

Prints a table and writes a JSON file with every sample. Give the machine nothing else to do.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hvdtrain.bench import tune
from hvdtrain.bench.turns import train_job
from hvdtrain.bench.turns.turns import CLOCKS, MEMORY, ONE_THREAD, InterleavedJobs, begin, finish, heading, progress
from hvdtrain.cluster.hosts import probe
from hvdtrain.core import flags
from hvdtrain.core.errors import ConfigError, install_command
from hvdtrain.record import stats

ALONE, APART = "one process", "processes that do not talk"
MANY_DEVICES = ("dataparallel", "pipeline")  # of one process
NEEDS = {"accelerate": "accelerate", "fabric": "lightning_fabric", "deepspeed": "deepspeed"}
PROCESS_BYTES = 2 << 30  # about what one of ResNet-50 holds, with its framework
DEFAULTS: dict[str, dict[str, Any]] = {
    "keras": {"per_rank_batch": 128, "steps": 20, "models": [train_job.MNIST]},
    "torch": {"per_rank_batch": 16, "steps": 5, "models": ["resnet18", "resnet50"]},
    "all": {"per_rank_batch": 16, "steps": 5, "models": ["resnet50"]},
}
Groups = Sequence[Mapping[str, Sequence[float]]]  # samples of each way, by label, round by round


@dataclass(frozen=True)
class Way:
    """A way to train."""

    label: str  # in the table
    arm: str  # of the job
    processes: int = 0  # that are started; 0 stands for all ranks
    keras: str = ""  # the backend, where Keras trains

    @property
    def family(self) -> str:
        return f"Keras on {self.keras}" if self.keras else "PyTorch"

    @property
    def alone(self) -> str:
        """The label of what its speed-up is over."""
        return f"{self.family}, {ALONE}"

    @property
    def apart(self) -> str:
        """The label of what its efficiency is against."""
        return f"{self.family}, {APART}"

    @property
    def ours(self) -> str:
        """The label of hvdtrain on as many processes."""
        where = f"hvdtrain, {self.family}" if self.keras else "hvdtrain on Horovod"
        return f"{where}, {ALONE}" if self.processes == 1 else where

    @property
    def is_reference(self) -> bool:
        """Returns True for what the ratios of other ways are over: it is in every group."""
        return self.label in (self.alone, self.apart) or self.arm in ("hvdtrain", "prepared")

    def devices(self, ranks: int) -> int:
        """Returns how many batches a step trains."""
        return ranks if self.processes != 1 or self.arm in MANY_DEVICES else 1


def _of_keras(backend: str) -> tuple[Way, ...]:
    return (
        Way(f"Keras on {backend}, {ALONE}", "plain", 1, backend),
        Way(f"Keras on {backend}, {APART}", "plain", 0, backend),
        Way(f"hvdtrain, Keras on {backend}, {ALONE}", "prepared", 1, backend),
        Way(f"hvdtrain, Keras on {backend}", "prepared", 0, backend),
    )


# hvdtrain trains in the processes of PyTorch that do not talk: nothing is faster
WAYS = (
    Way(f"PyTorch, {ALONE}", "alone", 1),
    Way(f"PyTorch, {APART}", "apart"),
    Way("DataParallel (one process)", "dataparallel", 1),
    Way("pipeline (one process)", "pipeline", 1),
    Way("DistributedDataParallel", "ddp"),
    Way("DeepSpeed, ZeRO 0", "deepspeed"),
    Way("Accelerate", "accelerate"),
    Way("Lightning Fabric", "fabric"),
    Way("Horovod by hand", "horovod"),
    Way(f"hvdtrain on Horovod, {ALONE}", "hvdtrain", 1),
    Way("hvdtrain on Horovod", "hvdtrain"),
    *_of_keras("tensorflow"),
    *_of_keras("torch"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain bench train`."""
    count = flags.whole(1)
    add = parser.add_argument
    add("--all", action="store_true", help="compare all ways of PyTorch, Keras and other libraries with one model")
    add("--framework", choices=["keras", "torch"], help="(default: keras; with --all: both)")
    backend = "Keras' (default: KERAS_BACKEND, else tensorflow; --all: both)"
    add("--backend", choices=["tensorflow", "torch"], help=backend)
    add(
        "--per-rank-batch",
        type=count,
        metavar="N",
        help="pictures of a rank in a step (default: Keras 128, PyTorch 16)",
    )
    add("--steps", type=count, metavar="N", help="updates in a block (default: Keras 20, PyTorch 5)")
    add("--blocks", type=count, default=10, metavar="N", help="blocks of each way (default: %(default)s)")
    add(
        "--ranks",
        "-np",
        type=count,
        default=2,
        metavar="N",
        help="number of ranks; 1: only one process (default: %(default)s)",
    )
    add("--launcher", choices=["horovodrun", "mpirun"], default="horovodrun", help="(default: %(default)s, on Gloo)")
    models = "torchvision's, of Keras mnist or Keras' own (default: mnist; PyTorch resnet18 resnet50; --all: resnet50)"
    add("--models", nargs="+", metavar="NAME", help=models)
    add("--pixels", type=count, default=64, metavar="N", help="side of a picture in pixels (default: %(default)s)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="device, for PyTorch (default: %(default)s)")
    at_once = "processes in memory (default: one for each 2 GiB free)"
    add("--at-once", type=count, metavar="N", help=at_once)
    add("--tune", action="store_true", help="find faster settings for COMMAND, or for a model of --models")
    add("--budget", type=flags.positive, default=300.0, metavar="S", help="seconds for --tune (default: %(default)g)")
    add("--allow-compression", action="store_true", help="let --tune also try float16 gradients, which change results")
    add("--out", type=Path, metavar="FILE", help="file to write (default: bench-train.json; with --tune tuned.json)")
    add("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="command that every rank runs, for --tune")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; returns 0."""
    args.out = args.out or Path("tuned.json" if args.tune else "bench-train.json")
    if not args.all:
        args.framework = args.framework or ("torch" if args.tune else "keras")
        if args.framework == "keras":
            args.backend = args.backend or os.environ.get("KERAS_BACKEND") or "tensorflow"
    for name, value in DEFAULTS["all" if args.all else args.framework].items():
        setattr(args, name, getattr(args, name) or value)
    if args.tune:
        return tune.run(args)
    if args.argv:
        raise ConfigError("a command after -- needs --tune", " ".join(args.argv), "hvdtrain bench train --tune -- ...")
    if args.all and (args.ranks < 2 or len(args.models) > 1):
        received = f"--ranks {args.ranks} --models {' '.join(args.models)}"
        rule = "--all needs at least 2 ranks and exactly one model"
        raise ConfigError(rule, received, "--ranks 2 --models NAME")
    result = begin("train", args, "a benchmark starts its own ranks")
    result["models"] = {model: measure(args, model) for model in args.models}
    return finish(args, result, report)


# ---- what is measured


def measure(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Measures every way, one group after another; returns the part of the result that `report` reads."""
    ways = [way for way in WAYS if _is_wanted(way, args) and _is_there(way, args, model)]
    if not ways:
        rule, received = "a benchmark needs a way to train the model here", f"{model} on {args.device}"
        raise ConfigError(rule, received, "another of --models, --framework or --device: see above what was skipped")
    at_once = args.at_once or probe.memory().get("MemAvailable", 0) // PROCESS_BYTES
    groups = grouped(ways, args.ranks, at_once)
    names = [f"{model}, group {number} of {len(groups)}" for number in range(1, len(groups) + 1)]
    found = [_one_group(args, model, *its) for its in zip(groups, names, strict=True)]
    wall, cpu, memory = ([its[kind] for its in found] for kind in (*CLOCKS, MEMORY))
    return {
        "ranks": args.ranks, "seconds": wall, "cpu_seconds": cpu,
        "memory_bytes": {way.label: max(_all(memory, way.label)) for way in ways},
        "ratios": {way.label: ratios(way, wall, args.ranks) for way in ways},
    }  # fmt: skip


def _one_group(args: argparse.Namespace, model: str, group: Sequence[Way], name: str) -> dict[str, Any]:
    """Measures a group's ways in turns (`InterleavedJobs.rounds`). The processes have ended when it returns."""
    same = {key: getattr(args, key) for key in ("per_rank_batch", "steps", "pixels", "device", "launcher")}
    with InterleavedJobs(os.environ | ONE_THREAD) as jobs:
        for way in group:
            progress(f"{name}: starting {way.label}")
            devices, ranks = args.ranks if way.arm in MANY_DEVICES else 1, way.processes or args.ranks
            command = train_job.command(way.arm, ranks, model=model, devices=devices, backend=way.keras, **same)
            jobs.start(way.label, command, ranks, {"OMP_NUM_THREADS": str(devices)})
        turns: dict[str, tuple[str, dict[str, Any]]] = {way.label: (way.label, {}) for way in group}
        jobs.rounds(turns, 1, f"{name}, warming up")  # Keras traces
        return jobs.rounds(turns, args.blocks, name)


def grouped(ways: Sequence[Way], ranks: int, at_once: int) -> list[list[Way]]:
    """Returns ways that take turns with each other, each group with the references of its family; pure.

    A group has `at_once` processes at most; one with a single way beside the references may have more.
    """
    groups = []
    for family in dict.fromkeys(way.family for way in ways):
        its = [way for way in ways if way.family == family]
        references = [way for way in its if way.is_reference]
        group = list(references)
        for way in its:
            if way in references:
                continue
            if sum(one.processes or ranks for one in (*group, way)) > at_once and len(group) > len(references):
                groups.append(group)
                group = list(references)
            group.append(way)
        groups.append(group)
    return groups


def _is_wanted(way: Way, args: argparse.Namespace) -> bool:
    framework = "keras" if way.keras else "torch"
    several = args.ranks > 1 or (way.processes == 1 and way.arm not in MANY_DEVICES)
    return several and args.framework in (None, framework) and (not way.keras or args.backend in (None, way.keras))


def _is_there(way: Way, args: argparse.Namespace, model: str) -> bool:
    needed = NEEDS.get(way.arm) if not way.keras else "tensorflow" if way.keras == "tensorflow" else "keras"
    why, known = "", (train_job.MNIST, *train_job.APPLICATIONS)
    if needed and importlib.util.find_spec(needed) is None:
        why = f"{needed} is not installed ({install_command('dev')})"
    elif way.keras and model not in known:
        why = f"Keras has no {model}; of what both have: {', '.join(known[1:])}"
    elif way.keras and args.device != "cpu":
        why = "Keras is measured on CPUs"
    if why:
        progress(f"skipped: {way.label}: {why}")
    return not why


def ratios(way: Way, groups: Groups, ranks: int) -> dict[str, Any]:
    """Returns ratios over pairs of the same round and group. "speedup": samples a second over those of one process.
    "efficiency": over those of processes that do not communicate (not for a single device). "ours": hvdtrain's step
    over this way's."""
    found = {"ours": _ratio(groups, way.ours, way.label)} if way.label != way.ours else {}
    if way.label != way.alone and way.devices(ranks) > 1:
        speedup = _ratio(groups, way.alone, way.label)
        found["speedup"] = speedup and {name: ranks * value for name, value in speedup.items()}
        found["efficiency"] = _ratio(groups, way.apart, way.label)
    return {name: ratio for name, ratio in found.items() if ratio}


def _ratio(groups: Groups, above: str, below: str) -> dict[str, float] | None:
    """Returns the ratio over groups that have both; None if there are none."""
    both = [group for group in groups if above in group and below in group]
    return vars(stats.ratio_of_medians(_all(both, above), _all(both, below))) if both else None


def _all(groups: Groups, label: str) -> list[float]:
    return [sample for group in groups for sample in group.get(label, ())]


# ---- the report


NOTE = """\
speed-up: samples a second over those of one process of the same framework; efficiency: over those of processes that do
not talk; both in the same rounds of the same group. memory: the most that a device held; without GPUs, a process, also
one of several devices."""


def _what(result: Mapping[str, Any], model: str) -> str:
    its = result["settings"]
    side = 28 if model == train_job.MNIST else its["pixels"]
    return (
        f"{model}, batch {its['per_rank_batch']} a rank of {side}x{side}, {its['device']},"
        f" {its['ranks']} ranks or devices, a core each; {its['blocks']} rounds of {its['steps']} steps"
    )


def report(result: Mapping[str, Any]) -> str:
    """Returns a table for each model."""
    ways, texts = {way.label: way for way in WAYS}, [heading("", result)]
    for model, part in result["models"].items():
        rows = [_row(ways[label], part, result["settings"]) for label in part["ratios"]]
        texts += [_what(result, model), stats.table([tuple(rows[0]), *(tuple(row.values()) for row in rows)])]
    return "\n\n".join([*texts, NOTE])


def _row(way: Way, part: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns cells by column."""
    ratio, seconds = part["ratios"][way.label], _all(part["seconds"], way.label)

    def shown(name: str, base: str) -> str:
        return str(stats.Interval(**ratio[name])) if name in ratio else "1" if way.label == base else ""

    return {
        "way": way.label,
        "groups": ", ".join(str(n) for n, group in enumerate(part["seconds"], 1) if way.label in group),
        "step (median)": stats.milliseconds(seconds),
        "samples/s": f"{way.devices(part['ranks']) * settings['per_rank_batch'] / median(seconds):,.1f}",
        "CPU time": stats.milliseconds(_all(part["cpu_seconds"], way.label)),
        "hvdtrain's / this, 95 %": shown("ours", way.ours),
        "speed-up, 95 %": shown("speedup", way.alone),
        "efficiency, 95 %": shown("efficiency", way.apart),
        "memory": f"{part['memory_bytes'][way.label] / 2**20:.0f} MiB",
    }
