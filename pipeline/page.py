"""What the report's page is made of: cells, tables, pictures and blocks, and how numbers and lists read in words.

What they say belongs to `report` and `replay_report`. Texts stay plain here: the template escapes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from pipeline.plots import Line

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A cell of a table on the page: what it says, and below it the counts it was made of."""

    text: str
    note: str = ""
    is_best: bool = False
    is_text: bool = False
    span: int = 1


@dataclass(frozen=True)
class Grid:
    """A table on the page; the first cell of each row is its heading, and a row of one cell heads those after it.

    With a `summary` the table stays folded behind it. `query` is the SQL over the warehouse that gives its numbers.
    """

    caption: str
    head: list[list[Cell]]
    rows: list[list[Cell]]
    summary: str = ""
    query: str = ""


@dataclass(frozen=True)
class Picture:
    """Plots that share a legend and a caption; `query` is the SQL over the warehouse that gives what they draw."""

    plots: list[Markup]
    legend: list[Line]
    caption: str
    query: str = ""


@dataclass(frozen=True)
class Block:
    """One question: what the rows say about it, in sentences, drawn, and as a table."""

    heading: str
    findings: list[str]
    pictures: list[Picture]
    grids: list[Grid]


def amount(number: float | None) -> str:
    """A count, or a mean of counts; `unknown` for null."""
    if number is None:
        return "unknown"
    return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"


def known_text(number: int | None) -> str:
    """A count inside a sentence."""
    return "an unknown number" if number is None else amount(number)


def side_by_side(ratio: float | None, other: float | None) -> str:
    """`61.1 against 63.8 %`, with as many decimals as it takes to tell two different ratios apart."""
    if ratio is None or other is None:
        return f"{percent(ratio)} against {percent(other)}"
    decimals = next((n for n in range(1, 6) if f"{100 * ratio:.{n}f}" != f"{100 * other:.{n}f}"), 1)
    return f"{100 * ratio:.{decimals}f} against {100 * other:.{decimals}f}\N{NARROW NO-BREAK SPACE}%"


def percent(ratio: float | None) -> str:
    """A share with one decimal; a dash for null."""
    return "—" if ratio is None else f"{100 * ratio:.1f}\N{NARROW NO-BREAK SPACE}%"


def points(difference: float) -> str:
    """A difference of shares in percentage points, signed."""
    return f"{100 * difference:+.1f}".replace("-", "\N{MINUS SIGN}")


def sized(size_bytes: float | None) -> str:
    """Decimal units, as disks and the study count."""
    if size_bytes is None:
        return "unknown"
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:,.2f}\N{NARROW NO-BREAK SPACE}{unit}"
    return f"{size_bytes:,.0f}\N{NARROW NO-BREAK SPACE}B"


def phase_text(phase: str) -> str:
    """A scored phase inside a sentence."""
    return "every phase" if phase == "all" else f"phase {phase}"


def plural(noun: str, number: int) -> str:
    """The noun as it stands after that number."""
    return noun if number == 1 else f"{noun}s"


def listed(texts: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def sentence_case(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def described(lines: Sequence[Line], end: str) -> str:
    """The plot in words, for those who do not see it."""
    return " ".join(
        f"{line.label}: from {100 * line.y[0]:.1f} % to {100 * line.y[-1]:.1f} % {end}." for line in lines if line.y
    )
