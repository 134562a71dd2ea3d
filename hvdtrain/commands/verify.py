"""`hvdtrain verify`: does training on these hosts do what it must? A toy is trained in each installed framework.

Shown are: ranks that are distinct, rank 0's weights on all of them, gradients that are averaged, a training equal to
that of one process, and equal replicas; each against numbers that are computed apart, and each with the fault that it
looks for made on purpose, so that it would have been seen.

Started alone it starts its own ranks, like `hvdtrain launch`; started by a launcher it is one of the ranks:

  hvdtrain verify                                       2 ranks on this machine
  hvdtrain verify -H host1:4,host2:4                    the ranks of your job
  horovodrun -np 8 -H host1:4,host2:4 hvdtrain verify   your own launch line; mpirun and srun likewise
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.cluster.doctor.verify_rank import FAILED, MARK, PROGRAM
from hvdtrain.cluster.hosts.probe import gpu_count
from hvdtrain.cluster.launch import environment, launcher
from hvdtrain.commands import host_flags
from hvdtrain.core import flags
from hvdtrain.core.errors import ConfigError, build_horovod_command, install_command
from hvdtrain.core.launchers import Detected, detect
from hvdtrain.horovod_build.prove_rank import TOO_LATE
from hvdtrain.world import startup

FRAMEWORKS = ("torch", "keras")
LIMIT_S = 120.0
_LINES = 15
# MPI is started once in a process that mpirun or srun counts: a second framework would need a second start
_ONE_A_LAUNCH = ("mpirun", "srun")
_NO_HOROVOD = ("torchrun", "openpai")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain verify`."""
    parser.description = __doc__
    add = parser.add_argument
    # fmt: off
    host_flags.add(parser, np="ranks (default: one a slot; on this machine one a GPU, and 2 where there are fewer"
        " than 2)")
    host_flags.add(parser, "hosts", "hostfile")
    add("--framework", action="append", choices=FRAMEWORKS,
        help="verify only this framework (default: all that are installed here)")
    add("--limit", type=flags.seconds, default=LIMIT_S, metavar="S",
        help="seconds for one framework (default: %(default)g); cold file systems make imports slow")
    add("--device", choices=["auto", "cpu"], default="auto",
        help="cpu: do not use GPUs (default: auto; ranks that share a GPU are refused)")
    host_flags.add(parser, "network", "python", "ssh_port", "identity")
    add("--json", action="store_true", help="print the findings as JSON")
    # fmt: on


@dataclass
class Found:
    """The results: of each framework rank 0's report, or why it is missing; `left_out`: why others were not tried."""

    frameworks: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return all(its["ok"] for its in self.frameworks.values())

    def as_json(self) -> dict[str, Any]:
        return {"format": 1, "command": "verify", "ok": self.ok} | vars(self)


def run(args: argparse.Namespace) -> int:
    """Verifies each framework; returns the exit code."""
    started, found, detected = time.perf_counter(), Found(), detect(os.environ)
    chosen = _chosen(args.framework)
    found.left_out = _left_out(chosen, detected.launcher)
    for name in (name for name in chosen if name not in found.left_out):
        if detected.rank == 0:
            print(f"hvdtrain verify: {name} ...", file=sys.stderr, flush=True)
        begun = time.perf_counter()
        its = _own_ranks(name, args) if detected.launcher == "none" else _as_rank(name, args, detected)
        found.frameworks[name] = its | {"seconds": round(time.perf_counter() - begun, 3)}
        if "failed" in its and detected.launcher != "none":
            break  # the other ranks may be anywhere
    found.seconds = round(time.perf_counter() - started, 3)
    if detected.rank == 0:
        print(json.dumps(found.as_json()) if args.json else text(found), flush=True)
    elif not found.ok:
        if any("failed" in its for its in found.frameworks.values()):
            print(text(found), file=sys.stderr, flush=True)
        time.sleep(startup.RANK_0_SPEAKS_FIRST_S)  # the first rank that ends takes the others with it
    return 0 if found.ok else FAILED


def _left_out(chosen: Sequence[str], started_by: str) -> dict[str, str]:
    """Returns the reason why this launcher skips each of several frameworks; pure. A single framework is tried."""
    if started_by in _NO_HOROVOD and len(chosen) > 1:
        return {"keras": f"Keras trains on Horovod, whose ranks {started_by} does not start"}
    if started_by in _ONE_A_LAUNCH:
        return {name: f"one framework a launch under {started_by}: add --framework {name}" for name in chosen[1:]}
    return {}


