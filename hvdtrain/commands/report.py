"""`hvdtrain report RUN [RUN ...]`: writes one HTML page about a run, or about several side by side.

The page has advice, curves, the time of each rank by phase, checkpoints, events, environment and configuration.
For several runs, what differs comes first. The page is one file that loads nothing from the network.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.commands import report_charts, report_data
from hvdtrain.commands.report_data import Run
from hvdtrain.core import flags
from hvdtrain.core.errors import ConfigError, install_command

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
    folders = report_data.find_runs(args.runs)
    out = args.out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    flags.check_file("--out", out)
    names = _names(folders)
    text = page([report_data.read(folder, name) for folder, name in zip(folders, names, strict=True)])
    flags.write_file("--out", out, text)
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
    charts = report_charts.charts_of(runs)
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
    for _, title, *_, curves in report_data.curves_of(runs):
        if any(y for _, (_, y) in curves) and not report_charts.is_chart(curves):
            rows.append([title, *(report_charts.number(y[-1]) if y else "" for _, (_, y) in curves)])
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
    found = [report_data.flat({name: run.record.get(name) for name in _SETTINGS}) for run in runs]
    for name in dict.fromkeys(name for settings in found for name in settings):
        values = [settings.get(name, "") for settings in found]
        if any(values):
            yield [name, *values]
