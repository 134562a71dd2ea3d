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
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.bench import torch_train
from hvdtrain.core import stats
from hvdtrain.core.errors import ConfigError, HvdtrainError, LauncherError, build_horovod_command
from hvdtrain.core.flags import whole
from hvdtrain.core.launchers import detect

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
    if detect(os.environ).launcher != "none":
        raise ConfigError("a benchmark starts its own ranks", "started by a launcher", "hvdtrain bench train")
    for name, value in DEFAULTS[args.framework].items():
        setattr(args, name, getattr(args, name) or value)
    return {"keras": run_keras, "torch": run_torch}[args.framework](args)


def run_torch(args: argparse.Namespace) -> int:
    """PyTorch's part; returns 0, whatever the figures are."""
    result = _new_result(args)
    check_writable(args.out)
    result["models"] = torch_train.measure(args, tell)
    return _finish(args, result, torch_train.report)


def run_keras(args: argparse.Namespace) -> int:
    """Keras' two parts; returns 0, whatever the figures are."""
    backend = args.backend or os.environ.get("KERAS_BACKEND") or "tensorflow"
    result: dict[str, Any] = _new_result(args) | {"backend": backend}
    check_writable(args.out)
    tell(f"1/2 prepared fit against plain Keras, one process, {args.blocks} blocks of {args.steps} updates each")
    result["overhead"] = overhead(args, backend)
    if args.ranks > 1:
        tell(f"2/2 {args.ranks} ranks against 1, {args.rounds} jobs of each")
        result["scaling"] = scaling(args, backend)
    return _finish(args, result, report)


def _new_result(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "format": 1, "bench": "train", "framework": args.framework,
        "settings": {key: value for key, value in vars(args).items() if isinstance(value, (int, str))},
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "machine": stats.machine(),
    }  # fmt: skip


def _finish(args: argparse.Namespace, result: dict[str, Any], report_of: Callable[[Mapping[str, Any]], str]) -> int:
    """Writes every sample, prints the table."""
    result["load_after"] = round(os.getloadavg()[0], 2)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(report_of(result))
    print(f"every sample: {args.out}", flush=True)
    return 0


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
    ratio, cpu_ratio = stats.Ratio(**part["ratio"]), stats.Ratio(**part["cpu_ratio"])
    steps, cpu = part["seconds_per_step"], part["cpu_seconds_per_step"]
    kept = "kept" if ratio.value <= part["target"] else "MISSED"
    rows: list[tuple[str, ...]] = [
        ("one process", "step (median)", "ratio, 95 %", f"target <= {part['target']}", "CPU time", "ratio, 95 %"),
        ("plain Keras", stats.milliseconds(steps["plain"]), "1", "", stats.milliseconds(cpu["plain"]), "1"),
        (
            "prepared", stats.milliseconds(steps["prepared"]), str(ratio), kept,
            stats.milliseconds(cpu["prepared"]), str(cpu_ratio),
        ),
    ]  # fmt: skip
    tables = [_heading(result), stats.table(rows)]
    if "scaling" in result:
        part = result["scaling"]
        ranks, steps = part["ranks"], part["seconds_per_step"]
        speedup, efficiency = stats.Ratio(**part["speedup"]), part["efficiency"]["value"]
        note = " (ranks share cores)" if part["oversubscribed"] else ""
        rows = [
            (f"one thread, one core a rank{note}", "step (median)", "speed-up, 95 %", "efficiency"),
            ("1 rank", stats.milliseconds(steps["1"]), "1", "1"),
            (f"{ranks} ranks", stats.milliseconds(steps[str(ranks)]), str(speedup), f"{efficiency:.3f}"),
        ]
        tables.append(stats.table(rows))
    return "\n\n".join(tables)


def _heading(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    known = " ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"MNIST network, batch {result['settings']['per_rank_batch']} a rank, Keras on {result['backend']}\n"
        f"{machine['processor']}, {machine['cores_usable']} cores, load {machine['load_1min']} before,"
        f" {result['load_after']} after\n{known}"
    )


def tell(text: str) -> None:
    """Progress goes to standard error, so that the table can be piped."""
    print(text, file=sys.stderr, flush=True)


def check_writable(out: Path) -> None:
    """Minutes of measuring must not end in an error about the place for the result."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError("the result needs a place", f"{out}: {error.strerror}", "--out FILE") from error


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
            *_launch(ranks, args.launcher), sys.executable, "-m", f"hvdtrain.bench.{args.framework}_job", task,
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


def _launch(ranks: int, launcher: str) -> list[str]:
    if ranks == 1:
        return []
    beside = Path(sys.executable).parent / launcher
    found = str(beside) if beside.exists() else shutil.which(launcher)
    if found is None:
        remedy = build_horovod_command() if launcher == "horovodrun" else "install Open MPI"
        raise LauncherError(f"{ranks} ranks are started by {launcher}", "not found on PATH", remedy + ", or --ranks 1")
    if launcher == "horovodrun":
        return [found, "--gloo", "-np", str(ranks), "-H", f"localhost:{ranks}"]
    return [found, "-np", str(ranks), "--oversubscribe", "--bind-to", "none"]


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
