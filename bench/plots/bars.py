"""Where time and tokens went: stacked bars, one a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from longtail.bench import analysis
from longtail.bench.plots.style import INK, PAPER, change, extremes, new_figure, percent, share, short, styled, titled

PART_COLOURS = {
    "prefill": "#56B4E9",
    "decode": "#0072B2",
    "verify": "#003F66",
    "drafting": "#8C564B",
    "sampling": "#009E73",
    "scheduling": "#F0E442",
    "save": "#E8915A",
    "restore": "#F4BE9C",
    "update": "#D55E00",
    "grade": "#CC79A7",
    "wait": "#7D4A69",
    "train": "#E69F00",
    "evaluate": "#A6761D",
    "checkpoint": "#666666",
    "idle": "#BBBBBB",
}
CAUSE_COLOURS = {
    "started_late": "#E69F00",
    "paused": "#CC79A7",
    "waiting": "#009E73",
    "switch": "#D55E00",
    "drafting": "#8C564B",
    "low_batch": "#56B4E9",
    "between": "#BBBBBB",
    "true_length": "#0072B2",
}
CAUSE_LABELS = {
    "started_late": "started late",
    "paused": "paused or preempted",
    "waiting": "waiting for grader or environment",
    "switch": "weight switch",
    "drafting": "draft overhead",
    "low_batch": "low-batch decode",
    "between": "between passes",
    "true_length": "true length",
}
LINE_COLOURS = {
    "trained": "#0072B2",
    "pending": "#56B4E9",
    "stale": "#D55E00",
    "aborted": "#E69F00",
    "surplus": "#CC79A7",
    "zero-variance": "#009E73",
    "repetition": "#8C564B",
    "failed": "#F0E442",
    "unaccounted": "#BBBBBB",
}
AGE_COLOURS = ("#0072B2", "#4E9CCB", "#9BC9E3", "#F1C08A", "#E08A3C", "#D55E00", "#8A3D00")
"""Fresh to old; what is older than the last has its colour."""


@styled
def time_breakdown(df: pd.DataFrame) -> Figure:
    """One stacked bar a run: the seconds of `analysis.breakdown`."""
    parts = analysis.breakdown(df)
    shares = {row["run"]: share(row["generate"], row["wall"]) for row in parts.to_dict("records")}
    wholes = parts["wall"].to_numpy(float)
    return _stacked(parts, PART_COLOURS, {}, wholes, "wall time (s)", change("Time spent generating", shares))


@styled
def tail_causes(df: pd.DataFrame) -> Figure:
    """One stacked bar a run: the tail's seconds of `analysis.tail_attribution`."""
    tails = analysis.tail_attribution(df)
    finding = "No run has a tail"
    if (tails["tail_seconds"] > 0).any():
        worst: Any = max(tails.to_dict("records"), key=lambda row: float(row["tail_seconds"]))
        cause = str(worst["cause"])
        weight = percent(share(worst[cause], worst["tail_seconds"]))
        others = f" (the longest of {len(tails)} runs)" if len(tails) > 1 else ""
        finding = f"Tail under {worst['run']}{others}: {weight} of it {CAUSE_LABELS[cause]}"
    wholes = tails["tail_seconds"].to_numpy(float)
    return _stacked(tails, CAUSE_COLOURS, CAUSE_LABELS, wholes, "time in the tail (s)", finding)


@styled
def token_ledger(df: pd.DataFrame) -> Figure:
    """One stacked bar a run: the tokens of `analysis.ledger`."""
    lines = analysis.ledger(df)
    wasted = {row["run"]: 1 - _useful(row) for row in lines.to_dict("records")}
    wholes = lines["generated"].to_numpy(float)
    finding = change("Generated tokens that nobody will train on", wasted)
    return _stacked(lines, LINE_COLOURS, {}, wholes, "generated tokens", finding)


@styled
def token_ages(df: pd.DataFrame) -> Figure:
    """One bar a run: shares of the trained tokens by age in versions, as `analysis.staleness` has them."""
    known, names = analysis.staleness(df), list(analysis.runs(df)["run"])
    oldest = int(known["age"].max()) if len(known) else 0
    table = known.pivot(index="run", columns="age", values="share").reindex(names).fillna(0.0)
    frame = pd.DataFrame({"run": names, **{str(age): _column(table, age, names) for age in range(oldest + 1)}})
    colours = {str(age): AGE_COLOURS[min(age, len(AGE_COLOURS) - 1)] for age in range(oldest + 1)}
    labels = {"0": "age 0 (on-policy)", **{str(age): f"{age}" for age in range(1, oldest + 1)}}
    means: dict[str, float | None] = dict.fromkeys(names)
    for name, own in known.groupby("run", sort=False):
        means[str(name)] = float((own["age"] * own["share"]).sum())
    finding = "Age of trained tokens in versions, mean: " + extremes(means, "{:.2f}".format)
    return _stacked(frame, colours, labels, np.ones(len(names)), "share of trained tokens", finding)


