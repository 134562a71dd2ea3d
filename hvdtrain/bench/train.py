"""How fast training is, in paired runs on this machine.

PyTorch (--framework torch): a step of hvdtrain's loop against plain PyTorch, hand-written Horovod and
DistributedDataParallel, Accelerate and Lightning Fabric; and several ranks against one.

Keras (--framework keras):
1. A prepared fit against plain Keras, both in one process, taking turns: what hvdtrain costs.
2. Several ranks against one, one thread and one core each, taking turns: what the ranks bring.

Prints a table and writes a JSON file with every sample. Give the machine nothing else to do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.bench import torch_train
from hvdtrain.bench.report import begin, finish, measured_on, progress, versions
from hvdtrain.bench.turns import launched
from hvdtrain.core import stats
from hvdtrain.core.errors import HvdtrainError
from hvdtrain.core.flags import whole

OVERHEAD_TARGET = 1.02
JOB_WITHIN_S, TERM_WITHIN_S = 900, 15
DEFAULTS = {"keras": {"per_rank_batch": 128, "steps": 20}, "torch": {"per_rank_batch": 16, "steps": 5}}
ONE_THREAD = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``hvdtrain bench train``."""
    count = whole(1)
    add = parser.add_argument
    add("--framework", choices=["keras", "torch"], default="keras", help="(default: %(default)s)")
    add("--backend", choices=["tensorflow", "torch"], help="Keras' (default: KERAS_BACKEND, else tensorflow)")
    add("--per-rank-batch", type=count, metavar="N", help="pictures (default: Keras 128, PyTorch 16)")
    add("--steps", type=count, metavar="N", help="updates in a block (default: Keras 20, PyTorch 5)")
    add("--blocks", type=count, default=10, metavar="N", help="blocks of each arm (default: %(default)s)")
    add("--ranks", type=count, default=2, metavar="N", help="in part 2; 1 leaves it out (default: %(default)s)")
    add("--rounds", type=count, default=3, metavar="N", help="jobs of each in part 2 (default: %(default)s)")
    add("--launcher", choices=["horovodrun", "mpirun"], default="horovodrun", help="(default: %(default)s, on Gloo)")
    torch_train.add_arguments(add, count)
    add("--out", type=Path, default=Path("bench-train.json"), metavar="FILE", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark of a framework; returns 0, whatever the figures are."""
    for name, value in DEFAULTS[args.framework].items():
        setattr(args, name, getattr(args, name) or value)
    result = begin("train", args, "a benchmark starts its own ranks") | {"framework": args.framework}
    if args.framework == "torch":
        result["models"] = torch_train.measure(args)
        return finish(args, result, torch_train.report)
    backend = result["backend"] = args.backend or os.environ.get("KERAS_BACKEND") or "tensorflow"
    progress(f"1/2 prepared fit against plain Keras, one process, {args.blocks} blocks of {args.steps} updates each")
    result["overhead"] = overhead(args, backend)
    if args.ranks > 1:
        progress(f"2/2 {args.ranks} ranks against 1, {args.rounds} jobs of each")
        result["scaling"] = scaling(args, backend)
    return finish(args, result, report)


def overhead(args: argparse.Namespace, backend: str) -> dict[str, Any]:
    """Part 1: seconds a step by block, of both, and the ratio of pairs; by wall clock and by CPU time."""
    (clocks,) = job(1, args, backend, "overhead", blocks=args.blocks)
    wall, cpu = (
        stats.ratio_of_medians(clocks[clock]["prepared"], clocks[clock]["plain"], paired=True)
        for clock in ("wall", "cpu")
    )
    return {
        "seconds_per_step": clocks["wall"], "cpu_seconds_per_step": clocks["cpu"],
        "ratio": vars(wall), "cpu_ratio": vars(cpu), "target": OVERHEAD_TARGET,
    }  # fmt: skip


def scaling(args: argparse.Namespace, backend: str) -> dict[str, Any]:
    """Part 2: seconds a step by block, of one rank and of several, and how much faster the several are."""
    alone: list[float] = []
    together: list[float] = []
    for _ in range(args.rounds):
        alone += job(1, args, backend, "scaling", blocks=2)[0]["wall"]["prepared"]
        ranks = job(args.ranks, args, backend, "scaling", blocks=2)
        together += [max(block) for block in zip(*(rank["wall"]["prepared"] for rank in ranks), strict=True)]
    speedup = stats.ratio_of_medians(alone, together, paired=False)
    return {
        "ranks": args.ranks,
        "seconds_per_step": {"1": alone, str(args.ranks): together},
        "oversubscribed": args.ranks > len(os.sched_getaffinity(0)),
        "efficiency": vars(speedup),  # samples/s of N ranks / (N x samples/s of one)
        "speedup": {key: value * args.ranks for key, value in vars(speedup).items()},
    }


def report(result: Mapping[str, Any]) -> str:
    """The table of a result."""
    part = result["overhead"]
    ratio, cpu_ratio = stats.Interval(**part["ratio"]), stats.Interval(**part["cpu_ratio"])
    steps, cpu = part["seconds_per_step"], part["cpu_seconds_per_step"]
    rows: list[tuple[str, ...]] = [
        ("one process", "step (median)", "ratio, 95 %", f"target <= {part['target']}", "CPU time", "ratio, 95 %"),
        ("plain Keras", stats.milliseconds(steps["plain"]), "1", "", stats.milliseconds(cpu["plain"]), "1"),
        (
            "prepared", stats.milliseconds(steps["prepared"]), str(ratio), stats.kept(ratio.value <= part["target"]),
            stats.milliseconds(cpu["prepared"]), str(cpu_ratio),
        ),
    ]  # fmt: skip
    batch = result["settings"]["per_rank_batch"]
    heading = f"MNIST network, batch {batch} a rank, Keras on {result['backend']}\n{measured_on(result)}"
    tables = [f"{heading}\n{versions(result)}", stats.table(rows)]
    if "scaling" in result:
        part = result["scaling"]
        ranks, steps = part["ranks"], part["seconds_per_step"]
        speedup, efficiency = stats.Interval(**part["speedup"]), part["efficiency"]["value"]
        note = " (ranks share cores)" if part["oversubscribed"] else ""
        rows = [
            (f"one thread, one core a rank{note}", "step (median)", "speed-up, 95 %", "efficiency"),
            ("1 rank", stats.milliseconds(steps["1"]), "1", "1"),
            (f"{ranks} ranks", stats.milliseconds(steps[str(ranks)]), str(speedup), f"{efficiency:.3f}"),
        ]
        tables.append(stats.table(rows))
    return "\n\n".join(tables)


# ---- jobs


def job(
    ranks: int, args: argparse.Namespace, backend: str, task: str, *, blocks: int
) -> list[dict[str, dict[str, list[float]]]]:
    """Runs one job to its end; returns what each rank measured.

    Raises:
        HvdtrainError: it failed; with the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        command = [
            *launched(ranks, args.launcher), sys.executable, "-m", f"hvdtrain.bench.{args.framework}_job", task,
            f"--backend={backend}", f"--per-rank-batch={args.per_rank_batch}", f"--steps={args.steps}",
            f"--blocks={blocks}", f"--out={folder}",
        ]  # fmt: skip
        environment = {**os.environ, **dict.fromkeys(ONE_THREAD, "1")}
        with (Path(folder) / "log").open("w+b") as log:
            code = _run_to_end(command, environment, log)
            if code != 0:
                log.seek(0)
                lines = log.read().decode(errors="replace").strip().splitlines()
                what = "over its time" if code is None else f"ended with {code}"
                raise HvdtrainError(
                    f"a benchmark's job must end well: {task}, {ranks} rank(s)", f"{what}\n" + "\n".join(lines[-25:])
                )
        return [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def _run_to_end(command: Sequence[str], environment: Mapping[str, str], log: Any) -> int | None:
    """The exit code, or None if it had to be killed; nothing of the job outlives this call."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )  # fmt: skip
    try:
        return process.wait(JOB_WITHIN_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # TERM first: the launcher ends its ranks, which live in sessions of their own
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):  # the usual case: all are gone
                os.killpg(process.pid, sign)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(TERM_WITHIN_S)
