"""Figures of a trace: titles say the finding, axes carry units, colours are safe for the colour-blind (Okabe-Ito).

Figures are matplotlib `Figure` objects that know nothing of pyplot. `save` writes one for a paper; `svg` gives markup
that takes its ink and paper from the page around it, so that one picture serves light and dark.
"""

from __future__ import annotations

import functools
import html
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from longtail.bench import analysis

Data = TypeVar("Data")
INK, PAPER = "#1b1c1d", "#fefdfc"
"""Text and lines, background and gaps. `svg` swaps both for the page's own colours, so nothing else may use them."""
RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
OUTCOMES = {
    "finish": ("finished", "#0072B2"),
    "length": ("finished at the cap", "#D55E00"),
    "pause": ("paused, continued later", "#E69F00"),
    "park": ("turn ended, waits for its environment", "#009E73"),
    "preempt": ("preempted", "#CC79A7"),
    "open": ("cut off", "#999999"),
}
PART_COLOURS = {
    "prefill": "#56B4E9",
    "decode": "#0072B2",
    "sampling": "#009E73",
    "drafting": "#8C564B",
    "scheduling": "#F0E442",
    "switch": "#D55E00",
    "grade": "#CC79A7",
    "train": "#E69F00",
    "idle": "#BBBBBB",
}
_DARK_PARTS = ("decode", "sampling", "drafting", "switch")
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


def _styled(draw: Callable[[Data], Figure]) -> Callable[[Data], Figure]:
    @functools.wraps(draw)
    def styled(data: Data) -> Figure:
        with matplotlib.rc_context(_STYLE):
            return draw(data)

    return styled


def all_figures(df: pd.DataFrame) -> dict[str, Figure]:
    """Name -> figure: slots, active, lengths, breakdown."""
    return {
        "slots": slot_timeline(df),
        "active": active_sequences(df),
        "lengths": response_lengths(df),
        "breakdown": time_breakdown(df),
    }


@_styled
def slot_timeline(df: pd.DataFrame) -> Figure:
    """One panel a run, one row a slot, a bar for each stay of a sample; all panels share the time axis."""
    facts, occupied, steps = analysis.runs(df), analysis.intervals(df), analysis.iterations(df)
    heights = [min(3.2, max(0.9, 0.14 * slots)) for slots in facts["slots"]]
    figure, panels = _figure(1.1 + sum(heights) + 0.35 * len(heights), len(facts), sharex=True, height_ratios=heights)
    shares = _bubble_shares(facts, steps)
    for axes, fact in zip(panels, analysis.rows(facts), strict=True):
        held = occupied[occupied["run"] == fact.run]
        for outcome, (_, colour) in OUTCOMES.items():
            _bars(axes, held[held["outcome"] == outcome], colour)
        _iteration_lines(axes, steps[steps["run"] == fact.run])
        axes.set_title(f"{fact.run}: {_percent(shares[fact.run])} of slot time empty while generating", fontsize=9)
        axes.set_ylim(fact.slots - 0.4, -0.6)
        axes.set_yticks([0, fact.slots - 1] if fact.slots > 1 else [0])
        axes.set_ylabel("slot")
    panels[-1].set_xlabel("time since the run's start (s); dotted: iterations")
    panels[-1].set_xlim(0, _last(facts))
    seen = [outcome for outcome in OUTCOMES if (occupied["outcome"] == outcome).any()]
    handles = [Patch(color=OUTCOMES[outcome][1], label=OUTCOMES[outcome][0]) for outcome in seen]
    return _titled(figure, _change("Empty slot time", shares), handles)


