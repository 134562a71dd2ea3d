"""`hvdtrain bench train --tune`: finds settings that make a training faster here; it never ends slower than it began.

It tries a few values of one knob after another. A candidate and the best settings so far are two jobs of the same
program that take turns; the search keeps the candidate only if it is faster beyond noise. At the end the winner runs
against the first settings again, in fresh turns. If it is not faster there, the first settings stay.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.bench.turns import turns
from hvdtrain.bench.turns.turns import InterleavedJobs, launched, shortened
from hvdtrain.core import variables
from hvdtrain.core.errors import ConfigError, HvdtrainError
from hvdtrain.pipeline.tuning.search import Pairs, Refused, Search
from hvdtrain.record import stats
from hvdtrain.world.startup import THREADS, TUNABLE, machine_shape

MARGIN = 0.02  # faster by less is not worth a file
TRIED, CONFIRMED = (7, 11), (9, 15)  # rounds: until a candidate is faster, at most
TURN_S, TURN_UPDATES = 0.5, (2, 50)  # how long a turn shall be; updates of one: at least, at most
SAME = 0.1  # of what the weights have moved by: results that differ by more are another training's
LAUNCHER = "launcher"  # the one setting that is no variable: who starts the ranks, and so Horovod's controller

Settings = dict[str, str]


@dataclass(frozen=True)
class Knob:
    """A setting that may be changed."""

    name: str
    variables: Sequence[str]  # all of them take the same value
    values: Sequence[str]  # to try
    usual: str | None = None  # what holds where nothing is set, if that is known

    def of(self, settings: Settings) -> str | None:
        """Returns its value."""
        return settings.get(self.variables[0], self.usual)


@dataclass
class Tuned:
    """The result of the search."""

    settings: Settings  # to use
    ratio: stats.Interval | None  # their time over that of the start; None: they are the same
    verdict: str  # in words
    trials: list[dict[str, Any]]  # what was tried, against which best value until then, and what came of it
    untried: list[str]  # what there was no time for


def find(
    search: Search[Settings], start: Settings, knobs: Sequence[Knob], progress: Callable[[str], None] = turns.progress
) -> Tuned:
    """Turns one knob after the other; `progress` gets a line for each trial."""
    best, longest_s = start, search.spent_s()  # to start a job takes so long again
    trials: list[dict[str, Any]] = []
    untried: list[str] = []

    def report_trial(text: str) -> None:
        progress(f"{search.spent_s():.0f} of {search.budget_s:.0f} s: {text}")

    for knob, value in [(one, value) for one in knobs for value in one.values]:
        until_s = search.budget_s - max(1.5 * longest_s, 0.2 * search.budget_s)  # for fresh turns at the end
        was, began_s = knob.of(best), search.spent_s()
        if value == was:
            continue
        if began_s + longest_s > until_s:
            untried.append(f"{knob.name} {value}")
            continue
        candidate = best | dict.fromkeys(knob.variables, value)
        outcome, ratio = search.compared(best, candidate, TRIED, until_s)
        longest_s = max(longest_s, search.spent_s() - began_s)
        its = {"knob": knob.name, "value": value, "best": was or "not set"}
        trials.append(its | {"ratio": ratio and vars(ratio), "outcome": outcome})
        report_trial(f"{knob.name} {value} (best: {was or 'not set'}): {ratio or ''} {outcome}")
        best = candidate if outcome == "faster" else best
    if best == start:
        verdict = "nothing is faster here" if trials else "nothing was tried: --budget is too short"
        return Tuned(start, None, verdict, trials, untried)
    outcome, ratio = search.compared(start, best, CONFIRMED)
    report_trial(f"the winner against the start, in fresh turns: {ratio} {outcome}")
    if outcome != "faster":
        verdict = f"nothing is faster here: the winner was not, in fresh turns ({ratio}, {outcome})"
        return Tuned(start, None, verdict, trials, untried)
    return Tuned(best, ratio, "faster", trials, untried)


def knobs_of(what: str, ranks: int, cores: int, *, launchers: Sequence[str], compression: bool) -> list[Knob]:
    """Returns what may be turned for a training; what is worst when it is wrong comes first; pure.

    `what` has the arguments of `hvdtrain.comm.turns.updated`; with `compression` gradients may travel as float16.
    """
    mib = {1: str(1 << 20), 5: str(5 << 20), 8: str(8 << 20), 25: str(25 << 20), 64: str(64 << 20)}
    torch = what.startswith("torch")
    threads = dict.fromkeys(map(str, (max(1, cores // ranks), 1, cores)))
    knobs = [
        Knob("cycle time in ms", ["HOROVOD_CYCLE_TIME"], ["1", "0.5", "5"], "1"),
        Knob("threads a rank", THREADS, list(threads)),
        Knob("shared memory", ["HOROVOD_SHARED_MEMORY"], ["1", "0"], "1"),
        Knob("fusion threshold in bytes", ["HOROVOD_FUSION_THRESHOLD"], ["0", mib[8], mib[64]], "0" if torch else None),
    ]
    if torch:
        usual = mib[5] if what == "torch cpu" else mib[25]
        knobs.append(Knob("bucket in bytes", [variables.BUCKET_BYTES], [mib[1], mib[5], mib[25]], usual))
    if len(launchers) > 1:
        knobs.append(Knob("controller (Gloo: horovodrun, MPI: mpirun)", [LAUNCHER], launchers))
    if compression:  # Horovod does not add up bfloat16
        knobs.append(Knob("compression", [variables.COMPRESSION], ["fp16"], "none"))
    return knobs


@dataclass
class Races:
    """Jobs of one command, one for each of two settings at a time."""

    jobs: InterleavedJobs  # where they run
    command: Sequence[str]  # of every rank
    ranks: int
    folder: Path  # where hvdtrain writes what it would write for them
    what: str = ""  # the framework and its device, as the first job reports them

    def __post_init__(self) -> None:
        self._running: dict[str, tuple[Settings, float]] = {}  # by job's name: with seconds an update, as last seen
        self._first: Settings = {}
        self._moved: list[float] = []  # what the first job's weights have moved by
        self._repeats = True  # as far as is known, the same settings give the same results
        self._numbers, self._most = itertools.count(), TURN_UPDATES[1]

    def begin(self, start: Settings) -> None:
        """Starts the job that others are compared with.

        Raises:
            ConfigError: it ends, or trains otherwise than through `prepare`.
        """
        try:
            seconds = self._running[self._start(start)][1]
        except HvdtrainError as error:
            rule = "the tuned command must train through hvdtrain's prepare(), for at least 8 updates"
            raise ConfigError(rule, error.received, "README.md shows how; a larger --budget waits longer") from error
        self._first, self.what, self._moved = start, self._answer["what"], self._answer["moved"]
        turns.progress(f"untuned: {seconds * 1e3:.1f} ms an update, {self.what}")

    def __call__(self, best: Settings, candidate: Settings) -> Pairs:
        """See `KnobSearch`."""
        both = [best, candidate]
        for name in [name for name, (its, _) in self._running.items() if its not in both]:
            self._end(name)
        for turn in itertools.count():
            seconds: dict[str, float] = {}
            for its, measured in [
                (best, False),
                (candidate, False),
                *((its, True) for its in stats.rotated(both, turn)),
            ]:
                try:
                    name = self._name(its) or self._start(its)
                    if measured:
                        seconds[name] = self._turn(name, self._updates(self._name(best)))
                except HvdtrainError as error:
                    if self._end(self._name(its)) != 0:
                        raise (Refused(shortened(error)) if its is candidate else error) from error
                    self._most = max(TURN_UPDATES[0], self._most // 4)  # the program is at its end: it is a short one
                    break
            else:
                yield seconds[self._name(best)], seconds[self._name(candidate)]

    def _name(self, settings: Settings) -> str:
        return next((name for name, (its, _) in self._running.items() if its == settings), "")

    def _start(self, settings: Settings) -> str:
        name = str(next(self._numbers))
        own = {variables.TURNS_TRAINING: "1", variables.HANG_S: "0", variables.REHEARSAL: str(self.folder / name)}
        command = [*launched(self.ranks, settings[LAUNCHER]), *self.command]
        began_s = time.monotonic()
        try:
            self.jobs.start(name, command, self.ranks, _variables(settings) | own)
            self._running[name] = settings, math.inf
            self._turn(name, TURN_UPDATES[0])
        except HvdtrainError:
            self._end(name)
            raise
        self.jobs.ready_s = min(self.jobs.ready_s, 20 + 4 * (time.monotonic() - began_s))
        if self._first and settings != self._first:
            self._check(settings)
        return name

    def _turn(self, name: str, updates: int) -> float:
        """Seconds an update, of the slowest rank."""
        answers = self.jobs.turn(name, steps=updates)
        self._answer = answers[0]
        seconds = max(answer["wall"] for answer in answers)
        self._running[name] = self._running[name][0], seconds
        return seconds

    def _updates(self, name: str) -> int:
        return max(TURN_UPDATES[0], min(self._most, round(TURN_S / self._running[name][1])))

    def _end(self, name: str) -> int | None:
        self._running.pop(name, None)
        return self.jobs.end(name)

    def _check(self, settings: Settings) -> None:
        """Compares the first updates of the job started last with those of the start.

        Raises:
            Refused: they differ, although the start, started again, repeats its own.
        """
        off = distance(self._answer["moved"], self._moved)
        if off <= SAME or variables.COMPRESSION in settings or not self._repeats:
            return
        self._end(self._start(self._first))
        self._repeats = distance(self._answer["moved"], self._moved) <= SAME
        if self._repeats:
            raise Refused(f"another result: its first updates differ by {off:.0%} of what the weights move")
        turns.progress("this training gives other results each time: they are not compared")


def distance(moved: Sequence[float], wanted: Sequence[float]) -> float:
    """Returns how far weights moved from where they should be, over how far they should move; NaN: infinite; pure."""
    if len(moved) != len(wanted):
        return math.inf
    off, way = math.dist(moved, wanted), math.hypot(*wanted)
    return math.inf if math.isnan(off) else off / way if way else math.inf if off else 0.0


# ---- the command


def run(args: argparse.Namespace) -> int:
    """Tunes, and writes the file; returns 0, also where nothing is faster."""
    result, command = turns.begin("train", args, "tuning starts its own ranks"), _command(args)
    launchers = [args.launcher, *({"horovodrun", "mpirun"} - {args.launcher} if shutil.which("mpirun") else ())]
    start = {name: os.environ[name] for name in TUNABLE if name in os.environ} | {LAUNCHER: args.launcher}
    environment = {name: value for name, value in os.environ.items() if name not in (*TUNABLE, variables.TUNED)}
    turns.progress(f"{args.ranks} ranks of {' '.join(command)}; set here: {_listed(_variables(start))}")
    with InterleavedJobs(environment) as jobs, tempfile.TemporaryDirectory(prefix="hvdtrain-tune-") as folder:
        jobs.ready_s, jobs.turn_s = max(60.0, args.budget), max(30.0, args.budget / 4)
        races = Races(jobs, command, args.ranks, Path(folder))
        search = Search(races, args.budget, MARGIN)
        races.begin(start)
        cores, more = len(os.sched_getaffinity(0)), args.allow_compression
        knobs = knobs_of(races.what, args.ranks, cores, launchers=launchers, compression=more)
        found = find(search, start, knobs)
    result |= {
        "tuned": _variables(found.settings), "launcher": found.settings[LAUNCHER], "fits": machine_shape(args.ranks),
        "start": start, "command": command, "verdict": found.verdict, "ratio": found.ratio and vars(found.ratio),
        "trials": found.trials, "untried": found.untried, "out": str(args.out),
    }  # fmt: skip
    return turns.finish(args, result, table)


def _variables(settings: Settings) -> Settings:
    return {name: value for name, value in settings.items() if name != LAUNCHER}


def _listed(variables: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items()) or "nothing"


def _command(args: argparse.Namespace) -> list[str]:
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if args.ranks < 2:
        raise ConfigError("--tune needs at least 2 ranks", f"-np {args.ranks}", "-np 2")
    if argv:
        return list(argv)
    flags = ["--per-rank-batch", str(args.per_rank_batch), "--epochs", "1000", "--device", args.device]
    if args.framework == "keras":
        return [sys.executable, "-m", "hvdtrain.keras_mnist", *flags]
    pictures = ["--model", args.models[0], "--data", "synthetic", "--image-size", str(args.pixels)]
    return [sys.executable, "-m", "hvdtrain.torch_resnet", *pictures, *flags]


def table(result: Mapping[str, Any]) -> str:
    """Returns the table of trials, and what is written and how to use it."""
    rows: list[tuple[str, ...]] = [("knob", "best so far", "tried", "time of the one tried, 95 %", "")]
    for trial in result["trials"]:
        ratio = str(stats.Interval(**trial["ratio"])) if trial["ratio"] else ""
        rows.append((trial["knob"], trial["best"], trial["value"], ratio, trial["outcome"].partition(":")[0]))
    tuned, start, out = result["tuned"], result["start"], result["out"]
    changed = {name: value for name, value in tuned.items() if start.get(name) != value}
    lines = [result["verdict"]]
    if result["ratio"]:
        lines = [f"{stats.Interval(**result['ratio'])} of the untuned time, in fresh turns: {_listed(changed)}"]
    if result["untried"]:
        lines.append(f"not tried, for lack of time (--budget): {', '.join(result['untried'])}")
    its = result["trials"]
    lines += [f"{it['knob']} {it['value']}: {it['outcome']}" for it in its if it["outcome"].startswith("thrown out")]
    over = "is set in this environment, and wins over the file: unset it"
    lines += [f"{name}={start[name]} {over}" for name in changed if name in start]
    if result["launcher"] != start[LAUNCHER]:
        lines.append(f"and start the ranks with {result['launcher']}")
    lines.append(f"to use it: {variables.TUNED}={out} before the program, or hvdtrain launch --tuned {out}")
    return "\n\n".join([turns.heading("", result), stats.table(rows), "\n".join(lines)])
