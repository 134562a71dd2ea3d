"""`hvdtrain scale --published`: Horovod's published efficiencies, and what the model says of them.

Nothing is fitted to them: the model knows the batch, one GPU's images/s, the hosts and the network's nominal rate that
were published with them, the operations of the layers, and what NCCL itself takes for the latency of a hop.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from hvdtrain.commands.plan import GIGABIT, save
from hvdtrain.core.errors import install_command
from hvdtrain.pipeline.plan.costs import Link
from hvdtrain.pipeline.plan.scaling import BACKWARD, BucketTiming, MeasuredStep, Network, StepCost, predict
from hvdtrain.record import stats
from hvdtrain.world import startup

BATCH = 64
MODELS = {"Inception V3": ("inception_v3", 299), "ResNet-101": ("resnet101", 224), "VGG-16": ("vgg16", 224)}
# images/s of one GPU, by the network's nominal rate in Gbit/s: two clusters
ALONE = {25: (134.4, 119.4, 130.9), 40: (148.8, 136.0, 149.6)}
FIRST = "16 GPUs"
TABLES, README, PAGE = "README, pull request 44", "README, from 44 on", "docs/benchmarks"
SOURCES = {
    FIRST: (16, 25, (2022.6, 1746.2, 1787.4), TABLES),
    "16 GPUs, TCP": (16, 25, (1990.7, 1685.1, 1308.7), TABLES),
    "64 GPUs, TCP": (64, 40, (7932.1, 7741.6, 6084.2), TABLES),
    "128 GPUs": (128, 25, (0.90, 0.90, 0.79), README),
    "512 GPUs": (512, 25, (0.90, 0.90, 0.68), PAGE),
}
NOTES = f"""\
published by Horovod (github.com/horovod/horovod): tables of images/s in its README until pull request 44 (2017-10-17,
  whose diff shows them), efficiencies of 128 GPUs in the README from then on, of 512 in docs/benchmarks since 2018
  (the paper, arXiv:1802.05799, ends at 128 GPUs)
from there: {BATCH} images a GPU, hosts of 4 Pascal GPUs, 25 Gbit/s with RoCE (64 GPUs: 40 Gbit/s), one GPU's images/s
  of the same cluster. Horovod's defaults of then: cycles of 5 ms, 64 MiB fused
from elsewhere: 5.7 us a hop inside a host (PCI), 14 us between hosts (NCCL, graph/tuning.cc: ring, simple), 15.75 GB/s
  inside (PCI Express 3.0 x16), layers' operations as PyTorch counts them, two thirds of a step for the backward pass
a guess: --coordinator-us. "from {FIRST}": the model's ratio to {FIRST}, times what was published of these
why it is off: the network's nominal rate is taken to be reached, which TCP does not (--link 1.5 14 tries another), nor
  many hosts that share switches; stragglers were not published; summing costs a GPU nothing here"""


class Published(NamedTuple):
    """One published figure: the efficiency against one GPU, and where it is."""

    model: str
    where: str
    ranks: int
    gbit_per_s: int
    efficiency: float
    source: str


def figures() -> list[Published]:
    """All of them; images/s as efficiencies."""
    return [
        Published(model, where, ranks, rate, number if number <= 1 else number / ranks / alone, source)
        for where, (ranks, rate, numbers, source) in SOURCES.items()
        for model, number, alone in zip(MODELS, numbers, ALONE[rate], strict=True)
    ]


def network(gbit_per_s: int, between: tuple[float, float] | None = None, coordinator_us: float = 1.0) -> Network:
    """Hosts of 4 GPUs, and Horovod's defaults of 2017 and 2018.

    Args:
        between: other GB/s and microseconds between hosts than the nominal ones.
    """
    link = Link(between[1] * 1e-6, between[0] * 8 * GIGABIT) if between else Link(14e-6, gbit_per_s * GIGABIT)
    return Network(
        link, Link(5.7e-6, 15.75e9), per_host=4, cycle_s=5e-3, coordinator_s=coordinator_us * 1e-6, fusion_bytes=2**26
    )


def predicted(figure: Published, tensors: tuple[BucketTiming, ...], on: Network) -> StepCost:
    """What the model says of it."""
    alone = dict(zip(MODELS, ALONE[figure.gbit_per_s], strict=True))[figure.model]
    step_s = BATCH / alone
    return predict(MeasuredStep((step_s,), BACKWARD * step_s, tensors, BATCH), on, figure.ranks)


def compared(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every figure, what the model says of it, and what it says from the same cluster's 16 GPUs on."""
    startup.find_modules(dict.fromkeys(("torch", "torchvision"), install_command("torch")))
    from hvdtrain.vision.classifiers import buckets_of

    tensors = {model: buckets_of(name, 0, image_size=size) for model, (name, size) in MODELS.items()}
    found: list[dict[str, Any]] = []
    for figure in figures():
        on = network(figure.gbit_per_s, args.link, args.coordinator_us)
        its = predicted(figure, tensors[figure.model], on).efficiency
        row = figure._asdict() | {"predicted": its, "error": its / figure.efficiency - 1}
        first = next((one for one in found if (one["model"], one["where"]) == (figure.model, FIRST)), row)
        if "TCP" not in figure.where and first is not row:
            row["carried"] = first["efficiency"] * its / first["predicted"]
            row["carried_error"] = row["carried"] / figure.efficiency - 1
        found.append(row)
    return found


def run(args: argparse.Namespace) -> int:
    """Prints the table; returns 0, whatever the errors are."""
    found = compared(args)
    rows = [["", "published", "predicted", "error", f"from {FIRST}", "error", "published in"]]
    for row in found:
        carried = [f"{row['carried']:.1%}", f"{row['carried_error']:+.1%}"] if "carried" in row else ["", ""]
        numbers = [f"{row['efficiency']:.1%}", f"{row['predicted']:.1%}", f"{row['error']:+.1%}", *carried]
        rows.append([f"{row['model']}, {row['where']}", *numbers, row["source"]])
    print(f"predicted, beside what was published\n\n{stats.table(rows)}\n\n{NOTES}")
    if args.json is not None:
        save(args, "scale", published=found, notes=NOTES.splitlines())
    return 0
