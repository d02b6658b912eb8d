"""The figure of `longtail bench staleness`, in the style of `plots`."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from longtail.bench.plots.style import INK, PAPER, RUN_COLOURS, new_figure, styled, titled

Rows = list[dict[str, Any]]
KEEP: dict[str, Any] = {"linewidth": 1.4, "marker": "o", "markersize": 3.8}
POLICY: dict[str, Any] = {"linewidth": 1.0, "linestyle": (0, (4, 2)), "alpha": 0.75}
LENGTH_STYLES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (5, 1.5, 1.5, 1.5)))


@styled
def figure(result: dict[str, Any]) -> Figure:
    """Four panels: drift over age, drift over the distance from the stale KV, what is lost to a trainer, time."""
    series = list(dict.fromkeys(row["series"] for row in result["drift"]))
    colours = {name: RUN_COLOURS[i % len(RUN_COLOURS)] for i, name in enumerate(series)}
    made, panels = new_figure(
        5.6 if result["time"] else 3.1, 2 if result["time"] else 1, columns=2 if result["time"] else 3
    )
    drift, healing, trainer = panels[:3]
    drift.set_yscale("log")
    trainer.set_yscale("log")
    for name, colour in colours.items():
        own = [row for row in result["drift"] if row["series"] == name]
        ages = [row for row in own if row["history"] == "age"]
        mixed = [row for row in own if row["history"] == "mixed"]
        _drift(drift, ages, mixed, colour)
        _healing(healing, ages[-1], colour)
        _trainer(trainer, ages, mixed, colour)
    _rounding(drift, result["reference"])
    ages_seen = sorted({row["age"] for row in result["drift"]})
    for axes in (drift, trainer):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ages_seen, [str(age) for age in ages_seen])
        axes.minorticks_off()
        axes.set_xlabel("age of the KV (versions)")
    drift.set(ylabel="KL a token (nats)", title="a  Drift")
    longest = max(c["new"] for c in result["contexts"])
    trainer.set(ylabel=f"effective samples lost, {longest} tokens", title="c  Importance weights")
    trainer.yaxis.set_major_formatter(FuncFormatter(_percent))
    drift.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _scientific(value)))
    healing.set_xscale("log", base=2)
    ticks = [2**i for i in range(int(np.log2(longest)) + 1)]
    healing.set_xticks(ticks, [str(tick) for tick in ticks])
    healing.minorticks_off()
    healing.set(ylabel="share of the policy's change", xlabel="tokens since the last stale position")
    healing.set_title(f"b  Healing, age {ages_seen[-1]}")
    healing.set_ylim(0, max(0.05, 1.1 * healing.dataLim.y1))
    healing.yaxis.set_major_formatter(FuncFormatter(_percent))
    if result["time"]:
        _time(panels[3], result)
    handles = [Line2D([], [], color=colour, **KEEP, label=name) for name, colour in colours.items()]
    handles.append(Line2D([], [], color=INK, **POLICY, label="the updates themselves"))
    if any(row["history"] == "mixed" for row in result["drift"]):
        handles.append(Line2D([], [], color=INK, **_hollow(INK), label="KV of all versions in turn"))
    return titled(made, _finding(result), handles)


def _drift(axes: Axes, ages: Rows, mixed: Rows, colour: str) -> None:
    x = [row["age"] for row in ages]
    kl = np.array([row["keep"]["kl"] for row in ages])
    error = np.array([row["keep"]["kl_se"] or 0.0 for row in ages])
    axes.plot(x, _positive(kl), color=colour, **KEEP)
    axes.fill_between(
        x, _positive(np.maximum(kl - error, kl / 10)), _positive(kl + error), color=colour, alpha=0.18, linewidth=0
    )
    axes.plot(x, _positive([row["policy"]["kl"] for row in ages]), color=colour, **POLICY)
    for row in mixed:
        axes.plot([row["mean_age"]], _positive([row["keep"]["kl"]]), color=colour, **_hollow(colour))


def _healing(axes: Axes, row: dict[str, Any], colour: str) -> None:
    parts = [part for part in row["by_distance"] if part["share_of_policy"] is not None]
    x = [np.sqrt(part["from"] * part["to"]) for part in parts]
    axes.plot(x, [part["share_of_policy"] for part in parts], color=colour, **KEEP)


def _trainer(axes: Axes, ages: Rows, mixed: Rows, colour: str) -> None:
    x = [row["age"] for row in ages]
    axes.plot(x, _positive([1 - row["keep"]["ess_run"] for row in ages]), color=colour, **KEEP)
    axes.plot(x, _positive([1 - row["policy"]["ess_run"] for row in ages]), color=colour, **POLICY)
    for row in mixed:
        axes.plot([row["mean_age"]], _positive([1 - row["keep"]["ess_run"]]), color=colour, **_hollow(colour))


def _rounding(axes: Axes, reference: Rows) -> None:
    """How far the model's own forward pass is, of the same weights: bfloat16 always, float32 where there is room."""
    low, high = axes.get_ylim()
    for row in sorted(reference, key=lambda row: -row["kl"]):
        if row["kl"] > low / 3:
            low, high = min(low, row["kl"] / 2), max(high, row["kl"] * 3)
            axes.axhline(row["kl"], color=INK, linewidth=0.8, linestyle=":")
            where = axes.get_yaxis_transform()
            place: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "va": "bottom", "fontsize": 7}
            place["bbox"] = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
            axes.annotate(f"{row['dtype']} rounding", (1.0, row["kl"]), (0, 1), where, **place)
    axes.set_ylim(low, high)


def _time(axes: Axes, result: dict[str, Any]) -> None:
    x = np.geomspace(min(result["settings"]["iteration"]), max(result["settings"]["iteration"]), 60)
    for row, style in zip(result["time"], LENGTH_STYLES, strict=False):
        extra, step = (row["wall"][f"{name}_seconds"]["p50"] for name in ("extra", "decode_step"))
        axes.plot(
            x,
            extra / (extra + x * step),
            color=INK,
            linewidth=1.3,
            linestyle=style,
            label=f"of {row['length']:,} tokens",
        )
    axes.set_xscale("log", base=2)
    ticks = list(result["settings"]["iteration"])
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    axes.set(xlabel="tokens decoded between updates, each sample", ylabel="share of the time")
    axes.set_title(f"d  Recompute of {result['settings']['live']} live samples")
    axes.legend(loc="upper right")


def _hollow(colour: str) -> dict[str, Any]:
    return {"marker": "D", "markersize": 4.5, "markerfacecolor": PAPER, "markeredgecolor": colour, "linestyle": "none"}


def _positive(values: Any) -> np.ndarray[Any, Any]:
    """Nothing where a logarithm has no place for it."""
    found = np.asarray(values, float)
    return np.where(found > 0, found, np.nan)


def _finding(result: dict[str, Any]) -> str:
    oldest = max(row["age"] for row in result["drift"])
    shares = [
        row["share_of_policy"]
        for row in result["drift"]
        if row["age"] == oldest and row["history"] == "age" and row["share_of_policy"] is not None
    ]
    if not shares:
        return "The versions do not differ: kept KV does not drift"
    low, high = (_percent(value, None) for value in (min(shares), max(shares)))
    between = low if low == high else f"{low} to {high}"
    return f"KV {oldest} versions old moves the policy by {between} of what the updates did"


def _scientific(value: float) -> str:
    return np.format_float_scientific(value, precision=1, trim="-", exp_digits=1).replace("e+0", "")


def _percent(value: float, _: Any) -> str:
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 1 or percent == 0 else f"{percent:.2g} %"