@styled
def counterfactuals(df: pd.DataFrame) -> Figure:
    """One panel a run: seconds of the tail that would be saved without each cause, of `analysis.what_if`; the line is
    the whole tail."""
    rows, names = analysis.what_if(df), list(analysis.runs(df)["run"])
    single = [cause for cause in analysis.REMOVABLE if (rows.loc[rows["without"] == cause, "saved_seconds"] > 0).any()]
    causes = single or ["low_batch"]
    columns = min(len(names), 4)
    lines = -(-len(names) // columns)
    height = 1.25 + lines * (0.6 + 0.24 * len(causes))
    figure, panels = new_figure(height, lines, columns, sharex=True, sharey=True)
    tails = {row.run: row.saved_seconds + row.tail_seconds for row in analysis.rows(rows)}
    for axes, name in zip(panels, names, strict=False):
        own = rows[rows["run"] == name].set_index("without")["saved_seconds"].reindex(causes)
        colours = [CAUSE_COLOURS[cause] for cause in causes]
        axes.barh(range(len(causes)), own.to_numpy(float), height=0.66, color=colours)
        axes.axvline(tails[name], color=INK, linewidth=0.8, linestyle=":")
        axes.set_title(short(name), fontsize=9)
        axes.set_yticks(range(len(causes)), [CAUSE_LABELS[cause] for cause in causes])
        axes.tick_params(axis="y", length=0)
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    panels[0].invert_yaxis()
    panels[0].set_xlim(0, 1.05 * max([*tails.values(), 1e-9]))
    figure.supxlabel("seconds of the tail saved, were it not for this cause alone (dotted: the tail)", fontsize=9)
    best = rows[rows["without"].isin(analysis.REMOVABLE)].sort_values("saved_seconds").tail(1)
    finding = "Nothing would shorten a tail"
    if len(best) and best["saved_seconds"].iloc[0] > 0:
        row = best.iloc[0]
        finding = f"Most to save: {row['saved_seconds']:.1f} s of {row['run']} ({CAUSE_LABELS[str(row['without'])]})"
    return titled(figure, finding, [])


def _useful(row: Mapping[Any, Any]) -> float:
    kept = row["trained"] + row["pending"]
    return float(kept / row["generated"]) if row["generated"] else 1.0


def _column(table: pd.DataFrame, age: int, names: Sequence[str]) -> np.ndarray:
    return table[age].to_numpy(float) if age in table.columns else np.zeros(len(names))


def _stacked(
    frame: pd.DataFrame,
    colours: Mapping[str, str],
    labels: Mapping[str, str],
    wholes: np.ndarray,
    xlabel: str,
    finding: str,
) -> Figure:
    """frame: `run` and a column for each key of colours. wholes: what the shares written into the bars are of."""
    figure, (axes,) = new_figure(1.35 + 0.42 * len(frame), 1)
    ends = np.zeros(len(frame))
    shown = frame[list(colours)].clip(lower=0.0)  # a token too many in the account is below 0: no bar can show that
    widest = max(float(shown.sum(axis=1).max()) if len(frame) else 0.0, 1e-9)
    places = np.arange(len(frame))
    for part, colour in colours.items():
        values = shown[part].to_numpy(float)
        axes.barh(places, values, left=ends, height=0.64, color=colour, edgecolor=PAPER, linewidth=0.6)
        for place, width in enumerate(values):
            if width > 0.055 * widest:
                _write(axes, ends[place] + width / 2, place, percent(share(width, wholes[place])), colour)
        ends += values
    axes.set_yticks(places, [short(run) for run in frame["run"]])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set(xlim=(0, widest * 1.01), xlabel=xlabel)
    axes.spines["left"].set_visible(False)
    total = float(shown.to_numpy(float).sum())
    used = [part for part in colours if shown[part].sum() > 0.0005 * total]
    return titled(figure, finding, [Patch(color=colours[part], label=labels.get(part, part)) for part in used])


def _write(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    """In white or black, whichever the bar's colour lets be read."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "black"
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color=ink)