@_styled
def active_sequences(df: pd.DataFrame) -> Figure:
    """Sequences in slots over time, runs overlaid; slots left empty while generating are shaded in the run's colour."""
    facts, lines, steps = analysis.runs(df), analysis.active(df), analysis.iterations(df)
    figure, (axes,) = _figure(3.1, 1)
    handles = []
    for index, fact in enumerate(analysis.rows(facts)):
        colour = RUN_COLOURS[index % len(RUN_COLOURS)]
        line = lines[lines["run"] == fact.run]
        times = np.append(line["time"].to_numpy(float), fact.wall)
        counts = np.append(line["active"].to_numpy(float), 0.0)
        axes.plot(times, counts, drawstyle="steps-post", color=colour, linewidth=1.3)
        for step in analysis.rows(steps[steps["run"] == fact.run]):
            inside = (times >= step.generating_start) & (times <= step.generating_start + step.generating)
            shade: dict[str, Any] = {"step": "post", "color": colour, "alpha": 0.16, "linewidth": 0}
            axes.fill_between(times[inside], counts[inside], fact.slots, **shade)
        handles.append(Patch(color=colour, label=fact.run))
    slots = max(1, int(facts["slots"].max()))
    axes.axhline(slots, color=INK, linewidth=0.7, linestyle=":")
    axes.set(xlim=(0, _last(facts)), ylim=(0, slots * 1.04))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("time since the run's start (s)")
    axes.set_ylabel(f"active sequences (of {slots})")
    handles.append(Patch(color=INK, alpha=0.16, linewidth=0, label="bubble: empty while generating"))
    return _titled(figure, _mean_active(lines, facts, steps), handles)


@_styled
def response_lengths(df: pd.DataFrame) -> Figure:
    """Left: histogram of the samples that ended by themselves, those at the cap apart. Right: share longer than x."""
    ended = analysis.lengths(df)
    names = list(analysis.runs(df)["run"])
    figure, (left, right) = _figure(3.1, 1, columns=2)
    top = float(ended["tokens"].max()) if len(ended) else 1.0
    edges = np.linspace(0, top, 21)
    handles = []
    for index, name in enumerate(names):
        colour = RUN_COLOURS[index % len(RUN_COLOURS)]
        own = ended[ended["run"] == name]
        _histogram(left, own, edges, colour, index, len(names))
        _survival(right, own["tokens"].tolist(), colour)
        handles.append(Patch(color=colour, label=f"{name} ({len(own)} samples)"))
    left.set(xlabel="output tokens", ylabel="samples")
    left.yaxis.set_major_locator(MaxNLocator(integer=True))
    ticks = [tick for tick in left.get_xticks() if 0 <= tick < 0.9 * top]
    left.set_xticks([*ticks, top * 1.12], [*(f"{tick:.0f}" for tick in ticks), "at cap"])
    right.axhspan(0, 10, color=INK, alpha=0.09, linewidth=0)
    right.text(top * 0.02, 5, "the longest 10 %", ha="left", va="center", fontsize=8)
    right.set(xlim=(0, top), ylim=(0, 100), xlabel="output tokens", ylabel="samples longer than this (%)")
    return _titled(figure, _length_finding(ended, names), handles)


@_styled
def time_breakdown(df: pd.DataFrame) -> Figure:
    """One stacked bar a run: the seconds of `analysis.breakdown`."""
    parts = analysis.breakdown(df)
    figure, (axes,) = _figure(1.35 + 0.5 * len(parts), 1)
    widest = _last(parts)
    left = np.zeros(len(parts))
    rows = np.arange(len(parts))
    for part in analysis.PARTS:
        seconds = parts[part].to_numpy(float)
        axes.barh(rows, seconds, left=left, height=0.62, color=PART_COLOURS[part], edgecolor=PAPER, linewidth=0.6)
        for row, width in enumerate(seconds):
            if width > 0.055 * widest:
                colour = "white" if part in _DARK_PARTS else "black"
                share = _percent(width / parts["wall"][row])
                axes.text(left[row] + width / 2, row, share, ha="center", va="center", fontsize=8, color=colour)
        left += seconds
    axes.set_yticks(rows, list(parts["run"]))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set(xlim=(0, widest * 1.01), xlabel="wall time (s)")
    axes.spines["left"].set_visible(False)
    used = [part for part in analysis.PARTS if parts[part].sum() > 0.0005 * parts["wall"].sum()]
    handles = [Patch(color=PART_COLOURS[part], label=part) for part in used]
    shares = {row["run"]: _share(row["generate"], row["wall"]) for row in parts.to_dict("records")}
    return _titled(figure, _change("Time spent generating", shares), handles)


