"""A report's charts, by Plotly, and tables of the same numbers for readers who cannot see charts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.commands.report_data import PHASES, Run, curve, metrics_of, where_time_went

# Okabe and Ito's colours, told apart by nearly everybody: of runs, and of phases
RUNS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F", "#9467BD")
_COLOURS = ("#E69F00", "#0072B2", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#7F7F7F", "#CC79A7", "#9467BD")
OF_PHASE = dict(zip(PHASES, _COLOURS, strict=True))
DASHES = ("solid", "dash", "dot", "dashdot")  # beside the colours, for print in grey
MOST_RANKS = 64
_TABLE_ROWS = 12


@dataclass(frozen=True)
class Chart:
    """A chart: Plotly's figure as JSON types, and its data as a table."""

    id: str  # of the page's element
    title: str
    note: str  # how to read it, or ""
    figure: dict[str, Any]  # `data` and `layout`
    head: tuple[str, ...]  # of the table
    rows: list[tuple[str, ...]] = field(default_factory=list)


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """Returns the charts that the runs have data for."""
    lines = [
        _line(runs, "loss", "Training loss", "loss", "of each update"),
        _line(runs, "lr", "Learning rate", "learning rate", ""),
        _line(runs, "samples_per_s", "Speed", "samples/s", "of all ranks, by rank 0's clock"),
        *_metrics(runs),
        *(_by_rank(run, number) for number, run in enumerate(runs) if run.per_rank),
        *(_by_time(run, number) for number, run in enumerate(runs) if run.steps),
        _saves(runs),
    ]
    return [chart for chart in lines if chart.figure["data"]]


def _figure(traces: list[Any], x: str, y: str, yaxis: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns a figure without colours: the page has colours for its light and its dark theme."""
    layout = {
        "xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}} | (yaxis or {}), "hovermode": "x unified",
        "margin": {"l": 64, "r": 16, "t": 16, "b": 48},
        "height": 320 + 12 * max(0, len(traces) - 6),  # of which the legend, of runs or ranks, takes half at most
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _curve(name: str, number: int, x: Sequence[float], y: Sequence[float | None], **style: str) -> dict[str, Any]:
    """Returns the trace of run `number`."""
    dash = DASHES[number // len(RUNS) % len(DASHES)]
    line = {"color": RUNS[number % len(RUNS)], "dash": dash, "width": 2, **style}
    return {"type": "scatter", "mode": "lines+markers", "x": x, "y": y, "name": name, "line": line}


def _line(runs: Sequence[Run], name: str, title: str, unit: str, note: str) -> Chart:
    traces: list[Any] = []
    rows: list[tuple[str, ...]] = []
    for number, run in enumerate(runs):
        x, y = curve(run.steps, "samples_seen", name)
        if x:
            traces.append(_curve(run.name, number, x, y) | {"mode": "lines"})
            rows.append((run.name, *map(_number, (y[0], min(y), statistics.median(y), y[-1]))))
    # from 0: else a rate that does not change stands where 0 is, between 1 and -1
    figure = _figure(traces, "samples", unit, {} if name == "loss" else {"rangemode": "tozero"})
    return Chart(name, title, note, figure, ("run", "first", "least", "median", "last"), rows)


def _metrics(runs: Sequence[Run]) -> list[Chart]:
    found = [metrics_of(run) for run in runs]
    charts: list[Chart] = []
    for name in dict.fromkeys(name for metrics in found for name in metrics):
        traces: list[Any] = []
        rows: list[tuple[str, ...]] = []
        for number, (run, metrics) in enumerate(zip(runs, found, strict=True)):
            if name in metrics:
                epochs, values = metrics[name]
                traces.append(_curve(run.name, number, epochs, values))
                rows.append((run.name, *map(_number, (values[0], min(values), max(values), values[-1]))))
        figure, head = _figure(traces, "epoch", name), ("run", "first", "least", "most", "last")
        charts.append(Chart(f"metric-{len(charts)}", f"{name}, by epoch", "", figure, head, rows))
    return charts


def _by_rank(run: Run, number: int) -> Chart:
    ranks = run.per_rank[:MOST_RANKS]
    used = [phase for phase in PHASES if any(seconds.get(phase) for seconds in ranks)]
    names = [f"rank {rank}" for rank in range(len(ranks))]
    traces: list[Any] = []
    for phase in used:
        x, marker = [seconds.get(phase, 0.0) for seconds in ranks], {"color": OF_PHASE[phase]}
        traces.append({"type": "bar", "orientation": "h", "x": x, "y": names, "name": phase, "marker": marker})
    figure = _figure(traces, "seconds", "", {"autorange": "reversed"})
    figure["layout"] |= {"barmode": "stack", "height": 160 + 24 * len(ranks), "hovermode": "closest"}
    rows = [
        (name, *(f"{seconds.get(phase, 0.0):.2f}" for phase in used))
        for name, seconds in zip(names, ranks, strict=True)
    ]
    note = "Ranks end each update together: the one that waits least in communication is the one that others wait for."
    more = f" The first {MOST_RANKS} of {len(run.per_rank)} ranks." if len(run.per_rank) > MOST_RANKS else ""
    title, head = f"{run.name}: where each rank's time went", ("rank", *(f"{phase}, s" for phase in used))
    return Chart(f"ranks-{number}", title, note + more, figure, head, rows)


def _by_time(run: Run, number: int) -> Chart:
    ends, spent = where_time_went(run)
    traces: list[Any] = []
    for phase, y in spent.items():
        line = {"width": 0.5, "color": OF_PHASE[phase]}
        common = {"type": "scatter", "mode": "lines", "stackgroup": "one"}
        traces.append({**common, "x": ends, "y": y, "name": phase, "line": line})
    every = -(-len(ends) // _TABLE_ROWS) or 1
    rows = [(f"{ends[at]:,.0f}", *(f"{y[at]:.1f}" for y in spent.values())) for at in range(0, len(ends), every)]
    title = f"{run.name}: where an update's time went, on rank 0"
    head = ("samples", *(f"{phase}, ms" for phase in spent))
    return Chart(f"time-{number}", title, "", _figure(traces, "samples", "ms an update"), head, rows)


def _saves(runs: Sequence[Run]) -> Chart:
    traces: list[Any] = []
    rows: list[tuple[str, ...]] = []
    for number, run in enumerate(runs):
        saves = [save for save in run.saves if save.get("blocked_s") is not None]
        if saves:
            x = [save["step"] for save in saves]
            for name, what, dash in (("blocked_s", "training waited", "solid"), ("sealed_s", "on disk after", "dot")):
                y = [save.get(name) for save in saves]
                traces.append(_curve(f"{run.name}: {what}", number, x, y, dash=dash))
            waited = [save["blocked_s"] for save in saves]
            failed = sum(save.get("sealed_s") is None for save in saves)
            rows.append((run.name, str(len(saves)), f"{sum(waited):.2f}", f"{max(waited):.2f}", str(failed)))
    head = ("run", "saves", "training waited, s", "the longest, s", "failed")
    return Chart("saves", "Checkpoints", "", _figure(traces, "update", "seconds"), head, rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