def _chosen(wanted: Sequence[str] | None) -> list[str]:
    """Returns the frameworks to try: those that were asked for, else those that this Python has; raises for none."""
    if wanted:
        return list(dict.fromkeys(wanted))
    has = {name: importlib.util.find_spec(name) is not None for name in ("torch", "keras", "tensorflow")}
    found = ["torch"] * has["torch"] + ["keras"] * (has["keras"] and (has["tensorflow"] or has["torch"]))
    if not found:
        rule, received = "hvdtrain verify needs a framework", f"neither torch nor keras in {sys.executable}"
        raise ConfigError(rule, received, f"{install_command('torch', 'build')}, or [keras,build]")
    return found


def _own_ranks(framework: str, args: argparse.Namespace) -> dict[str, Any]:
    """Starts the ranks on the hosts; returns rank 0's result, or why there is none."""
    job = host_flags.job_of(args, os.environ, here=lambda: _ranks_here(args))
    no_gpus = {"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {}
    argv = [args.python, "-m", PROGRAM, framework, f"{args.limit:g}", str(job.np)]
    job = dataclasses.replace(job, argv=argv, env=environment.passed(os.environ) | no_gpus)
    found, failed = launcher.result_of(job, MARK)
    if failed is not None and (found is None or found["ok"]):
        return _nothing(failed.in_words(args.limit), failed.lines)
    return found or _nothing("rank 0 ended without a result")


def _ranks_here(args: argparse.Namespace) -> int:
    """Returns the default number of ranks: one a GPU, at least 2. Two cannot share 1 GPU, so they run on the CPU."""
    gpus = 0 if args.device == "cpu" else gpu_count()
    if gpus == 1:
        args.device = "cpu"
        print("hvdtrain verify: 1 GPU here, so 2 ranks on the CPU (one rank on the GPU: -np 1)", file=sys.stderr)
    return max(2, gpus)


def _as_rank(framework: str, args: argparse.Namespace, detected: Detected) -> dict[str, Any]:
    """Trains as this rank, in a separate process, because the next framework needs a fresh one.

    Returns the result, which only rank 0 has in full, or the reason if there is none.
    """
    command = [sys.executable, "-m", PROGRAM, framework, f"{args.limit:g}"]
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {})
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env)  # ends itself after the limit
    lines = child.stdout.splitlines()
    if child.returncode not in (0, FAILED):
        why = f"not done in {args.limit:g} s" if child.returncode == TOO_LATE else f"exit code {child.returncode}"
        return _nothing(f"rank {detected.rank}: {why}", lines)
    if detected.rank != 0:
        return {"ok": child.returncode == 0, "checks": []}
    return launcher.result_in(lines, MARK) or _nothing("rank 0 ended without a result")


def _nothing(why: str, lines: Sequence[str] = ()) -> dict[str, Any]:
    """Returns why there is no result, and the last lines."""
    return {"ok": False, "failed": why, "lines": list(lines[-_LINES:]), "checks": []}


# ---- the report

# what to do about a check that fails; where it is not one's own launch line, it is Horovod or what is below it
_FIXES = {
    "ranks": "start every rank through one launcher, and unset the variables of others; no host twice in -H",
    "broadcast": f"hvdtrain doctor, with the same -H; then {build_horovod_command()} on every host",
    "averaging": f"hvdtrain doctor, with the same -H; then {build_horovod_command()} on every host",
    "training": "the first of the other checks that fails shows why; if none fails, please report it with --json",
    "replicas": "the same frameworks, drivers and kinds of GPU on every host: hvdtrain doctor, with the same -H",
}


def text(found: Found) -> str:
    """Returns the findings as a table."""
    lines = []
    for name, its in found.frameworks.items():
        head = f"{name}: {'ok' if its['ok'] else 'FAILED'} in {its['seconds']:.0f} s"
        if "versions" in its:
            versions = ", ".join(f"{name} {version}" for name, version in its["versions"].items())
            head += f", {len(its['ranks'])} rank(s) by {its['launcher']} and {its['engine']} ({versions})"
        lines.append(head)
        width = max((len(check["name"]) for check in its["checks"]), default=0)
        for check in its["checks"]:
            lines.append(f"  {check['name']:<{width}}  {'ok' if check['ok'] else 'FAILED':<6}  {check['message']}")
            lines += [f"    fix: {_FIXES[check['name']]}"] * (not check["ok"])
        if "failed" in its:
            lines.append(f"  {its['failed']}")
            lines += [f"    {line}" for line in its["lines"]]
            lines.append("  fix: hvdtrain doctor, with the same -H")
    lines += [f"{name}: not tried: {why}" for name, why in found.left_out.items()]
    return "\n".join(lines)