@_styled
def speculation(df: pd.DataFrame) -> Figure:
    """One row a batch size and drafter: batch, drafter, acceptance, break_even (missing: nothing pays), speedup.
    Left: measured acceptance against the break-even; right: expected speed-up. Both over the batch size."""
    figure, (left, right) = _figure(3.1, 1, columns=2)
    batches = sorted(df["batch"].unique())
    even = pd.to_numeric(df["break_even"]).fillna(1.0).groupby(df["batch"]).min().reindex(batches)
    left.plot(batches, even, color=INK, linewidth=1.3, linestyle="--")
    left.fill_between(batches, even, 1.0, color=INK, alpha=0.09, linewidth=0)
    handles: list[Any] = []
    names = list(dict.fromkeys(df["drafter"]))
    for index, name in enumerate(names):
        own = df[df["drafter"] == name].sort_values("batch")
        colour = RUN_COLOURS[index % len(RUN_COLOURS)]
        wider = 1.0 * (len(names) - 1 - index)  # seen where a later line lies on it
        style: dict[str, Any] = {"color": colour, "linewidth": 1.3 + wider, "marker": "o", "markersize": 3.5 + wider}
        left.plot(own["batch"], own["acceptance"], **style)
        right.plot(own["batch"], own["speedup"], **style)
        handles.append(Patch(color=colour, label=name))
    handles.append(Patch(color=INK, alpha=0.16, linewidth=0, label="above the break-even: drafting pays"))
    right.axhline(1.0, color=INK, linewidth=0.7, linestyle=":")
    left.set(ylim=(0, 1), ylabel="acceptance of a draft token")
    right.set(ylim=(0.9, max(1.5, 1.05 * float(df["speedup"].max()))), ylabel="expected speed-up (x)")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.set_xlabel("sequences that decode at once")
    return _titled(figure, _where_it_pays(df), handles)


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


# --- pieces


_HEAD = 0.56  # inches on top for the finding and the legend


def _figure(height: float, rows: int, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    ratios = options.pop("height_ratios", None)
    figure = Figure(figsize=(_WIDTH, height))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - _HEAD / height), h_pad=0.06)
    panels = figure.subplots(rows, columns, squeeze=False, height_ratios=ratios, **options)
    return figure, list(panels.flat)


def _titled(figure: Figure, title: str, handles: Sequence[Any]) -> Figure:
    """The finding on top, left-aligned, and under it one line of legend."""
    height = figure.get_size_inches()[1]
    figure.text(0.008, 1 - 0.06 / height, title, ha="left", va="top", fontsize=10.5, fontweight="bold")
    figure.legend(
        handles=list(handles),
        loc="upper left",
        bbox_to_anchor=(0.0, 1 - 0.27 / height),
        ncols=max(1, len(handles)),
        handlelength=1.0,
        handleheight=0.9,
        columnspacing=1.3,
        borderpad=0.3,
        borderaxespad=0.1,
    )
    return figure


def _bars(axes: Axes, held: pd.DataFrame, colour: str) -> None:
    if not len(held):
        return
    rows = held["slot"].to_numpy(float)
    axes.barh(
        rows,
        (held["end"] - held["start"]).to_numpy(float),
        left=held["start"].to_numpy(float),
        height=0.84,
        color=colour,
        edgecolor=PAPER,
        linewidth=0.35,
        rasterized=len(held) > 3000,
    )


def _iteration_lines(axes: Axes, own: pd.DataFrame) -> None:
    for start in own["start"].tolist()[1:]:
        axes.axvline(start, color=INK, linewidth=0.6, linestyle=":", alpha=0.7)


