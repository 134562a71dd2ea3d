"""The data of a report on a run, read from the run's directory; pure except for reading files."""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.commands.why import why
from hvdtrain.core.errors import ConfigError
from hvdtrain.record.bottleneck import BETWEEN, STEP, RunFacts, phases_per_rank, verdict
from hvdtrain.record.log import read_events, read_run, run_status

PHASES = (*STEP, *BETWEEN)
MOST_POINTS = 1000  # of a curve: more than a screen has pixels to tell apart
WINDOWS = 60  # of a run, for where its time went
_TOLD = ("step", "epoch", "checkpoint", "marks")  # in charts, in a trace


@dataclass(frozen=True)
class Run:
    """A run, as its files record it.

    Attributes:
        steps: the events of its updates; updates that a resumed run repeated are in it once.
    """

    name: str  # of its directory, made unique among the runs of a report
    record: Mapping[str, Any]  # run.json
    status: str  # "running", "finished", "failed", "preempted" or "killed"
    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]  # events of epochs, likewise
    saves: list[dict[str, Any]]
    per_rank: list[dict[str, float]]  # seconds by phase of each rank, since the last start
    happened: list[tuple[float, str, str]]  # (time, what, more) of all other events, in order
    advice: list[str]  # what held the run up, the most important first
    cause: str  # why the run failed, or ""

    @property
    def samples_per_s(self) -> float | None:
        """Returns the median over the updates."""
        rates = [its["samples_per_s"] for its in self.steps if its.get("samples_per_s")]
        return statistics.median(rates) if rates else None

    @property
    def seconds(self) -> float:
        """Returns the wall-clock seconds that its events span."""
        times = [its["time"] for its in (*self.steps, *self.epochs, *self.saves)] + [at for at, *_ in self.happened]
        return max(times) - min(times) if times else 0.0


def find_runs(given: Sequence[Path]) -> list[Path]:
    """Returns the runs: each directory is one, or holds some (damaged ones are skipped); raises if there is none."""
    found: list[Path] = []
    for path in given:
        folders = [path] if read_run(path) is not None else list(_readable(path))
        if not folders:
            raise ConfigError("hvdtrain report needs directories of runs", f"no run.json in {path} or below it")
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
            print(f"hvdtrain report: left out: {error.received}", file=sys.stderr)
        else:
            yield folder


def read(path: Path, name: str) -> Run:
    """Reads one run."""
    record, events = read_run(path) or {}, read_events(path)
    status = run_status(path) or "unknown"
    ended = status in ("failed", "killed")
    steps, epochs = (
        _once([its for its in events if its.get("kind") in (kind, "resume")], kind) for kind in ("step", "epoch")
    )
    return Run(
        name, record, status, steps, epochs,
        [its for its in events if its.get("kind") == "checkpoint"],
        phases_per_rank(events), _happened(events),
        _advice(record, events), why(path) if ended else "",
    )  # fmt: skip


def _once(events: Iterable[dict[str, Any]], count: str) -> list[dict[str, Any]]:
    """Events counted by `count`; what a resumed run did again counts as it was done last."""
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


def _happened(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, str, str]]:
    rows = []
    for event in events:
        more = {name: value for name, value in event.items() if name not in ("time", "kind", "config")}
        if event.get("kind") not in _TOLD:
            text = ", ".join(f"{name} {value}" for name, value in more.items() if value is not None)
            rows.append((float(event.get("time", 0.0)), str(event.get("kind")), text))
    return rows


def _advice(record: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the run's own verdict, which knows its loader, or else one from its epochs; then epochs that differ."""
    whole = verdict(phases_per_rank(events) or [{}], RunFacts())
    lines = str(record.get("result", {}).get("verdict") or whole).splitlines()
    for event in events:
        if event.get("kind") == "epoch" and event.get("ranks"):
            found = verdict(event["ranks"], RunFacts())
            if found.kind in ("uneven", "input") and found.kind != whole.kind:
                lines.append(f"epoch {event['epoch'] + 1}: {found.text.splitlines()[0]}")
    return lines


def curve(events: Sequence[Mapping[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    """Points of a curve, at most `MOST_POINTS`: means of neighbours where there are more."""
    points = [(float(its[x]), float(its[y])) for its in events if its.get(x) is not None and its.get(y) is not None]
    at_once = -(-len(points) // MOST_POINTS) or 1
    groups = [points[at : at + at_once] for at in range(0, len(points), at_once)]
    return [group[-1][0] for group in groups], [statistics.fmean(y for _, y in group) for group in groups]


def where_time_went(run: Run) -> tuple[list[float], dict[str, list[float]]]:
    """Returns, for each part of the run on rank 0: samples seen at its end, and milliseconds an update by phase."""
    at_once = -(-len(run.steps) // WINDOWS) or 1
    groups = [run.steps[at : at + at_once] for at in range(0, len(run.steps), at_once)]
    ends = [float(group[-1]["samples_seen"]) for group in groups]
    spent: dict[str, list[float]] = {}
    for phase in PHASES:
        its = [
            1e3 * sum(step["seconds"].get(phase, 0.0) for step in group) / max(1, sum(step["steps"] for step in group))
            for group in groups
        ]
        if any(its):
            spent[phase] = its
    return ends, spent


def metrics_of(run: Run) -> dict[str, tuple[list[int], list[float]]]:
    """Returns the metrics by name: epochs, counted from 1, and values."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for event in run.epochs:
        for name, value in event.get("metrics", {}).items():
            if value is not None:
                epochs, values = found.setdefault(name, ([], []))
                epochs.append(event["epoch"] + 1)
                values.append(float(value))
    return found


def flat(value: Any, name: str = "") -> dict[str, str]:
    """Settings by dotted name, as text."""
    if isinstance(value, Mapping) and value:
        return {key: text for part, its in value.items() for key, text in flat(its, f"{name}{part}.").items()}
    return {name.removesuffix("."): "" if value is None else str(value)}
