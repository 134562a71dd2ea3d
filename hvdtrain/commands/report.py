"""`hvdtrain report RUN [RUN ...]`: one page about a run, or several side by side.

Curves, where each rank's time went, checkpoints, what happened, environment and configuration, and what to do about it.
The page is one file that asks no network for anything: mail it, or keep it with the run.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.commands import report_charts, report_data, report_trace
from hvdtrain.commands.report_data import Run
from hvdtrain.commands.why import moment
from hvdtrain.core import flags, variables
from hvdtrain.core.errors import ConfigError, install_command

TEMPLATE = Path(__file__).with_name("report.html")
_SETTINGS = ("versions", "world", "launcher", "effective_batch", "config")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain report`."""
    parser.description = __doc__
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directory of a run, or of several runs")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file to write (default: RUN/report.html; for several runs report.html)",
    )
    what = "write RUN/trace.json instead, for ui.perfetto.dev: where the time went"
    what = f"{what}, update by update where {variables.TRACE} or `hvdtrain launch --trace` was set"
    parser.add_argument("--trace", action="store_true", help=what)


def run(args: argparse.Namespace) -> int:
    """Writes the page, or with `--trace` each run's trace, and prints where."""
    folders = report_data.find_runs(args.runs)
    if args.trace:
        if args.out is not None:
            raise ConfigError("--out cannot be given with --trace", f"--out {args.out}", "omit --out (RUN/trace.json)")
        for folder in folders:
            _write(folder / "trace.json", json.dumps(report_trace.trace(folder)))
        return 0
    out = args.out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    flags.check_file("--out", out)
    names = _names(folders)
    _write(out, page([report_data.read(folder, name) for folder, name in zip(folders, names, strict=True)]))
    return 0


def _write(out: Path, text: str) -> None:
    flags.write_file("--out", out, text)
    print(os.fsencode(out).decode("utf-8", "backslashreplace"))


def _names(folders: Sequence[Path]) -> list[str]:
    """Returns the shortest ends of the paths, of equal length, that differ from one another."""
    parts = [folder.resolve().parts for folder in folders]
    kept = next((n for n in range(1, max(map(len, parts)) + 1) if len({its[-n:] for its in parts}) == len(parts)), 1)
    return ["/".join(its[-kept:]) for its in parts]


def page(runs: Sequence[Run]) -> str:
    """Returns the report as HTML; raises ConfigError if the packages that make it are missing."""
    try:
        import jinja2
        import plotly.io
        import plotly.offline
        import plotly.utils
    except ModuleNotFoundError as error:
        rule = "hvdtrain report needs jinja2 and plotly"
        raise ConfigError(rule, f"no module {error.name}", install_command("report")) from error
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    charts = report_charts.charts_of(runs)
    templates = {name: plotly.io.templates[f"plotly_{its}"] for name, its in (("light", "white"), ("dark", "dark"))}
    figures = {
        "charts": {chart.id: chart.figure for chart in charts},
        "templates": {name: template.to_plotly_json() for name, template in templates.items()},
    }
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        runs=runs, charts=charts, numbers=list(_numbers(runs)), settings=list(_differing(runs)),
        moment=moment, figures=_script(json.dumps(figures, cls=plotly.utils.PlotlyJSONEncoder)),
        plotly=Markup(plotly.offline.get_plotlyjs()),
    )  # fmt: skip


def _script(text: str) -> Any:
    """JSON that stays JSON within an element of a page, whatever a run's texts hold."""
    from markupsafe import Markup

    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _numbers(runs: Sequence[Run]) -> Iterable[tuple[str, list[str]]]:
    """Yields the main numbers: a name, and the value in each run."""
    first = runs[0].samples_per_s
    yield "status", [its.status for its in runs]
    yield "started", [str(its.record.get("started", "")) for its in runs]
    yield "lives", [str(len(its.record.get("attempts", ()))) for its in runs]
    yield "ranks", [str(its.record.get("world", {}).get("size", "")) for its in runs]
    yield "updates", [f"{its.steps[-1]['step']:,}" if its.steps else "0" for its in runs]
    yield "wall-clock, s", [f"{its.seconds:,.1f}" for its in runs]
    yield "samples/s, median", [f"{its.samples_per_s:,.0f}" if its.samples_per_s else "" for its in runs]
    if len(runs) > 1 and first:
        ratios = [f"{its.samples_per_s / first:.2f}" if its.samples_per_s else "" for its in runs]
        yield f"samples/s, x {runs[0].name}", ratios
    results = [its.record.get("result", {}) for its in runs]
    for name in dict.fromkeys(name for result in results for name in result):
        if name not in ("verdict", "shares"):
            values = [result.get(name, "") for result in results]
            yield f"result: {name}", [f"{its:.5g}" if isinstance(its, float) else str(its) for its in values]


def _differing(runs: Sequence[Run]) -> Iterable[tuple[str, list[str], bool]]:
    """Yields each setting: name, value in each run, True if the runs differ; differing settings come first."""
    found = [report_data.flat({name: its.record.get(name) for name in _SETTINGS}) for its in runs]
    names = dict.fromkeys(name for its in found for name in its)
    rows = [(name, [its.get(name, "") for its in found]) for name in names]
    yield from sorted(((name, values, len(set(values)) > 1) for name, values in rows), key=lambda row: not row[2])
