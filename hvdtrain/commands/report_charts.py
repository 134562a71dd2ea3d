"""Draws a report's charts with Bokeh; a table beside each chart has the same numbers for screen readers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.commands.report_data import PHASES, Curve, Run, curves_of, where_time_went

# Okabe and Ito's colors, which most color-blind readers can tell apart: of runs, and of phases
RUNS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F", "#9467BD")
_COLORS = ("#E69F00", "#0072B2", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#7F7F7F", "#CC79A7", "#9467BD")
OF_PHASE = dict(zip(PHASES, _COLORS, strict=True))
DASHES = ("solid", "dashed", "dotted")  # tell curves of one color apart
MOST_RANKS = 64
_MOST_MARKERS = 12  # of a curve; a longer one is a plain line
_TABLE_ROWS = 12
Legend = list[tuple[str, str, str]]  # name, color, dash


@dataclass(frozen=True)
class Chart:
    """A chart, and its data as a table."""

    id: str  # of the page's element
    title: str
    note: str  # how to read it, or ""
    plot: Any  # Bokeh's figure; None if there are too few values: the page then shows the table
    legend: Legend
    head: tuple[str, ...]  # of the table
    rows: list[tuple[str, ...]]


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """Returns the charts that the runs have data for."""
    of_run = [f", run {run.name}" if len(runs) > 1 else "" for run in runs]
    bars = [_by_rank(run, at, of_run[at]) for at, run in enumerate(runs)]
    bars += [_by_time(run, at, of_run[at]) for at, run in enumerate(runs) if len(run.steps) > 1]
    charts = [_curves(*each) for each in curves_of(runs) if is_chart(each[-1])]
    charts += [chart for chart in bars if len(chart.head) > 1]
    for renderer in (renderer for chart in charts if chart.plot for renderer in chart.plot.renderers):
        renderer.update(nonselection_glyph=None, muted_glyph=None)  # unused; half of a chart's bytes
    return charts


def is_chart(curves: Sequence[tuple[str, Curve]]) -> bool:
    """Returns True if a curve has two points that can be drawn."""
    return any(sum(map(math.isfinite, ys)) > 1 for _, (_, ys) in curves)


def _plot(x: str, y: str, values: list[tuple[str, str]], **more: Any) -> tuple[Any, Any]:
    """Returns an empty figure, whose colors are in the page's style sheet, and its tooltip."""
    from bokeh.models import HoverTool, NoOverlap, NumeralTickFormatter, PlainText
    from bokeh.plotting import figure

    hover = HoverTool(tooltips=values, mode="vline", line_policy="nearest", point_policy="follow_mouse")
    clear = dict.fromkeys(("background_fill_color", "border_fill_color", "outline_line_color"))
    style = {"sizing_mode": "stretch_width", "toolbar_location": None, "height": 280} | clear | more
    plot = figure(x_axis_label=PlainText(text=x), y_axis_label=PlainText(text=y), tools=[hover], **style)
    plot.xaxis.update(formatter=NumeralTickFormatter(format="0,0.[00]"), major_label_policy=NoOverlap())
    plot.xgrid.visible = False
    return plot, hover


