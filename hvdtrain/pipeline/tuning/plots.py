"""The pictures of a pipeline, drawn from measured seconds: bars, and time over split size.

Only `plot` imports matplotlib (`pip install hvdtrain[plot]`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hvdtrain.core.errors import ConfigError, install_command
from hvdtrain.record.stats import spread as spread_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOTS_PER_INCH = 130
# told apart in grey and by eyes that see red and green alike (Okabe and Ito, 2008)
BLUE, ORANGE, GREEN, VERMILION, SKY, YELLOW, PURPLE = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#F0E442", "#CC79A7",
)  # fmt: skip


@dataclass(frozen=True)
class Bars:
    """Seconds of several variants, as bars: their mean, with one standard deviation to each side."""

    title: str  # what ran, on what
    seconds: Mapping[str, Sequence[float]]  # the repeats of each variant, in the order of the bars
    of: str = "a step"  # what took the seconds, for the axis: "a batch", "3 batches"

    @property
    def inches(self) -> tuple[float, float]:
        """Width and height of the figure."""
        return max(6.5, 1.9 * len(self.seconds)), 5.0

    def draw(self, axes: Axes) -> None:
        """Draws itself."""
        names = list(self.seconds)
        means = [statistics.fmean(its) for its in self.seconds.values()]
        spreads = [spread_of(its) for its in self.seconds.values()]
        colours = [(BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION)[i % 6] for i in range(len(names))]
        look: dict[str, Any] = {"color": colours, "edgecolor": "black", "linewidth": 0.6, "zorder": 2}
        axes.bar(range(len(names)), means, yerr=spreads, capsize=8, width=0.62, **look)
        top = max(mean + spread for mean, spread in zip(means, spreads, strict=True))
        for i, (mean, spread) in enumerate(zip(means, spreads, strict=True)):
            digits = _digits(mean)
            text = f"{mean:.{digits}f} s" + (f" ± {spread:.{digits}f}" if spread else "")
            if i:
                text += f"\n{mean / means[0]:.2f} × {names[0].partition(' (')[0]}"
            axes.text(i, mean + spread + 0.02 * top, text, ha="center", va="bottom", fontsize=10)
        axes.set_xticks(range(len(names)), [_wrapped(name, 18) for name in names], fontsize=10)
        axes.set_ylim(0, 1.22 * top)
        axes.set_ylabel(f"Seconds for {self.of}\n(mean ± standard deviation {_repeats([*self.seconds.values()])})")
        axes.grid(axis="y", color="0.88", zorder=0)


@dataclass(frozen=True)
class SplitCurve:
    """Seconds over the split size: measured with one standard deviation to each side, and predicted."""

    title: str  # what ran, on what
    batch: int  # samples of a step
    seconds: Mapping[int, Sequence[float]]  # the repeats of each split size (samples of the largest micro-batch)
    predicted: Mapping[int, float] = field(default_factory=dict)  # seconds by split size, also of sizes not measured
    best: int | None = None  # the split size to mark
    lines: Mapping[str, float] = field(default_factory=dict)  # seconds to compare with ("naive split"), drawn across
    of: str = "a step"  # what took the seconds, for the axis
    inches = (8.0, 5.0)  # width and height of the figure

    def draw(self, axes: Axes) -> None:
        """Draws itself."""
        sizes = sorted(self.seconds)
        means = [statistics.fmean(self.seconds[size]) for size in sizes]
        spreads = [spread_of(self.seconds[size]) for size in sizes]
        axes.errorbar(sizes, means, yerr=spreads, marker="o", capsize=5, color=BLUE, linewidth=1.8, zorder=3,
                      label=f"measured (mean ± standard deviation {_repeats([*self.seconds.values()])})")  # fmt: skip
        if self.predicted:
            known = sorted(self.predicted)
            axes.plot(known, [self.predicted[size] for size in known], linestyle="--", marker="x", markersize=5,
                      color=VERMILION, linewidth=1.3, zorder=2, label="predicted")  # fmt: skip
        for (name, seconds), colour in zip(self.lines.items(), (ORANGE, GREEN, PURPLE, SKY), strict=False):
            label = f"{name}: {_number(seconds)} s"
            axes.axhline(seconds, color=colour, linestyle=":", linewidth=1.8, zorder=1, label=label)
        if self.best is not None:
            mean = statistics.fmean(self.seconds[self.best])
            axes.plot([self.best], [mean], marker="*", markersize=19, color=YELLOW, markeredgecolor="black",
                      linestyle="none", zorder=4, label=f"best: split size {self.best}, {_number(mean)} s")  # fmt: skip
        self._axis(axes, sizes)
        tops = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        highest = max([*self.lines.values(), *self.predicted.values(), *tops])
        axes.set_ylim(0, 1.08 * highest)
        axes.set_ylabel(f"Seconds for {self.of}")
        axes.grid(color="0.9", zorder=0)
        handles, labels = axes.get_legend_handles_labels()  # matplotlib puts error bars last: they are what counts
        order = sorted(range(len(labels)), key=lambda i: not labels[i].startswith("measured"))
        axes.legend([handles[i] for i in order], [labels[i] for i in order], fontsize=9, loc="best", framealpha=0.9)

    def _axis(self, axes: Axes, sizes: Sequence[int]) -> None:
        """Sizes on a logarithmic scale, for the small ones lie close; below each how many micro-batches it is."""
        from matplotlib.ticker import NullLocator

        axes.set_xscale("log")
        labels = [f"{size}\n({math.ceil(self.batch / size)})" for size in sizes]
        axes.set_xticks(sizes, labels, fontsize=9)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(
            f"Split size: samples of a micro-batch\n(in how many micro-batches a batch of {self.batch} is cut)"
        )


class Drawable(Protocol):
    """An object that has a picture to draw, as `Tuning` has."""

    def picture(self) -> Bars | SplitCurve: ...


def plot(what: Bars | SplitCurve | Drawable, path: str | Path) -> Path:
    """Draws a picture, writes it and returns its path; the ending selects the format (`.png`, `.svg`, `.pdf`).

    Example:
        hvdtrain.pipeline.plot(tuning, "split.png")

    Args:
        what: a `Tuning` for its split sizes, or another picture of this module.
        path: the file to write; its folder is made.

    Raises:
        ConfigError: nothing to draw; matplotlib is missing; the file cannot be written.
    """
    picture = what if isinstance(what, (Bars, SplitCurve)) else what.picture()
    if not picture.seconds or not all(picture.seconds.values()):
        names = ", ".join(str(name) for name, its in picture.seconds.items() if not its)
        received = f"no seconds for {names or 'anything'}"
        raise ConfigError("a picture needs something to draw", received, "measure each at least once")
    try:
        from matplotlib.figure import Figure  # without pyplot: no window, no state of the whole process
    except ImportError as error:
        remedy = install_command("plot")
        raise ConfigError("pictures need matplotlib", f"matplotlib: {error}", remedy) from error
    figure = Figure(figsize=picture.inches, layout="constrained")
    axes = figure.add_subplot()
    picture.draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.set_title(picture.title, fontsize=11, wrap=True)
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except (OSError, ValueError) as error:  # ValueError: an ending that matplotlib does not know
        rule = "a picture needs a file that can be written, with an ending such as .png"
        raise ConfigError(rule, f"{path}: {error}", "name another file") from error
    return path


def _repeats(every: Sequence[Sequence[float]]) -> str:
    """The caption's "of 10 repeats"."""
    counts = sorted({len(its) for its in every})
    if counts == [1]:
        return "of 1 run"
    return f"of {counts[0]} repeats" if len(counts) == 1 else f"of {counts[0]} to {counts[-1]} repeats"


def _digits(seconds: float) -> int:
    """Returns the number of decimals that leaves three significant digits: 0.0123, 1.23, 123."""
    return max(0, 2 - math.floor(math.log10(seconds))) if seconds > 0 else 0


def _number(seconds: float) -> str:
    return f"{seconds:.{_digits(seconds)}f}"


def _wrapped(text: str, width: int) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))
