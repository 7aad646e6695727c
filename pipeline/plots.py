"""How the report's plots look: lines, axes and palette in, inline SVG or PNG out.

What a plot shows and says belongs to `report`. No text that came out of a dump is drawn here.
"""

import contextlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

# Okabe and Ito's palette, which colour-blind readers can tell apart: on white, and lifted for a dark page.
COLOURS = {
    "blue": ("#0072b2", "#56b4e9"),
    "vermillion": ("#d55e00", "#ff8a3d"),
    "orange": ("#e69f00", "#f0b840"),
    "green": ("#009e73", "#2fc79b"),
    "purple": ("#cc79a7", "#e6a3c8"),
    "sky": ("#56b4e9", "#a5d8f7"),
    "ink": ("#1b1f23", "#e8eaed"),
    "muted": ("#5c6570", "#a2abb5"),
    "grid": ("#dde1e6", "#3a4048"),
}
LineStyle = tuple[str, str, str]
"""Colour, dashes, marker. Colour is never the only difference. No dashes at all: markers only."""
_DASHES = {"-": "", "--": "6 4", ":": "2 3", "": "0 40"}
_SMALLEST_LOG_RANGE = 12
_PLOT_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "expert-tier",
    "text.parse_math": False,
    "font.size": 9,
    "font.family": "sans-serif",
    "text.color": COLOURS["ink"][0],
    "axes.edgecolor": COLOURS["muted"][0],
    "axes.labelcolor": COLOURS["muted"][0],
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": COLOURS["grid"][0],
    "grid.linewidth": 0.8,
    "xtick.color": COLOURS["muted"][0],
    "ytick.color": COLOURS["muted"][0],
    "ytick.left": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 3.8,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "legend.handlelength": 2.4,
}
PAGE_PLOT_INCHES = (4.7, 3.3)
_BARS_WIDTH_INCHES = 4.2
_BAR_INCHES = 0.24
SMALL_PLOT_INCHES = (4.8, 3.0)


@dataclass(frozen=True)
class Line:
    """A line of a plot. `detail` stands in the page's legend only: it may be a user's text."""

    label: str
    style: LineStyle
    x: list[float]
    y: list[float]
    detail: str = ""

    @property
    def colour(self) -> str:
        return self.style[0]

    @property
    def dashes(self) -> str:
        return _DASHES[self.style[1]]

    @property
    def marker(self) -> str:
        return self.style[2]


@dataclass(frozen=True)
class Bar:
    """A bar of a waterfall, from `start` to `end`, with its name before it and its number behind all bars."""

    label: str
    start: float
    end: float
    colour: str
    number: str


@contextlib.contextmanager
def drawing(inches: tuple[float, float]) -> Iterator[tuple[Figure, Axes]]:
    """A figure with one plot of shares from 0 to 1, in the report's look while the block lasts."""
    with mpl.rc_context(_PLOT_SETTINGS):  # type: ignore[arg-type]
        figure = Figure(figsize=inches, layout="constrained")
        axes = figure.subplots()
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        yield figure, axes


@contextlib.contextmanager
def drawing_bars(title: str, panels: Sequence[tuple[str, Sequence[Bar]]]) -> Iterator[Figure]:
    """A figure with a waterfall per panel (its title and bars from the top), each on a scale of its own, from 0."""
    heights = [len(bars) + 1.6 for _, bars in panels]
    with mpl.rc_context(_PLOT_SETTINGS):  # type: ignore[arg-type]
        figure = Figure(figsize=(_BARS_WIDTH_INCHES, _BAR_INCHES * (sum(heights) + 2)), layout="constrained")
        figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=10, fontweight="bold")
        every = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (name, bars) in zip(every, panels, strict=True):
            _draw_bars(axes, name, bars)
        yield figure


