"""`hvdtrain report RUN [RUN ...]`: writes one HTML page about a run, or about several side by side.

The page has advice, curves, the time of each rank by phase, checkpoints, events, environment and configuration.
For several runs, what differs comes first. The page is one file that loads nothing from the network.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.commands.report_data import PHASES, Curve, Run, curves_of, find_runs, flat, read, where_time_went
from hvdtrain.core import flags
from hvdtrain.core.errors import ConfigError, install_command

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


TEMPLATE = Path(__file__).with_name("report.html")
_SETTINGS = ("effective_batch", "config", "world", "launcher", "versions")
Row = list[str]  # a name, and the value in each run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `hvdtrain report`."""
    parser.description = __doc__
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's directory, or a directory of runs")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write (default: RUN/report.html; for several report.html)"
    )


def run(args: argparse.Namespace) -> int:
    """Writes the page, and prints its path."""
    folders = find_runs(args.runs)
    out = args.out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    flags.check_file("--out", out)
    names = _names(folders)
    runs = [read(folder, name) for folder, name in zip(folders, names, strict=True)]
    flags.write_file("--out", out, page(runs))
    print(os.fsencode(out).decode("utf-8", "backslashreplace"))
    return 0


def _names(folders: Sequence[Path]) -> list[str]:
    """Returns the shortest ends of the paths, of equal length, that differ from one another."""
    paths = [folder.resolve().parts for folder in folders]
    kept = next((n for n in range(1, max(map(len, paths)) + 1) if len({path[-n:] for path in paths}) == len(paths)), 1)
    return ["/".join(path[-kept:]) for path in paths]


def page(runs: Sequence[Run]) -> str:
    """Returns the report as HTML; raises ConfigError if the packages that make it are missing."""
    try:
        import bokeh.embed
        import jinja2
        from bokeh.core.types import ID
    except ModuleNotFoundError as error:
        rule = "hvdtrain report needs jinja2 and bokeh"
        raise ConfigError(rule, f"no module {error.name}", install_command("report")) from error
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    charts = charts_of(runs)
    plots = [bokeh.embed.json_item(chart.plot, ID(chart.id)) for chart in charts if chart.plot]
    script = Path(bokeh.__file__).parent / "server/static/js/bokeh.min.js"
    numbers, settings, is_one = list(_numbers(runs)), list(_settings(runs)), len(runs) == 1
    differing = [row for row in (*numbers, *settings) if len(set(row[1:])) > 1]
    same = [row[:2] for row in (*numbers, *settings) if row not in differing]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        runs=runs, names=[run.name for run in runs], charts=charts,
        first=("Numbers", numbers) if is_one else ("Differences", differing),
        last=("Settings", settings) if is_one else ("Same in all runs", same),
        plots=_script(json.dumps(plots)), bokeh=Markup(script.read_text(encoding="utf-8")),
    )  # fmt: skip


def _script(text: str) -> Any:
    """Returns JSON that no text of a run can turn into markup of the page."""
    from markupsafe import Markup

    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _numbers(runs: Sequence[Run]) -> Iterator[Row]:
    """Yields the main numbers that the runs have."""
    results = [run.record.get("result", {}) for run in runs]
    rows: list[Row] = [["status", *(run.status for run in runs)]]
    for name in dict.fromkeys(name for result in results for name in result):
        if name not in ("verdict", "shares"):
            values = ["" if result.get(name) in (None, []) else result[name] for result in results]
            texts = [f"{value:.5g}" if isinstance(value, float) else str(value) for value in values]
            rows.append([f"result.{name}", *texts])
    for _, title, *_, curves in curves_of(runs):
        if any(y for _, (_, y) in curves) and not is_chart(curves):
            rows.append([title, *(number(y[-1]) if y else "" for _, (_, y) in curves)])
    rates = [run.samples_per_s for run in runs]
    rows.append(["samples/s (median)", *(f"{rate:,.0f}" if rate else "" for rate in rates)])
    if len(runs) > 1 and (first := rates[0]):
        rows.append([f"speed relative to {runs[0].name}", *(f"{rate / first:.2f}" if rate else "" for rate in rates)])
    rows += [
        ["steps", *(f"{run.steps[-1]['step']:,}" if run.steps else "0" for run in runs)],
        ["ranks", *(str(run.record.get("world", {}).get("size", "")) for run in runs)],
        ["checkpoints", *(str(len(run.saves)) for run in runs)],
        ["failed checkpoints", *(str(sum(save.get("sealed_s") is None for save in run.saves)) for run in runs)],
        ["wall-clock time (s)", *(f"{run.seconds:,.1f}" for run in runs)],
        ["starts", *(str(len(run.record.get("attempts", ()))) for run in runs)],
        ["first start", *(str(run.record.get("started", "")) for run in runs)],
    ]
    yield from (row for row in rows if any(row[1:]))


def _settings(runs: Sequence[Run]) -> Iterator[Row]:
    """Yields each setting that a run has a value for."""
    found = [flat({name: run.record.get(name) for name in _SETTINGS}) for run in runs]
    for name in dict.fromkeys(name for settings in found for name in settings):
        values = [settings.get(name, "") for settings in found]
        if any(values):
            yield [name, *values]
