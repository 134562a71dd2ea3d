"""A report's charts, by Plotly; a reader who sees none finds the same numbers in tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.commands.report_data import PHASES, Run, curve, metrics_of, where_time_went

# Okabe and Ito's colours, told apart by nearly everybody: of runs, and of phases
RUNS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F", "#9467BD")
OF_PHASE = dict(
    zip(
        PHASES,
        ("#E69F00", "#0072B2", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#7F7F7F", "#CC79A7", "#9467BD"),
        strict=True,
    )
)
DASHES = ("solid", "dash", "dot", "dashdot")  # beside the colours, for print in grey
MOST_RANKS = 64
_TABLE_ROWS = 12


@dataclass(frozen=True)
class Chart:
    """One chart: Plotly's figure as JSON types, and the same in a table."""

    id: str  # of the page's element
    title: str
    note: str  # how to read it, or ""
    figure: dict[str, Any]  # `data` and `layout`
    head: tuple[str, ...]  # of the table
    rows: list[tuple[str, ...]] = field(default_factory=list)


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """All that the runs have something for."""
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


def _figure(traces: Sequence[Any], x: str, y: str, **layout: Any) -> dict[str, Any]:
    import plotly.graph_objects as go

    figure = go.Figure(list(traces))
    figure.update_layout(
        xaxis_title=x, yaxis_title=y, margin={"l": 64, "r": 16, "t": 16, "b": 48},
        height=320 + 12 * max(0, len(traces) - 6),  # of which the legend, of runs or ranks, takes half at most
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}, hovermode="x unified",
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", **layout,
    )  # fmt: skip
    whole: dict[str, Any] = figure.to_plotly_json()
    whole["layout"].pop("template", None)  # the page has one for light and one for dark
    return whole


def _style(number: int) -> dict[str, Any]:
    return {"color": RUNS[number % len(RUNS)], "dash": DASHES[number // len(RUNS) % len(DASHES)], "width": 2}


def _line(runs: Sequence[Run], name: str, title: str, unit: str, note: str) -> Chart:
    import plotly.graph_objects as go

    traces: list[Any] = []
    rows: list[tuple[str, ...]] = []
    for number, run in enumerate(runs):
        x, y = curve(run.steps, "samples_seen", name)
        if x:
            traces.append(go.Scatter(x=x, y=y, mode="lines", name=run.name, line=_style(number)))
            rows.append((run.name, _number(y[0]), _number(min(y)), _number(statistics.median(y)), _number(y[-1])))
    head = ("run", "first", "least", "median", "last")
    # from 0: else a rate that does not change stands where 0 is, between 1 and -1
    layout = {} if name == "loss" else {"yaxis": {"rangemode": "tozero"}}
    return Chart(name, title, note, _figure(traces, "samples", unit, **layout), head, rows)


def _metrics(runs: Sequence[Run]) -> list[Chart]:
    import plotly.graph_objects as go

    found = [metrics_of(run) for run in runs]
    charts: list[Chart] = []
    for name in dict.fromkeys(name for its in found for name in its):
        traces: list[Any] = []
        rows: list[tuple[str, ...]] = []
        for number, (run, its) in enumerate(zip(runs, found, strict=True)):
            if name in its:
                epochs, values = its[name]
                traces.append(go.Scatter(x=epochs, y=values, mode="lines+markers", name=run.name, line=_style(number)))
                numbers = map(_number, (values[0], min(values), max(values), values[-1]))
                rows.append((run.name, *numbers))
        figure = _figure(traces, "epoch", name)
        charts.append(Chart(f"metric-{len(charts)}", f"{name}, by epoch", "", figure, _METRIC, rows))
    return charts


_METRIC = ("run", "first", "least", "most", "last")


def _by_rank(run: Run, number: int) -> Chart:
    import plotly.graph_objects as go

    ranks = run.per_rank[:MOST_RANKS]
    used = [phase for phase in PHASES if any(its.get(phase) for its in ranks)]
    names = [f"rank {rank}" for rank in range(len(ranks))]
    traces = [
        go.Bar(
            y=names,
            x=[its.get(phase, 0.0) for its in ranks],
            name=phase,
            orientation="h",
            marker={"color": OF_PHASE[phase]},
        )  # fmt: skip
        for phase in used
    ]
    layout = {"barmode": "stack", "yaxis": {"autorange": "reversed"}}
    figure = _figure(traces, "seconds", "", **layout)
    figure["layout"] |= {"height": 160 + 24 * len(ranks), "hovermode": "closest"}
    rows = [(name, *(f"{its.get(phase, 0.0):.2f}" for phase in used)) for name, its in zip(names, ranks, strict=True)]
    note = "Ranks end each update together: the one that waits least in communication is the one that others wait for."
    more = f" The first {MOST_RANKS} of {len(run.per_rank)} ranks." if len(run.per_rank) > MOST_RANKS else ""
    title = f"{run.name}: where each rank's time went"
    return Chart(f"ranks-{number}", title, note + more, figure, ("rank", *(f"{its}, s" for its in used)), rows)


def _by_time(run: Run, number: int) -> Chart:
    import plotly.graph_objects as go

    ends, spent = where_time_went(run)
    traces = [
        go.Scatter(
            x=ends, y=its, name=phase, mode="lines", stackgroup="one", line={"width": 0.5, "color": OF_PHASE[phase]}
        )
        for phase, its in spent.items()
    ]
    every = -(-len(ends) // _TABLE_ROWS) or 1
    rows = [(f"{ends[at]:,.0f}", *(f"{its[at]:.1f}" for its in spent.values())) for at in range(0, len(ends), every)]
    title = f"{run.name}: where an update's time went, on rank 0"
    head = ("samples", *(f"{phase}, ms" for phase in spent))
    return Chart(f"time-{number}", title, "", _figure(traces, "samples", "ms an update"), head, rows)


def _saves(runs: Sequence[Run]) -> Chart:
    import plotly.graph_objects as go

    traces: list[Any] = []
    rows: list[tuple[str, ...]] = []
    for number, run in enumerate(runs):
        its = [save for save in run.saves if save.get("blocked_s") is not None]
        if its:
            steps = [save["step"] for save in its]
            for name, dash in (("blocked_s", "solid"), ("sealed_s", "dot")):
                told = {"blocked_s": "training waited", "sealed_s": "on disk after"}[name]
                traces.append(
                    go.Scatter(
                        x=steps,
                        y=[save.get(name) for save in its],
                        mode="lines+markers",
                        name=f"{run.name}: {told}",
                        line=_style(number) | {"dash": dash},
                    )  # fmt: skip
                )
            waited = [save["blocked_s"] for save in its]
            failed = sum(save.get("sealed_s") is None for save in its)
            rows.append((run.name, str(len(its)), f"{sum(waited):.2f}", f"{max(waited):.2f}", str(failed)))
    head = ("run", "saves", "training waited, s", "the longest, s", "failed")
    return Chart("saves", "Checkpoints", "", _figure(traces, "update", "seconds"), head, rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