def _draw_bars(axes: Axes, name: str, bars: Sequence[Bar]) -> None:
    for place, bar in enumerate(bars):
        if bar.end != bar.start:
            # The edge keeps a bar in sight that is too small to be seen otherwise.
            axes.barh(
                place, bar.end - bar.start, left=bar.start, height=0.62, color=COLOURS[bar.colour][0],
                edgecolor=COLOURS[bar.colour][0], linewidth=0.8,
            )  # fmt: skip
        axes.text(
            1.03, place, bar.number, transform=axes.get_yaxis_transform(), verticalalignment="center",
            horizontalalignment="left", clip_on=False,
        )  # fmt: skip
        if place and bar.start:
            axes.vlines(bar.start, place - 0.69, place - 0.31, color=COLOURS["muted"][0], linewidth=0.8)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, max((max(bar.start, bar.end) for bar in bars), default=0) or 1)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.grid(visible=False)
    axes.set_title(name, fontsize=9, fontweight="normal", color=COLOURS["muted"][0])


def draw_lines(axes: Axes, lines: Sequence[Line]) -> None:
    """Draws lines over everything else, markers whole at the edges, too."""
    for line in lines:
        colour, dashes, marker = line.style
        axes.plot(
            line.x, line.y, color=COLOURS[colour][0], linestyle=dashes or "none", marker=marker or None,
            label=line.label, clip_on=False, zorder=3,
        )  # fmt: skip


def show_capacities(axes: Axes, capacities: Sequence[int], *, name: Callable[[float], str], label: str) -> None:
    """Capacities in use as ticks, as many as fit; logarithmic where they span more than a decade or so."""
    if capacities[0] > 0 and capacities[-1] / capacities[0] >= _SMALLEST_LOG_RANGE:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0, right=capacities[-1] or 1)
    axes.xaxis.set_major_locator(FixedLocator(_spread(axes, capacities)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda capacity, _: name(capacity)))
    axes.set_xlabel(label)


def _spread(axes: Axes, values: Sequence[int], *, gap: float = 0.15) -> list[int]:
    """Some of the values, so that neighbours lie at least `gap` of the axis apart; the ends are kept."""
    low, high = values[0], values[-1]
    place = axes.xaxis.get_transform().transform
    start, end = place([low, high]) if high > low else (0.0, 1.0)
    chosen = [low]
    for value in values[1:]:
        from_last, to_end = (
            (place([a])[0] - place([b])[0]) / (end - start) for a, b in ((value, chosen[-1]), (high, value))
        )
        if value == high or (from_last >= gap and to_end >= gap):
            chosen.append(value)
    return chosen


def show_depths(axes: Axes) -> None:
    """Whole layers ahead as ticks."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.margins(x=0.04)
    axes.set_xlabel("layers ahead")


def show_layers(axes: Axes) -> None:
    """Whole layer numbers as ticks."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.margins(x=0.02)
    axes.set_xlabel("layer")


def png(figure: Figure) -> bytes:
    """The figure as PNG; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


class Plots:
    """Turns figures into inline SVG, each with ids of its own."""

    def __init__(self) -> None:
        self._number = 0

    def svg(self, figure: Figure, title: str, description: str) -> Markup:
        """The figure as an `<svg>` that follows the page's colours and width; titles are escaped here."""
        self._number += 1
        prefix = f"plot{self._number}"
        buffer = io.StringIO()
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=no_metadata, transparent=True)
        svg = buffer.getvalue()
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
        for name, (light, _) in COLOURS.items():
            svg = svg.replace(light, f"var(--{name})")
        body = svg[svg.index(">") + 1 :]
        view = re.search(r'viewBox="[\d. ]+"', svg[: svg.index(">")])
        if view is None:
            raise RuntimeError("matplotlib wrote an SVG without a viewBox")
        # Safe: matplotlib escapes what it draws, and titles are escaped here.
        return Markup(  # noqa: S704
            f'<svg class="plot" {view.group()} role="img" aria-labelledby="{prefix}-title {prefix}-desc" '
            'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
            f'<title id="{prefix}-title">{escape(title)}</title><desc id="{prefix}-desc">{escape(description)}</desc>'
            f"{body}"
        )
