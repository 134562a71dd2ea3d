"""Reads the data of a report from a run's directory; otherwise pure."""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.commands.why import moment, why
from hvdtrain.core.errors import ConfigError
from hvdtrain.record.bottleneck import BETWEEN, SHORT_S, STEP, RunFacts, phases_per_rank, verdict
from hvdtrain.record.log import read_events, read_run, run_status

PHASES = (*STEP, *BETWEEN)
MOST_POINTS = 500  # of a curve: a chart is about as many pixels wide
WINDOWS = 60  # bars of the chart of a step's time
FEWEST_STEPS = 10  # since the last start; fewer give no advice
_CHARTED = ("step", "epoch", "checkpoint")  # events of charts
Curve = tuple[list[float], list[float]]  # x, y


@dataclass(frozen=True)
class Run:
    """A run, as its files record it.

    Attributes:
        steps: the events of its steps; a step that a resumed run repeated counts once.
    """

    name: str  # the end of its path, unique among the runs of a report
    record: Mapping[str, Any]  # run.json
    status: str  # "running", "finished", "failed", "preempted" or "killed"
    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]  # events of epochs, likewise
    saves: list[dict[str, Any]]
    per_rank: list[dict[str, float]]  # seconds by phase of each rank, since the last start
    events: list[tuple[str, str, str]]  # (time, kind, details) of all other events, in order
    advice: list[str]  # the bottleneck, the most important finding first; empty after too few steps
    cause: str  # of the failure, or ""
    seconds: float  # wall-clock time from the first event to the last

    @property
    def samples_per_s(self) -> float | None:
        """Returns the median over the steps; None if there are fewer than 3 values."""
        rates = [step["samples_per_s"] for step in self.steps if step.get("samples_per_s")]
        return statistics.median(rates) if len(rates) > 2 else None


def find_runs(given: Sequence[Path]) -> list[Path]:
    """Returns the runs: each directory is one, or holds some (damaged ones are skipped); raises if there is none."""
    found: list[Path] = []
    for path in given:
        folders = [path] if read_run(path) is not None else list(_readable(path))
        if not folders:
            raise ConfigError(
                "hvdtrain report needs directories of runs",
                f"no run.json in {path} or below it",
                "give the directory of a RunLog or of a program's --run-dir; logs of a launcher: hvdtrain why",
            )
        found += folders
    return list(dict.fromkeys(found))


def _readable(path: Path) -> Iterable[Path]:
    """Yields the runs below, run2 before run10; reports those that are damaged."""

    def as_counted(folder: Path) -> list[tuple[int, str]]:
        return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", folder.name)]

    for folder in sorted((p.parent for p in path.glob("*/run.json")), key=as_counted):
        try:
            read_run(folder)
        except ConfigError as error:
            print(f"hvdtrain report: skipped: {error.received}", file=sys.stderr)
        else:
            yield folder


def read(path: Path, name: str) -> Run:
    """Reads one run."""
    record, events = read_run(path) or {}, read_events(path)
    status = run_status(path) or "unknown"
    ended = status in ("failed", "killed")
    times = [event["time"] for event in events if "time" in event]
    steps, epochs = (
        _once([its for its in events if its.get("kind") in (kind, "resume")], kind) for kind in ("step", "epoch")
    )
    return Run(
        name, record, status, steps, epochs,
        [its for its in events if its.get("kind") == "checkpoint"],
        phases_per_rank(events), _other_events(events),
        _advice(record, events), why(path) if ended else "",
        max(times) - min(times) if times else 0.0,
    )  # fmt: skip


def _once(events: Iterable[dict[str, Any]], count: str) -> list[dict[str, Any]]:
    """Returns the events numbered by `count`; of one that a resumed run repeated, the last."""
    kept: list[dict[str, Any]] = []
    resumed = False
    for event in events:
        if event["kind"] == "resume":
            resumed = True
            continue
        if resumed:
            kept, resumed = [its for its in kept if its[count] < event[count]], False
        kept.append(event)
    return kept


