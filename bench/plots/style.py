"""The look of every figure: colours safe for the colour-blind (Okabe-Ito), the finding as title, files and inline SVG.

Figures are matplotlib `Figure` objects that know nothing of pyplot. `save` writes one for a paper; `svg` gives markup
that takes its ink and paper from the page around it, so that one picture serves light and dark.
"""

from __future__ import annotations

import functools
import html
import io
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Data = TypeVar("Data")
INK, PAPER = "#1b1c1d", "#fefdfc"
"""Text and lines, background and gaps. `svg` swaps both for the page's own colours, so nothing else may use them."""
RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B")
_WIDTH = 7.6  # inches; text is sized for a picture shown at about this width
_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "text.parse_math": False,  # run names are text
    "svg.hashsalt": "longtail",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), PAPER),
}


def styled(draw: Callable[[Data], Figure]) -> Callable[[Data], Figure]:
    @functools.wraps(draw)
    def drawn(data: Data) -> Figure:
        with matplotlib.rc_context(_STYLE):
            return draw(data)

    return drawn


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes a figure in the format of the path's suffix (pdf, svg, png at 200 dots per inch)."""
    with matplotlib.rc_context(_STYLE):
        figure.savefig(path, dpi=200)


def svg(figure: Figure, label: str, prefix: str) -> str:
    """An inline `<svg>`: ink is `currentColor`, paper `var(--paper)`, ids start with `prefix`, alt text is `label`."""
    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", transparent=False, metadata={"Date": None, "Creator": None})
    markup = buffer.getvalue()
    markup = markup[markup.index("<svg") :]
    markup = re.sub(r"<metadata>.*?</metadata>", "", markup, flags=re.DOTALL)
    markup = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{prefix}-", markup)
    markup = markup.replace(INK, "currentColor").replace(PAPER, "var(--paper)")
    return markup.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1)


_HEAD = 0.56  # inches on top for the finding and one line of legend
_LINE = 0.165  # for each further line


class Picture(Figure):
    """A figure that a notebook shows where it is a cell's value, without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        with matplotlib.rc_context(_STYLE):
            self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def new_figure(height: float, rows: int, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """Panels below the room for a title. height: in inches."""
    ratios = options.pop("height_ratios", None)
    figure = Picture(figsize=(_WIDTH, height))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - _HEAD / height), h_pad=0.06)
    panels = figure.subplots(rows, columns, squeeze=False, height_ratios=ratios, **options)
    return figure, list(panels.flat)


def titled(figure: Figure, title: str, handles: Sequence[Any]) -> Figure:
    """The finding on top, left-aligned, and under it the legend, in as many lines as it needs."""
    columns = _legend_columns([handle.get_label() for handle in handles])
    lines = textwrap.wrap(title, 92) or [""]
    further = _LINE * (max(0, -(-len(handles) // columns) - 1) + len(lines) - 1)
    height = figure.get_size_inches()[1] + further
    figure.set_size_inches(_WIDTH, height)
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - (_HEAD + further) / height), h_pad=0.06)
    figure.text(0.008, 1 - 0.06 / height, "\n".join(lines), ha="left", va="top", fontsize=10.5, fontweight="bold")
    figure.legend(
        handles=list(handles),
        loc="upper left",
        bbox_to_anchor=(0.0, 1 - (0.27 + _LINE * (len(lines) - 1)) / height),
        ncols=columns,
        handlelength=1.0,
        handleheight=0.9,
        columnspacing=1.3,
        borderpad=0.3,
        borderaxespad=0.1,
    )
    return figure


def _legend_columns(labels: Sequence[str]) -> int:
    """The most that fit side by side."""
    for columns in range(len(labels), 1, -1):
        lines, longer = divmod(len(labels), columns)  # a legend is filled column by column, the first ones fuller
        width, place = 0.0, 0
        for column in range(columns):
            count = lines + (column < longer)
            width += 0.068 * max(map(len, labels[place : place + count])) + 0.42
            place += count
        if width <= _WIDTH - 0.1:
            return columns
    return 1


def last(facts: pd.DataFrame) -> float:
    """Seconds to the end of the longest run; above 0, so that an axis has a length."""
    return max(float(facts["wall"].max()), 1e-9)


def change(what: str, shares: Mapping[str, float | None]) -> str:
    """`Empty slot time: 41 % under sync, 12 % under token-budget`."""
    return f"{what}: {extremes(shares, percent)}"


def extremes(values: Mapping[str, float | None], form: Callable[[float], str]) -> str:
    """A value a run; of more than three runs the smallest and the largest."""
    known = {run: value for run, value in values.items() if value is not None}
    if len(values) <= 3 or not known:
        return ", ".join(f"{'none' if v is None else form(v)} under {run}" for run, v in values.items()) or "none"
    low, high = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    return f"from {form(known[low])} under {low} to {form(known[high])} under {high}"


def share(part: float, whole: float) -> float | None:
    return float(part) / float(whole) if whole else None


def percent(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.0f} %"


def short(name: str) -> str:
    """A run's name where there is little room."""
    return name if len(name) <= 28 else f"{name[:12]}\u2026{name[-15:]}"