def _histogram(axes: Axes, own: pd.DataFrame, edges: np.ndarray[Any, Any], colour: str, index: int, runs: int) -> None:
    capped = own["reason"] == "length"
    counts, _ = np.histogram(own.loc[~capped, "tokens"].to_numpy(float), bins=edges)
    axes.stairs(counts, edges, fill=index == 0, color=colour, alpha=0.45 if index == 0 else 1.0, linewidth=1.3)
    if index == 0:
        axes.stairs(counts, edges, color=colour, linewidth=1.0)
    width = 0.08 * edges[-1] / runs
    place = edges[-1] * 1.12 + width * (index - (runs - 1) / 2)
    number = int(capped.sum())
    axes.bar(place, number, width=width * 0.9, color=colour, alpha=0.75)
    axes.annotate(str(number), (place, number), (0, 2), textcoords="offset points", ha="center", fontsize=8)


def _survival(axes: Axes, tokens: list[int], colour: str) -> None:
    ordered = np.sort(np.asarray(tokens, dtype=float))
    longer = 100 * (1 - np.arange(len(ordered) + 1) / max(1, len(ordered)))
    axes.plot(np.concatenate([[0.0], ordered]), longer, drawstyle="steps-post", color=colour, linewidth=1.3)
    p90 = analysis.nearest_rank(tokens, 90)
    if p90 is not None:
        axes.plot([p90], [10], marker="o", markersize=4, color=colour, clip_on=False)


def _last(facts: pd.DataFrame) -> float:
    """Seconds to the end of the longest run; above 0, so that an axis has a length."""
    return max(float(facts["wall"].max()), 1e-9)


# --- findings


def _bubble_shares(facts: pd.DataFrame, steps: pd.DataFrame) -> dict[str, float | None]:
    shares = {}
    for name in facts["run"]:
        own = steps[steps["run"] == name]
        shares[str(name)] = _share(own["bubble_seconds"].sum(), own["slot_seconds"].sum())
    return shares


def _mean_active(lines: pd.DataFrame, facts: pd.DataFrame, steps: pd.DataFrame) -> str:
    means = []
    for fact in analysis.rows(facts):
        own = steps[steps["run"] == fact.run]
        busy = float(own["slot_seconds"].sum() - own["bubble_seconds"].sum())
        generating = float(own["generating"].sum())
        means.append(f"{busy / generating:.1f} under {fact.run}" if generating else f"none under {fact.run}")
    return f"Sequences in flight, mean: {', '.join(means)}"


def _length_finding(ended: pd.DataFrame, names: list[str]) -> str:
    tokens = ended.loc[ended["run"] == names[0], "tokens"].tolist() if names else []
    if not tokens:
        return "No sample finished"
    half, ninety = analysis.nearest_rank(tokens, 50), analysis.nearest_rank(tokens, 90)
    longest = sum(sorted(tokens)[-(-90 * len(tokens) // 100) :]) / max(1, sum(tokens))
    return f"Half end within {half} tokens; the longest 10 % (p90 {ninety}) hold {_percent(longest)} of all tokens"


def _where_it_pays(df: pd.DataFrame) -> str:
    best = max(analysis.rows(df), key=lambda row: float(row.speedup))
    paying = df[df["speedup"] > 1.01]["batch"]
    if not len(paying):
        return "Drafting does not pay at any of these batch sizes"
    return (
        f"Drafting pays up to batch {paying.max()}; most at batch {best.batch}, {best.speedup:.1f}x with {best.drafter}"
    )


def _change(what: str, shares: Mapping[str, float | None]) -> str:
    """`Empty slot time: 41 % under sync, 12 % under token-budget`."""
    return f"{what}: " + ", ".join(f"{_percent(share)} under {run}" for run, share in shares.items())


def _share(part: float, whole: float) -> float | None:
    return float(part) / float(whole) if whole else None


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.0f} %"
