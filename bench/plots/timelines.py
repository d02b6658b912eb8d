"""Slots, sequences and response lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from longtail.bench import analysis
from longtail.bench.plots.style import (
    INK,
    PAPER,
    RUN_COLOURS,
    change,
    extremes,
    last,
    new_figure,
    percent,
    share,
    styled,
    titled,
)

OUTCOMES = {
    "finish": ("finished", "#0072B2"),
    "length": ("finished at the cap", "#D55E00"),
    "pause": ("paused, continued later", "#E69F00"),
    "park": ("turn ended, waits for its environment", "#009E73"),
    "preempt": ("preempted", "#CC79A7"),
    "open": ("cut off", "#999999"),
}


NAMED = 12
"""Engines of a panel that its axis names, at most."""


@styled
def slot_timeline(df: pd.DataFrame) -> Figure:
    """One panel a run, one row a slot, a bar for each stay of a sample; all panels share the time axis. Of a pool the
    slots of each engine follow each other, with its name beside them."""
    facts, occupied, steps = analysis.runs(df), analysis.intervals(df), analysis.iterations(df)
    heights = [min(3.2, max(0.9, 0.14 * slots)) for slots in facts["slots"]]
    height = 1.1 + sum(heights) + 0.35 * len(heights)
    figure, panels = new_figure(height, len(facts), sharex=True, height_ratios=heights)
    shares = _bubble_shares(facts, steps)
    for axes, fact in zip(panels, analysis.rows(facts), strict=True):
        held = occupied[occupied["run"] == fact.run]
        for outcome, (_, colour) in OUTCOMES.items():
            _bars(axes, held[held["outcome"] == outcome], colour)
        _iteration_lines(axes, steps[steps["run"] == fact.run])
        axes.set_title(f"{fact.run}: {percent(shares[fact.run])} of slot time empty while generating", fontsize=9)
        most = max(fact.slots, int(held["slot"].max()) + 1 if len(held) else 0)  # more: engines came and went
        axes.set_ylim(most - 0.4, -0.6)
        if held["engine"].nunique() > 1:
            _engine_ticks(axes, held)
        else:
            axes.set_yticks([0, most - 1] if most > 1 else [0])
            axes.set_ylabel("slot")
    panels[-1].set_xlabel("time since the run's start (s); dotted: iterations")
    panels[-1].set_xlim(0, last(facts))
    seen = [outcome for outcome in OUTCOMES if (occupied["outcome"] == outcome).any()]
    handles = [Patch(color=OUTCOMES[outcome][1], label=OUTCOMES[outcome][0]) for outcome in seen]
    return titled(figure, change("Empty slot time", shares), handles)


@styled
def active_sequences(df: pd.DataFrame) -> Figure:
    """Sequences in slots over time; slots left empty while generating are shaded in the run's colour. Up to three runs
    are overlaid, more get a panel each."""
    facts, lines, steps = analysis.runs(df), analysis.active(df), analysis.iterations(df)
    apart = len(facts) > 3
    figure, panels = new_figure(0.7 + 0.8 * len(facts) if apart else 3.1, len(facts) if apart else 1, sharex=True)
    handles = []
    slots = max(1, int(facts["slots"].max()))
    for index, fact in enumerate(analysis.rows(facts)):
        colour, axes = RUN_COLOURS[index % len(RUN_COLOURS)], panels[index if apart else 0]
        line = lines[lines["run"] == fact.run]
        times = np.append(line["time"].to_numpy(float), fact.wall)
        counts = np.append(line["active"].to_numpy(float), 0.0)
        axes.plot(times, counts, drawstyle="steps-post", color=colour, linewidth=1.3)
        for step in analysis.rows(steps[steps["run"] == fact.run]):
            inside = (times >= step.generating_start) & (times <= step.generating_start + step.generating)
            shade: dict[str, Any] = {"step": "post", "color": colour, "alpha": 0.16, "linewidth": 0}
            axes.fill_between(times[inside], counts[inside], fact.slots, **shade)
        handles.append(Patch(color=colour, label=fact.run))
    for axes in panels:
        axes.axhline(slots, color=INK, linewidth=0.7, linestyle=":")
        axes.set(xlim=(0, last(facts)), ylim=(0, slots * 1.04))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3 if apart else "auto"))
    panels[-1].set_xlabel("time since the run's start (s)")
    panels[len(panels) // 2].set_ylabel(f"active sequences (of {slots})")
    handles.append(Patch(color=INK, alpha=0.16, linewidth=0, label="bubble: empty while generating"))
    return titled(figure, _mean_active(lines, facts, steps), handles)


@styled
def response_lengths(df: pd.DataFrame) -> Figure:
    """Left: histogram of the samples that ended by themselves, those at the cap apart. Right: share longer than x."""
    ended = analysis.lengths(df)
    names = list(analysis.runs(df)["run"])
    figure, (left, right) = new_figure(3.1, 1, columns=2)
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
    return titled(figure, _length_finding(ended, names), handles)


# --- pieces


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


def _engine_ticks(axes: Axes, held: pd.DataFrame) -> None:
    """Each engine's name (of many, some) at the middle of its slots, and lines between them."""
    rows = held.groupby("engine")["slot"].agg(["min", "max"]).sort_values("min")
    named = rows.iloc[:: -(-len(rows) // NAMED)]
    axes.set_yticks(((named["min"] + named["max"]) / 2).to_list(), [str(name) for name in named.index])
    axes.tick_params(axis="y", length=0)
    for first in rows["min"].to_list()[1:]:
        axes.axhline(first - 0.5, color=INK, linewidth=0.6)


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
    if number or runs <= 3:
        axes.annotate(str(number), (place, number), (0, 2), textcoords="offset points", ha="center", fontsize=8)


def _survival(axes: Axes, tokens: list[int], colour: str) -> None:
    ordered = np.sort(np.asarray(tokens, dtype=float))
    longer = 100 * (1 - np.arange(len(ordered) + 1) / max(1, len(ordered)))
    axes.plot(np.concatenate([[0.0], ordered]), longer, drawstyle="steps-post", color=colour, linewidth=1.3)
    p90 = analysis.nearest_rank(tokens, 90)
    if p90 is not None:
        axes.plot([p90], [10], marker="o", markersize=4, color=colour, clip_on=False)


# --- findings


def _bubble_shares(facts: pd.DataFrame, steps: pd.DataFrame) -> dict[str, float | None]:
    shares = {}
    for name in facts["run"]:
        own = steps[steps["run"] == name]
        shares[str(name)] = share(own["bubble_seconds"].sum(), own["slot_seconds"].sum())
    return shares


def _mean_active(lines: pd.DataFrame, facts: pd.DataFrame, steps: pd.DataFrame) -> str:
    means: dict[str, float | None] = {}
    for fact in analysis.rows(facts):
        own = steps[steps["run"] == fact.run]
        busy = float(own["slot_seconds"].sum() - own["bubble_seconds"].sum())
        generating = float(own["generating"].sum())
        means[fact.run] = share(busy, generating)
    return "Sequences in flight, mean: " + extremes(means, "{:.1f}".format)


def _length_finding(ended: pd.DataFrame, names: list[str]) -> str:
    tokens = ended.loc[ended["run"] == names[0], "tokens"].tolist() if names else []
    if not tokens:
        return "No sample finished"
    half, ninety = analysis.nearest_rank(tokens, 50), analysis.nearest_rank(tokens, 90)
    longest = sum(sorted(tokens)[-(-90 * len(tokens) // 100) :]) / max(1, sum(tokens))
    return f"Half end within {half} tokens; the longest 10 % (p90 {ninety}) hold {percent(longest)} of all tokens"