def _curves(name: str, title: str, x: str, y: str, each: Sequence[tuple[str, Curve]]) -> Chart:
    curves = [(run, xs, [value if math.isfinite(value) else math.nan for value in ys]) for run, (xs, ys) in each if ys]
    colors = [RUNS[at % len(RUNS)] for at in range(len(curves))]
    dashes = [DASHES[at // len(RUNS) % len(DASHES)] for at in range(len(curves))]
    runs, x_s, y_s = zip(*curves, strict=True)
    plot, hover = _plot(x, y, [("run", "@run"), (x, "$snap_x{0,0}"), (y, "$snap_y{%.6g}")])
    hover.formatters = {"$snap_y": "printf"}
    plot.xaxis.ticker.min_interval = 1
    source = {"run": runs, "x": x_s, "y": y_s, "color": colors, "dash": dashes}
    hover.renderers = [plot.multi_line("x", "y", color="color", line_dash="dash", line_width=2, source=source)]
    for xs, ys, color in zip(x_s, y_s, colors, strict=True):
        if len(xs) <= _MOST_MARKERS:
            plot.scatter(xs, ys, color=color, size=6)
    if x != "epoch" and name != "loss":  # otherwise a constant seems to vary
        plot.y_range.start = 0
    rows = [(run, *_statistics(ys)) for run, (_, ys) in each if ys]
    head = ("run", "first", "lowest", "median", "highest", "last")
    title = title if x == "epoch" else title.capitalize()
    return Chart(name, title, "", plot, list(zip(runs, colors, dashes, strict=True)), head, rows)


def _statistics(values: Sequence[float]) -> tuple[str, ...]:
    if len(values) == 1:
        return "", "", "", "", number(values[0])
    finite = list(filter(math.isfinite, values)) or values
    return tuple(map(number, (values[0], min(finite), statistics.median(finite), max(finite), values[-1])))


def _by_rank(run: Run, at: int, of_run: str) -> Chart:
    ranks = run.per_rank[:MOST_RANKS]
    names = [str(rank) for rank in range(len(ranks))]
    spent = {phase: [seconds.get(phase, 0.0) for seconds in ranks] for phase in PHASES}
    note = "All ranks finish a step together. The others wait for the rank with the least communication time."
    more = f" The first {MOST_RANKS} of {len(run.per_rank)} ranks are shown." if len(run.per_rank) > MOST_RANKS else ""
    title, size = f"Time of each rank by phase{of_run}", {"height": 110 + 24 * len(ranks), "y_range": names[::-1]}
    return _bars(f"ranks-{at}", title, note + more, names, spent, {}, ("seconds", "rank", "s"), **size)


def _by_time(run: Run, at: int, of_run: str) -> Chart:
    ends, spent = where_time_went(run)
    widths = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
    place = {"width": widths, "middle": [end - width / 2 for end, width in zip(ends, widths, strict=True)]}
    title, labels = f"Step time on rank 0 by phase{of_run}", [f"{end:,.0f}" for end in ends]
    return _bars(f"time-{at}", title, "", labels, spent, place, ("samples", "ms per step", "ms"))


def _bars(
    name: str, title: str, note: str, labels: Sequence[str], times: Mapping[str, Sequence[float]],
    place: Mapping[str, Sequence[float]], axes: tuple[str, str, str], **size: Any,
) -> Chart:  # fmt: skip
    """Returns a chart of bars stacked by phase, horizontal ones without `place`; `axes` are x, y and the unit."""
    from bokeh.models import ColumnDataSource

    (x, y, unit), spent = axes, {phase: values for phase, values in times.items() if any(values)}
    head, every = (x, -(-len(labels) // _TABLE_ROWS)) if place else (y, 1)
    tooltip = [(head, "@label"), *((phase, f"@{phase}{{0,0.00}} {unit}") for phase in spent)]
    plot, hover = _plot(x, y, tooltip, **size)
    colors, source = [OF_PHASE[phase] for phase in spent], ColumnDataSource({"label": labels, **place, **spent})
    style = {"color": colors, "source": source}
    if place:
        plot.y_range.start = 0
        hover.renderers = plot.vbar_stack(list(spent), x="middle", width="width", **style)[:1]
    else:
        hover.update(renderers=plot.hbar_stack(list(spent), y="label", height=0.8, **style)[:1], mode="hline")
    shown = range(0, len(labels), every or 1)
    rows = [(labels[at], *(f"{values[at]:.2f}" for values in spent.values())) for at in shown]
    legend = [(phase, color, "solid") for phase, color in zip(spent, colors, strict=True)]
    head_row = (head, *(f"{phase} ({unit})" for phase in spent))
    if len(labels) < 2:
        return Chart(name, title, "", None, [], head_row, rows)
    return Chart(name, title, note, plot, legend, head_row, rows)


def number(value: float) -> str:
    """Returns a value as text, with few digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