def _other_events(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    rows = []
    for event in events:
        more = {name: value for name, value in event.items() if name not in ("time", "kind", "config")}
        if event.get("kind") not in _CHARTED:
            text = ", ".join(f"{name}: {value}" for name, value in more.items() if value is not None)
            rows.append((moment(event.get("time", 0.0)), str(event.get("kind")), text))
    return rows


def _advice(record: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the run's own verdict, which knows its loader, or one from its epochs; then epochs that differ."""
    starts = [at for at, event in enumerate(events) if event.get("kind") in ("start", "resume")]
    steps = sum(event["steps"] for event in events[max(starts, default=0) :] if event.get("kind") == "step")
    seconds = phases_per_rank(events)
    step_s = [sum(phases.get(name, 0.0) for name in STEP) for phases in seconds]
    if steps < FEWEST_STEPS or max(step_s, default=0.0) < SHORT_S:
        return []
    whole = verdict(seconds, RunFacts())
    lines = str(record.get("result", {}).get("verdict") or whole).splitlines()
    for event in events:
        if event.get("kind") == "epoch" and event.get("ranks"):
            found = verdict(event["ranks"], RunFacts())
            if found.kind in ("uneven", "input") and found.kind != whole.kind:
                lines.append(f"epoch {event['epoch'] + 1}: {found.text.splitlines()[0]}")
    return lines


def curves_of(runs: Sequence[Run]) -> Iterator[tuple[str, str, str, str, list[tuple[str, Curve]]]]:
    """Yields the curves by samples, checkpoints and epochs: id, title, x, y, and each run's name and curve."""
    for name, title, y in (
        ("loss", "training loss", "loss"),
        ("lr", "learning rate", "learning rate"),
        ("samples_per_s", "samples per second of all ranks", "samples/s"),
    ):
        yield name, title, "samples", y, [(run.name, curve(run.steps, "samples_seen", name)) for run in runs]
    metrics = [metrics_of(run) for run in runs]
    for at, name in enumerate(dict.fromkeys(name for each in metrics for name in each)):
        curves = [(run.name, each.get(name, ([], []))) for run, each in zip(runs, metrics, strict=True)]
        yield f"metric-{at}", f"{name} by epoch", "epoch", name, curves
    for name, title in (
        ("blocked_s", "training paused by checkpoints (s)"),
        ("sealed_s", "time to write checkpoints (s)"),
    ):
        yield name, title, "step", "seconds", [(run.name, curve(run.saves, "step", name)) for run in runs]


def curve(events: Sequence[Mapping[str, Any]], x: str, y: str) -> Curve:
    """Returns at most `MOST_POINTS` points of a curve: means of neighbors if there are more."""
    points = [(float(its[x]), float(its[y])) for its in events if its.get(x) is not None and its.get(y) is not None]
    at_once = -(-len(points) // MOST_POINTS) or 1
    groups = [points[at : at + at_once] for at in range(0, len(points), at_once)]
    means = [float(f"{statistics.fmean(y for _, y in group):.6g}") for group in groups]  # short, for a small page
    return [group[-1][0] for group in groups], means


def where_time_went(run: Run) -> tuple[list[float], dict[str, list[float]]]:
    """Returns the samples seen at the end of each part of the run, and rank 0's milliseconds per step by phase."""
    at_once = -(-len(run.steps) // WINDOWS) or 1
    groups = [run.steps[at : at + at_once] for at in range(0, len(run.steps), at_once)]
    ends = [float(group[-1]["samples_seen"]) for group in groups]
    spent: dict[str, list[float]] = {}
    for phase in PHASES:
        times = [
            1e3 * sum(step["seconds"].get(phase, 0.0) for step in group) / max(1, sum(step["steps"] for step in group))
            for group in groups
        ]
        if any(times):
            spent[phase] = times
    return ends, spent


def metrics_of(run: Run) -> dict[str, Curve]:
    """Returns the metrics by name: epochs, counted from 1, and values."""
    found: dict[str, Curve] = {}
    for event in run.epochs:
        for name, value in event.get("metrics", {}).items():
            if value is not None:
                epochs, values = found.setdefault(name, ([], []))
                epochs.append(event["epoch"] + 1)
                values.append(float(value))
    return found


def flat(value: Any, name: str = "") -> dict[str, str]:
    """Returns settings by dotted name, as text."""
    if isinstance(value, Mapping) and value:
        return {key: text for part, its in value.items() for key, text in flat(its, f"{name}{part}.").items()}
    return {name.removesuffix("."): "" if value is None or value in ([], {}) else str(value)}
